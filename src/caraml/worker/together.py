"""All ranks as one: what each measured of a loop, taken together to what is measured of the point."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.engine.control import judge, seen
from caraml.engine.steps import RankSummary, StepTable
from caraml.metrics.model import ONLY_TRAINED, Bandwidth, Epoch, Facts, Measured, Metric, OwnMetric, Peak, Phase, Window
from caraml.metrics.window import at_mean_items
from caraml.suite.model import Point

CLOSE = 0.01
"""Share of the time that the bounds of what input cost may lie apart."""


@dataclass
class Known:
    """What rank 0 knows besides what every rank measured. Times are this host's monotonic clock."""

    folder: Path
    point: Point
    facts: Facts
    origin: float
    """Zero of the record's times."""
    started_at: str
    probed: Peak
    bandwidth: Bandwidth | None = None
    cache: Bandwidth | None = None
    datasheet: Peak | None = None
    """Of a device that the workload brought itself; else the system's description has it."""
    runtime: float = 0.0
    phases: Sequence[Phase] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Raw tables that are there already, by kind."""
    validation_loss: float | None = None
    quality: dict[str, Metric] = field(default_factory=dict)
    """The workload's own metrics of the trained model."""
    definitions: dict[str, OwnMetric] = field(default_factory=dict)
    """Of those that CARAML does not define."""
    afterwards_failed: str | None = None
    """Why validating or saving failed, if it did."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """What was chosen for this point by measurement, and why."""
    no_wait: str = ""
    """Why the steps do not say what they lost to their input, if they do not."""
    meetings: int = 1
    """How often ranks that train wait for each other in a step, each time after they have waited for a batch."""

    def lack(self, reason: str) -> None:
        """What was to be validated or saved after the window, and is not known by now, never will be."""
        self.afterwards_failed = reason = self.afterwards_failed or reason
        unknown = {name: one.model_copy(update={"reason": reason}) for name, one in self.quality.items() if one.value is None}
        self.quality = {**self.quality, **unknown}


def together(ranks: list[RankSummary], known: Known) -> Measured:
    """All ranks as one: the slowest counts in every time. Raises ``InputError`` where nothing was trained in the window."""
    mine, seconds = ranks[0], max(rank.end - rank.begin for rank in ranks)
    inside = [rank.window_rows for rank in ranks]
    first, steps = next(index for index, row in enumerate(mine.rows) if row.phase == "measure"), len(inside[0])
    samples, items = _trained(ranks, known, first, steps)
    begin = mine.begin - known.origin
    losses = np.array([rank.losses for rank in ranks if rank.losses])  # a pipeline's last stage alone sees the loss
    memory = [rank.device_memory for rank in ranks if rank.device_memory is not None]
    loss, trains = known.validation_loss, known.point.mode == "train"
    why = "the workload has no held-out data" if trains else ONLY_TRAINED
    if loss is not None and not np.isfinite(loss):
        loss, why = None, "it was NaN or infinite"
    waited, why_not = _lost(inside, known)
    whole_waited, whole_why_not = _lost([rank.rows for rank in ranks], known, whole=True)
    times = _slowest(ranks, in_step=known.point.in_step)
    shortest, longest = seen(times[first : first + steps])
    each = [sum(items) for items in zip(*(rank.items for rank in ranks), strict=True)]
    even = at_mean_items(times, each, slice(first, first + steps)) if len(set(each)) > 1 else []
    judged = judge((even or times)[1:first], (even or times)[first : first + steps], known.point.measure, known.point.paces)
    return Measured(
        point=known.point,
        facts=known.facts,
        window=Window(
            start=begin,
            end=begin + seconds,
            steps=steps,
            samples=samples,
            items=items,
            first_step=first,
            shortest_seen=shortest,
            longest_seen=longest,
            opened_within=_apart(ranks, [rank.begin for rank in ranks], [rank.waits[0] for rank in ranks]),
            closed_within=_apart(ranks, [rank.end for rank in ranks], [rank.waits[1] for rank in ranks]),
        ),
        steps=times,
        data_wait=waited,
        first_step_time=max(rank.first_step_time for rank in ranks),
        time_to_first_step=mine.first_step_end - known.origin,
        device_memory=max(memory, default=None),
        host_memory=max((rank.host_memory for rank in ranks if rank.host_memory is not None), default=None),
        losses=losses.mean(axis=0).tolist() if losses.size else [],
        rank_steps=[float(np.mean(rows.seconds)) for rows in inside],
        runtime=known.runtime,
        phases=known.phases,
        whole_data_wait=whole_waited,
        no_wait=why_not or whole_why_not,
        validation_loss=loss,
        no_validation=known.afterwards_failed or why,
        epochs=list(_epochs(ranks, times)),
        epochs_seconds=max((rank.epochs[-1].end - rank.epochs[0].begin for rank in ranks if rank.epochs), default=None),
        flags=sorted({*judged, *(flag for rank in ranks for flag in rank.flags)}),
        even_steps=even,
    )


def _trained(ranks: list[RankSummary], known: Known, first: int, steps: int) -> tuple[int, int]:
    """Samples and items of the window's ``steps``, but for those whose updates were skipped. Raises ``InputError`` where all were."""
    trained = steps - max(rank.skipped_updates for rank in ranks)
    if not trained:
        raise InputError(
            f"nothing was trained in the window: the gradients of all {count(steps, 'step')} overflowed in {known.point.arithmetic}",
            "precision = 'bf16', a lower learning rate, or a longer warm-up (measure.warm_up_steps)",
        )
    if ranks[0].items:
        told = sum(sum(rank.items[first : first + steps]) for rank in ranks)
        return told, told
    samples = trained * known.point.global_batch
    return samples, samples * known.facts.items_per_sample


