"""What the time of a run went into: loading, training and the rest; the first epoch beside the others."""

from __future__ import annotations

from collections.abc import Sequence

from caraml.report.figure import Figure, bars, dots
from caraml.report.groups import LABEL, MOST_FIGURES, MOST_ROWS, families, first, works
from caraml.report.labels import clipped
from caraml.report.numbers import plain, scaled
from caraml.report.quantities import metric
from caraml.results.record import Record

PARTS = {"training": "training_share", "loading": "loading_share", "rest": "rest_share"}


def split(records: Sequence[Record]) -> list[Figure]:
    """For each work, the parts of every point's total runtime."""
    figures = []
    for name, group in works([one for one in records if all(one.value(part) is not None for part in PARTS.values())]).items():
        lines, more = first(list(families(group, ()).items()), MOST_ROWS, "point")
        segments, rows = [], []
        for row, (line, repeats) in enumerate(lines):
            shares = {part: sum(one.value(name) or 0.0 for one in repeats) / len(repeats) for part, name in PARTS.items()}
            start = 0.0
            for index, (part, share) in enumerate(shares.items()):
                spoken = f"{line}: {part} {plain('rest_share', share, '1')}"
                segments.append({"row": row, "a": 100 * start, "b": 100 * (start + share), "series": index, "d": spoken})
                start += share
            runtime = sum(one.value("runtime") or 0.0 for one in repeats) / len(repeats)
            rows.append([line, plain("runtime", runtime, "s"), *(plain("rest_share", share, "1") for share in shares.values())])
        title = f"Parts of the runtime: {name}"
        svg = bars(clipped([line for line, _ in lines], LABEL), segments, [], "share of the runtime [%]", title)
        legend = list(enumerate(PARTS))
        figures.append(Figure(title, svg, legend, "block", ["point", "runtime", *PARTS], rows, more.strip()))
    return figures[:MOST_FIGURES]


def epochs(records: Sequence[Record]) -> list[Figure]:
    """For each work that ran whole epochs, the first epoch beside the mean of all, with the shortest and longest."""
    first_epoch, mean = metric("epoch_time_first"), metric("epoch_time_mean")
    figures = []
    for name, group in works([one for one in records if first_epoch.of([one]) and mean.of([one])]).items():
        lines, more = first(list(families(group, ()).items()), MOST_ROWS, "point")
        values = [one.value("epoch_time_mean") or 0.0 for one in group]
        factor, unit = scaled(max(values), "s")
        series: list[list[dict[str, object]]] = [[], []]
        rows = []
        for row, (line, repeats) in enumerate(lines):
            both = [quantity.of(repeats) for quantity in (first_epoch, mean)]
            texts = [plain("", found.value if found else None, "s") for found in both]
            ends = [[value for one in repeats if (value := one.value(f"epoch_time_{end}")) is not None] for end in ("min", "max")]
            for index, (found, text, word) in enumerate(zip(both, texts, ("first epoch", "mean epoch"), strict=True)):
                assert found is not None and found.value is not None
                mark: dict[str, object] = {"row": row, "x": found.value / factor, "d": f"{line}: {word} {text}"}
                if word == "mean epoch" and all(ends):
                    mark |= {"low": min(ends[0]) / factor, "high": max(ends[1]) / factor}
                series[index].append(mark)
            ratio = both[0].value / both[1].value if both[0] and both[1] and both[0].value and both[1].value else None
            rows.append([line, *texts, plain("", ratio, "1")])
        title = f"First and mean epoch: {name}"
        svg = dots(clipped([line for line, _ in lines], LABEL), series, f"time [{unit}]", title)
        note = "The bar reaches from the shortest to the longest epoch." + more
        legend = [(0, "first epoch"), (1, "mean epoch")]
        figures.append(Figure(title, svg, legend, "mark", ["point", "first epoch", "mean epoch", "first / mean"], rows, note))
    return figures[:MOST_FIGURES]
