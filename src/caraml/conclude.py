"""The record of a measured point: all ranks taken together, put into metrics, with the raw tables beside it. Written on rank 0."""

from __future__ import annotations

import dataclasses
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from caraml.engine.loop import Measurement
from caraml.engine.neighbours import CpuTime, share_of_others
from caraml.engine.precision import ARITHMETIC
from caraml.engine.steps import StepTable
from caraml.power import Meter
from caraml.power.model import WindowEnergy
from caraml.power.store import ROW
from caraml.results.epoch_metrics import Epoch, Epochs, epoch_metrics, nominal_epoch
from caraml.results.files import write_table
from caraml.results.metrics import Measured, derive
from caraml.results.record import Bandwidth, Facts, Fingerprint, Metric, Peak, Phase, Record, Window
from caraml.results.run_metrics import Run, is_input_bound, rank_metrics, run_metrics, steps_per_epoch, without_wait
from caraml.suite.model import Point
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.model import DType, System
from caraml.system.throttle import Throttled, shares
from caraml.units import unit_of

THROTTLED_SHARE = 0.01
"""Share of the window for which a GPU was held back above which it is flagged `throttled`."""
FINGERPRINT_STEP = 4
"""Whose loss is the fingerprint: three updates stand in it, and every point has at least as many steps."""
BUSY_SHARE = 0.05
"""Share of the host's CPU time used by others above which a window is flagged `busy_machine`."""


_STEP_COLUMNS = ("step", "rank", "phase", "start", "seconds", "data_wait", "loss", "epoch", "batch")
"""Of the table of steps; ``epoch`` counts from 1, ``batch`` within it from 0, both null where the data has no end."""
_MOST_NAMED = 20


@dataclass(frozen=True)
class Edge:
    """What is noted at an end of the window besides the sensors."""

    cpu: CpuTime | None
    throttled: Throttled


@dataclass(frozen=True)
class Window0:
    """Rank 0's view of the window, all ranks taken together: the slowest rank counts."""

    begin: float
    seconds: float
    step_times: Sequence[float]
    data_wait: float
    losses: list[float]
    first_step_time: float
    skipped_updates: int
    flags: list[str]

    @classmethod
    def of(cls, ranks: list[Measurement]) -> Window0:
        """Take the measurements of all ranks together."""
        windows = [rank.window_rows for rank in ranks]
        losses = np.array([rank.losses for rank in ranks if rank.losses])  # a pipeline's last stage alone sees the loss
        return cls(
            begin=ranks[0].begin,
            seconds=max(rank.end - rank.begin for rank in ranks),
            step_times=_slowest(windows),
            data_wait=max(sum(rows.data_waits) for rows in windows),
            losses=losses.mean(axis=0).tolist() if losses.size else [],
            first_step_time=max(rank.first_step_time for rank in ranks),
            skipped_updates=max(rank.skipped_updates for rank in ranks),
            flags=sorted({flag for rank in ranks for flag in rank.flags}),
        )


@dataclass(frozen=True)
class Seen:
    """What rank 0's worker knows when its window has closed. Times are this host's monotonic clock."""

    folder: Path
    point: Point
    facts: Facts
    origin: float
    started_at: str
    runtime: float
    phases: list[Phase]
    edges: list[Edge]
    meter: Meter | None
    probed: Peak
    bandwidth: Bandwidth
    own_device: bool
    """Whether the workload brought a device of known peak, which then stands for the data sheet."""
    peak_memory: list[int | None]
    """Of each rank's device [B]."""
    host_memory: list[int]
    """Highest resident set of each rank [B]."""
    affinity: list[dict[str, Any]]
    """What `caraml.system.affinity.bind` did on each rank."""
    validation_loss: float | None
    afterwards_failed: str | None
    """Why validating or saving failed, if it did."""

    @property
    def items_per_step(self) -> int:
        """Items of an optimizer step over all ranks."""
        return self.point.global_batch * self.facts.items_per_sample


