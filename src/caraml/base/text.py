"""Text for a terminal, whoever wrote it."""

from __future__ import annotations

_INSTEAD = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` without control characters, which could move the cursor, recolour a terminal or hide what stands before them; as long as it
    was. With ``lines`` ends of lines and tabulators stay."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(character if character.isprintable() or character in kept else _INSTEAD for character in text)
