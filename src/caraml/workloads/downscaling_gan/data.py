"""Coarse predictors and fine temperature for downscaling, from monthly NetCDF files."""

from __future__ import annotations

import bisect
import itertools
import json
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caraml.base.errors import InputError, in_a_line
from caraml.base.files import write_file
from caraml.base.limits import LINE, read_text
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, smooth, split_files, without_gaps

INPUTS = (
    "hsurf_tar",
    "t_2m_in",
    *(f"t_ml{level}_in" for level in (137, 135, 131, 127, 122, 115)),
    "sp_in",
    "slhf_in",
    "sshf_in",
    "u_10m_in",
    "v_10m_in",
    "blh_in",
    "hsurf_in",
)
"""The predictors, in order; the fine surface height is one of them."""
TARGETS = ("t_2m_tar", "hsurf_tar")
GRID = (96, 120)
_DIMENSIONS = ("time", "rlat", "rlon")
LAYOUT = Layout(dict.fromkeys((*INPUTS, TARGETS[0]), _DIMENSIONS), {})
PATTERN = "downscaling_tier2_train_*.nc"
NORMALIZATION = "normalization.json"
"""Mean and standard deviation of each variable over times and places, beside the files."""
_SIZES = {"tiny": (3, 24, 32, 40), "small": (3, 144, *GRID)}
"""Files, hours in each, rows, columns."""


class DownscalingSamples(WeatherSamples):
    """A sample is ``(predictors (15, H, W), targets (2, H, W))``, both normalised; targets are 2 m temperature and surface height."""

    application = "ap5"

    def __init__(self, folder: Path, split: Split = "train") -> None:
        """Open the monthly files of ``folder``; of several files the last is for validation.

        Raises:
            InputError: as :class:`NetcdfFiles`; a grid that pooling cannot halve three times; a variable without normalisation.
        """
        self.files = NetcdfFiles(split_files(find_files(folder, PATTERN), split), LAYOUT)
        first = self.files.lengths[0]
        for path, found in zip(self.files.paths, self.files.lengths, strict=True):
            if found["rlat"] % 8 or found["rlon"] % 8 or (found["rlat"], found["rlon"]) != (first["rlat"], first["rlon"]):
                expected = f"multiples of 8, the same in every file ({first['rlat']} x {first['rlon']} in the first)"
                raise InputError(f"{path}: found a grid of {found['rlat']} x {found['rlon']}; expected {expected}")
        self.grid = (first["rlat"], first["rlon"])
        self._scales = _normalization(folder / NORMALIZATION)
        self._ends = list(itertools.accumulate(lengths["time"] for lengths in self.files.lengths))

    def __len__(self) -> int:
        """The number of hours."""
        return self._ends[-1]

    def __getitem__(self, position: int) -> Sample:
        """Sample ``position``: one hour."""
        number = bisect.bisect_right(self._ends, position)
        time = position - (self._ends[number - 1] if number else 0)
        values = {name: self._normalized(number, name, time) for name in (*INPUTS, TARGETS[0])}
        path = self.files.paths[number]
        targets = np.stack([complete(values[name], path, name) for name in TARGETS])
        return torch.from_numpy(np.stack([without_gaps(values[name]) for name in INPUTS])), torch.from_numpy(targets)

    def _normalized(self, number: int, name: str, time: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        mean, std = self._scales[name]
        return (self.files.read(number, name, time) - np.float32(mean)) / np.float32(std)


def synthetic_hour(rng: np.random.Generator, grid: tuple[int, int]) -> tuple[Any, ...]:
    """Standard normal predictors and targets."""
    return rng.standard_normal((len(INPUTS), *grid), dtype=np.float32), rng.standard_normal((len(TARGETS), *grid), dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int, only: int | None = None) -> None:
    """Write months whose fine temperature is the coarse one, corrected by the height that the coarse topography lacks.

    ``only``: the number of the one file to write; it may be any.
    """
    files, hours, rows, columns = _SIZES[size]
    rng, shape = np.random.default_rng(seed), (hours, rows, columns)
    fine = np.abs(600 * smooth(rng, (rows, columns), 1.5))
    coarse = _blurred(fine)
    for number in range(files) if only is None else (only,):
        rng = np.random.default_rng([seed, 1, number])
        air = 283 + 6 * smooth(rng, shape, 8)
        values = {name: smooth(rng, shape, 8) for name in INPUTS}
        values["t_2m_in"], values["hsurf_in"] = air, np.broadcast_to(coarse, shape)
        values["hsurf_tar"] = np.broadcast_to(fine, shape)
        values["t_2m_tar"] = air - 0.0065 * (fine - coarse) + 0.3 * values["slhf_in"] + 0.1 * rng.standard_normal(shape)
        variables: dict[str, tuple[tuple[str, ...], Any]] = {name: (_DIMENSIONS, v.astype(np.float32)) for name, v in values.items()}
        variables["time"] = (("time",), 3600.0 * (np.arange(hours) + number * hours))
        chunks = dict.fromkeys(values, (1, rows, columns))
        write_netcdf(
            folder / PATTERN.replace("*", f"1995-{number + 1:02d}"), dict(zip(_DIMENSIONS, shape, strict=True)), variables, chunks=chunks
        )
        if number == 0:
            sums = {name: [float(v.mean()), max(float(v.std()), 1e-6)] for name, v in values.items()}
            write_file(folder / NORMALIZATION, json.dumps(sums, indent=1) + "\n")


def _blurred(field: np.ndarray[Any, Any], side: int = 8) -> np.ndarray[Any, Any]:
    """Means over squares of ``side`` points, each repeated over its square."""
    rows, columns = field.shape
    means = field.reshape(rows // side, side, columns // side, side).mean((1, 3))
    return means.repeat(side, 0).repeat(side, 1)


def _normalization(path: Path) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation by variable."""
    try:
        table = json.loads(read_text(path, LINE))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable: {in_a_line(error)}", 'it holds `"variable": [mean, standard deviation]`') from error
    for name in (*INPUTS, TARGETS[0]):
        pair = table.get(name) if isinstance(table, dict) else None
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, int | float) for value in pair) and pair[1] > 0):
            raise InputError(f"{path}: {name}: found {reprlib.repr(pair):.100}; expected [mean, standard deviation above 0]")
    return {name: (pair[0], pair[1]) for name, pair in table.items()}
