"""Result tables of JUBE as records: what a row says, and for the rest the reason why it is not known.

A table has text cells, and units at most in its header. Only columns whose meaning is certain from their name become CARAML's own metrics,
in its units; other numbers keep their name and unit, and texts and what sets a run up become parameters. Rows that differ in results alone
are repeats. Energy is that of jpwr, around the whole program of each rank: the energy of a run and not of the rate's window.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue, ValidationError

from caraml.base.errors import InputError, in_a_line
from caraml.base.format import JOULES_PER_WATT_HOUR
from caraml.metrics.definitions import METRICS as DEFINED
from caraml.metrics.model import Facts, Metric
from caraml.results.archive import Done
from caraml.results.cells import COUNTS, EACH_SECOND, LONGEST, RATE, SET_UP, UNITS, name_and_unit, number, number_of, read_rows
from caraml.results.listing import Listing
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, attempts, read_record, see_readable, write_record
from caraml.suite.jube import PRECISIONS
from caraml.suite.model import NOT_STATED, Point, Stated
from caraml.system.catalogue import list_systems
from caraml.system.model import System

WORKLOAD = "imported"
UNKNOWN = "unknown"
NO_UNIT = "?"
_NOT_THERE = "the table does not say"
_LIMITS = ("Runtime(min)", "exit_duration")
"""Titles of CARAML's scripts for the time after which a run was to end, which is no measurement."""
_OF_JPWR = "of the whole program, as jpwr measures it; not of the rate's window"


@dataclass(frozen=True)
class _Row:
    """One row, sorted by what it means."""

    params: dict[str, JsonValue]
    metrics: dict[str, Metric]
    item: str | None
    counts: dict[str, int]
    """``global_batch``, ``nodes`` and ``devices`` (of all nodes), where the table says them."""
    system: System | str | None
    precision: Stated | None


def read_table(path: Path, root: Path, suite: str | None) -> Done:
    """Add a table's rows to a store, as a suite of this name (default: the file's). A row that is there already is known.

    Raises:
        InputError: not a table of text, no header, a row of another length or of what no record can hold, or more than is read.
    """
    name = re.sub(r"[^a-z0-9_-]+", "-", (suite or path.stem).lower()).strip("-") or "imported"
    store, done, points = Store(root), Done(), list[tuple[str, str]]()
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    known: dict[str, dict[str, Point]] = {}
    for row, point in _points(path, name):
        if point.key not in known:
            known[point.key] = _there(store, point)
        if (there := known[point.key].get(metrics := _text(row.metrics))) is not None:
            points.append((there.key, there.label))
            done.known += 1
            continue
        points.append((point.key, point.label))
        known[point.key][metrics] = point
        attempt = store.new_attempt(point)
        write_record(attempt, _record(point, row, int(attempt.name), written, path.name))
        done.records += 1
    store.remember(
        Listing(name=name, title=f"imported from {path.name}", asked_at=written, system=UNKNOWN, launcher="import", points=points)
    )
    return done


def _points(path: Path, suite: str) -> list[tuple[_Row, Point]]:
    """All rows before any is written, so that a table is taken whole or not at all. The second row of a work is its first repeat."""
    found = []
    seen = Counter[str]()
    for row_number, cells in enumerate(read_rows(path), start=1):
        row = _sorted(cells, path.parent)
        try:
            point = _point(suite, row)
            see_readable(_record(point, row, 1, "", path.name), f"{path}: row {row_number} below the header")
        except ValidationError as error:
            raise InputError(f"{path}: row {row_number} below the header: {in_a_line(error)}") from error
        work = point.key
        found.append((row, point.model_copy(update={"repeat": seen[work]})))
        seen[work] += 1
    return found


