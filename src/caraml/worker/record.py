"""The record of a measured loop: what all ranks measured, taken together, put into metrics, with the phases and the raw tables beside it.

Both a training of ours and somebody's own loop end here, on rank 0.
"""

from __future__ import annotations

import dataclasses
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.engine.control import judge, seen
from caraml.engine.instruments import Instruments, Nodes, on_clock, put_together
from caraml.engine.precision import ARITHMETIC
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepTable
from caraml.metrics.energy import joules, nominal_epoch
from caraml.metrics.model import ONLY_TRAINED, Bandwidth, Epoch, Facts, Measured, Metric, OwnMetric, Peak, Phase, Window, steps_per_epoch
from caraml.metrics.run import epoch_metrics, is_input_bound, run_metrics, whole_run, without_wait
from caraml.metrics.window import at_mean_items, derive, limit_flags
from caraml.power.model import HEADLINES
from caraml.power.store import ROW
from caraml.results.claim import start_time
from caraml.results.journal import STEP_COLUMNS
from caraml.results.record import Fingerprint, Record
from caraml.results.rows import write_table
from caraml.suite.model import Point, Precision
from caraml.system.catalogue import with_given
from caraml.system.detect import detect, environment
from caraml.system.model import System, same_model

FINGERPRINT_STEP = 4
"""Whose loss is the fingerprint: three updates stand in it, and every point has at least as many steps."""

_MOST_NAMED = 20
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


def gathered(
    ranks: Ranks,
    mine: RankSummary,
    instruments: Instruments | None,
    run: tuple[float, float],
    aside: tuple[float, float] | None = None,
    *,
    last: bool = True,
) -> list[RankSummary]:
    """What every rank measured, in rank order, on every rank. Collective.

    Sensors answer for the longest window of any rank, for all epochs if there were such, and for the longest ``run``, which begins on all
    together: a node also waits for the first rank to validate and save. So they do for what is done ``aside`` in it, where anything is.
    They are read no more after the ``last`` time.
    """
    lengths = [end - begin for begin, end in ((mine.begin, mine.end), run, aside or (0.0, 0.0))]
    longest, whole, meanwhile = map(max, zip(*ranks.gather(lengths), strict=True))
    if instruments is not None:
        spans = {"run": (run[0], run[0] + whole)}
        if aside is not None:
            spans["aside"] = (aside[0], aside[0] + meanwhile)
        if mine.epochs:
            spans["epochs"] = (mine.epochs[0].begin, mine.epochs[-1].end)
        mine.node = instruments.summary(mine.begin, mine.begin + longest, spans, busy=True)
        if last:
            instruments.meter.stop()
    return [RankSummary.from_data(data) for data in ranks.gather(mine.to_data())]


def write_readings(
    ranks: Ranks, everyone: list[RankSummary], instruments: Instruments | None, folder: Path, origin: float
) -> dict[str, str]:
    """Write the raw readings of every node's sensors beside the record; the files' names, on every rank. Collective.

    ``folder`` and ``origin``, the record's zero, are rank 0's. The others' readings are shifted so that their windows begin with its.
    Raises ``OSError`` on the rank that cannot write.
    """
    place, zero = ranks.gather([str(folder.absolute()), origin])[0]
    mine, clocks = everyone[ranks.rank], list(dict.fromkeys(rank.clock for rank in everyone))
    number, reading = clocks.index(mine.clock), [index for index, rank in enumerate(everyone) if rank.clock == mine.clock and rank.node]
    name, written, trouble = f"power-{number}" if number else "power", None, None
    if instruments is not None and instruments.meter.channels and reading[:1] == [ranks.rank] and Path(place).is_dir():
        try:
            written = write_table(Path(place), name, ROW, instruments.meter.rows(mine.begin - everyone[0].begin + zero))
        except OSError as error:  # told once the others know: they wait for it
            trouble = error
    files = {Path(file).stem: file for file in ranks.gather(written) if file}
    if trouble is not None:
        raise trouble
    return files


def readings_alone(folder: Path, instruments: Instruments | None, origin: float) -> dict[str, str]:
    """Write the readings of one rank's sensors, as far as they can be: why not, of one that is in haste, is not to be told. The file's
    name."""
    with suppress(Exception):
        if instruments is not None and instruments.meter.channels:
            return {"power": write_table(folder, "power", ROW, instruments.meter.rows(origin))}
    return {}


