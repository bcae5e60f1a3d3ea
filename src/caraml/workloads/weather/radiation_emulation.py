"""Atmospheric columns with their shortwave fluxes and heating rates, from NetCDF files, and a 1-D convolutional emulator of them with its
energy budget closed by physics.

The network of MAELSTROM's third application (deliverable D3.7, section 4.4): 261,515 parameters. B columns of L = 138 half levels from the
top of the atmosphere to the surface; K = 137 layers between them.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from caraml.workloads.base import BuildContext, Task, counted_facts
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.weather import RadiationParams, open_input
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Cached, Sample, Split, WeatherSamples, complete, smooth, split_files, without_gaps

SAMPLES_WITHOUT_FILES = 251_392
"""Columns in an epoch of random data: 491 steps of 512, the report's 4091 MiB."""
LAYERS, HALF_LEVELS = 137, 138
GRAVITY = 9.80665
"""Standard gravity [m/s²]."""
HEAT_CAPACITY = 1004.0
"""Specific heat of dry air at constant pressure [J/(kg K)]."""
SECONDS_PER_DAY = 86400.0

INPUTS: dict[str, tuple[str, ...]] = {
    "sca_inputs": ("column", "scalar"),
    "col_inputs": ("column", "level", "column_feature"),
    "hl_inputs": ("column", "half_level", "half_level_feature"),
    "inter_inputs": ("column", "interlevel", "interlevel_feature"),
    "pressure_hl": ("column", "half_level", "one"),
}
TARGETS: dict[str, tuple[str, ...]] = {"sw": ("column", "half_level", "direction"), "hr_sw": ("column", "level", "one")}
LENGTHS = {
    "scalar": 17,
    "level": LAYERS,
    "half_level": HALF_LEVELS,
    "interlevel": LAYERS - 1,
    "column_feature": 27,
    "half_level_feature": 2,
    "interlevel_feature": 1,
    "one": 1,
    "direction": 2,
}
LAYOUT = Layout({**INPUTS, **TARGETS}, LENGTHS)
INPUT_SHAPES = {name: tuple(LENGTHS[one] for one in dimensions[1:]) for name, dimensions in INPUTS.items()}
"""Of one column, in the order of the network's arguments."""
INPUT_BYTES = 4 * sum(map(math.prod, INPUT_SHAPES.values()))
"""Of one column, targets not counted: 512 columns are the report's 8.33 MiB."""
SCALED = {name: shape for name, shape in INPUT_SHAPES.items() if name != "pressure_hl"}
"""Inputs that the network divides by their maxima; of the pressure [Pa] it needs the values."""
_COLUMNS_FOR_MAXIMA = 4096
LOOKALIKE = {"tiny": (3, 256), "small": (5, 4096)}
"""Files, and columns in each; the last file is for validation."""


class RadiationSamples(WeatherSamples):
    """A sample is ``(sca (17,), col (137, 27), hl (138, 2), inter (136, 1), pressure (138, 1) [Pa], hr (137, 1) [K/day], sw (3,) [W/m²])``.

    ``sw`` is the net flux at the top, the downward and the upward flux at the surface.
    """

    application = "ap3"

    def __init__(self, folder: Path, split: Split = "train") -> None:
        """Open ``folder/*.nc``; of several files the last is for validation. Errors as :class:`NetcdfFiles`."""
        self.files = NetcdfFiles(split_files(find_files(folder, "*.nc"), split), LAYOUT)
        self.ends = list(itertools.accumulate(lengths["column"] for lengths in self.files.lengths))

    def __getitem__(self, position: int) -> Sample:
        number, column = self.place(position)
        inputs = [without_gaps(self.files.read(number, name, column)) for name in INPUTS]
        path = self.files.paths[number]
        sw, heating = (complete(self.files.read(number, name, column), path, name) for name in TARGETS)  # (138, 2), (137, 1)
        fluxes = np.stack([sw[0, 0] - sw[0, 1], sw[-1, 0], sw[-1, 1]])
        return tuple(torch.from_numpy(np.ascontiguousarray(value)) for value in (*inputs, heating, fluxes))

    def maxima(self) -> tuple[torch.Tensor, ...]:
        """Largest magnitude of each feature of the first four inputs, over the first columns of the first file."""
        largest = []
        for name in SCALED:
            values = np.abs(without_gaps(self.files.read(0, name, slice(0, _COLUMNS_FOR_MAXIMA))))
            largest.append(torch.from_numpy(values.reshape(-1, values.shape[-1]).max(0)))
        self.files.close()
        return tuple(largest)


