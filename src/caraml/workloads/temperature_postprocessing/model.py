"""A U-Net that turns forecast fields into quantiles of the temperature error.

The network of MAELSTROM's first application (deliverable D3.7, section 4.2): 1,314,019 parameters and 6,016 running statistics. All
convolutions but those after an upsampling see one pixel; only these and the pooling mix neighbours.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

PREDICTORS = 17
QUANTILES = (0.1, 0.5, 0.9)
LEVELS = 6
_WIDTH = 16


class TemperatureUNet(nn.Module):
    """Fields (B, 17, H, W) to quantiles (B, 3, H, W); H and W multiples of 32."""

    def __init__(self) -> None:
        super().__init__()
        widths = [_WIDTH * 2**level for level in range(LEVELS)]  # 16 ... 512
        self.encoder = nn.ModuleList(_pair(before, width) for before, width in zip([PREDICTORS, *widths], widths, strict=False))
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
    """Quantile score, the mean over quantiles and points of ``q * max(e, 0) + (1 - q) * max(-e, 0)``, e = truth - predicted.

    Koenker and Bassett, Econometrica 46 (1978). Its expectation is least where ``predicted`` is the quantile.

    Args:
        predicted: (B, Q, H, W).
        truth: (B, 1, H, W), in the same unit.
        quantiles: Q levels.
    """
    error = truth - predicted
    levels = _levels(quantiles, error)
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def _levels(quantiles: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """(1, Q, 1, 1), filled on the device: a copy from the host would synchronise every step."""
    return torch.cat([torch.full((1, 1, 1, 1), level, device=like.device, dtype=like.dtype) for level in quantiles], 1)
