"""Made-up records with known numbers, and stores of them on disk; and what a page has packed."""

from __future__ import annotations

import base64
import gzip
import json
import math
from pathlib import Path
from typing import Any

from caraml.metrics.model import Facts, Measured, Metric, Peak, Phase, Window
from caraml.metrics.window import derive
from caraml.power.model import BoundaryEnergy, ChannelEnergy, WindowEnergy
from caraml.results.record import Record
from caraml.results.rows import write_table
from caraml.results.store import Store, write_record
from caraml.suite.model import Point
from tests.stores import remember_suite

HOSTILE = "<script>alert(1)</script>\"'&"
UNICODE = "Größe µ→😀 模型"
NO_SENSOR = "RAPL exists at /sys/class/powercap but cannot be read: permission denied"
WARM_UP = 4


def make_point(**changes: Any) -> Point:
    """A point of a small language model on one CPU."""
    values: dict[str, Any] = {
        "suite": "quick",
        "benchmark": "gpt-mini",
        "workload": "gpt",
        "params": {"layers": 4, "sequence": 256},
        "system": "local",
        "device": "Test CPU x1",
        "device_class": "cpu",
        "software": "caraml 0.1.0, torch 2.13.0+cpu",
        "global_batch": 16,
        "micro_batch": 4,
        **changes,
    }
    return Point(**values)


def step_times(n: int, mean: float) -> list[float]:
    """``n`` step times around ``mean`` [s] with a fixed ripple and a rare long step."""
    return [mean * (1 + 0.02 * math.sin(1.7 * i) + 0.01 * math.sin(0.31 * i) + (0.25 if i % 37 == 36 else 0)) for i in range(n)]


def window_energy(start: float, end: float, watts: float, bound: float) -> WindowEnergy:
    """A valid reading of one device's counter."""
    joules = watts * (end - start)
    channel = ChannelEnergy(
        id="GPU-5a",
        label="Test GPU",
        source="nvml",
        boundary="device",
        hardware="nvidia",
        method="counter",
        energy_j=joules,
        bound_j=bound,
        bound_parts={"update period": 0.75 * bound, "resolution": 0.25 * bound},
        accuracy=0.05,
        mean_w=watts,
        peak_w=watts * 1.2,
        readings=200,
        coverage=1.0,
        flags=["module_scope"],
    )
    boundary = BoundaryEnergy(energy_j=joules, bound_j=bound, mean_w=watts, channels=["GPU-5a"], accuracy=0.05, valid=True)
    return WindowEnergy("window", start, end, [channel], {"device": boundary}, valid=True, flags=["module_scope"], interval_s=0.05)


def no_energy(start: float, end: float, reason: str = NO_SENSOR) -> WindowEnergy:
    """What the meter says where there is no sensor."""
    return WindowEnergy("window", start, end, flags=["no_source"], reason=reason)


def make_record(
    point: Point | None = None, item: str = "token", steps: int = 60, step: float = 0.1, watts: float | None = None, **changes: Any
) -> Record:
    """A record whose metrics follow from ``steps`` steps of about ``step`` seconds."""
    point = point or make_point()
    times = step_times(steps, step)
    start = 2.0 + 3 * step + WARM_UP * step
    window = Window(
        start=start,
        end=start + sum(times),
        steps=steps,
        samples=steps * point.global_batch,
        items=steps * point.global_batch * 256,
        first_step=1 + WARM_UP,
    )
    facts = Facts(
        item=item,
        items_per_sample=256,
        parameters=3_200_000,
        flops_per_item=2.0e7,
        flops_formula="6 P + 12 L H T",
        bytes_per_sample=2048,
        data={"corpus": "standard library", "documents": 812},
    )
    energy = window_energy(window.start, window.end, watts, 1.5) if watts else no_energy(window.start, window.end)
    idle = window_energy(0.2, 1.2, 20.0, 0.5) if watts else None
    losses = [8 * math.exp(-i / 40) + 2 for i in range(1 + WARM_UP + steps)]
    every = [3 * step, *([step] * WARM_UP), *times]
    measured = Measured(point, facts, window, every, 0.04 * window.seconds, 3 * step, start, 3 * 2**30, losses=losses)
    sheet = Peak(value=None, dtype="fp32", reason="no data sheet figure for Test CPU")
    probed = Peak(value=2e12, dtype="fp32", source="best of 5 matrix products")
    values: dict[str, Any] = {
        "key": point.key,
        "attempt": 1,
        "point": point,
        "status": "ok",
        "started_at": "2026-10-01T12:00:00+00:00",
        "phases": [
            Phase(name="build", start=0.0, end=1.2),
            Phase(name="data", start=1.2, end=2.0),
            Phase(name="first step", start=2.0, end=2.0 + 3 * step),
            Phase(name="warm-up", start=2.0 + 3 * step, end=start),
            Phase(name="measure", start=window.start, end=window.end),
            Phase(name="save", start=window.end, end=window.end + 0.3),
        ],
        "window": window,
        "facts": facts,
        "metrics": derive(measured, energy, idle, sheet, probed),
        "peak_datasheet": sheet,
        "peak_measured": probed,
        "energy": energy,
        "idle": idle,
        "system": {"host": "test-host", "cpu": {"model": "Test CPU", "cores": 8}},
        "environment": {"torch": "2.13.0", "python": "3.11.9", "threads": 8},
        **changes,
    }
    return Record(**values)


