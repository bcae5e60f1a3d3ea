"""What a command's run amounts to: its numbers, read from what it printed and wrote, and the record around them."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from caraml.base.errors import InputError
from caraml.base.limits import COUNT, LARGEST, OUTPUT, SECONDS, is_measurable, limited, read_bytes
from caraml.base.processes import node_key
from caraml.engine.instruments import Instruments, Nodes, on_clock, put_together
from caraml.metrics.energy import energies, powers
from caraml.metrics.model import Facts, Metric, Phase, Window, own_definitions, unit_of
from caraml.metrics.run import whole_run
from caraml.power.meter import Meter
from caraml.power.model import BoundaryEnergy, WindowEnergy
from caraml.power.store import ROW
from caraml.results.claim import STARTED
from caraml.results.finish import LOG, death
from caraml.results.record import Record, Status
from caraml.results.rows import write_table
from caraml.results.status import ProgressLine
from caraml.suite.model import Point
from caraml.workloads.command import MetricSpec, Params, Take, filled

SHORT_WINDOW = 0.1
"""Seconds below which the delay in seeing the marks matters."""
_LONGEST = 60
_STEPPED = 0.05
"""Seconds by which the clock and the uptime may differ over a run: the uptime is told in hundredths."""

_BLANK: Record = cast(Any, Record).model_construct(key="", attempt=0, status="ok", started_at="")
"""What all records of commands are copies of."""

_TAKES: dict[Take, Callable[[Sequence[float]], float]] = {
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
    "mean": statistics.fmean,
    "median": statistics.median,
    "sum": math.fsum,
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Ran:
    """How a program ran. Times in seconds since it was started."""

    exit_code: int
    """As a shell has it: 128 + number for a signal."""
    started_at: str
    seconds: float | None
    """From start to end; ``None`` with a ``doubt``."""
    doubt: str | None = None
    window: tuple[float, float] | None = None
    """Begin and end of the marked window, if marks were asked for and found."""
    measured: dict[str, Metric] = field(default_factory=dict)
    """Further metrics: energy, memory."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Further fields of the record."""
    flags: list[str] = field(default_factory=list)
    """What is to be said of the machine."""
    apart: tuple[float | None, float | None] = (None, None)
    """How far apart the nodes opened and closed the window, at most [s]."""
    at: float = 0.0
    """Second since 1970 at which it was started, as the host's clock had it, where the shell says so."""


def _items(params: Params, names: Mapping[str, Any], numbers: Mapping[str, Metric]) -> int | str:
    """Items of the window, or a sentence that says why they are not known."""
    if isinstance(params.items, int):
        return params.items
    if params.items in numbers:
        value = numbers[params.items].value
        if value is None:
            return f"items: the metric {params.items!r} is not known"
    else:
        try:
            value = float(filled(params.items, names))
        except ValueError:
            return f"items: found {filled(params.items, names)!r}, expected a number, a template of one, or the name of a metric"
    if 1 <= value <= COUNT and value == int(value):
        return int(value)
    return f"items: found {value:g}, expected a whole number from 1 to {COUNT:.0e}"


@dataclass(frozen=True)
class Output:
    """What a program left behind, read once."""

    numbers: dict[str, Metric]
    """None of a program that failed."""
    faults: list[str]
    """A sentence for each number that could not be had, the items of the window among them."""
    items: int | None

    @classmethod
    def of(cls, params: Params, names: Mapping[str, Any], folder: Path, exit_code: int) -> Output:
        """Of the program that ran in an attempt's folder."""
        numbers, faults = read_metrics(params.metrics, folder, names) if not exit_code else ({}, [])
        items = _items(params, names, numbers)
        return cls(numbers, faults, items) if isinstance(items, int) else cls(numbers, [*faults, items], None)


def window_of(point: Point, items: int | None, ran: Ran) -> Window | None:
    """The window, whose energy is wanted; ``None`` if its items are not known, or it took no time."""
    start, end = ran.window or (0.0, ran.seconds or 0.0)
    if items is None or end <= start:
        return None
    times = {"start": start, "end": end, "opened_within": ran.apart[0], "closed_within": ran.apart[1]}
    return Window(**times, steps=1, samples=point.global_batch, items=items, first_step=0)


def measured_by(
    nodes: Nodes, meter: Meter, window: Window, begin: float, *, item: str, folder: Path
) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Energies of a window, and the fields of the record that are behind them; the meter is stopped. ``begin`` is when the record's clock
    begins, on this node's."""
    meter.stop()
    run = nodes.spans["run"]
    measured = energies(window, item, nodes.energy, nodes.idle) | powers(nodes.energy) | whole_run(run)
    measured["run_time"] = once(run.duration_s, "s")
    files = {}
    with suppress(OSError):  # as on a full disk: the record is worth more than its readings
        files = {"power": write_table(folder, "power", ROW, meter.rows(begin))} if meter.channels else {}
    return measured, {"energy": on_clock(nodes.energy, begin), "idle": on_clock(nodes.idle, begin), "nodes": nodes.each, "files": files}


