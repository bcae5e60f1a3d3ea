"""An autoencoder of residual blocks with one bottleneck: the PEARC '22 study's image compression model, on 28 x 28 grey images.

The paper (section 3.4) gives its parts ("residual blocks and one bottleneck", "in essence similar to ResNet50", reconstruction of MNIST)
and no layers, so the layers are our choice, made to follow its words and to be checked at a glance:

* Encoder: a 3 x 3 convolution, then three stages of two residual blocks each, at 28 x 28, 14 x 14 and 7 x 7 pixels with 64, 128 and 256
  channels: ResNet's rule that channels double where the side halves, so that every block costs the same. Blocks are ResNet's basic ones:
  two 3 x 3 convolutions with batch normalisation and a shortcut, which is a 1 x 1 convolution where the shape changes.
* Bottleneck: a 1 x 1 convolution to 4 channels. What is stored of an image is 4 x 7 x 7 = 196 numbers for its 784 pixels. The paper's
  real codec quantises several bottlenecks; this one, as the paper's simplification, has one and quantises nothing.
* Decoder: the encoder's mirror, each stage doubling the side by nearest neighbour; a 3 x 3 convolution and a sigmoid give the pixels.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 28
"""Height and width of an image in pixels."""
BLOCKS = 2
"""Residual blocks per stage, as in ResNet-18."""


class ResidualBlock(nn.Module):
    """He et al. 2015, figure 5 left: ``relu(shortcut(x) + f(x))``, f two 3 x 3 convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class CompressionAutoencoder(nn.Module):
    """Reconstructs a (B, 1, 28, 28) image, levels from 0 to 1, through ``bottleneck`` channels of 7 x 7."""

    def __init__(self, width: int = 64, bottleneck: int = 4) -> None:
        """``width``: channels at 28 x 28; two and four times as many at 14 x 14 and 7 x 7."""
        super().__init__()
        wide, wider = 2 * width, 4 * width
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *_stage(width, width),
            *_stage(width, wide, stride=2),  # (B, 2 width, 14, 14)
            *_stage(wide, wider, stride=2),  # (B, 4 width, 7, 7)
            nn.Conv2d(wider, bottleneck, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(bottleneck, wider, 1),
            *_stage(wider, wider),
            nn.Upsample(scale_factor=2),  # (B, 4 width, 14, 14)
            *_stage(wider, wide),
            nn.Upsample(scale_factor=2),  # (B, 2 width, 28, 28)
            *_stage(wide, width),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """What is stored: (B, bottleneck, 7, 7)."""
        return cast(torch.Tensor, self.encoder(images))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 1, 28, 28) to (B, 1, 28, 28)."""
        return torch.sigmoid(self.decoder(self.encode(images)))


def _stage(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [ResidualBlock(inputs, outputs, stride), *(ResidualBlock(outputs, outputs) for _ in range(BLOCKS - 1))]
