"""Result tables of JUBE as records: what a row says, and for the rest the reason why it is not known.

A table has text cells, and units at most in its header. Rows that differ in results alone are repeats. A row that is there already is known
by what it says.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import JsonValue, ValidationError

from caraml.base.errors import InputError, in_a_line
from caraml.metrics.model import Facts, Metric, scaled
from caraml.results.archive import Done
from caraml.results.cells import LONGEST, SEPARATED, name_and_unit, read_rows
from caraml.results.columns import GPUS, TableColumn, read_columns, unclear
from caraml.results.jube_row import DIGITS, Around, TableRow, take_energies
from caraml.results.record import Record
from caraml.results.store import Listing, Store, see_readable, write_record
from caraml.suite.model import IMPORTED, NOT_STATED, Point
from caraml.system.catalogue import list_systems
from caraml.system.model import System

UNKNOWN = "unknown"
_SHOWN = 3
"""Cells without a number that a reason lists."""
_LONG = 160
"""Characters of a reason why a cell has no number."""
_NOT_THERE = "the table does not say"


def read_table(
    path: Path, root: Path, suite: str | None, *, results: Sequence[str] = (), parameters: Sequence[str] = (), add: bool = True
) -> Done:
    """Add a table's rows to a store, as a ``suite`` that is called like the file by default. A row that it has already is known. Without
    ``add``, only see what would be added. ``results`` and ``parameters``: titles of columns that are that, whatever their names say.

    Raises:
        InputError: not a table of text, no header, a row of another length or of what no record can hold, more than is read, two
            columns of one quantity that differ, a column that is not there, or rows that are there with other ``results`` or
            ``parameters``.
    """
    if both := set(results) & set(parameters):
        raise InputError(f"asked for as result and as parameter: {', '.join(sorted(both))}", "choose one")
    name = re.sub(r"[^a-z0-9_-]+", "-", (suite or path.stem).lower()).strip("-") or "imported"
    store, done = Store(root), Done()
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    table = read_rows(path)
    systems = {word.casefold(): one for one in list_systems() for word in (one.name, *one.aliases)}
    asked = dict.fromkeys(results, True) | dict.fromkeys(parameters, False)
    columns = read_columns(path, table, asked)
    around = Around(columns, asked, systems, path.parent)
    rows = [TableRow(cells, around) for cells in table]
    take_energies(rows)
    there = _known(store, name, rows)
    rounds = [record for listing in store.rounds(name) for key, _ in listing.points[:1] for record in store.newest(key, 1)]
    _see_asked_alike(name, there, asked, table[0].keys(), rounds)
    points = _points(path, name, rows, there)
    found = {index: (record.key, record.point.label) for index, record in there.items()}
    found |= {index: (point.key, point.label) for index, point in points.items()}
    listed = [found[index] for index in range(len(rows))]
    done.records, done.known, done.columns = len(points), len(there), _taken(columns, rows)
    if not add:
        return done
    listing = Listing(name=name, title=f"imported from {path.name}", asked_at=written, system=UNKNOWN, launcher="import", points=listed)
    # Before anything is written, so that the round before it ends at the attempts that there are now.
    store.remember(listing, anew=any((store.points / point.folder_name).exists() for point in points.values()))
    for index, point in points.items():
        attempt = store.new_attempt(point)
        write_record(attempt, _record(point, rows[index], int(attempt.name), written, path.name))
    return done


def _taken(columns: list[TableColumn], rows: list[TableRow]) -> dict[str, list[str]]:
    """Titles by what their columns were taken for: results with their name, unit and the cells that are no number, what was left out with
    the reason."""
    found: dict[str, list[str]] = {kind: [] for kind in ("results", "settings", "parameters", "bookkeeping", "left out")}
    unread: dict[str, list[str]] = {}
    for row in rows:
        of_row = row.energies | {title: row.metrics[name] for name, title in row.sources.items()}
        for title in (title for title, metric in of_row.items() if metric.value is None and title in row.cells):
            unread.setdefault(title, []).append(of_row[title].reason or "no number")
    measured = {
        title: f"{title} = {name} [{row.metrics[name].unit}]"
        for row in reversed(rows)
        for name, title in row.sources.items()
        if row.metrics[name].value is not None
    }
    for title, kind in ((one.title, one.kind) for one in columns):
        blank = not any(title in row.cells for row in rows)
        if title in measured:
            lost = unread.get(title, [])
            found["results"].append(measured[title] + (f" ({len(lost)} of {len(rows)} not known: {lost[0]:.{_LONG}})" if lost else ""))
        elif any(title in row.params for row in rows):
            found["parameters"].append(f"{title} (if it was measured: --result)" if unclear(title) else title)
        elif any(title in row.bookkeeping for row in rows):
            found["bookkeeping"].append(title)
        elif not blank and kind in ("count", "text"):
            found["settings"].append(title)
        else:
            why = "blank" if blank else unread[title][0] if title in unread else "another column says it"
            found["left out"].append(f"{title} ({why if len(why) <= _LONG else f'{why[:_LONG]}...'})")
    if silent := [row for row in rows if "devices" not in row.counts]:
        of_rows = "" if len(silent) == len(rows) else f" in {len(silent)} of {len(rows)} rows"
        several = [row for row in silent if row.counts.get("nodes", 1) > 1]
        gpus = next((title for row in several for title in row.params if name_and_unit(title)[0] in GPUS), None)
        unclear_gpus = f" of all nodes ({gpus} may be those of each)" if gpus else ""
        each = " of each node" if several else ""
        found["assumed"] = [f"one device{each}{of_rows}, as no column Devices says how many{unclear_gpus}"]
    return {kind: told or ["none"] for kind, told in found.items() if told or kind == "results"}


def _see_asked_alike(
    suite: str, there: dict[int, Record], asked: Mapping[str, bool], titles: Collection[str], rounds: Sequence[Record]
) -> None:
    """Raise ``InputError`` for rows that are there with other columns among their results: as new ones they would be measured twice. And
    where what was said of a column, in a row of each of the suite's ``rounds``, is not said again: what is a parameter was averaged."""
    for record, known in itertools.chain(((one, True) for one in there.values()), ((one, False) for one in rounds)):
        before = record.environment.get("asked", {})
        said = before.items() if isinstance(before, dict) else ()
        unsaid = any(title in titles and asked.get(title) != result for title, result in said)
        if unsaid or (known and before != asked):
            words = " ".join(f"--{'result' if result else 'parameter'} {shlex.quote(title)}" for title, result in said)
            hint = f"caraml import TABLE {words}".rstrip() + ", or --suite with another name"
            raise InputError(f"suite {suite!r} has rows imported with other columns as results or parameters", hint)


