"""On which line each key of a TOML document stands: what ``tomllib`` does not tell.

The text must have parsed already; this reader only keeps track of where it is and would accept nonsense.
"""

from __future__ import annotations

import bisect
import re
import tomllib

Location = tuple[int | str, ...]
"""Way to a value: table keys and array indices, e.g. ``("benchmark", 0, "batch")``."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'  # multi-line basic; up to two quotes may stand before the closing three
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


def key_lines(text: str) -> dict[Location, int]:
    """The line (from 1) of every key, table header and array element of a valid TOML text."""
    return _Reader(text).read()


class _Reader:
    """A cursor over the text. Each ``_method`` starts at the cursor and leaves it behind what it read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Location, int] = {}
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.entries: dict[Location, int] = {}  # how many [[entries]] each array of tables has so far

    def read(self) -> dict[Location, int]:
        table: Location = ()
        while True:
            self._skip(_BLANK)
            if self.at >= len(self.text):
                return self.lines
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Location:
        line, is_array = self._line(), self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        keys = self._key()
        self.at += 2 if is_array else 1
        table: Location = ()
        for key in keys[:-1]:
            table = self._current((*table, key))
        table = (*table, keys[-1])
        self._note(table, line)
        if is_array:
            index = self.entries[table] = self.entries.get(table, -1) + 1
            table = (*table, index)
            self._note(table, line)
        return table

    def _current(self, table: Location) -> Location:
        """``[a.b]`` below ``[[a]]`` belongs to the last entry of ``a``."""
        return (*table, self.entries[table]) if table in self.entries else table

    def _pair(self, table: Location) -> None:
        line = self._line()
        location = table
        for key in self._key():
            location = (*location, key)
            self._note(location, line)
        self.at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(location)

    def _value(self, location: Location) -> None:
        start = self.text[self.at]
        if start == "[":
            self._array(location)
        elif start == "{":
            self._inline_table(location)
        else:
            self._skip(_STRING if start in "\"'" else _SCALAR)

    def _array(self, location: Location) -> None:
        self.at += 1
        index = 0
        while not self._closes("]"):
            self._note((*location, index), self._line())
            self._value((*location, index))
            index += 1

    def _inline_table(self, location: Location) -> None:
        self.at += 1
        while not self._closes("}"):
            self._pair(location)

    def _closes(self, bracket: str) -> bool:
        """Step over blanks and one comma; true if ``bracket`` ends here (and step over it)."""
        self._skip(_BLANK)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_BLANK)
        if self.text[self.at] != bracket:
            return False
        self.at += 1
        return True

    def _key(self) -> list[str]:
        """A dotted key, up to and with the blanks behind it."""
        parts = []
        while True:
            self._skip(_SPACE)
            part = self._skip(_KEY_PART)
            # Quoted parts may hold escapes, which tomllib resolves.
            parts.append(next(iter(tomllib.loads(f"{part} = 0"))))
            self._skip(_SPACE)
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def _note(self, location: Location, line: int) -> None:
        self.lines.setdefault(location, line)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"not the TOML that tomllib accepted, at offset {self.at}"
        self.at = match.end()
        return match[0]

    def _line(self) -> int:
        return bisect.bisect_left(self.newlines, self.at) + 1