def _sorted(cells: dict[str, str], folder: Path) -> _Row:
    params: dict[str, JsonValue] = {}
    metrics: dict[str, Metric] = {}
    item: str | None = None
    system: System | str | None = None
    precision: Stated | None = None
    counts = {
        COUNTS[name]: found for title, text in cells.items() if (name := name_and_unit(title)[0]) in COUNTS and (found := number_of(text))
    }
    for title, text in cells.items():
        name, unit = name_and_unit(title)
        value: float | None = number(text)
        spelt = name_and_unit(unit)[0] if unit else ""
        rate = RATE.fullmatch(spelt if name in ("throughput", "rate") and unit else name)
        if rate and "throughput" not in metrics and (not unit or RATE.fullmatch(spelt) or EACH_SECOND.fullmatch(spelt)):
            item = rate[1]
            metrics["throughput"] = _positive(text, value, f"{item}/s")
        elif name in {"avg_tflops_per_gpu", "tflops_per_gpu"} and (not unit or spelt.startswith("tflop")):
            metrics["achieved_flops_per_device"] = _positive(text, value, "FLOP/s", 1e12)
        elif name == "energyfile" and text:
            metrics["run_energy"] = _energy_file(folder / Path(text).name, counts.get("nodes"))
        elif name in {"energy_per_device", "energy_counter_per_device"} and unit in UNITS["J"]:
            metrics.setdefault("run_energy", _energy(text, value, counts.get("devices"), UNITS["J"][unit]))
        elif name == "system" and text:
            system = next(
                (one for one in list_systems() if text.casefold() in {word.casefold() for word in (one.name, *one.aliases)}), text
            )
        elif name == "precision" and text in PRECISIONS:
            precision = PRECISIONS[text]
        elif COUNTS.get(name) in counts:
            pass
        elif value is not None and title not in _LIMITS and (unit or not SET_UP.search(name)):
            _add(metrics, title, value)
        else:
            params[title] = text or None
    return _Row(params, metrics, item, counts, system, precision)


def _add(metrics: dict[str, Metric], title: str, value: float) -> None:
    """A number under the name of its column, in CARAML's unit where the name is one of CARAML's; where it has no such unit, beside that."""
    name, unit = name_and_unit(title)
    reason = None if unit else "the table gives no unit"
    if name in DEFINED:
        own = DEFINED[name].unit
        factor = 1.0 if unit == own else UNITS.get(own, {}).get(unit or "")
        name, value, unit = (f"{name}_in_table", value, unit) if factor is None else (name, value * factor, own)
        reason = f"the table's {title!r}, of whatever it was measured around" if factor is not None else reason
    while name in metrics:  # titles differ, and what is left of them need not
        name += "_"
    metrics[name] = Metric(value=value, unit=unit or NO_UNIT, reason=reason)


def _positive(text: str, value: float | None, unit: str, factor: float = 1.0) -> Metric:
    """A rate, which is above zero."""
    known = value is not None and value > 0
    return Metric(value=factor * value if known and value is not None else None, unit=unit, reason=None if known else _blank(text))


def _energy(text: str, value: float | None, devices: int | None, joules: float) -> Metric:
    """Energy of all devices from the column of one device's, or of the list of all; ``joules`` of its unit."""
    reason = None if devices is not None else "the table gives one device's and not how many there were"
    if text.startswith("[") and text.endswith("]"):
        each = [number(one) for one in text[1:-1].split(",")]
        wrong = f"the table has {len(each)} devices' and says that there were {devices}" if devices not in (None, len(each)) else None
        value, devices, reason = None if None in each else sum(one for one in each if one is not None), 1, wrong
    if value is None or value <= 0:
        reason = _blank(text)
    if reason is not None or value is None or devices is None:
        return Metric(value=None, unit="J", reason=reason)
    return Metric(value=value * devices * joules, unit="J", reason=_OF_JPWR)


