"""The weather applications, a file each beside this one: their parameters, how their input is opened, and look-alike files."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import Field

from caraml.base.errors import InputError, unknown_name
from caraml.base.files import write_file
from caraml.base.format import count
from caraml.base.toml import FrozenModel
from caraml.data.store import MARKS, begin, build_folder, finish, grow, prepared_once
from caraml.suite.model import WORKLOAD_ALIASES
from caraml.workloads.base import BatchSource, BuildContext, Workload, given_path, later, open_source

if TYPE_CHECKING:
    import numpy as np

    from caraml.data.loader import MapDataset, Synthetic


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


class TemperatureParams(WeatherParams):
    """Parameters of the `temperature_postprocessing` workload (`ap1`)."""

    patch: int = Field(256, ge=32, multiple_of=32, description="height and width of a sample in grid points")
    learning_rate: float = Field(1e-3, gt=0, description="of the optimizer")


class TweetParams(WeatherParams):
    """Parameters of the `tweet_rain_classification` workload (`ap2`)."""

    preset: Literal["small", "tiny"] = Field("small", description="DeBERTa-v3-small, or a tiny network of its kind")
    weights: str | None = Field(
        None,
        description="folder of a trained DeBERTa-v3 of the preset's size, with tokenizer.json; random weights and hashed words if absent",
    )
    tokens: int = Field(64, ge=4, le=512, description="tokens per text; the report does not say how many")
    learning_rate: float = Field(3e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.01, ge=0, description="of the optimizer")


class RadiationParams(WeatherParams):
    """Parameters of the `radiation_emulation` workload (`ap3`)."""

    cache: bool = Field(True, description="keep samples in memory after they are first read; false is the report's --nocache")
    learning_rate: float | None = Field(None, gt=0, description="1e-4 x global batch / 256 if absent")
    heating_weight: float = Field(1e3, ge=0, description="weight of the heating rates' squared error; the fluxes' is 1")


class EnsembleParams(WeatherParams):
    """Parameters of the `ensemble_postprocessing` workload (`ap4`)."""

    rows: int | None = Field(None, ge=4, description="rows of the grid, which files must have; random data have 361 if absent")
    columns: int | None = Field(None, ge=4, description="columns of the grid, which files must have; random data have 720 if absent")
    learning_rate: float = Field(1e-2, gt=0, description="of the optimizer")


class DownscalingParams(WeatherParams):
    """Parameters of the `downscaling_gan` workload (`ap5`)."""

    own_step: ClassVar[bool] = True
    uncompiled: ClassVar[str] = "the gradient penalty is differentiated twice, which torch's compiled graphs cannot be"

    rows: int = Field(96, ge=16, multiple_of=8, description="rows of random data; files have their own")
    columns: int = Field(120, ge=16, multiple_of=8, description="columns of random data; files have their own")
    learning_rate: float = Field(5e-5, gt=0, description="of the generator")
    critic_learning_rate: float = Field(1e-6, gt=0, description="of the critic")


class RegimeParams(WeatherParams):
    """Parameters of the `regime_clustering` workload (`ap6`)."""

    own_step: ClassVar[bool] = True

    crop: int = Field(280, ge=32, description="height and width of a crop in grid points")
    crop_area: float | None = Field(
        None, gt=0, le=1, description="share of the field's area that each crop has before it is resized; 80 to 100 % at random if absent"
    )
    prototypes: int = Field(40, ge=2, description="clusters of each of the four heads")
    # By default as many as the report's training set has.
    samples: int = Field(35_064, ge=1, description="samples in an epoch of random data; files have their own")
    learning_rate: float = Field(0.3, gt=0, description="of the optimizer")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the optimizer")
    weight_decay: float = Field(1e-6, ge=0, description="of the optimizer")


class AtmoRepParams(WeatherParams):
    """Parameters of the `atmorep` workload."""

    preset: Literal["384M", "tiny"] = Field("384M", description="the public three-field setting of 2024, or one for CPUs")
    learning_rate: float = Field(1e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.025, ge=0, description="of the optimizer")


def open_input(
    ctx: BuildContext[Any],
    application: str,
    files: Callable[[Path, Literal["train", "validation"]], MapDataset],
    draw: Callable[[np.random.Generator], Any],
    samples: int,
    *,
    kind: type[Synthetic] | None = None,
) -> BatchSource:
    """Open the input that the parameters ask for, held-out batches included if there are any, in the phase ``data``.

    ``files`` opens a part of a folder, by default that of the look-alikes of an ``application`` (``"ap1"`` ...). Random data have
    ``samples`` that ``draw`` makes, in a data set of :class:`Synthetic` or another ``kind``.
    """
    from caraml.data.loader import InOrder, Synthetic

    params: WeatherParams = ctx.params
    with ctx.phase("data"):
        if params.data != "files":
            made = (kind or Synthetic)(application, draw, samples, ctx.seed)
            return open_source(made, ctx, workers=params.workers, resident=params.data == "synthetic-device")
        folder = given_path(params.folder) if params.folder else default_weather_folder(application, params.lookalike)
        source = open_source(files(folder, "train"), ctx, workers=params.workers, resident=False)
    return replace(source, validation=lambda: InOrder(files(folder, "validation"), ctx.micro_batch, ctx.device))


def check_files(name: str, params: WeatherParams, folder: Path) -> None:
    """See that a folder has the application's files, and the first of them its variables: there may be thousands."""
    from caraml.workloads.weather.netcdf import NetcdfFiles, find_files

    if params.data == "files" and params.folder is not None:
        data = importlib.import_module(f"{__name__}.{name}")
        NetcdfFiles(find_files(folder / params.folder, getattr(data, "PATTERN", "*.nc"))[:1], data.LAYOUT)


