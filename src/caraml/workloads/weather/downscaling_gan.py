"""Coarse predictors and fine temperature from monthly NetCDF files, and the Wasserstein GAN that adds detail to coarse fields.

The networks of MAELSTROM's fifth application (deliverable D3.7, section 4.8): together 9,332,299 parameters and 5,280 running
statistics. The generator is a U-Net after Sha et al., Journal of Applied Meteorology and Climatology 59 (2020), with subpixel upsampling.

A step updates the critic five times, each time on a mini-batch of its own, and then the generator once, on a sixth. An item is one sample
of the generator's; six are loaded for it. An epoch has as many steps as the set has mini-batches.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.base.files import write_file
from caraml.workloads.base import COUNTED, BuildContext, StepTools, Task, counted_facts
from caraml.workloads.flops import count_flops
from caraml.workloads.weather import DownscalingParams, open_input
from caraml.workloads.weather.netcdf import FloatArray, Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, read_scales, smooth, split_files, without_gaps

CRITIC_UPDATES = 5
SAMPLES_WITHOUT_FILES = 96_296
"""Samples in an epoch of random data: as many as the report's training set has."""
_FLOPS_BATCH = 2
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
LOOKALIKE = {"tiny": (3, 24, 32, 40), "small": (3, 144, *GRID)}
"""Files, hours in each, rows, columns."""


class DownscalingSamples(WeatherSamples):
    """A sample is ``(predictors (15, H, W), targets (2, H, W))``, both normalised; targets are 2 m temperature and surface height."""

    application = "ap5"

    def __init__(self, folder: Path, split: Split = "train") -> None:
        """Open the monthly files of ``folder``; of several files the last is for validation. Raises ``InputError`` as :class:`NetcdfFiles`;
        also for a grid that pooling cannot halve three times; a variable without normalisation."""
        self.files = NetcdfFiles(split_files(find_files(folder, PATTERN), split), LAYOUT)
        first = self.files.lengths[0]
        for path, found in zip(self.files.paths, self.files.lengths, strict=True):
            if found["rlat"] % 8 or found["rlon"] % 8 or (found["rlat"], found["rlon"]) != (first["rlat"], first["rlon"]):
                expected = f"multiples of 8, the same in every file ({first['rlat']} x {first['rlon']} in the first)"
                raise InputError(f"{path}: found a grid of {found['rlat']} x {found['rlon']}; expected {expected}")
        self.grid = (first["rlat"], first["rlon"])
        self._scales = read_scales(folder / NORMALIZATION, (*INPUTS, TARGETS[0]))
        self.ends = list(itertools.accumulate(lengths["time"] for lengths in self.files.lengths))

    def __getitem__(self, position: int) -> Sample:
        number, time = self.place(position)
        values = {name: self._normalized(number, name, time) for name in (*INPUTS, TARGETS[0])}
        path = self.files.paths[number]
        targets = np.stack([complete(values[name], path, name) for name in TARGETS])
        return torch.from_numpy(np.stack([without_gaps(values[name]) for name in INPUTS])), torch.from_numpy(targets)

    def _normalized(self, number: int, name: str, time: int) -> FloatArray:
        mean, std = self._scales[name]
        return (self.files.read(number, name, time) - np.float32(mean)) / np.float32(std)


def synthetic_hour(rng: np.random.Generator, grid: tuple[int, int]) -> tuple[Any, ...]:
    """Standard normal predictors and targets."""
    return rng.standard_normal((len(INPUTS), *grid), dtype=np.float32), rng.standard_normal((len(TARGETS), *grid), dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int, number: int) -> int:
    """Write file ``number``: a month whose fine temperature is the coarse one, corrected by the height that the coarse topography lacks.
    Its bytes."""
    _, hours, rows, columns = LOOKALIKE[size]
    rng, shape = np.random.default_rng(seed), (hours, rows, columns)
    fine = np.abs(600 * smooth(rng, (rows, columns), 1.5))
    coarse = _blurred(fine)
    rng = np.random.default_rng([seed, 1, number])
    air = 283 + 6 * smooth(rng, shape, 8)
    values = {name: smooth(rng, shape, 8) for name in INPUTS}
    values["t_2m_in"], values["hsurf_in"] = air, np.broadcast_to(coarse, shape)
    values["hsurf_tar"] = np.broadcast_to(fine, shape)
    values["t_2m_tar"] = air - 0.0065 * (fine - coarse) + 0.3 * values["slhf_in"] + 0.1 * rng.standard_normal(shape)
    variables: dict[str, tuple[tuple[str, ...], Any]] = {name: (_DIMENSIONS, v.astype(np.float32)) for name, v in values.items()}
    variables["time"] = (("time",), 3600.0 * (np.arange(hours) + number * hours))
    chunks = dict.fromkeys(values, (1, rows, columns))
    if number == 0:
        sums = {name: [float(v.mean()), max(float(v.std()), 1e-6)] for name, v in values.items()}
        write_file(folder / NORMALIZATION, json.dumps(sums, indent=1) + "\n")
    return write_netcdf(
        folder / PATTERN.replace("*", f"1995-{number + 1:02d}"), dict(zip(_DIMENSIONS, shape, strict=True)), variables, chunks=chunks
    )


