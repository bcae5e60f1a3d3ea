"""Locks that another user has prepared: they are gone without, and said so; nothing hangs, and nothing of anybody's is changed."""

from __future__ import annotations

import fcntl
import getpass
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from caraml.base.processes import Election, Lock, alone, keep_temporary_files_private, machine_folder, private_folder, user_folder
from caraml.campaign.machine import DeviceLock
from tests.security.users import ATTACKER, VICTIM, as_user, needs_two_users, own_folder

pytestmark = pytest.mark.processes


def test_one_process_has_a_lock_at_a_time(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "own" / "x"), Lock(tmp_path / "own" / "x")
    assert first.take() and not second.take()
    first.note("who")
    assert second.noted() == "who"
    first.give()
    assert second.take() and not first.take()
    second.close()
    assert first.take() and first.trouble is None
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "own" / "x").stat().st_mode & 0o777 == 0o600


def test_a_lock_is_never_emptied_by_opening_it(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("somebody's words")
    (tmp_path / "x").chmod(0o600)
    with alone(tmp_path / "x", private=False) as trouble:
        assert trouble is None
    assert (tmp_path / "x").read_text() == "somebody's words"


def linked(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def dangling(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("new"))


def piped(path: Path, precious: Path) -> None:
    os.mkfifo(path, 0o666)


def hard_linked(path: Path, precious: Path) -> None:
    path.hardlink_to(precious)


@pytest.mark.parametrize("plant", [linked, dangling, piped, hard_linked])
def test_what_is_no_lock_is_not_taken_for_one(plant: Callable[[Path, Path], None], tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "own").mkdir(mode=0o700)
    plant(tmp_path / "own" / "x", precious)
    lock = Lock(tmp_path / "own" / "x")
    assert lock.trouble is not None and str(tmp_path / "own" / "x") in lock.trouble
    assert lock.take() and lock.noted() == ""
    lock.note("written nowhere")
    lock.close(remove=True)
    assert precious.read_text() == "kept" and not precious.with_name("new").exists()


def test_a_folder_that_others_could_write_to_holds_no_lock(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "other users can write" in str(Lock(tmp_path / "open" / "x").trouble)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="a link or a file"):
        private_folder(tmp_path / "link")
    (tmp_path / "read").mkdir(mode=0o755)
    assert private_folder(tmp_path / "read").stat().st_mode & 0o777 == 0o700, "what others could only read is closed"


def test_locks_lie_in_a_folder_of_the_user_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert machine_folder() == tmp_path / "caraml"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert machine_folder().name == f"caraml-{os.geteuid()}"


@pytest.fixture
def everybody_s(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for ``/tmp``."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    return shared


LOCKS = {"device": lambda: DeviceLock("GPU", "suite a"), "power": lambda: Election("job 1")}


@needs_two_users
@pytest.mark.parametrize("name", LOCKS)
def test_a_folder_made_by_another_user_beforehand_stops_nobody(name: str, everybody_s: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "0")
    folder = user_folder(everybody_s)

    def plant() -> None:
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)

    as_user(ATTACKER, plant)
    lock = LOCKS[name]()
    assert f"{folder}: belongs to user {ATTACKER}" in str(lock.trouble)
    assert lock.acquire() if isinstance(lock, DeviceLock) else lock.elected
    assert list(folder.iterdir()) == []
    lock.release() if isinstance(lock, DeviceLock) else lock.close()


@needs_two_users
def test_without_a_lock_one_rank_of_a_node_is_elected_still(everybody_s: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(ATTACKER, lambda: user_folder(everybody_s).mkdir())
    for local, elected in (("0", True), ("1", False), (None, False)):
        monkeypatch.delenv("SLURM_LOCALID", raising=False)
        if local is not None:
            monkeypatch.setenv("SLURM_LOCALID", local)
        assert Election("job 1").elected is elected


@needs_two_users
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_lock_in_a_shared_folder_that_another_user_holds_is_not_waited_for(kind: str, shared: Path) -> None:
    path = own_folder(shared, "data", ATTACKER) / ".set.lock"

    def plant() -> None:
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.touch()
        path.chmod(0o666)

    as_user(ATTACKER, plant)
    with open(path, "r+b" if kind == "file" else "w+b", buffering=0) as held:  # noqa: PTH123 -- unbuffered
        if kind == "file":
            fcntl.flock(held, fcntl.LOCK_EX)
        with alone(path, private=False) as trouble:
            assert f"{path}: belongs to user {ATTACKER}" in str(trouble)


def test_an_old_lock_that_others_could_open_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".set.lock"
    path.touch(mode=0o644)
    with path.open() as held:  # what anybody can do who may read it
        fcntl.flock(held, fcntl.LOCK_EX)
        with alone(path, private=False) as trouble:
            assert "open to other users" in str(trouble)
    with alone(path, private=False) as trouble:
        assert trouble is None and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_private_folder_lies_where_nobody_else_can_rename_it(mode: int, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may rename the folder puts another in its place after it was looked at: with staged data, or code that torch runs."""
    shared.chmod(mode)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("TMPDIR", str(shared))
    keep_temporary_files_private()
    sticky = bool(mode & 0o1000)
    assert Path(tempfile.gettempdir()).is_relative_to(shared) is sticky and Path(os.environ["TMPDIR"]).stat().st_mode & 0o777 == 0o700
    if sticky:
        assert private_folder(shared / "own").is_dir()
    else:
        with pytest.raises(PermissionError, match="every user may write to it"):
            private_folder(shared / "own")


def test_a_user_without_a_name_has_one_for_torch(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose list of users is the image's: torch 2.11 raised KeyError as soon as anything was compiled."""

    def unknown(number: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("LOGNAME", "")
    for name in ("USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    keep_temporary_files_private()
    assert getpass.getuser() == str(os.getuid())


@needs_two_users
@pytest.mark.parametrize("taken", [False, True])
def test_temporary_files_go_where_nobody_else_can_put_any(taken: bool, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs compiled code that it finds in the folder for temporary files, under a name that everybody knows."""
    if taken:
        own_folder(shared, f"caraml-{VICTIM}", ATTACKER)

    def folder() -> tuple[str, str, int, str]:
        keep_temporary_files_private()
        found = Path(tempfile.gettempdir()).stat()
        return (
            tempfile.gettempdir(),
            os.environ["TMPDIR"],
            found.st_mode & 0o777 if found.st_uid == os.getuid() else 0,
            str(machine_folder()),
        )

    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    chosen, told, mode, locks = as_user(VICTIM, folder)
    assert chosen == told and mode == 0o700 and Path(chosen).parent == shared
    assert (Path(chosen).name == f"caraml-{VICTIM}") is not taken
    assert taken or locks == chosen, "locks stay where other processes of this user look for them"
