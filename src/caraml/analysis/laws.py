"""Amdahl's and Gustafson's laws fitted to rates at several numbers of devices.

With a serial share ``s`` of the work (Amdahl 1967) or of the time (Gustafson 1988), and the rate ``r`` of one device,

    Amdahl:     rate(n) = r / (s + (1 - s) / n)
    Gustafson:  rate(n) = r (s + (1 - s) n)

Fitted to the logarithms of the rates, weighted by their variances. Intervals are parametric bootstrap: rates are drawn anew about the
fitted law with their own errors (Student's t where the error itself was estimated), and the 2.5 % and 97.5 % quantiles over the refitted
laws are the ends. How often such draws deviate from their refitted law by more than the rates do is the probability that the law holds:
with one error for all rates that is the F test, and a chi-squared test where the errors are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraml.analysis.estimate import Estimate

Name = Literal["Amdahl", "Gustafson"]
Array: TypeAlias = NDArray[np.float64]

DRAWS = 1000
SMALLEST_SHARE = 1e-6
"""Serial share below which a fit cannot be told from none."""
_SHARES = np.concatenate([[0.0], np.geomspace(SMALLEST_SHARE, 1.0, 1200)])
"""Serial shares that are tried first; neighbours differ by 1.2 %, which is more than the error of rates that are well known."""
_STEPS = 4
"""From a tried share to the best one: the last step is far below any error."""


@dataclass(frozen=True)
class EfficiencyLimit:
    """Number of devices beyond which the efficiency is below ``efficiency``."""

    efficiency: float
    devices: float | None
    """``None``: the law never falls that low."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval; ``None``: no end, or no errors."""
    extrapolated: bool
    """True where ``devices`` lies outside the sizes that were measured, or there is none."""


@dataclass(frozen=True)
class Law:
    name: Name
    serial: float
    """Serial share, 0 to 1. At 0 the law is at its edge: no serial share, or better than ideal."""
    serial_low: float | None
    serial_high: float | None
    """95 % interval; ``None`` where the rates have no errors, and of two sizes, which any share fits."""
    misfit: float | None
    """Probability of deviations at least as large if the law held (bootstrap); ``None`` for two sizes, which any law fits, and
    without errors."""
    limit: EfficiencyLimit


def fit(name: Name, worlds: Sequence[int], rates: Sequence[Estimate], efficiency: float) -> Law:
    """Fit a law to the rates at two or more numbers of devices, in growing order."""
    n = np.asarray(worlds, dtype=np.float64)
    logs = np.log([rate.value for rate in rates])
    errors = [rate.sd for rate in rates]
    known = [error for error in errors if error is not None]
    sure = len(known) == len(errors) and all(known) and len(n) > 2
    weights = 1 / np.square(known) if sure else np.ones(len(n))
    serial, chi2 = (found[0] for found in _best(name, n, logs[None, :], weights))
    ends = [math.inf, math.inf]
    serial_low = serial_high = misfit = None
    if sure:
        draws = _log_shape(name, np.array([serial]), n) + _noise(known, [rate.dof for rate in rates])
        drawn, deviations = _best(name, n, draws, weights)
        serial_low, serial_high = (float(one) for one in np.quantile(drawn, [0.025, 0.975]))
        misfit = (1 + int((deviations >= chi2).sum())) / (1 + DRAWS)
        crossings = np.sort(_crossing(name, drawn, efficiency, n[0]))
        ends = [crossings[int(share * (DRAWS - 1))] for share in (0.025, 0.975)]
    crossing = _crossing(name, np.array([serial]), efficiency, n[0])
    devices, low, high = (float(one) if math.isfinite(one) else None for one in (*crossing, *ends))
    limit = EfficiencyLimit(efficiency, devices, low, high, bool(devices is None or devices > n[-1]))
    return Law(name, float(serial), serial_low, serial_high, misfit, limit)


def _log_shape(name: Name, serial: Array, n: Array) -> Array:
    """Logarithm of the speed-up, ``[share, size]``."""
    s = serial[:, None]
    return -np.log(s + (1 - s) / n) if name == "Amdahl" else np.log(s + (1 - s) * n)


def _best(name: Name, n: Array, logs: Array, weights: Array) -> tuple[Array, Array]:
    """Serial share and chi-squared of the best fit to each row of ``logs``; the rate of one device is eliminated in closed form."""
    shape = _log_shape(name, _SHARES, n)
    share = weights / weights.sum()
    shape = shape - (shape @ share)[:, None]
    centred = logs - (logs @ share)[:, None]
    # Sum of weighted squares of (centred - shape), expanded so that it is one matrix product for all draws and shares, and added up in
    # place: ten megabytes more for each sum take longer than the sums.
    chi2 = 2 * (centred * weights) @ shape.T
    np.subtract((centred**2 @ weights)[:, None], chi2, out=chi2)
    chi2 += (shape**2 @ weights)[None, :]
    return _refined(name, n, centred, weights, chi2.argmin(axis=1))


def _refined(name: Name, n: Array, centred: Array, weights: Array, index: NDArray[np.intp]) -> tuple[Array, Array]:
    """The best shares between the neighbours of those at ``index``, and their chi-squared: a few Gauss-Newton steps."""
    low, high, serial = _SHARES[np.maximum(index - 1, 0)], _SHARES[np.minimum(index + 1, _SHARES.size - 1)], _SHARES[index]
    share = weights / weights.sum()
    slopes = 1 - 1 / n if name == "Amdahl" else n - 1
    for _ in range(_STEPS):
        shape = _log_shape(name, serial, n)
        slope = -slopes * np.exp(shape if name == "Amdahl" else -shape)
        slope -= (slope @ share)[:, None]
        left = centred - shape + (shape @ share)[:, None]
        serial = np.clip(serial + (left * slope) @ weights / (slope**2 @ weights), low, high)
    shape = _log_shape(name, serial, n)
    return serial, (centred - shape + (shape @ share)[:, None]) ** 2 @ weights


def _crossing(name: Name, serial: Array, efficiency: float, smallest: float) -> Array:
    """Number of devices at which the efficiency falls to ``efficiency``; infinite if it never does."""
    if name == "Amdahl":
        above, below = (serial * smallest + 1 - serial) / efficiency - (1 - serial), serial
    else:
        above, below = serial, efficiency * (serial / smallest + 1 - serial) - (1 - serial)
    return np.divide(above, below, out=np.full_like(serial, math.inf), where=below > 0)


def _noise(errors: Sequence[float], dofs: Sequence[float]) -> Array:
    """Errors of the rates, drawn ``DRAWS`` times: ``[draw, size]``. A finite ``dof`` draws Student's t."""
    rng = np.random.default_rng(12)  # the same data give the same band
    noise = rng.standard_normal((DRAWS, len(errors))) * np.array(errors)
    for size, dof in enumerate(dofs):
        if math.isfinite(dof):
            noise[:, size] /= np.sqrt(rng.chisquare(dof, DRAWS) / dof)
    return noise
