"""What starts a point's processes: their variables, the folder where they meet, and how they end together."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from caraml.base.files import write_file
from caraml.engine import start as starter

TELL = """
import json, os, pathlib, sys
meet = pathlib.Path(os.environ["CARAML_MEET"])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CARAML_MEET", "OMP_NUM_THREADS")
names += ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
told = {name: os.environ.get(name) for name in names}
told["mode"], told["secret"] = oct(meet.stat().st_mode & 0o777), (meet / "secret").read_bytes().hex()
pathlib.Path(sys.argv[1], told["RANK"]).write_text(json.dumps(told))
"""
SECOND_ENDS = """
import os, pathlib, signal, sys, time
if os.environ["RANK"] == "1":
    while not pathlib.Path(sys.argv[1], "waits").exists(): time.sleep(0.01)
    {how}
pathlib.Path(sys.argv[1], "waits").touch()
time.sleep(900)
"""

SLEEP = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"pid{os.getpid()}").touch()
time.sleep(900)
"""


def start(folder: Path, program: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "told.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **variables}
    command = [sys.executable, "-m", "caraml.engine.start", *options, "told", str(folder)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]"))]


def test_ranks_know_who_they_are_and_meet_where_nobody_else_can_look(tmp_path: Path) -> None:
    environment = {"SLURM_PROCID": "7", "OMP_NUM_THREADS": "3", "CARAML_MEET": str(tmp_path)}  # of a job around it: not of this point
    assert start(tmp_path, TELL, "--devices=2", **environment).wait(300) == 0
    first, second = told(tmp_path)
    assert (first["RANK"], second["RANK"]) == ("0", "1") == (first["LOCAL_RANK"], second["LOCAL_RANK"])
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2" and first["OMP_NUM_THREADS"] == "3"
    assert first["CARAML_MEET"] == second["CARAML_MEET"] != str(tmp_path) and first["mode"] == "0o700"
    assert first["secret"] == second["secret"] and len(first["secret"]) == 64
    assert not Path(first["CARAML_MEET"]).exists(), "the folder goes with the point"
    if sys.platform.startswith("linux"):
        assert first["GLOO_SOCKET_IFNAME"] == first["NCCL_SOCKET_IFNAME"] == "lo"


def test_a_node_of_several_has_its_part_of_the_ranks(tmp_path: Path) -> None:
    meet = tmp_path / "meet"
    meet.mkdir(mode=0o700)
    (meet / "secret").write_bytes(b"of the script")
    environment = {"SLURM_PROCID": "1", "CARAML_MEET": str(meet), "GLOO_SOCKET_IFNAME": "ib0"}
    assert start(tmp_path, TELL, "--devices=2", "--nodes=3", **environment).wait(300) == 0
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told(tmp_path)] == [("2", "0", "6"), ("3", "1", "6")]
    assert told(tmp_path)[0]["CARAML_MEET"] == str(meet) and told(tmp_path)[0]["GLOO_SOCKET_IFNAME"] == "ib0"
    assert meet.exists(), "it belongs to all nodes"


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 .* ended with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 .* was killed by SIGKILL"),
    ],
)
def test_the_first_that_fails_ends_the_others(tmp_path: Path, how: str, code: int, words: str) -> None:
    process = start(tmp_path, SECOND_ENDS.format(how=how), "--devices=2")
    _, said = process.communicate(timeout=300)
    assert process.returncode == code
    assert re.search(words, said), said


class SeesTheOtherFirst(starter.Starter):
    """Rank 1 is killed and rank 0 fails for want of it, which is seen before, as on a busy machine."""

    def _start(self, local: int, meet: str) -> None:
        ends = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)" if local else "raise SystemExit(1)"
        self._children[local] = subprocess.Popen([sys.executable, "-c", ends])
        self._children[local].wait()
        if local == 0:
            self._events.put((local, 1))


def test_a_rank_that_was_killed_counts_before_one_that_failed_for_want_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert SeesTheOtherFirst(2, 1, []).run() == 137
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "rank 1 was killed by SIGKILL before that" in capfd.readouterr().err


WARNED = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
ignored = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
signal.signal(signal.SIGUSR1, lambda *_: None)
pathlib.Path(sys.argv[1], f"pid{os.getpid()}").touch()
signal.sigwait({signal.SIGUSR1})
sys.exit(0 if ignored else 5)
"""


def test_ranks_hear_of_a_warning_that_their_starter_alone_is_told_of(tmp_path: Path) -> None:
    """As in Podman. One that is not ready yet does not end by it."""
    process = start(tmp_path, WARNED, "--devices=2")
    deadline = time.monotonic() + 300
    while len([*tmp_path.glob("pid*")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while process.poll() is None:  # it ignores the first ones if it has not come as far as its ranks
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    _, said = process.communicate()
    assert process.returncode == 0, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_to_end_ends_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, SLEEP, "--devices=2")
    deadline = time.monotonic() + 300
    while len(pids := [int(path.name[3:]) for path in tmp_path.glob("pid*")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == 128 + number
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("fault", ["absent", "full"])
def test_ranks_meet_elsewhere_where_the_memory_s_folder_is_full(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine may fill it."""
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(starter, "_MEMORY", memory)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if fault == "full":
        memory.mkdir()

        def write(path: Path, *content: Any, **more: Any) -> None:
            if path.is_relative_to(memory):
                raise OSError(errno.ENOSPC, "No space left on device", str(path.parent))
            write_file(path, *content, **more)

        monkeypatch.setattr(starter, "write_file", write)
    folder = starter.own_folder()
    assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700 and (folder / starter.SECRET).stat().st_size == 32
    assert fault == "absent" or not list(memory.iterdir()), "nothing is left there"
