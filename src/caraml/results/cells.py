"""Tables of text that JUBE writes, as rows of cells by their titles, and the numbers in them.

Any separator is read, frames for people are taken off, and a table whose titles are its first column is turned.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from functools import lru_cache
from pathlib import Path

from caraml.base.errors import InputError, in_words
from caraml.base.format import JOULES_PER_WATT_HOUR, count
from caraml.base.limits import JUBE, JUBE_CELLS, JUBE_ROWS, KEY, METRICS, is_measurable, read_bytes, too_large
from caraml.metrics.model import METRICS as DEFINED

LONGEST = 1000
"""Characters of a header or a reason that are shown."""
COUNTS = dict.fromkeys(("globalbatchsize", "global_batch_size", "gbs"), "global_batch") | {"nodes": "nodes", "devices": "devices"}
RATE = re.compile(r"(token|image|sample|sequence)s?_per_s(?:ec(?:ond)?)?")
_SET_UP = re.compile(
    r"(^|(?<!_per)_)(id|i|index|jobid|wp|iterations?|size|pp|tp|dp|gas|seed|epochs|nodes|devices|[gi]pus?|tasks|threads|ranks|cores|replicas?|version)($|_)"
    r"|parallel$|batch|size$"
)
"""Names of columns that say how a run was set up, by which titles are known."""
SEPARATED = re.compile(r"[+-]?\d+,\d+|[+-]?\d{1,3}([ ,.'\u00a0\u202f]\d{3})+([.,]\d+)?")
"""Numbers with a decimal comma, or with separators of thousands. Which is which nobody knows: ``1,234``."""
UNITS = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0},
    "W": {"W": 1.0, "kW": 1e3, "mW": 1e-3},
    "J": {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": JOULES_PER_WATT_HOUR, "kWh": 1e3 * JOULES_PER_WATT_HOUR},
    "VA": {"VA": 1.0, "kVA": 1e3},
    "B": {"B": 1.0, "MiB": 2.0**20, "GiB": 2.0**30, "MB": 1e6, "GB": 1e9},
    "1": {"%": 0.01},
}
"""Units of CARAML's metrics, and what others are in them."""
_OVER_UNIT = re.compile(r"((?i:.*(?:time|duration|latency|power|energy|memory)))\s+/\s+(\S+)")
"""``Power / W``; a rate is written without spaces."""
_IN_NAME = re.compile(r"(?i)(.+(?<!_per))_([um]s|(?<=time_)s|(?<=duration_)s|k?wh|(?<=power_)k?w|(?<=energy_)k?j|[mg]i?b)")
"""A name with its unit: ``energy_Wh``. Not ``tokens_s``, ``img_w``, ``_h``, ``_b`` and ``_min``, which mean other things as well, nor
``_mW``."""
_SPELT = {unit.lower(): unit for units in UNITS.values() for unit in units if unit not in ("mW", "MJ")}
_RULE = re.compile(r"(?=[^-]*-+-)[\s|+:-]+|\|(\s*:?-:?\s*\|)+")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The cells of each row by their titles.

    Raises:
        InputError: not a table of text, no header, a row of another length, or more than is read.
    """
    try:
        data = read_bytes(path, JUBE)
        text = data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    except (ValueError, OSError) as error:  # ValueError: not UTF-8, or a name that no file can have
        hint = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else None
        raise InputError(f"{path}: not a table of text: {error}", hint) from error
    framed, separator = _dialect(list(io.StringIO(text, newline="")))
    reader = csv.reader(framed, delimiter=separator, skipinitialspace=separator != "|")  # quotes may follow a space
    lines: list[tuple[int, list[str]]] = []
    try:
        for line in reader:
            if any(map(str.strip, line)):
                lines.append((reader.line_num, [cell.strip() for cell in line]))
            rows_read = len(lines) - 1
            if rows_read > JUBE_ROWS or (rows_read > 0 and rows_read * len(lines[0][1]) > JUBE_CELLS):
                raise InputError(f"{path}: found more than {JUBE_ROWS:,} rows or {JUBE_CELLS:,} cells, the most that are read")
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not a table of text: {error}") from error
    header: list[str] = []
    rows: list[dict[str, str]] = []
    for number, line in _upright(path, lines):
        row = _whole_lists(line, len(header))
        if header and len(row) != len(header):
            raise InputError(f"{path}:{number}: found {count(len(row), 'cell')}, expected {len(header)} as in the header")
        if header:
            rows.append(dict(zip(header, row, strict=True)))
        else:
            header = _header(path, row)
    if not rows:
        raise InputError(f"{path}: found 0 rows below a header, expected 1 to {JUBE_ROWS:,}")
    return rows


def _upright(path: Path, lines: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """Numbered lines with the titles in the first one; JUBE's ``transpose`` puts them into the first column."""
    titles = [line[0] for _, line in lines]
    if len(set(titles)) < len(titles) or not any(map(_is_title, titles[1:])) or any(map(_is_title, lines[0][1][1:])):
        return lines
    width = min(len(line) for _, line in lines)
    if width - 1 > JUBE_ROWS:
        raise too_large(path, width - 1, JUBE_ROWS, "columns beside the titles")
    columns = [_whole_lists(line, width) for _, line in lines]
    for (number, _), column in zip(lines, columns, strict=True):
        if len(column) != width:
            raise InputError(f"{path}:{number}: found {count(len(column), 'cell')}, expected {width}, a title and a cell of each row")
    return [(1, list(row)) for row in zip(*columns, strict=True)]


