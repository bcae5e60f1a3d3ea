"""This node and the processes of one user on it: its name, which of them is which, and locks between them.

Locks are on files and in folders that nobody else can open, so that nobody else can hold them. One that cannot be had safely (its folder or
file belongs to somebody else, it is a link, a pipe, or open to others who hold it) is gone without: :attr:`Lock.trouble` says why, and
whoever asked decides whether that matters.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from caraml.base.files import intruder, make_folder, new_folder_beside, owned

_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
_SHARED = Path("/tmp")  # noqa: S108 -- sticky on every machine: only owners rename what is in it

NODE = "CARAML_NODE"
"""Environment variable: what this node is called instead. Processes of one host that have different ones count as nodes of their own."""

# What mpirun says comes first: inside a Slurm job its daemons are Slurm's tasks, and what those say is inherited.
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID")
FLUX = "FLUX_JOB_ID"
JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", FLUX)
STEP = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PALS_APID", "SLURM_STEP_ID")

SLURM_OWN_STEPS = 0xFFFFFFF0
"""From here on the numbers of steps are those that Slurm gives to a job's script and to a shell in an allocation."""


def user_folder(base: Path) -> Path:
    """Name of this user's own folder in one that all users of the machine share."""
    name = f"caraml-{os.geteuid()}"
    return base if base.name == name and owned(base) else base / name


def machine_folder() -> Path:
    """Where this user's locks on this machine are: a folder that goes with the machine, not with a home that others share."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")  # batch systems carry it to nodes where there is no such folder
    return Path(given) / "caraml" if given and owned(given) else user_folder(Path(tempfile.gettempdir()))


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can enter, or see that the one that is there is such a folder.

    Raises:
        PermissionError: it is a link or no folder, belongs to somebody else, or others could write to it or put theirs in its place; the
            message says which.
        OSError: it cannot be made.
    """
    os.close(_opened(folder))
    return folder


def keep_temporary_files_private() -> None:
    """Have this process and its children put temporary files where only this user can enter. Torch keeps compiled code there, under a name
    that anybody could take first, and runs what it finds. Up to 2.11 it asks for the name of the user, whom containers may not know."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = str(os.getuid())
    base = Path(tempfile.gettempdir())
    if intruder(f"{base}/.") is not None:  # others could rename what is in it
        base = _SHARED
    try:
        folder = private_folder(user_folder(base))
    except OSError:  # somebody has taken the name
        folder = new_folder_beside(base / "caraml", mode=0o700)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables of the processes started inside, put back afterwards."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class Lock:
    """A lock on a file. The kernel frees it when its holder ends, however that happens."""

    def __init__(self, path: Path, *, private: bool = True) -> None:
        """Open the lock's file, which is made if it is not there, and never emptied.

        With ``private`` its folder must be one that only this user can enter. Otherwise any will do, for what several machines share.
        """
        self.path = path
        self.trouble: str | None = None
        """Why there is no lock to be had, if so; :meth:`take` then goes on without."""
        self._descriptor = -1
        self._open_to_others = False
        try:
            self._descriptor = self._open(private)
        except OSError as error:
            self.trouble = f"{error.filename or path}: {error.strerror or error}"

    def _open(self, private: bool) -> int:
        folder = _opened(self.path.parent) if private else os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                descriptor = os.open(self.path.name, flags, 0o600, dir_fd=folder)
            except OSError as error:
                why = "a link where a lock should be" if error.errno == errno.ELOOP else error.strerror
                raise OSError(error.errno, why, str(self.path)) from error
        finally:
            os.close(folder)
        found = os.fstat(descriptor)
        why = _why_not(found, S_ISREG(found.st_mode) and found.st_nlink == 1, "no plain file of one name")
        if why is not None:
            os.close(descriptor)
            raise PermissionError(errno.EPERM, why, str(self.path))
        self._open_to_others = bool(found.st_mode & _OTHERS)
        return descriptor

    def take(self, *, wait: bool = False) -> bool:
        """Take the lock, or go on without where there is none to be had; while another process of this user holds it, ``wait`` or return
        false.
        """
        if self.trouble is not None:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._open_to_others:  # whoever could open it may hold it for ever
                return self._without("it was open to other users, and somebody holds it")
            if not wait:
                return False
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            return self._without(error.strerror)
        if self._open_to_others:
            os.fchmod(self._descriptor, 0o600)
        return True

    def _without(self, why: str | None) -> bool:
        self.trouble = f"{self.path}: {why}"
        return True

    def give(self) -> None:
        """Let others have it."""
        if self.trouble is None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def note(self, text: str) -> None:
        """Write into the lock's file who holds it, for those who wait."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)

    def noted(self) -> str:
        """What :meth:`note` wrote, by whichever process."""
        return os.pread(self._descriptor, 4096, 0).decode("utf-8", errors="replace") if self._descriptor >= 0 else ""

    def close(self, *, remove: bool = False) -> None:
        """Let others have it, for good; ``remove`` the file where its name is used once."""
        if self._descriptor < 0:
            return
        if remove:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def alone(path: Path, *, private: bool = True) -> Iterator[str | None]:
    """Hold a lock while the block runs, waiting for it as long as it takes; gives why it runs without, if it does."""
    lock = Lock(path, private=private)
    try:
        lock.take(wait=True)
        yield lock.trouble
    finally:
        lock.close()


