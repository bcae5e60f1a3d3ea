"""Names of points that tell them apart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from caraml.results.record import Record
from caraml.suite.model import Point


def labels(records: Sequence[Record]) -> dict[str, str]:
    """A label for each key. Points that would share one get the values in which they differ."""
    return _distinct(records, lambda point: point.label, lambda point: {**_values(point), "micro_batch": point.micro_batch})


def series_labels(records: Sequence[Record]) -> dict[str, str]:
    """A label for each key that the points of one batch sweep share."""
    return _distinct(records, lambda point: point.label.replace(f" b{point.global_batch} ", " ", 1), _values)


def clipped(text: str, limit: int) -> str:
    """``text``, or its beginning and an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def printable(text: str) -> str:
    """``text`` without control characters, which could move the cursor or recolour a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _values(point: Point) -> dict[str, JsonValue]:
    return {**point.params, "device": point.device, "seed": point.seed, "software": point.software}


def _distinct(records: Sequence[Record], base: Callable[[Point], str], values: Callable[[Point], dict[str, JsonValue]]) -> dict[str, str]:
    sharing: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        sharing[base(record.point)].append(record)
    named: dict[str, str] = {}
    for label, group in sharing.items():
        found = {record.key: values(record.point) for record in group}
        names = sorted({name for one in found.values() for name in one})
        differing = [name for name in names if len({json.dumps(one.get(name), sort_keys=True) for one in found.values()}) > 1]
        for key, one in found.items():
            named[key] = printable(" ".join([label, *(f"{name}={one.get(name)}" for name in differing)]))
    return named
