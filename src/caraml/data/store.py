"""Where prepared data lives, and how it gets there exactly once and whole.

A prepared thing is a folder whose name is the hash of what it was made from. It is built under a temporary name beside
its final one, flushed to the disk and renamed, so a reader finds all of it or nothing.

Look-alikes of any size are written by several processes at a time, gone on with where they were ended, and whole before they are read. Such
a set is written in parts, numbered from 0, each a function of its number. Beside it is a folder of marks: what was asked for, and a file
with the bytes of each part that is done. The last mark says that all are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import multiprocessing
import os
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caraml.base.errors import EnvironmentUnfitError, InputError, in_a_line
from caraml.base.files import DATA_VARIABLE, data_home, flush, write_file, write_new
from caraml.base.format import count
from caraml.base.limits import LINE, read_text
from caraml.base.processes import Lock, alone, variables_set
from caraml.base.signals import die_with_parent
from caraml.system.affinity import usable_cpus

_PARTIAL = ".partial-"
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a half-built folder of another host counts as abandoned: its process cannot be asked from here."""


def prepared_once(key: Mapping[str, Any], build: Callable[[Path], object]) -> Path:
    """The folder that ``build`` filled for ``key``, built now if it does not exist yet, under :func:`~caraml.base.files.data_home`.

    ``key`` has everything that the content depends on, as JSON values, and lies in the folder as ``key.json``; ``key["kind"]`` begins the
    folder's name. ``build`` fills the empty folder that it is given. It may run in several processes at the same time, for the same key, on
    file systems without locks; one result wins and the others are thrown away. Raises ``EnvironmentUnfitError`` if the data folder cannot
    be written.
    """
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    final = data_home() / f"{key.get('kind', 'data')}-{digest}"
    if final.is_dir():
        return final

    def build_with_key(folder: Path) -> None:
        build(folder)
        write_new(folder / "key.json", json.dumps(key, sort_keys=True, indent=2) + "\n")

    make_parent(final)
    # Only a saving: the rename decides. Where the lock cannot be had (some parallel file systems have none, or it is another user's), each
    # process builds for itself.
    with alone(final.parent / f".{final.name}.lock", private=False):
        if not final.is_dir():
            _remove_abandoned(final)
            build_folder(final, build_with_key)
    return final


