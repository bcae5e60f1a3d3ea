"""Records in a terminal: a table of many, and everything about one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from caraml.analysis.run_variation import INTERVAL
from caraml.base.errors import in_words
from caraml.base.format import count, human, printable
from caraml.metrics.model import METRICS, QUALITY, Metric, definition_of, title_of
from caraml.power.model import WindowEnergy
from caraml.report.grouping import Repeats, labels, repeated, several_boundaries, single, unknown_energy
from caraml.report.section import costliest, energy_reason, flag_meaning, flag_text, flat, plain, source, uncertainty, window_text, written
from caraml.report.tables import STYLES, Footnotes, plain_table
from caraml.results.record import Record
from caraml.suite.model import NOT_STATED

WIDE = 110
"""From this width on no number is wrapped and flags are named in the row."""
COLUMN_WIDTHS = (("Point", 12), ("Status", 7), ("Throughput", 15), ("Energy", 14), ("MFU", 8), ("Step", 7), ("Wait", 5), ("GiB", 5))
"""Widths in 80 columns, with one space between."""
RUNS = ("n", 3)
"""The column of the number of runs, where some work was repeated: from the width of the first."""
WINDOW_INTERVAL = "intervals: 95 %, of the run's own window; what changes from run to run is not in them"
MFU_NOTE = "MFU s: of the data sheet's peak; m: of the fastest kernel measured on this device"
LIMIT_NOTE = "below it, the share of what the device can reach at this intensity; bound by mem: memory, LLC: cache, ops: arithmetic"
SHOWN = (
    *("throughput", "throughput_without_wait", "energy_per_item", "node_energy", "mfu", "mfu_measured", "share_of_limit"),
    *("step_time_median", "data_wait_share", "peak_memory"),
)
"""Metrics that the table of results needs."""
MOST_SKIPPED = 3
"""Points without a run that get a row each; more of them would hide those that ran."""
_BOUND = {"memory": "mem", "cache": "LLC", "arithmetic": "ops"}


def results_table(records: Sequence[Record], runs: bool = False) -> RenderableType:
    """A row for all repeats of a work, or for each of the ``runs``, and below it the reasons that the rows refer to.

    Fits 80 columns, and uses more where there are.
    """
    return _Results(single(records) if runs else repeated(records, SHOWN), runs)


class _Results:
    """Chooses its layout by the width that it is given."""

    def __init__(self, lines: Sequence[Repeats], runs: bool) -> None:
        self.lines, self.runs = lines, runs
        self.counted = any(len(line.runs) > 1 for line in lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        notes, records = Footnotes(), [line.mean for line in self.lines]
        names = labels(records)
        titles = [title for title, _ in COLUMN_WIDTHS[: _fitting(options.max_width)]]
        table = _columns(wide, self.counted, len(titles))
        skipped = [record for record in records if record.status == "skipped"]
        apart = several_boundaries(records)
        summed = skipped if len(skipped) > MOST_SKIPPED else []
        for line in (line for line in self.lines if not (summed and line.mean.status == "skipped")):
            runs = [_text(line.count)] if self.counted else []
            cells = (_text(cell) for cell in islice(_numbers(line, notes, apart), len(titles) - 2))
            table.add_row(_text(names[line.mean.key]), _status(line, notes, wide), *runs, *cells)
        yield table
        if summed:
            first = f"{names[summed[0].key]}: {summed[0].reason or 'no reason given'}"
            yield _text(f"{len(summed):,} points skipped, the first {first}; `caraml plan` says why for each", "dim")
        if left_out := [title for title, _ in COLUMN_WIDTHS[len(titles) :]]:
            yield _text(f"no room for {in_words(left_out)}: they need 80 columns", "dim")
        yield Text("")
        for text in notes.texts:
            yield _note(notes.mark(text), text)
        if any(line.good for line in self.lines):
            yield _text(WINDOW_INTERVAL if self.runs else INTERVAL + ("; --runs shows each" if self.counted else ""), "dim")
        if "MFU" in titles and any(record.value(name) is not None for record in records for name in ("mfu", "mfu_measured")):
            limited = any(record.value("share_of_limit") is not None for record in records)
            yield Text(f"{MFU_NOTE}; {LIMIT_NOTE}" if limited else MFU_NOTE, style="dim")


def _fitting(width: int) -> int:
    """How many of the columns have room: a number in two lines would be read as two. Of narrower terminals the first three."""
    return max(3, sum(end - 1 <= width for end in accumulate(own + 1 for _, own in COLUMN_WIDTHS)))


def _columns(wide: bool, counted: bool, shown: int) -> Table:
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="bold", collapse_padding=True)
    columns = [(title, width - (title == "Point") * (RUNS[1] + 1) * counted) for title, width in COLUMN_WIDTHS[:shown]]
    for title, width in [*columns[:2], *([RUNS] if counted else []), *columns[2:]]:
        number = title not in {"Point", "Status"}
        table.add_column(
            title, justify="right" if number else "left", overflow="fold", width=None if wide else width, no_wrap=wide and title != "Point"
        )
    return table


def _status(line: Repeats, notes: Footnotes, wide: bool) -> Text:
    record = line.mean
    text = Text(record.status, style=STYLES.get(record.status, ""))
    for reason in filter(None, (record.reason, line.lost)):
        text.append(f" {notes.mark(reason)}", style="default")
    for flag in record.flags:
        name = f"\n{printable(flag)}" if wide else ""
        text.append(f"{name} {notes.mark(f'{flag}{line.flagged(flag)}: {flag_text(record, flag)}')}", style="yellow")
    return text


def _numbers(line: Repeats, notes: Footnotes, apart: bool) -> Iterator[str]:
    """The cells of a line. ``apart``: the energy has a note of its boundary, as others have another one."""
    record = line.mean
    if record.window is None and not record.metrics.keys() & {*SHOWN}:
        yield from [""] * 6
        return
    metrics = record.metrics
    yield written("throughput", metrics.get("throughput")) + _of_some("throughput", line, notes) + _absent("throughput", line, notes)
    energy = metrics.get("energy_per_item")
    if unknown := unknown_energy(record, line.good):
        yield f"{unknown[0].replace(', ±', chr(10) + '±')} {notes.mark(unknown[1])}"
    else:
        note = f" {notes.mark(energy.reason)}" if energy is not None and energy.value is not None and energy.reason else ""
        if apart and energy is not None:
            note += f" {notes.mark(f'boundary of energy: {energy.scope or NOT_STATED}; others have another one')}"
        note += _of_some("energy_per_item", line, notes) + _absent("energy_per_item", line, notes)
        yield written("energy_per_item", energy).replace(", ±", "\n±") + note
    yield _mfu(record, notes)
    yield plain("step_time_median", record.value("step_time_median"), "s")
    yield _wait(record.value("data_wait_share"))
    yield plain("peak_memory", record.value("peak_memory"), "B").removesuffix(" GiB")


def _of_some(name: str, line: Repeats, notes: Footnotes) -> str:
    """The mark of a mean that is not of all runs with a result; empty for any other."""
    having = sum(record.value(name) is not None for record in line.good)
    return f" {notes.mark(f'{title_of(name).lower()}: mean of {having} of {len(line.good)} runs')}" if 0 < having < len(line.good) else ""


def _absent(name: str, line: Repeats, notes: Footnotes) -> str:
    """The mark of why no run of a line of imported results has a number; empty for any other."""
    unknown = [metric for record in line.good if record.window is None and (metric := record.metrics.get(name)) is not None]
    reason = next((metric.reason for metric in unknown if metric.reason), None)
    if reason is None or any(metric.value is not None for metric in unknown):
        return ""
    return f" {notes.mark(f'{title_of(name).lower()}: {reason}')}"


def _wait(share: float | None) -> str:
    """Data wait in five characters."""
    if share is None:
        return "–"
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f} %"


def _mfu(record: Record, notes: Footnotes) -> str:
    for name, mark in (("mfu", "s"), ("mfu_measured", "m")):
        value = record.value(name)
        if value is not None:
            # Of less than one per cent two decimals, as more do not fit into a line of 80 columns.
            share = f"{100 * value:.2f} %" if 5e-5 <= value < 0.00995 else plain(name, value, "1")
            return f"{share} {mark}{_of_limit(record)}"
    # That a data sheet is missing is no news where the measured peak is missing too: its reason is the one that can be mended.
    metric = record.metrics.get("mfu_measured") or record.metrics.get("mfu")
    return f"– {notes.mark(f'no MFU: {metric.reason}')}" if metric is not None and metric.reason else "–"


def _of_limit(record: Record) -> str:
    """The distance to the roofline in a line of its own: ``84 % mem``."""
    metric = record.metrics.get("share_of_limit")
    if metric is None or metric.value is None:
        return ""
    return f"\n{100 * metric.value:.0f} % {_BOUND.get(metric.scope or '', '')}"


def record_view(record: Record, folder: str | None = None) -> RenderableType:
    """Everything about one record: every number with its interval, window, definition and source. ``folder``: of the raw files."""
    parts: list[RenderableType] = [_heading(record)]
    if record.flags:
        parts += _section("Flags", _grid([(flag, flag_text(record, flag)) for flag in record.flags]))
    parts += _section("Point", _grid(_point(record)))
    parts += _section("Window", _text(window_text(record)), _window(record))
    if record.metrics:
        parts += _section("Numbers", _metrics(record))
    if record.window is not None:
        parts += _section("Energy", *_energy(record))
    if record.profile is not None:
        table = costliest(record.profile)
        parts += _section(table.title, plain_table(table.columns, table.rows, 3), *(_text(note, "dim") for note in table.notes))
    if record.phases:
        phases = [
            (phase.name, f"{phase.start:,.2f} to {phase.end:,.2f} s, {human(phase.end - phase.start, 's')}") for phase in record.phases
        ]
        parts += _section("Phases (seconds since the start)", _grid(phases))
    if record.facts is not None:
        parts += _section("Work and data", _grid(flat(record.facts.model_dump(mode="json"))))
    policy = flat(record.point.measure.model_dump(mode="json")) if "measure" not in record.unstated else [("all of it", NOT_STATED)]
    parts += _section("Measuring policy", _grid(policy))
    parts += _section("System", _grid(flat(record.system)))
    parts += _section("Environment", _grid(flat(record.environment)))
    where = f"{folder}/" if folder else ""
    files = {"record": "record.json", **record.files}
    parts += _section("Files", _grid([(name, f"{where}{file}") for name, file in files.items()]))
    return Group(*parts)


def repeats_view(records: Sequence[Record]) -> RenderableType:
    """The runs of one work together: every number as their mean, and what each run says by itself."""
    (line,) = repeated(records)
    rows = [
        (title_of(name, line.mean.item), written(name, metric), f"n = {metric.n}" if metric.n else metric.reason or "")
        for name, metric in line.mean.metrics.items()
    ]
    runs = [(run.key, f"{run.point.label}  {run.status}  {written('throughput', run.metrics.get('throughput'))}") for run in line.runs]
    flags = [(f"{flag}{line.flagged(flag)}", flag_text(line.mean, flag)) for flag in line.mean.flags]
    parts: list[RenderableType] = [_text(f"{line.mean.point.label}: {line.count} runs", "bold")]
    parts += [_text(line.lost)] if line.lost else []
    parts += _section("Flags", _grid(flags)) if flags else []
    parts += _section("Means of the runs", plain_table(["", "mean", ""], rows, 2), _text(INTERVAL, "dim"))
    parts += _section("Runs (caraml show KEY has all of one)", _grid(runs))
    return Group(*parts)


def _point(record: Record) -> list[tuple[str, str]]:
    """The point's fields; what nobody stated is said to be that."""
    fields = record.point.model_dump(mode="json", exclude={"measure"})
    return flat(fields | {name: NOT_STATED for name in record.unstated if name in fields})


