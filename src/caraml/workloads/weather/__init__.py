"""What the weather applications share: parameters of their input, how it is opened, and look-alike files."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from caraml.base.errors import InputError, unknown_name
from caraml.base.files import write_file
from caraml.base.format import count
from caraml.base.toml import FrozenModel
from caraml.data.store import MARKS, begin, build_folder, finish, grow, prepared_once
from caraml.suite.model import WORKLOAD_ALIASES
from caraml.workloads.base import VALIDATION_BATCHES, BatchSource, BuildContext, given_path, open_source

if TYPE_CHECKING:
    import torch

    from caraml.data.loader import MapDataset


class WeatherParams(FrozenModel):
    """Parameters that every weather application has."""

    data: Literal["files", "synthetic", "synthetic-device"] = Field(
        "files", description="NetCDF files, random samples made on the host by the loader, or random samples already on the device"
    )
    folder: str | None = Field(None, description="folder of the files; without it, look-alikes that are made on first use")
    lookalike: Literal["tiny", "small"] = Field(
        "small", description="look-alikes used without a folder: samples of the published size, or tiny ones (AP1: patch = 32)"
    )
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")


def open_input(
    ctx: BuildContext[Any],
    application: str,
    files: Callable[[Path, Literal["train", "validation"]], MapDataset],
    synthetic: MapDataset,
) -> BatchSource:
    """Open the input that the parameters ask for, held-out batches included if there are any.

    Args:
        ctx: of the task that is built.
        application: name of the look-alike set, ``"ap1"`` ...
        files: opens the training or validation part of a folder.
        synthetic: the random data set.
    """
    params: WeatherParams = ctx.params
    if params.data != "files":
        return open_source(synthetic, ctx, workers=params.workers, resident=params.data == "synthetic-device")
    folder = given_path(params.folder) if params.folder else default_weather_folder(application, params.lookalike)
    source = open_source(files(folder, "train"), ctx, workers=params.workers, resident=False)
    return replace(source, validation=lambda: _once(files(folder, "validation"), ctx.micro_batch, ctx.device))


def check_files(params: WeatherParams, folder: Path) -> None:
    """See that a folder has the application's files, and the first of them its variables: there may be thousands."""
    from caraml.workloads.weather.netcdf import NetcdfFiles, find_files

    if params.data == "files" and params.folder is not None:
        data = importlib.import_module(f"{type(params).__module__}.training")
        NetcdfFiles(find_files(folder / params.folder, getattr(data, "PATTERN", "*.nc"))[:1], data.LAYOUT)


def _once(samples: MapDataset, batch_size: int, device: torch.device) -> Iterator[Any]:
    """The first batches of a data set in order, the last of them perhaps smaller."""
    from torch.utils.data import default_collate

    from caraml.data.loader import to_device

    last = min(len(samples), VALIDATION_BATCHES * batch_size)
    for start in range(0, last, batch_size):
        batch = default_collate([samples[position] for position in range(start, min(start + batch_size, last))])
        yield next(to_device(iter([batch]), device))


Size = Literal["tiny", "small"]
"""``tiny``: seconds to make and to learn, for tests. ``small``: samples of the published size, a few hundred megabytes."""

_WORKLOADS = {**WORKLOAD_ALIASES, "atmorep": "atmorep"}
"""Applications by the names of their look-alike sets: those with a short name are the weather applications AP1 to AP6."""
_LOOKALIKE_VERSION = 1
"""Raised when a generator changes what it writes."""
_WHOLE = {"ap2": "all of its texts are read into memory"}
"""Applications whose sets do not grow, and why."""
_FEWEST = 50
"""Parts of a set of a given size, all as large as one another: then the size is right within 1 %. A part is a file, or, of applications
whose sets are so many files, some times of all."""


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
    build_folder(out, lambda folder: _lookalike(application)(folder, size, seed))
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

    Every part has another content, and samples as those of ``size``. ``tell`` gets the parts that are done, and all.

    Raises:
        InputError: an unknown application or size, one whose sets do not grow, too few files, or other files in ``out``.
        EnvironmentUnfitError: the disk has no room for all of it.
    """
    _refuse_unknown(application, size)
    if application in _WHOLE:
        raise InputError(f"{application}: found --gigabytes {gigabytes:g}, expected none: {_WHOLE[application]}", "leave out --gigabytes")
    marks = out / MARKS
    plan = {"application": application, "gigabytes": gigabytes, "size": size, "seed": seed, "version": _LOOKALIKE_VERSION}
    begin(out, marks, plan)
    for left in out.glob(".*.tmp"):  # by a writer that was killed
        shutil.rmtree(left, ignore_errors=True)
    data = _data(application)
    in_parts = hasattr(data, "write_room")
    if in_parts:
        each, what = data.part_bytes(size), "part"
    else:
        if not (marks / "0").exists():
            _write_first(application, out, size, seed)
        each, what = int((marks / "0").read_text(encoding="utf-8")), "file"
    parts = round(gigabytes * 1e9 / each)
    if parts < _FEWEST:
        shutil.rmtree(out)
        least = f"--gigabytes {math.ceil(_FEWEST * each / 1e7) / 100:g} or more"
        smaller = ", or less with --size tiny" if size != "tiny" else ""
        raise InputError(
            f"--gigabytes: found {gigabytes:g}, which is {count(parts, what)} of {each:,} bytes; expected {_FEWEST} or more",
            least + smaller,
        )
    if in_parts and data.write_room(out, size, parts):
        for mark in marks.glob("[0-9]*"):  # of values of files that are gone
            mark.unlink()
    grow(marks, parts * each / 1e9, partial(_write_one, application, out, each, (size, seed)), tell)
    finish(marks)
    return _prepared(out)


def _write_first(application: str, out: Path, size: str, seed: int) -> None:
    """Write the first file and what goes with it, and note its size, which is that of every other."""
    room = out / MARKS / "first"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    _lookalike(application)(room, size, seed, 0)
    size_of_all = sum(path.stat().st_size for path in room.glob("*.nc"))
    for path in room.iterdir():
        path.replace(out / path.name)
    room.rmdir()
    write_file(out / MARKS / "0", str(size_of_all))


def _write_one(application: str, out: Path, each: int, given: tuple[str, int], number: int) -> int:
    _lookalike(application)(out, *given, number)
    return each


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
    return prepared_once(key, lambda folder: _lookalike(application)(folder, size, 0))


def _lookalike(application: str) -> Callable[..., None]:
    """What writes the files of an application."""
    writer: Callable[..., None] = _data(application).write_lookalike
    return writer


def _data(application: str) -> ModuleType:
    return importlib.import_module(f"caraml.workloads.{_WORKLOADS[application]}.training")
