"""What the titles of a table say that its columns hold: the same in every row, and what the user says comes first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from caraml.base.errors import InputError, unknown_name
from caraml.metrics.model import METRICS as DEFINED
from caraml.results.cells import COUNTS, LONGEST, RATE, SEPARATED, UNITS, last_digit, listed, name_and_unit, number, number_of, numbers
from caraml.suite.jube_script import PRECISIONS

_COUNTED = {"global_batch": "(sample|image|img|sequence)s?", "nodes": "nodes?", "devices": "(device|[gi]pu|gcd)s?"}
"""What is counted, as units say it: a batch of tokens is none of samples."""
_MEASURED = re.compile(
    r"(loss|accuracy|perplexity|score|psnr|ssim|latency|elapsed|(?<!job_)(?<!job)(?<!max_)(?<!min_)(?<!out_)(?<!up_)time|throughput|speedup"
    r"|flops?|efficiency|share|util(i[sz]ation)?|(?<!max_)power|energy|overhead|errors?|(peak|used)_?((device|gpu)_)?(mem(ory)?|vram|hbm)"
    r"|(mem(ory)?|vram|hbm)(_peak|(?=_used|_alloc))|bytes_(read|written|sent|received)|(read|written|sent|received)_bytes"
    r"|(^|_)(acc|rss|ppl|bleu|f1|auc|mae|r?mse|[mh]fu|flop_per_s|top_?\d|step_time|(gpu|node|core|device)_hours))"
    r"(_(avg|average|mean|median|std|min|max|total|sum|p\d+|first|last|final|best|train(ing)?|val(idation)?|test|top_?\d|counter"
    r"|used|allocated|reserved|consumed|draw|(epoch|step|iteration)_\d+))*(_per_\w+)?$"
    r"|^(avg|average|mean|median)_(?!pool)|^time_to_|_per_(it|iter|iteration|step|s|sec|second|min|minute|h|hour|j|joule|wh|kwh|watt)($|_)"
)
"""Names of columns that are results, also without a unit: by their last word, so that a ``loss_scale`` and a ``power_limit`` are none."""
_OF_METERS = re.compile(r"[mk]?(w|wh|j|va|vah)|[^/]+/.+|\S*flop/?s?")
"""Units that make results of columns: rates, power and energy. A setting may be so many %, MB or ms."""
_UNIT_OF_NAME = re.compile(
    r"(?<!_per)_(ns|us|ms|s|secs?|seconds|min|minutes|h|m?w|kw|watts?|[km]?j|joules?|k?wh|k?va|[kmgt]i?b|gb_?p?s|pct|percent)$"
)
_EITHER = re.compile(r"(^|_)(time|duration|seconds|speed|bandwidth|memory|mem)(_used|_total)?$")
"""Names that a setting has as well: of results where there is a unit, or a cell has a fraction."""
_MADE = re.compile(
    r"(^|_)(?:(?:checkpoint|ckpt|snapshot|peak|used|allocated|resident|written)_(?:(?:file|total|set|memory|mem)_)?|(?P<either>file|output|log|trace)_)size$"
)
"""Sizes of what a run makes or takes; ``either``: settings as well, so of results where a cell has a fraction."""
_ASKED = re.compile(
    r"(^|_)(target|goal)(_|$)|^(?!avg|average|mean).*(clock|freq(uency)?|tdp)$"
    r"|(size|len|length|limit|cap|timeout|batch|layers|heads|learning_?rate|job_?time|grad(ient)?_?acc(um(ulation)?)?|(z|aux)_loss|interval|warm_?up"
    r"|memory_utili[sz]ation|(^|_)(models?|params?|parameters?|lr|seq|sequence|[gi]pus|ranks|tasks|threads|cores|epochs|seed))$"
)
"""Names of columns that are none, also with a unit."""
_OF_STEP = re.compile(r"(token|sample|image|sequence|batche?)s?_per_(it(er(ation)?)?|step)")
"""Sizes of a step, which are none either."""
_BOOKKEEPING = re.compile(
    r"jube_.*|id|index|wp|(.*_)?(job|run|wp|workpackage|task|array|step|benchmark|experiment)_?id|((train|num)_?)?iterations?"
    r"|date|time_?stamp|(start|end)_?time|node_?list|host_?names?|log|stdout|stderr|(abs|rel)path|(.*_)?(energy|log|out|err|result)_?(file|path)s?"
)
"""Names of columns that tell runs of the same work apart, or say how far a run came in its time."""
_NAMED = re.compile(r"index|id|(experiment|benchmark)_id|host_?names?|node_?list")
"""Those that may be names of different work or machines, where not their digits alone differ: `ddp` and `fsdp`, `gpu-a100` and `cpu`."""
_DATA_PARALLEL = re.compile(r"(^|_)dp($|_)|data_?parallel")
_OF_DEVICES = re.compile(r"(^|_)n?([gi]pus?|tasks|ranks|processes|replicas?)($|_)|^world_?size$")
"""Names of columns that mostly are the devices, or those of a node."""
GPUS = ("gpus", "ngpus", "n_gpus", "num_gpus")
"""Names of columns that are the devices where no column ``devices`` is: on one node, as they may be those of each."""
MEASURED = ("rate", "flops", "energy", "result")
"""Kinds of columns whose cells are numbers that somebody measured."""
LIMITS = ("Runtime(min)", "exit_duration")
"""Titles of CARAML's scripts for the time after which a run was to end, which is no measurement."""
_TEXTS = ("system", "precision", "energyfile")
BELOW_ZERO = "which is never below zero"
SIGNED = {"energy_net", "loss_first", "loss_last", "loss_validation", "psnr", "ssim", "ms_ssim"}
"""Metrics that may be below zero."""
_COMMA = re.compile(r"[+-]?(\d{1,3}([ .'\u00a0\u202f]\d{3})+,\d+|\d+,(\d{1,2}|\d{4,})|\d{1,3}(\.\d{3}){2,})")
"""Numbers of a table whose points are no decimal points."""
_NUMERAL = re.compile(rf"{SEPARATED.pattern}|[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.IGNORECASE)
"""What stands for a number, also where it is none that a record can hold."""
_ZERO_COMMA = re.compile(r"[+-]?0,\d{3,}")
"""One with a decimal comma also among parameters, where ``0,1`` may be two devices."""
_POINT = re.compile(r"[+-]?\d{1,3}\.\d{3}")


Kind = Literal["rate", "flops", "energy", "file", "result", "count", "text", "bookkeeping", "parameter"]


@dataclass(frozen=True)
class TableColumn:
    """What a column holds, in every row."""

    title: str
    kind: Kind
    """``flops``: of one device; ``energy``: jpwr's, of each device; ``file``: the name of one with energies; ``text``: system or precision;
    ``bookkeeping``: what tells runs of the same work apart, and what follows from the devices."""
    name: str
    """Its own; of a rate what it counts, of a count which of a record's."""


def read_columns(path: Path, table: list[dict[str, str]], asked: Mapping[str, bool]) -> list[TableColumn]:
    """What the columns of a table, cells of each row by their titles, hold. One is a result if its name or its unit says that something was
    measured, or if the user ``asked`` for it as one.

    Raises:
        InputError: two columns mean the same quantity and differ, numbers that may have decimal commas, or asked of a column that is not
            there, or can be neither.
    """
    _see_askable(path, table, asked)
    counts = [counts_of(cells) for cells in table]
    columns = [_column(title, table, counts, asked.get(title)) for title in table[0]]
    _see_sound(path, table, {one.title: found for one in columns if (found := _meaning(one))})
    _see_points(path, table, [one.title for one in columns if one.kind in MEASURED])
    taken, alike = set[str](), Counter[str]()
    for index, one in enumerate(columns):  # titles differ, and what is left of them need not
        name = one.name
        while one.kind == "result" and name in taken:
            alike[one.name] += 1
            name = f"{one.name}_{alike[one.name] + 1}"
        taken |= {name, f"{name}_in_table"} if one.kind == "result" else set()
        columns[index] = replace(one, name=name)
    return [replace(one, name="sample") if _of_sequences(one, columns, table, counts) else one for one in columns]


def _of_sequences(rate: TableColumn, columns: list[TableColumn], table: list[dict[str, str]], counts: list[dict[str, int]]) -> bool:
    """Whether a rate of tokens counts sequences, as the IPU program of CARAML's scripts does: an iteration then takes the batch over it."""
    time = next((one.title for one in columns if one.kind == "result" and name_and_unit(one.title) == ("time_per_iteration", "s")), None)
    if time is None or (rate.kind, rate.name) != ("rate", "token"):
        return False
    rows = ((number(cells[rate.title]), number(cells[time]), one.get("global_batch")) for cells, one in zip(table, counts, strict=True))
    shares = [items * seconds / batch for items, seconds, batch in rows if items and seconds and batch]
    return bool(shares) and all(0.8 < share < 1.25 for share in shares)


def _column(title: str, table: list[dict[str, str]], counts: list[dict[str, int]], asked: bool | None) -> TableColumn:
    name, unit = name_and_unit(title)
    texts = [cells[title] for cells in table]
    kind: Kind = "parameter"
    if asked is False:
        pass
    elif item := _rated(name, unit):
        kind, name = "rate", item
    elif name in {"avg_tflops_per_gpu", "tflops_per_gpu"} and (not unit or unit.lower().startswith("tflop")):
        kind = "flops"
    elif name == "energyfile":
        kind = "file"
    elif is_energy(name, unit):
        kind = "energy"
    elif what := counted(title, table[0]):
        kind, name = "count", what
    elif name in ("system", "precision"):
        kind = "text"
    elif asked:
        kind = "result"
    elif not unit and (_names_runs(name, texts) or (name not in COUNTS and _follows(name, texts, counts))):
        kind = "bookkeeping"
    elif title not in LIMITS and name not in COUNTS and _measured(name, unit, texts):
        bare = [text.removesuffix(unit or "").rstrip() for text in texts]
        if any(number(text) is not None or _NUMERAL.fullmatch(text) or (not unit and text[:1].isdigit()) for text in bare):
            kind = "result"
    return TableColumn(title, kind, name)


def _see_askable(path: Path, table: list[dict[str, str]], asked: Mapping[str, bool]) -> None:
    for title, result in asked.items():
        if title not in table[0]:
            raise unknown_name(f"column of {path.name}:", title, table[0])
        name = name_and_unit(title)[0]
        if what := counted(title, table[0]) or (name if name in ("system", "precision") else None):
            raise InputError(f"{path}: {title!r} says the {what} of a run, and is neither a result nor a parameter", "rename the column")
        if result and all(number(cells[title]) is None for cells in table) and not is_energy(*name_and_unit(title)):
            raise InputError(f"{path}: no cell of {title!r} is a number, as of a result: found {table[0][title][:LONGEST]!r}")


def _see_points(path: Path, table: list[dict[str, str]], titles: list[str]) -> None:
    """Raise :class:`InputError` for ``1.234`` beside ``2,1``: one of them is not what it seems."""

    def first(pattern: re.Pattern[str], titles: Iterable[str] = titles) -> tuple[str, str] | None:
        return next(((title, cells[title]) for cells in table for title in titles if pattern.fullmatch(cells[title])), None)

    if (comma := first(_COMMA) or first(_ZERO_COMMA, table[0])) and (point := first(_POINT)):
        found = f"{point[0]!r} has {point[1]!r}, which may be a thousand times as much, as {comma[0]!r} has {comma[1][:LONGEST]!r}"
        raise InputError(f"{path}: {found}", "write decimal points, and no separators of thousands")


def _measured(name: str, unit: str | None, texts: list[str]) -> bool:
    if name in DEFINED:
        return name != "steps" or bool(unit)  # those that were asked for
    own, fraction = name if unit else _UNIT_OF_NAME.sub("", name), any("." in text for text in texts)
    if (made := _MADE.search(own)) and (fraction or not made["either"]):
        return True
    if _asked_for(name) or _OF_STEP.fullmatch(name):
        return False
    if _MEASURED.search(own) or _OF_METERS.fullmatch((unit or "").lower()):
        return True
    either = _EITHER.search(own) is not None
    return (either and (fraction or bool(unit))) or (fraction and unit in UNITS["s"])


def _asked_for(name: str) -> bool:
    return _ASKED.search(name.partition("_per_")[0]) is not None


def unclear(title: str) -> bool:
    """Whether a parameter has a unit, as results have, and its name does not say that it was set."""
    name, unit = name_and_unit(title)
    return bool(unit) and title not in LIMITS and not _asked_for(name)


def _names_runs(name: str, texts: list[str]) -> bool:
    """Whether a column is of ``_BOOKKEEPING``, and names no different work."""
    words = {frozenset(re.findall(r"[^\W\d_]+", text.lower())) for text in texts if text}
    return bool(_BOOKKEEPING.fullmatch(name)) and (len(words) < 2 or not _NAMED.fullmatch(name))


def _rated(name: str, unit: str | None) -> str | None:
    """What a rate counts; ``None`` for anything else, and for a rate in another unit than its own."""
    spelt = name_and_unit(unit)[0] if unit else ""
    rate, own = RATE.fullmatch(spelt if name in ("throughput", "rate") and unit else name), RATE.fullmatch(spelt)
    if rate is None:
        return None
    item = rate[1]
    told = spelt in {"", "1_per_s", "per_s", {"image": "img_per_s", "token": "tok_per_s"}.get(item, "")} or (
        own is not None and own[1] == item
    )
    return item if told else None


def is_energy(name: str, unit: str | None) -> bool:
    """Whether a column holds jpwr's energy of each device."""
    return name in {"energy_per_device", "energy_counter_per_device"} and unit in UNITS["J"]


def counted(title: str, titles: Iterable[str]) -> str | None:
    """``global_batch``, ``nodes`` or ``devices``, if a column says how many; not where its unit is another one, nor GPUs beside devices."""
    name, unit = name_and_unit(title)
    what = COUNTS.get(name)
    if name in GPUS and all(name_and_unit(other)[0] not in ("devices", *GPUS[: GPUS.index(name)]) for other in titles):
        what = "devices"
    return what if what and (not unit or unit in "1#" or re.fullmatch(_COUNTED[what], unit.lower())) else None


def counts_of(cells: dict[str, str]) -> dict[str, int]:
    """What a row counts: ``global_batch``, ``nodes`` and ``devices`` (of all nodes), where the table says them."""
    named = [(counted(title, cells), number_of(text), name_and_unit(title)[0]) for title, text in cells.items()]
    nodes = next((found for what, found, _ in named if what == "nodes" and found), 1)
    return {what: found for what, found, name in named if what and found and (nodes == 1 or name not in GPUS)}


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


def _meaning(column: TableColumn) -> tuple[str, float] | None:
    """Which quantity of CARAML's a column says, as a word, and what its unit is in CARAML's; ``None`` for one of its own."""
    name, unit = name_and_unit(column.title)
    match column.kind:
        case "rate":
            return f"{column.name}/s", 1.0
        case "flops":
            return "achieved_flops_per_device FLOP/s", 1e12
        case "energy":
            return f"{name} J", UNITS["J"][unit or ""]
        case "count" | "text" | "file":
            return column.name, 1.0
        case "result" if name in DEFINED:
            own, factor = own_unit(DEFINED[name].unit, unit, None)
            return (column.title, 1.0) if factor is None else (f"{name} {own}", factor)
    return None


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
        [(value * factor, last_digit(one) * factor) for one in listed(text) if (value := number(one)) is not None] for text, factor in cells
    )
    if len(first) != len(second):
        return False
    within = 0.0 if meaning in _COUNTED else 0.5
    return all(a == b or abs(a - b) <= within * max(last, other) for (a, last), (b, other) in zip(first, second, strict=True))
