"""What limits a training: input, communication, arithmetic or the rest by their shares of its time, and the roofline that bounds the
arithmetic.

Four shares of the window's time, from what records hold:

* ``input``: the time that was spent waiting for batches, of an accelerator without what it then waited for launches; or, where the same
  work also ran with its batches on the device already (mode ``compute``), the share by which that is faster: all that waiting costs.
* ``communication``: by how much the rate per device is below that of the same work per device on one device. It holds everything that
  is slower on many devices, imbalance included.
* ``compute``: MFU against the fastest kernel measured on the device (else against the data sheet): the time that the arithmetic alone
  would take at that rate.
* ``memory and overhead``: what is left: memory traffic, launches, kernels that do not multiply matrices. Records do not hold bytes moved;
  where the same work also ran with a larger batch, the rate there says which it is: overhead fades with a larger batch, traffic does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from caraml.analysis.grouping import axes_of, counting, same_work, unstated_size, without
from caraml.base.format import count
from caraml.metrics.window import fed_bandwidth
from caraml.results.record import Record

Part = Literal["input", "communication", "compute", "memory and overhead"]

CLOSE = 0.05
"""Shares of the time that are closer than this are not told apart."""
BEYOND = 1.1
"""MFU above which the peak, or the FLOPs that were counted, are wrong: by less than that a short measurement of the peak may be off."""
GROWING = 0.1
"""Gain in rate by the next larger batch from which overhead is said to be the rest."""

SHARED_OUT = ("throughput_per_device", "data_wait_share", "mfu_measured", "mfu")
"""Metrics that the shares of the time come from."""


@dataclass(frozen=True)
class Share:
    """A part of the window's time."""

    part: Part
    share: float | None
    """0 to 1; ``None`` if it cannot be told."""
    because: str
    """The number that says so, or why there is none."""


@dataclass(frozen=True)
class Diagnosis:
    """What limits a run."""

    by: Part | None
    """The largest share; ``None`` if two shares are too close to tell, or too little is known."""
    shares: tuple[Share, ...]
    sentence: str

    @property
    def word(self) -> str:
        """What limits it, or why there is no such part, in a few words."""
        return self.by or ("not known" if _is_unknown(self.shares) else "nothing that stands out")


class Partners:
    """The records among which a run finds its counterparts: the same work in another mode, or on one device."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._modes: dict[object, dict[str, float]] = {}
        self._single: dict[object, tuple[int, float]] = {}
        self._batches: dict[object, dict[int, float]] = {}
        for repeats in map(counting, same_work(records)):
            rates = [rate for one in repeats if (rate := one.value("throughput_per_device") or 0.0) > 0]
            if not rates:
                continue
            record, rate = repeats[0], fmean(rates)
            self._modes.setdefault(_but(record, "mode"), {})[record.point.mode] = rate
            if unstated_size(record):
                continue
            batches = self._batches.setdefault(_but(record, "global_batch", "micro_batch"), {})
            batches[record.point.global_batch] = max(rate, batches.get(record.point.global_batch, 0.0))
            key, world = _per_device(record), record.point.world
            if key not in self._single or world < self._single[key][0]:
                self._single[key] = (world, rate)

    def in_mode(self, record: Record, mode: str) -> float | None:
        """Rate per device of the same work in another mode."""
        return self._modes.get(_but(record, "mode"), {}).get(mode)

    def larger_batch(self, record: Record) -> tuple[int, float] | None:
        """The next larger batch of the same work, and its rate per device."""
        batches = self._batches.get(_but(record, "global_batch", "micro_batch"), {})
        larger = () if unstated_size(record) else (batch for batch in batches if batch > record.point.global_batch)
        batch = min(larger, default=None)
        return None if batch is None else (batch, batches[batch])

    def smallest(self, record: Record) -> tuple[int, float] | None:
        """Devices and rate per device of the same work per device on the fewest devices."""
        return self._single.get(_per_device(record))


def bottleneck(record: Record, partners: Partners) -> Diagnosis:
    """Where the time of a record's window goes."""
    shares = [_input(record, partners), _communication(record, partners), _compute(record)]
    shares.append(_rest(record, partners, shares))
    return Diagnosis(_largest(shares), tuple(shares), _sentence(_largest(shares), shares))


def _but(record: Record, *names: str) -> object:
    return without(axes_of(record), names)


def _per_device(record: Record) -> object:
    key = _but(record, "nodes", "devices", "global_batch")
    return key, record.point.global_batch / record.point.world


def _input(record: Record, partners: Partners) -> Share:
    rate, wait = record.value("throughput_per_device"), record.value("data_wait_share")
    if record.point.mode == "compute":
        return Share("input", 0.0, "mode compute: the batches are on the device already")
    without_input = partners.in_mode(record, "compute")
    if rate and without_input:
        share = max(1 - rate / without_input, 0.0)
        return Share("input", share, f"without input (mode compute) the rate changes by {without_input / rate - 1:+.1%}")
    if wait is None:
        return Share("input", None, "what the wait for batches cost is not known")
    gpu = record.point.device_class == "gpu"
    least = "at least " if gpu and record.point.world == 1 else ""
    why = "; mode compute also tells what it then waited for launches" if gpu else ""
    return Share("input", wait, f"the run waited for batches in {least}{wait:.1%} of the window{why}")


