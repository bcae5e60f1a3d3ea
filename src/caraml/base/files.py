"""How files are written, everywhere: made exclusively under a random name, never through a link, and renamed when they are whole.

The folder may belong to somebody else, who can plant links and files under every name that can be guessed. A name of 64 random bits cannot
be, ``O_EXCL`` refuses what is there already, and a rename replaces a link instead of following it.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import secrets
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISLNK, S_ISREG, S_ISVTX, S_IWGRP, S_IWOTH
from typing import BinaryIO, Literal, cast

from caraml.base.errors import EnvironmentUnfitError, InputError

Sync = Literal["none", "file", "folder"]
"""What is on the disk when a write returns: nothing for sure, the content if the name is there after a power cut, or content and name."""
Name = Path | str
TRUSTED_FOLDERS = "CARAML_TRUSTED_FOLDERS"
"""Environment variable: folders, with colons between them, whose owners and whose writers this user trusts as itself."""
DATA_VARIABLE = "CARAML_DATA"
"""Environment variable: folder of the data that CARAML prepares, instead of `~/.cache/caraml/data`; on a cluster, a shared one."""

AWAY = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT)
"""What a network's disk says of its files while its server is away, or has just come back."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without hard links say of one."""
_HOPS = 40
"""Links on one way that a kernel follows."""
_NOBODY, _EVERYBODY = 65534, "4294967295"
_LONGEST = 200
"""Characters of a name that its temporary one repeats: a file system allows 255."""


