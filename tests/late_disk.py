"""A network's disk with a long cache, without one: as sshfs with ``dcache_timeout`` and NFS with its attributes cached behave."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest


class LateDisk:
    """Names below ``root`` stay as this host first saw them, until it makes, renames or removes something there; what it once found
    missing is missing until it asks for that name by a call that has to make it. It cannot rename a folder over another, and says EPERM."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._listed, self._missing, self._elsewhere = str(root), dict[str, list[str]](), set[str](), False
        for name in ("link", "mkdir", "rename", "unlink"):
            monkeypatch.setattr(os, name, partial(self._changes, getattr(os, name)))
        for name in ("open", "listdir", "scandir", "stat", "lstat"):
            monkeypatch.setattr(os, name, partial(getattr(self, f"_{name}"), getattr(os, name)))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is done in the block is done on another host."""
        self._elsewhere = True
        yield
        self._elsewhere = False

    def not_seen(self, path: Path) -> None:
        """Be late with what was made at this place."""
        self._missing.add(str(path))
        self._listed[str(path.parent)] = []

    def _is_here(self, path: Any) -> bool:
        return not self._elsewhere and isinstance(path, str | Path) and str(path).startswith(self._root)

    def _changes(self, do: Callable[..., Any], *names: Any, **options: Any) -> Any:
        if self._is_here(names[0]):
            self._listed.clear()
            self._missing -= set(map(str, names))
        try:
            return do(*names, **options)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and self._is_here(names[0]):
                raise PermissionError(errno.EPERM, "as sshfs says it", *map(str, names)) from None
            raise

    def _open(self, do: Callable[..., int], path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_EXCL:
            return int(self._changes(lambda path: do(path, flags, *rest, **options), path))
        return do(path, flags, *rest, **options)

    def _listdir(self, do: Callable[[Any], list[str]], path: Any = ".") -> list[str]:
        if not self._is_here(path):
            return do(path)
        if str(path) in self._missing:
            raise FileNotFoundError(errno.ENOENT, "it was not there when it was last looked for", str(path))
        return list(self._listed.setdefault(str(path), do(path)))

    def _scandir(self, do: Callable[[Any], Any], path: Any = ".") -> Any:
        if not self._is_here(path):
            return do(path)
        known = os.listdir(path)  # noqa: PTH208 -- as it is listed late
        with do(path) as entries:
            found = [entry for entry in entries if entry.name in known]
        return _Entries(found)

    def _stat(self, do: Callable[..., os.stat_result], path: Any, **options: Any) -> os.stat_result:
        if self._is_here(path) and str(path) in self._missing:
            raise FileNotFoundError(errno.ENOENT, "it was not there when it was last looked for", str(path))
        try:
            return do(path, **options)
        except FileNotFoundError:
            if self._is_here(path):
                self._missing.add(str(path))
            raise

    _lstat = _stat


class _Entries(nullcontext[Any]):
    """What ``os.scandir`` gives: entries, and a block that closes it."""

    def __init__(self, found: list[os.DirEntry[str]]) -> None:
        super().__init__(self)
        self._found = iter(found)

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._found
