"""What the extraction of every source shares: a cell becomes a row, and a table becomes lines of cells."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from caraml.reference import FIELDS

FACTORS: dict[str, tuple[str, str]] = {
    "": ("1", "1"),
    "%": ("0.01", "1"),
    "s": ("1", "s"),
    "ms": ("0.001", "s"),
    "Wh": ("3600", "J"),
    "MJs": ("1e6", "J s"),
    "MJ/s": ("1e6", "J s"),
    "W": ("1", "W"),
    "VA": ("1", "VA"),
    "VAh": ("1", "VAh"),
    "MB": ("1e6", "B"),
    "GB": ("1e9", "B"),
    "TB": ("1e12", "B"),
    "MiB": ("1048576", "B"),
    "GiB": ("1073741824", "B"),
    "MB/s": ("1e6", "B/s"),
    "GB/s": ("1e9", "B/s"),
    "MiB/s": ("1048576", "B/s"),
    "GiB/s": ("1073741824", "B/s"),
    "Gbps": ("0.125e9", "B/s"),
    "PFLOP/s": ("1e15", "FLOP/s"),
    "TFLOP/s": ("1e12", "FLOP/s"),
    "thousand": ("1e3", "1"),
    "million": ("1e6", "1"),
    "billion": ("1e9", "1"),
    "images/s": ("1", "image/s"),
    "1/Wh": ("1", "sample/Wh"),
    "images/Wh": ("1", "image/Wh"),
    "1/s": ("1", "sample/s"),
    "items/s": ("1", "sample/s"),
}
"""Printed units: what one of them is in ours."""


@dataclass(frozen=True)
class Row:
    """A row of a CSV file; the fields are those of :class:`caraml.reference.Reference`."""

    source: str
    table: str
    run: int = 0
    system: str = ""
    device: str = ""
    devices: int | None = None
    nodes: int | None = None
    workload: str = ""
    mode: str = "train"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def number(self, metric: str, printed: str, unit: str, *, means: str | None = None, note: str = "", **parameters: Any) -> list[str]:
        """One line of the file: ``printed`` in the printed ``unit``, converted as if that were ``means``."""
        factor, ours = FACTORS[unit if means is None else means]
        digits = "1e6" if printed == "10⁶" else printed.replace(",", "").replace(" ", "")
        value = "" if digits == "N/A" else plain(Decimal(digits) * Decimal(factor))
        row = replace(self, parameters={**self.parameters, **parameters}, note="; ".join(filter(None, (self.note, note))))
        facts = json.dumps(row.parameters, ensure_ascii=False, separators=(",", ":")) if row.parameters else ""
        cells = {**row.__dict__, "parameters": facts}
        cells |= {"metric": metric, "value": value, "unit": ours, "printed": printed, "printed_unit": unit}
        return ["" if cells[name] is None else str(cells[name]) for name in FIELDS]


def plain(number: Decimal) -> str:
    """A number without exponent and without zeros that say nothing."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(text: str) -> int | float | str:
    """A parameter's cell as a number if it is one."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def blocks(text: str) -> dict[str, list[list[str]]]:
    """Tables that stand above their captions: ``Table N`` to the lines of cells between this caption and the one before."""
    found: dict[str, list[list[str]]] = {}
    lines: list[list[str]] = []
    for line in text.splitlines():
        caption = re.match(r"(?:\*\*)?(Table \d+): ", line)
        if caption:
            found[caption.group(1)] = lines
            lines = []
        elif "\t" in line:
            lines.append([re.sub(r"</?b>", "", cell).strip() for cell in line.split("\t")])
        elif re.match(r"#+ ", line) and "Appendix" in line:
            lines = []
    return found


def below(text: str, heading: str) -> list[list[str]]:
    """Lines of cells of the first table that stands below ``heading``."""
    lines: list[list[str]] = []
    for line in text[text.index(heading) :].splitlines():
        if "\t" in line:
            lines.append([cell.strip() for cell in line.split("\t")])
        elif lines:
            break
    return lines


def check_stated(text: str, anchor: str, printed: str, reach: int = 1300) -> None:
    """A number typed by hand stands in the source, not far behind ``anchor``. Raises ``ValueError`` if not."""
    start = text.find(anchor)
    if start < 0:
        raise ValueError(f"the text has no {anchor!r}")
    if not re.search(rf"(?<![\d.,]){re.escape(printed)}(?!\d|[.,]\d)", text[start : start + reach]):
        raise ValueError(f"no {printed} within {reach} characters behind {anchor!r}")


def written(rows: Iterable[list[str]]) -> str:
    """The file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows(rows)
    return text.getvalue()
