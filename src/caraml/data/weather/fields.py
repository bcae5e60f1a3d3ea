"""Look-alike weather: smooth random fields, cheap to make, with scales like the real ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def smooth(rng: np.random.Generator, shape: tuple[int, ...], length: float = 8.0, axes: int = 2) -> Array:
    """Gaussian noise of mean 0 and standard deviation 1, smoothed over its last ``axes`` axes.

    Args:
        rng: where the noise comes from.
        shape: of the result.
        length: correlation length in grid points.
        axes: how many of the last axes are smooth; the others are independent.

    Returns:
        float32, periodic along the smooth axes.
    """
    over = tuple(range(len(shape) - axes, len(shape)))
    spectrum = np.fft.rfftn(rng.standard_normal(shape), axes=over)
    squared = np.zeros(())
    for axis in over:
        frequency = np.fft.rfftfreq(shape[axis]) if axis == over[-1] else np.fft.fftfreq(shape[axis])
        squared = np.add.outer(squared, frequency**2)
    spectrum *= np.exp(-2 * (np.pi * length) ** 2 * squared)
    field = np.fft.irfftn(spectrum, s=[shape[axis] for axis in over], axes=over)
    field -= field.mean(axis=over, keepdims=True)
    return (field / np.maximum(field.std(), 1e-12)).astype(np.float32)
