"""Pairs of crops of large-scale fields for the clustering of weather regimes, from NetCDF files of ERA5."""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, WeatherSamples, smooth, without_gaps

VARIABLES = ("z", "t", "r", "u", "v")
LEVELS = (300, 500, 700, 850, 950)
"""Pressure levels [hPa]."""
CHANNELS = len(VARIABLES) * len(LEVELS)
_DIMENSIONS = ("time", "level", "latitude", "longitude")
LAYOUT = Layout({**dict.fromkeys(VARIABLES, _DIMENSIONS), "latitude": ("latitude",)}, {"level": len(LEVELS)})
PATTERN = "era5_pl_*_12.nc"
CROP_AREA = (0.8, 1.0)
"""Share of the field's area that a crop has, from and to, where no other is asked for."""
_SIZES = {"tiny": (2, 48, 40, 60), "small": (2, 80, 120, 180)}
"""Files, days in each, rows, columns."""


class RegimeSamples(WeatherSamples):
    """A sample is ``(position, crop (25, S, S), crop (25, S, S))``: two random squares of one day's fields, channels level by level.

    Fields are normalised per channel and weighted by the root of the cosine of latitude. There is no validation part: all are clustered.
    """

    application = "ap6"

    def __init__(self, folder: Path, crop: int = 280, area: float | None = None) -> None:
        """Open the files of ``folder``; ``area`` is the share of a field that each crop has. Errors as :class:`NetcdfFiles`; also files of
        different grids."""
        self.crop, self.area = crop, CROP_AREA if area is None else (area, area)
        self.files = NetcdfFiles(find_files(folder, PATTERN), LAYOUT)
        first = self.files.lengths[0]
        for path, found in zip(self.files.paths, self.files.lengths, strict=True):
            if (found["latitude"], found["longitude"]) != (first["latitude"], first["longitude"]):
                grid, expected = (f"{lengths['latitude']} x {lengths['longitude']}" for lengths in (found, first))
                raise InputError(f"{path}: found a grid of {grid}; expected {expected} as in {self.files.paths[0].name}")
        self._ends = list(itertools.accumulate(lengths["time"] for lengths in self.files.lengths))
        self._mean, self._std = self._scales()
        latitude = np.deg2rad(self.files.read(0, "latitude"))
        self._weight = np.sqrt(np.clip(np.cos(latitude), 0, None))[:, None]  # (rows, 1)
        self.files.close()

    def __len__(self) -> int:
        """The number of days."""
        return self._ends[-1]

    def __getitem__(self, position: int) -> Sample:
        """Sample ``position``: one day, cropped twice by torch's random numbers."""
        number = bisect.bisect_right(self._ends, position)
        time = position - (self._ends[number - 1] if number else 0)
        fields = np.stack([self.files.read(number, name, time) for name in VARIABLES], 1)  # (levels, variables, rows, columns)
        fields = without_gaps((fields.reshape(CHANNELS, *fields.shape[2:]) - self._mean) / self._std) * self._weight
        whole = torch.from_numpy(fields.astype(np.float32))
        return torch.tensor(position), random_crop(whole, self.crop, self.area), random_crop(whole, self.crop, self.area)

    def _scales(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Mean and standard deviation per channel, (25, 1, 1): the variables' attributes, else those of the first day."""
        pairs = []
        for name in VARIABLES:
            mean, std = (self.files.attribute(0, name, key) for key in ("mean", "std"))
            if mean is None or std is None or len(mean) != len(LEVELS) or len(std) != len(LEVELS):
                day = self.files.read(0, name, 0)
                mean, std = np.nanmean(day, (1, 2)), np.nanstd(day, (1, 2))
            pairs.append((mean, np.maximum(std, 1e-12)))
        means, stds = (np.stack(values, 1).reshape(CHANNELS, 1, 1) for values in zip(*pairs, strict=True))
        return means, stds


def random_crop(fields: torch.Tensor, size: int, area: tuple[float, float] = CROP_AREA) -> torch.Tensor:
    """A part of ``fields`` (C, H, W) at a random place, of their shape and a share of their area between the two of ``area``, resized to
    (C, size, size)."""
    side = float(torch.empty(()).uniform_(*area).sqrt())
    rows, columns = (max(round(length * side), 1) for length in fields.shape[1:])
    top = int(torch.randint(fields.shape[1] - rows + 1, ()))
    left = int(torch.randint(fields.shape[2] - columns + 1, ()))
    part = fields[None, :, top : top + rows, left : left + columns]
    return F.interpolate(part, (size, size), mode="bilinear", antialias=True)[0]


class SyntheticRegimes(torch.utils.data.Dataset[Sample]):
    """Standard normal crops of no day in particular."""

    def __init__(self, samples: int, crop: int, seed: int) -> None:
        self.samples, self.crop, self.seed = samples, crop, seed

    def __len__(self) -> int:
        """The number of samples in an epoch."""
        return self.samples

    def __getitem__(self, position: int) -> Sample:
        """Sample ``position`` as :class:`RegimeSamples` has it."""
        crops = np.random.default_rng([self.seed, position]).standard_normal((2, CHANNELS, self.crop, self.crop), dtype=np.float32)
        return torch.tensor(position), torch.from_numpy(crops[0]), torch.from_numpy(crops[1])

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind and samples; no bytes, because none are read."""
        return {"kind": "synthetic", "of": "ap6", "path": None, "items": self.samples, "bytes": 0, "seed": self.seed}


def write_lookalike(folder: Path, size: str, seed: int, only: int | None = None) -> None:
    """Write days that each follow one of four regimes, with noise of their own. Or file ``only`` alone, of any number."""
    files, days, rows, columns = _SIZES[size]
    rng = np.random.default_rng(seed)
    regimes = smooth(rng, (4, len(VARIABLES), len(LEVELS), rows, columns), 12)
    scale = {"z": (3e4, 2e3), "t": (260, 10), "r": (50, 20), "u": (8, 8), "v": (0, 6)}
    for number in range(files) if only is None else (only,):
        rng = np.random.default_rng([seed, 1, number])
        kind = rng.integers(4, size=days)
        variables: dict[str, tuple[tuple[str, ...], Any]] = {
            "latitude": (("latitude",), np.linspace(75, 25, rows, dtype=np.float32)),
            "longitude": (("longitude",), np.linspace(-50, 40, columns, dtype=np.float32)),
            "level": (("level",), np.array(LEVELS, np.int32)),
            "time": (("time",), 24.0 * (np.arange(days) + number * days)),
        }
        attributes = {}
        for index, name in enumerate(VARIABLES):
            anomaly = regimes[kind, index] + 0.5 * smooth(rng, (days, len(LEVELS), rows, columns), 6)
            mean, std = scale[name]
            variables[name] = (_DIMENSIONS, (mean + std * anomaly).astype(np.float32))
            attributes[name] = {"mean": np.full(len(LEVELS), mean, np.float32), "std": np.full(len(LEVELS), std, np.float32)}
        lengths = {"time": days, "level": len(LEVELS), "latitude": rows, "longitude": columns}
        chunks = dict.fromkeys(VARIABLES, (1, len(LEVELS), rows, columns))
        name = PATTERN.replace("*", f"{2000 + number}0101_{2000 + number}1231")
        write_netcdf(folder / name, lengths, variables, chunks=chunks, attributes=attributes)
