"""Browse the campaigns below a folder: they are found by looking, and shown by a web server for one user of one machine, read-only.

It listens on the loopback interface only. Other users of the machine can reach that as well, and so can pages of other sites in the user's
browser; hence every address begins with a secret that only the terminal shows, requests must name this machine as their host (a site cannot
rebind its name to it), and nothing but reading is possible. No path is ever made from an address: what may be asked for is looked up among
what was found.
"""

from __future__ import annotations

import errno
import hmac
import io
import os
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

from caraml.analysis.estimate import time_of
from caraml.analysis.table import raw_file
from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError
from caraml.base.limits import opened
from caraml.report.document import outcome
from caraml.report.grouping import machine
from caraml.report.page import page, policy, style, templates
from caraml.results.record import Record
from caraml.results.store import RECORD, Store

DEEPEST = 6
"""Folders below the root in which results are looked for."""
EVERYTHING = "all"
PORT = 8642
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HTML = "text/html; charset=utf-8"
TYPES = {".json": "application/json", ".csv": "text/csv; charset=utf-8"}
SECONDS = 30
"""Time after which a silent connection is closed."""
MOST_WAITING = 16
"""Connections at once that have not shown the secret yet; a browser opens a few."""


@dataclass(frozen=True)
class CampaignRecords:
    """The records of one suite, or all, of one results folder."""

    folder: str
    """Of the results, below the root; ``.`` for the root itself."""
    suite: str
    store: Store
    records: list[Record]

    @property
    def title(self) -> str:
        name = "All results" if self.suite == EVERYTHING else self.suite
        return name if self.folder == "." else f"{name} in {self.folder}"

    @property
    def newest(self) -> tuple[tuple[str, int, float | None], ...]:
        """Changes with every new result, and where a loop that went on has written its own again."""
        return tuple((record.key, record.attempt, record.value("runtime")) for record in self.records)

    @property
    def facts(self) -> tuple[str, str, str]:
        """Outcome, machines and date of the last result, for a list."""
        machines = "; ".join(dict.fromkeys(machine(record.point) for record in self.records))
        last = max((record.started_at for record in self.records), key=time_of, default="")
        return outcome(self.records), machines, last[:16].replace("T", " ")


class ResultsTree:
    """All results below a folder. Links out of it are not followed. Raises ``InputError`` if the folder is missing."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise InputError(f"{root} is not a folder", "caraml report --serve --out FOLDER, where FOLDER holds results")
        self.root = root.resolve()
        self.faults: list[str] = []
        """What could not be read when the campaigns were last listed."""

    def campaigns(self) -> list[CampaignRecords]:
        """Every suite of every results folder, and all results where they are more than one suite."""
        found, self.faults = [], []
        for folder, store in self.stores().items():
            try:
                suites = store.suites()
                found += [self._campaign(folder, store, suite) for suite in ([EVERYTHING] if len(suites) != 1 else []) + suites]
            except (InputError, OSError) as error:  # some may be of others, who have closed them
                self.faults.append(str(error).splitlines()[0].replace(f"{self.root}/", ""))
        return found

    def find(self, folder: str, suite: str) -> CampaignRecords | None:
        store = self.stores().get(folder)
        if store is None or suite not in (EVERYTHING, *store.suites()):
            return None
        return self._campaign(folder, store, suite)

    def stores(self) -> dict[str, Store]:
        """Results folders by their path below the root."""
        return {path.relative_to(self.root).as_posix(): Store(path) for path in results_below(self.root)}

    def _campaign(self, folder: str, store: Store, suite: str) -> CampaignRecords:
        records = store.records(None if suite == EVERYTHING else suite)
        return CampaignRecords(folder, suite, store, [record for record in records if self.holds(store.folder(record) / RECORD)])

    def holds(self, path: Path) -> bool:
        """Whether a file is really below the root, whatever links lead to it."""
        return path.resolve().is_relative_to(self.root)


def results_below(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """Every results folder: this one, or those below it, in the order of their names. Links are not followed, and folders below it that are
    closed to this user are left out."""
    points, inside = folder / "points", list[str]()
    try:
        if points.is_dir() and not points.is_symlink():
            yield folder
            return
        if deepest:
            with os.scandir(folder) as entries:
                inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
    except PermissionError:
        if deepest == DEEPEST:
            raise
    for name in inside:
        yield from results_below(folder / name, deepest - 1)


def raw_path(tree: ResultsTree, folder: str, key: str, name: str) -> Path | None:
    """The record or a raw file of a point's newest attempt, or ``None`` if that is not what the names say."""
    store = tree.stores().get(folder)
    record = store.latest(key) if store is not None and key.isalnum() else None
    if store is None or record is None or record.key != key:
        return None
    files = {record.files[kind]: path for kind in record.files if (path := raw_file(store, record, kind)) is not None}
    path = store.folder(record) / RECORD if name == RECORD else files.get(name)
    return path if path is not None and path.is_file() and not path.is_symlink() and tree.holds(path) else None


class NotFoundError(Exception):
    """Nothing has this address."""


