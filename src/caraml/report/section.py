"""What reports are made of: sections with a table, prose and figures; and how each looks in a terminal and as Markdown.

The templates of the page render the same sections as HTML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caraml.base.chart import Drawing, Key
from caraml.base.format import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

STYLES = {
    **{"ok": "green", "skipped": "dim", "oom": "yellow", "timeout": "yellow", "invalid": "red", "failed": "bold red"},
    **{"worse": "bold red", "better": "green", "unknown": "dim", "warn": "yellow", "missing": "red"},
}
"""Cells that stand out in a terminal: a status, a verdict, the outcome of a check."""


@dataclass(frozen=True)
class ReportFigure:
    """One or more drawings with a legend in common, and their numbers as a table. Texts are still to be escaped."""

    title: str
    drawings: Sequence[Drawing]
    legend: Sequence[str]
    """Names of the series; the place of each decides its colour, dash and shape."""
    key: Key
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def slug(self) -> str:
        """The title as the beginning of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:80] or "figure"


@dataclass(frozen=True)
class Section:
    """A heading, a table, sentences below it, and figures; any of them may be empty."""

    title: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    figures: Sequence[ReportFigure] = ()
    id: str = ""
    """Its address on the page."""


def terminal(sections: Iterable[Section]) -> RenderableType:
    """Sections for a terminal, without their figures."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for section in sections:
        if section.title:
            parts.append(Text(printable(section.title), style="bold"))
        if section.rows:
            parts.append(plain_table(section.columns, section.rows))
        parts += [Text(printable(note)) for note in section.notes]
        parts.append(Text(""))
    return Group(*parts)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], whole: int = 0) -> Table:
    """A table in which nothing is cut off. The first ``whole`` columns are never wrapped; cells of :data:`STYLES` stand out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index < whole)
    for row in rows:
        table.add_row(*(Text(printable(cell), style=STYLES.get(cell, "")) if isinstance(cell, str) else cell for cell in row))
    return table


def in_whole_lines(renderable: RenderableType) -> RenderableType:
    """A table with each row in one line, and a rule as its title alone: for files and programs, which have no width."""
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    if isinstance(renderable, Rule):
        return Text(str(renderable.title))
    if isinstance(renderable, Table):
        for column in renderable.columns:
            column.width = column.max_width = column.ratio = None
            column.no_wrap = True
            for cell in column.cells:
                if isinstance(cell, Text) and "\n" in cell.plain:
                    cell.plain = "  ".join(cell.plain.split("\n"))
        renderable.padding = (0, renderable.padding[1], 0, 0)
    return renderable


def markdown(sections: Iterable[Section]) -> str:
    """Sections as Markdown; of figures, title, numbers and note."""
    parts: list[str] = []
    for section in sections:
        parts += [f"## {escaped_markdown(section.title)}"] if section.title else []
        parts += [_md_table(section.columns, section.rows)] if section.rows else []
        parts += ["\n".join(f"- {escaped_markdown(note)}" for note in section.notes)] if section.notes else []
        for figure in section.figures:
            parts += [
                f"### {escaped_markdown(figure.title)}",
                _md_table(figure.columns, figure.rows),
                *([escaped_markdown(figure.note)] if figure.note else []),
            ]
    return "\n\n".join(parts) + "\n"


def _md_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(row)} |"
        for row in ([*map(escaped_markdown, columns)], ["---"] * len(columns), *(map(escaped_markdown, row) for row in rows))
    )


def escaped_markdown(text: str) -> str:
    """Text that Markdown shows as it is: neither markup nor HTML nor the end of a cell."""
    return re.sub(r"([\\`*_{}\[\]|#!~])", r"\\\1", html.escape(printable(" ".join(text.split())), quote=False))


def clipped(texts: Sequence[str], limit: int) -> list[str]:
    """Each text in ``limit`` characters: one that is longer loses the words that all of them have, then its end, or its middle where
    texts would become alike."""
    words = [text.split() for text in texts]
    shared = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    telling = [[word for word in own if word not in shared] for own in words]
    tell = len({tuple(own) for own in telling}) == len(set(texts))  # words in another order tell, too
    found = [_clipped(text, own if shared and tell else [], limit) for text, own in zip(texts, telling, strict=True)]
    if len({*found}) == len({*texts}):
        return found
    return [text if len(text) <= limit else f"{text[: limit // 2]}…{text[limit // 2 + 1 - limit :]}" for text in texts]


def _clipped(text: str, telling: Sequence[str], limit: int) -> str:
    if len(text) <= limit:
        return text
    brief = " ".join(["…", *telling]) if telling else text
    return brief if len(brief) <= limit else f"{brief[: limit - 1]}…"
