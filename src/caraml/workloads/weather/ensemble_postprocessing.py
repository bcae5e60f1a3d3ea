"""Ensemble forecasts on a global grid and the analysis that came true, from the NetCDF files of ENS-10, and a U-Net that corrects a
forecast: mean and spread of a Gaussian at every grid point.

The network of MAELSTROM's fourth application (deliverable D3.7, section 4.7; ENS-10, arXiv 2206.14786): 633,698 parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.base.files import write_at
from caraml.data.store import MARKS, refuse_unfinished
from caraml.workloads.base import BuildContext, Task, counted_facts
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.weather import EnsembleParams, open_input
from caraml.workloads.weather.netcdf import FloatArray, Layout, NetcdfFiles, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, smooth, without_gaps

SAMPLES_WITHOUT_FILES = 1889
"""Samples in an epoch of random data: as many as the report's training set has."""
VARIABLES = ("Z", "T", "Q", "W", "D", "U", "V")
CHANNELS = 2 * len(VARIABLES)
"""Of each variable, ensemble mean and ensemble standard deviation."""
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
_PART_TIMES = {"tiny": 4, "small": 2}
"""Times of a part of a set of any size."""
_EXCESS = (0.124, 0.018)
"""Mean and standard deviation of spreads, in those of the variable: 0.1 and 0.03 times the size of a standard normal number, which is
0.8 with a deviation of 0.6."""


class EnsembleSamples(WeatherSamples):
    """A sample is ``(fields (14, H, W), mean (H, W), spread (H, W), analysis (H, W))``.

    Fields are normalised, ensemble mean and standard deviation of one variable side by side; the others are of the geopotential at
    500 hPa [m²/s²].
    """

    application = "ap4"

    def __init__(self, folder: Path, split: Split = "train", grid: tuple[int | None, int | None] = (None, None)) -> None:
        """Open the five files of ``folder``; the last tenth of the times is for validation. ``grid``: rows and columns, if they are known.
        Raises ``InputError`` as :class:`NetcdfFiles`; also for files of different lengths, or without the level, or of another grid than
        ``grid``."""
        refuse_unfinished(folder / MARKS, folder)
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
        return len(self._times)

    def __getitem__(self, position: int) -> Sample:
        time = self._times[position]
        fields = np.empty((CHANNELS, *self.grid), np.float32)
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

    def _check(self, grid: tuple[int | None, int | None]) -> None:
        lengths = [*self._inputs.lengths, *self.files.lengths]
        first = lengths[0]
        for path, found in zip((*self._inputs.paths, *self.files.paths), lengths, strict=True):
            for name in ("time", "lat", "lon"):
                if found[name] != first[name]:
                    raise InputError(f"{path}: dimension {name}: found {found[name]}; expected {first[name]} as in {_INPUTS[0]}")
            rows, columns = grid[0] or found["lat"], grid[1] or found["lon"]
            if (found["lat"], found["lon"]) != (rows, columns):
                raise InputError(f"{path}: found a grid of {found['lat']} x {found['lon']}; expected {rows} x {columns}")


def synthetic_forecast(rng: np.random.Generator, grid: tuple[int, int]) -> tuple[Any, ...]:
    """Standard normal fields and analysis, as normalised files would have them; ensemble of mean 0 and spread 1."""
    fields = rng.standard_normal((CHANNELS, *grid), dtype=np.float32)
    return fields, np.zeros(grid, np.float32), np.ones(grid, np.float32), rng.standard_normal(grid, dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int, number: int | None = None) -> None:
    """Write an ensemble that is biased by temperature and wind and too sure of itself, and the analysis.

    With a ``number``, the times of that part of a set into the files of :func:`write_room`.
    """
    if number is None:
        times = _SIZES[size][0]
        for name, fields in _fields(np.random.default_rng(seed), _SIZES[size]).items():
            _write_file(folder / name, size, times, fields)
        return
    times = _PART_TIMES[size]
    for name, fields in _fields(np.random.default_rng([seed, number]), (times, *_SIZES[size][1:]), of_all=True).items():
        with h5py.File(folder / name, locking=False) as file:
            places = {key: file[key].id.get_offset() for key in fields}
        for key, field in fields.items():
            write_at(folder / name, places[key] + number * field.nbytes, field.astype("<f4").tobytes())


