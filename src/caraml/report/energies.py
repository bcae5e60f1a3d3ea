"""Energy of node and devices, Action, and time against energy."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from caraml.report.figure import Axis, Figure, bars, dots, marks
from caraml.report.groups import LABEL, MOST_FIGURES, MOST_ROWS, MOST_SERIES, families, first, item_of, wide_range, works
from caraml.report.labels import clipped
from caraml.report.numbers import plain, scaled, written
from caraml.report.quantities import ACTION, DEVICES, ENERGY, NODE, TIME, Quantity
from caraml.results.record import Metric, Record

AMOUNT = "10⁶"
"""How the figures write the amount of work that is compared."""


def node_and_devices(records: Sequence[Record]) -> list[Figure]:
    """For each work whose nodes have a sensor of their own: energy of the devices within that of the node."""
    known = [record for record in records if record.value("node_energy") is not None and record.value("device_energy") is not None]
    figures = []
    for name, group in works(known).items():
        lines, more = first(list(families(group, ()).items()), MOST_ROWS, "point")
        unit = f"J/{item_of(group)}"
        factor, written_unit = scaled(max(_value(NODE, repeats) for _, repeats in lines), unit)
        brief = clipped([line for line, _ in lines], LABEL - 14)
        segments, rows, names = [], [], []
        for row, (line, repeats) in enumerate(lines):
            device, node = _value(DEVICES, repeats), _value(NODE, repeats)
            parts = [f"devices {plain('', device, unit)}", f"rest of the node {plain('', node - device, unit)}"]
            for index, (a, b) in enumerate([(0.0, device), (device, node)]):
                segments.append({"row": row, "a": a / factor, "b": b / factor, "series": index, "d": f"{line}: {parts[index]}"})
            share = f"{100 * device / node:.0f} %"
            names.append(f"{brief[row]}: devices {share}")
            rows.append([line, plain("", node, unit), plain("", device, unit), share])
        title = f"Energy of node and devices: {name}"
        svg = bars(names, segments, [], f"energy [{written_unit}]", title)
        legend = [(0, "devices"), (1, "rest of the node")]
        figures.append(Figure(title, svg, legend, "block", ["point", "node", "devices", "devices / node"], rows, more.strip()))
    return figures[:MOST_FIGURES]


def _value(quantity: Quantity, repeats: Sequence[Record]) -> float:
    metric = quantity.of(repeats)
    assert metric is not None and metric.value is not None, "only records with a value are drawn"
    return metric.value


def action(records: Sequence[Record]) -> list[Figure]:
    """For each work, energy times time of a million items (MAELSTROM's Action), the smallest first."""
    figures = []
    for name, group in works([record for record in records if ACTION.of([record])]).items():
        ordered = sorted(families(group, ()).items(), key=lambda line: _value(ACTION, line[1]))
        lines, more = first(ordered, MOST_ROWS, "point")
        factor, unit = scaled(max(_value(ACTION, repeats) for _, repeats in lines), "J s")
        brief = clipped([line for line, _ in lines], LABEL // 2)
        segments: list[dict[str, Any]] = []
        errors, names, rows = [], [], []
        for row, (line, repeats) in enumerate(lines):
            metric = ACTION.of(repeats)
            assert metric is not None and metric.value is not None
            text = written("energy_time_product", metric)
            segments.append({"row": row, "a": 0, "b": metric.value / factor, "series": 0, "d": f"{line}: {text}"})
            if metric.low is not None and metric.high is not None:
                errors.append({"row": row, "low": metric.low / factor, "high": metric.high / factor, "d": f"{line}: {text}"})
            names.append(f"{brief[row]}: {plain('', metric.value, 'J s')}")
            rows.append([line, text, written("energy", ENERGY.of(repeats)), written("runtime", TIME.of(repeats))])
        item = item_of(group)
        title, axis = f"Action of {AMOUNT} {item}s: {name}", f"energy x time [{unit}]"
        if wide_range([segment["b"] for segment in segments]):  # the shorter bars would be lines
            svg = dots(names, [[{**segment, "x": segment["b"]} for segment in segments]], axis, title)
        else:
            svg = bars(names, segments, errors, axis, title)
        note = f"Energy times time of {AMOUNT} {item}s at the rate of the window: lower is better. The short lines join both intervals."
        figures.append(Figure(title, svg, [], "block", ["point", "Action", "energy", "time"], rows, note + more))
    return figures[:MOST_FIGURES]


def time_and_energy(records: Sequence[Record]) -> list[Figure]:
    """For each work of which two or more points have energy, time against energy of a million items, with the Pareto front."""
    figures = []
    for name, group in works([record for record in records if ENERGY.of([record]) and TIME.of([record])]).items():
        points = list(families(group, ()).items())
        if len(points) > 1:
            figures.append(_pareto(name, group, points))
    return figures[:MOST_FIGURES]


def _pareto(name: str, group: Sequence[Record], points: Sequence[tuple[str, list[Record]]]) -> Figure:
    item = item_of(group)
    times, energies = [_value(TIME, repeats) for _, repeats in points], [_value(ENERGY, repeats) for _, repeats in points]
    scales = scaled(statistics.median(times), "s"), scaled(statistics.median(energies), "J")
    placed = [_place(line, repeats, scales[0][0], scales[1][0]) for line, repeats in points]
    best = front((mark["x"], mark["y"]) for mark in placed)
    # One marker for each machine and number of devices: their batches lie along a curve of their own.
    lines, more = first(list(families(group, ("batch",)).items()), MOST_SERIES, "line")
    where = {record.key: index for index, (_, records) in enumerate(lines) for record in records}
    line_of = [where.get(repeats[0].key) for _, repeats in points]
    series = [[mark for mark, of in zip(placed, line_of, strict=True) if of == index] for index in range(len(lines))]
    x_axis, y_axis = Axis(f"time [{scales[0][1]}]", log=_log(times)), Axis(f"energy [{scales[1][1]}]", log=_log(energies))
    title = f"Time and energy of {AMOUNT} {item}s: {name}"
    path = [mark for mark in sorted(placed, key=lambda mark: mark["x"]) if (mark["x"], mark["y"]) in best]
    svg = marks(series, x_axis, y_axis, title, lines=False, path=path)
    legend = [(index, line) for index, (line, _) in enumerate(lines)]
    chosen = ["yes" if (mark["x"], mark["y"]) in best else "no" for mark in placed]
    numbers = [[line, written("runtime", TIME.of(repeats)), written("energy", ENERGY.of(repeats))] for line, repeats in points]
    rows = [[*texts, yes] for texts, yes in zip(numbers, chosen, strict=True)]
    note = "No point takes both less time and less energy than one of those on the line (the Pareto front)."
    return Figure(title, svg, legend, "mark", ["point", "time", "energy", "on the front"], rows, note + more)


def _place(line: str, repeats: Sequence[Record], time_factor: float, energy_factor: float) -> dict[str, Any]:
    time, energy = TIME.of(repeats), ENERGY.of(repeats)
    assert time is not None and energy is not None and time.value is not None and energy.value is not None
    low, high = _ends(energy, energy_factor)
    x_low, x_high = _ends(time, time_factor)
    ends = {"low": low, "high": high, "x_low": x_low, "x_high": x_high}
    spoken = f"{line}: {written('runtime', time)}, {written('energy', energy)}"
    return {"x": time.value / time_factor, "y": energy.value / energy_factor, **ends, "d": spoken}


def _ends(metric: Metric, factor: float) -> tuple[float, float]:
    assert metric.value is not None
    low, high = (metric.value if end is None else end for end in (metric.low, metric.high))
    return low / factor, high / factor


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
    return 10 if max(values) / min(values) > 8 else None
