"""Tables of text that JUBE writes, as rows of cells, and what their titles say that the columns hold.

Any separator is read, frames for people are taken off, and a table whose titles are its first column is turned. What a column holds is the
same in every row.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from caraml.base.errors import InputError, in_a_line
from caraml.base.format import JOULES_PER_WATT_HOUR, count
from caraml.base.limits import JUBE, JUBE_CELLS, JUBE_ROWS, KEY, LARGEST, METRICS, read_text, too_large
from caraml.metrics.definitions import METRICS as DEFINED
from caraml.suite.jube import PRECISIONS

LONGEST = 1000
"""Characters of a header or a reason that are shown."""
_COUNTS = dict.fromkeys(("globalbatchsize", "global_batch_size", "gbs"), "global_batch") | {"nodes": "nodes", "devices": "devices"}
_COUNTED = {"global_batch": "(sample|image|img|sequence)s?", "nodes": "nodes?", "devices": "(device|[gi]pu|gcd)s?"}
"""What is counted, as units say it: a batch of tokens is none of samples."""
_RATE = re.compile(r"(token|image|sample|sequence)s?_per_s(?:ec(?:ond)?)?")
_SET_UP = re.compile(
    r"(^|(?<!_per)_)(id|i|index|jobid|wp|iterations?|size|pp|tp|dp|gas|seed|epochs|nodes|devices|[gi]pus?|tasks|threads|ranks|cores|replicas?|version)($|_)"
    r"|parallel$|batch|size$"
)
"""Names of columns that say how a run was set up, by which titles are known."""
_MEASURED = re.compile(
    r"(loss|accuracy|perplexity|score|psnr|ssim|latency|elapsed|(?<!job_)(?<!job)(?<!max_)(?<!min_)(?<!out_)(?<!up_)time|throughput|speedup"
    r"|flops?|efficiency|util(i[sz]ation)?|(?<!max_)power|energy|overhead|errors?|(peak|used)_?(device_)?mem(ory)?|mem(ory)?(?=_used|_alloc)"
    r"|(^|_)(acc|ppl|bleu|f1|auc|mae|r?mse|[mh]fu|flop_per_s|top_?\d|step_time|(gpu|node|core|device)_hours))"
    r"(_(avg|average|mean|median|std|min|max|total|sum|p\d+|first|last|final|best|train(ing)?|val(idation)?|test|top_?\d|counter"
    r"|used|allocated|reserved|consumed|draw|(epoch|step|iteration)_\d+))*(_per_\w+)?$"
    r"|^(avg|average|mean|median)_(?!pool)|^time_to_|_per_(it|iter|iteration|step|s|sec|second|min|minute|h|hour|j|joule|wh|kwh|watt)($|_)"
)
"""Names of columns that are results without a unit: by their last word, so that a ``loss_scale`` and a ``power_limit`` are none."""
_UNIT_OF_NAME = re.compile(
    r"_(ns|us|ms|s|secs?|seconds|min|minutes|h|m?w|kw|watts?|[km]?j|joules?|k?wh|k?va|[kmgt]i?b|gb_?p?s|pct|percent)$"
)
_EITHER = re.compile(r"(^|_)(time|duration|seconds|speed|bandwidth|memory|mem)(_used|_total)?$")
"""Names that a setting has as well: of results where a cell has a fraction."""
_ASKED = re.compile(
    r"(size|len|length|limit|cap|timeout|batch|layers|heads|learning_?rate|job_?time|grad(ient)?_?acc(um(ulation)?)?|(z|aux)_loss"
    r"|memory_utili[sz]ation|(^|_)(params?|parameters?|lr|seq|sequence|[gi]pus|ranks|tasks|threads|cores|epochs|seed))$"
)
"""Names of columns that are none, also with a unit."""
_BOOKKEEPING = re.compile(
    r"jube_.*|id|index|wp|(.*_)?(job|run|wp|workpackage|task|array|step|benchmark|experiment)_?id|((train|num)_?)?iterations?"
    r"|date|time_?stamp|(start|end)_?time|node_?list|host_?names?|log|stdout|stderr|(abs|rel)path|(.*_)?(energy|log|out|err|result)_?(file|path)s?"
)
"""Names of columns that tell runs of the same work apart, or say how far a run came in its time."""
_DATA_PARALLEL = re.compile(r"(^|_)dp($|_)|data_?parallel")
_OF_DEVICES = re.compile(r"(^|_)n?([gi]pus?|tasks|ranks|processes|replicas?)($|_)|^world_?size$")
"""Names of columns that mostly are the devices, or those of a node."""
LIMITS = ("Runtime(min)", "exit_duration")
"""Titles of CARAML's scripts for the time after which a run was to end, which is no measurement."""
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
_TEXTS = ("system", "precision", "energyfile")
BELOW_ZERO = "which is never below zero"
SIGNED = {"energy_net", "loss_first", "loss_last", "loss_validation", "psnr", "ssim", "ms_ssim"}
"""Metrics that may be below zero."""
_RULE = re.compile(r"(?=[^-]*-+-)[\s|+:-]+|\|(\s*:?-:?\s*\|)+")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The cells of each row by their titles.

    Raises:
        InputError: not a table of text, no header, a row of another length, or more than is read.
    """
    try:
        text = read_text(path, JUBE).removeprefix("\ufeff")
    except (ValueError, OSError) as error:  # ValueError: not UTF-8, or a name that no file can have
        raise InputError(f"{path}: not a table of text: {error}") from error
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
    own = name in _COUNTS or name in DEFINED or name in ("system", "energyfile") or _RATE.fullmatch(name) or _SET_UP.search(name)
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
        raise InputError(f"{path}:1: expected a header of different names, found {', '.join(header)[:LONGEST]}")
    return header


@lru_cache(maxsize=2 * METRICS)
def name_and_unit(title: str) -> tuple[str, str | None]:
    """``Tokens/second`` as ``tokens_per_second``; a unit stands in brackets, as JUBE and CARAML's scripts write it."""
    opening = title.rfind({"]": "[", ")": "("}.get(title[-1:], "\0"))
    words, unit = (title, "") if opening < 0 else (title[:opening], title[opening + 1 : -1])
    return re.sub(r"[^a-z0-9]+", "_", words.lower().replace("/", "_per_")).strip("_") or "column", unit or None


