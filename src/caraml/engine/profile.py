"""A trace of a few steps after the window: where torch and the device spend their time. Nothing of it runs while anything is measured."""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from caraml.base.errors import InputError
from caraml.base.files import replacing_by_name
from caraml.base.limits import too_large
from caraml.engine.device import Device
from caraml.engine.steps import Step
from caraml.results.record import Costly, Profile
from caraml.suite.model import Point

TRACE, MEMORY = "trace.json.gz", "memory.pickle.gz"
STEPS = 3
MICRO_BATCHES = 16
"""At most so many are traced, and the trace ends within a step if need be: each has thousands of events."""
IN_A_PIPELINE = 32
"""Micro-batches of a step that are traced where a pipeline takes them all at once, so that the trace cannot end between two."""
MOST_BYTES = 512 << 20
"""Of a trace or a snapshot of memory before it is packed, to about a tenth; what is larger is not kept."""
_ALLOCATIONS = 100_000
"""The newest, of which a snapshot of memory tells the history."""
_COSTLIEST = 10
_LONGEST_NAME = 200


class Tracer:
    """Traces steps of one rank. Made before the step, since it counts the micro-batches that the step takes."""

    def __init__(self, point: Point, device: Device, folder: Path | None) -> None:
        """``folder``: for the files, on the rank that is traced; the others only make the same steps."""
        self._point, self._device, self._folder = point, device, folder
        self._running: profile | None = None
        self._begin = self._seconds = 0.0
        self._micro_batches = 0

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same micro-batches; a trace that has enough of them ends before the next."""
        for batch in batches:
            if self._running is not None:
                if self._micro_batches == MICRO_BATCHES and self._point.placement.pp == 1:
                    self._stop()
                else:
                    self._micro_batches += 1
            yield batch

    def run(self, step: Step) -> tuple[Profile, dict[str, str]]:
        """Make one step, then trace a few: what they cost, and the names of the files by kind. Every rank makes the same steps."""
        count = self._point.accumulation
        if self._point.placement.pp > 1 and count > IN_A_PIPELINE:
            found = f"a step sends {count} micro-batches through the pipeline at once, of which at most {IN_A_PIPELINE} are traced"
            return Profile(reason=f"{found}: take a smaller global_batch"), {}
        steps = max(1, min(STEPS, MICRO_BATCHES // count))
        if self._folder is None:
            for _ in range(1 + steps):
                step()
            return Profile(), {}
        kind = self._device.torch_device.type
        traced = profile(activities={ProfilerActivity.CPU} if kind == "cpu" else supported_activities())
        traced.prepare_trace()
        step()  # caches and clocks are as in the window again, and the profiler has attached itself to the device
        memory: Any = None if kind == "cpu" else getattr(torch.get_device_module(kind), "memory", None)
        history = getattr(memory, "_record_memory_history", None)
        if history is not None:
            history(max_entries=_ALLOCATIONS, stacks="python")
        self._device.synchronize()
        self._begin, self._running = time.monotonic(), traced
        traced.start_trace()
        for _ in range(steps):
            step()
        self._stop()
        reasons, files = [], {}
        writers: dict[str, tuple[str, Callable[[str], Any]]] = {"trace": (TRACE, traced.export_chrome_trace)}
        if history is not None:
            writers["memory"] = MEMORY, memory._dump_snapshot
        for name, (file, write) in writers.items():
            try:
                _write_packed(self._folder / file, write)
                files[name] = file
            except InputError as error:
                reasons.append(str(error))
        if history is not None:
            history(enabled=None)
        return self._told(traced, steps, "; ".join(reasons) or None), files

    def _stop(self) -> None:
        """End the trace if it still runs."""
        if self._running is not None:
            self._device.synchronize()
            self._seconds = time.monotonic() - self._begin
            self._running.stop_trace()
            self._running = None

    def _told(self, traced: profile, steps: int, reason: str | None) -> Profile:
        """The table: the device's kernels where the profiler sees them, else operators by the host's time in them alone."""
        rows = traced.key_averages()
        kernels = [one for one in rows if one.device_type != DeviceType.CPU and not one.is_user_annotation]
        timed = [(one.key, one.count, one.self_device_time_total / 1e6) for one in kernels]
        timed = timed or [(one.key, one.count, one.self_cpu_time_total / 1e6) for one in rows]
        total = sum(seconds for _, _, seconds in timed) or 1.0
        return Profile(
            of="kernels" if kernels else "operators",
            steps=steps,
            micro_batches=self._micro_batches,
            seconds=self._seconds,
            costliest=[
                Costly(name=name[:_LONGEST_NAME], calls=calls, seconds=seconds, share=seconds / total)
                for name, calls, seconds in sorted(timed, key=lambda row: row[2], reverse=True)[:_COSTLIEST]
            ],
            reason=reason,
        )


def _write_packed(path: Path, write: Callable[[str], Any]) -> None:
    """Let ``write`` write to the name it is given, and keep that packed. Raises ``InputError`` for more than is kept."""
    with replacing_by_name(path, sync="none") as packed:
        plain = packed.with_suffix("")
        write(str(plain))
        if (size := plain.stat().st_size) > MOST_BYTES:
            raise too_large(path.name, size, MOST_BYTES, "bytes before it is packed", "kept")
        with plain.open("rb") as content, gzip.open(packed, "wb", compresslevel=6) as file:
            shutil.copyfileobj(content, file)
