"""Results for other tools and for papers: Markdown, CSV, and every figure as a file of its own."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from caraml.analysis.table import COLUMNS, to_csv, units
from caraml.analysis.table import rows as flat_rows
from caraml.base.files import write_file
from caraml.base.text import printable
from caraml.errors import InputError
from caraml.report.figure import Figure
from caraml.report.labels import labels
from caraml.report.page import summary
from caraml.report.rows import HEADLINE, heading, rows
from caraml.report.sections import sections
from caraml.report.standalone import standalone
from caraml.report.tables import safe_cells
from caraml.results.record import Record
from caraml.results.store import Store

PIXELS = 3
"""Pixels of a PNG for each one of the drawing: about 290 per inch at the size of a column."""


def csv_text(records: Sequence[Record]) -> str:
    """Every metric of every record as CSV, numbers exact and unscaled, the unit in the heading."""
    return to_csv(list(COLUMNS), [safe_cells(list(row.values())) for row in flat_rows(records)], units(records))


def markdown(store: Store, records: Sequence[Record], title: str) -> str:
    """The table of results, what has no result, and the numbers of every figure, as Markdown."""
    named = labels(records)
    table = rows(store, records, named)
    parts = [f"# {_md(title)}", "\n".join(f"- {_md(name)}: {_md(value)}" for name, value in summary(records))]
    found = [[row.label, row.status, ", ".join(row.flags), *(cell.text for cell in row.cells)] for row in table if row.cells]
    if found:
        parts += ["## Results", _table(["point", "status", "flags", *map(heading, HEADLINE)], found)]
    missing = [[row.label, row.status, row.reason] for row in table if row.status != "ok"]
    if missing:
        parts += ["## Points without a result", _table(["point", "status", "reason"], missing)]
    for section in sections(store, records):
        parts += [f"## {_md(section.title)}", *map(_md, section.notes)]
        for figure in section.figures:
            parts += [f"### {_md(figure.title)}", _table(figure.columns, figure.rows), *([_md(figure.note)] if figure.note else [])]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = f"| {' | '.join(map(_md, columns))} |\n|{' --- |' * len(columns)}"
    return "\n".join([head, *(f"| {' | '.join(map(_md, line))} |" for line in lines)])


def _md(text: str) -> str:
    """Text that Markdown shows as it is: neither markup nor HTML nor the end of a cell."""
    return re.sub(r"([\\`*_{}\[\]|#!~])", r"\\\1", html.escape(printable(" ".join(text.split())), quote=False))


def write_figures(store: Store, records: Sequence[Record], folder: Path, kind: str) -> list[Path]:
    """Write every figure of the records into ``folder`` as ``svg``, ``pdf`` or ``png``, numbered in the order of the page.

    Raises ``InputError`` if there is none.
    """
    figures = [figure for section in sections(store, records) for figure in section.figures]
    if not figures:
        raise InputError("these results allow no figure: no point has a number")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, figure in enumerate(figures, start=1):
        path = folder / f"{number:02d}-{figure.slug}.{kind}"
        WRITERS[kind](figure, path)
        paths.append(path)
    return paths


def _svg(figure: Figure, path: Path) -> None:
    write_file(path, standalone(figure))


def _pdf(figure: Figure, path: Path) -> None:
    import vl_convert

    write_file(path, vl_convert.svg_to_pdf(standalone(figure)))


def _png(figure: Figure, path: Path) -> None:
    import vl_convert

    write_file(path, vl_convert.svg_to_png(standalone(figure), scale=PIXELS))


WRITERS: dict[str, Callable[[Figure, Path], None]] = {"svg": _svg, "pdf": _pdf, "png": _png}
