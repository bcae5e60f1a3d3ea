"""How numbers and counts are written for people: ``12.3 ms``, ``4.56 GiB``, ``1,234 token/s``, ``3 devices``."""

from __future__ import annotations

import codecs
import io
import math
import sys
from collections.abc import Sequence

JOULES_PER_WATT_HOUR = 3600.0
GIB = 1024.0**3

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_PREFIXED_UNITS = ("s", "J", "W", "FLOP/s", "B/s", "J s", "Wh", "VA", "VAh")

_SPELLED_OUT = {"±": "+-", "–": "-", "µ": "u", "²": "2", "³": "3", "→": "->", "…": "...", "×": "x"}


def spell_out() -> None:
    """Let the process print where the encoding of its terminal, file or pipe lacks a character: ``±`` as ``+-``, others as ``?``."""

    def spelled(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(_SPELLED_OUT.get(one, "?") for one in error.object[error.start : error.end]), error.end

    codecs.register_error("caraml", spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="caraml")


def significant(value: float, digits: int = 3) -> str:
    """``value`` rounded to ``digits`` significant digits, thousands separated, never in exponent form for everyday sizes."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -5 <= magnitude < 15:
        return f"{value:.{digits - 1}e}"
    rounded = round(value, digits - 1 - magnitude)
    magnitude = math.floor(math.log10(abs(rounded)))  # 99.97 becomes 100 and has one digit less to show
    return f"{rounded:,.{max(digits - 1 - magnitude, 0)}f}"


def prefixed(value: float, unit: str) -> tuple[float, str]:
    """The factor to divide by and the unit to write so that ``value`` reads well: ``(1e-3, "ms")`` for 0.012 s."""
    if unit == "B":
        return GIB, "GiB"
    if unit in _PREFIXED_UNITS or unit.startswith("J/"):
        for factor, prefix in _PREFIXES:
            if abs(value) >= factor:
                return factor, f"{prefix}{unit}"
    return 1.0, "" if unit == "1" else unit


def human(value: float | None, unit: str, digits: int = 3) -> str:
    """A number with its unit as a person would write it: ``12.3 ms``, ``4.56 GiB``, ``1,234 token/s``; ``–`` if unknown."""
    if value is None:
        return "–"
    factor, written = prefixed(value, unit)
    return f"{significant(value / factor, digits)} {written}".rstrip()


def percent(value: float | None, digits: int = 3) -> str:
    """A share as a percentage; ``–`` if unknown."""
    return "–" if value is None else f"{significant(100 * value, digits)} %"


def count(number: int, noun: str) -> str:
    """``1 device``, ``1,024 devices``, ``2 batches``."""
    ending = "" if number == 1 else "es" if noun.endswith(("tch", "ss")) else "s"
    return f"{number:,} {noun}{ending}"


def some(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of some names, and how many others there are: ``a, b and 3 more``, or ``a; b; and 3 more``."""
    more = f"{between.lstrip(',')}and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


_INSTEAD = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` without control characters, which could move the cursor, recolour a terminal or hide what stands before them; as long as it
    was. With ``lines`` ends of lines and tabulators stay."""
    if text.isprintable() or (lines and text.replace("\n", "").replace("\t", "").isprintable()):
        return text
    kept = "\n\t" if lines else ""
    return "".join(character if character.isprintable() or character in kept else _INSTEAD for character in text)


def seconds_text(seconds: float | None) -> str:
    """Seconds as ``1:05``; empty if unknown."""
    return "" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
