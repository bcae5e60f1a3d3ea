"""What must come out of each benchmark of ``suite.toml``: truths by arithmetic from its parameters, beside the numbers of the record.

The truth of an energy is the closed-form integral of the made-up sensors' signals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from scipy.optimize import brentq

from caraml.analysis.table import rows
from caraml.base.format import JOULES_PER_WATT_HOUR, human
from caraml.engine.precision import ARITHMETIC
from caraml.metrics.model import Metric, Window
from caraml.power.model import WindowEnergy
from caraml.power.signals import Signal, Square, square
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import Store
from caraml.verify import BYTES_PER_SAMPLE, FLOPS_PER_ITEM, ITEMS_PER_SAMPLE, PEAK_FLOPS, PEAK_MEMORY, Params
from caraml.verify.finding import Finding, fact, number, undecided

EDGE_SECONDS = 0.01
"""By how much the two ends of a window may lie beside the truth: a sleeping host is woken late."""
LAUNCH_SECONDS = 0.002
"""What a host may take from a batch to the launch of the work on it."""
GPU_CALIBRATION = 0.03
"""Relative error of a kernel that was told how long to run, by clocks that change."""
SWITCH_SECONDS = 0.001
"""What agreeing over the network between nodes may add to a step."""
BUSY_SHARE = 0.03
"""By how much steps on a CPU may differ from the clock's timetable where others use it, too."""
SOURCE = "fake:square"
"""The sensor: 500 W and 100 W in turn, half a second each."""
WATTS = (300.0, 500.0, 700.0)
"""Mean power of the first three nodes; those after them begin anew."""
SIGNAL = square(WATTS[0])
ORIGIN_SECONDS = 0.005
"""How well the instant at which a sensor's signal began can be told from its readings."""
OPENING_SECONDS = 0.05
"""How long before the idle baseline a sensor's signal begins at most, on the node that is ready last."""
SILENT_AFTER = 1.0
"""Seconds for which a sensor that is made to die answers: idle power takes most of them."""
_LONGEST = 3600.0
"""Seconds for which a sensor's signal has run at most."""


# -- known watts --------------------------------------------------------------------------------------------------


def source_of(nodes: int, *, last_dies: bool = False) -> str:
    """Sensors of unequal nodes, for the variable that names power sources."""
    watts = [f"{WATTS[index % len(WATTS)]:g}" for index in range(nodes)]
    return f"{SOURCE}:{'/'.join(watts)}" + (f"@{SILENT_AFTER:g}" if last_dies else "")


def energy_claims(record: Record, store: Store) -> list[Finding]:
    """Energy of the window, idle power, and everything derived from the two, over all nodes."""
    window, metrics, point = record.window, record.metrics, record.point
    sensors = list(_sensors(record, store))
    if window is None or any(idle is None for _, _, idle in sensors) or len(sensors) != point.nodes:
        return [fact("energy", "measured", f"{len(sensors)} of {point.nodes} nodes have power readings", False)]
    joules, watts, swing, longest = 0.0, 0.0, 0.0, 0.0
    for signal, origin, idle in sensors:
        assert idle is not None
        joules += signal.energy(window.end - origin) - signal.energy(window.start - origin)
        watts += (signal.energy(idle.end - origin) - signal.energy(idle.start - origin)) / idle.duration_s
        swing, longest = swing + signal.high - signal.low, max(longest, 1 / idle.duration_s)
    seconds, error = window.seconds, ORIGIN_SECONDS * swing
    items = window.steps * point.global_batch * ITEMS_PER_SAMPLE
    truths = {
        "energy": (joules, error),
        "energy_per_item": (joules / items, error / items),
        "items_per_watt_hour": (items * JOULES_PER_WATT_HOUR / joules, items * JOULES_PER_WATT_HOUR * error / joules**2),
        "mean_power": (joules / seconds, error / seconds),
        "energy_time_product": (joules * seconds, error * seconds),
        "idle_power": (watts, error * longest),
        "energy_net": (joules - watts * seconds, error + error * longest * seconds),
    }
    parts = {"energy_net": joules}
    energies = [number(name.replace("_", " "), truth, metrics.get(name), slack, parts.get(name)) for name, (truth, slack) in truths.items()]
    return [*energies, readings_in_time((origin, idle) for _, origin, idle in sensors)]


def readings_in_time(sensors: Iterable[tuple[float, WindowEnergy | None]]) -> Finding:
    """Readings have the times of the record's clock, by when each sensor's signal began by them. It did a moment before the idle baseline
    that follows, or longer where nodes wait for each other. Readings at other times would give a wrong energy, and the same wrong truth.
    """
    known = [(origin, idle.start) for origin, idle in sensors if idle is not None]
    late, early = max(origin - start for origin, start in known), min(start - origin for origin, start in known)
    off = late if late > 0 else min(OPENING_SECONDS - early, 0.0)
    return number("times of the readings off by", 0.0, Metric(value=off, unit="s"), ORIGIN_SECONDS)