def part_bytes(size: str) -> int:
    """Bytes of a part of a set of any size: some times of all five files."""
    _, rows, columns = _SIZES[size]
    return _PART_TIMES[size] * 2 * (4 * len(VARIABLES) + 1) * rows * columns * 4


def write_room(folder: Path, size: str, parts: int) -> bool:
    """Write those of the five files that are not there, without their values: processes write their times side by side. Whether any was."""
    missing = [name for name in (*_FORECAST, *_INPUTS, _ANALYSIS) if not (folder / name).exists()]
    for name in missing:
        names = ("Z",) if name == _ANALYSIS else VARIABLES
        _write_file(folder / name, size, parts * _PART_TIMES[size], dict.fromkeys(names))
    return bool(missing)


def _write_file(path: Path, size: str, times: int, fields: Mapping[str, FloatArray | None]) -> None:
    _, rows, columns = _SIZES[size]
    coordinates: dict[str, tuple[tuple[str, ...], Any]] = {
        "plev": (("plev",), np.array([50000, 85000], np.int32)),
        "lat": (("lat",), np.linspace(90, -90, rows, dtype=np.float32)),
        "lon": (("lon",), np.linspace(0, 360, columns, endpoint=False, dtype=np.float32)),
    }
    lengths = {"time": times, "plev": 2, "lat": rows, "lon": columns}
    variables = {key: (_DIMENSIONS, field) for key, field in fields.items()}
    write_netcdf(path, lengths, {**variables, **coordinates}, chunks=dict.fromkeys(VARIABLES, (1, 1, rows, columns)))


def _fields(rng: np.random.Generator, sizes: tuple[int, int, int], of_all: bool = False) -> dict[str, dict[str, FloatArray]]:
    """Variables of every file, (time, level, row, column). They are normalised over these times, or as those ``of_all`` parts would be."""
    times, *grid = sizes
    shape = (times, 2, *grid)
    scale = {"Z": (54000, 900), "T": (255, 8), "Q": (1e-3, 5e-4), "W": (0, 0.3), "D": (0, 2e-5), "U": (8, 8), "V": (0, 6)}
    anomaly = {name: smooth(rng, shape, 6) for name in VARIABLES}
    excess = {name: 0.1 + 0.03 * np.abs(smooth(rng, shape)) for name in VARIABLES}
    mean = {name: (scale[name][0] + scale[name][1] * anomaly[name]).astype(np.float32) for name in VARIABLES}
    std = {name: (scale[name][1] * excess[name]).astype(np.float32) for name in VARIABLES}
    error = 0.6 * anomaly["T"] - 0.4 * anomaly["U"] + 0.3 * smooth(rng, shape, 2)  # in spreads of the ensemble, twice
    truth = mean["Z"] + 2 * std["Z"] * error
    if of_all:
        scaled_mean, scaled_std = anomaly, {name: (values - _EXCESS[0]) / _EXCESS[1] for name, values in excess.items()}
    else:
        scaled_mean, scaled_std = (
            {name: (field - field.mean(0)) / (field.std(0) + 0.1) for name, field in values.items()} for values in (mean, std)
        )
    found: dict[str, dict[str, Any]] = {
        _FORECAST[0]: mean,
        _FORECAST[1]: std,
        _INPUTS[0]: scaled_mean,
        _INPUTS[1]: scaled_std,
        _ANALYSIS: {"Z": truth},
    }
    return {name: {key: field.astype(np.float32) for key, field in fields.items()} for name, fields in found.items()}


_WIDTH = 32
_LOG_SPREAD_LIMIT = 5.0
"""The spread is at most e^5 times the ensemble's and at least e^-5: beyond, exp would overflow in the first steps."""


