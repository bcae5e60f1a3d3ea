"""Ways in which a file gets damaged, or is made to do damage: bytes changed, cut out, repeated, put in."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

NASTY = (
    b"\x00",
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"1e999",
    b"-1",
    b"99999999999999999999",
    b"NaN",
    b"null",
    b"[" * 50,
    b'"\\ud800"',
    b"../../etc/passwd",
    b"<script>",
    b"\n",
    b"{}",
)
"""What parsers stumble over: edges of integers, infinities, nesting, half characters, ways out of a folder."""


@dataclass(frozen=True)
class Edit:
    """One change, at a place given as a share of the file's length, so that it fits every file."""

    kind: str
    place: float
    length: int
    bytes: bytes

    def apply(self, content: bytes) -> bytes:
        """The damaged content."""
        at = int(self.place * len(content))
        if self.kind == "cut":
            return content[:at]
        if self.kind == "remove":
            return content[:at] + content[at + self.length :]
        if self.kind == "repeat":
            return content[: at + self.length] + content[at:]
        if self.kind == "insert":
            return content[:at] + self.bytes + content[at:]
        return content[:at] + self.bytes + content[at + len(self.bytes) :]


edits = st.lists(
    st.builds(
        Edit,
        kind=st.sampled_from(["cut", "remove", "repeat", "insert", "replace"]),
        place=st.floats(0, 1),
        length=st.integers(1, 64),
        bytes=st.sampled_from(NASTY) | st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, changes: list[Edit]) -> bytes:
    """``content`` after every change in turn."""
    for change in changes:
        content = change.apply(content)
    return content
