"""Draw the gallery: ``gallery.py DOCS_FOLDER`` writes ``gallery.md`` and ``gallery/*.svg``, figures of ``caraml report`` without results.

In ``published.md`` of that folder it writes the list of figures anew.
"""

from __future__ import annotations

import argparse
import re
from itertools import groupby
from pathlib import Path

from caraml.base.chart import standalone
from caraml.base.files import write_file
from caraml.reference import SHORT
from caraml.reference.figures import PublishedFigure, published_figures
from caraml.report.published import draw

INTRODUCTION = """# Gallery of published results

Every figure on this page is drawn from the numbers that `caraml references` prints, with the sources' misprints where a caption does not
say otherwise. `caraml report` draws the same figures with your results in them, if a campaign has the workload.
[Published results](published.md#figures) has the command of each, the sources, what disagrees in them, and what cannot be drawn.
`python bench/reference/gallery.py docs` draws the page again.
"""


def file_name(figure: PublishedFigure) -> str:
    """Name of a figure's file."""
    return re.sub(r"[^a-z0-9]+", "-", f"{figure.source} {figure.name}".lower()).strip("-")[:60] + ".svg"


def page() -> str:
    """The gallery as Markdown."""
    parts = [INTRODUCTION]
    for heading, figures in groupby(published_figures(), lambda figure: figure.section):
        parts.append(f"## {heading}\n")
        for one in figures:
            parts.append(f"![{one.title}](gallery/{file_name(one)})\n")
            parts.append(f"{SHORT[one.source]} {one.name}. {one.note}\n")
    return "\n".join(parts)


def listed() -> str:
    """The figures with their commands, as the rows of a table."""
    rows = [f"| {SHORT[one.source]} | {one.name} | {one.title} | `{one.command}` |" for one in published_figures()]
    return "\n".join(["| source | figure | what it shows | command |", "|---|---|---|---|", *rows])


def with_list(text: str) -> str:
    """``published.md`` with the list of figures between its two marks."""
    begin, end = "<!-- figures -->\n", "\n<!-- end of figures -->"
    return text[: text.index(begin) + len(begin)] + listed() + text[text.index(end) :]


def main() -> None:
    """Write the page and its drawings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("docs", type=Path, help="folder of gallery.md")
    folder = parser.parse_args().docs
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    for one in published_figures():
        drawn = draw(one)
        assert drawn is not None, "only results of the user can be missing"
        write_file(folder / "gallery" / file_name(one), standalone(drawn.drawings, drawn.title, drawn.legend, drawn.key))
    write_file(folder / "gallery.md", page())
    published = folder / "published.md"
    if published.exists():
        write_file(published, with_list(published.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
