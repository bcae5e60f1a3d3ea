"""Ways in which a file gets damaged, or is made to do damage: bytes changed, cut out, repeated, put in."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraml.base.errors import CaramlError

EXAMPLES = "FUZZ_EXAMPLES"
"""Variable with the number of examples of each test; more than the default looks for what is not known yet, so each run tries others."""

FUZZ = settings(
    max_examples=int(os.environ.get(EXAMPLES, "60")),
    derandomize=EXAMPLES not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

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


def refuses_damage(
    path: Path, content: bytes, read: Callable[[Path], object], look: Callable[[CaramlError], None] | None = None, named: Path | None = None
) -> None:
    """Read a file damaged in many ways: it is read, or refused with an error that ``look`` finds in order, or else one with the path, or
    another that is ``named``. Whole, it must be read."""
    path.write_bytes(content)
    read(path)

    @FUZZ
    @given(edits)
    def check(changes: list[Edit]) -> None:
        path.write_bytes(damaged(content, changes))
        try:
            read(path)
        except CaramlError as error:
            if look is not None:
                look(error)
            else:
                assert str(named or path) in str(error)

    check()


def verdict_of(trial: Callable[..., None], *arguments: Any) -> str:
    """What a trial in a forked child sends, whose last argument is the way to send it; ``crashed`` or ``hangs`` where it sends nothing."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=trial, args=(*arguments, sender))
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(300) else "hangs"
    except EOFError:
        return "crashed"  # nothing of ours can hold that; the worker's record says that it was killed
    finally:
        process.kill()
        process.join()