def make_record(ranks: list[RankSummary], known: Known, *, table: bool = True) -> Record:
    """The whole record of a loop that was measured. Writes the ``table`` of steps into the attempt's folder."""
    own = ranks[0].node
    system, surroundings = with_given(detect(), known.folder), (own.environment if own else environment()) | known.chosen
    known = dataclasses.replace(known, facts=_with_damaged(known.facts, ranks))
    measured, point = together(ranks, known), known.point
    nodes = _nodes(ranks, measured.window)
    datasheet = known.datasheet or _datasheet(system, point.precision, point.devices, [node.device for node in nodes.each])
    metrics = derive(measured, nodes.energy, nodes.idle, datasheet, known.probed, bandwidth=known.bandwidth, cache=known.cache)
    metrics["other_cpu_share"] = nodes.other_cpu
    metrics |= run_metrics(measured, nodes.energy)
    metrics["throughput_without_wait"] = without_wait(metrics["throughput"], metrics["data_wait_share"], point)
    if known.facts.epoch_items is not None:
        metrics |= nominal_epoch(metrics["energy_per_item"], known.facts.epoch_items, point.world)
    metrics |= epoch_metrics(measured, joules(nodes.spans.get("epochs"), *HEADLINES))
    metrics |= whole_run(nodes.spans.get("run"), nodes.spans.get("aside")) | known.quality
    surroundings["affinity"] = [rank.affinity for rank in ranks]
    surroundings["throttled"] = nodes.throttled
    lost = not np.isfinite(measured.losses).all()
    steps = {"steps": write_table(known.folder, "steps", STEP_COLUMNS, _step_rows(ranks, known))} if table else {}
    return Record(
        key=point.key,
        attempt=int(known.folder.name),
        point=point,
        status="invalid" if lost else "ok",
        flags=[*_flags(measured, metrics), *limit_flags(metrics, (known.probed, known.bandwidth, known.cache)), *nodes.flags],
        started_at=known.started_at,
        phases=list(known.phases),
        window=measured.window,
        fingerprint=_fingerprint(ranks),
        facts=known.facts,
        metrics=metrics,
        definitions=known.definitions,
        peak_datasheet=datasheet,
        peak_measured=known.probed,
        bandwidth_measured=known.bandwidth,
        cache_measured=known.cache,
        energy=on_clock(nodes.energy, known.origin),
        idle=on_clock(nodes.idle, known.origin),
        nodes=nodes.each,
        system=system.model_dump(mode="json"),
        environment=surroundings,
        files={**steps, **known.files},
    )


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


def _nodes(ranks: list[RankSummary], window: Window) -> Nodes:
    numbers: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        numbers.setdefault(rank.clock, []).append(number)
    summaries = {key: [node for number in members if (node := ranks[number].node) is not None] for key, members in numbers.items()}
    return put_together(summaries, numbers, window)


def _flags(measured: Measured, metrics: dict[str, Metric]) -> list[str]:
    raised = {
        "nan_loss": not np.isfinite(measured.losses).all(),
        "damaged_input": bool(measured.facts.data.get("damaged_files")),
        "input_bound": is_input_bound(measured.point, metrics),
    }
    return [*measured.flags, *(flag for flag, is_so in raised.items() if is_so)]


def _step_rows(ranks: list[RankSummary], known: Known) -> Iterator[tuple[Any, ...]]:
    per_epoch = steps_per_epoch(known.facts, known.point)
    for number, rank in enumerate(ranks):
        losses: Iterable[float | None] = rank.losses or repeat(None, len(rank.rows))
        places = zip(rank.rows, losses, _places(rank, per_epoch), strict=True)
        for index, (row, loss, (epoch, batch)) in enumerate(places):
            wait = None if known.no_wait else row.data_wait
            yield index, number, row.phase, row.start - known.origin, row.seconds, wait, loss, epoch, batch