def synthetic_column(rng: np.random.Generator) -> tuple[Any, ...]:
    """One column without meaning, as the report's runs without files have it: clipped normal (mean 5, deviation 1), pressure 0 ... 137."""
    shapes = (*SCALED.values(), (LAYERS, 1), (3,))
    sca, col, hl, inter, heating, fluxes = (np.clip(rng.normal(5, 1, shape), 3, 7).astype(np.float32) for shape in shapes)
    return sca, col, hl, inter, np.arange(HALF_LEVELS, dtype=np.float32)[:, None], heating, fluxes


def write_lookalike(folder: Path, size: str, seed: int, number: int) -> int:
    """Write file ``number``: columns whose fluxes are absorbed by clouds and vapour, layer by layer, and close the energy budget.
    Its bytes."""
    _, columns = LOOKALIKE[size]
    lengths = {**LAYOUT.lengths, "column": columns}
    values = _columns(np.random.default_rng([seed, number]), columns)
    variables = {name: (dimensions, values[name]) for name, dimensions in {**INPUTS, **TARGETS}.items()}
    chunks = {name: (1, *values[name].shape[1:]) for name in ("col_inputs",)}
    return write_netcdf(folder / f"radiation_{number:03d}.nc", lengths, variables, chunks=chunks)


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
    heating = GRAVITY / HEAT_CAPACITY * SECONDS_PER_DAY * (net[:, :-1] - net[:, 1:]) / np.diff(pressure, axis=1)
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


COSINE_OF_ZENITH, IRRADIANCE = 1, -1
"""Places of the two scalars whose product is the incoming solar flux [W/m²]."""
_WIDTH = 64
_KERNEL = 5
_DILATIONS = (1, 2, 4, 8, 16, 1, 1, 1, 1, 1, 1)
_FLUX_CHANNELS = 8
_DENSE = 32


def absorbed_flux(heating: torch.Tensor, pressure: torch.Tensor) -> torch.Tensor:
    """Flux [W/m²] absorbed by columns, (B,), that heat at these rates [K/day], (B, K); pressure at half levels, increasing [Pa], (B, L).

    A layer of pressure thickness dp has the mass dp / g per area, so it takes up ``heating * cp * dp / g``.
    """
    thickness = pressure[:, 1:] - pressure[:, :-1]  # (B, K)
    return (heating * thickness).sum(1) * (HEAT_CAPACITY / GRAVITY / SECONDS_PER_DAY)


