"""When warm-up ends and when a measurement may stop: policy without a device, so that it can be tested by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.fft
import scipy.special  # noqa: F401 -- here, and not when an open window is looked at for the first time: both take up to half a second

from caraml.base.stats import Blocks, Interval, Series, blocks, corrected, warm_up_length
from caraml.suite.model import Policy

FEWEST_EFFECTIVE = 30
"""Independent steps that a window must be worth before its interval is believed: of fewer, a lucky spread looks like precision. Steps that
all lie within the target need no luck."""
CONSTANTS = 20
"""Time constants that a window must hold for its interval to cover changes so slow."""
SLACK = 1.1
"""How much wider than asked the interval of the slowest rank may be before it is flagged: rank 0 decides by its own steps when to stop."""
NEGLIGIBLE = 0.1
"""Share of the target below which a drift does not matter, however sure it is."""
LOOK_EVERY = 0.5
"""Seconds between two looks at the series. Each look costs the ranks an agreement, so it must be rare beside the steps."""


@dataclass(frozen=True)
class Verdict:
    """Whether to stop now, and what is known so far."""

    stop: bool
    precise: bool
    """The interval is as narrow as asked, and so it was at half the steps."""
    interval: Interval | None
    remaining: float
    """Estimated seconds until the end of the window."""


def steps_until_next_look(seconds: Series, launched: int) -> int:
    """How many steps to launch before looking again: about ``LOOK_EVERY``, no more than were launched already, and never under a twentieth
    of those.

    Few steps may be short that others are not like: from a queue that was full at first, or on a machine that others load since. The last
    rule keeps the number of looks low: every look at a growing sample is one more chance to stop on a lucky one.
    """
    if not len(seconds):
        return 1
    mean = float(np.mean(seconds[-20:]))
    by_time = int(LOOK_EVERY / mean) if mean > 0 else 1000
    return max(1, min(by_time, launched or 1000, 1000), launched // 20)


def warm_up_over(seconds: Series, elapsed: float, policy: Policy, at_least: float = 0.0) -> bool:
    """True when the series of warm-up steps has settled after ``at_least`` so many seconds, or the time for it is over."""
    return elapsed >= policy.warm_up_max_seconds or (elapsed >= at_least and settled(seconds, policy))


def settled(seconds: Series, policy: Policy) -> bool:
    """True when MSER's cut lies inside the first half of at least twice ``warm_up_steps`` steps, and the rest moves within the target.

    Such movements do not hold a warm-up up: they are judged together with the window.
    """
    if len(seconds) < 2 * policy.warm_up_steps:
        return False
    cut = warm_up_length(seconds)
    return cut < len(seconds) // 2 and abs(blocks(seconds[cut:]).drift) <= policy.target


def look(
    warm_up: Series, seconds: Series, launched: int, elapsed: float, policy: Policy, *, at_least: float = 0.0, paces: int = 1
) -> Verdict:
    """Judge a window by its finished steps: stop when precise, steady and long enough, or when the budget is spent.

    ``at_least`` is what the device asks of a window [s], beside the policy; ``paces`` as in :func:`judge`.
    """
    shortest = min(max(policy.min_seconds, at_least), policy.max_seconds)
    out_of_steps = policy.max_steps is not None and launched >= policy.max_steps
    spent = elapsed >= policy.max_seconds or out_of_steps
    if len(seconds) < 4:
        return Verdict(spent, False, None, policy.max_seconds - elapsed)
    run = blocks(seconds, warm_up)
    interval = run.interval(corrected(paces))
    precise = _precise(interval, run, policy.target, paces)
    enough = elapsed >= shortest and launched >= policy.min_steps and len(seconds) >= policy.min_steps
    stop = spent or (precise and enough and is_steady(run, policy))
    return Verdict(stop, precise, interval, _remaining(interval, shortest, elapsed, policy))


def judge(warm_up: Series, seconds: Series, policy: Policy, paces: int = 1) -> list[str]:
    """Flags of a window that has closed, by its warm-up and all its steps; of several ranks, by the slowest of each step, or of so many
    that each have a pace of their own, by the slowest of them."""
    if len(seconds) < 4:
        return ["imprecise"]
    run = blocks(seconds, warm_up)
    fine = {"imprecise": _precise(run.interval(corrected(paces)), run, SLACK * policy.target, paces), "not_steady": is_steady(run, policy)}
    return [flag for flag, is_so in fine.items() if not is_so]


def is_steady(run: Blocks, policy: Policy) -> bool:
    """False when the window still moves.

    That is when it drifts, together with the steps before it that look steady, or with as many of these as it has itself; or when a part
    of it is better dropped as warm-up, and the 99 % interval of the rest does not hold the mean of all. Either must matter: more than
    ``NEGLIGIBLE`` of the target.
    """
    part = run.steady
    rest = part.settled
    if rest is not None:
        found = rest.interval(0.99)
        if abs(found.mean - run.mean) > max(found.half_width, NEGLIGIBLE * policy.target * run.mean):
            return False
    return max(abs(part.drift), abs(part.recent.drift)) <= NEGLIGIBLE * policy.target


def seen(seconds: Series) -> tuple[float, float]:
    """Shortest and longest time constant [s] of changes that the interval of these steps speaks of.

    What is faster is over within a step, and what is slower happens too seldom in the window.
    """
    total = float(np.sum(seconds))
    return total / len(seconds), total / CONSTANTS


def _precise(interval: Interval, run: Blocks, target: float, paces: int) -> bool:
    """True when the interval is as narrow as asked, rests on enough steps or on steps alike, and the first half of them promised as much.

    Of many looks at a growing sample one may find its spread too small by luck; that it did so twice, at half the size and now, is rare.
    """
    within = run.highest - run.lowest <= target * run.mean
    if interval.relative > target or run.n < 8 or (interval.effective_n < FEWEST_EFFECTIVE and not within):
        return False
    half = run.first_half
    return half.interval(corrected(paces)).relative <= target * math.sqrt(run.n / half.n)


def _remaining(interval: Interval, shortest: float, elapsed: float, policy: Policy) -> float:
    """The interval shrinks with the square root of the steps, so ``(relative / target)^2`` times as many are needed."""
    growth = (interval.relative / policy.target) ** 2 if math.isfinite(interval.relative) else math.inf
    scarce = FEWEST_EFFECTIVE * interval.n / interval.effective_n if interval.effective_n else math.inf
    steps = max(interval.n * growth, scarce, policy.min_steps)
    seconds = max(steps * interval.mean, shortest)
    if policy.max_steps is not None:
        seconds = min(seconds, policy.max_steps * interval.mean)
    return max(min(seconds, policy.max_seconds) - elapsed, 0.0)
