"""Read the sources' texts and write the CSV files of published numbers again: ``extract.py SOURCES_FOLDER [--out FOLDER]``.

Every run checks itself: the rows of each table, sums that were added up by hand, and that every number typed by hand stands in the text.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import maelstrom
import small
import stated
from common import written

from caraml.reference import FIELDS

DATA = Path(__file__).parents[2] / "src" / "caraml" / "reference" / "data"


def _maelstrom(text: str) -> Iterator[list[str]]:
    yield from maelstrom.rows(text)
    yield from stated.rows("maelstrom", text, stated.MAELSTROM)


SOURCES: dict[str, tuple[str, Callable[[str], Iterator[list[str]]]]] = {
    "caraml": ("000_caraml_slides_sc24.txt", small.caraml),
    "maelstrom": ("001_maelstrom_d3.7_hardware_benchmarking.txt", _maelstrom),
    "pearc": ("003_pearc22_accelerators.txt", small.pearc),
    "epicure": ("004_epicure_best_practice_ai.txt", small.epicure),
}
"""File of each source and what reads it. CARAML's read-me, the fifth source, has no results."""

MAELSTROM_ROWS = (
    "6 6 0 4 11 48 48 48 48 54 54 135 135 150 90 45 120 120 129 129 147 24 24 24 24 33 96 66 54 96 84 90 72 36 144 95 192 57 54"
)
MAELSTROM_ROWS += " 21 21 40 40 16"
"""Numbers of Tables 1 to 44: rows of numbers times runs, less the empty cells, counted in the report."""

COUNTS = {
    "caraml": {"IPU NLP": 27, "IPU CV": 27},
    "maelstrom": {f"Table {number}": int(count) for number, count in enumerate(MAELSTROM_ROWS.split(), start=1) if count != "0"},
    "pearc": {"Table 1": 12, "Table 2": 5, "Table 3": 24, "Table 4": 20},
    "epicure": {},
}

SUMS = [
    ("caraml", "IPU NLP", "throughput", 1378.34),
    ("caraml", "IPU CV", "epoch_energy", 284.85 * 3600),
    ("maelstrom", "Table 6", "device_energy", (61.11 + 56.98 + 56.62) * 3600),
    ("maelstrom", "Table 17", "runtime", 15469.02),
    ("maelstrom", "Table 30", "training_time", 956.05),
    ("maelstrom", "Table 37", "epoch_time_mean", 7056.25),
    ("maelstrom", "Table 44", "action", (23391.89 + 18563.09) * 1e6),
    ("pearc", "Table 3", "throughput", 176330.0),
    ("pearc", "Table 4", "epoch_time_second", 613.5),
]
"""Sums over a table's runs, added up from the printed pages."""


def extract(folder: Path, source: str) -> str:
    """The CSV file of one source. Raises ``ValueError`` if a check fails."""
    name, read = SOURCES[source]
    rows = list(read((folder / name).read_text(encoding="utf-8")))
    _check(source, rows)
    return written(rows)


def _check(source: str, rows: list[list[str]]) -> None:
    table, metric, value = (FIELDS.index(name) for name in ("table", "metric", "value"))
    counted = Counter(row[table] for row in rows)
    for name, count in COUNTS[source].items():
        if counted[name] != count:
            raise ValueError(f"{source}, {name}: expected {count} numbers, found {counted[name]}")
    for of, name, what, expected in SUMS:
        found = sum(float(row[value]) for row in rows if row[table] == name and row[metric] == what)
        if of == source and abs(found - expected) > 1e-6 * expected:
            raise ValueError(f"{source}, {name}: the {what} add up to {found}, expected {expected}")


def main() -> None:
    """Write all files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the sources' texts")
    parser.add_argument("--out", type=Path, default=DATA, help="where the CSV files go; default: the package's data")
    arguments = parser.parse_args()
    for source in SOURCES:
        try:
            text = extract(arguments.folder, source)
        except (OSError, ValueError) as error:
            sys.exit(f"{source}: {error}")
        (arguments.out / f"{source}.csv").write_text(text, encoding="utf-8")
        print(f"{source}: {text.count(chr(10)) - 1} numbers")


if __name__ == "__main__":
    main()