class RadiationColumn(nn.Module):
    """Heating rates and fluxes of columns.

    ``forward`` returns the heating rate (B, K, 1) [K/day] and the fluxes (B, 3) [W/m²]: net downward at the top, downward and upward at
    the surface. The surface fluxes are shares of the incoming solar flux; the one at the top is what reaches the surface plus what the
    column absorbs.
    """

    def __init__(self, maxima: tuple[torch.Tensor, ...] | None = None) -> None:
        """``maxima``: largest value of each feature of the four inputs; inputs are divided by them, and by 1 where they are 0."""
        super().__init__()
        for (name, shape), largest in zip(SCALED.items(), maxima or (None,) * len(SCALED), strict=True):
            scale = torch.ones(shape[-1]) if largest is None else torch.where(largest == 0, torch.ones_like(largest), largest)
            self.register_buffer(f"{name}_scale", scale)
        channels = sum(shape[-1] for shape in SCALED.values())  # 47
        layers: list[nn.Module] = []
        for dilation in _DILATIONS:
            layers += [_same_convolution(channels, _WIDTH, dilation), nn.SiLU()]
            channels = _WIDTH
        self.trunk = nn.Sequential(*layers)
        self.heating = _same_convolution(_WIDTH, 1)
        self.flux_features = _same_convolution(_WIDTH, _FLUX_CHANNELS)
        self.flux = nn.Sequential(
            *(nn.Linear(HALF_LEVELS * _FLUX_CHANNELS + LENGTHS["scalar"], _DENSE), nn.SiLU()),
            *(nn.Linear(_DENSE, _DENSE), nn.SiLU()),
            *(nn.Linear(_DENSE, _DENSE), nn.SiLU()),
            *(nn.Linear(_DENSE, 2), nn.Sigmoid()),
        )

    def forward(
        self, scalars: torch.Tensor, columns: torch.Tensor, half_levels: torch.Tensor, interfaces: torch.Tensor, pressure: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emulate B columns; arguments as in :data:`INPUT_SHAPES`."""
        solar = scalars[:, COSINE_OF_ZENITH] * scalars[:, IRRADIANCE]  # (B,) [W/m²]
        scalars, columns, half_levels, interfaces = self._scaled(scalars, columns, half_levels, interfaces)
        features = [
            scalars.unsqueeze(2).expand(-1, -1, HALF_LEVELS),  # (B, 17, L)
            F.pad(columns.transpose(1, 2), (1, 0)),  # (B, 27, L): layers, a zero on top
            half_levels.transpose(1, 2),  # (B, 2, L)
            F.pad(interfaces.transpose(1, 2), (1, 1)),  # (B, 1, L): between layers, a zero at both ends
        ]
        x = self.trunk(torch.cat(features, 1))  # (B, 64, L)
        heating = self.heating(x)[:, 0, :-1].float()  # (B, K)
        shapes = F.silu(self.flux_features(x)).transpose(1, 2).flatten(1)  # (B, L * 8)
        shares = self.flux(torch.cat([shapes, scalars.to(shapes.dtype)], 1)).float()  # (B, 2)
        down, up = (shares * solar[:, None]).unbind(1)  # (B,) each
        top = down - up + absorbed_flux(heating, pressure[..., 0])  # (B,)
        return heating.unsqueeze(2), torch.stack([top, down, up], 1)

    def _scaled(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        scales = (self.get_buffer(f"{name}_scale") for name in SCALED)
        return [value / scale for value, scale in zip(inputs, scales, strict=True)]


def _same_convolution(inputs: int, outputs: int, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, _KERNEL, padding=dilation * (_KERNEL // 2), dilation=dilation)


def build(ctx: BuildContext[RadiationParams]) -> Task:
    """Build the network, Adam, and the stream of the seven tensors of :class:`~.RadiationSamples`."""
    params, maxima = ctx.params, None

    def files(folder: Path, split: Any) -> Any:
        nonlocal maxima
        samples = RadiationSamples(folder, split)
        if split == "validation":
            return samples
        maxima = samples.maxima()
        return Cached(samples, shared=params.workers != 0) if params.cache else samples

    given = open_input(ctx, "ap3", files, synthetic_column, SAMPLES_WITHOUT_FILES)
    torch.manual_seed(ctx.seed)
    model = RadiationColumn(maxima).to(ctx.device)
    rate = params.learning_rate or 1e-4 * ctx.global_batch / 256
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=ctx.fused)
    facts = counted_facts("column", model, given, _flops(params), bytes_per_sample=INPUT_BYTES)
    return given.task(
        model,
        optimizer,
        lambda net, batch: radiation_loss(net(*batch[:5]), batch[5:], params.heating_weight),
        facts,
        predict=lambda net, batch: net(*batch[:5]),
    )


def radiation_loss(predicted: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, ...], heating_weight: float) -> torch.Tensor:
    """``heating_weight * MSE(heating rates) + MSE(fluxes)``; heating (B, 137, 1) [K/day], fluxes (B, 3) [W/m²]."""
    return heating_weight * F.mse_loss(predicted[0], truth[0]) + F.mse_loss(predicted[1], truth[1])


def _flops(params: RadiationParams) -> tuple[float, float]:
    with torch.device("meta"):
        model = RadiationColumn()
        inputs = [torch.empty(2, *shape) for shape in INPUT_SHAPES.values()]
        truth = (torch.empty(2, LAYERS, 1), torch.empty(2, 3))
        return forward_and_training_flops(lambda: radiation_loss(model(*inputs), truth, params.heating_weight), 2)
