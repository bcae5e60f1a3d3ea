"""What must come out of each benchmark of ``suite.toml``: truths by arithmetic from its parameters, beside the numbers of the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from caraml.analysis.table import rows
from caraml.engine.precision import ARITHMETIC
from caraml.metrics.model import Metric, Window
from caraml.results.files import read_table
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.verify.device import PEAK_FLOPS, PEAK_MEMORY
from caraml.verify.energy import energy_claims, silence_claims
from caraml.verify.finding import Finding, fact, number, undecided
from caraml.verify.workload import BYTES_PER_SAMPLE, FLOPS_PER_ITEM, ITEMS_PER_SAMPLE, Params

EDGE_SECONDS = 0.01
"""By how much the two ends of a window may lie beside the truth: a sleeping host is woken late."""
WAKE_SHARE = 0.2
"""By how much a sleep of a few milliseconds may be longer than asked for; it is never shorter."""
GPU_CALIBRATION = 0.03
"""Relative error of a kernel that was told how long to run, by clocks that change."""

SWITCH_SECONDS = 0.001
"""What agreeing over the network between nodes may add to a step."""
BUSY_SHARE = 0.03
"""By how much steps on a CPU may differ from the clock's timetable where others use it, too."""


def claims(record: Record, store: Store) -> list[Finding]:
    """Every claim about one record."""
    name = record.point.benchmark
    if record.status == "skipped":
        found = [Finding("this benchmark", "", record.reason or "skipped", "not here")]
    elif record.status != "ok" and name != "out of memory":
        found = [fact("ends", "ok", f"{record.status}: {record.reason}", False)]
    else:
        found = _CLAIMS[name](record, store)
        if "busy_machine" in record.flags:
            found = [undecided(finding, record.metrics["other_cpu_share"]) for finding in found]
    return [dataclasses.replace(finding, claim=f"{name}: {finding.claim}") for finding in found]


def _params(record: Record) -> Params:
    return Params.model_validate(record.point.params)


def _window(record: Record) -> Window:
    assert record.window is not None  # a record with status ok has one
    return record.window


def _edge(record: Record) -> float:
    """Relative uncertainty that the two ends add to whatever is divided by the window's time."""
    return EDGE_SECONDS / _window(record).seconds


def _rate(record: Record, step_seconds: float, share: float = 1.0, slack: float = 0.0) -> list[Finding]:
    """Rate and step time for steps of a known time, of which ``share`` trained."""
    truth = share * record.point.global_batch * ITEMS_PER_SAMPLE / step_seconds
    relative, metrics = _edge(record) + slack, record.metrics
    return [
        number("throughput", truth, metrics.get("throughput"), truth * relative),
        number("mean step", step_seconds, metrics.get("step_time_mean"), step_seconds * relative),
        number("median step", step_seconds, metrics.get("step_time_median"), step_seconds * (1e-6 + slack)),
    ]


def _work(record: Record, step_seconds: float) -> list[Finding]:
    """What follows from the rate of one device: FLOPs, utilisation, bytes, and the rate of each device."""
    metrics, point, relative = record.metrics, record.point, _edge(record)
    each = point.global_batch * ITEMS_PER_SAMPLE / step_seconds / point.world
    flops, peak = each * FLOPS_PER_ITEM, PEAK_FLOPS[ARITHMETIC[point.precision]]
    read = point.global_batch * BYTES_PER_SAMPLE / step_seconds
    return [
        number("throughput per device", each, metrics.get("throughput_per_device"), each * relative),
        number("FLOP/s per device", flops, metrics.get("achieved_flops_per_device"), flops * relative),
        number("MFU, data sheet", flops / peak, metrics.get("mfu"), flops / peak * relative),
        number("MFU, measured peak", flops / peak, metrics.get("mfu_measured"), flops / peak * relative),
        number("input", read, metrics.get("input_bandwidth"), read * relative),
    ]


def _pace(record: Record, store: Store) -> list[Finding]:
    seconds, metrics = _params(record).step_seconds, record.metrics
    return [
        *_rate(record, seconds),
        *_work(record, seconds),
        number("peak memory", PEAK_MEMORY, metrics.get("peak_memory")),
        number("data wait", 0.0, metrics.get("data_wait_share"), 0.01),
        _steps_fill_the_window(record, store),
        _table_says_the_same(record),
        *energy_claims(record, store),
    ]


def _steps_fill_the_window(record: Record, store: Store) -> Finding:
    """The steps were timed to their end: a clock read at their launch would give a few milliseconds in all."""
    raw = read_table(store.folder(record) / record.files["steps"])
    inside = sum(seconds for seconds, phase in zip(raw["seconds"], raw["phase"], strict=True) if phase == "measure")
    total = Metric(value=inside, unit="s")
    return number("raw steps add up to the window", _window(record).seconds, total, EDGE_SECONDS)


def _table_says_the_same(record: Record) -> Finding:
    (row,) = rows([record])
    different = [name for name, metric in record.metrics.items() if row[name] != metric.value]
    return fact("tables show the record's numbers", "all", f"but {', '.join(different)}" if different else "all", not different)


