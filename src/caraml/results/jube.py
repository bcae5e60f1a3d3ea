"""Result tables of JUBE (CSV) as records: what a row says, and for the rest the reason why it is not known.

A table has text cells and no units, so only columns whose meaning is certain from their name become CARAML's own metrics; other numbers
keep their name and an unknown unit, and texts become parameters. Energy is that of jpwr, around the whole program of each rank: the energy
of a run and not of the rate's window.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue, ValidationError

from caraml.base.errors import InputError, in_a_line
from caraml.base.format import JOULES_PER_WATT_HOUR
from caraml.base.limits import JUBE, JUBE_CELLS, JUBE_ROWS, METRICS, read_text, too_large
from caraml.metrics.model import Facts, Metric
from caraml.results.archive import Done
from caraml.results.listing import Listing
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, attempts, read_record, write_record
from caraml.suite.model import Point
from caraml.system.catalogue import list_systems
from caraml.system.model import System

WORKLOAD = "imported"
UNKNOWN = "unknown"
NO_UNIT = "?"
_NOT_THERE = "the table does not say"
_LONGEST = 1000
"""Characters of a header that an error shows."""
_OF_JPWR = "of the whole program, as jpwr measures it; not of the rate's window"
_COUNTS = dict.fromkeys(("globalbatchsize", "global_batch_size", "gbs"), "global_batch") | {"nodes": "nodes", "devices": "devices"}
_RATES = {"tokens": "token", "images": "image", "samples": "sample", "sequences": "sequence"}


@dataclass(frozen=True)
class _Row:
    """One row, sorted by what it means."""

    params: dict[str, JsonValue]
    metrics: dict[str, Metric]
    item: str | None
    counts: dict[str, int]
    """``global_batch``, ``nodes`` and ``devices`` (of all nodes), where the table says them."""
    system: System | str | None


def read_table(path: Path, root: Path, suite: str | None) -> Done:
    """Add a table's rows to a store, as a suite of this name (default: the file's). A row that is there already is known.

    Raises:
        InputError: not a table of text, no header, a row of another length or of what no record can hold, or more than is read.
    """
    name = re.sub(r"[^a-z0-9_-]+", "-", (suite or path.stem).lower()).strip("-") or "imported"
    store, done, points = Store(root), Done(), []
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    known: dict[str, set[str]] = {}
    for row, point in _points(path, name):
        points.append((point.key, point.label))
        if point.key not in known:
            known[point.key] = _there(store, point)
        if (metrics := _text(row.metrics)) in known[point.key]:
            done.known += 1
            continue
        known[point.key].add(metrics)
        attempt = store.new_attempt(point)
        write_record(attempt, _record(point, row, int(attempt.name), written, path.name))
        done.records += 1
    store.remember(
        Listing(name=name, title=f"imported from {path.name}", asked_at=written, system=UNKNOWN, launcher="import", points=points)
    )
    return done


def _points(path: Path, suite: str) -> list[tuple[_Row, Point]]:
    """All rows before any is written, so that a table is taken whole or not at all."""
    found = []
    for number, cells in enumerate(_rows(path), start=1):
        row = _sorted(cells, path.parent)
        try:
            found.append((row, _point(suite, row)))
        except ValidationError as error:
            raise InputError(f"{path}: row {number} below the header: {in_a_line(error)}") from error
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        text = read_text(path, JUBE).removeprefix("\ufeff")
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not a table of text: {error}") from error
    first = text.partition("\n")[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=";" if first.count(";") > first.count(",") else ",")
    header: list[str] = []
    rows: list[dict[str, str]] = []
    try:
        for cells in lines:
            line = [cell.strip() for cell in cells]
            if header and any(line):
                if len(line) != len(header):
                    raise InputError(f"{path}:{lines.line_num}: found {len(line)} cells, expected {len(header)} as in the header")
                rows.append(dict(zip(header, line, strict=True)))
            elif any(line):
                header = _header(path, line)
            if max(len(rows) - JUBE_ROWS, len(rows) * len(header) - JUBE_CELLS) > 0:
                raise InputError(f"{path}: found more than {JUBE_ROWS:,} rows or {JUBE_CELLS:,} cells, the most that are read")
    except csv.Error as error:
        raise InputError(f"{path}:{lines.line_num}: not a table of text: {error}") from error
    if not rows:
        raise InputError(f"{path}: found 0 rows below a header, expected 1 to {JUBE_ROWS:,}")
    return rows


def _header(path: Path, header: list[str]) -> list[str]:
    if len(header) > METRICS:
        raise too_large(path, len(header), METRICS, "columns")
    header = [header[0] or "index", *header[1:]]  # pandas writes its index without a name
    if len(set(header)) < len(header) or not all(header):
        raise InputError(f"{path}:1: expected a header of different names, found {', '.join(header)[:_LONGEST]}")
    return header


def _sorted(cells: dict[str, str], folder: Path) -> _Row:
    params: dict[str, JsonValue] = {}
    metrics: dict[str, Metric] = {}
    item: str | None = None
    system: System | str | None = None
    counts = {
        _COUNTS[name]: count for title, text in cells.items() if (name := _name_and_unit(title)[0]) in _COUNTS and (count := _count(text))
    }
    for title, text in cells.items():
        name, unit = _name_and_unit(title)
        value: float | None = _number(text)
        if rate := re.fullmatch(r"(tokens|images|samples|sequences)_per_s(ec(ond)?)?", name):
            item = _RATES[rate[1]]
            metrics["throughput"] = Metric(value=value, unit=f"{item}/s", reason=None if value is not None else _blank(text))
        elif name in {"avg_tflops_per_gpu", "tflops_per_gpu"}:
            reason = None if value is not None else _blank(text)
            metrics["achieved_flops_per_device"] = Metric(value=None if value is None else 1e12 * value, unit="FLOP/s", reason=reason)
        elif name == "energyfile" and text:
            metrics["run_energy"] = _energy_file(folder / Path(text).name)
        elif name in {"energy_per_device", "energy_counter_per_device"} and unit == "Wh":
            metrics.setdefault("run_energy", _energy(text, value, counts.get("devices")))
        elif name == "system" and text:
            system = next(
                (one for one in list_systems() if text.casefold() in {word.casefold() for word in (one.name, *one.aliases)}), text
            )
        elif _COUNTS.get(name) in counts:
            pass
        elif value is not None and not re.search(r"(^|_)(id|i|jobid|size|pp|tp|dp|devices|tasks|threads|version|iterations)($|_)", name):
            metrics[name] = Metric(value=value, unit=unit or NO_UNIT, reason=None if unit else "the table gives no unit")
        else:
            params[title] = text or None
    return _Row(params, metrics, item, counts, system)


def _energy(text: str, value: float | None, devices: int | None) -> Metric:
    """Energy of all devices from the column of one device's, or of the list of all."""
    if text.startswith("[") and text.endswith("]"):
        each = [_number(one) for one in text[1:-1].split(",")]
        value, devices = (None, devices) if None in each else (sum(one for one in each if one is not None), 1)
    if value is None or devices is None:
        return Metric(
            value=None, unit="J", reason=_blank(text) if value is None else "the table gives one device's and not how many there were"
        )
    return Metric(value=value * devices * JOULES_PER_WATT_HOUR, unit="J", reason=_OF_JPWR)