def _communication(record: Record, partners: Partners) -> Share:
    if "devices" in record.unstated:
        return Share("communication", None, "the number of devices is not stated")
    if record.point.world == 1:
        return Share("communication", 0.0, "one device")
    smallest, rate = partners.smallest(record), record.value("throughput_per_device")
    if smallest is None or not rate or smallest[0] == record.point.world:
        return Share("communication", None, "the same batch per device was not run on fewer devices")
    world, single = smallest
    share = max(1 - rate / single, 0.0)
    return Share("communication", share, f"rate per device is {rate / single:.1%} of that on {count(world, 'device')}")


def _compute(record: Record) -> Share:
    beyond = None
    for name, what in (("mfu_measured", "of the fastest kernel measured on this device"), ("mfu", "of the data sheet's peak")):
        value = record.value(name)
        if value is not None and value <= BEYOND:
            return Share(
                "compute", min(value, 1.0), f"MFU {value:.1%} {what}" + (f", as {beyond} is more than all of it" if beyond else "")
            )
        beyond = beyond or (None if value is None else f"MFU {value:.1%} {what}")
    if beyond is not None:
        return Share("compute", None, f"{beyond}: the peak, or the FLOPs that are counted per item, are wrong")
    metric = record.metrics.get("mfu_measured") or record.metrics.get("mfu")
    return Share("compute", None, (metric.reason if metric else None) or "arithmetic was not counted")


def _rest(record: Record, partners: Partners, shares: Sequence[Share]) -> Share:
    if shares[2].share is None:
        return Share("memory and overhead", None, "what is left after arithmetic is not known")
    left = max(1 - sum(share.share for share in shares if share.share is not None), 0.0)
    larger, rate = partners.larger_batch(record), record.value("throughput_per_device")
    text = f"{left:.0%} of the time is left"
    roof = record.metrics.get("share_of_limit")
    if roof is not None and roof.value is not None and roof.scope:
        needs = "less of it than arithmetic" if roof.scope == "arithmetic" else f"{roof.value:.0%} of it"
        text += f" (by the roofline memory traffic needs {needs})"
    if larger is not None and rate:
        gain = larger[1] / rate - 1
        what = "overhead, which a larger batch spreads" if gain > GROWING else "traffic or slow kernels, which no batch cures"
        text += f", and with batch {larger[0]} the rate changes by {gain:+.0%}: {what}"
    return Share("memory and overhead", left, text)


def _is_unknown(shares: Sequence[Share]) -> bool:
    return any(share.share is None for share in shares if share.part != "communication")


def _largest(shares: Sequence[Share]) -> Part | None:
    if _is_unknown(shares):
        known = [share for share in shares if share.share is not None and share.share > 0.5]
        return known[0].part if known else None
    ranked = sorted((share for share in shares if share.share is not None), key=lambda share: -(share.share or 0.0))
    first, second = ranked[0].share or 0.0, ranked[1].share or 0.0
    return ranked[0].part if first - second >= CLOSE else None


def _sentence(by: Part | None, shares: Sequence[Share]) -> str:
    told = "; ".join(share.because for share in shares if share.share is None or share.share > 0)
    advice = {
        "input": "input is the limit: more loader processes, faster storage, or less decoding",
        "communication": "communication is the limit: larger batch per device, or faster links",
        "compute": "arithmetic is the limit: only lower precision or faster devices help",
        "memory and overhead": "neither arithmetic nor input nor communication is the limit: memory traffic, launches or slow kernels",
        None: "what limits it is not known" if _is_unknown(shares) else "no single limit stands out",
    }[by]
    return f"{advice} ({told})"


@dataclass(frozen=True)
class RooflineRow:
    """One record in the plane of intensity and rate; rates are of one device."""

    intensity: float | None
    """FLOP per byte, estimated."""
    flops_per_s: float | None
    peak_flops_per_s: float | None
    """Fastest kernel measured."""
    bandwidth_bytes_per_s: float | None
    """At which it can be fed at best, from memory and from the last-level cache."""
    limit: str | None
    """Which binds at this intensity."""
    attainable_flops_per_s: float | None
    share: float | None
    """Reached over attainable."""
    reason: str | None
    """Why something is missing."""


def roofline(records: Iterable[Record]) -> list[RooflineRow]:
    """A row for every record that was measured, in the order given; what is not known is ``None``, with the reason."""
    return [_row(record) for record in records if record.window is not None]


def _row(record: Record) -> RooflineRow:
    peak = record.peak_measured.value if record.peak_measured is not None else None
    bandwidth, level = None, None
    if record.facts is not None:
        bandwidth, level = fed_bandwidth(record.facts, record.bandwidth_measured, record.cache_measured)
    intensity, share = record.value("arithmetic_intensity"), record.metrics.get("share_of_limit")
    limit: str | None = None
    attainable = None
    if intensity and peak and bandwidth:
        attainable = min(peak, bandwidth * intensity)
        limit = level if attainable < peak else "arithmetic"
    return RooflineRow(
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