def _two_ranks(record: Record, store: Store) -> list[Finding]:
    seconds = _params(record).step_seconds
    ranks = set(read_table(store.folder(record) / record.files["steps"])["rank"])
    return [*_rate(record, seconds), *_work(record, seconds), fact("raw steps of", "ranks 0 and 1", f"ranks {ranks}", ranks == {0, 1})]


def _slow_rank(record: Record, store: Store) -> list[Finding]:
    params = _params(record)
    seconds = params.step_seconds + params.slow_rank_extra
    first = seconds + params.slow_rank_data_extra
    return [
        *_rate(record, seconds),
        number("first step", first, record.metrics.get("first_step_time"), EDGE_SECONDS),
        _wait(record, params.slow_rank_data_extra / seconds),
    ]


def _wait(record: Record, share: float) -> Finding:
    """Data wait; the truth lies in the middle of what a late waker makes of it."""
    half = share * WAKE_SHARE / 2
    return number("data wait", share + half, record.metrics.get("data_wait_share"), half + share * _edge(record))


def _nodes(record: Record, store: Store) -> list[Finding]:
    """Every node counts once in rate and energy, and the slowest rank of them all sets the pace."""
    params, point = _params(record), record.point
    seconds = params.step_seconds + params.slow_rank_extra
    ranks = set(read_table(store.folder(record) / record.files["steps"])["rank"])
    everyone = set(range(point.nodes))
    return [
        *_rate(record, seconds, slack=SWITCH_SECONDS / seconds),
        fact("raw steps of", f"{point.nodes} ranks", f"ranks {sorted(ranks)}", ranks == everyone),
        _edges(record),
        *energy_claims(record, store),
    ]


def _edges(record: Record) -> Finding:
    """The ranks opened the window together."""
    apart = _window(record).opened_within
    reason = "not known" if apart is None else None
    return number("ranks open the window apart by", 0.0, Metric(value=apart, unit="s", reason=reason), EDGE_SECONDS)


def _accumulation(record: Record, store: Store) -> list[Finding]:
    params, count = _params(record), record.point.accumulation
    return [*_rate(record, count * params.step_seconds), _wait(record, params.data_seconds / params.step_seconds)]


def _skipped_updates(record: Record, store: Store) -> list[Finding]:
    params, window = _params(record), _window(record)
    assert params.overflow_every is not None
    steps = range(window.first_step, window.first_step + window.steps)
    trained = sum(index % params.overflow_every != 0 for index in steps)
    items = trained * record.point.global_batch * ITEMS_PER_SAMPLE
    return [
        number("items trained", items, Metric(value=window.items, unit="thing")),
        *_rate(record, params.step_seconds, trained / window.steps),
    ]


def _warm_up(record: Record, store: Store) -> list[Finding]:
    params, window = _params(record), _window(record)
    first = params.step_seconds + params.warm_up_extra
    late = params.warm_up_extra * 0.5**window.first_step
    return [
        number("first step", first, record.metrics.get("first_step_time"), EDGE_SECONDS),
        number("warm-up left in the window's first step", 0.0, Metric(value=late, unit="s"), 0.01 * params.step_seconds),
        *_rate(record, params.step_seconds),
    ]


def _getting_slower(record: Record, store: Store) -> list[Finding]:
    params, window = _params(record), _window(record)
    slow = record.value("step_time_max")
    truth = params.step_seconds * params.slower_by
    return [
        fact("flagged", "not_steady", ", ".join(record.flags) or "no flag", "not_steady" in record.flags),
        number("longest step", truth, Metric(value=slow, unit="s", reason=None if slow else "not measured"), 1e-3 * truth),
        number("time of the window", _slowed(params, window), record.metrics.get("window_time"), EDGE_SECONDS),
    ]


def _slowed(params: Params, window: Window) -> float:
    indices = range(window.first_step, window.first_step + window.steps)
    slow = sum(params.slower_from is not None and index >= params.slower_from for index in indices)
    return params.step_seconds * (window.steps - slow + slow * params.slower_by)


def _out_of_memory(record: Record, store: Store) -> list[Finding]:
    needed = f"{record.point.micro_batch}.00 GiB"
    told = f"{record.status}: {record.reason}"
    return [fact("ends", f"oom, {needed}", told, record.status == "oom" and needed in told)]


def _real_device(record: Record, store: Store) -> list[Finding]:
    return _rate(record, _params(record).step_seconds, slack=GPU_CALIBRATION if record.point.device_class == "gpu" else BUSY_SHARE)


_CLAIMS: dict[str, Callable[[Record, Store], list[Finding]]] = {
    "pace": _pace,
    "two ranks": _two_ranks,
    "slow rank": _slow_rank,
    "nodes": _nodes,
    "nodes with a dead sensor": silence_claims,
    "accumulation": _accumulation,
    "skipped updates": _skipped_updates,
    "warm-up": _warm_up,
    "getting slower": _getting_slower,
    "out of memory": _out_of_memory,
    "real device": _real_device,
}
