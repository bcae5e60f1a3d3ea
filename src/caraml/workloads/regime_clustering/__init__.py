"""Clustering of weather regimes, MAELSTROM's sixth application: DeepCluster v2 on 25 fields of ERA5.

An epoch begins by clustering the features of the one before it; before the first, a pass without gradients fills the memory bank. Both
are part of the step in which they happen, and of the window if that step is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from caraml.workloads.base import COUNTED, BuildContext, StepTools, Task, Workload, counted_facts
from caraml.workloads.weather import WeatherParams, check_files, open_input

if TYPE_CHECKING:
    import torch

    from caraml.workloads.regime_clustering.model import MemoryBank

SAMPLES_WITHOUT_FILES = 35_064
"""Samples in an epoch of random data: as many as the report's training set has."""


class Params(WeatherParams):
    """Parameters of the `regime_clustering` workload (`ap6`)."""

    own_step: ClassVar[bool] = True

    crop: int = Field(280, ge=32, description="height and width of a crop in grid points")
    crop_area: float | None = Field(
        None, gt=0, le=1, description="share of the field's area that each crop has before it is resized; 80 to 100 % at random if absent"
    )
    prototypes: int = Field(40, ge=2, description="clusters of each of the four heads")
    samples: int = Field(SAMPLES_WITHOUT_FILES, ge=1, description="samples in an epoch of random data; files have their own")
    learning_rate: float = Field(0.3, gt=0, description="of the optimizer")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the optimizer")
    weight_decay: float = Field(1e-6, ge=0, description="of the optimizer")


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, SGD, the memory bank, and the stream of ``[positions (B,), crops (B, 25, S, S) twice]``."""
    import torch

    from caraml.workloads.regime_clustering.data import RegimeSamples, SyntheticRegimes
    from caraml.workloads.regime_clustering.model import CHANNELS, FEATURES, HEADS, MemoryBank, RegimeNetwork, cluster_loss

    params = ctx.params
    with ctx.phase("data"):
        given = open_input(
            ctx,
            "ap6",
            lambda folder, _: RegimeSamples(folder, params.crop, params.crop_area),
            lambda: SyntheticRegimes(params.samples, params.crop, ctx.seed),
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
    steps_per_epoch = given.samples // ctx.world // ctx.micro_batch
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
    """The step: at the start of an epoch cluster the bank, then learn the clusters of one batch's two crops.

    Args:
        tools: lent by the engine.
        network: gives features (B, D) and scores per head, and has ``prototypes``, a layer per head.
        optimizer: of its parameters.
        bank: with a place for every sample that this rank sees in an epoch.
        steps_per_epoch: after so many steps the bank is clustered anew.
        seed: of the first centroids.
    """
    import torch

    from caraml.workloads.regime_clustering.model import cluster_loss

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


def _flops(params: Params) -> tuple[float, float]:
    """FLOPs of one sample, two crops: forward, and forward with backward."""
    import torch

    from caraml.workloads.flops import forward_and_training_flops
    from caraml.workloads.regime_clustering.model import CHANNELS, HEADS, RegimeNetwork, cluster_loss

    with torch.device("meta"):
        network = RegimeNetwork([params.prototypes] * HEADS)
        crops, labels = torch.empty(2, CHANNELS, params.crop, params.crop), torch.empty(HEADS, 2, dtype=torch.int64)
        return forward_and_training_flops(lambda: cluster_loss(network(crops)[1], labels), 1)


WORKLOAD = Workload(
    title="weather-regime clustering, DeepCluster v2", params=Params, build=build, packages=("h5netcdf", "h5py"), check=check_files
)