def number(text: str) -> float | None:
    """The finite number that a cell is; none beyond what a record can hold, as of hashes like ``1e151``."""
    value = _finite(text)
    return value if value is None or not value or 1 / LARGEST < abs(value) < LARGEST else None


def numbers(text: str) -> list[float | None]:
    """The numbers of a list in brackets, or the one that a cell is."""
    return [number(one) for one in _listed(text)]


def _listed(text: str) -> list[str]:
    return text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]


def _last_digit(text: str) -> float:
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


def energy_of_nodes(path: Path) -> dict[str, float] | str:
    """Energy [Wh] of each node in the table that CARAML's scripts make of jpwr's, or why it is not known.

    The table has a row for each rank, each of which has all devices of its node.
    """
    try:
        rows = read_rows(path)
    except InputError as error:
        return f"its energy is in a file of its own that is not beside the table: {in_a_line(error)}"[:LONGEST]
    devices = [name for name in rows[0] if re.fullmatch(r"(pynvml|rocm|gc):\d+", name)]
    nodes: dict[str, list[float]] = {}
    for index, row in enumerate(rows, 1):
        each = [(name, number(row[name])) for name in devices]
        told = [(name, value) for name, value in each if value is not None]
        if not told or len(told) < len(each):
            return f"{path.name} has no energy of each device, or not of every rank"
        if below := next((name for name, value in told if value < 0), None):
            return f"{path.name}: row {index} below the header: found {below!r} of {row[below]!r}, {BELOW_ZERO}"[:LONGEST]
        nodes.setdefault(row.get("nodename", ""), []).append(sum(value for _, value in told))
    return {name: fmean(ranks) for name, ranks in nodes.items()}


