"""Result tables of JUBE as records: what a row says, and for the rest the reason why it is not known.

A table has text cells, and units at most in its header. Only columns whose meaning is certain from their name become CARAML's own metrics,
in its units; other numbers keep their name and unit, and texts and what sets a run up become parameters. Rows that differ in results alone
are repeats. Energy is that of jpwr, around the whole program of each rank: the energy of a run and not of the rate's window.
"""

from __future__ import annotations

import hashlib
import json
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
from caraml.results.cells import (
    BOOKKEEPING,
    COUNTS,
    DATA_PARALLEL,
    EACH_SECOND,
    LONGEST,
    OF_DEVICES,
    RATE,
    SEPARATED,
    SET_UP,
    UNITS,
    name_and_unit,
    number,
    number_of,
    read_rows,
)
from caraml.results.listing import Listing
from caraml.results.record import Record
from caraml.results.store import Store, see_readable, write_record
from caraml.suite.jube import PRECISIONS
from caraml.suite.model import IMPORTED, NOT_STATED, Point, Stated
from caraml.system.catalogue import list_systems
from caraml.system.model import System

UNKNOWN = "unknown"
NO_UNIT = "?"
_SHOWN = 3
"""Cells without a number that a reason lists."""
_NOT_THERE = "the table does not say"
_LIMITS = ("Runtime(min)", "exit_duration")
"""Titles of CARAML's scripts for the time after which a run was to end, which is no measurement."""
_DIGITS = "and numbers are read with a decimal point and without separators"
_OF_JPWR = "of the whole program, as jpwr measures it; not of the rate's window"


@dataclass(frozen=True)
class _Columns:
    """Titles by what their columns hold, which is the same in every row."""

    rates: dict[str, str]
    """With what each counts."""
    results: set[str]
    bookkeeping: set[str]


@dataclass(frozen=True)
class _Row:
    """One row, sorted by what it means."""

    cells: dict[str, str]
    """As the table has them, without those that are blank."""
    params: dict[str, JsonValue]
    metrics: dict[str, Metric]
    item: str | None
    counts: dict[str, int]
    """``global_batch``, ``nodes`` and ``devices`` (of all nodes), where the table says them."""
    system: System | str | None
    precision: Stated | None
    bookkeeping: dict[str, JsonValue]
    """What tells runs of the same work apart, and what follows from the devices."""
    unread: list[str]
    """Cells where a number was expected."""

    @property
    def digest(self) -> str:
        """Hash of what the row and its file of energy say: by it the record of a row is found again, whatever CARAML makes of it."""
        energy = self.metrics.get("run_energy")
        said = [sorted(self.cells.items()), energy.value if energy is not None else None]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def read_table(path: Path, root: Path, suite: str | None) -> Done:
    """Add a table's rows to a store, as a suite of this name (default: the file's). A row that the suite has already is known.

    Raises:
        InputError: not a table of text, no header, a row of another length or of what no record can hold, or more than is read.
    """
    name = re.sub(r"[^a-z0-9_-]+", "-", (suite or path.stem).lower()).strip("-") or "imported"
    store, done = Store(root), Done()
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    table = read_rows(path)
    columns = _columns(table)
    rows = [_sorted(cells, columns, path.parent) for cells in table]
    there = _known(store, name, rows)
    points = _points(path, name, rows, there)
    found = {index: (record.key, record.point.label) for index, record in there.items()}
    found |= {index: (point.key, point.label) for index, point in points.items()}
    listed = [found[index] for index in range(len(rows))]
    listing = Listing(name=name, title=f"imported from {path.name}", asked_at=written, system=UNKNOWN, launcher="import", points=listed)
    # Before anything is written, so that the round before it ends at the attempts that there are now.
    store.remember(listing, anew=any((store.points / point.folder_name).exists() for point in points.values()))
    for index, point in points.items():
        attempt = store.new_attempt(point)
        write_record(attempt, _record(point, rows[index], int(attempt.name), written, path.name))
    done.records, done.known = len(points), len(there)
    return done


