"""A point of two ranks on a machine with strangers: what it listens on, what lies in shared folders, and what a stranger can do with it."""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from caraml.results.store import RECORD, read_record
from caraml.suite.model import Policy
from tests.conftest import MakePoint
from tests.security.users import ROOT, Person, interpreter
from tests.waiting import until

SHARED = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
LISTENING = "0A"


def processes(uid: int) -> list[int]:
    """Processes of a user."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid == uid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def sockets_of(pids: list[int]) -> set[str]:
    """Inodes of the sockets that processes have open."""
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    return found


def doors(pids: list[int]) -> Iterator[tuple[str, int]]:
    """Address and port of everything that processes listen on; of UNIX sockets, the name and 0."""
    inodes = sockets_of(pids)
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in _text(Path(f"/proc/net/{table}")).splitlines()[1:]:  # a kernel without IPv6 has no table of it
            parts = line.split()
            address, _, port = parts[1].partition(":")
            if parts[9] in inodes and (parts[3] == LISTENING or table.startswith("udp")):
                words = bytes.fromhex(address)
                host = b"".join(
                    words[place : place + 4][::-1] for place in range(0, len(words), 4)
                )  # each of four bytes as the host has it
                yield str(ipaddress.ip_address(host)), int(port, 16)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)  # a name may have spaces
        if parts[6] in inodes and len(parts) > 7:
            yield parts[7], 0


def has_ipv6() -> bool:
    """Whether this machine has an own address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        warnings.warn("not tested: what listens on IPv6, as this machine has no address ::1", stacklevel=2)
        return False
    return True


