"""When warm-up ends and when a measurement may stop: policy without a device, so that it can be tested by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from caraml.stats import Interval, is_warm, mean_interval
from caraml.suite.model import Measure

LOOK_EVERY = 0.5
"""Seconds between two looks at the series. Each look costs the ranks an agreement, so it must be rare beside the steps."""


@dataclass(frozen=True)
class Verdict:
    """Whether to stop now, and what is known so far."""

    stop: bool
    precise: bool
    interval: Interval | None
    remaining: float
    """Estimated seconds until the end of the window."""


def steps_until_next_look(seconds: Sequence[float], launched: int) -> int:
    """How many steps to launch before looking again: about ``LOOK_EVERY``, and never under a twentieth of what was launched already.

    The second rule keeps the number of looks low: every look at a growing sample is one more chance to stop on a lucky one.
    """
    if not seconds:
        return 1
    recent = sorted(seconds[-20:])
    median = recent[len(recent) // 2]
    by_time = int(LOOK_EVERY / median) if median > 0 else 1000
    return max(1, min(by_time, 1000), launched // 20)


def warm_up_over(seconds: Sequence[float], elapsed: float, policy: Measure) -> bool:
    """True when the series of warm-up steps has settled, or the time for it is over."""
    return elapsed >= policy.warm_up_max_seconds or settled(seconds, policy)


def settled(seconds: Sequence[float], policy: Measure) -> bool:
    """True when MSER's cut lies inside the first half of at least twice ``warm_up_steps`` steps: half to drop, half to judge by."""
    return is_warm(seconds, 2 * policy.warm_up_steps)


def look(seconds: Sequence[float], launched: int, elapsed: float, policy: Measure) -> Verdict:
    """Judge a window by its finished steps: stop when precise and long enough, or when the budget is spent."""
    out_of_steps = policy.max_steps is not None and launched >= policy.max_steps
    spent = elapsed >= policy.max_seconds or out_of_steps
    if len(seconds) < 4:
        return Verdict(spent, False, None, policy.max_seconds - elapsed)
    interval = mean_interval(seconds)
    precise = interval.relative <= policy.target
    enough = elapsed >= policy.min_seconds and launched >= policy.min_steps and len(seconds) >= policy.min_steps
    return Verdict(
        spent or (precise and enough and _confirmed(seconds, policy)), precise, interval, _remaining(interval, launched, elapsed, policy)
    )


def _confirmed(seconds: Sequence[float], policy: Measure) -> bool:
    """True when the first half of the steps promised the same precision for all of them.

    Of many looks at a growing sample one may find its spread too small by luck; that it did so twice, at half the size and now, is rare.
    """
    half = len(seconds) // 2
    return half >= 4 and mean_interval(seconds[:half]).relative <= policy.target * math.sqrt(len(seconds) / half)


def _remaining(interval: Interval, launched: int, elapsed: float, policy: Measure) -> float:
    """The interval shrinks with the square root of the steps, so ``(relative / target)^2`` times as many are needed."""
    growth = (interval.relative / policy.target) ** 2 if math.isfinite(interval.relative) else math.inf
    steps = max(interval.n * growth, policy.min_steps)
    seconds = max(steps * interval.mean, policy.min_seconds)
    if policy.max_steps is not None:
        seconds = min(seconds, policy.max_steps * interval.mean)
    return max(min(seconds, policy.max_seconds) - elapsed, 0.0)