class Sensors:
    """The instruments around a program that the shell alone runs: opened, and read at rest, before it is started."""

    def __init__(self, item: str, idle_seconds: float) -> None:
        self._item, self._idle_seconds, self._instruments = item, idle_seconds, Instruments()
        self._instruments.measure_idle(idle_seconds)
        self._instruments.meter.mark()
        self._offsets = [time.time() - time.monotonic()]

    def line(self, seconds: float) -> ProgressLine:
        """What the sensors say now, ``seconds`` after the start."""
        return ProgressLine(t=seconds, phase="run", item=self._item, watts=self._instruments.meter.latest_power_w())

    def over(self) -> None:
        """The program has ended."""
        self._instruments.meter.mark()
        self._offsets.append(time.time() - time.monotonic())

    def close(self) -> None:
        self._instruments.meter.stop()

    def completed(self, point: Point, items: int | None, folder: Path, how: Ran) -> Ran:
        """How the program ran, with its energy; if it did not fail the machine is read at rest once more."""
        # The shell's clock may be set, or drift, while the program runs: its instants are put on ours at each end. A large step is out of
        # the seconds already.
        drift = self._offsets[1] - self._offsets[0]
        begin = how.at - self._offsets[0]
        end = begin + (how.seconds or 0.0) - (drift if abs(drift) <= _STEPPED else 0.0)
        if how.seconds is not None and end > begin:
            how = replace(how, seconds=end - begin)
        window = window_of(point, items, how)
        if window is None:
            return how
        if not how.exit_code:
            self._instruments.measure_idle(self._idle_seconds)
        mine = self._instruments.summary(begin, end, {"run": (begin, end)})
        nodes = put_together({node_key(): [mine]}, {node_key(): [0]}, window)
        measured, fields = measured_by(nodes, self._instruments.meter, window, begin, item=self._item, folder=folder)
        return replace(how, measured=measured, extras={**how.extras, **fields, "environment": mine.environment})


def how_it_ran(folder: str) -> Ran | None:
    """How the program ran, by the second line of its script's announcement; ``None`` if it has not said so."""
    try:
        descriptor = os.open(f"{folder}/{STARTED}", os.O_RDONLY)
    except FileNotFoundError:
        return None
    text = os.read(descriptor, 4096).decode()
    os.close(descriptor)
    lines = text.split("\n")
    if len(lines) != 3:
        return None
    code, *times = lines[1].replace(",", ".").split()  # some locales have a decimal comma
    begin, end, *uptime = map(float, times)
    started_at = datetime.fromtimestamp(begin, UTC).astimezone().isoformat(timespec="milliseconds")
    seconds = end - begin
    if uptime and abs(uptime[1] - uptime[0] - seconds) > _STEPPED:  # nobody can set the uptime, which is coarser
        seconds = uptime[1] - uptime[0]
    if seconds < 0:  # of a script that an earlier version wrote, without the uptime
        return Ran(int(code), started_at, None, doubt="the clock was stepped while the program ran", at=begin)
    return Ran(int(code), started_at, seconds, at=begin)


def record_of_run(point: Point, folder: Path, params: Params, output: Output, ran: Ran) -> Record:
    """The record of a run that ended. A number that is missing or no number makes it ``invalid``."""
    if ran.exit_code:
        return _record(point, folder, ran, "failed", death(folder, ran.exit_code, "program"))
    own, faults = own_definitions(params.metrics, "the suite"), [*output.faults]
    if params.marks is not None and ran.window is None:
        faults.append(ran.doubt or "the marks were not printed")
    window = window_of(point, output.items, ran)
    if faults or window is None:
        reason = "; ".join(faults) or ran.doubt or "the run took no time that the clock could tell"
        return _record(point, folder, ran, "invalid", reason, metrics=output.numbers, definitions=own)
    facts = Facts(item=params.item, items_per_sample=1, parameters=None, flops_per_item=None, flops_formula="not known of a command")
    metrics = {**_rates(window, point, params.item, ran), **ran.measured, **output.numbers}
    of = ("device", "module") if point.device_class == "gpu" else ("device",)  # modules without an accelerator are the processor's
    measured = 0 if (energy := ran.extras.get("energy")) is None else _devices(energy, point.nodes > 1, *of)
    raised = {
        "short_window": ran.window is not None and window.seconds < SHORT_WINDOW,
        "idle_devices": measured > point.world,
    }
    flags = [*ran.flags, *(flag for flag, is_so in raised.items() if is_so)]
    return _record(point, folder, ran, "ok", None, window=window, flags=flags, facts=facts, metrics=metrics, definitions=own)


def _devices(energy: WindowEnergy, several_nodes: bool, *boundaries: str) -> int:
    """Of how many accelerators the energy is at the first of these boundaries that has a sensor, one of several dies or slices included; 0
    where it has no number."""
    _, found = energy.sensed(*boundaries) or ("", BoundaryEnergy())
    counted = [c for c in energy.channels if c.id in found.channels]
    used = {(c.id.partition("/")[0] if several_nodes else "", user) for c in counted for user in c.users or [c.id]}
    return 0 if found.energy_j is None else max(len(found.channels), len(used))