def test_every_kind_of_door_is_found() -> None:
    newer = ((socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)), (socket.AF_INET6, socket.SOCK_DGRAM, ("::", 0)))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="two doors-", dir="/tmp"))  # a socket's path must be short
        opened = []
        for family, kind, address in (
            *((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.2", 0)), (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))),
            *((socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/s"), (socket.AF_UNIX, socket.SOCK_DGRAM, "\0abstract-door")),
            *(newer if has_ipv6() else ()),
        ):
            one = stack.enter_context(socket.socket(family, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            opened.append(one.getsockname())
        found = set(doors([os.getpid()]))
    for name in opened:
        known = name[:2] if isinstance(name, tuple) else (name.decode().replace("\0", "@") if isinstance(name, bytes) else name, 0)
        assert known in found, (known, found)


def in_shared_folders(uid: int) -> dict[Path, int]:
    """What a user has in folders where everybody may write, with its kind and rights."""
    found = {}
    for path in (path for folder in SHARED for path in folder.iterdir()):
        with suppress(FileNotFoundError):  # gone since
            if (status := path.lstat()).st_uid == uid:
                found[path] = status.st_mode
    return found


class Seen:
    """Everything that a user listened on, and had in shared folders, at any time when somebody looked."""

    def __init__(self, uid: int) -> None:
        self._uid, self._before = uid, in_shared_folders(uid)
        self.doors: set[tuple[str, int]] = set()
        self.files: dict[Path, int] = {}

    def look(self) -> None:
        self.doors.update(doors(processes(self._uid)))
        for path, mode in in_shared_folders(self._uid).items():
            if path not in self._before:
                self.files[path] = self.files.get(path, 0) | mode  # rights that it had once are kept

    def left(self) -> set[str]:
        """Names of what is there still."""
        return {path.name for path in in_shared_folders(self._uid).keys() - self._before.keys()}


TRY = """
import json, os, socket, sys
done = []
for path in json.load(sys.stdin):
    for how, act in {
        "read": lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK),
        "write": lambda: os.open(path, os.O_WRONLY | os.O_NONBLOCK),
        "list": lambda: os.listdir(path),
        "make": lambda: os.mkdir(path + "/planted"),
        "rename": lambda: os.rename(path, path + "-taken"),
        "remove": lambda: os.unlink(path),
        "connect": lambda: socket.socket(socket.AF_UNIX).connect(path),
    }.items():
        try:
            act()
        except OSError:
            continue
        done.append([how, path])
print(json.dumps(done))
"""
"""Does everything to every file of a list that its user can; says what succeeded."""


SCRIPT_OF = """
import sys
from pathlib import Path
from caraml.base.files import write_file
from caraml.launch.script import SCRIPT, Recipe
from caraml.results.store import Store
from caraml.suite.model import Point
from caraml.system.model import Site
point = Point.model_validate_json(sys.argv[1])
folder = Store(Path("results")).new_attempt(point).resolve()
write_file(folder / SCRIPT, Recipe(point, folder, 2, Site()).text(), mode=0o755)
print(folder / SCRIPT)
"""


def test_a_stranger_can_do_nothing_with_a_point_of_two_ranks(people: tuple[Person, Person], make_point: MakePoint) -> None:
    victim, stranger = people
    policy = Policy(target=1e-6, min_seconds=900, max_seconds=1000, idle_seconds=0)
    point = make_point(workload="known", devices=2, global_batch=4, params={"device": "asynchronous", "step_seconds": 0.2}, measure=policy)
    made = victim.python(SCRIPT_OF, point.model_dump_json())
    script = Path(made.stdout.strip())
    folder = script.parent
    seen = Seen(victim.uid)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    attack = stranger.start([interpreter() or "", str(ROOT / "tests/security/stranger.py"), str(stranger.home)], **pipes)
    run = victim.start(["bash", str(script)], variables={"CARAML_POWER": "fake:constant"})
    try:
        until(lambda: seen.look() or '"measure"' in _text(folder / "progress.jsonl") or run.poll() is not None, "a window", 300)
        found = sorted(set(doors(processes(victim.uid))))
        assert [door for door in found if door[1]] and seen.files, "ranks that speak to each other, and the folder where they met"
        entries = [str(entry) for path in seen.files for entry in (path, *path.rglob("*"))]
        tried = stranger.run([interpreter() or "", "-c", TRY], told=json.dumps([*entries, "/etc/passwd"]))
        assert json.loads(tried.stdout) == [["read", "/etc/passwd"]], "a stranger can do nothing with any of them"
        assert attack.stdin is not None and attack.stdout is not None
        assert attack.stdout.readline() == "ready\n"
        print(json.dumps([door for door in found if door[1]]), file=attack.stdin, flush=True)
        answers = json.loads(attack.stdout.readline())
        assert answers.pop("a store of its own") == ["1 keys"], "what is tried opens a store that anybody may"
        print(sorted(seen.doors), {str(path): oct(mode) for path, mode in seen.files.items()}, answers)
        assert not [answer for answer in answers.values() if "keys" in answer[1]], "no store that a stranger can open"
        for pid in processes(victim.uid):  # enough is measured
            if "caraml.worker" in (words := _text(Path(f"/proc/{pid}/cmdline"))) and "caraml.engine.start" not in words:
                os.kill(pid, signal.SIGUSR1)
        until(lambda: seen.look() or run.poll() is not None, "the end of the point", 300)
        hosts = {host for host, port in seen.doors if port}
        assert all(ipaddress.ip_address(host).is_loopback for host in hosts), seen.doors
        assert [name for name, port in seen.doors if not port] == [], "no UNIX socket that others may find, abstract or not"
        for path, mode in seen.files.items():
            assert stat.S_ISDIR(mode) and stat.S_IMODE(mode) == 0o700, (path, oct(mode))
            checked = path.name == f"caraml-{victim.uid}"  # taken only where it is the victim's own
            assert checked or re.search(r"[0-9a-f]{16}|[a-z0-9_]{8}$", path.name), f"{path} can be guessed"
        record = read_record(folder / RECORD)
        assert (run.returncode, record.status) == (0, "ok"), record.reason
        assert list((stranger.home / "loot").iterdir()) == [], "nothing of the stranger was run"
        assert seen.left() <= {f"caraml-{victim.uid}"}, "nothing is left behind but the user's own folder"
    finally:
        shutil.rmtree(f"/tmp/caraml-{victim.uid}", ignore_errors=True)
        attack.kill()
        attack.communicate()
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


IMPOSTOR = """
import os, pathlib, pickle, sys
import torch
import torch.distributed as dist
from caraml.engine.ranks import Ranks
from caraml.base.errors import EnvironmentUnfitError

if os.environ["RANK"] == "1":  # came to the door first, but cannot read what is behind it
    true = pathlib.Path.read_bytes
    pathlib.Path.read_bytes = lambda path: b"a guess" if path.name == "secret" else true(path)
try:
    Ranks.from_environment(torch.device("cpu"))
except EnvironmentUnfitError as error:
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(error))
"""


def test_who_does_not_know_the_secret_is_no_rank(tmp_path: Path) -> None:
    _start(tmp_path, IMPOSTOR)
    said = (tmp_path / "0").read_text()
    assert "somebody else has taken the connection of rank 0 with rank 1" in said and "SECURITY.md" in said


GATHER = """
import dataclasses, json, os, pathlib, pickle, sys
import torch
import torch.distributed as dist
from caraml.engine.ranks import Ranks
from caraml.engine.steps import StepRow, StepTable
from caraml.engine.steps import EpochRow, RankSummary

ranks = Ranks.from_environment(torch.device("cpu"))
rank = ranks.rank
row = StepRow("measure", 1.5 + rank, 0.1, 0.0)
times = dict.fromkeys([f.name for f in dataclasses.fields(EpochRow) if f.type == "float"], 1.5)
epochs = [EpochRow(number=1, steps=7, cut=False, loss=float("nan"), **times)]
mine = RankSummary(1.0, 2.0 + rank, StepTable([row] * (rank + 1)), [0.1, float("inf")], 0.3, 0.4, 0, ["a"] * rank, epochs)
found = [RankSummary.from_data(data) for data in ranks.gather(mine.to_data())]
assert [list(one.rows) for one in found] == [[StepRow("measure", 1.5 + r, 0.1, 0.0)] * (r + 1) for r in range(2)]
assert [one.end for one in found] == [2.0, 3.0] and found[1].losses == [0.1, float("inf")] and found[1].flags == ["a"]
assert found[1].epochs[0].loss != found[1].epochs[0].loss and found[1].epochs[0].number == 1 and type(found[1].epochs[0]) is EpochRow
assert ranks.gather(None if rank else 5) == [5, None] and ranks.gather({"a": [rank, "é"]}) == [{"a": [0, "é"]}, {"a": [1, "é"]}]
try:
    ranks.gather(object())
except TypeError:
    pathlib.Path(sys.argv[1], str(rank)).touch()


class Owned:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}/owned",)


try:
    dist.all_gather_object([None, None], Owned())
    sys.exit("it was unpickled")
except pickle.UnpicklingError as error:
    assert "system" in str(error)
"""


def test_ranks_tell_each_other_structures_of_numbers_and_text(tmp_path: Path) -> None:
    _start(tmp_path, GATHER)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"0", "1"}, "what is neither is refused by who would send it"
    assert "owned" not in names, "and what torch itself pickles between ranks is refused by who gets it"


def _start(folder: Path, program: str) -> None:
    # As a worker ends: torch's threads may still be on their way out, and an interpreter that is taken down around them aborts.
    (folder / "told.py").write_text(program + "\nos._exit(0)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "caraml.engine.start", "--devices=2", "told", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


PICKLING = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")


def test_nothing_of_ours_pickles_between_ranks_or_starts_torchrun() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Attribute) and PICKLING.match(node.attr)), path
            assert not (isinstance(node, ast.Constant) and node.value == "torch.distributed.run"), path