class Server(ThreadingHTTPServer):
    """Serves the campaigns of a tree on the loopback interface. Raises ``EnvironmentUnfitError`` if the port is taken."""

    daemon_threads = True

    def __init__(self, tree: ResultsTree, port: int = PORT) -> None:
        self.tree = tree
        self.secret = secrets.token_urlsafe(16)
        self._pages: dict[tuple[str, str], tuple[object, bytes]] = {}
        self._drawing = threading.Lock()
        self.waiting: dict[Any, None] = {}
        """Connections that have not shown the secret yet, oldest first."""
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "is in use" if error.errno == errno.EADDRINUSE else "is not for ordinary users"
            raise EnvironmentUnfitError(f"port {port} {reason}", "caraml report --serve --port 0 takes a free one") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Where very many connections wait, as another user of the machine can have them do, the oldest are ended:
        who knows the address asks at once."""
        self.waiting[request] = None
        for oldest in list(self.waiting)[:-MOST_WAITING]:
            self.waiting.pop(oldest, None)
            with suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.waiting.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the list of campaigns."""
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"

    @property
    def hosts(self) -> set[str]:
        """What a request may call this machine."""
        return {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def index(self) -> bytes:
        found = [(one, f"/{self.secret}/page/{quote(one.folder, safe='')}/{quote(one.suite, safe='')}") for one in self.tree.campaigns()]
        template = templates().get_template("index.html.jinja")
        return template.render(root=self.tree.root.name, campaigns=found, faults=self.tree.faults, policy=policy(), style=style()).encode()

    def campaign(self, folder: str, suite: str) -> bytes:
        """The page of a campaign, drawn again only when a result is new."""
        campaign = self.tree.find(folder, suite)
        if campaign is None:
            raise NotFoundError
        with self._drawing:
            kept = self._pages.get((folder, suite))
            if kept is None or kept[0] != campaign.newest:
                home, raw = f"/{self.secret}/", f"/{self.secret}/raw/{quote(folder, safe='')}"
                text = page(campaign.store, campaign.records, campaign.title, home=home, raw=raw)
                kept = self._pages[folder, suite] = (campaign.newest, text.encode())
        return kept[1]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "caraml"
    sys_version = ""
    timeout = SECONDS

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what the standard library refuses, in our words: an unknown method above all."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only reading is possible here\n", allow="GET, HEAD")
        else:
            self._refuse(HTTPStatus(code), f"{HTTPStatus(code).phrase}\n")

    def _answer(self, body: bool) -> None:
        if self.headers.get_all("Host") is None or set(self.headers.get_all("Host") or []) - self.server.hosts:
            return self._refuse(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 and localhost only\n", body)
        try:
            found, kind = self._found()
            with opened(found) if isinstance(found, Path) else nullcontext((io.BytesIO(found), len(found))) as (content, size):
                return self._send(HTTPStatus.OK, content, kind, body, size=size)
        except NotFoundError:
            return self._refuse(HTTPStatus.NOT_FOUND, "nothing here; the terminal shows the address\n", body)
        except (CaramlError, PermissionError, NotADirectoryError) as error:
            text = str(error).splitlines()[0].replace(f"{self.server.tree.root}/", "")
            return self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, f"{text}\n", body)

    def _found(self) -> tuple[bytes | Path, str]:
        """What an address stands for, and of which kind it is."""
        secret, *parts = [unquote(part, errors="replace") for part in urlsplit(self.path).path.removeprefix("/").split("/")]
        if not hmac.compare_digest(secret.encode(), self.server.secret.encode()):
            raise NotFoundError
        self.server.waiting.pop(self.connection, None)
        routes: dict[tuple[str, int], Callable[..., tuple[bytes | Path, str]]] = {
            ("", 1): lambda: (self.server.index(), HTML),
            ("page", 3): lambda folder, suite: (self.server.campaign(folder, suite), HTML),
            ("raw", 4): self._raw,
        }
        route = routes.get((parts[0] if parts else "-", len(parts)))
        if route is None:
            raise NotFoundError
        return route(*parts[1:])

    def _raw(self, folder: str, key: str, name: str) -> tuple[Path, str]:
        path: Path | None = raw_path(self.server.tree, folder, key, name)
        if path is None:
            raise NotFoundError
        return path, TYPES.get(path.suffix, "application/octet-stream")

    def _refuse(self, status: HTTPStatus, text: str, body: bool = True, allow: str = "") -> None:
        content = text.encode()
        self._send(status, io.BytesIO(content), "text/plain; charset=utf-8", body, size=len(content), allow=allow)

    def _send(self, status: HTTPStatus, content: BinaryIO, kind: str, body: bool, *, size: int, allow: str = "") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        # A page carries its own policy, with the hash of its script; raw files and refusals run nothing.
        self.send_header(
            "Content-Security-Policy", "frame-ancestors 'none'" if kind == HTML else f"{policy()}; frame-ancestors 'none'; sandbox"
        )
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        if body:
            shutil.copyfileobj(content, self.wfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal shows the address."""