def _apart(ranks: list[RankSummary], times: list[float], waits: list[float | None]) -> float | None:
    """How far the ranks' times lie apart [s]. Clocks of different nodes do not compare: there it is what the longest wait allows."""
    if len({rank.clock for rank in ranks}) == 1:
        return max(times) - min(times)
    return None if None in waits else max(wait for wait in waits if wait is not None)


def _slowest(ranks: list[RankSummary], *, in_step: bool) -> Sequence[float]:
    """Of every step, the time of the rank that took longest [s]. Of ranks that are not ``in_step`` these would add up to more than any of
    them took: there it is the rank whose window was longest."""
    if not in_step:
        return max(ranks, key=lambda rank: rank.end - rank.begin).rows.seconds
    slowest = np.maximum.reduce([np.frombuffer(rank.rows.seconds) for rank in ranks])
    return array("d", slowest.tobytes())


def _lost(ranks: list[StepTable], known: Known, *, whole: bool = False) -> tuple[float | None, str]:
    """Seconds that these steps, the ``whole`` run's or the window's, lost to their input, or why that is not known.

    Ranks that meet in every step wait for the input of each other: a step loses as much as the rank that lost most in it, and less where
    that rank has less work than others. Of ranks that meet several times in a step, losses at different times add up. Stages of a pipeline
    begin a step one after the other: a later one may have lost what it would have waited for anyway. Of ranks that do not meet, it is by
    how much sooner the last one would have ended.
    """
    if known.no_wait:
        return None, known.no_wait
    seconds = [sum(rows.seconds) for rows in ranks]
    if not known.point.in_step:
        return max(seconds) - max(took - sum(rows.data_waits) for took, rows in zip(seconds, ranks, strict=True)), ""
    waits = np.stack([np.frombuffer(rows.data_waits) for rows in ranks])
    least = most = float(waits.max(axis=0).sum())
    at_once = float(waits[:, : int(whole)].max(axis=0).sum())  # in the first step of all, while every loader begins
    why = ""
    if known.point.placement.pp > 1:
        least, why = at_once, "the stages of a pipeline begin a step one after the other"
    elif known.meetings > 1:
        most, why = (
            min(at_once + float(waits[:, int(whole) :].sum()), max(seconds)),
            "the ranks wait for each other several times in a step",
        )
    if most - least <= CLOSE * max(seconds):
        return most, ""
    return None, f"{why}: input cost {100 * least / max(seconds):.2g} to {100 * most / max(seconds):.2g} % of the time"


def _epochs(ranks: list[RankSummary], times: Sequence[float]) -> Iterator[Epoch]:
    start = 0
    for rows in zip(*(rank.epochs for rank in ranks), strict=True):
        training = max(row.trained - row.begin for row in rows)
        whole = max(row.trained - row.begin + row.end - row.resumed for row in rows)
        one = rows[0]
        yield Epoch(one.number, whole, training, list(times[start : start + one.steps]), not one.cut, one.loss, one.accuracy)
        start += one.steps
