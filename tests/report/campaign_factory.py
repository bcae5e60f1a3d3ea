"""A made-up campaign of any size: machines, workloads, device counts and batches, with what goes wrong among them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from record_factory import WARM_UP, broken_record, make_point, make_record

from caraml.metrics.model import Metric
from caraml.results.record import Record
from caraml.results.store import Store, write_record
from caraml.suite.model import Point
from tests.stores import remember_suite

MACHINES = {  # name: device, class, items/s of one device, watts of one device, batch per device that fits
    "jedi": ("NVIDIA GH200 x4", "gpu", 4.0, 600.0, 512),
    "jureca-a100": ("NVIDIA A100 x4", "gpu", 1.6, 380.0, 128),
    "lumi": ("AMD MI250X x8", "gpu", 1.9, 470.0, 256),
    "local": ("Test CPU x1", "cpu", 0.03, 150.0, 64),
}
BENCHMARKS = {  # name: workload, item, relative speed
    "gpt-800m": ("gpt", "token", 9000.0),
    "resnet50": ("image_classification", "image", 700.0),
    "ap1": ("temperature_postprocessing", "sample", 20.0),
    "ap5": ("downscaling_gan", "sample", 60.0),
}
PLACES = ((1, 1), (1, 2), (1, 4), (2, 4))
BATCHES = tuple(16 * 2**power for power in range(8))
START = datetime(2026, 10, 1, 12, tzinfo=UTC)


def campaign(root: Path, points: int = 500, seed: int = 1, steps: int = 60) -> Store:
    """A store of ``points`` points as the suite ``campaign``, the raw files included."""
    store, random_ = Store(root), random.Random(seed)
    keys = []
    with duckdb.connect() as connection:
        for index, point in zip(range(points), _points(points), strict=False):
            record = _record(point, random_, steps)
            record = record.model_copy(update={"started_at": (START + timedelta(minutes=3 * index)).isoformat()})
            keys.append(_write(connection, store, record, random_))
    remember_suite(store, "campaign", keys)
    return store


def again(store: Store, key: str, times: int, slower_from: int, by: float = 0.7) -> None:
    """Further attempts at a point, a day apart; from attempt ``slower_from`` on its rate is ``by`` times what it was."""
    first, random_ = store.latest(key), random.Random(7)
    assert first is not None and first.window is not None
    start, mean = datetime.fromisoformat(first.started_at), first.window.seconds / first.window.steps
    with duckdb.connect() as connection:
        for day in range(1, times):
            step = mean / (by if day >= slower_from else 1.0) * random_.gauss(1.0, 0.004)
            record = make_record(first.point, first.item, first.window.steps, step, 300.0)
            when = (start + timedelta(days=day)).isoformat()
            changes = {"started_at": when, "environment": {"driver": "550.1" if day < slower_from else "560.2"}}
            _write(connection, store, record.model_copy(update=changes), random_)


def _points(number: int) -> Iterator[Point]:
    """Points in the order of a sweep; large campaigns sweep a second precision."""
    for precision in ("bf16", "fp32"):
        for benchmark, (workload, _, _) in BENCHMARKS.items():
            for system, (device, device_class, *_) in MACHINES.items():
                for nodes, devices in PLACES if device_class == "gpu" else PLACES[:1]:
                    for batch in BATCHES[:3] if number < 100 else BATCHES:
                        yield make_point(
                            suite="campaign",
                            benchmark=benchmark,
                            workload=workload,
                            system=system,
                            device=device,
                            device_class=device_class,
                            nodes=nodes,
                            devices=devices,
                            global_batch=batch,
                            micro_batch=max(1, min(batch // (nodes * devices), 16)),
                            precision=precision,
                        )


def _record(point: Point, random_: random.Random, steps: int) -> Record:
    _, device_class, speed, watts, fits = MACHINES[point.system]
    _, item, base = BENCHMARKS[point.benchmark]
    share = point.global_batch / point.world
    if share < 4:
        return broken_record(point, "skipped", f"global batch {point.global_batch} leaves less than 4 samples per device")
    if share > fits:
        return broken_record(point, "oom", f"out of memory: asked for {share / fits * 64:.0f} GiB, 12 GiB were free")
    if random_.random() < 0.01:
        return broken_record(point, "failed", "worker ended with signal 11")
    efficiency = (share / (share + 12)) * (0.93 if point.world > 1 else 1) * (0.9 if point.nodes > 1 else 1) * random_.gauss(1, 0.01)
    rate = base * speed * point.world * efficiency  # items/s, where an item is 1/256 of a sample
    step = point.global_batch * 256 / rate / (100 if item != "token" else 1)
    record = make_record(point, item, steps, step, watts * point.world * (0.6 + 0.4 * efficiency))
    assert record.window is not None and record.facts is not None
    joules = record.value("energy") or 0.0
    mean = record.window.seconds / steps * 50
    loading = random_.uniform(0.02, 0.2)
    runtime = record.window.end + 2
    extra = {
        "device_energy": (joules, "J"),
        "node_energy": (joules * random_.uniform(1.3, 1.9), "J"),
        "epoch_time_first": (mean * random_.uniform(1.05, 1.6), "s"),
        "epoch_time_mean": (mean, "s"),
        "epoch_time_min": (mean * 0.97, "s"),
        "epoch_time_max": (mean * 1.06, "s"),
        "runtime": (runtime, "s"),
        "loading_share": (loading, "1"),
        "training_share": (0.9 - loading, "1"),
        "rest_share": (0.1, "1"),
    }
    if device_class == "cpu":
        del extra["node_energy"]
    metrics = {**record.metrics, **{name: Metric(value=value, unit=unit) for name, (value, unit) in extra.items()}}
    flags = ["imprecise"] if random_.random() < 0.05 else []
    return record.model_copy(update={"metrics": metrics, "flags": flags})


def _write(connection: duckdb.DuckDBPyConnection, store: Store, record: Record, random_: random.Random) -> str:
    """The record and its raw files; returns its key."""
    folder = store.new_attempt(record.point)
    files: dict[str, str] = {}
    window = record.window
    if window is not None:
        mean, total = window.seconds / window.steps, 1 + WARM_UP + window.steps
        steps = f"""SELECT i AS step, 0 AS rank,
            CASE WHEN i = 0 THEN 'first' WHEN i <= {WARM_UP} THEN 'warm_up' ELSE 'measure' END AS phase,
            2.0 + i * {mean} AS start, {mean} * (1 + 0.02 * sin(1.7 * i) + CASE WHEN i % 37 = 36 THEN 0.25 ELSE 0 END) AS seconds,
            0.04 * {mean} AS data_wait, 8 * exp(-i / 40) + 2 AS loss FROM range({total}) t(i)"""
        watts = (record.value("mean_power") or 100.0) * random_.uniform(0.98, 1.02)
        power = f"""SELECT 'GPU-{{}}' AS channel, 'power_instant' AS kind, {window.start} - 1 + i * 0.05 AS t_before,
            {window.start} - 1 + i * 0.05 + 0.001 AS t_after,
            CASE WHEN i BETWEEN 20 AND {window.seconds / 0.05 + 20}
                THEN {watts} * (1 + 0.1 * sin(i / 5.0) + 0.02 * random()) ELSE 20 END AS value
            FROM range({min(int((window.seconds + 2) / 0.05), 20000)}) t(i)"""
        for name, query in {"steps": steps, "power": " UNION ALL ".join(power.format(n) for n in range(2))}.items():
            connection.execute(f"COPY ({query}) TO '{folder / name}.parquet' (FORMAT parquet)")
            files[name] = f"{name}.parquet"
    changes: dict[str, Any] = {"files": files, "attempt": int(folder.name)}
    write_record(folder, record.model_copy(update=changes))
    return record.key