def build_folder(final: Path, build: Callable[[Path], object]) -> None:
    """Fill a temporary sibling of ``final`` by ``build``, flush it to the disk and rename it to ``final``.

    If another process finishes ``final`` first, its result stays and this one is removed. If ``build`` raises, nothing is left; if the
    process is killed, a folder named ``.<name>.partial-...`` is left, which nobody reads. Raises ``InputError`` if ``final`` exists and is
    no folder.
    """
    if final.exists() and not final.is_dir():
        raise InputError(f"{final} is a file; expected a folder or a free name")
    make_parent(final)
    partial = final.parent / f".{final.name}{_PARTIAL}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    partial.mkdir(mode=0o755)
    try:
        build(partial)
        _flush_tree(partial)
        try:
            partial.rename(final)
        except OSError:
            if not (final.is_dir() and any(final.iterdir())):
                raise
        flush(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_parent(final: Path) -> None:
    """Make the folder of what will be written. Raises ``EnvironmentUnfitError`` where nothing can be, ``InputError`` below a file."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(final.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        kind = InputError if error.errno in (errno.ENOTDIR, errno.EEXIST) else EnvironmentUnfitError
        found = f"{final.parent}: data cannot be written here: {error.strerror or error}"
        raise kind(found, f"choose a folder that you can write; prepared data goes where {DATA_VARIABLE} says") from error


def _flush_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            flush(path)


def _remove_abandoned(final: Path) -> None:
    """Delete what killed builders of ``final`` left: those of this host whose process is gone, and very old ones."""
    start = f".{final.name}{_PARTIAL}"
    for folder in final.parent.glob(f"{start}*"):
        host, _, process = folder.name.removeprefix(start).rpartition("-")[0].rpartition("-")
        if host == socket.gethostname():
            abandoned = not Path("/proc", process).exists()
        else:
            try:
                abandoned = time.time() - folder.stat().st_mtime > _ABANDONED_AFTER
            except FileNotFoundError:  # its builder has just finished
                continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)


MARKS = ".lookalike"
"""Folder of the marks: in a set that is a folder; of a set that is files of one name, with that name before it."""
_PLAN, _DONE = "plan.json", "done"
_MOST_WRITERS = 16
"""Processes that write at the same time; each holds several times what a part has in memory."""
_CAUTIOUS = 0.9
"""Share of the parts that seem to be missing that are begun at once, where parts differ in size."""

Tell = Callable[[int, int], None]
"""Is told how many parts are done, and of how many."""
Write = Callable[[int], int]
"""Writes a part and says how many bytes it has; a partial of a function of a module, so that another process can call it."""


def marks_beside(prefix: Path) -> Path:
    """The folder of marks of a set that is files of one name."""
    return prefix.with_name(f".{prefix.name}{MARKS}")


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Hold the lock of a set of a given size while the block runs: a second writer would remove what the first is writing. Raises
    ``InputError`` where another process of this user is writing it."""
    make_parent(out)
    lock, taken = Lock(out.parent / f".{out.name}.lock", private=False), False
    try:
        taken = lock.take()
        if not taken:
            raise InputError(f"{out}: another process is writing it", "wait for its end")
        yield
    finally:
        lock.close(remove=taken)


def begin(out: Path, marks: Path, plan: Mapping[str, Any]) -> None:
    """Prepare ``out``, a folder or file, for a set, or for going on with it.

    ``plan``: all that was asked for. Raises ``InputError`` where something else is there, or the size is no number, and
    ``EnvironmentUnfitError`` where the disk has no room for all of it.
    """
    if not math.isfinite(plan["gigabytes"]):
        raise InputError(f"--gigabytes: found {plan['gigabytes']:g}, expected a number")
    text = json.dumps(plan)
    begun = (marks / _PLAN).read_text(encoding="utf-8") if (marks / _PLAN).is_file() else None
    if begun != text and out.exists() and (not out.is_dir() or any(out.iterdir())):
        room = "a free name" if out.is_file() else "a new or empty folder"
        raise InputError(f"{out}: found {begun or 'files'}; expected {room}, or what the same command began: {text}", "give another --out")
    make_parent(out)
    there = sum(_sizes(marks).values()) if marks.is_dir() else 0
    wanted, free = plan["gigabytes"] * 1e9 - there, shutil.disk_usage(out.parent).free
    if wanted > free:
        found = f"{out}: found {free / 1e9:,.1f} GB free on its disk, expected the {wanted / 1e9:,.1f} GB that are to be written"
        raise EnvironmentUnfitError(found, "fewer --gigabytes, or --out on another disk")
    marks.mkdir(parents=True, exist_ok=True)
    write_file(marks / _PLAN, text)


def grow(marks: Path, gigabytes: float, write: Write, tell: Tell, alike: bool = True) -> list[int]:
    """Write all parts that are missing until there are ``gigabytes`` (1e9 bytes), within half a part; the bytes of each part.

    ``alike``: whether all parts have as many bytes as the first.
    """
    wanted = gigabytes * 1e9
    if not (marks / "0").exists():
        _write_part(marks, write, 0)
    with (
        variables_set({"PYTHONSAFEPATH": "1"}),  # or they would import what lies in the current folder, whoever put it there
        # A fork of a process with threads may wait for ever.
        ProcessPoolExecutor(min(usable_cpus(1), _MOST_WRITERS), multiprocessing.get_context("spawn"), die_with_parent) as pool,
    ):
        while numbers := _missing(sizes := _sizes(marks), wanted, 1.0 if alike else _CAUTIOUS):
            jobs = [pool.submit(_write_part, marks, write, number) for number in numbers]
            try:
                for done, job in enumerate(as_completed(jobs), len(sizes) + 1):
                    job.result()
                    tell(done, len(sizes) + len(numbers))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [sizes[number] for number in sorted(sizes)]


def finish(marks: Path) -> None:
    """Note that the set is whole: it may be read."""
    write_file(marks / _DONE, "")


def refuse_unfinished(marks: Path, out: Path) -> None:
    """Raise ``InputError``, with the command that goes on, where a set is still being written, or was ended before it was whole."""
    if not (marks / _PLAN).is_file() or (marks / _DONE).exists():
        return
    try:
        plan, sizes = json.loads(read_text(marks / _PLAN, LINE)), _sizes(marks)
        if "kind" not in plan and sizes and _is_whole(sizes, plan["gigabytes"] * 1e9):  # of an earlier version, which had no last mark
            return
        begun_by = command(plan, out)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:  # it may be anybody's
        raise InputError(f"{marks}: not the marks of a look-alike data set: {in_a_line(error)}", "draw the set anew") from error
    found = f"{out}: found {count(len(sizes), 'part')} of a look-alike data set that is not whole"
    raise InputError(f"{found}: it is being written, or its writing ended", f"wait, or go on with it: {begun_by}")


def command(plan: Mapping[str, Any], out: Path) -> str:
    """The command that began a set, and goes on with it."""
    words = ["caraml", "data", "prepare", str(plan.get("kind", "weather"))]
    words += [str(one) for one in [plan.get("application"), *plan.get("inputs", [])] if one]
    left_out = {"kind", "application", "inputs", "version"}
    for name, value in plan.items():
        if name not in left_out and value is not None:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--out", str(out)])


def _sizes(marks: Path) -> dict[int, int]:
    texts = {int(path.name): read_text(path, LINE) for path in marks.iterdir() if path.name.isdecimal()}
    return {number: int(text or texts[0]) for number, text in texts.items()}  # an earlier version noted the first part's only


def _is_whole(sizes: Mapping[int, int], wanted: float) -> bool:
    """Whether no part is left out, and as many bytes as ``wanted`` are there, within half a part."""
    number, mean = max(sizes) + 1, sum(sizes.values()) / len(sizes)
    return len(sizes) == number and wanted - mean * number < mean / 2


def _missing(sizes: Mapping[int, int], wanted: float, share: float = 1.0) -> list[int]:
    """The parts to write next: those left out, then a ``share`` of as many as the mean size says."""
    highest = max(sizes)
    left_out = [number for number in range(highest) if number not in sizes]
    mean = sum(sizes.values()) / len(sizes)
    short = wanted - mean * (highest + 1)
    if short < mean / 2:
        return left_out
    return [*left_out, *range(highest + 1, highest + 1 + max(round(short / mean * share), 1))]


def _write_part(marks: Path, write: Write, number: int) -> None:
    write_file(marks / str(number), str(write(number)), sync="none")
