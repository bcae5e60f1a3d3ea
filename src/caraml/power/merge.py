"""One total from the results of many ranks and nodes: nothing counted twice, nothing missing in silence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.base.errors import InputError, in_a_line
from caraml.base.limits import MERGED, MERGED_CHANNELS, RANKS, read_json, too_large
from caraml.power.energy import APPARENT, SUMS, add_up, added, boundary_energy, sum_domains, why_no_va, with_channels
from caraml.power.model import BOUNDARIES, BoundaryEnergy, ChannelEnergy, WindowEnergy

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EQUAL = 1e-6
"""Windows whose lengths differ by no more than this, relatively, are of the same length: what is left is rounding."""
_LARGEST = 1e18
"""No time, energy or power in a result is as large."""


@dataclass(slots=True)
class MergedBoundary:
    """Sum over nodes at one boundary."""

    total_j: float | None = None
    """``None`` if a node that was expected is missing or has no number."""
    partial_j: float | None = None
    """Sum of what is known, where the total is not [J]."""
    bound_j: float | None = None
    """Bounds of the nodes added linearly [J]: sensors of one type err together."""
    net_j: float | None = None
    mean_w: float | None = None
    nodes: dict[str, float | None] = field(default_factory=dict)
    """Energy by node [J]."""


@dataclass(slots=True)
class MergedEnergy:
    """Energy of one named window over all nodes."""

    name: str
    boundaries: dict[str, MergedBoundary] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Parts that were expected and are not there."""
    valid: bool = False
    reason: str | None = None


def over_nodes(windows: Mapping[str, WindowEnergy], *, alike: bool = True) -> WindowEnergy:
    """One window from those of several nodes, each measured by its own clock: the sum, or no number and the node that has none.

    Args:
        windows: of one name, by node; the sum has the times of the first that was not killed.
        alike: the windows stand for the same stretch of work: a node whose window is of another length (idle ones differ by what reading
            the sensors takes) counts with its mean power over the first one's length. If not, with its energy, however long it worked.

    Bounds add linearly: sensors of one type err together. A channel's id has its node's name before it.
    """
    first = next((window for window in windows.values() if window.duration_s > 0), next(iter(windows.values())))
    total = WindowEnergy(first.name, first.start, first.end, interval_s=first.interval_s, start_unix=first.start_unix)
    total.channels = [
        replace(channel, id=f"{node}/{channel.id}", parent=f"{node}/{channel.parent}" if channel.parent else None)
        for node, window in windows.items()
        for channel in window.channels
    ]
    total.flags = sorted({flag for window in windows.values() for flag in window.flags})
    for boundary in BOUNDARIES:
        if any(boundary in window.boundaries for window in windows.values()):
            total.boundaries[boundary] = _add(boundary, windows, first.duration_s if alike else None)
    total.valid = any(found.valid for found in total.boundaries.values())
    if not total.valid:
        reasons = [f"{name}: {found.reason}" for name, found in total.boundaries.items() if found.reason]
        total.reason = "; ".join(reasons or [f"{node}: {window.reason}" for node, window in windows.items() if window.reason]) or None
    return total


