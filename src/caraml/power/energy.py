"""From the readings of all channels to the energy of a window: per domain, per boundary, gross and net.

Pure functions: the same readings always give the same numbers, during a run or from a file years later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from caraml.power.counter import counter_energy
from caraml.power.integral import power_energy
from caraml.power.model import BLOCKING, BOUNDARIES, SOME, BoundaryEnergy, ChannelEnergy, WindowEnergy
from caraml.power.readings import ChannelReadings, beyond_limit, moving, one_value, plausible
from caraml.power.source import BUILT_IN
from caraml.power.store import SeriesEstimate, silent

MISMATCH, HIDDEN_MISMATCH = 0.10, 0.45
"""Counter and power integral that differ by more than this, relatively, and by more than ``SURE`` times both bounds, contradict each other;
the second where the power sensor's instants are its own and not ours: of a load that repeats with them it shows the top or the bottom. A
counter of half or twice the energy, as of a GPU with two dies, is told even then."""
SURE = 2.0
"""Bounds hold in 95 % of windows, and a run over many devices must not be in doubt because one of them is outside."""

NO_SOURCE = "no power sensor"
APPARENT = ("mean_va", "bound_va", "peak_va")
"""What is known of apparent power, and adds up."""
SUMS = ("bound_j", "peak_w", "idle_j", "net_j", "net_bound_j")
"""What else adds up, beside the energy."""
ALIKE = 1e-3
"""Two counters of a machine's platform that differ by no more than this, relatively, or than their bounds, steps included, may be one."""
ONLY_APPARENT = "the sensor gives apparent power only, which is not what is used"


def domain_energy(views: list[ChannelReadings], start: float, end: float) -> ChannelEnergy:
    """Energy of one domain from all channels that show it: the counter is the result, power the cross-check."""
    counter = next((m for m in views if m.channel.kind == "energy"), None)
    alone = counter is None or silent(counter.series, start, end) is not None
    views = [m if m is counter else moving(plausible(m, start, end, alone=alone), start, end) for m in views]
    apparent = next((m for m in views if m.channel.kind == "apparent_va"), None)
    views = [m for m in views if m is not apparent]
    powers = sorted((m for m in views if m.channel.kind != "energy"), key=lambda m: m.channel.kind != "power_instant")
    power = powers[0] if powers else None
    main = counter or power
    if main is None:
        assert apparent is not None, "a domain has at least one channel"
        return _with_apparent(_described(apparent, SeriesEstimate(reason=ONLY_APPARENT), start, end), apparent, start, end)
    by_power = power_energy(power.series, power.channel, start, end, power.interval_s, busy=power.busy) if power else None
    instant = power is not None and power.channel.kind == "power_instant"
    beside = power.series if power else None
    by_counter = (
        counter_energy(counter.series, counter.channel, start, end, beside, instant=instant, busy=counter.busy) if counter else None
    )
    chosen, estimate = main, by_counter or by_power
    assert estimate is not None
    if by_counter and by_power and power and by_power.energy_j is not None:
        if by_counter.energy_j is None:
            chosen, estimate = power, by_power
            estimate.flags |= by_counter.flags & {"frozen"}
            estimate.reason = f"power was integrated, because the counter has no answer: {by_counter.reason}"
        elif "too_short" in by_counter.flags and (by_power.bound_j or 0.0) < (by_counter.bound_j or 0.0):
            # Within one step of a counter there is nothing to subtract, but the power at that moment is known.
            chosen, estimate = power, by_power
            estimate.flags |= by_counter.flags
    result = _described(chosen, estimate, start, end)
    if chosen is power:
        still = result.energy_j is not None and not power.frozen and one_value(power, start, end)
        found = {"beyond_limit": beyond_limit(power, start, end), "one_value": still}
        result.flags = sorted({*result.flags, *(flag for flag, is_so in found.items() if is_so)})
    result.missed = sum(m.missed for m in views)
    # An instantaneous reading knows peaks best, a counter over a few updates next, a mean over a second least.
    ranked = (by_power, by_counter) if instant else (by_counter, by_power)
    peak = next((e.peak_w for e in ranked if e and e.peak_w is not None), None)
    # Spans of a counter may end before its busiest moments, and another sensor may show less: no peak is below the mean.
    result.peak_w = peak if peak is None or result.mean_w is None else max(peak, result.mean_w)
    if by_counter and by_power and power and estimate is by_counter:
        slow = power.channel.duty < 1 or power.channel.update_period_s >= power.interval_s / 2
        _crosscheck(result, by_counter, by_power, HIDDEN_MISMATCH if slow and instant else MISMATCH)
    return result if apparent is None else _with_apparent(result, apparent, start, end)