def _points(path: Path, suite: str, rows: list[TableRow], there: dict[int, Record]) -> dict[int, Point]:
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


def _point(suite: str, row: TableRow) -> Point:
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


def _record(point: Point, row: TableRow, attempt: int, written: str, source: str) -> Record:
    told = {name for name in row.counts if name != "devices" or row.counts["devices"] % row.counts.get("nodes", 1) == 0}
    told |= {name for name in ("system", "precision") if getattr(row, name) is not None}
    told |= {"device", "device_class"} if isinstance(row.system, System) else set()
    named = ("system", "device", "device_class", "devices", "nodes", "global_batch", "software", "precision", "micro_batch", "measure")
    missing: dict[str, JsonValue] = {f"point.{name}": _NOT_THERE for name in named if name not in told}
    missing |= {"window": _NOT_THERE, "energy": _NOT_THERE, "started_at": "not known; the table was written then"}
    measured = any(metric.value is not None for metric in row.metrics.values())
    separated = any(map(SEPARATED.fullmatch, row.cells.values()))
    unread = f" ({', '.join(row.unread[:_SHOWN])}{f'; {DIGITS[4:]}' if separated else ''})" if row.unread else ""
    asked: dict[str, JsonValue] = {"asked": dict(row.around.asked)} if row.around.asked else {}
    facts = Facts(item=row.item or "item", items_per_sample=1, parameters=None, flops_per_item=None, flops_formula=_NOT_THERE)
    return Record(
        key=point.key,
        attempt=attempt,
        point=point,
        status="ok" if measured else "failed",
        reason=f"imported from {source}{'' if measured else f': no number in its row{unread}'}"[:LONGEST],
        started_at=written,
        facts=facts,
        metrics=row.metrics | _following(row),
        environment={"imported_from": source, "row": row.digest, "bookkeeping": row.bookkeeping, "missing": missing} | asked,
    )


def _following(row: TableRow) -> dict[str, Metric]:
    """What follows from a row's numbers, and why its energy per item does not: where no column says either."""
    found = dict[str, Metric]()
    rate, devices = row.metrics.get("throughput"), row.counts.get("devices")
    if rate is not None and rate.value is not None and devices is not None:
        found["throughput_per_device"] = scaled(rate, 1 / devices, rate.unit)
    known = [name for name in ("run_energy", "energy") if name in row.metrics and row.metrics[name].value is not None]
    if known:
        reason = f"the table has an energy ({known[0]}), and not how many items it was for"
        found["energy_per_item"] = Metric(value=None, unit=f"J/{row.item or 'item'}", reason=reason)
    return {name: metric for name, metric in found.items() if name not in row.metrics}


def _known(store: Store, suite: str, rows: list[TableRow]) -> dict[int, Record]:
    """Of those rows that a suite has a record of, by their numbers, the record: the newest of its point, and of no other row.

    Raises ``InputError`` for a suite of an earlier version's rows: nothing in them says whether they are the same.
    """
    listed = {key for listing in store.rounds(suite) for key, _ in listing.points}
    keys = [key for key, name in store.names().items() if name.partition("-")[0].partition("_")[0] == IMPORTED]
    newest = (one for key in keys for one in store.newest(key, 1) if not one.unreadable and (one.point.suite == suite or key in listed))
    there: dict[str, list[Record]] = {}
    for record in sorted(newest, key=lambda record: record.point.repeat):
        digest = record.environment.get("row")
        if not isinstance(digest, str):
            told = f"suite {suite!r} has rows that an earlier version imported, which may be the same"
            raise InputError(f"{store.root}: {told}", "caraml import TABLE --suite with another name")
        there.setdefault(digest, []).append(record)
    found = dict[int, Record]()
    for index, row in enumerate(rows):
        alike = there.get(row.digest, [])
        known = next((one for one in alike if row.energy is None or one.value("run_energy") == row.energy), None)
        if known is not None:
            alike.remove(known)
            found[index] = known
    return found
