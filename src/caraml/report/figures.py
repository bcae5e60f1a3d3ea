"""Figures of results side by side: rate and energy over the batch, machines and batches, time and energy, rooflines."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from caraml.analysis.bottleneck import RooflineRow, roofline
from caraml.analysis.grouping import grouped, valid
from caraml.base.chart import Axis, Drawing, bars, cells, dots, marks, wide_range
from caraml.base.format import count, prefixed, printable, significant
from caraml.metrics.model import Metric, title_of, unit_of
from caraml.report.grouping import (
    ACTION,
    COST,
    DEVICES,
    EFFICIENCY,
    ENERGY,
    HOUR,
    LABEL,
    MOST_ROWS,
    MOST_SERIES,
    NODE,
    RATE,
    TIME,
    TOTAL,
    Quantity,
    ends,
    families,
    first,
    first_figures,
    keys,
    known,
    labels,
    machine,
    marker,
    metric,
    repeated,
)
from caraml.report.section import ReportFigure, counted, plain
from caraml.report.series import clipped
from caraml.report.works import Figures, Lines, by_boundary, disturbed, item_of, of_stated_batch, of_works, own_quantities, runs_of, works
from caraml.results.record import Record

MOST_LINES, MOST_COLUMNS = 24, 24
"""Rows and columns of a heat map."""
WORDS = {"oom": "OOM", "timeout": "time", "skipped": "skip", "invalid": "inv.", "failed": "fail", "lost": "lost"}
"""What stands in the place of a point without a number."""
AMOUNT = "10⁶"
"""How the figures write the amount of work that is compared."""
MARGIN = 1.5
"""Factor between the outermost points of a roofline and the ends of its axes."""

QUALITY = [metric(name, title_of(name), unit_of(name)) for name in ("psnr", "ms_ssim", "exact_match", "f1", "accuracy_validation")]
"""What says how good a trained model is."""

# -- rate, energy and efficiency over the batch: the three panels of CARAML's figure of language models --------------------


def over_batch(records: Sequence[Record]) -> Figures:
    """For each work, rate, energy of an hour and efficiency over the batch, the model's quality, and what a suite or plug-in defines, where
    they are known, a line for each machine; bars where no batch was swept."""
    figures, single = [], []
    for name, group in works([record for record in valid(records) if record.value("throughput") is not None]).items():
        stated, others = of_stated_batch(group)
        lines = families(stated, ("batch",))
        swept = any(len({record.point.global_batch for record in line}) > 1 for line in lines.values())
        if swept and any(RATE.of([record]) is not None for record in stated):
            figures.append(_panels(name, lines, (RATE, HOUR, EFFICIENCY), others))
            for whole, more in (("Quality", QUALITY), ("Own metrics", own_quantities(stated))):
                figures += [_panels(name, lines, more, others, whole)] if any(one.of([record]) for one in more for record in stated) else []
        else:
            single += group
    once = list({one.key: one for one in single}.values())
    for item in dict.fromkeys(record.item for record in once):
        figures += _bars(TOTAL, [record for record in once if record.item == item])
    for quantity in own_quantities(once):
        figures += _bars(quantity, once)
    return first_figures(figures)


def _panels(name: str, lines: dict[str, list[Record]], wanted: Sequence[Quantity], others: str, whole: str = "") -> ReportFigure:
    shown, more = first(list(lines.items()), MOST_SERIES, "line")
    places = [(line, repeats) for line, records in shown for repeats in _by_batch(records)]
    quantities = [quantity for quantity in wanted if any(quantity.of(repeats) is not None for _, repeats in places)]
    zero, whole = not whole, whole or ("Rate, energy and efficiency" if len(quantities) > 1 else "Rate")
    batches = sorted({_batch(repeats) for _, repeats in places})
    # One octave of the axis is a tick; a single one would have no width.
    x = Axis("global batch [samples]", log=2, ticks=[float(batch) for batch in batches], domain=(batches[0] / 1.15, batches[-1] * 1.15))
    drawings = []
    for quantity in quantities:
        factor, unit = counted(max(known(found) for _, repeats in places if (found := quantity.of(repeats))), _unit(quantity, lines))
        series = [
            [
                marker(_batch(repeats), found, factor, f"{line}, batch {_batch(repeats)}: {quantity.told(repeats)}", keys(repeats))
                for repeats in _by_batch(records)
                if (found := quantity.of(repeats))
            ]
            for line, records in shown
        ]
        brief = clipped([quantity.title], max(LABEL - 3 - len(unit), LABEL // 3))[0]  # the next panel begins behind it
        title = clipped([f"{brief} [{unit}]"], LABEL)[0] if unit else brief
        about = f"{title if len(quantities) > 1 else whole} over global batch: {name}"
        drawings.append(marks(series, x, Axis(title, zero=zero), about))
    columns = ["series", "global batch", "runs", *(quantity.title.lower() for quantity in quantities)]
    rows = [
        [line, f"{_batch(repeats):,}", str(len(repeats)), *(q.told(repeats) if q.of(repeats) else "–" for q in quantities)]
        for line, repeats in places
    ]
    note = "The short lines show the 95 % confidence interval between runs."
    energies = [(line, repeats) for line, repeats in places if EFFICIENCY.of(repeats) is not None and EFFICIENCY in quantities]
    apart = [
        f"{words[2:]} ({', '.join(dict.fromkeys(line for line, _ in part))})" for words, part, _ in by_boundary(energies, (EFFICIENCY,))
    ]
    note += f" Energies of different boundaries are not comparable: {'; '.join(apart)}." if len(apart) > 1 else ""
    if RATE in quantities and len(quantities) > 1:
        missing = [reason for _, repeats in places if RATE.of(repeats) is not None and (reason := EFFICIENCY.reason(repeats))]
        note += f" {count(len(missing), 'point')} without energy: {'; '.join(dict.fromkeys(missing))}." if missing else ""
    title = f"{whole} over global batch: {name}"
    drawn = [(f"{line} b{_batch(repeats)}", repeats) for line, repeats in places if any(one.of(repeats) for one in quantities)]
    note += others + disturbed(drawn)
    return ReportFigure(title, drawings, [line for line, _ in shown], "mark", columns, rows, note + more)


def _unit(quantity: Quantity, lines: dict[str, list[Record]]) -> str:
    return quantity.unit.format(item=item_of([record for records in lines.values() for record in records]))


def _batch(repeats: Sequence[Record]) -> int:
    return repeats[0].point.global_batch


def _by_batch(records: Sequence[Record]) -> list[list[Record]]:
    """Repeats together, by growing batch."""
    return sorted(grouped(records, lambda record: record.point.global_batch), key=_batch)


def _bars(quantity: Quantity, records: Sequence[Record]) -> list[ReportFigure]:
    """A bar for each work that has the number, where no line would have two points; nothing where none has it."""
    lines = [line for line in repeated(records, ()) if quantity.of(line.runs) is not None]
    if not lines:
        return []
    shown, more = first(lines, MOST_ROWS, "point")
    unit, by_key = quantity.unit.format(item=records[0].item), labels([line.mean for line in lines])
    named, told = [by_key[line.mean.key] for line in lines], [quantity.told(line.runs) for line in lines]
    axis = unit if unit != "1" else quantity.title
    title = f"{quantity.title}, {unit}" if unit != "1" else axis
    found = []
    for name, text, line in zip(named, told, shown, strict=False):
        # The interval is drawn, and its numbers are in the table: where they are long, the name needs their place.
        brief = text if len(text) <= LABEL // 2 else re.sub(r" \([^)]* to [^)]*\)", "", text)
        mean = quantity.of(line.runs)
        assert mean is not None
        found.append((name, mean, clipped([brief], 29)[0], text))
    drawing = _one_each(found, [keys(line.runs) for line in shown], 1.0, axis, title)
    batches = ["–" if "global_batch" in line.mean.unstated else f"{line.mean.point.global_batch:,}" for line in lines]
    without = [name for name, mean, *_ in found if mean.low is None]
    note = "The short lines show the 95 % confidence interval between runs." + (f" Without one: {', '.join(without)}." if without else "")
    note += disturbed([(name, line.good) for name, line in zip(named, shown, strict=False)])
    columns, rows = ["point", "global batch", quantity.title.lower()], [list(row) for row in zip(named, batches, told, strict=True)]
    return [ReportFigure(title, [drawing], [], "block", columns, rows, note + more)]


def _one_each(found: Sequence[tuple[str, Metric, str, str]], of: Sequence[str], factor: float, axis: str, title: str) -> Drawing:
    """A bar with its interval for each name, metric, brief text and whole text; markers where shorter bars would be lines, or where a value
    is below zero, at which bars begin."""
    brief = clipped([line for line, *_ in found], max(LABEL - 2 - max(len(short) for _, _, short, _ in found), LABEL // 3))
    names = [f"{name}: {short}" for name, (_, _, short, _) in zip(brief, found, strict=True)]
    rows: list[dict[str, Any]] = []
    for row, (line, value, _, text) in enumerate(found):
        length = known(value) / factor
        rows.append({"row": row, "series": 0, "a": 0, "b": length, "x": length, "d": f"{line}: {text}", "of": of[row]})
        if value.low is not None and value.high is not None:
            rows[-1] |= dict(zip(("low", "high"), ends(value, factor), strict=True))
    lengths = [mark["x"] for mark in rows]
    if min(lengths) < 0 or wide_range(lengths):
        return dots(names, [rows], axis, title)
    return bars(names, rows, [mark for mark in rows if "low" in mark], axis, title)


def stacked(row: int, line: str, of: str, parts: Iterable[tuple[float, str]]) -> list[dict[str, Any]]:
    """Lengths one after the other, each with what is said of it, as segments of a bar."""
    segments, start = [], 0.0
    for index, (length, spoken) in enumerate(parts):
        segments.append({"row": row, "a": start, "b": start + length, "series": index, "d": f"{line}: {spoken}", "of": of})
        start += length
    return segments


# -- heat maps -------------------------------------------------------------------------------------------------------------


def heat_maps(records: Sequence[Record]) -> Figures:
    """For each work with two or more rows (machines and numbers of devices) and batches, throughput, and energy where it was measured."""
    figures = []
    for name, group in works(records).items():
        stated, unstated = of_stated_batch(group)
        lines = families(stated, ("batch",))
        if len(lines) > 1 and len({record.point.global_batch for record in stated}) > 1:
            for quantity in (TOTAL, COST):
                places = [(line, repeats) for line, records in lines.items() for repeats in _by_batch(records) if quantity.of(repeats)]
                parts = by_boundary(places, (quantity,)) if places else []
                figures += [_map(f"{name}{words}", lines, quantity, part, others + unstated) for words, part, others in parts]
    return first_figures(figures)


def _map(name: str, lines: dict[str, list[Record]], quantity: Quantity, places: Lines, others: str) -> ReportFigure:
    """``places``: of which cells the numbers compare; ``others``: what is said of those of other boundaries or of unknown batch."""
    here_are = {id(record) for record in runs_of(places)}
    # Rows of which all energy has another boundary are in the map of that one.
    lines = {line: runs for line, runs in lines.items() if not quantity.of(runs) or not here_are.isdisjoint(map(id, runs))}
    shown, more = first(list(lines.items()), MOST_LINES, "row")
    batches, wider = first(sorted({record.point.global_batch for runs in lines.values() for record in runs}), MOST_COLUMNS, "column")
    values = [quantity.value(repeats) for _, repeats in places]
    factor, unit = counted(statistics.median(values), _unit(quantity, lines))
    found: list[dict[str, Any]] = []
    rows = []
    for row, (line, records) in enumerate(shown):
        for column, batch in enumerate(batches):
            here = [record for record in records if record.point.global_batch == batch]
            if here:
                text, value, spoken = _cell(quantity, here, factor)
                if value is not None and here_are.isdisjoint(map(id, here)):
                    text, value, spoken = "other", None, f"energy of another boundary: {quantity.boundary(here)}"
                spoken_of = f"{line}, batch {batch}: {spoken}"
                found.append({"row": row, "column": column, "text": text, "value": value, "d": spoken_of, "of": keys(here)})
                rows.append([line, f"{batch:,}", spoken])
    title = f"{quantity.title} by machine and batch: {name}"
    drawing = cells(clipped([line for line, _ in shown], LABEL), [f"{batch:,}" for batch in batches], found, title)
    kinds = sorted({cell["text"] for cell in found if cell["value"] is None})
    note = f"In {unit}; the darker, the higher. Columns are global batches; an empty place was not asked for."
    words = {word: status for status, word in WORDS.items()} | {"–": "not known", "other": "another boundary"}
    note += f" {'; '.join(f'{kind}: {words.get(kind, kind)}' for kind in kinds)}." if kinds else ""
    drawn = [(f"{line} b{_batch(runs)}", runs) for line, runs in places if line in dict(shown) and _batch(runs) in batches]
    note += others + disturbed(drawn)
    return ReportFigure(title, [drawing], [], "block", ["row", "global batch", quantity.title.lower()], rows, note + more + wider)


def _cell(quantity: Quantity, repeats: Sequence[Record], factor: float) -> tuple[str, float | None, str]:
    """What stands in a cell, the value behind it, and what is said of it."""
    found = quantity.of(repeats)
    if found is not None:
        return significant(known(found) / factor), known(found), quantity.told(repeats)
    if valid(repeats):
        return "–", None, quantity.told(repeats)
    record = repeats[0]
    return WORDS[record.status], None, f"{record.status}: {record.reason or 'no reason recorded'}"


# -- time and energy -------------------------------------------------------------------------------------------------------


def node_and_devices(records: Sequence[Record]) -> Figures:
    """For each work whose nodes have a sensor of their own: energy of the devices within that of the node."""

    def draw(name: str, found: Lines, others: str) -> ReportFigure:
        lines, more = first(found, MOST_ROWS, "point")
        unit = f"J/{item_of(runs_of(found))}"
        factor, written_unit = prefixed(max(NODE.value(repeats) for _, repeats in lines), unit)
        brief = clipped([line for line, _ in lines], LABEL - 14)
        segments, rows, names = [], [], []
        for row, (line, repeats) in enumerate(lines):
            device, node = DEVICES.value(repeats), NODE.value(repeats)
            parts = (device, "devices"), (node - device, "rest of the node")
            segments += stacked(
                row, line, keys(repeats), ((joules / factor, f"{part} {plain('', joules, unit)}") for joules, part in parts)
            )
            share = f"{100 * device / node:.0f} %" if node else "–"
            names.append(f"{brief[row]}: devices {share}")
            rows.append([line, plain("", node, unit), plain("", device, unit), share])
        title = f"Energy of node and devices: {name}"
        drawing = bars(names, segments, [], f"energy [{written_unit}]", title)
        legend, columns = ["devices", "rest of the node"], ["point", "node", "devices", "devices / node"]
        return ReportFigure(title, [drawing], legend, "block", columns, rows, (others + more + disturbed(lines)).strip())

    return of_works("Energy of node and devices", records, ("node_energy", "device_energy"), (NODE, DEVICES), draw)


def action(records: Sequence[Record]) -> Figures:
    """For each work, energy times time of a million items (MAELSTROM's Action), the smallest first."""

    def draw(name: str, points: Lines, others: str) -> ReportFigure:
        lines, more = first(sorted(points, key=lambda line: ACTION.value(line[1])), MOST_ROWS, "point")
        factor, unit = prefixed(max(ACTION.value(repeats) for _, repeats in lines), "J s")
        found = [(line, metric) for line, repeats in lines if (metric := ACTION.of(repeats))]
        of = [keys(repeats) for _, repeats in lines if ACTION.of(repeats)]
        texts = [(line, value, plain("", value.value, "J s"), ACTION.text(value)) for line, value in found]
        rows = [[line, ACTION.text(ACTION.of(one)), ENERGY.text(ENERGY.of(one)), TIME.text(TIME.of(one))] for line, one in lines]
        item = item_of(runs_of(points))
        title, axis = f"Action of {AMOUNT} {item}s: {name}", f"energy x time [{unit}]"
        drawing = _one_each(texts, of, factor, axis, title)
        note = f"Energy times time of {AMOUNT} {item}s at the rate of the window: lower is better. The short lines join both intervals."
        note += others + more + disturbed(lines)
        return ReportFigure(title, [drawing], [], "block", ["point", "Action", "energy", "time"], rows, note)

    return of_works("Action", records, (TOTAL.name, COST.name), (ACTION,), draw)


def time_and_energy(records: Sequence[Record]) -> Figures:
    """For each work of which two or more points have energy, time against energy of a million items, with the Pareto front."""
    return of_works("Time and energy", records, (TOTAL.name, COST.name), (TIME, ENERGY), _pareto)


def _pareto(name: str, points: Lines, others: str) -> ReportFigure | None:
    if len(points) < 2:
        return None
    group = runs_of(points)
    times, energies = ([quantity.value(repeats) for _, repeats in points] for quantity in (TIME, ENERGY))
    (seconds, second), (joules, joule) = prefixed(statistics.median(times), "s"), prefixed(statistics.median(energies), "J")
    # One marker for each machine and number of devices: their batches lie along a curve of their own.
    lines, more = first(list(families(group, ("batch",)).items()), MOST_SERIES, "line")
    where = {record.key: index for index, (_, records) in enumerate(lines) for record in records}
    series: list[list[dict[str, Any]]] = [[] for _ in lines]
    placed, rows = [], []
    best = front((time, energy) for time, energy in zip(times, energies, strict=True) if energy > 0)
    for line, repeats in points:
        time, energy = TIME.of(repeats), ENERGY.of(repeats)
        assert time is not None and energy is not None
        texts = [TIME.text(time), ENERGY.text(energy)]
        mark = marker(known(time) / seconds, energy, joules, f"{line}: {', '.join(texts)}", keys(repeats))
        mark |= dict(zip(("x_low", "x_high"), ends(time, seconds), strict=True))
        on_front = (known(time), known(energy)) in best
        placed += [mark] if on_front else []
        rows.append([line, *texts, "yes" if on_front else "no"])
        if (index := where.get(repeats[0].key)) is not None:
            series[index].append(mark)
    x_axis, y_axis = Axis(f"time [{second}]", log=_log(times)), Axis(f"energy [{joule}]", log=_log(energies))
    title = f"Time and energy of {AMOUNT} {item_of(group)}s: {name}"
    drawing = marks(series, x_axis, y_axis, title, lines=False, path=sorted(placed, key=lambda mark: float(mark["x"])))
    note = "No point takes both less time and less energy than one of those on the line (the Pareto front)."
    note += " An energy that is not above zero was not measured: it is on no front." if min(energies) <= 0 else ""
    note += others + more + disturbed([(line, runs) for line, runs in points if runs[0].key in where])
    columns = ["point", "time", "energy", "on the front"]
    return ReportFigure(title, [drawing], [line for line, _ in lines], "mark", columns, rows, note)


def front(points: Iterable[tuple[float, float]]) -> set[tuple[float, float]]:
    """The points that no other beats in both coordinates, smaller being better."""
    best: set[tuple[float, float]] = set()
    lowest = float("inf")
    for x, y in sorted(points):
        if y < lowest:
            best.add((x, y))
            lowest = y
    return best


def _log(values: Sequence[float]) -> int | None:
    """A logarithmic axis where values span more than a factor of eight."""
    return 10 if min(values) > 0 and max(values) / min(values) > 8 else None


# -- distance to the limit -------------------------------------------------------------------------------------------------


def rooflines(records: Sequence[Record]) -> Figures:
    """The roofline of each machine and arithmetic, and why points are in none."""
    measured = [record for record in valid(records) if record.window is not None]
    groups: dict[str, list[tuple[Record, RooflineRow]]] = {}
    missing: dict[str, int] = {}
    for record, row in zip(measured, roofline(measured), strict=True):
        if row.attainable_flops_per_s is None or not row.flops_per_s:
            missing[row.reason or "not known"] = missing.get(row.reason or "not known", 0) + 1
        else:
            groups.setdefault(printable(f"{machine(record.point)}, {record.point.precision}"), []).append((record, row))
    figures, more = first_figures([_roofline(name, placed) for name, placed in groups.items()])
    return figures, [*(f"Not placed, {number} of {len(measured)}: {printable(reason)}." for reason, number in missing.items()), *more]


def _roofline(name: str, placed: Sequence[tuple[Record, RooflineRow]]) -> ReportFigure:
    """Limits differ a little from point to point, since each measures its own: the roof is that of their medians."""
    peak = statistics.median(row.peak_flops_per_s or 0.0 for _, row in placed)
    bandwidth = statistics.median(row.bandwidth_bytes_per_s or 0.0 for _, row in placed)
    factor, unit = prefixed(peak, "FLOP/s")
    chosen, more = first(list(dict.fromkeys(record.point.benchmark for record, _ in placed)), MOST_SERIES, "benchmark")
    named = labels([record for record, _ in placed])
    rows = [_roofline_row(row, named[record.key]) for record, row in placed]
    series: list[list[dict[str, Any]]] = [[] for _ in chosen]
    for (record, row), texts in zip(placed, rows, strict=True):
        if record.point.benchmark in chosen:
            rate = Metric(value=row.flops_per_s, unit="FLOP/s")
            spoken = f"{texts[0]}: {', '.join(texts[2:])}"
            series[chosen.index(record.point.benchmark)].append(marker(row.intensity or 0.0, rate, factor, spoken, keys([record])))
    places = [mark["x"] for one in series for mark in one] + [peak / bandwidth]
    left, right = min(places) / MARGIN, max(places) * MARGIN
    path = [{"x": x, "y": min(peak, bandwidth * x) / factor} for x in (left, peak / bandwidth, right)]
    heights = [mark["y"] for one in series for mark in one] + [corner["y"] for corner in path]
    y = Axis(f"rate of one device [{unit}]", log=10, domain=(min(heights) / MARGIN, max(heights) * MARGIN))
    x = Axis("FLOPs per byte moved (estimated)", log=10, domain=(left, right))
    title = f"Roofline: {name}"
    drawing = marks(series, x, y, title, lines=False, path=path)
    note = (
        f"Dashed: what the device can reach, fed at {plain('', bandwidth, 'B/s')} from memory and cache and with the fastest kernel's "
        f"{plain('', peak, 'FLOP/s')}, both measured. Bytes are an estimate, good to a factor of two."
    )
    columns = ["point", "FLOP/B", "rate", "limit", "bound by", "share of the limit"]
    return ReportFigure(title, [drawing], [printable(one) for one in chosen], "mark", columns, rows, note + more)


def _roofline_row(row: RooflineRow, label: str) -> list[str]:
    share = plain("mfu", row.share, "1") if row.share is not None else f"not known: {row.reason}"
    limit = plain("", row.attainable_flops_per_s, "FLOP/s")
    return [label, plain("", row.intensity, ""), plain("", row.flops_per_s, "FLOP/s"), limit, str(row.limit), share]
