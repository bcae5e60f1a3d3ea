"""A meter that logs into a CSV file, as the source ``csv`` reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AHEAD = 0.8
"""Seconds that rows are written before their time, of which a reader allows one: a busy machine may stop the writer for as long."""


@contextmanager
def logged(file: Path, header: str, rest: str, period: float = 0.2) -> Iterator[None]:
    """A file with a row ``TIME,REST`` for every ``period`` [s] of the last ten seconds, which grows inside the block."""
    begin, over, up_to_date = time.time() - 10, threading.Event(), threading.Event()
    file.write_text(f"{header}\n")

    def write() -> None:
        number = 0
        while not over.is_set():
            with file.open("a") as out:
                while (at := begin + period * number) < time.time() + AHEAD:
                    out.write(f"{at:.3f},{rest.format(number=number)}\n")
                    number += 1
            up_to_date.set()
            over.wait(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    up_to_date.wait()
    try:
        yield
    finally:
        over.set()
        writer.join()