def _add(boundary: str, windows: Mapping[str, WindowEnergy], duration: float | None) -> BoundaryEnergy:
    """Sum of one boundary over the nodes, in a window of ``duration`` seconds, or each in its own."""
    found: dict[str, BoundaryEnergy] = {}
    lacking: dict[str, str] = {}
    spanning: set[str] = set()
    readers: dict[str, str] = {}
    for node, window in windows.items():
        members = [channel for channel in window.channels if channel.boundary == boundary]
        own = [channel for channel in members if channel.id not in spanning]
        spanning |= {channel.id for channel in members if channel.spans_nodes}
        part = window.boundaries.get(boundary)
        if part is not None and len(own) < len(members):
            part = boundary_energy(own, window.duration_s) if own else None
        counted = [channel for channel in members if part is not None and channel.id in part.channels and channel.meter]
        if twice := next((channel for channel in counted if readers.setdefault(channel.meter, node) != node), None):
            lacking[node] = f"its meter {twice.id} is that of {readers[twice.meter]}, too, and counts once: each node needs its own"
            continue
        if part is not None:
            found[node] = part if duration is None else _scaled(part, duration / window.duration_s)
        if part is not None and part.energy_j is None:
            lacking[node] = part.reason or "no number"
        elif part is None and not spanning:
            lacking[node] = window.reason or "no sensor of this boundary"
    if spanning:  # one number stands for all nodes, those without a sensor of their own included
        lacking = {node: why for node, why in lacking.items() if node in found}
    parts = list(found.values())
    total = BoundaryEnergy(channels=[f"{node}/{channel}" for node, part in found.items() for channel in part.channels])
    if len(found) == len(windows) or spanning:
        add_up(total, parts, APPARENT)
    total.va_reason = why_no_va({**found, **{node: BoundaryEnergy(va_reason=why) for node, why in lacking.items() if node not in found}})
    if lacking:
        known = (part.partial_j if part.energy_j is None else part.energy_j for part in parts)
        total.partial_j = added(joules for joules in known if joules is not None)
        total.reason = "; ".join(f"{node}: {why}" for node, why in lacking.items())
        return total
    add_up(total, parts, ("energy_j", "mean_w", *SUMS))
    total.accuracy = max((part.accuracy for part in parts if part.accuracy is not None), default=None)
    total.valid = all(part.valid for part in parts)
    total.reason = "; ".join(f"{node}: {part.reason}" for node, part in found.items() if part.reason) or None
    return total


_JOULES = ("energy_j", "bound_j", "idle_j", "net_j", "net_bound_j", "partial_j")


def _scaled(part: BoundaryEnergy, factor: float) -> BoundaryEnergy:
    """The energies over a window ``factor`` times as long, at the same power."""
    if abs(factor - 1) < EQUAL:
        return part
    known = {name: getattr(part, name) for name in _JOULES}
    return replace(part, **{name: value * factor for name, value in known.items() if value is not None})


def of_one_node(windows: Sequence[WindowEnergy]) -> WindowEnergy:
    """One window from those of several processes of a node. A domain that several of them saw counts once, by its longest window."""
    if len(windows) == 1:
        return windows[0]
    best: dict[tuple[str, str], tuple[float, ChannelEnergy]] = {}
    for window in windows:
        for channel in window.channels:
            key, length = (channel.source, channel.id), window.duration_s
            # A number beats none; among numbers the longer window is the whole of which the others saw a part.
            if key not in best or (channel.energy_j is not None, length) > (best[key][1].energy_j is not None, best[key][0]):
                best[key] = (length, channel)
    longest = max(windows, key=lambda window: window.duration_s)
    if not best:
        return longest
    whole = replace(longest, channels=[channel for _, channel in best.values()], reason=None, boundaries={})
    common = {flag for window in windows for flag in set(window.flags).difference(*(channel.flags for channel in window.channels))}
    sum_domains(whole, common - {"no_source"})
    return whole


def displaced(window: WindowEnergy, seconds: float) -> WindowEnergy:
    """A node's window whose edges lie up to ``seconds`` beside those that were meant, both together.

    Its bounds have what the node may have used in that time, at the highest power that was seen.
    """
    if not window.channels or seconds <= 0:
        return window
    wider = [_wider(one, seconds * max(one.peak_w or 0.0, one.mean_w or 0.0)) for one in window.channels]
    for channel in wider:
        if channel.bound_va is not None:
            channel.bound_va += seconds / window.duration_s * max(channel.peak_va or 0.0, channel.mean_va or 0.0)
    return with_channels(window, wider)


def _wider(channel: ChannelEnergy, joules: float) -> ChannelEnergy:
    if channel.bound_j is None:
        return replace(channel)
    net = None if channel.net_bound_j is None else channel.net_bound_j + joules
    parts = {**channel.bound_parts, "edges_apart": joules}
    return replace(channel, bound_j=channel.bound_j + joules, net_bound_j=net, bound_parts=parts)


