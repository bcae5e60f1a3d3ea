"""The table of results, a row per point, and everything about each point for those who ask: packed small, and unpacked by the page."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraml.base.text import printable
from caraml.report.explain import definition, energy_reason, flag_text, source, uncertainty, window_text
from caraml.report.flatten import flat
from caraml.report.labels import machine
from caraml.report.numbers import written
from caraml.report.quantities import node_only
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.units import METRICS, title_of

HEADLINE = (
    "throughput",
    "energy_per_item",
    "mfu",
    "mfu_measured",
    "share_of_limit",
    "step_time_median",
    "data_wait_share",
    "peak_memory",
)
"""Metrics of the table; the others stand among the numbers of a point."""


@dataclass(frozen=True)
class Cell:
    """One number of the table: what is written, and the exact value for sorting and copying."""

    metric: str
    text: str
    value: float | None


@dataclass(frozen=True)
class Row:
    """One point of the page."""

    key: str
    label: str
    machine: str
    workload: str
    status: str
    reason: str
    flags: list[str]
    cells: list[Cell]
    """Empty for a point without a window."""
    folder: str


def rows(store: Store, records: Sequence[Record], named: Mapping[str, str]) -> list[Row]:
    """A row for each record, in their order."""
    return [
        Row(
            key=record.key,
            label=named[record.key],
            machine=printable(machine(record.point)),
            workload=record.point.workload,
            status=record.status,
            reason=record.reason or "",
            flags=flags(record),
            cells=[_cell(record, name) for name in HEADLINE] if record.metrics else [],
            folder=_folder(store, record),
        )
        for record in records
    ]


def flags(record: Record) -> list[str]:
    """Flags of the record and of its energy. That a sensor is missing is said by the energy's own cell."""
    energy = record.energy.flags if record.energy is not None and energy_reason(record) is None else []
    return list(dict.fromkeys([*record.flags, *energy]))


def heading(name: str) -> str:
    """Title of a metric, also of one that only a newer CARAML knows."""
    return title_of(name) if name in METRICS else name


def _folder(store: Store, record: Record) -> str:
    return store.folder(record).relative_to(store.root).as_posix()


def _cell(record: Record, name: str) -> Cell:
    metric = record.metrics.get(name)
    text = written(name, metric) if metric is not None and metric.value is not None else ""
    if not text and record.window is not None:
        text = (node_only(record) or "no sensor") if name == "energy_per_item" else "not known"
    return Cell(name, text, metric.value if metric is not None else None)


def everything(store: Store, records: Sequence[Record], named: Mapping[str, str], traces: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page tells of single points when it is asked: definitions once, and by key each point with its numbers and power."""
    names = list(dict.fromkeys([*HEADLINE, *(name for record in records for name in record.metrics)]))
    return {
        "metrics": {name: [heading(name), definition(name)] for name in names},
        "points": {record.key: _point(store, record, named[record.key], traces.get(record.key)) for record in records},
    }


def _point(store: Store, record: Record, label: str, trace: Any) -> dict[str, Any]:
    window = record.window
    return {
        "label": label,
        "status": record.status,
        "reason": record.reason or "",
        "flags": [(flag, flag_text(record, flag)) for flag in flags(record)],
        "window": window_text(record),
        "span": [window.start, window.end] if window else None,
        "folder": _folder(store, record),
        "files": ["record.json", *record.files.values()],
        "facts": flat(record.facts.model_dump(mode="json")) if record.facts is not None else [],
        "numbers": [_number(record, name) for name in record.metrics],
        "trace": trace,
    }


def _number(record: Record, name: str) -> list[Any]:
    """Metric, title, what is written, exact value, uncertainty, boundary, source, note."""
    metric = record.metrics[name]
    known = metric.value is not None
    return [
        name,
        title_of(name, record.item) if name in METRICS else name,
        _cell(record, name).text,
        metric.value,
        uncertainty(name, metric) if known else "",
        metric.scope or "",
        source(record, name) if known else "",
        metric.reason or "",
    ]


def pack(content: dict[str, Any]) -> str:
    """``content`` as base64 of gzip of JSON: a tenth of its size, and letters that no HTML parser takes for markup."""
    text = printable(json.dumps(content, separators=(",", ":"), ensure_ascii=False))  # JSON spells control characters out
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def unpack(packed: str) -> dict[str, Any]:
    """What :func:`pack` packed."""
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return content