def _points(path: Path, suite: str, rows: list[_Row], there: dict[int, Record]) -> dict[int, Point]:
    """The points of the rows that are not ``there``, by their numbers; all before any is written, so that a table is taken whole or not
    at all.

    A row takes the first repeat of its work that no other row has: one in whose place it stands, since the table was written anew, gets
    another attempt.
    """
    found = dict[int, Point]()
    taken = {record.key for record in there.values()}
    repeats = Counter[str]()
    for index, row in enumerate(rows):
        if index in there:
            continue
        try:
            point = _point(suite, row)
            see_readable(_record(point, row, 1, "", path.name), f"{path}: row {index + 1} below the header")
        except ValidationError as error:
            raise InputError(f"{path}: row {index + 1} below the header: {in_a_line(error)}") from error
        work = point.key
        point = point.model_copy(update={"repeat": repeats[work]})
        while (key := point.key) in taken:
            repeats[work] += 1
            point = point.model_copy(update={"repeat": repeats[work]})
        taken.add(key)
        found[index] = point
    return found


def _columns(table: list[dict[str, str]]) -> _Columns:
    """A column is one of results where any of its cells is a number and its name does not say that it sets a run up."""
    rates, results, bookkeeping = dict[str, str](), set[str](), set[str]()
    counts = [_counts(cells) for cells in table]
    for title in table[0]:
        name, unit = name_and_unit(title)
        texts = [cells[title] for cells in table]
        spelt = name_and_unit(unit)[0] if unit else ""
        rate = RATE.fullmatch(spelt if name in ("throughput", "rate") and unit else name)
        if rate and (not unit or RATE.fullmatch(spelt) or EACH_SECOND.fullmatch(spelt)):
            rates[title] = rate[1]
        elif not unit and (BOOKKEEPING.fullmatch(name) or (name not in COUNTS and _follows(name, texts, counts))):
            bookkeeping.add(title)
        elif title not in _LIMITS and name not in {"system", "precision", *COUNTS} and (unit or not SET_UP.search(name)):
            results |= {title} if any(number(text) is not None or SEPARATED.fullmatch(text) for text in texts) else set()
    return _Columns(rates, results, bookkeeping)


def _counts(cells: dict[str, str]) -> dict[str, int]:
    named = ((COUNTS.get(name_and_unit(title)[0]), number_of(text)) for title, text in cells.items())
    return {name: found for name, found in named if name and found}


def _follows(name: str, texts: list[str], counts: list[dict[str, int]]) -> bool:
    """Whether a column follows from the devices, which every row has to say: it changes with them, and is no work of its own."""
    if not all("devices" in one for one in counts):
        return False
    numbers = [number_of(text) for text in texts]
    if DATA_PARALLEL.search(name):  # copies of a model; not whether there are some
        return all(each is not None and each >= 1 and one["devices"] % each == 0 for each, one in zip(numbers, counts, strict=True))
    following = (
        [one["devices"] for one in counts],
        [one["devices"] / one.get("nodes", 1) for one in counts],
        [one.get("global_batch", 0) / one["devices"] for one in counts],
    )
    return bool(OF_DEVICES.search(name)) and numbers in following


