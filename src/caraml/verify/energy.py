"""Known watts: the closed-form integral of the made-up sensors' signals beside the energy that was published."""

from __future__ import annotations

from collections.abc import Iterator

from caraml.base.format import JOULES_PER_WATT_HOUR, human
from caraml.power.model import WindowEnergy
from caraml.power.signals import Signal, Square, square
from caraml.results.files import read_table
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.verify.finding import Finding, fact, number
from caraml.verify.workload import ITEMS_PER_SAMPLE

SOURCE = "fake:square"
"""The sensor: 500 W and 100 W in turn, half a second each."""
WATTS = (300.0, 500.0, 700.0)
"""Mean power of the first three nodes; those after them begin anew."""
SIGNAL = square(WATTS[0])
ORIGIN_SECONDS = 0.005
"""How well the instant at which a sensor's signal began can be told from its readings."""
SILENT_AFTER = 1.0
"""Seconds for which a sensor that is made to die answers: idle power takes most of them."""
_LONGEST = 3600.0


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
    return [number(name.replace("_", " "), truth, metrics.get(name), slack) for name, (truth, slack) in truths.items()]


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
    return min(at - _time_of(joules, signal) for at, joules in counter)


def _time_of(joules: float, signal: Signal) -> float:
    """When a rising energy reaches ``joules`` [s], by bisection."""
    low, high = 0.0, _LONGEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if signal.energy(middle) < joules else (low, middle)
    return high