def silence_claims(record: Record, store: Store) -> list[Finding]:
    """A sensor that dies on the last node leaves no energy, and its node is named; what the others used stays known."""
    energy, window = record.metrics.get("energy"), record.window
    if energy is None or window is None or len(record.nodes) != record.point.nodes:
        return [fact("energy", "none", f"{len(record.nodes)} of {record.point.nodes} nodes are known", False)]
    last, told = record.nodes[-1].name, energy.reason or "no reason"
    known = [signal.energy(window.end - origin) - signal.energy(window.start - origin) for signal, origin, _ in _sensors(record, store)]
    low, high = sum(known[:-1]), sum(known)
    slack = ORIGIN_SECONDS * sum(signal.high - signal.low for signal, _, _ in _sensors(record, store))
    part = record.energy.boundaries["device"].partial_j if record.energy is not None and "device" in record.energy.boundaries else None
    bound = sum(each.energy.boundaries["device"].bound_j or 0.0 for each in record.nodes[:-1] if each.energy is not None)
    holds = part is not None and low - slack - bound <= part <= high + slack + bound
    return [
        fact("energy", f"none, for {last}", f"{human(energy.value, 'J')}: {told}", energy.value is None and f"{last}: " in told),
        fact("energy known in part", f"{human(low, 'J')} to {human(high, 'J')}", human(part, "J"), holds),
    ]


def _sensors(record: Record, store: Store) -> Iterator[tuple[Square, float, WindowEnergy | None]]:
    """Of every node with readings: its signal, when that began on the record's clock, and the node's idle window."""
    idle = [node.idle for node in record.nodes] or [record.idle]
    for index, resting in enumerate(idle):
        file = record.files.get(f"power-{index}" if index else "power")
        if file is not None:
            signal = square(WATTS[index % len(WATTS)])
            yield signal, signal_origin(read_table(store.folder(record) / file), signal), resting


def signal_origin(readings: dict[str, list[float]], signal: Signal = SIGNAL) -> float:
    """When the signal began, on the record's clock [s]: the counter shows how much it has given off by the time of a reading.

    A counter shows the past, at most one update period old, so the earliest answer is the nearest.
    """
    pairs = zip(readings["channel"], readings["t_before"], readings["value"], strict=True)
    counter = [(at, joules) for channel, at, joules in pairs if str(channel).endswith(":energy") and joules is not None]
    return min(at - brentq(lambda since, shown=joules: signal.energy(since) - shown, 0.0, _LONGEST) for at, joules in counter)


# -- every benchmark of suite.toml --------------------------------------------------------------------------------


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
    return [replace(finding, claim=f"{name}: {finding.claim}") for finding in found]


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
        _no_wait(record),
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
    seconds, ranks = _params(record).step_seconds, _ranks(record, store)
    return [*_rate(record, seconds), *_work(record, seconds), fact("raw steps of", "ranks 0 and 1", f"ranks {ranks}", ranks == {0, 1})]


def _ranks(record: Record, store: Store) -> set[int]:
    return set(read_table(store.folder(record) / record.files["steps"])["rank"])


def _slow_rank(record: Record, store: Store) -> list[Finding]:
    params = _params(record)
    seconds = params.step_seconds + params.slow_rank_extra
    first = seconds + params.slow_rank_data_extra
    return [
        *_rate(record, seconds),
        number("first step", first, record.metrics.get("first_step_time"), EDGE_SECONDS),
        _no_wait(record),
    ]


def _no_wait(record: Record) -> Finding:
    """Whatever hosts wait for their batches, their devices work meanwhile."""
    return number("data wait", 0.0, record.metrics.get("data_wait_share"), 0.01)


def _nodes(record: Record, store: Store) -> list[Finding]:
    """Every node counts once in rate and energy, and the slowest rank of them all sets the pace."""
    params, nodes, ranks = _params(record), record.point.nodes, _ranks(record, store)
    seconds = params.step_seconds + params.slow_rank_extra
    apart = _window(record).opened_within
    opened = Metric(value=apart, unit="s", reason="not known" if apart is None else None)
    return [
        *_rate(record, seconds, slack=SWITCH_SECONDS / seconds),
        fact("raw steps of", f"{nodes} ranks", f"ranks {sorted(ranks)}", ranks == set(range(nodes))),
        number("ranks open the window apart by", 0.0, opened, EDGE_SECONDS),
        *energy_claims(record, store),
    ]


def _accumulation(record: Record, store: Store) -> list[Finding]:
    params, count = _params(record), record.point.accumulation
    return [*_rate(record, count * params.step_seconds), _no_wait(record)]


def _late_input(record: Record, store: Store) -> list[Finding]:
    """Batches that come later than the device has done the one before: all of a step but its work is lost, and what launching takes."""
    count, step = record.point.accumulation, record.metrics["step_time_mean"].value or math.inf
    lost, launching = 1 - count * _params(record).step_seconds / step, count * LAUNCH_SECONDS / step
    return [number("data wait", lost, record.metrics.get("data_wait_share"), launching + _edge(record))]


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
    longest, truth = record.value("step_time_max"), params.step_seconds * params.slower_by
    indices = range(window.first_step, window.first_step + window.steps)
    slow = sum(params.slower_from is not None and index >= params.slower_from for index in indices)
    whole = params.step_seconds * (window.steps - slow + slow * params.slower_by)
    return [
        fact("flagged", "not_steady", ", ".join(record.flags) or "no flag", "not_steady" in record.flags),
        number("longest step", truth, Metric(value=longest, unit="s", reason=None if longest else "not measured"), 1e-3 * truth),
        number("time of the window", whole, record.metrics.get("window_time"), EDGE_SECONDS),
    ]


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
    "late input": _late_input,
    "skipped updates": _skipped_updates,
    "warm-up": _warm_up,
    "getting slower": _getting_slower,
    "out of memory": _out_of_memory,
    "real device": _real_device,
}
