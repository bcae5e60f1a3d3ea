"""The report of a set of records as sections, in the order in which the page, Markdown and exported figures have them; and as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from caraml.analysis.bottleneck import Partners, bottleneck
from caraml.analysis.estimate import differs, pairs_of, time_of, values
from caraml.analysis.grouping import counting, disturbances, valid
from caraml.analysis.run_variation import INTERVAL, estimates, mean_of
from caraml.analysis.table import Steps, flat_table, raw_file, raw_files, read_steps, to_csv
from caraml.analysis.table import rows as flat_rows
from caraml.base.chart import standalone
from caraml.base.errors import InputError
from caraml.base.files import make_folder, write_file
from caraml.base.format import count, percent, printable, some
from caraml.metrics.energy import NO_ENERGY
from caraml.metrics.model import title_of
from caraml.report import figures, published, scaling, times
from caraml.report import section as text
from caraml.report.grouping import (
    COST,
    MOST_SERIES,
    NODE,
    TOTAL,
    Quantity,
    Repeats,
    labels,
    labels_and_statuses,
    machine,
    repeated,
    several_boundaries,
    single,
    unknown_energy,
)
from caraml.report.section import ReportFigure, Section, energy_reason, flat, half_width, written
from caraml.report.series import first_line, power_figure, read_traces
from caraml.report.works import by_boundary, runs_of, works
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.model import NOT_STATED

HEADLINE = ("throughput", "energy_per_item", "mfu", "mfu_measured", "share_of_limit", "step_time_median", "data_wait_share", "peak_memory")
"""Metrics of the table of results, the first two always, others where they are known; the rest stand among the numbers of a point."""
MOST_TRACES = 6
"""Points whose power is a figure of its own; of any other, the page draws it on demand."""
MOST_NAMED = 8
"""Points that a note names."""
MOST_POINTS, MOST_VALUES = 6, 12
"""Points that the environment names where values differ, of more their number; and values that it lists."""
MOST_WORKS = 4
"""Works whose best the summary names."""
PIXELS = 3
"""Pixels of a PNG for each one of the drawing: about 290 per inch at the size of a column."""


@dataclass(frozen=True)
class ResultCell:
    """One number of the table: what is written, and the exact value for sorting and copying."""

    text: str
    value: float | None


@dataclass(frozen=True)
class ResultRow:
    """The runs of one work in the table of results."""

    key: str
    label: str
    count: str
    """How many runs have a result; empty for a single one."""
    runs: list[tuple[str, str, str]]
    """Key, label and status of each of several."""
    machine: str
    workload: str
    status: str
    reason: str
    """Why there is no number, or why some run has none."""
    flags: list[str]
    cells: list[ResultCell]
    """Empty for a point without a window."""
    folder: str


def result_rows(store: Store, lines: Sequence[Repeats], named: Mapping[str, str]) -> list[ResultRow]:
    """A row for each work, in their order, with cells of :func:`headline`. ``named``: labels of single runs."""
    columns = headline(lines)
    means, apart = labels([line.mean for line in lines]), several_boundaries(line.mean for line in lines)
    return [
        ResultRow(
            key=line.key,
            label=means[record.key],
            count=line.count if len(line.runs) > 1 else "",
            runs=[(run.key, named[run.key], run.status) for run in line.runs] if len(line.runs) > 1 else [],
            machine=printable(machine(record.point)),
            workload=record.point.workload,
            status=record.status,
            reason=record.reason or line.lost,
            flags=list(dict.fromkeys(flag for run in line.good or [record] for flag in flags(run))),
            cells=[cell(record, name, line.good, apart) for name in columns] if record.metrics else [],
            folder=folder_of(store, record),
        )
        for line in lines
        for record in [line.mean]
    ]


def flags(record: Record) -> list[str]:
    """Flags of the record and of its energy. That a sensor is missing is said by the energy's own cell."""
    energy = record.energy.flags if record.energy is not None and energy_reason(record) is None else []
    return list(dict.fromkeys([*record.flags, *energy]))


def folder_of(store: Store, record: Record) -> str:
    """Where a record lies, below the results."""
    return store.folder(record).relative_to(store.root).as_posix()


def headline(lines: Sequence[Repeats]) -> list[str]:
    """The metrics of the table of results that at least one line of it has."""
    return [name for name in HEADLINE if name in HEADLINE[:2] or any(line.mean.value(name) is not None for line in lines)]