def _with_apparent(result: ChannelEnergy, apparent: ChannelReadings, start: float, end: float) -> ChannelEnergy:
    """The energy with the domain's apparent power, where readings cover the window."""
    seen = power_energy(apparent.series, apparent.channel, start, end, apparent.interval_s, busy=apparent.busy)
    if seen.energy_j is None or "partial_coverage" in seen.flags:
        result.va_reason = f"apparent power: {seen.reason}"
    else:
        assert seen.bound_j is not None, "an integral has its bound"
        result.mean_va, result.bound_va, result.peak_va = seen.energy_j / (end - start), seen.bound_j / (end - start), seen.peak_w
    return result


def _described(measured: ChannelReadings, estimate: SeriesEstimate, start: float, end: float) -> ChannelEnergy:
    """The estimate in the words of the record."""
    channel = measured.channel
    known = estimate.energy_j is not None
    frozen = measured.frozen and "partial_coverage" in estimate.flags
    silent_for = f": {measured.error}" if measured.error and (frozen or not known) else ""
    return ChannelEnergy(
        id=channel.domain,
        label=channel.label,
        source=channel.source,
        boundary=channel.boundary,
        hardware=channel.hardware,
        parent=channel.parent,
        method="counter" if channel.kind == "energy" else "power_integral",
        energy_j=estimate.energy_j,
        bound_j=estimate.bound_j,
        bound_parts=dict(estimate.parts) if known else {},
        accuracy=channel.accuracy,
        mean_w=None if estimate.energy_j is None else estimate.energy_j / (end - start),
        peak_w=estimate.peak_w,
        partial_j=None if known else estimate.partial_j,
        readings=measured.series.count(start, end),
        missed=measured.missed,
        coverage=estimate.coverage,
        users=list(channel.users),
        flags=sorted({*estimate.flags, *channel.flags, *(["frozen"] if frozen else [])}),
        reason=f"{estimate.reason}{silent_for}" if estimate.reason else None,
        spans_nodes=channel.spans_nodes,
        meter=channel.meter,
    )


def _crosscheck(result: ChannelEnergy, by_counter: SeriesEstimate, by_power: SeriesEstimate, share: float) -> None:
    """Compare counter and integral; a contradiction beyond what bounds and instants may do makes the number invalid."""
    if by_counter.energy_j is None or by_power.energy_j is None:
        return
    if by_counter.energy_j:
        result.crosscheck_ratio = by_power.energy_j / by_counter.energy_j
    difference = abs(by_power.energy_j - by_counter.energy_j)
    explained = SURE * ((by_counter.bound_j or 0.0) + (by_power.bound_j or 0.0))
    if "too_short" not in by_power.flags | by_counter.flags and difference > max(share * by_counter.energy_j, explained):
        result.flags = sorted({*result.flags, "counter_power_mismatch"})
        times = "not 0" if result.crosscheck_ratio is None else f"{result.crosscheck_ratio:.2f} times the counter"
        result.reason = f"the integral of power is {times}"


def roots(channels: list[ChannelEnergy]) -> list[ChannelEnergy]:
    """Those whose parent is not among them: their sum counts nothing twice."""
    present = {c.id for c in channels}
    return [c for c in channels if c.parent not in present]


