"""Cubes of temperature and wind cut into tokens, some of them masked, from NetCDF files with the axes of AtmoRep's data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caraml.base.errors import InputError
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Split, WeatherSamples, smooth, split_files, without_gaps

FIELDS = ("velocity_u", "velocity_v", "temperature")
LEVELS = (96, 105, 114, 123, 137)
LAYOUT = Layout(
    {
        "data": ("time", "field", "level", "lat", "lon"),
        "mean": ("field", "level"),
        "std": ("field", "level"),
        "lats": ("lat",),
        "lons": ("lon",),
        "levels": ("level",),
    },
    {"field": len(FIELDS)},
)
TOKEN_FACTS = 8
_MASKED_SHARE = 0.25
"""Of the tokens of each level. AtmoRep draws it from 0 to 0.5 for each sample; its mean makes every step the same work."""
_ZEROED, _NOISED, _COARSENED = 0.9, 0.2, 0.05
"""Chances that a masked token is set to 0, disturbed by noise, replaced by its mean; drawn independently."""
_SIZES = {"tiny": (3, 12, 2, 24, 24), "small": (2, 72, 5, 54, 108)}
"""Files, hours in each, levels, rows, columns."""

Shape = tuple[int, int, int]
Shapes = Mapping[str, Shape]
FieldSample = dict[str, torch.Tensor]


class AtmosphereSamples(WeatherSamples):
    """A sample is, per field, ``{tokens (N, P), facts (N, 8), masked (M,), truth (M, P)}``: a cube at a random time and place.

    Tokens at ``masked`` are disturbed, ``truth`` has them as they were. An epoch has as many cubes as would tile the files' hours.
    """

    application = "atmorep"

    def __init__(self, folder: Path, tokens: Shapes, sizes: Shapes, levels: int, split: Split = "train") -> None:
        """Open ``folder/*.nc``; of several files the last is for validation.

        Raises:
            InputError: as :class:`NetcdfFiles`; fewer levels than the network has; a file smaller than a cube.
        """
        self.files = NetcdfFiles(split_files(find_files(folder, "*.nc"), split), LAYOUT)
        self._tokens, self._sizes, self._levels = tokens, sizes, levels
        extents = {name: tuple(a * b for a, b in zip(tokens[name], sizes[name], strict=True)) for name in FIELDS}
        if len(set(extents.values())) > 1:
            raise InputError(f"the fields' cubes differ: {extents}; expected one extent")
        self.cube = extents[FIELDS[0]]
        for path, found in zip(self.files.paths, self.files.lengths, strict=True):
            have = (found["time"], found["lat"], found["lon"])
            if any(a < b for a, b in zip(have, self.cube, strict=True)) or found["level"] < levels:
                needed = f"{' x '.join(map(str, self.cube))} on {levels} levels"
                raise InputError(f"{path}: found {' x '.join(map(str, have))} on {found['level']} levels; expected at least {needed}")
        self._scales = [tuple(self.files.read(number, key) for key in ("mean", "std")) for number in range(len(self.files.paths))]
        self._axes = [{key: self.files.read(number, key) for key in ("lats", "lons", "levels")} for number in range(len(self.files.paths))]
        self.files.close()
        self._per_file = [max(found["time"] - self.cube[0] + 1, 1) for found in self.files.lengths]

    def __len__(self) -> int:
        """Times at which a cube can begin, over all files."""
        return sum(self._per_file)

    def __getitem__(self, position: int) -> Any:
        """Sample ``position``: a cube that begins at this hour, at a place and with a mask by torch's random numbers."""
        number = 0
        while position >= self._per_file[number]:
            position -= self._per_file[number]
            number += 1
        lengths, (hours, rows, columns) = self.files.lengths[number], self.cube
        top, left = (int(torch.randint(lengths[key] - size + 1, ())) for key, size in (("lat", rows), ("lon", columns)))
        where = (slice(position, position + hours), slice(0, len(FIELDS)), slice(0, self._levels))
        cube = self.files.read(number, "data", (*where, slice(top, top + rows), slice(left, left + columns)))  # (T, F, L, Y, X)
        mean, std = (scale[None, :, : self._levels, None, None] for scale in self._scales[number])
        cube = without_gaps((cube - mean) / std)
        return {
            name: masked_tokens(
                cut(torch.from_numpy(np.ascontiguousarray(cube[:, index])), self._sizes[name]),
                self._facts(number, name, position, top, left),
                self._levels,
            )
            for index, name in enumerate(FIELDS)
        }

    def _facts(self, number: int, name: str, hour: int, top: int, left: int) -> torch.Tensor:
        """(N, 8): year, day, hour, level, latitude, longitude, level as a share, resolution; all about 1 or less."""
        axes, (times, rows, columns), (dt, dy, dx) = self._axes[number], self._tokens[name], self._sizes[name]
        level, t, y, x = np.meshgrid(np.arange(self._levels), np.arange(times), np.arange(rows), np.arange(columns), indexing="ij")
        at = hour + t * dt + dt // 2
        latitude, longitude = axes["lats"][top + y * dy + dy // 2], axes["lons"][left + x * dx + dx // 2]
        spacing = np.full(level.shape, abs(float(axes["lats"][1] - axes["lats"][0])))
        levels = axes["levels"][level] / LEVELS[-1]
        facts = (np.full(level.shape, number / 50), at / 8766, at % 24 / 24, levels, latitude / 90, longitude / 360, level / 5, spacing)
        return torch.from_numpy(np.stack([fact.reshape(-1) for fact in facts], 1).astype(np.float32))


def cut(field: torch.Tensor, size: Shape) -> torch.Tensor:
    """A cube (T, L, Y, X) as tokens (L * t * y * x, size), level by level, then time, latitude, longitude."""
    parts = field.unflatten(0, (-1, size[0])).unflatten(3, (-1, size[1])).unflatten(5, (-1, size[2]))  # (t, dt, L, y, dy, x, dx)
    return parts.permute(2, 0, 3, 5, 1, 4, 6).flatten(4).flatten(0, 3).contiguous()


def masked_tokens(tokens: torch.Tensor, facts: torch.Tensor, levels: int) -> FieldSample:
    """Disturb a random quarter of the tokens (N, P) of each level."""
    per_level = len(tokens) // levels
    count = max(int(per_level * _MASKED_SHARE), 1)
    masked = torch.cat([level * per_level + torch.randperm(per_level)[:count] for level in range(levels)])  # (M,)
    truth = tokens[masked].clone()
    chances = torch.rand(len(masked), 3)
    new = torch.where(chances[:, 2:] < _COARSENED, truth.mean(1, keepdim=True).expand_as(truth), truth)
    new = torch.where(chances[:, 1:2] < _NOISED, new + torch.randn_like(new), new)
    new = torch.where(chances[:, :1] < _ZEROED, torch.zeros_like(new), new)
    tokens = tokens.clone()
    tokens[masked] = new
    return {"tokens": tokens, "facts": facts, "masked": masked, "truth": truth}


def synthetic_atmosphere(rng: np.random.Generator, tokens: Shapes, sizes: Shapes, levels: int) -> dict[str, FieldSample]:
    """Standard normal tokens without facts as :class:`AtmosphereSamples` has them; what is masked does not come from ``rng``."""
    counts = {name: (levels * math.prod(tokens[name]), math.prod(sizes[name])) for name in FIELDS}
    draw = {name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for name, shape in counts.items()}
    return {name: masked_tokens(values, torch.zeros(len(values), TOKEN_FACTS), levels) for name, values in draw.items()}


def write_lookalike(folder: Path, size: str, seed: int, only: int | None = None) -> None:
    """Write hours of smooth fields that move, so that neighbours in time and space tell of a masked token.

    ``only``: the number of the one file to write; it may be any.
    """
    files, hours, levels, rows, columns = _SIZES[size]
    scale = np.array([[8, 10], [0, 8], [260, 12]], np.float32)
    for number in range(files) if only is None else (only,):
        rng = np.random.default_rng([seed, number])
        start = smooth(rng, (len(FIELDS), levels, rows, columns), 6)
        moved = np.stack([np.roll(start, hour, -1) for hour in range(hours)])  # eastward, one point per hour
        data = scale[None, :, 0, None, None, None] + scale[None, :, 1, None, None, None] * moved
        variables: dict[str, tuple[tuple[str, ...], Any]] = {
            "data": (LAYOUT.variables["data"], data.astype(np.float32)),
            "mean": (("field", "level"), np.repeat(scale[:, :1], levels, 1)),
            "std": (("field", "level"), np.repeat(scale[:, 1:], levels, 1)),
            "fields": (("field",), np.array(FIELDS)),
            "levels": (("level",), np.array(LEVELS[:levels], np.int32)),
            "time": (("time",), np.arange(hours, dtype=np.float64) + number * hours),
            "lats": (("lat",), np.linspace(60, 60 - 0.25 * (rows - 1), rows, dtype=np.float32)),
            "lons": (("lon",), np.linspace(0, 0.25 * (columns - 1), columns, dtype=np.float32)),
        }
        lengths = {"time": hours, "field": len(FIELDS), "level": levels, "lat": rows, "lon": columns}
        write_netcdf(folder / f"atmosphere_{number:02d}.nc", lengths, variables, chunks={"data": (min(hours, 12), 1, 1, rows, columns)})