def cell(record: Record, name: str, runs: Sequence[Record] = (), apart: bool = False) -> ResultCell:
    """A metric of a record, or of the mean of some runs, as the table has it. ``apart``: energies with their boundary, as it differs."""
    metric = record.metrics.get(name)
    text = written(name, metric) if metric is not None and metric.value is not None else ""
    text += f" ({printable(metric.scope or NOT_STATED)})" if text and metric is not None and apart and name == COST.name else ""
    if not text and record.window is not None:
        unknown = unknown_energy(record, runs) if name == "energy_per_item" else None
        text = unknown[0] if unknown else "not known"
    return ResultCell(text, metric.value if metric is not None else None)


def summary(records: Sequence[Record], lines: Sequence[Repeats]) -> list[tuple[str, str]]:
    """The lines below the title: what ran where, when, on which software; how good the numbers are, the best of them, what limits it, and
    what to do next."""
    dates = [started[:16].replace("T", " ") for started in sorted((record.started_at for record in records), key=time_of)]
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "–"
    return [
        ("Suite", _joined(record.point.suite for record in records)),
        ("Machine", _joined(f"{record.point.device} ({record.point.system})" for record in records)),
        ("Date", when),
        ("Software", _joined(record.point.software for record in records)),
        ("Points", outcome(records) or "none"),
        *findings(lines),
    ]


_LIMITS = {"compute": "arithmetic", "memory and overhead": "memory traffic, launches or slow kernels"}
"""What limits a rate, for those who have not read how shares of the time are called."""


def findings(lines: Sequence[Repeats]) -> list[tuple[str, str]]:
    """What the results of all works say, a sentence each; nothing where there is no result."""
    good = [line for line in lines if line.mean.value("throughput") is not None and line.good]
    if not good:
        return _next_steps(lines, [])
    named = labels([line.mean for line in good])
    disturbed = [line for line in good if disturbances(line.good)]
    calm = [line for line in good if not disturbances(line.good)]
    rates = [line.mean.metrics["throughput"] for line in good]
    widths = [width / rate.value for rate in rates if rate.value and (width := half_width(rate)) is not None]
    told = f"rates are known to ± {percent(median(widths), 2)} (median)" if widths else "no rate has an interval"
    told += f", {len(rates) - len(widths)} of {len(rates)} without an interval" if widths and len(widths) < len(rates) else ""
    imprecise = [line for line in good if "imprecise" in line.mean.flags]
    told += f"; {len(imprecise)} of {len(good)} less precise than asked for" if imprecise else ""
    told += f"; {len(disturbed)} of {len(good)} disturbed" if disturbed else "; nothing disturbed them"
    searched = sum("disturbed_probe" in line.mean.flags for line in good)
    told += f"; the search for the limit was disturbed in {searched} of {len(good)}" if searched else ""
    dropped = sum(len(valid(line.runs)) - len(line.good) for line in good)
    told += f"; {count(dropped, 'disturbed run')} left out" if dropped else ""
    found, runs = [("Quality", told)], {line.mean.key: line.good for line in good}
    for title, quantity, sign in (("Fastest", TOTAL, -1), ("Least energy", COST, 1)):
        best = []
        for group in works([line.mean for line in good]).values():
            having = [(record.key, [record]) for record in group if (record.value(quantity.name) or 0.0) > 0]
            for boundary, alike, _ in by_boundary(having, (quantity,)) if having else []:
                choices = counting(runs_of(alike))
                record = min(choices, key=lambda record: sign * (record.value(quantity.name) or 0.0))
                best.append(f"{named[record.key]}{boundary}: {_picked(quantity, record, runs, choices)}")
        different = list(dict.fromkeys(best))  # where two works meet, one point may be the best of both
        found += [(title, some(different, MOST_WORKS, "; ") + " in the table" * (len(different) > MOST_WORKS))] if best else []
    partners = Partners(line.mean for line in good)
    limits = Counter(bottleneck(line.mean, partners).word for line in calm)  # others' work takes time, too, and is no limit of the device
    which = [f"{_LIMITS.get(word, word)}: {number} of {len(calm)}" for word, number in limits.most_common()]
    found += [("Limited by", "; ".join(which))] if which else []
    return found + _next_steps(lines, [*disturbed, *imprecise])


def _picked(quantity: Quantity, best: Record, runs: Mapping[str, Sequence[Record]], choices: Sequence[Record]) -> str:
    """The best of several ``choices``, which is also the luckiest: with an interval that holds for all of them at once, and how many others
    cannot be told from it, by the test of ``caraml advise``; ``runs``: of each choice, by its key."""
    own, mean = best.metrics[quantity.name], mean_of(values(runs[best.key], quantity.name), quantity.name)
    found = dict(zip((one.key for one in choices), estimates([runs[one.key] for one in choices], quantity.name)[0], strict=True))
    if len(choices) < 2 or mean is None or not any(one is not None and one.sd for one in found.values()):
        return quantity.text(own)
    wide = mean.for_all_of(len(choices))
    picked = own.model_copy(update={"low": wide.low, "high": wide.high})
    first = found.pop(best.key)
    ratios = [one.over(first) for one in found.values() if one is not None and first is not None]
    ties = sum(not differs(ratio, pairs_of(len(choices))) for ratio in ratios)
    told = ", by an interval that holds for all at once" if mean.sd else ""
    told += f", {ties} other{'s' * (ties > 1)} may be as good" if ties else ""
    return f"{quantity.text(picked)} (picked as the best of {len(choices)}{told})"


