"""Deep clustering of weather fields: pairs of crops from NetCDF files of ERA5, a ResNet-50 with a projection head, and spherical k-means.

MAELSTROM's sixth application (deliverable D3.7, section 4.9) trains DeepCluster v2, the variant described in Caron et al., Unsupervised
Learning of Visual Features by Contrasting Cluster Assignments, arXiv 2006.09882: features of an epoch are clustered, and in the next one
the network learns to predict each sample's cluster. With 25 channels and 4 heads of 40 prototypes: 28,060,224 parameters.

An epoch begins by clustering the features of the one before it; before the first, a pass without gradients fills the memory bank. Both
are part of the step in which they happen, and of the window if that step is in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.data.loader import Synthetic
from caraml.workloads.base import COUNTED, BuildContext, StepTools, Task, counted_facts
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.weather import RegimeParams, open_input
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
LOOKALIKE = {"tiny": (2, 48, 40, 60), "small": (2, 80, 120, 180)}
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
        self.ends = list(itertools.accumulate(lengths["time"] for lengths in self.files.lengths))
        self._mean, self._std = self._scales()
        latitude = np.deg2rad(self.files.read(0, "latitude"))
        self._weight = np.sqrt(np.clip(np.cos(latitude), 0, None))[:, None]  # (rows, 1)
        self.files.close()

    def __getitem__(self, position: int) -> Sample:
        """Sample ``position``: one day, cropped twice by torch's random numbers."""
        number, time = self.place(position)
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


class SyntheticRegimes(Synthetic):
    """Standard normal crops of no day in particular, with their position as :class:`RegimeSamples` has it."""

    def __getitem__(self, position: int) -> tuple[Any, ...]:
        return position, *super().__getitem__(position)