class EnsembleUNet(nn.Module):
    """Fields (B, 14, H, W) to (B, 2, H, W): correction of the mean and logarithm of the spread's factor; H and W of at least 4."""

    def __init__(self) -> None:
        super().__init__()
        w0, w1, w2 = _WIDTH, 2 * _WIDTH, 4 * _WIDTH
        self.encoder0, self.encoder1, self.encoder2 = _pair(CHANNELS, w0, w0), _pair(w0, w1, w1), _pair(w1, w2, w2)
        self.decoder2, self.decoder1, self.decoder0 = _pair(w2, w2, w1), _pair(2 * w1, w1, w0), _pair(2 * w0, w0, w0)
        self.head = nn.Conv2d(w0, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Channel 0: correction of the mean in ensemble spreads; channel 1: logarithm of the factor on the spread."""
        fine = self.encoder0(x)  # (B, 32, H, W)
        middle = self.encoder1(F.max_pool2d(fine, 2))  # (B, 64, H/2, W/2)
        x = self.decoder2(self.encoder2(F.max_pool2d(middle, 2)))  # (B, 64, H/4, W/4)
        x = self.decoder1(_joined(middle, x))  # (B, 32, H/2, W/2)
        return self.head(self.decoder0(_joined(fine, x)))  # (B, 2, H, W)


def _pair(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((inputs, middle), (middle, outputs)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _joined(skip: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Both side by side, ``x`` at twice its size; where pooling dropped an odd row or column, the first one is repeated."""
    x = F.interpolate(x, scale_factor=2, mode="bilinear")
    rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
    if rows or columns:
        x = F.pad(x, (columns, 0, rows, 0), mode="replicate")
    return torch.cat([skip, x], 1)


def corrected(output: torch.Tensor, mean: torch.Tensor, spread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the corrected forecast, from the network's output (B, 2, H, W) and those of the ensemble, (B, H, W)
    each in the variable's unit; an output of zeros leaves the ensemble as it is."""
    shift, log_factor = output.float().unbind(1)  # (B, H, W) each
    return mean + shift * spread, spread * log_factor.clamp(-_LOG_SPREAD_LIMIT, _LOG_SPREAD_LIMIT).exp()


def gaussian_crps(mean: torch.Tensor, std: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Continuous ranked probability score of Gaussian forecasts, the mean over all points, in the unit of ``truth``.

    Closed form of Gneiting et al., Monthly Weather Review 133 (2005), equation 5: with z = (truth - mean) / std,
    ``std * (z * (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))``.
    """
    z = (truth - mean) / std
    centred_cdf = torch.erf(z / math.sqrt(2))  # 2 Phi(z) - 1
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return (std * (z * centred_cdf + 2 * density - 1 / math.sqrt(math.pi))).mean()


def build(ctx: BuildContext[EnsembleParams]) -> Task:
    """Build the network, Adam, and the stream of ``[fields (B, 14, H, W), mean, spread, analysis (B, H, W)]``."""
    params = ctx.params
    grid = (params.rows or GRID[0], params.columns or GRID[1])
    files = partial(EnsembleSamples, grid=(params.rows, params.columns))
    given = open_input(ctx, "ap4", files, partial(synthetic_forecast, grid=grid), SAMPLES_WITHOUT_FILES)
    grid = getattr(given.dataset, "grid", grid)  # files have their own
    torch.manual_seed(ctx.seed)
    model = EnsembleUNet().to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)
    facts = counted_facts("forecast", model, given, _flops(grid), bytes_per_sample=4 * CHANNELS * grid[0] * grid[1])

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        fields, mean, spread, analysis = batch
        return gaussian_crps(*corrected(net(fields), mean, spread), analysis)

    return given.task(model, optimizer, loss, facts, predict=lambda net, batch: corrected(net(batch[0]), *batch[1:3]))


def _flops(grid: tuple[int, int]) -> tuple[float, float]:
    with torch.device("meta"):
        model, fields = EnsembleUNet(), torch.empty(1, CHANNELS, *grid)
        return forward_and_training_flops(lambda: model(fields).sum(), 1)


def check(params: EnsembleParams, folder: Path) -> None:
    """See that the five files are there, with their variables and the grid that is asked for."""
    if params.data == "files" and params.folder is not None:
        EnsembleSamples(folder / params.folder, grid=(params.rows, params.columns))