def _workload(name: str, title: str, params: type[WeatherParams], *packages: str, own_check: bool = False) -> Workload[Any]:
    module = f"{__name__}.{name}"
    check = later(module, "check") if own_check else partial(check_files, name)
    return Workload(title, params, later(module, "build"), ("h5netcdf", "h5py", *packages), check)


WORKLOADS = {
    "temperature_postprocessing": _workload("temperature_postprocessing", "temperature post-processing, U-Net", TemperatureParams),
    "tweet_rain_classification": _workload(
        "tweet_rain_classification", "tweet rain classification, DeBERTa-v3-small", TweetParams, "transformers", own_check=True
    ),
    "radiation_emulation": _workload("radiation_emulation", "radiation emulation, 1-D CNN", RadiationParams),
    "ensemble_postprocessing": _workload("ensemble_postprocessing", "ensemble post-processing, U-Net", EnsembleParams, own_check=True),
    "downscaling_gan": _workload("downscaling_gan", "downscaling, WGAN-GP", DownscalingParams),
    "regime_clustering": _workload("regime_clustering", "weather-regime clustering, DeepCluster v2", RegimeParams),
    "atmorep": _workload("atmorep", "AtmoRep-style multi-field transformer", AtmoRepParams),
}


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


def prepare_weather(application: str, out: Path, size: str = "tiny", seed: int = 0) -> tuple[int, int]:
    """Write look-alike files of an application (``ap1`` ... ``ap6``, ``atmorep``) into the new folder ``out``; how many, and their bytes.
    Raises ``InputError`` for an unknown application or size, and where ``out`` exists and is not empty."""
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
) -> tuple[int, int]:
    """Write look-alike files of ``gigabytes`` (1e9 bytes) in all into ``out``, several at a time; the same call goes on after an end.

    Every part has another content, and samples as those of ``size``. ``tell`` gets the parts that are done, and all. Returns files and
    bytes. Raises ``InputError`` for an unknown application or size, one whose sets do not grow, too few files, or other files in ``out``,
    and ``EnvironmentUnfitError`` where the disk has no room for all of it.
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
            write_file(marks / "0", str(data.write_lookalike(out, size, seed, 0)))  # the size of every other as well
        each, what = int((marks / "0").read_text(encoding="utf-8")), "file"
    parts = round(gigabytes * 1e9 / each)
    if parts < _FEWEST:
        shutil.rmtree(out)
        least = f"--gigabytes {math.ceil(_FEWEST * each / 1e7) / 100:g} or more"
        smaller = ", or less with --size tiny" if size != "tiny" else ""
        found = f"--gigabytes: found {gigabytes:g}, which is {count(parts, what)} of {each:,} bytes; expected {_FEWEST} or more"
        raise InputError(found, least + smaller)
    if in_parts and data.write_room(out, size, parts):
        for mark in marks.glob("[0-9]*"):  # of values of files that are gone
            mark.unlink()
    grow(marks, parts * each / 1e9, partial(_write_one, application, out, each, (size, seed)), tell)
    finish(marks)
    return _prepared(out)


def _write(application: str, folder: Path, size: str, seed: int) -> None:
    """Write the files of a set as it is trained on by default."""
    data = _data(application)
    if hasattr(data, "write_room"):  # all times of a few files at once
        data.write_lookalike(folder, size, seed)
        return
    for number in range(data.LOOKALIKE[size][0]):
        data.write_lookalike(folder, size, seed, number)


def _write_one(application: str, out: Path, each: int, given: tuple[str, int], number: int) -> int:
    _data(application).write_lookalike(out, *given, number)
    return each


def _prepared(out: Path) -> tuple[int, int]:
    written = [path for path in out.iterdir() if path.is_file()]
    return len(written), sum(path.stat().st_size for path in written)


def _refuse_unknown(application: str, size: str) -> None:
    if application not in _WORKLOADS:
        raise unknown_name("weather application", application, _WORKLOADS)
    if size not in get_args(Size):
        raise unknown_name("size", size, get_args(Size))


def default_weather_folder(application: str, size: Size) -> Path:
    """The look-alike set of an application in the folder of prepared data, made on first use."""
    key = {"kind": f"weather-{application}", "size": size, "version": _LOOKALIKE_VERSION}
    return prepared_once(key, lambda folder: _write(application, folder, size, 0))


def _data(application: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_WORKLOADS[application]}")
