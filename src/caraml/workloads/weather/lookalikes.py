"""Look-alike files of the weather and climate applications."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import multiprocessing
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from caraml.base.errors import EnvironmentUnfitError, InputError, unknown_name
from caraml.base.files import write_file
from caraml.data.store import build_folder, make_parent, prepared_once
from caraml.system.affinity import usable_cpus

Size = Literal["tiny", "small"]
"""``tiny``: seconds to make and to learn, for tests. ``small``: samples of the published size, a few hundred megabytes."""

_WORKLOADS = {
    "ap1": "temperature_postprocessing",
    "ap2": "tweet_rain_classification",
    "ap3": "radiation_emulation",
    "ap4": "ensemble_postprocessing",
    "ap5": "downscaling_gan",
    "ap6": "regime_clustering",
    "atmorep": "atmorep",
}
_LOOKALIKE_VERSION = 1
_WHOLE = {"ap2": "all of its texts are read into memory", "ap4": "a set of it is a fixed number of files"}
"""Applications whose sets cannot have any number of files, and why."""
_FEWEST = 50
"""Files of a set of a given size, all as large as one another: then the size is right within 1 %."""
_MOST_WRITERS = 16
"""Processes that write at the same time; each holds several times what a file has in memory."""
_PR_SET_PDEATHSIG = 1
_BEGUN, _PLAN = ".lookalike", "plan.json"
"""Folder in a set that is being written: what was asked for, and an empty file for each number that is done."""
"""Raised when a generator changes what it writes."""


@dataclass(frozen=True)
class PreparedWeather:
    """Look-alike files that were written."""

    folder: Path
    files: int
    bytes: int


def prepare_weather(application: str, out: Path, size: str = "tiny", seed: int = 0) -> PreparedWeather:
    """Write look-alike files of an application (``ap1`` ... ``ap6``, ``atmorep``) into the new folder ``out``.

    Raises:
        InputError: unknown application or size, or ``out`` exists and is not empty.
    """
    _refuse_unknown(application, size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: found files; expected a new or empty folder")
    build_folder(out, lambda folder: _write(application, folder, size, seed))
    return _prepared(out)


def grow_weather(  # noqa: PLR0917 -- as prepare_weather, with a size and somebody to tell
    application: str,
    out: Path,
    gigabytes: float,
    size: str = "small",
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> PreparedWeather:
    """Write look-alike files of ``gigabytes`` (1e9 bytes) in all into ``out``, several at a time; the same call goes on after an end.

    Every file has another content, and as many samples as a file of ``size``. ``tell`` gets the files that are done, and all.

    Raises:
        InputError: an unknown application or size, one whose sets do not grow, too few files, or other files in ``out``.
        EnvironmentUnfitError: the disk has no room for all of it.
    """
    _refuse_unknown(application, size)
    if application in _WHOLE:
        raise InputError(f"{application}: found --gigabytes {gigabytes:g}, expected none: {_WHOLE[application]}", "leave out --gigabytes")
    if not math.isfinite(gigabytes):
        raise InputError(f"--gigabytes: found {gigabytes:g}, expected a number")
    marks = out / _BEGUN
    plan = json.dumps({"application": application, "gigabytes": gigabytes, "size": size, "seed": seed, "version": _LOOKALIKE_VERSION})
    begun = (marks / _PLAN).read_text(encoding="utf-8") if (marks / _PLAN).is_file() else None
    if begun != plan and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: found {begun or 'files'}; expected a new or empty folder, or what the same command began: {plan}")
    make_parent(out)
    _refuse_full(out, gigabytes * 1e9)
    for left in out.glob(".*.tmp"):  # by a writer that was killed
        shutil.rmtree(left, ignore_errors=True)
    marks.mkdir(parents=True, exist_ok=True)
    write_file(marks / _PLAN, plan)
    if not (marks / "0").exists():
        _write_first(application, out, size, seed)
    each = int((marks / "0").read_text(encoding="utf-8"))
    count = round(gigabytes * 1e9 / each)
    if count < _FEWEST:
        shutil.rmtree(out)
        least = f"--gigabytes {math.ceil(_FEWEST * each / 1e7) / 100:g} or more"
        smaller = ", or --size tiny" if size != "tiny" else ""
        raise InputError(
            f"--gigabytes: found {gigabytes:g}, which is {count} files of {each:,} bytes; expected {_FEWEST} or more", least + smaller
        )
    missing = [number for number in range(count) if not (marks / str(number)).exists()]
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may wait for ever
    with ProcessPoolExecutor(min(usable_cpus(1), _MOST_WRITERS, len(missing) or 1), context, _end_with_parent) as pool:
        jobs = [pool.submit(_write_one, application, out, size, seed, number) for number in missing]
        try:
            for done, job in enumerate(as_completed(jobs), count - len(missing) + 1):
                job.result()
                tell(done, count)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return _prepared(out)


def _write_first(application: str, out: Path, size: str, seed: int) -> None:
    """Write the first file and what goes with it, and note its size, which is that of every other."""
    room = out / _BEGUN / "first"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    _lookalike(application)(room, size, seed, 0)
    size_of_all = sum(path.stat().st_size for path in room.glob("*.nc"))
    for path in room.iterdir():
        path.replace(out / path.name)
    room.rmdir()
    write_file(out / _BEGUN / "0", str(size_of_all))


def _write_one(application: str, out: Path, size: str, seed: int, number: int) -> None:
    _lookalike(application)(out, size, seed, number)
    write_file(out / _BEGUN / str(number), "", sync="none")


def _end_with_parent() -> None:
    """Have the kernel end this process when the one that started it does: nobody else would."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _refuse_full(out: Path, wanted: float) -> None:
    """Raise ``EnvironmentUnfitError`` where a set of ``wanted`` bytes does not fit on the disk beside what is there of it."""
    there = sum(path.stat().st_size for path in out.glob("*.nc"))
    free = shutil.disk_usage(out.parent).free
    if wanted - there > free:
        raise EnvironmentUnfitError(
            f"{out}: found {free / 1e9:,.1f} GB free on its disk, expected the {(wanted - there) / 1e9:,.1f} GB that are to be written",
            "fewer --gigabytes, or --out on another disk",
        )


def _prepared(out: Path) -> PreparedWeather:
    written = [path for path in out.iterdir() if path.is_file()]
    return PreparedWeather(out, len(written), sum(path.stat().st_size for path in written))


def _refuse_unknown(application: str, size: str) -> None:
    if application not in _WORKLOADS:
        raise unknown_name("weather application", application, _WORKLOADS)
    if size not in get_args(Size):
        raise unknown_name("size", size, get_args(Size))


def default_weather_folder(application: str, size: Size) -> Path:
    """The look-alike set of an application in the folder of prepared data, made on first use."""
    key = {"kind": f"weather-{application}", "size": size, "version": _LOOKALIKE_VERSION}
    return prepared_once(key, lambda folder: _write(application, folder, size, 0))


def _write(application: str, folder: Path, size: str, seed: int) -> None:
    _lookalike(application)(folder, size, seed)


def _lookalike(application: str) -> Callable[..., None]:
    """What writes the files of an application."""
    writer: Callable[..., None] = importlib.import_module(f"caraml.workloads.{_WORKLOADS[application]}.data").write_lookalike
    return writer