def write_file(path: Name, content: str | bytes, *, mode: int = 0o644, sync: Sync = "folder") -> None:
    """Write a file, whole or not at all, in place of what has its name. Text is written as UTF-8; ``mode`` are its rights, less those that
    the process's umask takes away. Raises ``OSError`` naming the file, or its folder where there is no room left.
    """
    with replacing(path, mode=mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Name, *, mode: int = 0o644, sync: Sync = "folder") -> Iterator[BinaryIO]:
    """As :func:`write_file` for content that comes piece by piece. An error inside the block leaves the old file as it was."""
    path = os.fspath(path)
    temporary = _temporary(path)
    with _told(path, temporary):
        descriptor = os.open(temporary, _NEW, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if sync != "none":
                    os.fsync(file.fileno())
            os.rename(temporary, path)  # noqa: PTH104 -- ten thousand times in a row: a path object costs more than the call
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
        if sync == "folder":
            flush(os.path.dirname(path) or ".")  # noqa: PTH120


@contextmanager
def replacing_by_name(path: Name, *, sync: Sync = "folder") -> Iterator[Path]:
    """As :func:`replacing` for a library that opens its file itself: a name in a new folder that nobody else can enter.

    Where the system allows it the name goes through this process's own handle of that folder, so that it stays the same folder whatever
    the owner of the one above it renames. The name means something to this process and its children while the block runs.
    """
    path = os.fspath(path)
    name, room = os.path.basename(path), _temporary(path)  # noqa: PTH119
    with _told(path, room):
        os.mkdir(room, 0o700)  # noqa: PTH102
        try:
            with held(room) as folder:
                inside = f"{folder}/{name}"
                yield Path(inside)
                if sync != "none":
                    flush(inside)
                os.rename(inside, path)  # noqa: PTH104
        finally:
            shutil.rmtree(room, ignore_errors=True)
        if sync == "folder":
            flush(os.path.dirname(path) or ".")  # noqa: PTH120


@contextmanager
def held(folder: Name) -> Iterator[str]:
    """A name of a folder of this user's by which it stays the same folder, whatever others rename, where the system allows that.

    Raises:
        OSError: it is a link or no folder, or belongs to somebody else.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "somebody else put a folder in the way", os.fspath(folder))
        name = f"/proc/{os.getpid()}/fd/{handle}"
        yield name if os.path.isdir(name) else os.fspath(folder)  # noqa: PTH112
    finally:
        os.close(handle)


def write_new(path: Name, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file that must not exist, without syncing it. Raises ``FileExistsError``, and ``OSError`` when only a part fitted."""
    with making(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_once(path: Name, content: str | bytes, *, mode: int = 0o644) -> bool:
    """As :func:`write_new`, but nobody ever sees a part of it; where there are no hard links it is empty at first. False where it is there
    already; of several that try, one succeeds."""
    path = os.fspath(path)
    temporary = _temporary(path)
    with _told(path, temporary):
        try:
            write_new(temporary, content, mode=mode)
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                open_new(path, mode=mode).close()
                os.rename(temporary, path)  # noqa: PTH104 -- in place of what is empty, and nobody else's
        except FileExistsError:
            return False
        finally:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
    return True


@contextmanager
def making(path: Name, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """As :func:`write_new` for content that comes piece by piece. What was written stays when the block fails."""
    with _told(os.fspath(path)), open_new(path, mode=mode) as file:
        yield file


def open_new(path: Name, *, mode: int = 0o644, replace: bool = False) -> BinaryIO:
    """A file that is written as things happen, to be closed by the caller. With ``replace`` what has its name is removed before."""
    if replace:
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
    return cast(BinaryIO, os.fdopen(os.open(path, _NEW, mode), "wb"))


def open_to_append(path: Name, *, mode: int = 0o644) -> BinaryIO:
    """A file to append to, made if it is not there. Raises ``OSError`` for a link, and for anything that is no plain file of one name."""
    with _told(os.fspath(path)):
        try:
            descriptor = os.open(path, _NEW | os.O_APPEND, mode)
        except FileExistsError:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(descriptor)
            if not S_ISREG(found.st_mode) or found.st_nlink != 1:
                os.close(descriptor)
                raise PermissionError(errno.EPERM, "not a plain file of one name: nothing is appended to it", os.fspath(path)) from None
        return cast(BinaryIO, os.fdopen(descriptor, "ab"))


def write_at(path: Name, place: int, content: bytes) -> None:
    """Write a part of a file, made if it is not there, beside other processes that write theirs. Raises ``OSError`` for a link."""
    with _told(os.fspath(path)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(place)
            file.write(content)


def touch(path: Name) -> None:
    """Set a file's time to now, or make it. A link is touched itself, not what it points to."""
    with _told(os.fspath(path)):
        try:
            os.close(os.open(path, _NEW, 0o644))
        except FileExistsError:
            os.utime(path, follow_symlinks=False)


def new_folder_beside(path: Name, mode: int = 0o755) -> Path:
    """Make an empty folder with a random name in the folder of ``path``, to be filled and renamed to ``path``."""
    made = _temporary(os.fspath(path))
    with _told(os.fspath(path), made):
        os.mkdir(made, mode)  # noqa: PTH102
    return Path(made)


def flush(path: Name) -> None:
    """Have a file's content, or the names in a folder, on the disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_now(folder: Name) -> list[str]:
    """Names in a folder as its server has them. A network's disk may list them as they were a minute ago, until this host makes a file
    there; in a folder of somebody else none is made. Raises ``OSError`` where it cannot be listed."""
    if owned(folder):
        probe = _temporary(f"{folder}/names")
        with suppress(OSError):  # a full disk
            open_new(probe).close()
            os.unlink(probe)  # noqa: PTH108
    return os.listdir(folder)  # noqa: PTH208


def there(path: Name) -> bool:
    """Whether a file is there, also one that another host made a moment ago and a network's disk does not show yet; then it is shown.
    Raises ``OSError`` where its folder is there and cannot be listed."""
    folder = os.path.dirname(path) or "."  # noqa: PTH120
    with suppress(FileNotFoundError):  # no such folder
        if not os.path.lexists(path):
            names_now(folder)
            with suppress(OSError):  # no folder gets a second name, so nothing is made; but first a kernel asks whether this one is taken
                os.link(f"{folder}/.", path)
    return os.path.lexists(path)


def home() -> Path:
    """This user's folder. Raises ``EnvironmentUnfitError`` where neither ``HOME`` nor the machine's list of users names one."""
    try:
        return Path.home()
    except RuntimeError:
        raise EnvironmentUnfitError(f"HOME is not set, and user {os.geteuid()} is in no list of users", "export HOME=FOLDER") from None


def config_home() -> Path:
    """Folder of what this user has set: ``$XDG_CONFIG_HOME/caraml``, else ``~/.config/caraml``. It need not exist yet."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "caraml"


def cache_home() -> Path:
    """Folder of what is kept for later runs: ``$XDG_CACHE_HOME/caraml``, else ``~/.cache/caraml``. It need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "caraml"


def data_home() -> Path:
    """The folder of prepared data: ``$CARAML_DATA``, else ``~/.cache/caraml/data``. It need not exist yet. Raises
    ``EnvironmentUnfitError`` for a ``~`` that stands for nobody's folder."""
    chosen = os.environ.get(DATA_VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else home() / ".cache" / "caraml" / "data"
    except RuntimeError:
        found = f"{DATA_VARIABLE}: found {chosen!r}, and nobody knows which folder {str(chosen).partition('/')[0]} is"
        raise EnvironmentUnfitError(found, f"export {DATA_VARIABLE}=/FOLDER, a whole path") from None


def nearest_folder(path: Path) -> Path:
    """The path itself, if it is a folder, or its nearest ancestor that exists."""
    path = path.absolute()
    return next((found for found in (path, *path.parents) if found.is_dir()), Path("/"))


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder. Tried, not asked: access rights say nothing about read-only mounts and quotas."""
    import tempfile  # the command line starts without it

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"caraml")
            file.flush()
    except OSError:
        return False
    return True


def owned(folder: Name) -> bool:
    """Whether a folder is this user's own, so that also a verb that only reads may keep something in it."""
    try:
        return os.stat(folder).st_uid == os.geteuid()  # noqa: PTH116
    except OSError:
        return False


def make_folder(folder: Name) -> None:
    """Make a folder and those above it where there are none, and let nobody else write to them, whatever the umask says. Raises
    ``InputError`` for a link to nothing."""
    folder = os.fspath(folder)
    if folder and not os.path.isdir(folder):  # noqa: PTH112
        make_folder(os.path.dirname(folder))  # noqa: PTH120
        try:
            with _told(folder):
                os.mkdir(folder, 0o755)  # noqa: PTH102
        except FileExistsError:
            if not os.path.exists(folder):  # noqa: PTH110
                raise InputError(f"{folder}: found a link to nothing, expected a folder", "make what it names, or name another") from None


def intruder(folder: Name) -> tuple[str, str] | None:
    """A folder whose owner or whose writers could put files of theirs in the place of this user's below ``folder``, and who they are.

    ``None`` where nobody could but root. Looked at are the folder, as far as there is one, every folder above it, and the links on the way:
    who may write to any of them can rename what is in it, unless it is sticky. The group that has its user's name and no other member, and
    that of root, are nobody else; folders that ``CARAML_TRUSTED_FOLDERS`` names count as this user's own.
    """
    trusted = {os.path.realpath(name) for name in os.environ.get(TRUSTED_FOLDERS, "").split(":") if name}
    parts, here, hops = os.path.join(os.getcwd(), folder).split("/")[::-1], "", 0  # noqa: PTH109, PTH118
    while parts:
        part = parts.pop()
        if part in ("", ".", ".."):
            here = os.path.dirname(here).rstrip("/") if part == ".." else here  # noqa: PTH120
            continue
        place = f"{here}/{part}"
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            return None
        who = None if place in trusted else who_else(place, found, sticky=any(parts))
        if who is not None:
            return place, who
        if not S_ISLNK(found.st_mode):
            here = place
            continue
        target, hops = os.readlink(place), hops + 1  # noqa: PTH115
        if hops > _HOPS:
            return place, "more links lead on from there than can be followed"
        parts += target.split("/")[::-1]
        here = "" if target.startswith("/") else here
    return None


def trusting(place: str) -> str:
    """The command by which this user trusts a folder, besides those that it trusts already."""
    others = f"${TRUSTED_FOLDERS}:" if os.environ.get(TRUSTED_FOLDERS) else ""
    return f"export {TRUSTED_FOLDERS}={others}{shlex.quote(place)}"


def who_else(place: str, found: os.stat_result, sticky: bool = False) -> str | None:
    """Who besides this user and root owns or may write to what was found at a place; ``None`` for nobody. With ``sticky``, as above a
    folder that is looked at, one where only owners remove things is nobody's, and an owner outside of a container is taken for root."""
    if found.st_uid not in (0, os.geteuid()) and not (sticky and found.st_uid == _NOBODY and _in_namespace()):
        return f"belongs to user {found.st_uid}"
    if S_ISLNK(found.st_mode) or (sticky and found.st_mode & S_ISVTX):
        return None
    if found.st_mode & S_IWOTH:
        return "every user may write to it"
    if found.st_mode & S_IWGRP and (not _private(found.st_gid) or _has_list(place)):
        return f"members of group {found.st_gid}, or users on its access list, may write to it"
    return None


def _private(group: int) -> bool:
    """Whether a group has no member but its user or root."""
    try:
        user, known = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return group == 0
    return group == 0 or (known.gr_name == user and not set(known.gr_mem) - {user})


def _has_list(place: str) -> bool:
    """Whether an access list gives rights to more users than the mode says; its largest right stands where the mode has the group's."""
    try:
        return "system.posix_acl_access" in os.listxattr(place, follow_symlinks=False)
    except (OSError, AttributeError):  # a file system, or a system, without
        return False


def _in_namespace() -> bool:
    """Whether this process is in a user namespace, as in a container, where all owners from outside of it, root too, have one number."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", _EVERYBODY]
    except OSError:
        return False


def _temporary(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:_LONGEST]}.{secrets.token_hex(8)}.tmp")  # noqa: PTH118


@contextmanager
def _told(path: str, temporary: str | None = None) -> Iterator[None]:
    """Let an error name the file that was asked for, or its folder where that is full, instead of a temporary name or nothing. Where
    nothing can be made, as below `/proc`, kernels say of a new name that it does not exist: that becomes a refusal."""
    try:
        yield
    except OSError as error:
        new = error.errno == errno.ENOENT and error.filename in (path, temporary)
        if new and os.path.isdir(os.path.dirname(os.path.abspath(path))):  # noqa: PTH100, PTH112, PTH120
            raise PermissionError(errno.EPERM, "nothing can be made in this place", path) from error
        if error.errno is None or error.filename not in (None, temporary):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = os.path.dirname(os.path.abspath(path)) if full else path  # noqa: PTH100, PTH120
        raise OSError(error.errno, error.strerror, where) from error
