"""A row of a result table of JUBE, sorted by what it means: metrics, parameters, counts and what tells runs of the same work apart.

Only columns whose meaning is certain from their name become CARAML's own metrics, in its units; other results keep their name and unit, and
all else becomes parameters. Energy is that of jpwr, around the whole program of each rank: of a run and not of the rate's window.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue

from caraml.base.errors import InputError, in_a_line
from caraml.base.format import JOULES_PER_WATT_HOUR
from caraml.metrics.model import METRICS as DEFINED
from caraml.metrics.model import Metric
from caraml.results.cells import LONGEST, SEPARATED, UNITS, name_and_unit, number, numbers, read_rows
from caraml.results.columns import BELOW_ZERO, MEASURED, SIGNED, TableColumn, counts_of, own_unit
from caraml.suite.jube_script import PRECISIONS
from caraml.suite.model import Stated
from caraml.system.model import System

NO_UNIT = "?"
_ENERGIES = ("energyfile", "energy_per_device", "energy_counter_per_device")
DIGITS = "and numbers are read with a decimal point and without separators"
_OF_JPWR = "of the whole program, as jpwr measures it; not of the rate's window"


@dataclass(frozen=True)
class Around:
    """What the rows of a table have in common."""

    columns: list[TableColumn]
    asked: Mapping[str, bool]
    """Titles of which the user said whether they are results."""
    systems: dict[str, System]
    """By each of their names, in lower case."""
    folder: Path
    """Of the table: files that it names lie beside it."""
    energies: dict[str, dict[str, float] | str] = field(default_factory=dict)
    """By the name of a file of energies, that of each node [Wh], or why it is not known."""


class TableRow:
    """One row, sorted by what it means; :func:`take_energies` of all rows follows."""

    def __init__(self, cells: dict[str, str], around: Around) -> None:
        self.cells = {title: text for title, text in cells.items() if text}
        """As the table has them, without those that are blank."""
        self.params, self.bookkeeping = dict[str, JsonValue](), dict[str, JsonValue]()
        self.metrics = dict[str, Metric]()
        self.sources = dict[str, str]()
        """By a metric's name, the title of the column that it is from."""
        self.counts = counts_of(cells)
        """``global_batch``, ``nodes`` and ``devices`` (of all nodes), where the table says them."""
        self.system: System | str | None = None
        self.precision: Stated | None = None
        self.around = around
        rates = {one.title: one.name for one in around.columns if one.kind == "rate"}
        self._rate, self.item = _rate(cells, rates)
        if rates and not self._rate:
            reason = f"the row has a number in none of {', '.join(rates)}"[:LONGEST]
            self.metrics["throughput"] = Metric(value=None, unit="item/s", reason=reason)
        energies = dict[str, Metric]()
        for column in around.columns:
            self._take(column, cells[column.title], energies)
        self.energies = dict(sorted(energies.items(), key=lambda one: _ENERGIES.index(name_and_unit(one[0])[0])))
        """Of the run [J] by the titles of their columns: that of a file first, then jpwr's, then a counter's."""

    def _take(self, column: TableColumn, text: str, energies: dict[str, Metric]) -> None:
        title, (name, unit) = column.title, name_and_unit(column.title)
        match column.kind:
            case "rate" if title == self._rate:
                self._put("throughput", title, _positive(text, f"{self.item}/s"))
            case "rate":
                if text and column.name != self.item:  # columns of one item say the same
                    self._add(title, text, name)
            case "flops":
                self._put("achieved_flops_per_device", title, _positive(text, "FLOP/s", 1e12))
            case "file" if text:
                energies[title] = _energy_file(Path(text).name, self.around, self.counts.get("nodes"))
            case "energy":
                energies[title] = _energy(text, self.counts.get("devices"), UNITS["J"][unit or ""])
            case "result":
                self._add(title, text, column.name)
            case "count" if column.name in self.counts:
                pass
            case "text" if text and name == "system":
                self.system = self.around.systems.get(text.casefold(), text)
            case "text" if name == "precision" and (stated := PRECISIONS.get(text, PRECISIONS.get(text.lower()))) is not None:
                self.precision = stated
            case kind if text:
                (self.bookkeeping if kind == "bookkeeping" else self.params)[title] = text

    def _put(self, name: str, title: str, metric: Metric) -> None:
        """One that is there with a number stays: columns of one quantity do not differ."""
        if name not in self.metrics or self.metrics[name].value is None:
            self.metrics[name], self.sources[name] = metric, title

    def _add(self, title: str, text: str, name: str) -> None:
        """A result under the name of its column, in CARAML's unit where that is one of CARAML's; where it has no such unit, beside that."""
        plain, unit = name_and_unit(title)
        value, reason = number(text), None if unit else "the table gives no unit"
        if plain in DEFINED and plain not in SIGNED and value is not None and value < 0:
            value, text = None, f"{text}, {BELOW_ZERO}"
        if plain in DEFINED:
            own, factor = own_unit(DEFINED[plain].unit, unit, self.item)
            if factor is None:
                name = f"{name}_in_table"
            elif plain not in self.metrics or self.metrics[plain].unit == own:
                name, unit, reason = plain, own, f"the table's {title!r}, of whatever it was measured around"
                value = value * factor if value is not None else None
        self._put(name, title, Metric(value=value, unit=unit or NO_UNIT, reason=reason if value is not None else _blank(text)))

    @property
    def energy(self) -> float | None:
        """What its file of energies says [J]; ``None`` without one."""
        return next((metric.value for title, metric in self.energies.items() if name_and_unit(title)[0] == "energyfile"), None)

    @property
    def digest(self) -> str:
        """Hash of what the row says: by it its record is found again, whatever CARAML makes of it."""
        return hashlib.sha256(f"[{json.dumps(sorted(self.cells.items()))}, null]".encode()).hexdigest()[:16]

    @property
    def unread(self) -> list[str]:
        """Why it has no number, cell by cell."""
        kinds = {one.title: one.kind for one in self.around.columns}
        if any(kind in MEASURED for kind in kinds.values()):
            return [f"{title} is {text!r}" for title, text in self.cells.items() if kinds[title] in MEASURED and number(text) is None]
        numbered = (title for title, text in self.cells.items() if kinds[title] != "count" and number(text) is not None)
        return [f"{title} is a parameter by its name" for title in numbered]