def _one_source_per_hardware(channels: list[ChannelEnergy]) -> list[ChannelEnergy]:
    """Where several sources see the same hardware at the same boundary, keep one.

    The order of preference: has a number, has no blocking flag, is a counter, has the smaller relative bound.
    """
    groups: dict[str, dict[str, list[ChannelEnergy]]] = {}
    for channel in channels:
        groups.setdefault(channel.hardware, {}).setdefault(channel.source, []).append(channel)

    def rank(members: list[ChannelEnergy]) -> tuple[bool, bool, bool, float]:
        energy = sum(c.energy_j or 0.0 for c in members)
        bound = sum(c.bound_j or 0.0 for c in members)
        return (
            any(c.energy_j is None for c in members),
            any(BLOCKING & set(c.flags) for c in members),
            any(c.method != "counter" for c in members),
            bound / energy if energy > 0 else 1e9,
        )

    return [channel for sources in groups.values() for channel in min(sources.values(), key=rank)]


def _too_wide(channels: list[ChannelEnergy]) -> dict[str, str]:
    """Sources that show all accelerators of a node where fewer are measured, by name with the reason why they do not count.

    What can be restricted to some accelerators tells how many those are, unless nobody knows which (``SOME``).
    """
    groups: dict[tuple[str, str], list[ChannelEnergy]] = {}
    for channel in channels:
        if channel.source in BUILT_IN and channel.boundary in ("device", "module"):
            groups.setdefault((channel.hardware, channel.source), []).append(channel)
    used: dict[str, int] = {}
    shown: dict[tuple[str, str], int] = {}
    for (hardware, source), members in groups.items():
        tops = roots(members)
        if BUILT_IN[source].accelerator:
            used[hardware] = max(used.get(hardware, 0), len(tops))
        else:  # a module may have several; where nobody tells how many, it has one
            shown[hardware, source] = max(len(tops), len({user for channel in tops for user in channel.users}))
    wide = {
        source: f"{source} shows all {count} accelerators of the node, of which {used[hardware]} are measured"
        for (hardware, source), count in shown.items()
        if count > used.get(hardware, count)
    }
    for source in {channel.source for channel in channels if SOME in channel.users}:
        wide[source] = f"{source} shows all accelerators of the node, and torch does not tell which are used"
    return wide


def boundary_energy(channels: list[ChannelEnergy], duration: float) -> BoundaryEnergy:
    """Sum over the domains of one boundary that do not contain each other.

    Bounds add linearly: sensors of one type err together. If one domain has no number the sum has none either, and what
    is known goes into ``partial_j``.
    """
    # Nesting is settled within a source: two sources may name the same rail differently.
    chosen = _named_once(roots(_one_source_per_hardware(_told_apart(channels))))
    total = BoundaryEnergy(channels=[c.id for c in chosen])
    add_up(total, chosen, APPARENT)
    total.va_reason = why_no_va({c.id: c for c in chosen})
    known = [c.energy_j for c in chosen if c.energy_j is not None]
    if len(known) < len(chosen):
        parts = [*known, *(c.partial_j for c in chosen if c.partial_j is not None)]
        total.partial_j = sum(parts) if parts else None
        total.reason = "; ".join(f"{c.id}: {c.reason or 'no number'}" for c in chosen if c.energy_j is None)
        return total
    total.energy_j = sum(known)
    total.mean_w = total.energy_j / duration if duration > 0 else None
    add_up(total, chosen, SUMS)
    total.accuracy = max((c.accuracy for c in chosen if c.accuracy is not None), default=None)
    blocking = sorted({f for c in chosen for f in c.flags} & BLOCKING)
    total.valid = not blocking
    total.reason = f"flags: {', '.join(blocking)}" if blocking else None
    return total