def _sorted(cells: dict[str, str], columns: _Columns, folder: Path) -> _Row:
    params, bookkeeping = dict[str, JsonValue](), dict[str, JsonValue]()
    metrics: dict[str, Metric] = {}
    system: System | str | None = None
    precision: Stated | None = None
    counts = _counts(cells)
    own = _rate(cells, columns)
    item = columns.rates.get(own)
    for title, text in cells.items():
        name, unit = name_and_unit(title)
        value: float | None = number(text)
        if title == own:
            metrics["throughput"] = _positive(text, value, f"{item}/s")
        elif name in {"avg_tflops_per_gpu", "tflops_per_gpu"} and (not unit or unit.lower().startswith("tflop")):
            metrics["achieved_flops_per_device"] = _positive(text, value, "FLOP/s", 1e12)
        elif name == "energyfile" and text:
            metrics["run_energy"] = _energy_file(folder / Path(text).name, counts.get("nodes"))
        elif name in {"energy_per_device", "energy_counter_per_device"} and unit in UNITS["J"]:
            metrics.setdefault("run_energy", _energy(text, value, counts.get("devices"), UNITS["J"][unit]))
        elif title in columns.results or (title in columns.rates and text):
            _add(metrics, title, text, item)
        elif not text or COUNTS.get(name) in counts:
            pass
        elif name == "system":
            system = next(
                (one for one in list_systems() if text.casefold() in {word.casefold() for word in (one.name, *one.aliases)}), text
            )
        elif name == "precision" and (found := PRECISIONS.get(text, PRECISIONS.get(text.lower()))) is not None:
            precision = found
        else:
            (bookkeeping if title in columns.bookkeeping else params)[title] = text
    said = {title: text for title, text in cells.items() if text}
    expected = columns.results | columns.rates.keys()
    unread = [f"{title} is {text!r}" for title, text in said.items() if title in expected and number(text) is None]
    return _Row(said, params, metrics, item, counts, system, precision, bookkeeping, unread)


def _rate(cells: dict[str, str], columns: _Columns) -> str:
    """The title of the row's own rate: a table may have a column for each thing that is counted. Empty without one."""
    known = (title for title in columns.rates if (number(cells[title]) or 0) > 0)
    told = (title for title in columns.rates if cells[title])
    return next(known, next(told, next(iter(columns.rates), "")))


def _add(metrics: dict[str, Metric], title: str, text: str, item: str | None) -> None:
    """A result under the name of its column, in CARAML's unit where the name is one of CARAML's; where it has no such unit, beside that."""
    name, unit = name_and_unit(title)
    value, reason = number(text), None if unit else "the table gives no unit"
    if name in DEFINED:
        own, factor = _own_unit(DEFINED[name].unit, unit, item)
        name, unit, factor = (f"{name}_in_table", unit, 1.0) if factor is None else (name, own, factor)
        reason = f"the table's {title!r}, of whatever it was measured around" if name in DEFINED else reason
        value = value * factor if value is not None else None
    while name in metrics:  # titles differ, and what is left of them need not
        name += "_"
    metrics[name] = Metric(value=value, unit=unit or NO_UNIT, reason=reason if value is not None else _blank(text))


def _own_unit(defined: str, unit: str | None, item: str | None) -> tuple[str, float | None]:
    """CARAML's unit of a metric, with what is counted in it, and what the table's is in it: ``None`` if it is none of its units."""
    found = re.search("token|image|sample|sequence", unit or "")
    own = defined.replace("{item}", item or (found[0] if found else "item"))
    (amount, _, per), (told, _, told_per) = own.partition("/"), re.sub(r"(token|image|sample|sequence)s", r"\1", unit or "").partition("/")
    if per != told_per:
        return own, None
    return own, 1.0 if told == amount else UNITS.get(amount, {}).get(told)


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
    if not text:
        return "the table's cell is blank"
    return f"the table has {text!r} here{f', {_DIGITS}' if SEPARATED.fullmatch(text) else ''}"


