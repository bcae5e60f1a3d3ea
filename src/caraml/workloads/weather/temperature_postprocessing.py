"""Temperature post-processing: patches of forecast fields from NetCDF files of one forecast start each, and a U-Net that turns them into
quantiles of the temperature error.

The network of MAELSTROM's first application (deliverable D3.7, section 4.2): 1,314,019 parameters and 6,016 running statistics. All
convolutions but those after an upsampling see one pixel; only these and the pooling mix neighbours.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.base.files import write_file
from caraml.workloads.base import BuildContext, Task, counted_facts
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.weather import TemperatureParams, open_input
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, read_scales, smooth, split_files, without_gaps

SAMPLES_WITHOUT_FILES = 8192
"""Samples in an epoch of random data: the report's 34 GiB."""
PREDICTORS = (
    "air_temperature_0.1_2m",
    "air_temperature_0.9_2m",
    "air_temperature_2m",
    "bias_yesterday",
    "cloud_area_fraction",
    "precipitation_amount",
    "x_wind_10m",
    "y_wind_10m",
)
STATIC_PREDICTORS = ("altitude", "analysis_std", "bias_recent", "land_area_fraction", "model_altitude", "model_laf")
FIELDS = 17
"""Predictors, static ones, row, column and lead time."""
FORECAST = PREDICTORS.index("air_temperature_2m")
LAYOUT = Layout(
    {
        "predictors": ("leadtime", "y", "x", "predictor"),
        "static_predictors": ("y", "x", "static_predictor"),
        "target_mean": ("leadtime", "y", "x"),
        "predictor": ("predictor",),
        "static_predictor": ("static_predictor",),
    },
    {"predictor": len(PREDICTORS), "static_predictor": len(STATIC_PREDICTORS)},
)
NORMALIZATION = "normalization.yml"
"""Mean and standard deviation of each predictor by name, beside the files."""
_PLACE = ((1000.0, 100.0), (1000.0, 100.0), (30.0, 10.0))
"""Mean and deviation of the row, column and lead time that are added as predictors."""
LOOKALIKE = {"tiny": (3, 4, 70, 100), "small": (3, 16, 530, 530)}
"""Files, lead times, rows, columns."""