def _is_title(text: str) -> bool:
    """Whether a cell is the title of something that is known, or has a unit."""
    name, unit = name_and_unit(text)
    own = name in COUNTS or name in DEFINED or name in ("system", "energyfile") or RATE.fullmatch(name) or _SET_UP.search(name)
    return bool(own) or (unit is not None and any(unit in units for units in UNITS.values()))


def _dialect(lines: list[str]) -> tuple[list[str], str]:
    """The lines, without the frame of a table that JUBE printed for people, and what separates cells: JUBE takes any separator."""
    if start := next((number for number, line in enumerate(lines) if _RULE.fullmatch(line)), 0):
        inner = [line.strip().removeprefix("|").removesuffix("|") if "|" in line and not _RULE.fullmatch(line) else "" for line in lines]
        return [*[""] * (start - 1), *inner[start - 1 :]], "|"
    first = next(filter(str.strip, lines), "")
    if any(line.startswith("|") for line in lines):  # printed for people, with the titles in the first column
        return [line.strip().removeprefix("|").removesuffix("|") if line.startswith("|") else "" for line in lines], "|"
    return lines, max(",;\t|", key=first.count)


def _whole_lists(cells: list[str], width: int) -> list[str]:
    """The cells of a row below a header of ``width``; a list in brackets is one, although JUBE does not quote its commas."""
    if not 0 < width < len(cells):
        return cells
    found: list[list[str]] = []
    depth = 0
    for cell in cells:
        if depth:
            found[-1].append(cell)
        else:
            found.append([cell])
        depth = max(0, depth + cell.count("[") - cell.count("]"))
    return [", ".join(parts) for parts in found]


def _header(path: Path, header: list[str]) -> list[str]:
    if len(header) > METRICS:
        raise too_large(path, len(header), METRICS, "columns")
    if (longest := max(map(len, header))) > KEY:  # every record has the titles
        raise too_large(path, longest, KEY, "characters of a title")
    header = [header[0] or "index", *header[1:]]  # pandas writes its index without a name
    if len(set(header)) < len(header) or not all(header):
        raise InputError(f"{path}:1: expected a header of different names, found {in_words(header)[:LONGEST]}")
    return header


@lru_cache(maxsize=2 * METRICS)
def name_and_unit(title: str) -> tuple[str, str | None]:
    """``Tokens/second`` as ``tokens_per_second``; a unit stands in brackets, as JUBE and CARAML's scripts write it."""
    opening = title.rfind({"]": "[", ")": "("}.get(title[-1:], "\0"))
    words, unit = (title, "") if opening < 0 else (title[:opening], title[opening + 1 : -1])
    if (found := _OVER_UNIT.fullmatch(title)) and any(found[2] in units for units in UNITS.values()):
        words, unit = found[1], found[2]
    elif not unit and (found := _IN_NAME.fullmatch(title)):
        words, unit = found[1], _SPELT.get(found[2].lower(), found[2])
    elif not unit and re.search(r"(?i)(^|_)tflops$", title):
        unit = "TFLOP/s"
    return re.sub(r"[^a-z0-9]+", "_", words.lower().replace("/", "_per_")).strip("_") or "column", unit or None


def number(text: str) -> float | None:
    """The finite number that a cell is; none beyond what a record can hold, as of hashes like ``1e151``."""
    value = _finite(text)
    return value if value is None or is_measurable(value) else None


def numbers(text: str) -> list[float | None]:
    """The numbers of a list in brackets, or the one that a cell is."""
    return [number(one) for one in listed(text)]


def listed(text: str) -> list[str]:
    return text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]


def last_digit(text: str) -> float:
    """What one more in the last digit of a number is: 0.01 of ``1.39``."""
    digits, _, power = text.strip().lower().partition("e")
    tens = int(power) if power and number(text) else 0  # of `0e999999999` nothing
    return float(10.0 ** (tens - len(digits.partition(".")[2])))


def number_of(text: str) -> int | None:
    """The whole number of one or more that a cell is."""
    value = _finite(text)
    return int(value) if value is not None and value == int(value) >= 1 else None


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