def _heading(record: Record) -> Text:
    text = _text(record.point.label, "bold")
    text.append("  ")
    text.append(record.status, style=STYLES.get(record.status, ""))
    if record.reason:
        text.append(f": {printable(record.reason)}")
    details = f"key {record.key}, attempt {record.attempt}, started {record.started_at}"
    text.append("\n" + printable(f"{details}, schema {record.schema_version}, method {record.method_version}"), style="dim")
    return text


def _window(record: Record) -> Text:
    if record.window is None:
        return Text("")
    samples = "" if "micro_batch" in record.unstated else f"{count(record.window.samples, 'sample')}, "
    return Text(f"{samples}{record.window.items:,} {record.item}s over {count(record.point.world, 'device')}", style="dim")


def _metrics(record: Record) -> Table:
    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False, show_header=False)
    table.add_column(min_width=16, max_width=22, overflow="fold")
    table.add_column(min_width=20, max_width=34, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for name, metric in record.metrics.items():
        title = title_of(name, record.item)
        value = _text(written(name, metric), "bold" if metric.value is not None else "")
        if metric.value is not None:
            value.append(
                f"\n{metric.value!r} {metric.unit if metric.unit != '1' else ''}\n{uncertainty(name, metric)}", style="not bold dim"
            )
        if metric.scope:
            value.append(f"\nboundary: {printable(metric.scope)}", style="not bold dim")
        about, behind = _text(definition_of(name, [record]).definition), printable(source(record, name))
        if metric.value is not None:
            told = f"\nsource: {behind}" if behind != about.plain else ""  # some definitions are the formula
            about.append(f"{told}\nover the {_over(record, name)}", style="dim")
        if metric.reason and metric.reason == energy_reason(record):
            about.append("\nwhy not: see Energy below", style="dim")
        elif metric.reason:
            about.append(f"\n{printable(metric.reason)}", style="yellow")
        table.add_row(_text(title), value, about)
    return table


def _over(record: Record, name: str) -> str:
    """Where on the clock a number holds: nearly all of them in the window."""
    if name in {"first_step_time", "time_to_first_step", "loss_first"}:
        return "time before the window"
    own = name not in METRICS and record.point.workload == "command"
    if name in QUALITY or name == "loss_validation" or (name in record.definitions and not own):
        return "held-out data, after the last step"
    if name == "idle_power" and record.idle is not None:
        return f"idle window of {record.idle.duration_s:,.2f} s before the work and after it"
    of_epochs = name.startswith(("epoch_", "batch_time", "throughput_first", "throughput_later", "accuracy_", "staging_"))
    of_run = name.startswith(("run", "loading_", "training_", "saving_", "rest_"))
    if name in {"loss_last", "peak_memory", "peak_host_memory", "action"} or record.window is None or of_epochs or of_run or own:
        return "whole run"
    return f"window ({record.window.start:,.2f} to {record.window.end:,.2f} s, {count(record.window.steps, 'step')})"


def _energy(record: Record) -> Iterator[RenderableType]:
    unknown = unknown_energy(record, [record])
    if unknown is not None or record.energy is None:
        yield _text(unknown[1] if unknown is not None else "not known which sensors")
    for window, title in ((record.energy, "window"), (record.idle, "idle")):
        if window is not None:
            yield _channels(window, title)


def _channels(window: WindowEnergy, title: str) -> Table:
    """Boundaries and channels of one energy window with every part of their bounds."""
    lines: list[tuple[str, str]] = []
    for name, boundary in window.boundaries.items():
        told, valid = _joules(boundary.energy_j, boundary.bound_j), "valid" if boundary.valid else "not valid"
        lines.append((f"{title}, {name}", f"{told}, {valid}; sum of {', '.join(boundary.channels) or 'nothing'}"))
    for channel in window.channels:
        parts = ", ".join(f"{part} {human(joules, 'J')}" for part, joules in channel.bound_parts.items()) or "not known"
        facts = [
            f"{_joules(channel.energy_j, channel.bound_j)} by {channel.source}, {channel.method or 'no method'}",
            f"bound from {parts}",
            f"mean {human(channel.mean_w, 'W')}, peak {human(channel.peak_w, 'W')}, coverage {plain('mfu', channel.coverage, '1')}",
            f"{channel.readings:,} readings, {channel.missed:,} missed",
        ]
        if channel.crosscheck_ratio is not None:
            facts.append(f"integral of power / counter = {channel.crosscheck_ratio:.4f}")
        facts += [channel.reason] if channel.reason else []
        lines.append((f"{title}, {channel.label} ({channel.id})", "; ".join(facts)))
        lines += [(f"  {flag}", flag_meaning(flag)) for flag in channel.flags]
    if not lines:
        lines = [(f"{title} ({flag})", flag_meaning(flag)) for flag in window.flags] or [(title, window.reason or "no channel")]
    return _grid(lines)


def _joules(joules: float | None, bound: float | None) -> str:
    if joules is None:
        return "no value"
    return written("energy", Metric(value=joules, unit="J", bound=bound))


def _section(title: str, *content: RenderableType) -> list[RenderableType]:
    return [Text(""), Rule(title, align="left", style="dim"), *content]


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=30, overflow="fold")
    table.add_column(overflow="fold")
    for name, value in lines or [("–", "nothing recorded")]:
        table.add_row(_text(name), _text(value))
    return table


def _note(mark: str, text: str) -> Table:
    """A footnote whose further lines hang below its first."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")  # a path may be longer than a line
    grid.add_row(Text(mark), _text(text))
    return grid


def _text(text: str, style: str = "") -> Text:
    """Text of a record: never read as markup, without control characters."""
    return Text("\n".join(map(printable, text.split("\n"))), style=style)