def _told_apart(channels: list[ChannelEnergy]) -> list[ChannelEnergy]:
    """The channels; of RAPL's counters of the platform, one that advances like another has no number.

    By design one package of a machine has the counter, which shows the whole platform, and the others have 0 (Linux, powercap: "enumerate
    Psys RAPL domain together with package RAPL domain"). Where several count, equal parts and the whole shown twice look the same.
    """
    found: list[ChannelEnergy] = []
    for channel in channels:
        twin = next((other for other in found if _alike(channel, other)), None)
        why = f"it advances like {twin.id}: the platform shown twice, or equal parts of it" if twin is not None else None
        found.append(channel if why is None else replace(channel, energy_j=None, partial_j=None, reason=why))
    return found


def _alike(first: ChannelEnergy, second: ChannelEnergy) -> bool:
    if {(c.source, c.boundary) for c in (first, second)} != {("rapl", "node_dc")} or not first.energy_j or not second.energy_j:
        return False
    noise = (first.bound_j or 0.0) + (second.bound_j or 0.0)
    return abs(first.energy_j - second.energy_j) <= max(ALIKE * first.energy_j, noise)


def _named_once(channels: list[ChannelEnergy]) -> list[ChannelEnergy]:
    """The channels; one that is the meter of another under a second address has no number. Files under two paths are refused before."""
    named: dict[str, str] = {}
    found = []
    for channel in channels:
        first = named.setdefault(channel.meter, channel.id) if channel.meter and channel.source != "csv" else channel.id
        why = f"its meter is that of {first}: name it once"
        twice = replace(channel, energy_j=None, partial_j=None, mean_va=None, reason=why, va_reason=why)
        found.append(channel if first == channel.id else twice)
    return found


def why_no_va(parts: Mapping[str, ChannelEnergy | BoundaryEnergy]) -> str | None:
    """Which of the parts have no apparent power, and why; ``None`` where none of them has a sensor of it, or all have their number."""
    if all(part.mean_va is None and part.va_reason is None for part in parts.values()):
        return None
    lacking = {name: part.va_reason or "its sensor gives watts only" for name, part in parts.items() if part.mean_va is None}
    return "; ".join(f"{name}: {why}" for name, why in lacking.items()) or None


def added(values: Iterable[float | None]) -> float | None:
    """Sum, or ``None`` if one of the values is not known."""
    found = list(values)
    return sum(v for v in found if v is not None) if found and all(v is not None for v in found) else None


def add_up(total: BoundaryEnergy, parts: Sequence[ChannelEnergy | BoundaryEnergy], names: Iterable[str]) -> None:
    """Write the sums of these fields into ``total``, ``None`` where one of the parts does not know its own."""
    for name in names:
        setattr(total, name, added(getattr(part, name) for part in parts))


def subtract_idle(channel: ChannelEnergy, idle: ChannelEnergy | None, duration: float, idle_duration: float, *, busy: bool = False) -> None:
    """Add idle and net energy to ``channel``; gross energy stays what it is. An invalid baseline is not subtracted. ``busy``: the hardware
    worked all the time, so its power cannot be that at rest; of any other window it can, as of a GPU that a program leaves alone."""
    if idle is None or idle.energy_j is None or idle.mean_w is None or BLOCKING & set(idle.flags):
        return
    powers = [of.mean_w or 0.0 for of in (idle, channel)] + [of.peak_w or 0.0 for of in (idle, channel)]
    if busy and channel.method == idle.method == "power_integral" and math.isclose(min(powers), max(powers)):
        channel.flags = sorted({*channel.flags, "frozen"})
        channel.reason = f"the sensor showed {idle.mean_w:.4g} W at rest and under load, and nothing else"
    channel.idle_w = idle.mean_w
    channel.idle_j = idle.mean_w * duration
    if channel.energy_j is not None:
        channel.net_j = channel.energy_j - channel.idle_j
        if channel.bound_j is not None and idle.bound_j is not None:
            channel.net_bound_j = channel.bound_j + idle.bound_j * duration / idle_duration


