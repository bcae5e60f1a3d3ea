"""Puts away what a rank has measured so far, while it measures and before it is ended: see :mod:`caraml.results.journal`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from caraml.base.files import flush, write_at
from caraml.engine.instruments import Instruments
from caraml.engine.loop import MeasuringLoop
from caraml.engine.steps import PHASES, StepTable
from caraml.results.journal import block
from caraml.results.store import JOURNAL, RECORD
from caraml.worker.record import PhaseLog

_EVERY, _SHARE, _LONGEST = 2.0, 0.02, 120.0
"""Seconds from one time to the next, at least; the share of the time so far, of which no more is lost; and seconds at most."""
_LARGEST = 512 << 20
"""Bytes beyond which nothing is put away while it is measured: of steps of 1 ms six hours, of which a disk is to keep its room."""
_WAIT = 3.0
"""Seconds to wait for a disk that does not take what came before: who asks a process to end ends it after five."""


class SoFar:
    """What one rank has measured so far, in the journal of its attempt's folder.

    The loop's own thread only copies what is new; another writes it, so that no step waits for a disk. Of a disk that is slow, full or gone
    the loop does not hear: what was not written is tried again with what comes next.
    """

    def __init__(self, place: Callable[[], Path], rank: int, log: PhaseLog, started_at: str) -> None:
        """``place`` gives the attempt's folder; its record has the phases and the zero of ``log``."""
        self._place, self._rank, self._log, self._started_at = place, rank, log, started_at
        self._name = f"{JOURNAL}.{rank}" if rank else JOURNAL
        self._began = self._due = time.monotonic()
        self._idle, self._over = threading.Lock(), False
        """Held while anything is written, and from the last time on."""
        self._size, self._steps, self._readings = 0, 0, dict[str, tuple[int, int]]()
        """What is written: bytes, steps, and of every channel the good and the failed readings."""
        self._folder: Path | None = None

    def look(self, loop: MeasuringLoop, instruments: Instruments | None) -> None:
        """Put away what is new, now and then; called meanwhile by the loop."""
        now = time.monotonic()
        if now < self._due or self._size > _LARGEST or not self._idle.acquire(blocking=False):
            return
        self._due = now + min(max(_EVERY, _SHARE * (now - self._began)), _LONGEST)
        try:
            threading.Thread(target=self._write_aside, args=(loop.so_far(self._steps), instruments), name="so far", daemon=True).start()
        except (RuntimeError, MemoryError):  # the limit of memory leaves no room for its stack, or for what is new
            self._idle.release()

    def rest(self, loop: MeasuringLoop | None, instruments: Instruments | None, folder: Path | None = None) -> None:
        """Put away all that is new, for the last time, or all in another folder than before. That takes a moment, also after a day."""
        if self.close():
            if folder is not None and folder != self._folder:
                self._size, self._steps, self._readings, self._place = 0, 0, {}, lambda: folder
            with suppress(Exception):  # whoever fails or is in haste has to end in any case
                self._write(loop.so_far(self._steps) if loop is not None else StepTable(), instruments, whole=True)

    def close(self, *, measured: bool = False) -> bool:
        """Put away nothing more; what was makes room for tables where all was ``measured``. False where it was closed before, and where a
        disk does not take what came before."""
        if self._over or not self._idle.acquire(timeout=_WAIT):
            return False
        self._over = True
        if measured and self._folder is not None:
            with suppress(OSError):
                (self._folder / self._name).unlink()
        return True

    def _write_aside(self, steps: StepTable, instruments: Instruments | None) -> None:
        try:
            with suppress(Exception):  # is no fault of the loop, and is tried again
                self._write(steps, instruments)
        finally:
            self._idle.release()

    def _write(self, steps: StepTable, instruments: Instruments | None, *, whole: bool = False) -> None:
        readings = dict(self._readings)
        phases = [phase.model_dump() for phase in self._log.so_far]
        told = block(started_at=self._started_at, phases=phases, whole=whole)
        content = b"".join([*self._blocks(steps, instruments, readings), told])  # behind what it speaks of, which a full disk may cut off
        self._folder = self._place()
        if (self._folder / RECORD).exists():  # another rank's word, which has all of this
            return
        write_at(self._folder / self._name, self._size, content)
        flush(self._folder / self._name)
        self._size, self._steps, self._readings = self._size + len(content), self._steps + len(steps), readings

    def _blocks(self, steps: StepTable, instruments: Instruments | None, readings: dict[str, tuple[int, int]]) -> Iterator[bytes]:
        of = {"origin": self._log.origin}
        if len(steps):
            named = {"phase": "phases", "start": "starts", "seconds": "seconds", "data_wait": "data_waits"}
            columns = steps.columns()
            numbers = {name: columns[column] for name, column in named.items()}
            yield block(numbers, table="steps", same={"rank": self._rank}, names={"phase": PHASES}, **of)
        for channel, kind, column in instruments.meter.store.since(readings) if instruments is not None else ():
            same = {"channel": channel, "kind": kind}
            if column.value:
                yield block({"t_before": column.before, "t_after": column.after, "value": column.value}, table="power", same=same, **of)
            if column.failed:
                yield block({"t_before": column.failed, "t_after": column.failed}, table="power", same=same, **of)
            good, failed = readings.get(channel, (0, 0))
            readings[channel] = good + len(column.value), failed + len(column.failed)