def _places(rank: RankSummary, per_epoch: int | None) -> Iterator[tuple[int | None, int | None]]:
    """Epoch and batch of each step; epochs that were asked for may have been cut short, and some left out."""
    if rank.epochs:
        yield from ((row.number, batch) for row in rank.epochs for batch in range(row.steps))
        return
    for index in range(len(rank.rows)):
        yield (None, None) if per_epoch is None else (index // per_epoch + 1, index % per_epoch)


def _with_damaged(facts: Facts, ranks: list[RankSummary]) -> Facts:
    """``facts`` with the damaged input files of all ranks: their number, and the first of them by name with the reason."""
    damaged = {name: why for rank in ranks for name, why in rank.damaged.items()}
    if not damaged:
        return facts
    named: dict[str, Any] = dict(sorted(damaged.items())[:_MOST_NAMED])
    return facts.model_copy(update={"data": {**facts.data, "damaged_files": len(damaged), "damaged": named}})


def _fingerprint(ranks: list[RankSummary]) -> Fingerprint | None:
    """The loss of an early step on every rank; ``None`` in a mode that trains nothing, or in a run that was over before."""
    seen = [rank.losses for rank in ranks if rank.losses]
    if not seen or any(len(own) < FINGERPRINT_STEP for own in seen):
        return None
    return Fingerprint(step=FINGERPRINT_STEP, losses=[float(own[FINGERPRINT_STEP - 1]).hex() for own in seen])


def _datasheet(system: System, precision: Precision, devices: int, nodes: Sequence[str] = ()) -> Peak:
    """The peak of each of the first ``devices`` of a node; ``nodes`` are the identities of all nodes, where there are several."""
    dtype = ARITHMETIC.get(precision)
    if dtype is None:
        return Peak(value=None, dtype=precision, reason="which peak it is depends on the precision, which was not stated")
    models = sorted({device.model for device in system.devices[:devices]})
    if not all(same_model(models[0], model) for model in models):
        return Peak(value=None, dtype=dtype, reason=f"the devices differ: {', '.join(models)}")
    figure = (system.peak or {}).get(dtype)
    if figure is None:
        reason = system.missing.get("peak") or f"the data sheet of {system.devices[0].model} has no {dtype}"
        return Peak(value=None, dtype=dtype, reason=reason)
    found_there = {found: [part.rpartition(" x")[0] for part in found.split(" + ")] for found in nodes if found}
    others = sorted(found for found, there in found_there.items() if not any(same_model(models[0], model) for model in there))
    if others and system.device_class == "gpu":
        return Peak(value=None, dtype=dtype, reason=f"the nodes differ: {models[0]} here, {' and '.join(others)} elsewhere")
    return Peak(value=figure.value, dtype=dtype, source=figure.source)


def process_start() -> float:
    """When this process was started, on the monotonic clock: the interpreter's and torch's start-up are part of a point's life.

    Where the kernel does not tell, now.
    """
    now, ticks = time.monotonic(), start_time(os.getpid())
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")) if ticks else now


class PhaseLog:
    """Records phases. A phase inside another splits it, so that the intervals never overlap and can be added."""

    def __init__(self, origin: float, announce: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.origin, self._announce, self._clock = origin, announce, clock
        self._stack: list[str] = []
        self._since = origin
        self._done: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside belongs to ``name``, also when it fails."""
        if self._stack or self._done:  # the first phase begins with the process
            self._cut()
        self._stack.append(name)
        self._announce(name)
        try:
            yield
        finally:
            self._cut()
            self._stack.pop()

    @property
    def phases(self) -> list[Phase]:
        """Finished intervals, in seconds since the origin; one cut short by a failure included."""
        return list(self._done)

    @property
    def so_far(self) -> list[Phase]:
        """As :attr:`phases`, and the one that has not ended yet until now."""
        now, origin = self._clock(), self.origin
        return [*self._done, *(Phase(name=name, start=self._since - origin, end=now - origin) for name in self._stack[-1:])]

    @property
    def current(self) -> str:
        """Name of the phase that has not ended yet."""
        return self._stack[-1] if self._stack else "none"

    def _cut(self) -> None:
        now = self._clock()
        if self._stack and now > self._since:
            self._done.append(Phase(name=self._stack[-1], start=self._since - self.origin, end=now - self.origin))
        self._since = now
