"""Generator and critic of a Wasserstein GAN that adds detail to coarse temperature fields.

The networks of MAELSTROM's fifth application (deliverable D3.7, section 4.8): together 9,332,299 parameters and 5,280 running
statistics. The generator is a U-Net after Sha et al., Journal of Applied Meteorology and Climatology 59 (2020), with subpixel upsampling.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

PREDICTORS = 15
TARGETS = 2
"""Temperature at 2 m and surface height."""
PENALTY_WEIGHT = 10.0
RECONSTRUCTION_WEIGHT = 1000.0
_WIDTH = 56
_CRITIC_WIDTH = 64


class Generator(nn.Module):
    """Predictors (B, 15, H, W) to temperature and surface height (B, 2, H, W); H and W multiples of 8."""

    def __init__(self) -> None:
        super().__init__()
        w1, w2, w3, w4 = (_WIDTH * factor for factor in (1, 2, 4, 8))
        self.encoder1 = nn.Sequential(_block(PREDICTORS, w1), _block(w1, w1))
        self.encoder2, self.encoder3, self.bridge = _block(w1, w2), _block(w2, w3), _block(w3, w4)
        self.upsample = nn.ModuleList(_subpixel(high, low) for high, low in ((w4, w3), (w3, w2), (w2, w1)))
        self.decoder = nn.ModuleList(nn.Sequential(_block(2 * width, width), _block(width, width)) for width in (w3, w2, w1))
        self.heads = nn.ModuleList(nn.Conv2d(w1, 1, 1) for _ in range(TARGETS))

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
    (B, 1, 1, 1) is drawn from a normal distribution.

    Args:
        critic: fields (B, 1, H, W) to scores (B, 1).
        fake: made fields; no gradient goes into them.
        real: true fields.
        mix: the fields at which the slope is taken are ``real + mix * (fake - real)``.
    """
    between = (real + mix * (fake - real)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.float().square().mean((1, 2, 3)).sqrt() - 1).square().mean()