class TemperatureSamples(WeatherSamples):
    """A sample is ``(fields (17, P, P), target (1, P, P))``: normalised predictors; analysis minus forecast [K].

    Patches do not overlap; what is left at the lower and right edges is not used.
    """

    application = "ap1"

    def __init__(self, folder: Path, patch: int = 256, split: Split = "train") -> None:
        """Open ``folder/*.nc``; of several files the last is for validation. Raises ``InputError`` as :class:`NetcdfFiles`; also for a
        field smaller than a patch, and for a predictor of another name or without normalisation."""
        self.patch = patch
        self.files = NetcdfFiles(split_files(find_files(folder, "*.nc"), split), LAYOUT)
        scales = read_scales(folder / NORMALIZATION, (*PREDICTORS, *STATIC_PREDICTORS)).values()
        self._mean, self._std = (np.array(values, np.float32) for values in zip(*scales, strict=True))
        counts = []
        for number, lengths in enumerate(self.files.lengths):
            self._check_names(number)
            if min(lengths["y"], lengths["x"]) < patch:
                found = f"{self.files.paths[number]}: found a grid of {lengths['y']} x {lengths['x']}"
                raise InputError(f"{found}; expected at least the patch, {patch} x {patch}", "use a smaller patch")
            counts.append(lengths["leadtime"] * (lengths["y"] // patch) * (lengths["x"] // patch))
        self.ends = list(itertools.accumulate(counts))
        self.files.close()

    def __getitem__(self, position: int) -> Sample:
        number, index = self.place(position)
        lengths, patch = self.files.lengths[number], self.patch
        index, column = divmod(index, lengths["x"] // patch)
        leadtime, row = divmod(index, lengths["y"] // patch)
        y, x = slice(row * patch, (row + 1) * patch), slice(column * patch, (column + 1) * patch)
        predictors = self.files.read(number, "predictors", (leadtime, y, x))  # (P, P, 8)
        static = self.files.read(number, "static_predictors", (y, x))  # (P, P, 6)
        target = self.files.read(number, "target_mean", (leadtime, y, x)) - predictors[..., FORECAST]  # (P, P)
        fields = without_gaps((np.concatenate([predictors, static], 2) - self._mean) / self._std).transpose(2, 0, 1)
        places = (np.arange(y.start, y.stop)[:, None], np.arange(x.start, x.stop)[None, :], np.array([[leadtime]]))
        place = [np.broadcast_to((values - mean) / std, (patch, patch)) for values, (mean, std) in zip(places, _PLACE, strict=True)]
        complete(target, self.files.paths[number], "target_mean - air_temperature_2m")
        return torch.from_numpy(np.concatenate([fields, np.stack(place)]).astype(np.float32)), torch.from_numpy(target[None])

    def _check_names(self, number: int) -> None:
        for variable, expected in (("predictor", PREDICTORS), ("static_predictor", STATIC_PREDICTORS)):
            found = tuple(self.files.texts(number, variable))
            if found != expected:
                raise InputError(f"{self.files.paths[number]}: {variable}: found {', '.join(found)}; expected {', '.join(expected)}")


def synthetic_patch(rng: np.random.Generator, patch: int) -> tuple[Any, ...]:
    """A patch of uniform noise and a target of noise."""
    return rng.random((FIELDS, patch, patch), dtype=np.float32), rng.random((1, patch, patch), dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int, number: int) -> int:
    """Write file ``number``: a forecast whose error follows yesterday's bias, the altitude error of the model and the clouds, plus noise.
    Its bytes."""
    _, leadtimes, rows, columns = LOOKALIKE[size]
    rng = np.random.default_rng(seed)
    altitude = np.abs(400 * smooth(rng, (rows, columns), 12))
    model_altitude = altitude + 80 * smooth(rng, (rows, columns), 5)
    land = (smooth(rng, (rows, columns), 10) > 0).astype(np.float32)
    spread, recent = 0.5 + 0.2 * np.abs(smooth(rng, (rows, columns))), smooth(rng, (rows, columns))
    static = np.stack([altitude, spread, recent, land, model_altitude, land], 2).astype(np.float32)
    chunk = (min(rows, 256), min(columns, 256))
    rng = np.random.default_rng([seed, 1, number])
    forecast = 278 - 0.0065 * model_altitude + 5 * smooth(rng, (leadtimes, rows, columns), 12)
    bias, wind = recent + 0.5 * smooth(rng, (leadtimes, rows, columns)), 4 * smooth(rng, (2, leadtimes, rows, columns))
    cloud = np.clip(0.5 + 0.4 * smooth(rng, (leadtimes, rows, columns)), 0, 1)
    rain = np.maximum(smooth(rng, (leadtimes, rows, columns)), 0)
    error = 0.8 * bias + 0.0065 * (model_altitude - altitude) + 2 * (cloud - 0.5)
    noise = (0.2 + 0.6 * cloud) * rng.standard_normal((leadtimes, rows, columns))
    predictors = np.stack([forecast - 1, forecast + 1, forecast, bias, cloud, rain, *wind], 3)
    variables: dict[str, tuple[tuple[str, ...], Any]] = {
        "predictors": (("leadtime", "y", "x", "predictor"), predictors.astype(np.float32)),
        "static_predictors": (("y", "x", "static_predictor"), static),
        "target_mean": (("leadtime", "y", "x"), (forecast + error + noise).astype(np.float32)),
        "target_std": (("leadtime", "y", "x"), np.broadcast_to(spread, forecast.shape).astype(np.float32)),
        "predictor": (("predictor",), np.array(PREDICTORS)),
        "static_predictor": (("static_predictor",), np.array(STATIC_PREDICTORS)),
        "leadtime": (("leadtime",), 3600.0 * np.arange(leadtimes)),
        "y": (("y",), 1000 * np.arange(rows, dtype=np.float32)),
        "x": (("x",), 1000 * np.arange(columns, dtype=np.float32)),
    }
    lengths = {"leadtime": leadtimes, "y": rows, "x": columns, "predictor": len(PREDICTORS), "static_predictor": len(STATIC_PREDICTORS)}
    chunks = {"predictors": (1, *chunk, len(PREDICTORS)), "target_mean": (1, *chunk)}
    if number == 0:
        _write_normalization(folder / NORMALIZATION, predictors, static)
    return write_netcdf(folder / f"forecast_{number:03d}.nc", lengths, variables, chunks=chunks)


def _write_normalization(path: Path, predictors: Any, static: Any) -> None:
    table = {
        name: [float(values[..., index].mean()), float(values[..., index].std())]
        for names, values in ((PREDICTORS, predictors), (STATIC_PREDICTORS, static))
        for index, name in enumerate(names)
    }
    write_file(path, yaml.safe_dump(table))


QUANTILES = (0.1, 0.5, 0.9)
LEVELS = 6
_WIDTH = 16


class TemperatureUNet(nn.Module):
    """Fields (B, 17, H, W) to quantiles (B, 3, H, W); H and W multiples of 32."""

    def __init__(self) -> None:
        super().__init__()
        widths = [_WIDTH * 2**level for level in range(LEVELS)]  # 16 ... 512
        self.encoder = nn.ModuleList(_pair(before, width) for before, width in zip([FIELDS, *widths], widths, strict=False))
        ascending = widths[-2::-1]  # 256 ... 16
        self.narrow = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for width in ascending)
        self.sharpen = nn.ModuleList(nn.Conv2d(width, width, 2) for width in ascending)
        self.decoder = nn.ModuleList(_pair(2 * width, width) for width in ascending)
        self.head = nn.Conv2d(_WIDTH, len(QUANTILES), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantiles of the target, in the order of :data:`QUANTILES`."""
        skips = []
        for level, block in enumerate(self.encoder):
            x = block(F.max_pool2d(x, 2) if level else x)  # (B, 16 * 2^level, H / 2^level, W / 2^level)
            skips.append(x)
        skips.pop()
        for narrow, sharpen, block in zip(self.narrow, self.sharpen, self.decoder, strict=True):
            x = F.interpolate(F.relu(narrow(x)), scale_factor=2, mode="nearest")  # (B, C, 2h, 2w)
            x = F.relu(sharpen(F.pad(x, (0, 1, 0, 1))))  # "same" for an even kernel: one column right, one row below
            x = block(torch.cat([skips.pop(), x], 1))  # (B, C, 2h, 2w)
        return self.head(x)


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    """Twice: convolution of one pixel, normalisation without scale and shift, ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 1), nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01, affine=False), nn.ReLU()]
    return nn.Sequential(*layers)


def pinball_loss(predicted: torch.Tensor, truth: torch.Tensor, quantiles: tuple[float, ...] = QUANTILES) -> torch.Tensor:
    """Quantile score, the mean over quantiles and points of ``q * max(e, 0) + (1 - q) * max(-e, 0)``, e = truth - predicted, of
    ``predicted`` (B, Q, H, W) and ``truth`` (B, 1, H, W). Its expectation is least where ``predicted`` is the quantile (Koenker and
    Bassett, Econometrica 46, 1978)."""
    error = truth - predicted
    # (1, Q, 1, 1), filled on the device: a copy from the host would synchronise every step.
    levels = torch.cat([torch.full((1, 1, 1, 1), level, device=error.device, dtype=error.dtype) for level in quantiles], 1)
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def build(ctx: BuildContext[TemperatureParams]) -> Task:
    """Build the network, Adam, and the stream of ``[fields (B, 17, P, P), target (B, 1, P, P)]``."""
    params = ctx.params
    draw = partial(synthetic_patch, patch=params.patch)
    given = open_input(ctx, "ap1", lambda folder, split: TemperatureSamples(folder, params.patch, split), draw, SAMPLES_WITHOUT_FILES)
    torch.manual_seed(ctx.seed)
    model = TemperatureUNet().to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)
    facts = counted_facts("patch", model, given, _flops(params), bytes_per_sample=4 * FIELDS * params.patch**2)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        fields, target = batch
        return pinball_loss(net(fields).float(), target)

    return given.task(model, optimizer, loss, facts, predict=lambda net, batch: net(batch[0]))


def _flops(params: TemperatureParams) -> tuple[float, float]:
    with torch.device("meta"):
        model = TemperatureUNet()
        fields, target = torch.empty(2, FIELDS, params.patch, params.patch), torch.empty(2, 1, params.patch, params.patch)
        return forward_and_training_flops(lambda: pinball_loss(model(fields), target), 2)
