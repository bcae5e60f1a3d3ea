"""Nested settings as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue


def flat(values: Mapping[str, JsonValue], prefix: str = "") -> list[tuple[str, str]]:
    """``{"cpu": {"cores": 8}}`` as ``("cpu.cores", "8")``.

    What is null or empty is left out; the elements of a list of tables are numbered.
    """
    lines: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
            lines += flat({str(index): element for index, element in enumerate(value)}, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            lines.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return lines