def _rate(cells: dict[str, str], rates: dict[str, str]) -> tuple[str, str | None]:
    """The title of the row's own rate, and what it counts: a table may have a column for each thing that is counted. Without a number it is
    what all columns count, or not known."""
    known = [title for title in rates if (number(cells[title]) or 0) > 0]
    told = [title for title in rates if cells[title]]
    alike = (titles for titles in (told, [*rates]) if len({rates[title] for title in titles}) == 1)
    own = next(iter(known or next(alike, [])), "")
    return own, rates.get(own)


def take_energies(rows: list[TableRow]) -> None:
    """Make energies metrics: ``run_energy`` is jpwr's, of a file before that of a column, or the counter's if no row has one of jpwr's, so
    that repeats have theirs by one meter. What others say has names of its own."""

    def of_counter(title: str) -> bool:
        return name_and_unit(title)[0] == _ENERGIES[-1]

    told = {of_counter(title) for row in rows for title, metric in row.energies.items() if metric.value is not None}
    counted_only = told == {True}
    for row in rows:
        meters = [title for title in row.energies if of_counter(title) == counted_only]
        known = (title for title in meters if row.energies[title].value is not None)
        own = next(known, next(iter(meters), ""))
        for title, metric in row.energies.items():
            name, reason = "run_energy", metric.reason
            if title != own:
                name, reason = f"run_energy_by_{name_and_unit(title)[0]}", f"the table's {title!r}, of all devices; run_energy is not by it"
            if title == own or (metric.value is not None and name not in row.metrics):
                row.metrics[name], row.sources[name] = metric.model_copy(update={"reason": reason}), title


def _positive(text: str, unit: str, factor: float = 1.0) -> Metric:
    """A rate, which is above zero."""
    value = number(text)
    known = value is not None and value > 0
    return Metric(value=factor * value if known and value is not None else None, unit=unit, reason=None if known else _blank(text))


def _energy(text: str, devices: int | None, joules: float) -> Metric:
    """Energy of all devices from the column of one device's, or of the list of all; ``joules`` of its unit."""
    reason = None if devices is not None else "the table gives one device's and not how many there were"
    each = numbers(text)
    value = None if None in each else sum(one for one in each if one is not None)
    if text.startswith("["):
        wrong = f"the table has {len(each)} devices' and says that there were {devices}" if devices not in (None, len(each)) else None
        devices, reason = 1, wrong
    if value is None or value <= 0:
        reason = _blank(text)
    if reason is not None or value is None or devices is None:
        return Metric(value=None, unit="J", reason=reason)
    return Metric(value=value * devices * joules, unit="J", reason=_OF_JPWR)


def _energy_file(name: str, around: Around, count: int | None) -> Metric:
    """Energy [J] in a file of energies; ``count``: of nodes, as the table of results says."""
    if name not in around.energies:  # rows of one file
        around.energies[name] = energy_of_nodes(around.folder / name)
    found = around.energies[name]
    if isinstance(found, str):
        return Metric(value=None, unit="J", reason=found)
    if count not in (None, len(found)):
        return Metric(value=None, unit="J", reason=f"{name} has {len(found)} of the {count} nodes")
    return Metric(value=sum(found.values()) * JOULES_PER_WATT_HOUR, unit="J", reason=_OF_JPWR)


def energy_of_nodes(path: Path) -> dict[str, float] | str:
    """Energy [Wh] of each node in the table that CARAML's scripts make of jpwr's, or why it is not known.

    The table has a row for each rank, each of which has all devices of its node.
    """
    try:
        rows = read_rows(path)
    except InputError as error:
        return f"its energy is in a file of its own that is not beside the table: {in_a_line(error)}"[:LONGEST]
    devices = [name for name in rows[0] if re.fullmatch(r"(pynvml|rocm|gc):\d+", name)]
    nodes: dict[str, list[float]] = {}
    for index, row in enumerate(rows, 1):
        each = [(name, number(row[name])) for name in devices]
        told = [(name, value) for name, value in each if value is not None]
        if not told or len(told) < len(each):
            return f"{path.name} has no energy of each device, or not of every rank"
        if below := next((name for name, value in told if value < 0), None):
            return f"{path.name}: row {index} below the header: found {below!r} of {row[below]!r}, {BELOW_ZERO}"[:LONGEST]
        nodes.setdefault(row.get("nodename", ""), []).append(sum(value for _, value in told))
    return {name: fmean(ranks) for name, ranks in nodes.items()}


def _blank(text: str) -> str:
    if not text:
        return "the table's cell is blank"
    return f"the table has {text!r} here{f', {DIGITS}' if SEPARATED.fullmatch(text) else ''}"
