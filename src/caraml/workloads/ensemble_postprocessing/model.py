"""A U-Net that corrects an ensemble forecast: mean and spread of a Gaussian at every grid point.

The network of MAELSTROM's fourth application (deliverable D3.7, section 4.7; ENS-10, arXiv 2206.14786): 633,698 parameters.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = 14
"""Seven variables, each with ensemble mean and ensemble standard deviation."""
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
    """Mean and standard deviation of the corrected forecast; an output of zeros leaves the ensemble as it is.

    Args:
        output: of the network, (B, 2, H, W).
        mean: of the ensemble, (B, H, W), in the variable's unit.
        spread: standard deviation of the ensemble, (B, H, W), in the same unit.
    """
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
