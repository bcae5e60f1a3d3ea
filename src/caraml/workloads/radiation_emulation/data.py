"""Columns for the radiation emulator: inputs, fluxes and heating rates of atmospheric columns, from NetCDF files."""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, smooth, split_files, without_gaps

LAYERS, HALF_LEVELS = 137, 138
_G, _CP, _DAY = 9.80665, 1004.0, 86400.0

INPUTS: dict[str, tuple[str, ...]] = {
    "sca_inputs": ("column", "scalar"),
    "col_inputs": ("column", "level", "column_feature"),
    "hl_inputs": ("column", "half_level", "half_level_feature"),
    "inter_inputs": ("column", "interlevel", "interlevel_feature"),
    "pressure_hl": ("column", "half_level", "one"),
}
TARGETS: dict[str, tuple[str, ...]] = {"sw": ("column", "half_level", "direction"), "hr_sw": ("column", "level", "one")}
LAYOUT = Layout(
    {**INPUTS, **TARGETS},
    {
        "scalar": 17,
        "level": LAYERS,
        "half_level": HALF_LEVELS,
        "interlevel": LAYERS - 1,
        "column_feature": 27,
        "half_level_feature": 2,
        "interlevel_feature": 1,
        "one": 1,
        "direction": 2,
    },
)
_COLUMNS_FOR_MAXIMA = 4096
_SIZES = {"tiny": (3, 256), "small": (5, 4096)}
"""Files, and columns in each; the last file is for validation."""


class RadiationSamples(WeatherSamples):
    """A sample is ``(sca (17,), col (137, 27), hl (138, 2), inter (136, 1), pressure (138, 1) [Pa], hr (137, 1) [K/day], sw (3,) [W/m²])``.

    ``sw`` is the net flux at the top, the downward and the upward flux at the surface.
    """

    application = "ap3"

    def __init__(self, folder: Path, split: Split = "train") -> None:
        """Open ``folder/*.nc``; of several files the last is for validation. Errors as :class:`NetcdfFiles`."""
        self.files = NetcdfFiles(split_files(find_files(folder, "*.nc"), split), LAYOUT)
        self._ends = list(itertools.accumulate(lengths["column"] for lengths in self.files.lengths))

    def __len__(self) -> int:
        """The number of columns."""
        return self._ends[-1]

    def __getitem__(self, position: int) -> Sample:
        """Column ``position``."""
        number = bisect.bisect_right(self._ends, position)
        column = position - (self._ends[number - 1] if number else 0)
        inputs = [without_gaps(self.files.read(number, name, column)) for name in INPUTS]
        path = self.files.paths[number]
        sw, heating = (complete(self.files.read(number, name, column), path, name) for name in TARGETS)  # (138, 2), (137, 1)
        fluxes = np.stack([sw[0, 0] - sw[0, 1], sw[-1, 0], sw[-1, 1]])
        return tuple(torch.from_numpy(np.ascontiguousarray(value)) for value in (*inputs, heating, fluxes))

    def maxima(self) -> tuple[torch.Tensor, ...]:
        """Largest magnitude of each feature of the first four inputs, over the first columns of the first file."""
        largest = []
        for name in list(INPUTS)[:4]:
            values = np.abs(without_gaps(self.files.read(0, name, slice(0, _COLUMNS_FOR_MAXIMA))))
            largest.append(torch.from_numpy(values.reshape(-1, values.shape[-1]).max(0)))
        self.files.close()
        return tuple(largest)


def synthetic_column(rng: np.random.Generator) -> tuple[Any, ...]:
    """One column without meaning, as the report's runs without files have it: clipped normal (mean 5, deviation 1), pressure 0 ... 137."""
    shapes = ((17,), (LAYERS, 27), (HALF_LEVELS, 2), (LAYERS - 1, 1), (LAYERS, 1), (3,))
    sca, col, hl, inter, heating, fluxes = (np.clip(rng.normal(5, 1, shape), 3, 7).astype(np.float32) for shape in shapes)
    return sca, col, hl, inter, np.arange(HALF_LEVELS, dtype=np.float32)[:, None], heating, fluxes


def write_lookalike(folder: Path, size: str, seed: int, only: int | None = None) -> None:
    """Write columns whose fluxes are absorbed by clouds and vapour, layer by layer, and close the energy budget.

    ``only``: the number of the one file to write; it may be any.
    """
    files, columns = _SIZES[size]
    lengths = {**LAYOUT.lengths, "column": columns}
    for number in range(files) if only is None else (only,):
        values = _columns(np.random.default_rng([seed, number]), columns)
        variables = {name: (dimensions, values[name]) for name, dimensions in {**INPUTS, **TARGETS}.items()}
        chunks = {name: (1, *values[name].shape[1:]) for name in ("col_inputs",)}
        write_netcdf(folder / f"radiation_{number:03d}.nc", lengths, variables, chunks=chunks)


def _columns(rng: np.random.Generator, count: int) -> dict[str, np.ndarray[Any, Any]]:
    sca = rng.uniform(0.05, 0.6, (count, 17)).astype(np.float32)
    sca[:, 1], sca[:, -1] = rng.uniform(0.1, 1, count), rng.uniform(1320, 1412, count)
    col = np.abs(smooth(rng, (count, 27, LAYERS), length=6, axes=1)).transpose(0, 2, 1)
    pressure = np.broadcast_to(101325 * np.linspace(0, 1, HALF_LEVELS) ** 2, (count, HALF_LEVELS))
    temperature = 220 + 70 * np.linspace(0, 1, HALF_LEVELS) + smooth(rng, (count, HALF_LEVELS), length=8, axes=1)
    solar = sca[:, 1] * sca[:, -1]
    depth = (0.6 * col[:, :, 0] + 0.3 * col[:, :, 10]) * np.diff(pressure, axis=1) / 101325
    through = np.exp(-np.concatenate([np.zeros((count, 1)), np.cumsum(depth, 1)], 1))  # share of the beam at each half level
    down = solar[:, None] * through
    up = down[:, -1:] * sca[:, 2:3] * (0.5 + 0.5 * through[:, -1:] / through)  # reflected by the surface, absorbed on its way
    net = down - up
    heating = _G / _CP * _DAY * (net[:, :-1] - net[:, 1:]) / np.diff(pressure, axis=1)
    values = {
        "sca_inputs": sca,
        "col_inputs": col,
        "hl_inputs": np.stack([temperature, pressure], 2),
        "inter_inputs": rng.uniform(0, 1, (count, LAYERS - 1, 1)),
        "pressure_hl": pressure[..., None],
        "sw": np.stack([down, up], 2),
        "hr_sw": heating[..., None],
    }
    return {name: value.astype(np.float32) for name, value in values.items()}
