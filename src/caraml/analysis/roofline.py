"""The roofline of records: what each could reach by arithmetic, memory and cache, and what it reached. For a figure and a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from caraml.metrics.roofline import fed_bandwidth
from caraml.results.record import Record

Limit = Literal["arithmetic", "memory", "cache"]


@dataclass(frozen=True)
class RooflineRow:
    """One record in the plane of intensity and rate; rates are of one device."""

    key: str
    label: str
    intensity: float | None
    """FLOP per byte, estimated."""
    flops_per_s: float | None
    peak_flops_per_s: float | None
    """Fastest kernel measured."""
    bandwidth_bytes_per_s: float | None
    """At which it can be fed at best, from memory and from the last-level cache."""
    limit: Limit | None
    """Which binds at this intensity."""
    attainable_flops_per_s: float | None
    share: float | None
    """Reached over attainable."""
    reason: str | None
    """Why something is missing."""

    @property
    def ridge(self) -> float | None:
        """Intensity from which on arithmetic binds [FLOP/B]."""
        if self.peak_flops_per_s is None or not self.bandwidth_bytes_per_s:
            return None
        return self.peak_flops_per_s / self.bandwidth_bytes_per_s


def roofline(records: Iterable[Record]) -> list[RooflineRow]:
    """A row for every record that was measured, in the order given; what is not known is ``None``, with the reason."""
    return [_row(record) for record in records if record.window is not None]


def _row(record: Record) -> RooflineRow:
    peak = record.peak_measured.value if record.peak_measured is not None else None
    bandwidth, level = None, None
    if record.facts is not None:
        bandwidth, level = fed_bandwidth(record.facts, record.bandwidth_measured, record.cache_measured)
    intensity, share = record.value("arithmetic_intensity"), record.metrics.get("share_of_limit")
    limit: Limit | None = None
    attainable = None
    if intensity is not None and peak is not None and bandwidth is not None:
        attainable = min(peak, bandwidth * intensity)
        limit = level if attainable < peak else "arithmetic"
    return RooflineRow(
        key=record.key,
        label=record.point.label,
        intensity=intensity,
        flops_per_s=record.value("achieved_flops_per_device"),
        peak_flops_per_s=peak,
        bandwidth_bytes_per_s=bandwidth,
        limit=limit,
        attainable_flops_per_s=attainable,
        share=share.value if share is not None else None,
        reason=share.reason if share is not None else _unknown(record),
    )


def _unknown(record: Record) -> str:
    """Why a record says nothing of the roofline."""
    counted = record.facts is not None and record.facts.flops_per_item is not None
    return "measured by a version of CARAML that knew no roofline" if counted else "the operations of a program are not counted"
