"""One total from the results of many ranks and nodes: nothing counted twice, nothing missing in silence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caraml.errors import InputError
from caraml.power.clock import ClockOffset, drift, offset_at
from caraml.power.energy import boundary_energy
from caraml.power.model import BOUNDARIES, BoundaryEnergy, ChannelEnergy, WindowEnergy, window_from_dict


@dataclass(slots=True)
class Part:
    """What one rank, or one node, measured."""

    name: str
    """Rank or host, for messages."""
    window: WindowEnergy
    offsets: list[ClockOffset] = field(default_factory=list)
    """Offset of the reference node's clock against this one's, measured at start and end; empty on the reference, and
    where another rank of the node measured it."""
    reference: str | None = None
    """The reference node's host and boot id, if this rank knows it."""


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
    skew_s: float | None = None
    """Largest difference between the nodes' starts of the window, on one clock [s]; ``None`` if offsets are unknown."""
    skew_half_width_s: float | None = None
    drift_s: float | None = None
    """The most that the clock of a node moved against the reference's during the command [s]."""
    clock_reason: str | None = None
    """Why ``skew_s`` is not known."""
    flags: list[str] = field(default_factory=list)
    """``clock_drift``: a clock moved faster than clocks should, so ``skew_s`` may be wrong by up to ``drift_s``. No energy
    depends on it, since every node measures by its own clock."""


def merge(parts: Sequence[Part], expected: Iterable[str] | None = None) -> MergedEnergy:
    """Add up the windows of one name.

    Args:
        parts: results of ranks or nodes; several of one node are put together, each domain once.
        expected: names of the parts that must be there; those that are not make every total ``None``.
    """
    if not parts:
        raise InputError("there is nothing to merge")
    names = {p.window.name for p in parts}
    if len(names) > 1:
        raise InputError(f"windows of different names cannot be merged: {', '.join(sorted(names))}")
    merged = MergedEnergy(names.pop())
    merged.missing = sorted(set(expected or ()) - {p.name for p in parts})
    nodes: dict[str, list[Part]] = {}
    for part in parts:
        nodes.setdefault(part.window.node or part.name, []).append(part)
    merged.nodes = list(nodes)
    totals = {node: _node_boundaries(members) for node, members in nodes.items()}
    for boundary in BOUNDARIES:
        if any(boundary in found for found in totals.values()):
            merged.boundaries[boundary] = _add(boundary, totals, complete=not merged.missing)
    _judge(merged, totals)
    _skew(merged, parts)
    return merged


def _node_boundaries(members: list[Part]) -> dict[str, BoundaryEnergy]:
    """Boundaries of one node from all its ranks. A domain that several ranks saw counts once, by its longest window."""
    best: dict[tuple[str, str], tuple[float, ChannelEnergy]] = {}
    for part in members:
        for channel in part.window.channels:
            key, length = (channel.source, channel.id), part.window.duration_s
            # A number beats none; among numbers the longer window is the whole of which the others saw a part.
            if key not in best or (channel.energy_j is not None, length) > (best[key][1].energy_j is not None, best[key][0]):
                best[key] = (length, channel)
    duration = max(p.window.duration_s for p in members)
    channels = [channel for _, channel in best.values()]
    present = {c.boundary for c in channels}
    return {b: boundary_energy([c for c in channels if c.boundary == b], duration) for b in BOUNDARIES if b in present}


def _add(boundary: str, totals: dict[str, dict[str, BoundaryEnergy]], *, complete: bool) -> MergedBoundary:
    """Sum of one boundary over the nodes."""
    found = [(node, boundaries.get(boundary)) for node, boundaries in totals.items()]
    result = MergedBoundary(nodes={node: b.energy_j if b else None for node, b in found})
    known = [b for _, b in found if b is not None and b.energy_j is not None]
    total = sum(b.energy_j or 0.0 for b in known)
    if not complete or len(known) < len(found):
        rest = sum(b.partial_j or 0.0 for _, b in found if b is not None and b.energy_j is None)
        result.partial_j = total + rest if known or rest else None
        return result
    result.total_j = total
    result.bound_j = sum(b.bound_j or 0.0 for b in known)
    result.mean_w = sum(b.mean_w or 0.0 for b in known)
    if all(b.net_j is not None for b in known):
        result.net_j = sum(b.net_j or 0.0 for b in known)
    return result


def _judge(merged: MergedEnergy, totals: dict[str, dict[str, BoundaryEnergy]]) -> None:
    """Valid if nothing is missing and at least one boundary is valid on every node."""
    if merged.missing:
        merged.reason = f"missing: {', '.join(merged.missing)}"
        return
    good = [b for b in merged.boundaries if all(b in found and found[b].valid for found in totals.values())]
    merged.valid = bool(good)
    if not good:
        reasons = [f"{node} {b}: {e.reason}" for node, found in totals.items() for b, e in found.items() if e.reason]
        merged.reason = "; ".join(reasons) or "no node has a power sensor"


def _skew(merged: MergedEnergy, parts: Sequence[Part]) -> None:
    """Compare the starts of the window on the reference node's clock."""
    if len(merged.nodes) < 2:
        return
    offsets = {node: [o for p in parts if (p.window.node or p.name) == node for o in p.offsets] for node in merged.nodes}
    references = {p.reference for p in parts if p.reference is not None}
    unmeasured = {node for node, found in offsets.items() if not found}
    if len(references) > 1:
        merged.clock_reason = f"clocks were compared with different nodes: {', '.join(sorted(references))}"
        return
    if len(unmeasured - references) > (0 if references else 1):
        merged.clock_reason = f"clock not compared: {', '.join(sorted(unmeasured - references))}"
        return
    starts, widths = [], [0.0]
    for part in parts:
        found = offsets[part.window.node or part.name]
        offset = offset_at(found, part.window.start) if found else None
        starts.append(part.window.start + (offset.offset_s if offset else 0.0))
        widths.append(offset.half_width_s if offset else 0.0)
    merged.skew_s, merged.skew_half_width_s = max(starts) - min(starts), 2 * max(widths)
    drifts = [drift(found) for found in offsets.values() if len(found) > 1]
    merged.drift_s = max((moved for moved, _ in drifts), key=abs, default=None)
    merged.flags = ["clock_drift"] if any(beyond for _, beyond in drifts) else []


def merge_folder(folder: Path) -> MergedEnergy:
    """Merge the results ``energy*.json`` that the ranks of one run wrote into ``folder``."""
    files = sorted(folder.glob("energy*.json"))
    if not files:
        raise InputError(f"{folder} holds no result (energy*.json)")
    parts, size = [], 0
    for file in files:
        try:
            document = json.loads(file.read_bytes())
            size = max(size, document.get("world_size") or 0)
            parts.append(_part(document, file.stem))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{file}: not a result of caraml power: {type(error).__name__}: {error}") from error
    expected = [f"rank {r}" for r in range(size)] if size > 1 and all(p.name.startswith("rank ") for p in parts) else None
    return merge(parts, expected)


def _part(document: dict[str, Any], stem: str) -> Part:
    name = f"rank {document['rank']}" if document["rank"] is not None else stem
    clock = document.get("clock") or {}
    offsets = [ClockOffset(**clock[phase]) for phase in ("start", "end") if clock.get(phase)]
    return Part(name, window_from_dict(document["energy"]), offsets, clock.get("reference"))