def _record(point: Point, folder: Path, ran: Ran, status: Status, reason: str | None, **fields: Any) -> Record:
    # The parts are valid by themselves, so that a copy of an empty record will do: checking them once more would take as long as the rest.
    values = {
        "key": folder.parent.name.rpartition("-")[2],
        "attempt": int(folder.name),
        "point": point,
        "status": status,
        "reason": reason,
        "started_at": ran.started_at,
        "phases": [Phase(name="run", start=0.0, end=ran.seconds)] if ran.seconds is not None else [],
    }
    return _BLANK.model_copy(update={**values, **ran.extras, **fields})


def _rates(window: Window, point: Point, item: str, ran: Ran) -> dict[str, Metric]:
    rate, unit = window.items / window.seconds, unit_of("throughput", item)
    rates = {"throughput": once(rate, unit), "throughput_per_device": once(rate / point.world, unit)}
    return rates | {"window_time": once(window.seconds, "s")} | ({"runtime": once(ran.seconds, "s")} if ran.seconds is not None else {})


def once(value: float | None, unit: str) -> Metric:
    """A rate or a time of one run of a program: its spread is that of repeats."""
    return Metric(value=value, unit=unit, n=1, reason="one run: repeats give the spread")


def read_metrics(specs: Mapping[str, MetricSpec], folder: Path, names: Mapping[str, Any]) -> tuple[dict[str, Metric], list[str]]:
    """The program's own numbers, and a sentence for each that could not be had."""
    numbers: dict[str, Metric] = {}
    faults = []
    for name, spec in specs.items():
        values, fault = _values(spec, folder, names)
        value, fault = (None, fault) if fault else _taken(spec.take, values)
        if fault:
            faults.append(f"metric {name!r}: {fault}")
        numbers[name] = Metric(
            value=value,
            unit=spec.unit,
            n=None if fault else len(values),
            reason=fault or (f"{spec.take} of {len(values)} values" if len(values) > 1 else None),
        )
    return numbers, faults


def _taken(take: Take, values: Sequence[float]) -> tuple[float | None, str | None]:
    """What counts of the values, or why that is no number of a record."""
    if not all(math.isfinite(value) for value in values):
        return None, "found NaN or infinity"
    try:
        value = _TAKES[take](values)
    except OverflowError:
        value = math.inf
    if not is_measurable(value):
        return None, f"found {value:g}, expected 0 or a size between {1 / LARGEST:g} and {LARGEST:g}"
    return value, None


def _values(spec: MetricSpec, folder: Path, names: Mapping[str, Any]) -> tuple[list[float], str | None]:
    """The values of a number in the order in which they stand, or why there are none."""
    path = folder / (LOG if spec.file is None else filled(spec.file, names))
    where = "the output" if spec.file is None else str(path)
    try:
        text = read_bytes(path, OUTPUT).decode("utf-8-sig", errors="replace")
    except OSError as error:
        return [], f"{path}: {error.strerror}"
    except InputError as error:
        return [], str(error)
    if spec.pattern is not None:
        what = f"pattern {spec.pattern!r}"
        group: int | str = "value" if "value" in re.compile(spec.pattern).groupindex else 1
        try:
            with limited():
                found: Iterable[Any] = [match[group] for match in re.finditer(spec.pattern, text, re.MULTILINE)]
        except TimeoutError:
            return [], f"{what} needs more than {SECONDS:g} s for {where}"
    elif spec.key is not None:
        what = f"key {spec.key!r}"
        found = [value for thing in _objects(text, whole=spec.file is not None) if (value := _inside(thing, spec.key)) is not None]
    else:
        assert spec.column is not None
        what = f"column {spec.column!r}"
        try:
            rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
            found = [row[spec.column] for row in rows if row.get(spec.column) not in (None, "")]
        except csv.Error as error:
            return [], f"{path}: {error}"
    values = []
    for value in found:
        try:
            values.append(float(value))
        except (TypeError, ValueError, OverflowError):
            return [], f"{what} gives {f'{value!r}'[:_LONGEST]} in {where}, which is no number"
    return values, None if values else f"{what} is not in {where}"


def _objects(text: str, whole: bool) -> Iterable[JsonValue]:
    """JSON objects: one a line, or the whole text if that is one."""
    if whole:
        try:
            found = json.loads(text)
            yield from found if isinstance(found, list) else [found]
            return
        except (ValueError, RecursionError):
            pass  # then it has one a line
    for line in text.splitlines():
        if line.lstrip().startswith("{"):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue  # something else that begins with a brace


def _inside(thing: Any, path: str) -> Any:
    for step in path.split("."):
        if not isinstance(thing, dict):
            return None
        thing = thing.get(step)
    return thing
