"""A 1-D convolutional emulator of shortwave radiation in an atmospheric column, with its energy budget closed by physics.

The network of MAELSTROM's third application (deliverable D3.7, section 4.4): 261,515 parameters. B columns of L = 138 half levels from the
top of the atmosphere to the surface; K = 137 layers between them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HALF_LEVELS = 138
LAYERS = HALF_LEVELS - 1
SCALARS = 17
COSINE_OF_ZENITH, IRRADIANCE = 1, -1
"""Places of the two scalars whose product is the incoming solar flux [W/m²]."""
INPUT_SHAPES = {"sca_inputs": (SCALARS,), "col_inputs": (LAYERS, 27), "hl_inputs": (HALF_LEVELS, 2), "inter_inputs": (LAYERS - 1, 1)}
"""Inputs of one column, in the order of the network's arguments; the half-level pressure (138, 1) [Pa] follows them."""

GRAVITY = 9.80665
"""Standard gravity [m/s²]."""
HEAT_CAPACITY = 1004.0
"""Specific heat of dry air at constant pressure [J/(kg K)]."""
SECONDS_PER_DAY = 86400.0

_WIDTH = 64
_KERNEL = 5
_DILATIONS = (1, 2, 4, 8, 16, 1, 1, 1, 1, 1, 1)
_FLUX_CHANNELS = 8
_DENSE = 32


def absorbed_flux(heating: torch.Tensor, pressure: torch.Tensor) -> torch.Tensor:
    """Flux absorbed by a column that heats at the given rates.

    A layer of pressure thickness dp has the mass dp / g per area, so it takes up ``heating * cp * dp / g``.

    Args:
        heating: heating rate of each layer [K/day], (B, K).
        pressure: at half levels, increasing [Pa], (B, L).

    Returns:
        [W/m²], (B,).
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
        """Build the network.

        Args:
            maxima: largest value of each feature of the four inputs; inputs are divided by them, and by 1 where they are 0.
        """
        super().__init__()
        for name, shape, largest in zip(INPUT_SHAPES, INPUT_SHAPES.values(), maxima or (None,) * 4, strict=True):
            scale = torch.ones(shape[-1]) if largest is None else torch.where(largest == 0, torch.ones_like(largest), largest)
            self.register_buffer(f"{name}_scale", scale)
        channels = SCALARS + sum(shape[-1] for shape in list(INPUT_SHAPES.values())[1:])  # 47
        layers: list[nn.Module] = []
        for dilation in _DILATIONS:
            layers += [_same_convolution(channels, _WIDTH, dilation), nn.SiLU()]
            channels = _WIDTH
        self.trunk = nn.Sequential(*layers)
        self.heating = _same_convolution(_WIDTH, 1)
        self.flux_features = _same_convolution(_WIDTH, _FLUX_CHANNELS)
        self.flux = nn.Sequential(
            *(nn.Linear(HALF_LEVELS * _FLUX_CHANNELS + SCALARS, _DENSE), nn.SiLU()),
            *(nn.Linear(_DENSE, _DENSE), nn.SiLU()),
            *(nn.Linear(_DENSE, _DENSE), nn.SiLU()),
            *(nn.Linear(_DENSE, 2), nn.Sigmoid()),
        )

    def forward(
        self, scalars: torch.Tensor, columns: torch.Tensor, half_levels: torch.Tensor, interfaces: torch.Tensor, pressure: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emulate B columns; arguments as in :data:`INPUT_SHAPES`, then the pressure (B, L, 1)."""
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
        scales = (self.get_buffer(f"{name}_scale") for name in INPUT_SHAPES)
        return [value / scale for value, scale in zip(inputs, scales, strict=True)]


def _same_convolution(inputs: int, outputs: int, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, _KERNEL, padding=dilation * (_KERNEL // 2), dilation=dilation)
