"""Two users of one machine: this process, and children of it with another user's number, which plant what this one runs into."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).parents[2]
VICTIM, ATTACKER = 64_001, 64_002
"""Numbers that no user of the machine has; a process needs no more than a number."""

T = TypeVar("T")
needs_two_users = pytest.mark.usefixtures("two_users")


def as_user(uid: int, act: Callable[[], T]) -> T:
    """What ``act`` returns in a child process of that user; its errors are raised here. It may be unable to import anything."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        result: tuple[bool, Any]
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            result = (True, act())
        except BaseException as error:  # noqa: BLE001 -- told to the parent, which raises it
            result = (False, (error, traceback.format_exc()))
        with os.fdopen(writing, "wb") as pipe:
            try:
                content = pickle.dumps(result)
            except Exception:  # noqa: BLE001
                content = pickle.dumps((False, (RuntimeError(repr(result)), "")))
            pipe.write(content)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    good, value = pickle.loads(content)
    if not good:
        error, text = value
        error.add_note(text)
        raise error
    return value  # type: ignore[no-any-return]


def _user_by_kernel() -> str:
    """The own number as the kernel has it: fakeroot's library tells another one."""
    return Path("/proc/self/status").read_text().partition("\nUid:\t")[2].split()[0]


@cache
def alone() -> str | None:
    """Why this process cannot act as another user and give files away, or ``None``: root of a namespace, say, is one user only."""
    if os.geteuid() != 0:
        return "what another user may do: acting as two users needs root"
    try:
        with tempfile.TemporaryDirectory(prefix="two-users-", dir="/tmp") as folder:  # in which others do not look for what a user has
            (file := Path(folder, "file")).touch()
            for uid in (VICTIM, ATTACKER):
                os.chown(file, uid, uid)
                if as_user(uid, _user_by_kernel) != str(uid):
                    return "what another user may do: the numbers of users are made up here"
    except OSError as error:
        return f"what another user may do: this root may not act as one ({error})"
    return None


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder like ``/tmp``: all may write, nobody may remove what is another's."""
    with tempfile.TemporaryDirectory(prefix="two-users-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder


def own_folder(parent: Path, name: str, uid: int, mode: int = 0o777) -> Path:
    """A folder of a user."""
    folder = parent / name
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, uid, uid)
    return folder


@dataclass(frozen=True)
class Person:
    """Somebody with a folder, who runs programs."""

    uid: int
    home: Path

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program as this user, with few variables."""
        variables = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        variables |= {"HOME": str(self.home), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
        variables |= options.pop("variables", {})
        return subprocess.Popen(
            command,
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            env=variables,
            text=True,
            cwd=self.home,
            start_new_session=True,
            **options,
        )

    def python(self, program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program text as this user to its end."""
        return self.run([interpreter() or "", "-c", program, *arguments], **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program as this user to its end, with ``told`` as its input."""
        told = options.pop("told", "")
        with self.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
            said, _ = process.communicate(told, timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, said)


@cache
def interpreter() -> str | None:
    """An interpreter of this version that everybody may run: this one, or the machine's own where this one is in a closed folder."""
    candidates = (
        sys.executable,
        *(f"{folder}/python{sys.version_info.major}.{sys.version_info.minor}" for folder in ("/usr/local/bin", "/usr/bin")),
    )
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "-c", ""], user=VICTIM, group=VICTIM, extra_groups=[], cwd="/", check=False, capture_output=True
            )
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    return None


def apart() -> str | None:
    """Why there cannot be two users here, or ``None``."""
    if os.getuid() != 0:
        return "attacks by another user: only root can be two users"
    if (reason := alone()) is not None:
        return reason
    return "attacks by another user: others may not run Python here" if interpreter() is None else None


@contextmanager
def persons() -> Iterator[tuple[Person, Person]]:
    """A victim and a stranger; the folder of each can be read by the other, as homes on many machines can."""
    with tempfile.TemporaryDirectory(prefix="two-users-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        victim, stranger = (Person(uid, own_folder(Path(name), str(uid), uid, 0o755)) for uid in (VICTIM, ATTACKER))
        yield victim, stranger
