"""Names of points that tell them apart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

from pydantic import JsonValue

from caraml.base.text import printable
from caraml.results.record import Record
from caraml.suite.model import Point


def labels(records: Sequence[Record]) -> dict[str, str]:
    """A label for each key. Points that would share one get the values in which they differ."""
    sharing: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        sharing[record.point.label].append(record)
    named: dict[str, str] = {}
    for label, group in sharing.items():
        found = {record.key: _values(record.point) for record in group}
        names = sorted({name for one in found.values() for name in one})
        differing = [name for name in names if len({json.dumps(one.get(name), sort_keys=True) for one in found.values()}) > 1]
        if "machine" in differing and len({str(one["machine"]) for one in found.values()}) == len(group):
            differing = ["machine"]
        for key, one in found.items():
            words = (str(one[name]) if name == "machine" else f"{name}={one.get(name)}" for name in differing)
            named[key] = printable(" ".join([label, *words]))
    return named


def machine(point: Point) -> str:
    """The machine's name for people: that of the catalogue, or what computes in a machine that is not in it."""
    return point.system if point.system != "local" else point.device.rpartition(" x")[0] or point.device


def clipped(texts: Sequence[str], limit: int) -> list[str]:
    """Each text in ``limit`` characters: one that is longer loses the words with which all of them begin, then its end."""
    words = [text.split() for text in texts]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False))) if len(texts) > 1 else 0
    return [_clipped(text, own[shared:] if shared else [], limit) for text, own in zip(texts, words, strict=True)]


def _clipped(text: str, telling: Sequence[str], limit: int) -> str:
    if len(text) <= limit:
        return text
    brief = " ".join(["…", *telling]) if telling else text
    return brief if len(brief) <= limit else f"{brief[: limit - 1]}…"


def _values(point: Point) -> dict[str, JsonValue]:
    own: dict[str, JsonValue] = {"device": point.device, "seed": point.seed, "software": point.software, "micro_batch": point.micro_batch}
    return {**point.params, **own, "machine": machine(point)}