def _next_steps(lines: Sequence[Repeats], doubtful: Sequence[Repeats]) -> list[tuple[str, str]]:
    """What a reader can do about what is missing or doubtful, else how to go on."""
    runs = [record for line in lines for record in line.runs]
    if not runs:
        return []
    steps = []
    if lost := [record for record in runs if record.status not in ("ok", "skipped")]:
        told = f"says what went wrong with {printable(lost[0].point.label)} ({lost[0].status})"
        steps.append(f"caraml logs {lost[0].key} {told}; caraml retry {lost[0].point.suite} tries again")
    if doubtful:
        suites = " ".join(dict.fromkeys(record.point.suite for line in doubtful for record in line.runs))
        steps.append(f"measure again what was disturbed or is imprecise, on a quiet machine or for longer: caraml retry {suites}")
    if any(energy_reason(record) not in (None, NO_ENERGY) and record.value("node_energy") is None for record in runs):
        steps.append("energy: caraml doctor names the sensors of this machine and what they need")
    if len([line for line in lines if line.good]) > 1:
        only = {record.point.suite for record in runs}
        name = f" {only.pop()}" if len(only) == 1 else ""
        steps.append(f"caraml advise{name} compares what can be chosen, such as batch, precision and devices")
    return [("Next", "; ".join(steps))] if steps else []


def outcome(records: Sequence[Record]) -> str:
    """How many records have which status."""
    statuses = [record.status for record in records]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def _joined(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(map(printable, values))) or "–"


def unfinished(store: Store, records: Sequence[Record], named: Mapping[str, str]) -> Section:
    """The runs without a result, and why."""
    table = result_rows(store, single(records), named)
    rows = [[row.label, row.status, row.reason or "no reason recorded", row.folder] for row in table if row.status != "ok"]
    return Section("Points without a result", ["point", "status", "reason", "folder"], rows, id="unfinished")


