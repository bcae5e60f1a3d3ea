"""Downscaling of temperature, MAELSTROM's fifth application: a Wasserstein GAN with gradient penalty.

A step updates the critic five times, each time on a mini-batch of its own, and then the generator once, on a sixth. An item is one sample
of the generator's; six are loaded for it. An epoch has as many steps as the set has mini-batches.
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

CRITIC_UPDATES = 5
SAMPLES_WITHOUT_FILES = 96_296
"""Samples in an epoch of random data: as many as the report's training set has."""
_FLOPS_BATCH = 2


class Params(WeatherParams):
    """Parameters of the `downscaling_gan` workload (`ap5`)."""

    own_step: ClassVar[bool] = True
    uncompiled: ClassVar[str] = "the gradient penalty is differentiated twice, which torch's compiled graphs cannot be"

    rows: int = Field(96, ge=16, multiple_of=8, description="rows of random data; files have their own")
    columns: int = Field(120, ge=16, multiple_of=8, description="columns of random data; files have their own")
    learning_rate: float = Field(5e-5, gt=0, description="of the generator")
    critic_learning_rate: float = Field(1e-6, gt=0, description="of the critic")


def build(ctx: BuildContext[Params]) -> Task:
    """Build generator, critic, an Adam for each, and the stream of ``[predictors (B, 15, H, W), targets (B, 2, H, W)]``."""
    import torch

    from caraml.workloads.downscaling_gan.data import DownscalingSamples, synthetic_hour
    from caraml.workloads.downscaling_gan.model import PREDICTORS, Critic, Generator
    from caraml.workloads.weather.samples import SyntheticSamples

    params, grid = ctx.params, (ctx.params.rows, ctx.params.columns)

    def files(folder: Any, split: Any) -> DownscalingSamples:
        nonlocal grid
        samples = DownscalingSamples(folder, split)
        grid = samples.grid
        return samples

    with ctx.phase("data"):
        given = open_input(
            ctx, "ap5", files, lambda: SyntheticSamples("ap5", partial(synthetic_hour, grid=grid), SAMPLES_WITHOUT_FILES, ctx.seed)
        )
    torch.manual_seed(ctx.seed)
    networks = torch.nn.ModuleDict({"generator": Generator(), "critic": Critic()}).to(ctx.device)
    torch.manual_seed(ctx.seed + 1 + ctx.rank)  # mixing weights differ between ranks
    betas = (0.0, 0.9)
    optimizer = torch.optim.Adam(networks["generator"].parameters(), lr=params.learning_rate, betas=betas, fused=ctx.fused)
    critic_optimizer = torch.optim.Adam(networks["critic"].parameters(), lr=params.critic_learning_rate, betas=betas, fused=ctx.fused)
    formula = f"{COUNTED}; {CRITIC_UPDATES} critic updates and one of the generator. Inference: the generator alone"
    size = 4 * PREDICTORS * grid[0] * grid[1] * (CRITIC_UPDATES + 1)
    facts = counted_facts("sample", networks, given, _flops(grid), bytes_per_sample=size, formula=formula)
    return given.task(
        networks,
        optimizer,
        reconstruction_error,
        facts,
        own_step=partial(_own_step, networks, optimizer, critic_optimizer),
        batches_per_step=CRITIC_UPDATES + 1,
        predict=_made,
    )


def _made(networks: Any, batch: Any) -> torch.Tensor:
    return networks["generator"](batch[0])


def reconstruction_error(networks: Any, batch: Any) -> torch.Tensor:
    """L1 of the generator: mean absolute errors of both normalised fields, added. This is the loss that records show."""
    predictors, targets = batch
    return (networks["generator"](predictors) - targets).abs().mean((0, 2, 3)).sum()


def _own_step(networks: Any, optimizer: Any, critic_optimizer: Any, tools: StepTools) -> Callable[[], torch.Tensor]:
    """The step: five updates of the critic, one of the generator; returns the generator's L1."""
    import torch

    from caraml.workloads.downscaling_gan.model import CriticLoss, GeneratorLoss

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
    import torch

    from caraml.workloads.downscaling_gan.model import PREDICTORS, TARGETS, Critic, CriticLoss, Generator, GeneratorLoss
    from caraml.workloads.flops import count_flops

    with torch.device("meta"):
        generator, critic = Generator(), Critic()
        predictors, targets = torch.empty(_FLOPS_BATCH, PREDICTORS, *grid), torch.empty(_FLOPS_BATCH, TARGETS, *grid)
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


WORKLOAD = Workload(title="downscaling, WGAN-GP", params=Params, build=build, packages=("h5netcdf", "h5py"), check=check_files)
