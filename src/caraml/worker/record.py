"""The record of a measured loop: what all ranks measured, taken together, put into metrics, with the phases and the raw tables beside it.

Both a training of ours and somebody's own loop end here, on rank 0.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from caraml.engine.instruments import Instruments, Nodes, on_clock, put_together
from caraml.engine.precision import ARITHMETIC
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary
from caraml.metrics.energy import joules, nominal_epoch
from caraml.metrics.model import Facts, Measured, Metric, Peak, Phase, Window, steps_per_epoch
from caraml.metrics.run import epoch_metrics, is_input_bound, run_metrics, whole_run, without_wait
from caraml.metrics.window import derive, limit_flags
from caraml.power.model import HEADLINES
from caraml.power.store import ROW
from caraml.results.claim import start_time
from caraml.results.journal import STEP_COLUMNS
from caraml.results.record import FLAGS, Fingerprint, Record
from caraml.results.rows import write_table
from caraml.suite.model import Precision
from caraml.system.catalogue import with_given
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.model import System, same_model
from caraml.worker.together import Known, together

FINGERPRINT_STEP = 4
"""Whose loss is the fingerprint: three updates stand in it, and every point has at least as many steps."""

_MOST_NAMED = 20


def stopped(mine: RankSummary, resumed: Iterable[float]) -> list[str]:
    """The flag of a rank whose process was ``resumed`` (SIGCONT) within its window: no other sign tells a stop from one long step. Slurm
    and ``timeout`` send it without a stop, too, before or after what is to end a job: then it comes in a step no longer than most."""
    if not (inside := [at for at in resumed if mine.begin <= at <= mine.end]):
        return []
    columns = mine.window_rows.columns()
    starts, seconds = np.array(columns["starts"]), np.array(columns["seconds"])
    short = seconds <= np.quantile(seconds, 0.9)
    no_stop = (bool((short & (starts < at) & (at < starts + seconds)).any()) for at in inside)
    return [] if all(no_stop) else ["stopped"]


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
    lost, was_stopped = not np.isfinite(measured.losses).all(), "stopped" in measured.flags
    steps = {"steps": write_table(known.folder, "steps", STEP_COLUMNS, _step_rows(ranks, known))} if table else {}
    return Record(
        key=point.key,
        attempt=int(known.folder.name),
        point=point.model_copy(update={"software": _software(point.software, surroundings.get("versions", {}))}),
        status="invalid" if lost or was_stopped else "ok",
        reason=FLAGS["stopped"] if was_stopped else None,
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


def _software(planned: str, versions: Mapping[str, str | None]) -> str:
    """What computed. A job may have another torch than the login node where it was planned, by whose version its key goes."""
    known = {name: f"{name} {versions[name]}" for name in ("caraml", "torch") if versions.get(name)}
    return ", ".join(known.get(word.partition(" ")[0], word) for word in planned.split(", "))


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
