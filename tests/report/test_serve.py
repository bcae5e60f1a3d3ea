"""The server for browsing: it shows campaigns, and nothing else to anybody else."""

from __future__ import annotations

import http.client
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from record_factory import HOSTILE, full_store, make_point, make_record, save

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.metrics.model import Metric
from caraml.report.server import MOST_WAITING, ResultsTree, Server, raw_path
from caraml.results.store import Store, write_record

SECRET = "only for the owner"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two campaigns, a file beside them that is nobody's business, and links that lead out."""
    tmp_path = tmp_path_factory.mktemp("drawn")
    full_store(tmp_path / "runs" / "laptop")
    save(Store(tmp_path / "runs" / "cluster" / "jedi"), make_record(make_point(suite="llm")))
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "runs" / "notes.txt").write_text(SECRET)
    save(Store(tmp_path / "elsewhere"), make_record(make_point(benchmark="hidden")))
    (tmp_path / "runs" / "link").symlink_to("../elsewhere")
    return tmp_path


@pytest.fixture
def root(drawn: Path, tmp_path: Path) -> Path:
    """A copy for each test."""
    shutil.copytree(drawn, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "runs"


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    with Server(ResultsTree(root), port=0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    response = connection.getresponse()
    return response.status, response.read().decode("utf-8", "replace"), response.headers


def home(server: Server) -> str:
    return f"/{server.secret}/"


@pytest.mark.slow
def test_campaigns_are_listed_and_shown(server: Server) -> None:
    status, text, headers = ask(server, home(server))
    assert status == 200
    assert "cluster/jedi" in text
    assert "laptop" in text
    assert "elsewhere" not in text
    assert ">link<" not in text
    assert SECRET not in text
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, text, _ = ask(server, f"{home(server)}page/laptop/quick")
    assert status == 200
    assert "40,790 ± 5 % token/s" in text
    assert f'href="{home(server)}">All campaigns</a>' in text
    assert ask(server, f"{home(server)}page/cluster%2Fjedi/all")[0] == 200


def test_a_page_is_drawn_again_only_for_new_results(server: Server, root: Path) -> None:
    first = server.campaign("cluster/jedi", "all")
    assert server.campaign("cluster/jedi", "all") is first
    save(Store(root / "cluster" / "jedi"), make_record(make_point(benchmark="newer")))
    assert b"newer" in server.campaign("cluster/jedi", "all")


def test_a_page_is_drawn_again_for_a_record_that_was_written_again(server: Server, root: Path) -> None:
    """As by a loop of one's own that went on after its window."""
    store = Store(root / "cluster" / "jedi")
    first, record = server.campaign("cluster/jedi", "all"), store.records()[0]
    metrics = {**record.metrics, "runtime": Metric(value=(record.value("runtime") or 0.0) + 60, unit="s")}
    write_record(store.folder(record), record.model_copy(update={"metrics": metrics}))
    assert server.campaign("cluster/jedi", "all") is not first


def test_raw_files_of_results_can_be_fetched(server: Server, root: Path) -> None:
    record = Store(root / "laptop").records()[0]
    status, text, headers = ask(server, f"{home(server)}raw/laptop/{record.key}/record.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert record.key in text
    assert "sandbox" in headers["Content-Security-Policy"]
    status, text, headers = ask(server, f"{home(server)}raw/laptop/{record.key}/steps.parquet", "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 100


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/wrong/",
        "{home}../",
        "{home}page/../../../secret.txt/all",
        "{home}page/..%2Felsewhere/all",
        "{home}page/%2e%2e/all",
        "{home}page/link/all",
        "{home}page/laptop/..%2F..%2Fsecret",
        "{home}page/laptop/no-such-suite",
        "{home}page/laptop",
        "{home}raw/laptop/{key}/../../../../secret.txt",
        "{home}raw/laptop/{key}/..%2F..%2F..%2Fnotes.txt",
        "{home}raw/laptop/{key}/run.sh",
        "{home}raw/laptop/{key}/%00",
        "{home}raw/laptop/*/record.json",
        "{home}raw/..%2Felsewhere/{hidden}/record.json",
        "{home}raw/link/{hidden}/record.json",
        "{home}notes.txt",
        "/notes.txt",
        "//etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_nothing_else_has_an_address(server: Server, root: Path, path: str) -> None:
    key = Store(root / "laptop").records()[0].key
    hidden = Store(root.parent / "elsewhere").records()[0].key
    status, text, _ = ask(server, path.format(home=home(server), key=key, hidden=hidden) or "/")
    assert status == 404
    assert SECRET not in text
    assert key not in text


def test_links_out_of_the_folder_are_not_followed(server: Server, root: Path) -> None:
    store = Store(root / "laptop")
    record = store.records()[0]
    folder = store.folder(record)
    (folder / "steps.parquet").unlink()
    (folder / "steps.parquet").symlink_to(root.parent / "secret.txt")
    assert ask(server, f"{home(server)}raw/laptop/{record.key}/steps.parquet")[0] == 404
    outside = root.parent / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    assert ask(server, f"{home(server)}raw/laptop/{record.key}/record.json")[0] == 404
    assert record.key not in ask(server, f"{home(server)}page/laptop/all")[1]
    shelf = ResultsTree(root)
    assert raw_path(shelf, "laptop", record.key, "record.json") is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost.evil.example:{port}", "[::1]:{port}", ""])
def test_other_names_for_this_machine_are_refused(server: Server, host: str) -> None:
    status, text, _ = ask(server, home(server), host=host.format(port=server.server_port) or "")
    assert status == 403
    assert server.secret not in text
    assert ask(server, home(server), host=f"localhost:{server.server_port}")[0] == 200


def test_two_hosts_are_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
        own = f"127.0.0.1:{server.server_port}"
        raw.sendall(f"GET {home(server)} HTTP/1.1\r\nHost: {own}\r\nHost: evil.example\r\n\r\n".encode())
        assert b" 403 " in raw.recv(200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_only_reading_is_possible(server: Server, root: Path, method: str) -> None:
    before = sorted(root.rglob("*"))
    status, _, headers = ask(server, home(server), method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert sorted(root.rglob("*")) == before


@pytest.mark.slow
def test_serving_writes_nothing(server: Server, root: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    ask(server, home(server))
    ask(server, f"{home(server)}page/laptop/quick")
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


def test_connections_that_never_ask_are_bounded_and_keep_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send a byte at a time, so that none is ever silent."""
    monkeypatch.setattr("caraml.report.server._Handler.timeout", 3600)
    held = []
    for _ in range(3 * MOST_WAITING):
        held.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=120))
        held[-1].sendall(b"G")
    assert ask(server, home(server))[0] == 200
    for one in held[: 2 * MOST_WAITING]:
        with suppress(ConnectionResetError), one:
            assert one.recv(1) == b""
    assert len(server.waiting) <= MOST_WAITING
    for one in held[2 * MOST_WAITING :]:
        one.close()


def test_it_listens_on_the_loopback_interface_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    addresses = {"127.0.0.2"}  # Linux answers there where a server listens on all interfaces
    with suppress(socket.gaierror):  # a host whose name nobody knows
        addresses |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in addresses:
        with pytest.raises(OSError):  # refused, unreachable, too late, or what a firewall makes of it
            socket.create_connection((address, server.server_port), timeout=2)


def test_a_taken_port_says_so(server: Server, root: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match=f"port {server.server_port} is in use(.|\n)*--port 0"):
        Server(ResultsTree(root), server.server_port)


def test_a_broken_record_costs_its_campaign_only(server: Server, root: Path) -> None:
    store = Store(root / "cluster" / "jedi")
    (store.folder(store.records()[0]) / "record.json").write_text(SECRET)
    status, text, _ = ask(server, home(server))
    assert status == 200
    assert "laptop" in text
    status, text, _ = ask(server, f"{home(server)}page/cluster%2Fjedi/all")
    assert status == 200
    assert "cannot be read: points/" in text and "not a CARAML record" in text
    assert SECRET not in text
    assert str(root) not in text


def test_hostile_folder_names_stay_text(tmp_path: Path) -> None:
    save(Store(tmp_path / HOSTILE.replace("/", "_")), make_record())
    with Server(ResultsTree(tmp_path), port=0) as server:
        text = server.index().decode()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        ResultsTree(tmp_path / "nothing")
