"""Which records did the same work, and in what points differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from caraml.results.record import Record
from caraml.suite.model import Point

Axes: TypeAlias = dict[str, str]
"""What decides a point's result, by name, as text that can be compared."""

_NOT_WORK = {"suite", "benchmark", "variant", "params", "repeat", "seed", "profile", "measure", "knobs"}
"""Fields of a point that are labels, or that do not change what is measured: repeats differ in them; or that stand here in another form."""
_AS_THEY_ARE = "knobs as they are"


def axes(point: Point) -> Axes:
    """Everything that makes a point other work than another one; parameters appear as ``params.NAME``."""
    fields = point.model_dump(mode="json", exclude=_NOT_WORK)
    found = {name: _text(value) for name, value in fields.items()}
    found["knobs"] = point.knobs.label or _AS_THEY_ARE
    return found | {f"params.{name}": _text(value) for name, value in point.params.items()}


def grouped(records: Iterable[Record], key: Callable[[Record], object]) -> list[list[Record]]:
    """Records with equal ``key``, in the order of first appearance."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def without(found: Axes, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """A hashable key of all axes but ``names``."""
    left_out = set(names)
    return tuple(sorted((name, value) for name, value in found.items() if name not in left_out))


def same_work(records: Iterable[Record]) -> list[list[Record]]:
    """Repeats together: records that agree in every axis."""
    return grouped(records, lambda record: without(axes(record.point), ()))


DISTURBED = frozenset({"busy_machine", "throttled", "not_steady", "truncated", "mixed_nodes", "nan_loss", "short_window"})
"""Flags of a run whose numbers may be those of something else than the work: no advice is built on it where there is a choice."""


def undisturbed(repeats: Sequence[Record]) -> list[Record]:
    """The repeats that nothing disturbed; all of them if something disturbed each."""
    return [record for record in repeats if DISTURBED.isdisjoint(record.flags)] or list(repeats)


def disturbances(repeats: Sequence[Record]) -> tuple[str, ...]:
    """Flags of ``DISTURBED`` among the repeats."""
    return tuple(sorted({flag for record in repeats for flag in record.flags} & DISTURBED))


def varying(records: Sequence[Record]) -> list[str]:
    """Names of the axes in which the records are not all alike."""
    found = [axes(record.point) for record in records]
    names = dict.fromkeys(name for one in found for name in one)
    return [name for name in names if len({one.get(name) for one in found}) > 1]


def names(groups: Sequence[Sequence[Record]]) -> list[str]:
    """A name for each group of repeats: the label of its points, with the axes in which groups of one label differ."""
    labels = [_label(group[0]) for group in groups]
    sharing: dict[str, list[Record]] = {}
    for label, group in zip(labels, groups, strict=True):
        sharing.setdefault(label, []).append(group[0])
    differing = {label: varying(firsts) if len(firsts) > 1 else [] for label, firsts in sharing.items()}
    found = []
    for label, group in zip(labels, groups, strict=True):
        values = axes(group[0].point) if differing[label] else {}
        found.append(" ".join([label, *(f"{name.removeprefix('params.')}={values.get(name, '–')}" for name in differing[label])]))
    return found


def _label(record: Record) -> str:
    """The label of a record's point without its repeat; of a published one without what its source does not state."""
    point = record.point
    if "published" not in record.environment:
        return point.model_copy(update={"repeat": 0}).label
    batch = f" b{point.global_batch}" if "batch" in point.params else ""
    return f"{point.benchmark}{batch} {point.nodes}x{point.devices}{'' if point.mode == 'train' else ' ' + point.mode}"


def short(point: Point, names: Iterable[str]) -> str:
    """The values of some axes in a few words, such as ``b64 bf16 1x4``."""
    asked = list(names)
    words = []
    if "global_batch" in asked or "micro_batch" in asked:
        words.append(f"b{point.global_batch}" + (f"/{point.micro_batch}" if "micro_batch" in asked and point.accumulation > 1 else ""))
    if "precision" in asked:
        words.append(point.precision)
    if "compile" in asked:
        words.append({"off": "eager", "default": "compiled"}.get(point.compile, point.compile))
    if "nodes" in asked or "devices" in asked:
        words.append(f"{point.nodes}x{point.devices}")
    if "knobs" in asked and (point.knobs.changed or not words):
        words.append(point.knobs.label or _AS_THEY_ARE)
    known = {"global_batch", "micro_batch", "precision", "compile", "nodes", "devices", "knobs"}
    found = axes(point)
    words += [f"{name.removeprefix('params.')}={found.get(name, '–')}" for name in asked if name not in known]
    return " ".join(words)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