def broken_record(point: Point, status: str, reason: str) -> Record:
    """A point without numbers."""
    return Record(key=point.key, attempt=1, point=point, status=status, reason=reason, started_at="2026-10-01T12:10:00+00:00")  # type: ignore[arg-type]


def steps_table(record: Record, ranks: int = 1) -> dict[str, list[Any]]:
    """The raw rank x step table that belongs to a made record."""
    window = record.window
    assert window is not None
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "rank", "phase", "start", "seconds", "data_wait", "loss")}
    mean = window.seconds / window.steps
    times = [3 * mean] + [mean] * WARM_UP + step_times(window.steps, mean)
    now = 2.0
    for step, seconds in enumerate(times):
        phase = "first" if step == 0 else "warm_up" if step <= WARM_UP else "measure"
        for rank in range(ranks):
            row = (step, rank, phase, now, seconds * (1 - 0.01 * rank), 0.04 * seconds, 8 * math.exp(-step / 40) + 2)
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
        now += seconds
    return columns


def power_table(record: Record, watts: float, interval: float = 0.05) -> dict[str, list[Any]]:
    """A counter and a power channel that agree, over the window and a second on either side."""
    window = record.window
    assert window is not None
    columns: dict[str, list[Any]] = {name: [] for name in ("channel", "kind", "t_before", "t_after", "value")}
    joules = 0.0
    for index in range(int((window.seconds + 2) / interval)):
        time = window.start - 1 + index * interval
        power = watts * (1 + 0.1 * math.sin(index / 5)) if window.start <= time <= window.end else 20.0
        joules += power * interval
        for kind, value in (("energy", joules), ("power_instant", power)):
            for name, cell in zip(columns, (f"GPU-5a/{kind.removesuffix('_instant')}", kind, time, time + 0.001, value), strict=True):
                columns[name].append(cell)
    return columns


def _written(folder: Path, name: str, columns: dict[str, list[Any]]) -> str:
    return write_table(folder, name, list(columns), zip(*columns.values(), strict=True))


def save(store: Store, record: Record, ranks: int = 1, watts: float | None = None) -> Record:
    """Write a record with its raw files; returns it with their names."""
    folder = store.new_attempt(record.point)
    files = {"steps": _written(folder, "steps", steps_table(record, ranks))} if record.window else {}
    if watts and record.window:
        files["power"] = _written(folder, "power", power_table(record, watts))
    record = record.model_copy(update={"files": files, "attempt": int(folder.name)})
    write_record(folder, record)
    return record


def full_store(root: Path) -> Store:
    """A store with everything that can go right or wrong, as the suite ``quick``."""
    store = Store(root)
    made: list[Record] = []
    for index, batch in enumerate((16, 32, 64, 128)):
        point = make_point(global_batch=batch)
        flags = ["imprecise", "not_steady"] if batch == 128 else []
        made.append(save(store, make_record(point, step=0.1 * 1.7**index, flags=flags)))
    for index, batch in enumerate((32, 64, 128)):
        point = make_point(
            benchmark="resnet50", workload="image_classification", global_batch=batch, precision="bf16", device="Test GPU x1"
        )
        record = make_record(point, "image", 80, 0.06 * 1.8**index, 250.0 + 60 * index)
        metrics = {**record.metrics, "mfu": Metric(value=0.41, unit="1", low=0.405, high=0.415, n=80)}
        made.append(
            save(
                store,
                record.model_copy(update={"metrics": metrics, "peak_datasheet": Peak(value=3e14, dtype="bf16", source="data sheet")}),
                2,
                250.0,
            )
        )
    made.append(save(store, broken_record(make_point(global_batch=4096), "oom", "out of memory: asked for 96 GiB, 12 GiB were free")))
    made.append(save(store, broken_record(make_point(global_batch=6), "skipped", "global batch 6 is not a multiple of micro batch 4")))
    made.append(save(store, broken_record(make_point(benchmark=HOSTILE, params={"x": HOSTILE}), "failed", f"worker ended with {HOSTILE}")))
    made.append(save(store, make_record(make_point(benchmark=UNICODE, global_batch=8), steps=12)))
    remember_suite(store, "quick", [record.key for record in made])
    return store


def unpack(packed: str) -> dict[str, Any]:
    """What :func:`caraml.report.page.pack` packed."""
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return content