def environment(records: Sequence[Record], named: Mapping[str, str]) -> Section:
    """Every setting once, with its value; where points differ, each value with the points that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    told = [record for record in records if record.environment or record.system]
    for record in told:
        for name, value in flat({"system": record.system, **record.environment}):
            found.setdefault(name, {}).setdefault(value, []).append(named[record.key])

    def of(value: str, having: list[str]) -> str:
        if len(having) == len(told):
            return value
        return f"{value} ({', '.join(having) if len(having) <= MOST_POINTS else f'{len(having)} points, such as {having[0]}'})"

    rows = [[name, some([of(*each) for each in values.items()], MOST_VALUES, "\n")] for name, values in found.items()]
    notes = [] if rows else ["No environment was recorded."]
    return Section("Environment", ["setting", "value"], rows, notes, id="environment")


def figure_sections(store: Store, records: Sequence[Record]) -> list[Section]:
    """All figures that the records allow, and why one is missing."""
    steps, faults = _read_steps(store, records)
    rates, more_rates = figures.over_batch(records)
    nothing = [] if steps or faults else ["No step tables: nothing was measured."]
    (parts, no_parts), (epochs, no_epochs) = times.runtime_parts(records), times.epochs(records)
    clock = [
        *parts,
        *(times.phases(records) if len(records) <= times.MOST_PHASES else []),
        *epochs,
        *times.step_distributions(records, steps),
        *times.over_steps(times.STEP_TIME, records, steps),
    ]
    losses = times.over_steps(times.LOSS, records, steps)
    no_loss = [] if losses or nothing else ["No losses: nothing was trained."]
    energies = [draw(records) for draw in (figures.time_and_energy, figures.node_and_devices, figures.action)]
    energy, no_energy = [one for drawn, _ in energies for one in drawn], [note for _, notes in energies for note in notes]
    growth, more_growth = scaling.efficiencies(records)
    found: list[tuple[str, str, list[ReportFigure], list[str]]] = [
        ("throughput", "Rate and batch", rates, more_rates if rates else ["No point has a throughput."]),
        ("maps", "Machines and batches", *figures.heat_maps(records)),
        ("limits", "Distance to the limit", *figures.rooflines(records)),
        ("energy", "Time and energy", energy, no_energy),
        ("scaling", "Scaling", [*growth, *scaling.matrices(records)], more_growth),
        ("times", "Where the time went", clock, [*no_parts, *no_epochs, *faults, *nothing]),
        ("loss", "Training loss", losses, no_loss + nothing),
        ("power", "Power", *_power(store, records)),
        ("history", "Results over time", *scaling.histories(store, records)),
        ("published", "Beside published results", *published.beside(records)),
    ]
    return [Section(title, notes=notes, figures=drawn, id=name) for name, title, drawn, notes in found if drawn or notes]


def _read_steps(store: Store, records: Sequence[Record]) -> tuple[dict[str, Steps], list[str]]:
    """The steps of the records that figures draw, those with a result first, and what could not be read: a broken file costs its lines,
    not the page."""
    steps: dict[str, Steps] = {}
    faults = []
    drawn: dict[str, int] = {}
    for record in sorted(records, key=lambda record: record.status != "ok"):
        path = raw_file(store, record, "steps")
        if path is None or drawn.get(record.point.benchmark, 0) >= MOST_SERIES:
            continue
        try:
            steps[record.key] = read_steps(path, in_step=record.point.in_step)
        except InputError as error:
            faults.append(first_line(store, error))
            continue
        drawn[record.point.benchmark] = drawn.get(record.point.benchmark, 0) + 1
    return steps, faults


def _power(store: Store, records: Sequence[Record]) -> tuple[list[ReportFigure], list[str]]:
    named = labels_and_statuses(records)
    with_power = [record for record in records if raw_files(store, record, "power")]
    traces, notes = read_traces(store, with_power[:MOST_TRACES])
    drawn = [power_figure(record, named[record.key], traces[record.key]) for record in with_power[:MOST_TRACES] if record.key in traces]
    if len(with_power) > MOST_TRACES:
        notes.append(f"The first {MOST_TRACES} of {len(with_power)} points; choose any point under One point in full to see its power.")
    silent = [named[record.key] for record in records if energy_reason(record) is not None and NODE.of([record]) is None]
    if silent:
        notes.append(f"No energy for {some(silent, MOST_NAMED)}; the reason stands below the table of results.")
    elif not with_power:
        notes.append("No power was recorded.")
    return [figure for figure in drawn if figure is not None], notes


def markdown(store: Store, records: Sequence[Record], title: str) -> str:
    """The table of results, what has no result, and the numbers of every figure, as Markdown."""
    named = labels(records)
    lines = repeated(records)
    table = result_rows(store, lines, named)
    rows = [[row.label, row.status, row.count or "1", ", ".join(row.flags), *(one.text for one in row.cells)] for row in table if row.cells]
    results = Section("Results", ["point", "status", "runs", "flags", *map(title_of, headline(lines))], rows, [INTERVAL])
    about = Section(notes=[f"{name}: {value}" for name, value in summary(records, lines)])
    tables = [section for section in (results, unfinished(store, records, named)) if section.rows]
    return f"# {text.escaped_markdown(title)}\n\n" + text.markdown([about, *tables, *figure_sections(store, records)])


def csv_text(records: Sequence[Record]) -> str:
    """Every metric of every record as CSV, numbers exact and unscaled, the unit in the heading."""
    columns, lines, units = flat_table(flat_rows(records))
    return to_csv(columns, list(map(safe_cells, lines)), units)


def safe_cells(line: Sequence[Any]) -> list[Any]:
    """A line of CSV whose texts no spreadsheet takes for a formula: those that begin like one get an apostrophe in front."""
    return [f"'{cell}" if isinstance(cell, str) and cell.lstrip().startswith(("=", "+", "-", "@")) else cell for cell in line]


def write_figures(store: Store, records: Sequence[Record], folder: Path, kind: str) -> list[Path]:
    """Write every figure of the records into ``folder`` as ``svg``, ``pdf`` or ``png``, numbered in the order of the page.

    Raises ``InputError`` if there is none.
    """
    found = [figure for section in figure_sections(store, records) for figure in section.figures]
    if not found:
        raise InputError("these results allow no figure: no point has a number")
    make_folder(folder)
    paths = []
    for number, figure in enumerate(found, start=1):
        paths.append(folder / f"{number:02d}-{figure.slug}.{kind}")
        write_file(paths[-1], _file(standalone(figure.drawings, figure.title, figure.legend, figure.key), kind))
    return paths


def _file(svg: str, kind: str) -> str | bytes:
    """An SVG document in the format of a file."""
    if kind == "svg":
        return svg
    import vl_convert

    return vl_convert.svg_to_pdf(svg) if kind == "pdf" else vl_convert.svg_to_png(svg, scale=PIXELS)