def _point(suite: str, row: _Row) -> Point:
    batch, nodes, known = row.counts.get("global_batch", 1), row.counts.get("nodes", 1), row.system
    total = row.counts.get("devices")
    return Point(
        suite=suite,
        benchmark=suite,
        workload=IMPORTED if row.item is None else f"{IMPORTED}_{row.item}",  # tokens and images are other work
        params=row.params if total is None or total % nodes == 0 else row.params | {"Devices": total},
        system=known.name if isinstance(known, System) else known or f"{UNKNOWN} ({suite})",
        device=known.identity if isinstance(known, System) else UNKNOWN,
        device_class=known.device_class if isinstance(known, System) else "gpu",
        software="imported",
        precision=row.precision or NOT_STATED,
        nodes=nodes,
        devices=total // nodes if total is not None and total % nodes == 0 else 1,
        global_batch=batch,
        micro_batch=max(batch // (total or nodes), 1),
    )


def _record(point: Point, row: _Row, attempt: int, written: str, source: str) -> Record:
    told = {name for name in row.counts if name != "devices" or row.counts["devices"] % row.counts.get("nodes", 1) == 0}
    told |= {name for name in ("system", "precision") if getattr(row, name) is not None}
    told |= {"device", "device_class"} if isinstance(row.system, System) else set()
    named = ("system", "device", "device_class", "devices", "nodes", "global_batch", "software", "precision", "micro_batch", "measure")
    missing: dict[str, JsonValue] = {f"point.{name}": _NOT_THERE for name in named if name not in told}
    missing |= {"window": _NOT_THERE, "energy": _NOT_THERE, "started_at": "not known; the table was written then"}
    measured = any(metric.value is not None for metric in row.metrics.values())
    separated = any(map(SEPARATED.fullmatch, row.cells.values()))
    unread = f" ({', '.join(row.unread[:_SHOWN])}{f'; {_DIGITS[4:]}' if separated else ''})" if row.unread else ""
    facts = Facts(item=row.item or "item", items_per_sample=1, parameters=None, flops_per_item=None, flops_formula=_NOT_THERE)
    return Record(
        key=point.key,
        attempt=attempt,
        point=point,
        status="ok" if measured else "failed",
        reason=f"imported from {source}{'' if measured else f': no number in its row{unread}'}"[:LONGEST],
        started_at=written,
        facts=facts,
        metrics=row.metrics,
        environment={"imported_from": source, "row": row.digest, "bookkeeping": row.bookkeeping, "missing": missing},
    )


def _known(store: Store, suite: str, rows: list[_Row]) -> dict[int, Record]:
    """Of those rows that a suite has a record of, by their numbers, the record: the newest of its point, and of no other row."""
    listed = {key for listing in store.rounds(suite) for key, _ in listing.points}
    keys = [key for key, name in store.names().items() if name.partition("-")[0].partition("_")[0] == IMPORTED]
    newest = (record for key in keys for record in store.newest(key, 1) if record.point.suite == suite or key in listed)
    there: dict[JsonValue, list[Record]] = {}
    for record in sorted(newest, key=lambda record: record.point.repeat, reverse=True):
        digest = record.environment.get("row")
        there.setdefault(digest if isinstance(digest, str) else None, []).append(record)
    earlier, found = there.pop(None, [])[::-1], dict[int, Record]()
    for index, row in enumerate(rows):
        if alike := there.get(row.digest):
            found[index] = alike.pop()
        elif (known := next((one for one in earlier if _is_of(one, row)), None)) is not None:
            earlier.remove(known)
            found[index] = known
    return found


def _is_of(record: Record, row: _Row) -> bool:
    """Whether a record without a digest is that of a row: versions up to 0.1.0 had other columns among its parameters."""
    point, unstated = record.point, record.unstated
    devices = point.params.get("Devices") if isinstance(point.params.get("Devices"), int) else point.world
    said = {"nodes": point.nodes, "global_batch": point.global_batch, "devices": devices}
    untold = set(unstated) - ({"devices"} if devices != point.world else set())
    system = row.system.name if isinstance(row.system, System) else row.system or UNKNOWN
    if {name: value for name, value in said.items() if name not in untold} != row.counts or point.system != system:
        return False
    texts = {title: text or "" for title, text in point.params.items() if isinstance(text, str | None)}
    if any(row.cells.get(title, "") != text for title, text in texts.items()):
        return False
    stated = point.precision if "precision" not in unstated else None
    if stated != row.precision and not any(name_and_unit(title)[0] == "precision" for title in texts):
        return False
    ours, theirs = ({metric.value for metric in one.metrics.values()} - {None} for one in (row, record))
    return ours <= theirs <= ours | set(map(number, row.cells.values()))