def _energy_file(path: Path, count: int | None) -> Metric:
    """Energy [J] in the table that CARAML's scripts make of jpwr's: a row for each rank, each of which has all devices of its node [Wh].

    ``count``: of nodes, as the table of results says.
    """
    try:
        rows = read_rows(path)
    except InputError as error:
        return Metric(
            value=None, unit="J", reason=f"its energy is in a file of its own that is not beside the table: {in_a_line(error)}"[:LONGEST]
        )
    devices = [name for name in rows[0] if re.fullmatch(r"(pynvml|rocm|gc):\d+", name)]
    nodes: dict[str, list[float | None]] = {}
    for row in rows:
        each = [number(row[name]) for name in devices]
        nodes.setdefault(row.get("nodename", ""), []).append(None if None in each else sum(one for one in each if one is not None))
    ranks = [one for of_node in nodes.values() for one in of_node]
    if not devices or None in ranks:
        return Metric(value=None, unit="J", reason=f"{path.name} has no energy of each device, or not of every rank")
    if count not in (None, len(nodes)):
        return Metric(value=None, unit="J", reason=f"{path.name} has {len(nodes)} of the {count} nodes")
    total = sum(fmean(one for one in of_node if one is not None) for of_node in nodes.values())
    return Metric(value=total * JOULES_PER_WATT_HOUR, unit="J", reason=_OF_JPWR)


def _blank(text: str) -> str:
    return f"the table has {text!r} here" if text else "the table's cell is blank"


def _point(suite: str, row: _Row) -> Point:
    batch, nodes, known = row.counts.get("global_batch", 1), row.counts.get("nodes", 1), row.system
    total = row.counts.get("devices")
    return Point(
        suite=suite,
        benchmark=suite,
        workload=WORKLOAD,
        params=row.params if total is None or total % nodes == 0 else row.params | {"Devices": total},
        system=known.name if isinstance(known, System) else known or UNKNOWN,
        device=known.identity if isinstance(known, System) else UNKNOWN,
        device_class=known.device_class if isinstance(known, System) else "gpu",
        software="imported",
        precision=row.precision or NOT_STATED,
        nodes=nodes,
        devices=total // nodes if total is not None and total % nodes == 0 else 1,
        global_batch=batch,
        micro_batch=batch,
    )


def _record(point: Point, row: _Row, attempt: int, written: str, source: str) -> Record:
    told = {name for name in row.counts if name != "devices" or row.counts["devices"] % row.counts.get("nodes", 1) == 0}
    told |= {name for name in ("system", "precision") if getattr(row, name) is not None}
    told |= {"device", "device_class"} if isinstance(row.system, System) else set()
    named = ("system", "device", "device_class", "devices", "nodes", "global_batch", "software", "precision", "micro_batch", "measure")
    missing: dict[str, JsonValue] = {f"point.{name}": _NOT_THERE for name in named if name not in told}
    missing |= {"window": _NOT_THERE, "energy": _NOT_THERE, "started_at": "not known; the table was written then"}
    measured = any(metric.value is not None for metric in row.metrics.values())
    facts = Facts(item=row.item or "item", items_per_sample=1, parameters=None, flops_per_item=None, flops_formula=_NOT_THERE)
    return Record(
        key=point.key,
        attempt=attempt,
        point=point,
        status="ok" if measured else "failed",
        reason=f"imported from {source}" if measured else f"imported from {source}: no number in its row",
        started_at=written,
        facts=facts,
        metrics=row.metrics,
        environment={"imported_from": source, "missing": missing},
    )


def _there(store: Store, point: Point) -> dict[str, Point]:
    """The numbers of every record that a store has of a point, and its point there: 0.1.0 wrote fp32 where the table says no precision."""
    stated = point.precision != NOT_STATED
    folders = [store.points / one.folder_name for one in (point, *([] if stated else [point.model_copy(update={"precision": "fp32"})]))]
    paths = (folder / str(number) / RECORD for folder in folders for number in attempts(folder) or ())
    found = (read_record(path) for path in paths if path.exists())
    return {_text(record.metrics): record.point for record in found if ("precision" not in record.unstated) == stated}


def _text(metrics: dict[str, Metric]) -> str:
    return repr(sorted(metrics.items()))