class Conclusion:
    """Turns the measurements of all ranks into a record."""

    def __init__(self, seen: Seen, measurements: list[Measurement]) -> None:
        self._seen, self._ranks, self._view = seen, measurements, Window0.of(measurements)

    def record(self, energy: WindowEnergy | None, idle: WindowEnergy | None) -> Record:
        """The whole record; ``energy`` is the window's, ``idle`` the baseline's. Writes the raw tables into the attempt's folder."""
        seen, window0, point = self._seen, self._view, self._seen.point
        system, surroundings = detect(), environment()
        window, measured = self._measured()
        datasheet = seen.probed if seen.own_device else _datasheet(system, ARITHMETIC[point.precision])
        metrics = derive(measured, energy, idle, datasheet, seen.probed, bandwidth=seen.bandwidth)
        metrics["other_cpu_share"] = self._others(window0.seconds, system)
        metrics |= run_metrics(self._run(window), energy)
        metrics |= rank_metrics([float(np.mean(rank.window_rows.seconds)) for rank in self._ranks])
        metrics["throughput_without_wait"] = without_wait(metrics["throughput"], metrics["data_wait_share"].value, point.mode == "train")
        metrics |= self._epochs(window, metrics)
        surroundings["affinity"] = seen.affinity
        surroundings["throttled"] = shares(seen.edges[0].throttled, seen.edges[1].throttled, window0.seconds)
        return Record(
            key=point.key,
            attempt=int(seen.folder.name),
            point=point,
            status="ok" if not window0.losses or np.isfinite(window0.losses).all() else "invalid",
            flags=self._flags(metrics, surroundings["throttled"]),
            started_at=seen.started_at,
            phases=seen.phases,
            window=window,
            fingerprint=_fingerprint(self._ranks),
            facts=seen.facts,
            metrics=metrics,
            peak_datasheet=datasheet,
            peak_measured=seen.probed,
            bandwidth_measured=seen.bandwidth,
            energy=self._on_our_clock(energy),
            idle=self._on_our_clock(idle),
            system=system.model_dump(mode="json"),
            environment=surroundings,
            files=self._raw_files(),
        )

    def _run(self, window: Window) -> Run:
        seen, measurements = self._seen, self._ranks
        loss, trained = seen.validation_loss, seen.point.mode == "train"
        if loss is not None and not np.isfinite(loss):
            loss, why = None, "it was NaN or infinite"
        else:
            why = "the workload has no held-out data" if trained else "only mode train validates and saves"
        return Run(
            runtime=seen.runtime,
            phases=seen.phases,
            step_times=_slowest([rank.rows for rank in measurements]),
            window_step=window.seconds / window.steps,
            data_wait=max(sum(rank.rows.data_waits) for rank in measurements),
            global_batch=seen.point.global_batch,
            facts=seen.facts,
            validation_loss=loss,
            no_validation=seen.afterwards_failed or why,
            host_memory=max(seen.host_memory),
        )

    def _epochs(self, window: Window, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """What is known of epochs: of those that were trained, and of the nominal one that energies are scaled to."""
        seen, policy = self._seen, self._seen.point.measure
        found: dict[str, Metric] = {}
        if seen.facts.epoch_items is not None and "energy_per_item" in metrics:
            found |= nominal_epoch(metrics["energy_per_item"], seen.facts.epoch_items, seen.point.world)
        if policy.counted_epoch is None:
            return found
        rate = unit_of("throughput", seen.facts.item)
        reached = "target_missed" not in self._view.flags
        epochs = Epochs(self._epoch_rows(), policy.counted_epoch, seen.items_per_step, policy.to_target, reached)
        of_epochs = epoch_metrics(epochs, window.seconds, metrics["energy"])
        return found | {name: metric.model_copy(update={"unit": metric.unit or rate}) for name, metric in of_epochs.items()}

    def _epoch_rows(self) -> list[Epoch]:
        """The epochs, each time that of the slowest rank."""
        times = _slowest([rank.rows for rank in self._ranks])
        rows, start = [], 0
        for together in zip(*(rank.epochs for rank in self._ranks), strict=True):
            whole, training = max(row.end - row.begin for row in together), max(row.trained - row.begin for row in together)
            one = together[0]
            batches = list(times[start : start + one.steps])
            rows.append(Epoch(one.number, whole, training, batches, not one.cut, one.loss, one.accuracy))
            start += one.steps
        return rows

    def _measured(self) -> tuple[Window, Measured]:
        seen, window0, mine = self._seen, self._view, self._ranks[0]
        steps = len(window0.step_times)
        trained = steps - window0.skipped_updates
        begin = window0.begin - seen.origin
        window = Window(
            start=begin,
            end=begin + window0.seconds,
            steps=steps,
            samples=trained * seen.point.global_batch,
            items=trained * seen.items_per_step,
            first_step=next(index for index, row in enumerate(mine.rows) if row.phase == "measure"),
        )
        known = [peak for peak in seen.peak_memory if peak is not None]
        measured = Measured(
            window=window,
            step_times=window0.step_times,
            data_wait=window0.data_wait,
            world=seen.point.world,
            facts=seen.facts,
            first_step_time=window0.first_step_time,
            time_to_first_step=mine.first_step_end - seen.origin,
            peak_memory=max(known) if known else None,
            losses=window0.losses,
        )
        return window, measured

    def _others(self, seconds: float, system: System) -> Metric:
        begin, end = (edge.cpu for edge in self._seen.edges)
        share = share_of_others(begin, end, seconds, system.cpu.threads or os.cpu_count() or 1)
        return Metric(value=share, unit="1", reason=None if share is not None else "the kernel does not tell (no /proc/stat)")

    def _flags(self, metrics: dict[str, Metric], held_back: Throttled) -> list[str]:
        window0 = self._view
        flags = list(window0.flags)
        if window0.losses and not np.isfinite(window0.losses).all():
            flags.append("nan_loss")
        if self._seen.facts.data.get("damaged_files"):
            flags.append("damaged_input")
        if is_input_bound(self._seen.point, metrics):
            flags.append("input_bound")
        others = metrics["other_cpu_share"].value
        if others is not None and others > BUSY_SHARE:
            flags.append("busy_machine")
        if any(share > THROTTLED_SHARE for reasons in held_back.values() for share in reasons.values()):
            flags.append("throttled")
        return flags

    def _on_our_clock(self, energy: WindowEnergy | None) -> WindowEnergy | None:
        """The same energy with its edges in the record's seconds."""
        if energy is None:
            return None
        return dataclasses.replace(energy, start=energy.start - self._seen.origin, end=energy.end - self._seen.origin)

    def _raw_files(self) -> dict[str, str]:
        folder, origin, meter = self._seen.folder, self._seen.origin, self._seen.meter
        files = {"steps": write_table(folder, "steps", _STEP_COLUMNS, self._step_rows())}
        if meter is not None and meter.channels:
            files["power"] = write_table(folder, "power", ROW, meter.rows(origin))
        return files

    def _step_rows(self) -> Iterator[tuple[Any, ...]]:
        origin = self._seen.origin
        per_epoch = steps_per_epoch(self._seen.facts, self._seen.point.global_batch)
        for rank, measurement in enumerate(self._ranks):
            losses: Iterable[float | None] = measurement.losses or repeat(None, len(measurement.rows))
            for index, (row, loss) in enumerate(zip(measurement.rows, losses, strict=True)):
                epoch, batch = (None, None) if per_epoch is None else (index // per_epoch + 1, index % per_epoch)
                yield index, rank, row.phase, row.start - origin, row.seconds, row.data_wait, loss, epoch, batch


def _slowest(ranks: list[StepTable]) -> Sequence[float]:
    """Of every step, the time of the rank that took longest [s]."""
    slowest = np.maximum.reduce([np.frombuffer(rows.seconds) for rows in ranks])
    return array("d", slowest.tobytes())


def with_damaged(facts: Facts, damaged: dict[str, str]) -> Facts:
    """``facts`` with the damaged input files of all ranks: their number, and the first of them by name with the reason."""
    if not damaged:
        return facts
    named: dict[str, Any] = dict(sorted(damaged.items())[:_MOST_NAMED])
    return facts.model_copy(update={"data": {**facts.data, "damaged_files": len(damaged), "damaged": named}})


def _fingerprint(measurements: list[Measurement]) -> Fingerprint | None:
    """The loss of an early step on every rank; ``None`` in a mode that trains nothing, or in a run that was over before."""
    seen = [measurement.losses for measurement in measurements if measurement.losses]
    if not seen or any(len(own) < FINGERPRINT_STEP for own in seen):
        return None
    losses = [float(own[FINGERPRINT_STEP - 1]).hex() for own in seen]
    return Fingerprint(step=FINGERPRINT_STEP, losses=losses)


def _datasheet(system: System, dtype: DType) -> Peak:
    figure = (system.peak or {}).get(dtype)
    if figure is None:
        reason = system.missing.get("peak") or f"the data sheet of {system.devices[0].model} has no {dtype}"
        return Peak(value=None, dtype=dtype, reason=reason)
    return Peak(value=figure.value, dtype=dtype, source=figure.source)
