"""What a training does after its window, when nothing is measured any more: validation, the model's quality, saving, a trace of a few
steps."""

from __future__ import annotations

import gzip
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from caraml.base.errors import InputError
from caraml.base.files import replacing, replacing_by_name
from caraml.base.limits import too_large
from caraml.engine.device import Device
from caraml.engine.precision import autocast
from caraml.engine.ranks import Ranks
from caraml.engine.steps import Step
from caraml.metrics.model import Metric
from caraml.results.record import Costly, Profile
from caraml.suite.model import Point, Precision
from caraml.workloads.base import VALIDATION_BATCHES, Task


def validation_loss(task: Task, precision: Precision, device: torch.device) -> float | None:
    """Mean loss per sample over at most ``VALIDATION_BATCHES`` held-out batches, of which the last may be smaller; ``None`` without any.

    They come from all over data that has a length and can be divided, since images lie class by class; else they are the first ones.
    """
    if task.validation is None:
        return None
    batches: Any = task.validation()
    if hasattr(batches, "share") and hasattr(batches, "__len__"):
        batches = batches.share(0, max(math.ceil(len(batches) / VALIDATION_BATCHES), 1))
    task.model.eval()
    with torch.no_grad(), autocast(precision, device):
        judged = [_summed(task, batch) for batch in itertools.islice(batches, VALIDATION_BATCHES)]
    if not judged:
        return None
    loss, _, count = torch.stack(judged).cpu().double().sum(0).tolist()
    return float(loss / count) if count else None


def validate(
    task: Task, precision: Precision, device: torch.device, ranks: Ranks, watch: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> tuple[float | None, float | None]:
    """Loss per sample and share answered right over all held-out batches, each rank going through its part; the same on every rank.

    ``None`` for what the task does not have. ``watch`` sees each batch. Collective. The model is left in training mode.
    """
    if task.validation is None:
        return None, None
    batches = task.validation()
    agree_on_statistics(task.model, ranks)
    own = batches.share(ranks.rank, ranks.world) if hasattr(batches, "share") else itertools.islice(batches, ranks.rank, None, ranks.world)
    task.model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad(), autocast(precision, device):
        judged = [task.judge(task.model, batch) if task.judge is not None else _summed(task, batch) for batch in watch(own)]
    if judged:
        totals = torch.stack(judged).cpu().double().sum(0)  # on the host: not every accelerator has numbers of 64 bits
    task.model.train()
    loss, right, count = (sum(column) for column in zip(*ranks.gather(totals.tolist()), strict=True))
    if not count:
        return None, None
    return loss / count, right / count if task.judge is not None else None


def agree_on_statistics(model: torch.nn.Module, ranks: Ranks) -> None:
    """Give every rank the mean of all ranks' buffers of floating point: what batch normalisation has seen, which differs. Collective."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if ranks.world == 1 or not buffers:
        return
    means = ranks.mean(torch.cat([buffer.detach().flatten().float() for buffer in buffers]).cpu())
    for buffer, mean in zip(buffers, means.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def _summed(task: Task, batch: Any) -> torch.Tensor:
    """``[sum of losses, 0, number]`` of a batch's samples, from the mean that is the task's loss."""
    loss, count = task.loss(task.model, batch).float(), (task.samples_in or _samples)(batch)
    return torch.stack([loss * count, torch.zeros_like(loss), torch.full_like(loss, count)])


def _samples(batch: Any) -> int:
    """Samples of a batch whose task does not say: the length of its first tensor; 1 without one, so that all batches weigh the same."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() else 1


def quality(task: Task, precision: Precision, device: torch.device, whole: bool) -> dict[str, Metric]:
    """The task's own metrics over ``VALIDATION_BATCHES`` held-out batches at most, or over the ``whole`` of that data."""
    if task.quality is None:
        return {}
    task.model.eval()
    with torch.no_grad(), autocast(precision, device):
        return task.quality.measured(None if whole else VALIDATION_BATCHES)


def save_model(model: torch.nn.Module, folder: Path) -> None:
    """Write the model's weights into ``folder`` until they are on the disk, and remove them again: only the time is wanted."""
    path = folder / "model.pt"
    try:
        with replacing(path, sync="file") as file:
            torch.save(model.state_dict(), file)
    finally:
        path.unlink(missing_ok=True)


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
_NOTED = 0.1
"""Seconds in which gloo's threads note the end of a collective for which its ranks no longer wait; the profiler would guess it."""
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
            self._micro_batches += self._running is not None
            yield batch
            if self._micro_batches == MICRO_BATCHES and self._point.placement.pp == 1:
                self._stop()

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
        if self._running is not None:
            self._device.synchronize()
            self._seconds = time.monotonic() - self._begin
            time.sleep(_NOTED)
            self._running.stop_trace()
            self._running = None

    def _told(self, traced: profile, steps: int, reason: str | None) -> Profile:
        """The table: the device's kernels where the profiler sees them, else operators by the host's time in them alone.

        A collective over gloo ends on another thread: the profiler gives it no time of its own, or a wrong one if it missed the end.
        """
        rows = traced.key_averages()
        kernels = [one for one in rows if one.device_type != DeviceType.CPU and not one.is_user_annotation]
        timed = [(one.key, one.count, one.self_device_time_total / 1e6) for one in kernels]
        timed = timed or [
            (one.key, one.count, (one.cpu_time_total if one.is_async or one.key.startswith("gloo:") else one.self_cpu_time_total) / 1e6)
            for one in rows
        ]
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