def around(before: WindowEnergy, after: WindowEnergy) -> WindowEnergy:
    """One idle baseline from what was measured before the work and after it: the mean power of the two, over the time of the first.

    Idle power drifts while the work warms the machine; half of the difference is added to the bound. A domain that has no valid number
    after the work keeps its first.
    """
    later = {(channel.source, channel.id): channel for channel in after.channels}
    channels = [
        _between(channel, later.get((channel.source, channel.id)), before.duration_s, after.duration_s) for channel in before.channels
    ]
    return with_channels(before, channels)


def with_channels(window: WindowEnergy, channels: list[ChannelEnergy]) -> WindowEnergy:
    """The window with other energies of its domains; flags that hold for the whole of it stay."""
    whole = replace(window, channels=channels, boundaries={}, reason=None if channels else window.reason)
    sum_domains(whole, set(window.flags).difference(*(channel.flags for channel in window.channels)))
    return whole


def _between(before: ChannelEnergy, after: ChannelEnergy | None, duration: float, later: float) -> ChannelEnergy:
    if after is None or after.mean_w is None or before.mean_w is None or BLOCKING & {*before.flags, *after.flags}:
        return before
    drift = abs(after.mean_w - before.mean_w) / 2 * duration
    first, second = before.bound_j or 0.0, (after.bound_j or 0.0) * duration / later
    mean = (before.mean_w + after.mean_w) / 2
    parts = before.bound_parts if first >= second else {name: part * duration / later for name, part in after.bound_parts.items()}
    return replace(before, energy_j=mean * duration, mean_w=mean, bound_j=max(first, second) + drift, bound_parts={**parts, "drift": drift})


def window_energy(
    name: str,
    measured: list[ChannelReadings],
    start: float,
    end: float,
    *,
    idle: WindowEnergy | None = None,
    reasons: list[str] | None = None,
    flags: Iterable[str] = (),
) -> WindowEnergy:
    """All domains and boundaries of one window. Without a channel there is no number, only the reason.

    ``flags`` are those that hold for the whole window: of the clocks, and of sensors that could not be opened.
    """
    window = WindowEnergy(name, start, end, interval_s=max((m.interval_s for m in measured), default=None))
    if end <= start:
        window.reason, window.flags = "the window has no length", ["too_short"]
        return window
    if not measured:
        window.flags = sorted({"no_source", *flags})
        window.reason = f"{NO_SOURCE}: {'; '.join(reasons) if reasons else 'none was asked for'}"
        return window
    domains: dict[tuple[str, str], list[ChannelReadings]] = {}
    for m in measured:
        domains.setdefault((m.channel.source, m.channel.domain), []).append(m)
    window.channels = [domain_energy(views, start, end) for views in domains.values()]
    if idle is not None:
        before = {(c.source, c.id): c for c in idle.channels}
        for channel in window.channels:
            busy = any(m.busy for m in domains[channel.source, channel.id])
            subtract_idle(channel, before.get((channel.source, channel.id)), end - start, idle.duration_s, busy=busy)
    sum_domains(window, set(flags))
    return window


def sum_domains(window: WindowEnergy, common: set[str]) -> None:
    """Boundaries, flags and validity from the window's domains; ``common`` flags hold for the whole of it."""
    wide = _too_wide(window.channels)
    for boundary in BOUNDARIES:
        members = [c for c in window.channels if c.boundary == boundary]
        kept = [c for c in members if boundary != "module" or c.source not in wide]
        if kept:
            window.boundaries[boundary] = boundary_energy(kept, window.duration_s)
        elif members:
            window.boundaries[boundary] = BoundaryEnergy(reason="; ".join(wide.values()))
    window.flags = sorted({f for c in window.channels for f in c.flags} | common)
    blocked = sorted(common & BLOCKING)
    for total in window.boundaries.values():
        if blocked:
            total.valid, total.reason = False, f"flags: {', '.join(blocked)}"
    window.valid = any(total.valid for total in window.boundaries.values())
    if not window.valid:
        window.reason = "; ".join(f"{name}: {total.reason}" for name, total in window.boundaries.items() if total.reason)