def _blurred(field: np.ndarray[Any, Any], side: int = 8) -> np.ndarray[Any, Any]:
    """Means over squares of ``side`` points, each repeated over its square."""
    rows, columns = field.shape
    means = field.reshape(rows // side, side, columns // side, side).mean((1, 3))
    return means.repeat(side, 0).repeat(side, 1)


PENALTY_WEIGHT = 10.0
RECONSTRUCTION_WEIGHT = 1000.0
_WIDTH = 56
_CRITIC_WIDTH = 64


class Generator(nn.Module):
    """Predictors (B, 15, H, W) to temperature and surface height (B, 2, H, W); H and W multiples of 8."""

    def __init__(self) -> None:
        super().__init__()
        w1, w2, w3, w4 = (_WIDTH * factor for factor in (1, 2, 4, 8))
        self.encoder1 = nn.Sequential(_block(len(INPUTS), w1), _block(w1, w1))
        self.encoder2, self.encoder3, self.bridge = _block(w1, w2), _block(w2, w3), _block(w3, w4)
        self.upsample = nn.ModuleList(_subpixel(high, low) for high, low in ((w4, w3), (w3, w2), (w2, w1)))
        self.decoder = nn.ModuleList(nn.Sequential(_block(2 * width, width), _block(width, width)) for width in (w3, w2, w1))
        self.heads = nn.ModuleList(nn.Conv2d(w1, 1, 1) for _ in TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The fine fields, normalised as the targets are."""
        skips = [self.encoder1(x)]  # (B, 56, H, W)
        skips.append(self.encoder2(F.max_pool2d(skips[-1], 2)))  # (B, 112, H/2, W/2)
        skips.append(self.encoder3(F.max_pool2d(skips[-1], 2)))  # (B, 224, H/4, W/4)
        x = self.bridge(F.max_pool2d(skips[-1], 2))  # (B, 448, H/8, W/8)
        for upsample, decoder in zip(self.upsample, self.decoder, strict=True):
            x = decoder(torch.cat([upsample(x), skips.pop()], 1))
        return torch.cat([head(x) for head in self.heads], 1)  # (B, 2, H, W)


class Critic(nn.Module):
    """Temperature fields (B, 1, H, W) to scores (B, 1), high for fields that look real."""

    def __init__(self) -> None:
        super().__init__()
        widths = [_CRITIC_WIDTH * 2**step for step in range(4)]  # 64 ... 512
        self.convolutions = nn.Sequential(*(_block(before, width, stride=2) for before, width in zip([1, *widths], widths, strict=False)))
        self.dense = nn.Sequential(nn.Linear(widths[-1], _CRITIC_WIDTH), nn.Linear(_CRITIC_WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores; their scale is free but for the gradient penalty."""
        return self.dense(self.convolutions(x).mean((2, 3)))  # (B, 512, H/16, W/16) -> (B, 1)


class _SamePadding(nn.Module):
    """Zeros so that a 3 x 3 convolution leaves ``ceil(n / stride)`` points; an odd one goes below and to the right."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pads = []
        for n in (x.shape[3], x.shape[2]):
            total = max((-(-n // self.stride) - 1) * self.stride + 3 - n, 0)
            pads += [total // 2, total - total // 2]
        return F.pad(x, pads)


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        _SamePadding(stride), nn.Conv2d(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01), nn.SiLU()
    )


def _subpixel(inputs: int, outputs: int) -> nn.Sequential:
    """Four times the channels, then each group of four becomes 2 x 2 points."""
    return nn.Sequential(nn.Conv2d(inputs, 4 * outputs, 3, padding=1), nn.SiLU(), nn.PixelShuffle(2))


class CriticLoss(nn.Module):
    """What the critic is trained by; only its parameters are in here."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, fake: torch.Tensor, real: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """``mean(critic(fake)) - mean(critic(real)) + 10 * penalty``; fields (B, 1, H, W), mixing weights (B, 1, 1, 1)."""
        return self.critic(fake).mean() - self.critic(real).mean() + PENALTY_WEIGHT * gradient_penalty(self.critic, fake, real, mix)


class GeneratorLoss(nn.Module):
    """What the generator is trained by; only its parameters are in here."""

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, predictors: torch.Tensor, targets: torch.Tensor, critic: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, ``-mean(critic(fake)) + 1000 * L1``, and L1: mean absolute errors of both fields, added."""
        made = self.generator(predictors)  # (B, 2, H, W)
        distance = (made - targets).abs().mean((0, 2, 3)).sum()
        return -critic(made[:, :1]).mean() + RECONSTRUCTION_WEIGHT * distance, distance


def gradient_penalty(critic: nn.Module, fake: torch.Tensor, real: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """How far the critic's slope is from 1 between real and made fields: the mean of ``(|gradient| - 1)^2``.

    Gulrajani et al., arXiv 1704.00028, as the application has it: |.| is the root of the *mean* square over points, and ``mix``
    (B, 1, 1, 1) is drawn from a normal distribution. The slope of ``critic``, from fields (B, 1, H, W) to scores (B, 1), is taken
    at ``real + mix * (fake - real)``; no gradient goes into these.
    """
    between = (real + mix * (fake - real)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.float().square().mean((1, 2, 3)).sqrt() - 1).square().mean()


def build(ctx: BuildContext[DownscalingParams]) -> Task:
    """Build generator, critic, an Adam for each, and the stream of ``[predictors (B, 15, H, W), targets (B, 2, H, W)]``."""
    params, grid = ctx.params, (ctx.params.rows, ctx.params.columns)
    given = open_input(ctx, "ap5", DownscalingSamples, partial(synthetic_hour, grid=grid), SAMPLES_WITHOUT_FILES)
    grid = getattr(given.dataset, "grid", grid)  # files have their own
    torch.manual_seed(ctx.seed)
    networks = torch.nn.ModuleDict({"generator": Generator(), "critic": Critic()}).to(ctx.device)
    torch.manual_seed(ctx.seed + 1 + ctx.rank)  # mixing weights differ between ranks
    betas = (0.0, 0.9)
    optimizer = torch.optim.Adam(networks["generator"].parameters(), lr=params.learning_rate, betas=betas, fused=ctx.fused)
    critic_optimizer = torch.optim.Adam(networks["critic"].parameters(), lr=params.critic_learning_rate, betas=betas, fused=ctx.fused)
    formula = f"{COUNTED}; {CRITIC_UPDATES} critic updates and one of the generator. Inference: the generator alone"
    facts = counted_facts("sample", networks, given, _flops(grid), bytes_per_sample=4 * len(INPUTS) * grid[0] * grid[1], formula=formula)
    return given.task(
        networks,
        optimizer,
        reconstruction_error,
        facts,
        own_step=partial(_own_step, networks, optimizer, critic_optimizer),
        batches_per_step=CRITIC_UPDATES + 1,
        predict=lambda networks, batch: networks["generator"](batch[0]),
    )


def reconstruction_error(networks: Any, batch: Any) -> torch.Tensor:
    """L1 of the generator: mean absolute errors of both normalised fields, added. This is the loss that records show."""
    predictors, targets = batch
    return (networks["generator"](predictors) - targets).abs().mean((0, 2, 3)).sum()


def _own_step(networks: Any, optimizer: Any, critic_optimizer: Any, tools: StepTools) -> Callable[[], torch.Tensor]:
    """The step: five updates of the critic, one of the generator; returns the generator's L1."""
    generator, critic = networks["generator"], networks["critic"]
    critic_loss, generator_loss = tools.wrap(CriticLoss(critic)), tools.wrap(GeneratorLoss(generator))

    def step() -> torch.Tensor:
        for _ in range(CRITIC_UPDATES):
            predictors, targets = tools.next_batch()
            mix = torch.randn(len(predictors), 1, 1, 1, device=predictors.device)
            with tools.autocast():
                with torch.no_grad():
                    fake = generator(predictors)[:, :1]
                loss = critic_loss(fake, targets[:, :1], mix)
            tools.update(loss, critic_optimizer)
        predictors, targets = tools.next_batch()
        critic.requires_grad_(False)  # the generator's gradient passes through the critic, but is not the critic's to keep
        with tools.autocast():
            loss, distance = generator_loss(predictors, targets, critic)
        tools.update(loss, optimizer)
        critic.requires_grad_(True)
        return distance

    return step


def _flops(grid: tuple[int, int]) -> tuple[float, float]:
    """FLOPs per item: of the generator's forward pass, and of a whole step."""
    with torch.device("meta"):
        generator, critic = Generator(), Critic()
        predictors, targets = torch.empty(_FLOPS_BATCH, len(INPUTS), *grid), torch.empty(_FLOPS_BATCH, len(TARGETS), *grid)
        mix = torch.empty(_FLOPS_BATCH, 1, 1, 1)

        def critic_update() -> None:
            with torch.no_grad():
                fake = generator(predictors)[:, :1]
            CriticLoss(critic)(fake, targets[:, :1], mix).backward()

        def generator_update() -> None:
            critic.requires_grad_(False)
            GeneratorLoss(generator)(predictors, targets, critic)[0].backward()

        with torch.no_grad():
            forward = count_flops(lambda: generator(predictors))
        whole = CRITIC_UPDATES * count_flops(critic_update) + count_flops(generator_update)
    return forward / _FLOPS_BATCH, whole / _FLOPS_BATCH
