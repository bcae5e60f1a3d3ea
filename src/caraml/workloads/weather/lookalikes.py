"""Look-alike files of the weather and climate applications."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from caraml.base.errors import InputError, unknown_name
from caraml.data.store import build_folder, prepared_once

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
    if application not in _WORKLOADS:
        raise unknown_name("weather application", application, _WORKLOADS)
    if size not in get_args(Size):
        raise unknown_name("size", size, get_args(Size))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: found files; expected a new or empty folder")
    build_folder(out, lambda folder: _write(application, folder, size, seed))
    written = [path for path in out.iterdir() if path.is_file()]
    return PreparedWeather(out, len(written), sum(path.stat().st_size for path in written))


def default_weather_folder(application: str, size: Size) -> Path:
    """The look-alike set of an application in the folder of prepared data, made on first use."""
    key = {"kind": f"weather-{application}", "size": size, "version": _LOOKALIKE_VERSION}
    return prepared_once(key, lambda folder: _write(application, folder, size, 0))


def _write(application: str, folder: Path, size: str, seed: int) -> None:
    importlib.import_module(f"caraml.workloads.{_WORKLOADS[application]}.data").write_lookalike(folder, size, seed)