# -- what columns hold ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Titles by what their columns hold."""

    rates: dict[str, str]
    """With what each counts."""
    results: dict[str, str]
    """With a name of its own for each."""
    bookkeeping: set[str]
    """What tells runs of the same work apart, and what follows from the devices."""


def read_columns(path: Path, table: list[dict[str, str]]) -> Columns:
    """What the columns of a table hold. One without a unit is a result if its name says that something was measured; ``path``: for errors.

    Raises:
        InputError: two columns mean the same quantity and differ.
    """
    rates, results, bookkeeping = dict[str, str](), list[str](), set[str]()
    counts = [counts_of(cells) for cells in table]
    for title in table[0]:
        name, unit = name_and_unit(title)
        texts = [cells[title] for cells in table]
        if item := _rated(name, unit):
            rates[title] = item
        elif not unit and (_BOOKKEEPING.fullmatch(name) or (name not in _COUNTS and _follows(name, texts, counts))):
            bookkeeping.add(title)
        elif title not in LIMITS and name not in {"system", "precision", *_COUNTS} and _measured(name, unit, texts):
            results += [title] if any(number(text) is not None or SEPARATED.fullmatch(text) for text in texts) else []
    _see_sound(path, table, {title: found for title in table[0] if (found := _meaning(title, rates.get(title)))})
    return Columns(rates, _named(results), bookkeeping)


def _measured(name: str, unit: str | None, texts: list[str]) -> bool:
    if name in DEFINED:
        return name != "steps" or bool(unit)  # those that were asked for
    own = name if unit else _UNIT_OF_NAME.sub("", name)
    if _ASKED.search(name.partition("_per_")[0]):
        return False
    return bool(unit or _MEASURED.search(own)) or (_EITHER.search(own) is not None and any("." in text for text in texts))


def _rated(name: str, unit: str | None) -> str | None:
    """What a rate counts; ``None`` for anything else, and for a rate in another unit than its own."""
    spelt = name_and_unit(unit)[0] if unit else ""
    rate, own = _RATE.fullmatch(spelt if name in ("throughput", "rate") and unit else name), _RATE.fullmatch(spelt)
    if rate is None:
        return None
    item = rate[1]
    told = spelt in {"", "1_per_s", "per_s", "img_per_s" if item == "image" else ""} or (own is not None and own[1] == item)
    return item if told else None


def is_tflops(name: str, unit: str | None) -> bool:
    """Whether a column holds the TFLOP/s of one device."""
    return name in {"avg_tflops_per_gpu", "tflops_per_gpu"} and (not unit or unit.lower().startswith("tflop"))


def is_energy(name: str, unit: str | None) -> bool:
    """Whether a column holds jpwr's energy of each device."""
    return name in {"energy_per_device", "energy_counter_per_device"} and unit in UNITS["J"]


def counted(title: str) -> str | None:
    """``global_batch``, ``nodes`` or ``devices``, if a column says how many; not where its unit is another one."""
    name, unit = name_and_unit(title)
    what = _COUNTS.get(name)
    return what if what and (not unit or unit in "1#" or re.fullmatch(_COUNTED[what], unit.lower())) else None


def counts_of(cells: dict[str, str]) -> dict[str, int]:
    """What a row counts: ``global_batch``, ``nodes`` and ``devices`` (of all nodes), where the table says them."""
    named = ((counted(title), number_of(text)) for title, text in cells.items())
    return {name: found for name, found in named if name and found}