def merge(parts: Sequence[tuple[str, WindowEnergy]], expected: Iterable[str] | None = None) -> MergedEnergy:
    """Add up what ranks or nodes measured: each one's name and its window, all of the same name. Several of one node are put together, each
    domain once. A name of ``expected`` that is not there makes every total ``None``."""
    if not parts:
        raise InputError("there is nothing to merge")
    names = {window.name for _, window in parts}
    if len(names) > 1:
        raise InputError(f"windows of different names cannot be merged: {', '.join(sorted(names))}")
    merged = MergedEnergy(names.pop())
    merged.missing = sorted(set(expected or ()) - {name for name, _ in parts})
    ranks: dict[str, list[WindowEnergy]] = {}
    for name, window in parts:
        ranks.setdefault(window.node or name, []).append(window)
    nodes = {node: of_one_node(windows) for node, windows in ranks.items()}
    merged.nodes = list(nodes)
    total = over_nodes(nodes, alike=False)
    for boundary, found in total.boundaries.items():
        by_node = {node: window.boundaries[boundary].energy_j if boundary in window.boundaries else None for node, window in nodes.items()}
        one = MergedBoundary(partial_j=found.partial_j, nodes=by_node)
        if merged.missing:
            one.partial_j = found.partial_j if found.energy_j is None else found.energy_j
        else:
            one.total_j, one.bound_j, one.net_j, one.mean_w = found.energy_j, found.bound_j, found.net_j, found.mean_w
        merged.boundaries[boundary] = one
    if merged.missing:
        merged.reason = f"missing: {', '.join(merged.missing)}"
    else:
        merged.valid = total.valid
        merged.reason = None if total.valid else total.reason or "no node has a power sensor"
    return merged


def merge_folder(folder: Path) -> MergedEnergy:
    """Merge the results ``energy*.json`` that the ranks of one run wrote into ``folder``. Raises ``InputError`` where there is none, where
    one is no such result, or where they are more than is read."""
    files = sorted(folder.glob("energy*.json"))
    if not files:
        raise InputError(f"{folder} holds no result (energy*.json)")
    parts, doubts, world, taken, channels = [], [], 0, 0, 0
    for file in files:
        try:
            content = read_json(file)
            if (taken := taken + len(content)) > MERGED:
                raise too_large(file, taken, MERGED, "bytes with the results before it")
            document = json.loads(content, parse_float=_number, parse_constant=_number)
            size = document.get("world_size") or 0
            name, window = _part(document, file.stem)
            own = document.get("reason") or "not valid"  # of a rank without a sensor of its own, too
            if window.duration_s > 0 and not document.get("valid", True) and (window.valid or own != document["energy"].get("reason")):
                doubts.append(f"{name}: {_reader(str).validate_python(own)}")
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{file}: not a result of caraml power: {type(error).__name__}: {in_a_line(error)}") from error
        if not isinstance(size, int) or size > RANKS:
            raise InputError(f"{file}: found the world_size {size!r:.40}, expected a number of at most {RANKS:,}")
        if (channels := channels + len(window.channels)) > MERGED_CHANNELS:
            raise too_large(file, channels, MERGED_CHANNELS, "channels with the results before it")
        parts.append((name, window))
        world = max(world, size)
    expected = [f"rank {r}" for r in range(world)] if world > 1 and all(name.startswith("rank ") for name, _ in parts) else None
    merged = merge(parts, expected)
    if doubts:
        merged.valid, merged.reason = False, "; ".join(([merged.reason] if merged.reason else []) + doubts)
    return merged


def _number(text: str) -> float:
    value = float(text)
    if not abs(value) < _LARGEST:
        raise ValueError(f"found {text:.40}, which nobody measured")
    return value


def _part(document: dict[str, Any], stem: str) -> tuple[str, WindowEnergy]:
    """Who measured a result, and its window, with the reason of a command whose energy is known and not its own. Raises ``ValueError``,
    ``KeyError``, ``TypeError`` or ``AttributeError`` for what is none."""
    rank, energy = document["rank"], document["energy"]
    window = _reader(WindowEnergy).validate_python({**energy, "channels": [], "boundaries": {}})
    if not document.get("valid", True):  # also of what measured it and was killed: that wrote no more than that it began
        window.reason = window.reason or _reader(str).validate_python(document.get("reason") or "not valid")
    window.channels = [_reader(ChannelEnergy).validate_python(channel) for channel in energy.get("channels", [])]
    given = energy.get("boundaries", {})
    window.boundaries = {name: _reader(BoundaryEnergy).validate_python(given[name]) for name in BOUNDARIES if name in given}
    if window.boundaries and not window.duration_s > 0:
        raise ValueError(f"found a window of {window.duration_s:g} s")
    return f"rank {_reader(int).validate_python(rank)}" if rank is not None else stem, window


@cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    """What checks one part of a result: one by one, because all faults of all parts take gigabytes."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
