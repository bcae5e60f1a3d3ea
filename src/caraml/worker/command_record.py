"""What a command's run amounts to: its numbers, read from what it printed and wrote, and the record around them."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from caraml.base.errors import InputError
from caraml.base.limits import COUNT, LARGEST, OUTPUT, SECONDS, is_measurable, limited, read_bytes
from caraml.engine.instruments import Nodes, on_clock
from caraml.metrics.energy import energies, powers
from caraml.metrics.model import Facts, Metric, Phase, Window, own_definitions, unit_of
from caraml.metrics.run import whole_run
from caraml.power.meter import Meter
from caraml.power.store import ROW
from caraml.results.finish import LOG, death
from caraml.results.record import Record, Status
from caraml.results.rows import write_table
from caraml.suite.model import Point
from caraml.workloads.command import POINT_NAMES, MetricSpec, Params, Take, filled

SHORT_WINDOW = 0.1
"""Seconds below which the delay in seeing the marks matters."""
_LONGEST = 60

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


def names_of(point: Point, params: Params, folder: Path | str, suite_folder: str) -> dict[str, Any]:
    """What the templates of a point may name."""
    own = {name: getattr(point, name) for name in POINT_NAMES}
    return {**own, **params.__pydantic_extra__, "folder": str(folder), "suite_folder": suite_folder}


def items_of(params: Params, names: Mapping[str, Any], numbers: Mapping[str, Metric]) -> int | str:
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


def window_of(point: Point, params: Params, names: Mapping[str, Any], folder: Path, ran: Ran) -> Window | None:
    """The window whose energy is wanted; ``None`` if its items are not known."""
    numbers, _ = read_metrics(params.metrics, folder, names) if not ran.exit_code else ({}, [])
    items = items_of(params, names, numbers)
    start, end = ran.window or (0.0, ran.seconds or 0.0)
    if isinstance(items, str) or end <= start:
        return None
    return Window(start=start, end=end, steps=1, samples=point.global_batch, items=items, first_step=0)


def measured_by(
    nodes: Nodes, meter: Meter, window: Window, begin: float, *, item: str, folder: Path
) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Energies of a window, and the fields of the record that are behind them; the meter is stopped. ``begin`` is when the record's clock
    begins, on this node's."""
    meter.stop()
    run = nodes.spans["run"]
    measured = energies(window, item, nodes.energy, nodes.idle) | powers(nodes.energy) | whole_run(run)
    measured["run_time"] = once(run.duration_s, "s")
    files = {"power": write_table(folder, "power", ROW, meter.rows(begin))} if meter.channels else {}
    return measured, {"energy": on_clock(nodes.energy, begin), "idle": on_clock(nodes.idle, begin), "nodes": nodes.each, "files": files}


def record_of_run(point: Point, folder: Path, params: Params, names: Mapping[str, Any], ran: Ran) -> Record:
    """The record of a run that ended. A number that is missing or no number makes it ``invalid``."""
    if ran.exit_code:
        return _record(point, folder, ran, "failed", death(folder, ran.exit_code, "program"))
    numbers, faults = read_metrics(params.metrics, folder, names)
    own = own_definitions(params.metrics, "the suite")
    items = items_of(params, names, numbers)
    if isinstance(items, str):
        faults.append(items)
    if params.marks is not None and ran.window is None:
        faults.append(ran.doubt or "the marks were not printed")
    start, end = ran.window or (0.0, ran.seconds)
    if faults or end is None or isinstance(items, str) or end <= start:
        reason = "; ".join(faults) or ran.doubt or "the run took no time that the clock could tell"
        return _record(point, folder, ran, "invalid", reason, metrics=numbers, definitions=own)
    opened, closed = ran.apart
    times = {"start": start, "end": end, "opened_within": opened, "closed_within": closed}
    window = Window(**times, steps=1, samples=point.global_batch, items=items, first_step=0)
    facts = Facts(item=params.item, items_per_sample=1, parameters=None, flops_per_item=None, flops_formula="not known of a command")
    metrics = {**_rates(window, point, params.item, ran), **ran.measured, **numbers}
    flags = [*ran.flags, *(["short_window"] if ran.window is not None and window.seconds < SHORT_WINDOW else [])]
    return _record(point, folder, ran, "ok", None, window=window, flags=flags, facts=facts, metrics=metrics, definitions=own)


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