def own_unit(defined: str, unit: str | None, item: str | None) -> tuple[str, float | None]:
    """CARAML's unit of a metric, with what is counted in it, and what the table's is in it: ``None`` if it is none of its units."""
    found = re.search("token|image|sample|sequence", unit or "")
    own = defined.replace("{item}", item or (found[0] if found else "item"))
    (amount, _, per), (told, _, told_per) = own.partition("/"), re.sub(r"(token|image|sample|sequence)s", r"\1", unit or "").partition("/")
    if per != told_per:
        return own, None
    return own, 1.0 if told == amount else UNITS.get(amount, {}).get(told)


def _follows(name: str, texts: list[str], counts: list[dict[str, int]]) -> bool:
    """Whether a column follows from the devices, which every row has to say: it changes with them, and is no work of its own."""
    if not all("devices" in one for one in counts):
        return False
    found = [number_of(text) for text in texts]
    if _DATA_PARALLEL.search(name):  # copies of a model; not whether there are some
        return all(each is not None and each >= 1 and one["devices"] % each == 0 for each, one in zip(found, counts, strict=True))
    if "batch" in name:
        return found == [one.get("global_batch", 0) / one["devices"] for one in counts]
    devices = [one["devices"] for one in counts], [one["devices"] / one.get("nodes", 1) for one in counts]
    return bool(_OF_DEVICES.search(name)) and found in devices


def _named(titles: list[str]) -> dict[str, str]:
    """A name for each result: titles differ, and what is left of them need not."""
    found, taken, alike = dict[str, str](), set[str](), Counter[str]()
    for title in titles:
        name = plain = name_and_unit(title)[0]
        while name in taken:
            alike[plain] += 1
            name = f"{plain}_{alike[plain] + 1}"
        taken |= {name, f"{name}_in_table"}
        found[title] = name
    return found


def _meaning(title: str, item: str | None) -> tuple[str, float] | None:
    """Which quantity of CARAML's a column says, as a word, and what its unit is in CARAML's; ``item``: what it counts, if it is a rate."""
    name, unit = name_and_unit(title)
    if item or is_tflops(name, unit):
        return (f"{item}/s", 1.0) if item else ("achieved_flops_per_device FLOP/s", 1e12)
    if (what := counted(title)) or name in _TEXTS:
        return what or name, 1.0
    if name not in DEFINED:
        return (f"{name} J", UNITS["J"][unit or ""]) if is_energy(name, unit) else None
    own, factor = own_unit(DEFINED[name].unit, unit, None)
    return (title, 1.0) if factor is None else (f"{name} {own}", factor)


def _see_sound(path: Path, table: list[dict[str, str]], meanings: dict[str, tuple[str, float]]) -> None:
    """Raise :class:`InputError` for two columns of one quantity that differ: nobody knows which is right. Columns of which each row has one
    are one column."""
    for index, cells in enumerate(table, 1):
        told: dict[str, tuple[str, float]] = {}
        for title, (meaning, factor) in meanings.items():
            text = cells[title]
            if text and (meaning in _TEXTS or any(one is not None for one in numbers(text))):
                other, times = told.setdefault(meaning, (title, factor))
                if not _alike(meaning, (cells[other], times), (text, factor)):
                    both = f"{cells[other][:LONGEST]!r} and {text[:LONGEST]!r}"
                    place = f"{path}: row {index} below the header"
                    raise InputError(f"{place}: {other!r} and {title!r} mean the same, found {both}", "rename or remove one of the columns")


def _alike(meaning: str, *cells: tuple[str, float]) -> bool:
    """Whether two cells, each with its unit, say the same: numbers as far as their last digits go, but for what is counted."""
    if meaning in _TEXTS:
        one, other = (PRECISIONS.get(text, PRECISIONS.get(text.lower(), text.casefold())) for text, _ in cells)
        return one == other
    first, second = (
        [(value * factor, _last_digit(one) * factor) for one in _listed(text) if (value := number(one)) is not None]
        for text, factor in cells
    )
    if len(first) != len(second):
        return False
    within = 0.0 if meaning in _COUNTED else 0.5
    return all(a == b or abs(a - b) <= within * max(last, other) for (a, last), (b, other) in zip(first, second, strict=True))
