"""The HTML page: one self-contained file that opens offline, prints, and explains every number in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from caraml import __version__
from caraml.analysis.raw import Steps, raw_file, read_power, read_steps
from caraml.errors import InputError
from caraml.report import charts
from caraml.report.explain import ENERGY_FIX, definition, energy_reason, flag_meaning, hover, source, window_text
from caraml.report.figure import Figure
from caraml.report.flatten import flat
from caraml.report.labels import labels, printable
from caraml.report.numbers import interval, written
from caraml.results.files import write_atomically
from caraml.results.record import FLAGS, SCHEMA_VERSION, Record
from caraml.results.store import Store
from caraml.suite.model import METHOD_VERSION
from caraml.units import METRICS, title_of

HEADLINE = ("throughput", "energy_per_item", "mfu", "mfu_measured", "step_time_median", "data_wait_share", "peak_memory")


@dataclass(frozen=True)
class Cell:
    """One number of a table: what is written, the exact value for sorting and copying, and what a hover says."""

    metric: str
    text: str
    value: float | None
    tip: str


@dataclass(frozen=True)
class Detail:
    """One number in full."""

    title: str
    cell: Cell
    interval: str
    n: str
    scope: str
    source: str
    note: str


@dataclass(frozen=True)
class Row:
    """One point of the page."""

    key: str
    label: str
    status: str
    reason: str
    flags: list[tuple[str, str]]
    cells: list[Cell]
    details: list[Detail]
    window: str
    folder: str
    files: list[str]
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """Figures under one heading, or the reason why there are none."""

    id: str
    title: str
    figures: list[Figure]
    notes: list[str]


def write_report(store: Store, records: Sequence[Record], path: Path, title: str) -> Path:
    """Write the page of ``records`` to ``path``, whole or not at all, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(store, records, title))
    return path


def page(store: Store, records: Sequence[Record], title: str) -> str:
    """The page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("caraml.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # only for drawings made by caraml.report.svg, whose texts are escaped
    package = files("caraml.report")
    return environment.get_template("page.html.jinja").render(
        **_content(store, records),
        title=printable(title),
        style=Markup(package.joinpath("style.css").read_text(encoding="utf-8")),
        script=Markup(package.joinpath("page.js").read_text(encoding="utf-8")),
    )


def _content(store: Store, records: Sequence[Record]) -> dict[str, Any]:
    named = labels(records)
    rows = [_row(store, record, named[record.key]) for record in records]
    used = {flag for record in records for flag in _flags(record)}
    names = dict.fromkeys([*HEADLINE, *(name for record in records for name in record.metrics)])
    return {
        "rows": rows,
        "unfinished": [row for row in rows if row.status != "ok"],
        "headings": [(name, _heading(name), definition(name)) for name in HEADLINE],
        "sections": _sections(store, records, named),
        "summary": _summary(records),
        "environment": _environment(records, named),
        "definitions": [(name, _heading(name), METRICS[name].unit if name in METRICS else "", definition(name)) for name in names],
        "flags": [(flag, flag_meaning(flag)) for flag in sorted(used | FLAGS.keys())],
        "energy_reasons": sorted({reason for record in records if (reason := energy_reason(record))}),
        "energy_fix": ENERGY_FIX,
        "versions": {"caraml": __version__, "schema": SCHEMA_VERSION, "method": METHOD_VERSION},
    }


def _heading(name: str) -> str:
    return title_of(name) if name in METRICS else name


def _flags(record: Record) -> list[str]:
    """Flags of the record and of its energy. That a sensor is missing is said by the energy's own cell."""
    energy = record.energy.flags if record.energy is not None and energy_reason(record) is None else []
    return list(dict.fromkeys([*record.flags, *energy]))


def _row(store: Store, record: Record, label: str) -> Row:
    folder = store.folder(record).relative_to(store.root).as_posix()
    return Row(
        key=record.key,
        label=label,
        status=record.status,
        reason=record.reason or "",
        flags=[(flag, flag_meaning(flag)) for flag in _flags(record)],
        cells=[_cell(record, name) for name in HEADLINE],
        details=[_detail(record, name) for name in record.metrics],
        window=window_text(record),
        folder=folder,
        files=["record.json", *record.files.values()],
        facts=flat(record.facts.model_dump(mode="json")) if record.facts is not None else [],
    )


