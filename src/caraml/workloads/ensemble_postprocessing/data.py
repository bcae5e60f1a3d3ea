"""Ensemble forecasts on a global grid and the analysis that came true, from the NetCDF files of ENS-10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from caraml.base.errors import InputError
from caraml.workloads.weather.netcdf import FloatArray, Layout, NetcdfFiles, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, smooth, without_gaps

VARIABLES = ("Z", "T", "Q", "W", "D", "U", "V")
LEVEL = 50000
"""Pressure of the level that is read and forecast [Pa]."""
GRID = (361, 720)
_DIMENSIONS = ("time", "plev", "lat", "lon")
_INPUTS = ("ENS10_pl_mean_normalized.nc", "ENS10_pl_std_normalized.nc")
_FORECAST = ("ENS10_pl_mean.nc", "ENS10_pl_std.nc")
_ANALYSIS = "ERA5_z500.nc"
_VALIDATION_SHARE = 10
"""One in so many times, the last ones, is held out."""
_SIZES = {"tiny": (20, 37, 72), "small": (8, *GRID)}
"""Times, rows, columns; an odd number of rows on purpose."""


class EnsembleSamples(WeatherSamples):
    """A sample is ``(fields (14, H, W), mean (H, W), spread (H, W), analysis (H, W))``.

    Fields are normalised, ensemble mean and standard deviation of one variable side by side; the others are of the geopotential at
    500 hPa [m²/s²].
    """

    application = "ap4"

    def __init__(self, folder: Path, split: Split = "train", grid: tuple[int, int] | None = None) -> None:
        """Open the five files of ``folder``; the last tenth of the times is for validation.

        Raises:
            InputError: as :class:`NetcdfFiles`; files of different lengths, or without the level, or of another grid than ``grid``.
        """
        inputs = Layout(dict.fromkeys(VARIABLES, _DIMENSIONS) | {"plev": ("plev",)}, {})
        only_z = Layout({"Z": _DIMENSIONS, "plev": ("plev",)}, {})
        self._inputs = NetcdfFiles([folder / name for name in _INPUTS], inputs)
        self.files = NetcdfFiles([folder / name for name in (*_FORECAST, _ANALYSIS)], only_z)
        self._check(grid)
        self._input_level, self._level = (self._level_of(files) for files in (self._inputs, self.files))
        times = self.files.lengths[0]["time"]
        training = max(times - max(times // _VALIDATION_SHARE, 1), 1)
        self._times = range(training) if split == "train" else range(min(training, times - 1), times)
        self.grid = (self.files.lengths[0]["lat"], self.files.lengths[0]["lon"])

    def __len__(self) -> int:
        """The number of times."""
        return len(self._times)

    def __getitem__(self, position: int) -> Sample:
        """Sample ``position``: one time."""
        time = self._times[position]
        fields = np.empty((2 * len(VARIABLES), *self.grid), np.float32)
        for index, name in enumerate(VARIABLES):
            for kind in range(2):
                fields[2 * index + kind] = self._inputs.read(kind, name, (time, self._input_level[kind]))
        self.files.missing += int(np.isnan(fields).sum())
        others = [self._read(number, time) for number in range(3)]
        return tuple(torch.from_numpy(np.ascontiguousarray(value)) for value in (without_gaps(fields), *others))

    def describe(self) -> dict[str, Any]:
        """The provenance of a record, with the bytes of all five files."""
        described = super().describe()
        self._inputs.close()
        paths = (*self._inputs.paths, *self.files.paths)
        return {**described, "files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}

    def _read(self, number: int, time: int) -> FloatArray:
        return complete(self.files.read(number, "Z", (time, self._level[number])), self.files.paths[number], "Z")

    def _level_of(self, files: NetcdfFiles) -> list[int]:
        places = []
        for number, path in enumerate(files.paths):
            levels = files.read(number, "plev").tolist()
            if LEVEL not in levels:
                raise InputError(f"{path}: plev: found {levels}; expected {LEVEL} among them")
            places.append(levels.index(LEVEL))
        files.close()
        return places

    def _check(self, grid: tuple[int, int] | None) -> None:
        lengths = [*self._inputs.lengths, *self.files.lengths]
        first = lengths[0]
        for path, found in zip((*self._inputs.paths, *self.files.paths), lengths, strict=True):
            for name in ("time", "lat", "lon"):
                if found[name] != first[name]:
                    raise InputError(f"{path}: dimension {name}: found {found[name]}; expected {first[name]} as in {_INPUTS[0]}")
            if grid is not None and (found["lat"], found["lon"]) != grid:
                raise InputError(f"{path}: found a grid of {found['lat']} x {found['lon']}; expected {grid[0]} x {grid[1]}")


def synthetic_forecast(rng: np.random.Generator, grid: tuple[int, int]) -> tuple[Any, ...]:
    """Standard normal fields and analysis, as normalised files would have them; ensemble of mean 0 and spread 1."""
    fields = rng.standard_normal((2 * len(VARIABLES), *grid), dtype=np.float32)
    return fields, np.zeros(grid, np.float32), np.ones(grid, np.float32), rng.standard_normal(grid, dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int) -> None:
    """Write an ensemble that is biased by temperature and wind and too sure of itself, and the analysis."""
    times, rows, columns = _SIZES[size]
    rng, shape, levels = np.random.default_rng(seed), (times, 2, rows, columns), np.array([50000, 85000], np.int32)
    scale = {"Z": (54000, 900), "T": (255, 8), "Q": (1e-3, 5e-4), "W": (0, 0.3), "D": (0, 2e-5), "U": (8, 8), "V": (0, 6)}
    anomaly = {name: smooth(rng, shape, 6) for name in VARIABLES}
    mean = {name: (scale[name][0] + scale[name][1] * anomaly[name]).astype(np.float32) for name in VARIABLES}
    std = {name: (scale[name][1] * (0.1 + 0.03 * np.abs(smooth(rng, shape)))).astype(np.float32) for name in VARIABLES}
    error = 0.6 * anomaly["T"] - 0.4 * anomaly["U"] + 0.3 * smooth(rng, shape, 2)  # in spreads of the ensemble, twice
    truth = mean["Z"] + 2 * std["Z"] * error
    lengths = {"time": times, "plev": 2, "lat": rows, "lon": columns}
    coordinates: dict[str, tuple[tuple[str, ...], Any]] = {
        "plev": (("plev",), levels),
        "lat": (("lat",), np.linspace(90, -90, rows, dtype=np.float32)),
        "lon": (("lon",), np.linspace(0, 360, columns, endpoint=False, dtype=np.float32)),
    }
    chunk = (1, 1, rows, columns)
    for values, raw, normalized in ((mean, _FORECAST[0], _INPUTS[0]), (std, _FORECAST[1], _INPUTS[1])):
        scaled = {name: (field - field.mean(0)) / (field.std(0) + 0.1) for name, field in values.items()}
        for name, fields in ((raw, values), (normalized, scaled)):
            variables = {key: (_DIMENSIONS, field.astype(np.float32)) for key, field in fields.items()}
            write_netcdf(folder / name, lengths, {**variables, **coordinates}, chunks=dict.fromkeys(VARIABLES, chunk))
    write_netcdf(folder / _ANALYSIS, lengths, {"Z": (_DIMENSIONS, truth.astype(np.float32)), **coordinates}, chunks={"Z": chunk})
