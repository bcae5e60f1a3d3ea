"""The MAELSTROM networks have exactly the published sizes, and their parts obey known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from caraml.workloads.weather.atmorep import PRESETS, AtmoRep, ensemble_loss
from caraml.workloads.weather.downscaling_gan import Critic, Generator, gradient_penalty
from caraml.workloads.weather.ensemble_postprocessing import EnsembleUNet, corrected, gaussian_crps
from caraml.workloads.weather.radiation_emulation import GRAVITY, HEAT_CAPACITY, RadiationColumn, absorbed_flux
from caraml.workloads.weather.regime_clustering import MemoryBank, RegimeNetwork, cluster_loss, spherical_k_means
from caraml.workloads.weather.temperature_postprocessing import TemperatureUNet, pinball_loss
from caraml.workloads.weather.tweet_rain_classification import TweetClassifier


def counted(*models: torch.nn.Module) -> tuple[int, int]:
    """Trainable values, and running statistics of normalisation."""
    statistics = ("running_mean", "running_var")
    values = sum(parameter.numel() for model in models for parameter in model.parameters())
    return values, sum(buffer.numel() for model in models for name, buffer in model.named_buffers() if name.endswith(statistics))


@pytest.mark.slow
def test_published_sizes() -> None:
    with torch.device("meta"):
        assert counted(TemperatureUNet()) == (1_314_019, 6_016)
        assert counted(TweetClassifier()) == (141_896_450, 0)
        assert counted(RadiationColumn()) == (261_515, 0)
        assert counted(EnsembleUNet())[0] == 633_698
        assert counted(Generator(), Critic()) == (9_332_299, 5_280)
        assert counted(RegimeNetwork()) == (28_060_224, 57_216)
        assert counted(AtmoRep(PRESETS["384M"]))[0] == 383_556_480


def test_published_shapes() -> None:
    with torch.device("meta"):
        assert TemperatureUNet()(torch.empty(2, 17, 256, 256)).shape == (2, 3, 256, 256)
        assert EnsembleUNet()(torch.empty(1, 14, 361, 720)).shape == (1, 2, 361, 720)
        assert Generator()(torch.empty(2, 15, 96, 120)).shape == (2, 2, 96, 120)
        assert Critic().convolutions(torch.empty(2, 1, 96, 120)).shape == (2, 512, 6, 8)


def test_pinball_is_least_at_the_quantile() -> None:
    truth = torch.randn(1, 1, 300, 300, generator=torch.Generator().manual_seed(0))
    quantiles = truth.flatten().quantile(torch.tensor([0.1, 0.5, 0.9])).view(1, 3, 1, 1).expand(1, 3, 300, 300)
    best = pinball_loss(quantiles, truth).item()
    # For a normal distribution the least pinball loss at level q is its density at the q-quantile.
    density = [math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) for z in (-1.2816, 0.0, 1.2816)]
    assert best == pytest.approx(sum(density) / 3, rel=0.01)
    assert pinball_loss(quantiles + 0.1, truth) > best < pinball_loss(quantiles - 0.1, truth)
    assert pinball_loss(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0), (0.9,)).item() == pytest.approx(1.8)


def test_crps_is_the_integral_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(-60, 60, 400_001)
    for mean, std, truth in rng.uniform([-2, 0.3, -3], [2, 3, 3], (5, 3)):
        cdf = 0.5 * (1 + torch.erf(torch.from_numpy((x - mean) / std / math.sqrt(2))).numpy())
        integral = np.trapezoid((cdf - (x >= truth)) ** 2, x)
        closed = gaussian_crps(*(torch.tensor([value]) for value in (mean, std, truth))).item()
        assert closed == pytest.approx(integral, abs=2e-4)


def test_an_output_of_zeros_is_the_raw_ensemble() -> None:
    mean, spread = torch.full((2, 5, 6), 54000.0), torch.full((2, 5, 6), 90.0)
    new_mean, new_spread = corrected(torch.zeros(2, 2, 5, 6), mean, spread)
    assert torch.equal(new_mean, mean) and torch.equal(new_spread, spread)


def test_absorbed_flux_warms_a_column_by_its_heat_capacity() -> None:
    pressure = torch.linspace(0, 1e5, 138)[None]
    one_kelvin_a_day = absorbed_flux(torch.ones(1, 137), pressure).item()
    assert one_kelvin_a_day == pytest.approx(1e5 / GRAVITY * HEAT_CAPACITY / 86400, rel=1e-5)  # 118.5 W/m²


def test_radiation_fluxes_close_the_energy_budget() -> None:
    torch.manual_seed(0)
    scalars = torch.rand(3, 17)
    scalars[:, -1] = 1361
    pressure = torch.linspace(0, 1e5, 138).view(1, 138, 1).expand(3, -1, -1)
    model = RadiationColumn()
    heating, fluxes = model(scalars, torch.rand(3, 137, 27), torch.rand(3, 138, 2), torch.rand(3, 136, 1), pressure)
    top, down, up = fluxes.unbind(1)
    assert torch.allclose(top, down - up + absorbed_flux(heating[..., 0], pressure[..., 0]), rtol=1e-5)
    assert (down <= scalars[:, 1] * 1361).all() and (down >= 0).all()


def test_gradient_penalty_of_a_linear_critic_is_known() -> None:
    fake, real = torch.randn(4, 1, 6, 8), torch.randn(4, 1, 6, 8)
    weight = torch.full((1, 1, 6, 8), 3.0, requires_grad=True)
    penalty = gradient_penalty(lambda x: (x * weight).sum((1, 2, 3))[:, None], fake, real, torch.randn(4, 1, 1, 1))  # type: ignore[arg-type]
    assert penalty.item() == pytest.approx((3 - 1) ** 2)
    penalty.backward()
    assert weight.grad is not None
    assert weight.grad.sum().item() == pytest.approx(2 * (3 - 1), rel=1e-4), "the penalty's own gradient, d/dw (w - 1)^2"


def test_spherical_k_means_finds_known_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(3, 16, generator=generator), dim=1)
    truth = torch.arange(90) % 3
    features = F.normalize(centres[truth] + 0.05 * torch.randn(90, 16, generator=generator), dim=1)
    centroids, clusters = spherical_k_means(features, features[:3])
    assert torch.equal(clusters, truth)
    assert (centroids * centres).sum(1).min() > 0.99 and torch.allclose(centroids.norm(dim=1), torch.ones(3))


def test_the_bank_labels_samples_by_position() -> None:
    bank = MemoryBank(per_epoch=4, samples=6, crops=2, heads=[2, 2], width=3, device=torch.device("cpu"))
    east, north = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 1, 0])
    features = torch.stack([east, north, east, north])
    bank.write(0, torch.tensor([5, 0, 3, 1]), (features, features))
    bank.cluster(seed=0)
    for labels in bank.labels:
        assert labels[5] == labels[3] != labels[0] == labels[1]
        assert labels[[2, 4]].tolist() == [-1, -1]
    # A sample that nobody has seen has no cluster and adds nothing to the loss.
    scores = [torch.zeros(2, 2)] * 2
    assert cluster_loss(scores, bank.labels[:, [2, 5]]).item() == pytest.approx(math.log(2))
    assert cluster_loss(scores, bank.labels[:, [2, 4]]).item() == 0.0, "and a batch of such samples is no end of the training"


def test_the_ensemble_loss_of_known_members() -> None:
    """Members 1 and 3 around a truth of 2: mean 2, deviation sqrt(2), so the truth is exactly covered."""
    members = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    assert ensemble_loss(members, torch.full((1, 1, 1), 2.0)).item() == pytest.approx(1 + 0 + 2**0.25)
    off = ensemble_loss(members, torch.full((1, 1, 1), 4.0)).item()
    assert off == pytest.approx((9 + 1) / 2 + (math.exp(-0.5 * (2 / math.sqrt(2)) ** 2) - 1) ** 2 + 2**0.25)