def _cell(record: Record, name: str) -> Cell:
    metric = record.metrics.get(name)
    text = written(name, metric) if metric is not None and metric.value is not None else ""
    if not text and record.window is not None:
        text = "no sensor" if name == "energy_per_item" else "not known"
    return Cell(name, text, metric.value if metric is not None else None, hover(record, name))


def _detail(record: Record, name: str) -> Detail:
    metric = record.metrics[name]
    return Detail(
        title=title_of(name, record.item) if name in METRICS else name,
        cell=_cell(record, name),
        interval=interval(name, metric) or "",
        n=f"{metric.n:,}" if metric.n else "",
        scope=metric.scope or "",
        source=source(record, name) if metric.value is not None else "",
        note=metric.reason or "",
    )


def _sections(store: Store, records: Sequence[Record], named: dict[str, str]) -> list[Section]:
    steps, faults = _read_steps(store, records)
    nothing = [] if steps or faults else ["No step tables: nothing was measured."]
    times = [*charts.phases(records), *charts.step_distributions(records, steps), *charts.over_steps(charts.STEP_TIME, records, steps)]
    losses = charts.over_steps(charts.LOSS, records, steps)
    no_loss = [] if losses or nothing else ["No losses: nothing was trained."]
    throughput = charts.throughput(records)
    return [
        Section("throughput", "Throughput", throughput, [] if throughput else ["No point has a throughput."]),
        Section("times", "Where the time went", times, faults + nothing),
        Section("loss", "Training loss", losses, no_loss + nothing),
        _power(store, records, named),
    ]


def _read_steps(store: Store, records: Sequence[Record]) -> tuple[dict[str, Steps], list[str]]:
    """The steps of every record that has them, and what could not be read: a broken file costs its lines, not the page."""
    steps, faults = {}, []
    for record in records:
        path = raw_file(store, record, "steps")
        if path is None:
            continue
        try:
            steps[record.key] = read_steps(path)
        except InputError as error:
            faults.append(_relative(store, error))
    return steps, faults


def _power(store: Store, records: Sequence[Record], named: dict[str, str]) -> Section:
    figures, notes = [], []
    for record in records:
        path = raw_file(store, record, "power")
        if path is None:
            continue
        try:
            figure = charts.power(record, named[record.key], read_power(path))
        except InputError as error:
            notes.append(_relative(store, error))
            continue
        if figure is not None:
            figures.append(figure)
    silent = [named[record.key] for record in records if energy_reason(record) is not None]
    if silent:
        notes.append(f"No energy for {', '.join(silent)}; the reason stands below the table of results.")
    elif not figures:
        notes.append("No power was recorded.")
    return Section("power", "Power", figures, notes)


def _relative(store: Store, error: InputError) -> str:
    """An error without the folder of this machine."""
    return str(error).replace(f"{store.root}/", "")


def _summary(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The lines below the title: what ran where, when, on which software."""
    dates = sorted(record.started_at[:16].replace("T", " ") for record in records)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "–"
    statuses = [record.status for record in records]
    outcome = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return [
        ("Suite", _joined(record.point.suite for record in records)),
        ("Machine", _joined(f"{record.point.device} ({record.point.system})" for record in records)),
        ("Date", when),
        ("Software", _joined(record.point.software for record in records)),
        ("Points", outcome or "none"),
    ]


def _joined(values: Any) -> str:
    return "; ".join(dict.fromkeys(map(printable, values))) or "–"


def _environment(records: Sequence[Record], named: dict[str, str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every setting once, with its value; where points differ, each value with the points that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    told = [record for record in records if record.environment or record.system]
    for record in told:
        for name, value in flat({"system": record.system, **record.environment}):
            found.setdefault(name, {}).setdefault(value, []).append(named[record.key])
    return [
        (name, [(value, "" if len(points) == len(told) else ", ".join(points)) for value, points in values.items()])
        for name, values in found.items()
    ]