def _energy_file(path: Path) -> Metric:
    """Energy [J] in the table that CARAML's scripts make of jpwr's: a row for each rank, each of which has all devices of its node [Wh]."""
    try:
        rows = _rows(path)
    except InputError as error:
        return Metric(
            value=None, unit="J", reason=f"its energy is in a file of its own that is not beside the table: {in_a_line(error)}"[:_LONGEST]
        )
    devices = [name for name in rows[0] if re.fullmatch(r"(pynvml|rocm|gc):\d+", name)]
    nodes: dict[str, list[float | None]] = {}
    for row in rows:
        each = [_number(row[name]) for name in devices]
        nodes.setdefault(row.get("nodename", ""), []).append(None if None in each else sum(one for one in each if one is not None))
    ranks = [one for of_node in nodes.values() for one in of_node]
    if not devices or None in ranks:
        return Metric(value=None, unit="J", reason=f"{path.name} has no energy of each device, or not of every rank")
    total = sum(fmean(one for one in of_node if one is not None) for of_node in nodes.values())
    return Metric(value=total * JOULES_PER_WATT_HOUR, unit="J", reason=_OF_JPWR)


def _name_and_unit(title: str) -> tuple[str, str | None]:
    """``Tokens/second`` as ``tokens_per_second``; a unit stands in brackets, as JUBE and CARAML's scripts write it."""
    opening = title.rfind({"]": "[", ")": "("}.get(title[-1:], "\0"))
    words, unit = (title, "") if opening < 0 else (title[:opening], title[opening + 1 : -1])
    return re.sub(r"[^a-z0-9]+", "_", words.lower().replace("/", "_per_")).strip("_") or "column", unit or None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(text: str) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value == int(value) >= 1 else None


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
        nodes=nodes,
        devices=total // nodes if total is not None and total % nodes == 0 else 1,
        global_batch=batch,
        micro_batch=batch,
    )


def _record(point: Point, row: _Row, attempt: int, written: str, source: str) -> Record:
    told = {name for name in row.counts if name != "devices" or row.counts["devices"] % row.counts.get("nodes", 1) == 0}
    told |= {"system"} if row.system is not None else set()
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


def _there(store: Store, point: Point) -> set[str]:
    """The numbers of every record that a store has of a point."""
    folder = store.points / point.folder_name
    paths = (folder / str(number) / RECORD for number in attempts(folder) or ())
    return {_text(read_record(path).metrics) for path in paths if path.exists()}


def _text(metrics: dict[str, Metric]) -> str:
    return repr(sorted(metrics.items()))