def synthetic_crops(rng: np.random.Generator, crop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Both crops of a sample, (2, 25, crop, crop)."""
    return rng.standard_normal((2, CHANNELS, crop, crop), dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int, number: int) -> int:
    """Write file ``number``: days that each follow one of four regimes, with noise of their own. Its bytes."""
    _, days, rows, columns = LOOKALIKE[size]
    rng = np.random.default_rng(seed)
    regimes = smooth(rng, (4, len(VARIABLES), len(LEVELS), rows, columns), 12)
    scale = {"z": (3e4, 2e3), "t": (260, 10), "r": (50, 20), "u": (8, 8), "v": (0, 6)}
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
    return write_netcdf(folder / name, lengths, variables, chunks=chunks, attributes=attributes)


HEADS = 4
"""Sets of prototypes, each clustered from its own start."""
FEATURES = 128
_HIDDEN = 2048
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Bottleneck width, blocks, stride of each stage of a ResNet-50 (He et al., arXiv 1512.03385)."""


class RegimeNetwork(nn.Module):
    """Fields (B, 25, H, W) to features of length 1, (B, 128), and a score for each prototype, a (B, K) per head.

    The prototypes are the clusters' centroids: k-means sets them, gradients do not.
    """

    def __init__(
        self, heads: Sequence[int] = (40,) * HEADS, stages: Sequence[tuple[int, int, int]] = _STAGES, hidden: int = _HIDDEN
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(CHANNELS, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        channels = 64
        for width, count, stride in stages:
            for index in range(count):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
        self.trunk = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Linear(channels, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, FEATURES))
        self.prototypes = nn.ModuleList(nn.Linear(FEATURES, count, bias=False) for count in heads)
        self.prototypes.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Features and scores (cosine similarities)."""
        x = self.trunk(self.stem(x))  # (B, 2048, H/32, W/32)
        features = F.normalize(self.head(x.mean((2, 3))), dim=1)  # (B, 128)
        return features, [prototypes(features) for prototypes in self.prototypes]


class Bottleneck(nn.Module):
    """Three convolutions around a narrow middle, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) to (B, 4 width, H / stride, W / stride)."""
        return F.relu(self.body(x) + self.shortcut(x))


_ITERATIONS = 10
"""Of k-means: assigning and averaging."""
_TEMPERATURE = 0.1
"""Divides scores before the softmax."""


def spherical_k_means(features: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K-means on the unit sphere over the features of all ranks together (Dhillon and Modha, Machine Learning 42, 2001).

    From this rank's features (N, D) and first centroids (K, D), the same on all ranks, each of length 1: centroids, again the same, and the
    cluster of each feature, int64 (N,). Collective if there is a process group. A cluster that loses all its members keeps its centroid.
    """
    for _ in range(_ITERATIONS):
        clusters = (features @ centroids.T).argmax(1)  # (N,)
        sums = torch.zeros_like(centroids).index_add_(0, clusters, features)  # (K, D)
        counts = torch.bincount(clusters, minlength=len(centroids)).to(sums.dtype)  # (K,)
        total = all_reduced(torch.cat([sums, counts[:, None]], 1))  # (K, D + 1)
        moved = F.normalize(total[:, :-1], dim=1)
        centroids = torch.where(total[:, -1:] > 0, moved, centroids)
    return centroids, (features @ centroids.T).argmax(1)


def all_reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """``values`` summed (or otherwise combined) over all ranks; as they are without a process group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, operation)
    return values


class MemoryBank:
    """Features of the samples that this rank sees in an epoch, for each crop, (crops, N, D), with the samples' positions in the data set,
    (N,); and what k-means makes of those of all ranks: the cluster of every sample of the whole set under each head, (heads, samples), the
    same on all ranks, -1 for samples that no rank saw."""

    def __init__(self, per_epoch: int, samples: int, *, crops: int, heads: Sequence[int], width: int, device: torch.device) -> None:
        """Reserve places for ``per_epoch`` samples of this rank, of ``samples`` in the data set."""
        self.positions = torch.full((per_epoch,), -1, dtype=torch.int64, device=device)
        self.features = torch.zeros(crops, per_epoch, width, device=device)
        self.labels = torch.full((len(heads), samples), -1, dtype=torch.int64, device=device)
        self._heads = list(heads)

    def write(self, place: int, positions: torch.Tensor, features: Sequence[torch.Tensor]) -> None:
        """Keep a batch: positions (B,) and, per crop, features (B, D), at places ``place`` to ``place + B - 1``."""
        end = place + len(positions)
        self.positions[place:end] = positions
        for kept, new in zip(self.features, features, strict=True):
            kept[place:end] = new.detach().float()

    def cluster(self, seed: int) -> list[torch.Tensor]:
        """Cluster the bank anew for every head, heads taking turns among the crops; sets ``labels``, returns centroids (K, D) per head.

        First centroids are the features of samples that the seed chooses among those that any rank saw.
        """
        known = torch.zeros(self.labels.shape[1], dtype=torch.int32, device=self.labels.device)
        known[self.positions] = 1
        seen = all_reduced(known, dist.ReduceOp.MAX).nonzero()[:, 0]  # positions, in order
        centroids = []
        for head, count in enumerate(self._heads):
            generator = torch.Generator().manual_seed(seed * len(self._heads) + head)
            chosen = seen[torch.randperm(len(seen), generator=generator)[:count].to(seen.device)]
            features = self.features[head % len(self.features)]
            first = self._first(chosen, features, count, generator)
            centroid, clusters = spherical_k_means(features, first)
            found = torch.full_like(self.labels[head], -1)
            found[self.positions] = clusters
            self.labels[head] = all_reduced(found, dist.ReduceOp.MAX)
            centroids.append(centroid)
        return centroids

    def _first(self, chosen: torch.Tensor, features: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """Features of the chosen positions, wherever they are; random directions where there are fewer samples than clusters."""
        rows = torch.zeros(count, features.shape[1] + 1, device=features.device)
        for row, position in enumerate(chosen):
            places = (self.positions == position).nonzero()[:1, 0]
            if len(places):
                rows[row, :-1], rows[row, -1] = features[places[0]], 1
        rows = all_reduced(rows)
        rows = rows[:, :-1] / rows[:, -1:].clamp(min=1)
        if len(chosen) < count:
            rows[len(chosen) :] = torch.randn(count - len(chosen), features.shape[1], generator=generator).to(features.device)
        return F.normalize(rows, dim=1)


def cluster_loss(scores: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each head's cosine similarities (B, K) against the clusters (heads, B), the mean over heads; samples without a
    cluster, -1, do not count."""
    known = (labels >= 0).sum(1).clamp(min=1)  # per head: of a small batch it may be none, whose mean would be no number
    pairs = zip(scores, labels, strict=True)
    losses = [F.cross_entropy(score.float() / _TEMPERATURE, label, ignore_index=-1, reduction="sum") for score, label in pairs]
    return (torch.stack(losses) / known).mean()


def build(ctx: BuildContext[RegimeParams]) -> Task:
    """Build the network, SGD, the memory bank, and the stream of ``[positions (B,), crops (B, 25, S, S) twice]``."""
    params = ctx.params
    draw = partial(synthetic_crops, crop=params.crop)
    given = open_input(
        ctx, "ap6", lambda folder, _: RegimeSamples(folder, params.crop, params.crop_area), draw, params.samples, kind=SyntheticRegimes
    )
    torch.manual_seed(ctx.seed)
    heads = [params.prototypes] * HEADS
    network: torch.nn.Module = RegimeNetwork(heads)
    if ctx.world > 1 and ctx.device.type != "cpu":  # torch has no synchronised normalisation on CPUs
        network = torch.nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network = ctx.placed(network)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(
        trained, lr=params.learning_rate, momentum=params.momentum, weight_decay=params.weight_decay, fused=ctx.fused
    )
    steps_per_epoch = max(given.samples // ctx.world // ctx.micro_batch, 1)  # batches on the device may repeat the samples of a small set
    bank = MemoryBank(steps_per_epoch * ctx.micro_batch, given.samples, crops=2, heads=heads, width=FEATURES, device=ctx.device)
    size, formula = 4 * 2 * CHANNELS * params.crop**2, f"{COUNTED}; two crops per sample; k-means not counted"
    facts = counted_facts("sample", network, given, _flops(params), bytes_per_sample=size, formula=formula)
    return Task(
        network,
        optimizer,
        given.batches,
        lambda net, batch: cluster_loss(net(batch[1])[1], bank.labels[:, batch[0]]),
        facts,
        own_step=partial(clustering_step, network=network, optimizer=optimizer, bank=bank, steps_per_epoch=steps_per_epoch, seed=ctx.seed),
        predict=lambda net, batch: [net(crop) for crop in batch[1:]],
        close=given.close,
    )


def clustering_step(
    tools: StepTools, *, network: Any, optimizer: torch.optim.Optimizer, bank: MemoryBank, steps_per_epoch: int, seed: int
) -> Callable[[], torch.Tensor]:
    """The step: at the start of an epoch of so many steps cluster the bank anew, by first centroids of the ``seed``, then learn the
    clusters of one batch's two crops. The bank has a place for every sample that this rank sees in an epoch. The network gives features
    (B, D) and scores per head, and has ``prototypes``, a layer per head."""
    wrapped, done = tools.wrap(network), 0

    def both(net: Any, batch: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Features per crop, and scores per head of both crops one after the other, (2 B, K)."""
        features, scores = net(torch.cat(batch[1:]))
        return list(features.chunk(2)), scores

    def fill() -> None:
        for index in range(steps_per_epoch):
            batch = tools.next_batch()
            with torch.no_grad(), tools.autocast():
                features, _ = both(network, batch)
            bank.write(index * len(batch[0]), batch[0], features)

    def cluster(epoch: int) -> None:
        with torch.no_grad():
            for layer, centroids in zip(network.prototypes, bank.cluster(seed + epoch), strict=True):
                layer.weight.copy_(centroids)

    def step() -> torch.Tensor:
        nonlocal done
        epoch, index = divmod(done, steps_per_epoch)
        if done == 0:
            fill()
        if index == 0:
            cluster(epoch)
        batch = tools.next_batch()
        labels = bank.labels[:, batch[0]]  # (heads, B)
        with tools.autocast():
            features, scores = both(wrapped, batch)
            loss = cluster_loss(scores, torch.cat([labels, labels], 1))
        tools.update(loss, optimizer)
        bank.write(index * len(batch[0]), batch[0], features)
        done += 1
        return loss

    return step


def _flops(params: RegimeParams) -> tuple[float, float]:
    """FLOPs of one sample, two crops: forward, and forward with backward."""
    with torch.device("meta"):
        network = RegimeNetwork([params.prototypes] * HEADS)
        crops, labels = torch.empty(2, CHANNELS, params.crop, params.crop), torch.empty(HEADS, 2, dtype=torch.int64)
        return forward_and_training_flops(lambda: cluster_loss(network(crops)[1], labels), 1)