def _opened(folder: Path) -> int:
    """A descriptor of a private folder; see :func:`private_folder`."""
    with suppress(FileExistsError):
        make_folder(folder.parent)
        folder.mkdir(mode=0o700)
    if (other := intruder(f"{folder.parent}/.")) is not None:
        raise PermissionError(errno.EPERM, other[1], other[0])
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PermissionError(errno.EPERM, "a link or a file where a folder of this user's own should be", str(folder)) from error
        raise
    found = os.fstat(descriptor)
    why = _why_not(found, not found.st_mode & _WRITABLE_BY_OTHERS, "other users can write to it")
    if why is not None:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, why, str(folder))
    if found.st_mode & _OTHERS:
        os.fchmod(descriptor, 0o700)
    return descriptor


def _why_not(found: os.stat_result, good: bool, why: str) -> str | None:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}, who runs this"
    return None if good else why


def node_key() -> str:
    """Host name and boot id: the same for all processes of one node until it restarts."""
    if os.environ.get(NODE):
        return os.environ[NODE]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}:{boot.read_text().strip() if boot.exists() else 'unknown'}"


def _own(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without what Slurm says by PMIx: jobs and steps inherit it from a shell that srun started, and ``SLURM_*``, which
    each has of its own, says the same."""
    if not environment.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        return environment
    return {name: value for name, value in environment.items() if not name.startswith("PMIX_")}


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    found = next((environment[name] for name in names if environment.get(name, "").isdigit()), None)
    return None if found is None else int(found)


def _launched(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    """What the launcher says. Slurm tells a job's script the tasks of the whole job, but only a step's processes are ranks."""
    environment = _own(environment)
    step = environment.get("SLURM_STEP_ID", "")
    if not (step.isdigit() and int(step) < SLURM_OWN_STEPS) and not any(n in environment for n in RANK if not n.startswith("SLURM_")):
        names = tuple(name for name in names if not name.startswith("SLURM_"))
    return _number(names, environment)


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if a launcher started more than one; else ``None``."""
    return _launched(RANK, environment) if (world_size(environment) or 1) > 1 else None


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks that the launcher started."""
    return _launched(SIZE, environment)


def job(environment: Mapping[str, str] = os.environ) -> str:
    """Name that all ranks of one launch share, and no other launch has: job and step, else the session. Launches by Flux have a job each
    within that of Slurm, whose step is the one that started Flux."""
    own = _own(environment)
    outer, step = (next((name for name in names if own.get(name)), "") for names in (JOB, STEP))
    inner = FLUX if outer != FLUX else ""
    return ".".join(own[name] for name in (outer, inner, step) if own.get(name)) or f"session-{os.getsid(0)}"


class Election:
    """At most one process per node and job is elected: the one that gets a lock. It stays elected until it ends.

    Processes that are not elected leave what the whole node shares (processors, memory, the node's supply) to the one
    that is, so that nothing is counted once per rank.
    """

    def __init__(self, name: str | None = None, folder: Path | None = None) -> None:
        safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in name or job())
        self._lock = Lock((folder or machine_folder()) / f"power-{safe}.lock")
        self.elected = self._lock.take()
        self.trouble = self._lock.trouble
        """Why there was no lock to be had; then the launcher's first rank of the node is elected, or nobody where it counts none."""
        if self.trouble is not None:
            self.elected = _number(LOCAL, os.environ) == 0

    def close(self) -> None:
        self._lock.close(remove=self.elected)
