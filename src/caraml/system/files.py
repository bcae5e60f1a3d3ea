"""Reading the small files of /proc and /sys: whatever is wrong with one, the answer is ``None``, not an exception."""

from __future__ import annotations

import re
from pathlib import Path


def read(path: Path) -> str | None:
    """The text of a small file, stripped, undecodable bytes and control characters replaced; ``None`` if it cannot be read."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError):
        return None
    return clean(raw.decode("utf-8", "replace"))


def clean(text: str) -> str:
    """Text from firmware or a driver without NULs and control characters (line ends and tabs stay), stripped."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text).strip()


def read_int(path: Path) -> int | None:
    """The integer in a small file; ``None`` if there is none."""
    text = read(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def listing(folder: Path, pattern: str) -> list[Path]:
    """What in ``folder`` matches ``pattern``, by number where the names end in one (``cpu2`` before ``cpu10``)."""
    try:
        found = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda path: (re.sub(r"\d+$", "", path.name), int((re.findall(r"\d+$", path.name) or ["0"])[0])))


def fields(text: str | None) -> dict[str, str]:
    """``key : value`` lines as a dictionary; the first of equal keys counts."""
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found
