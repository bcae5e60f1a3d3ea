"""Known watts: the closed-form integral of the made-up sensor's signal beside the energy that was published."""

from __future__ import annotations

from caraml.power.signals import Signal, Square
from caraml.results.files import read_table
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.units import JOULES_PER_WATT_HOUR
from caraml.verify.finding import Finding, fact, number
from caraml.verify.workload import ITEMS_PER_SAMPLE

SOURCE = "fake:square"
"""The sensor: 500 W and 100 W in turn, half a second each."""
SIGNAL = Square()
ORIGIN_SECONDS = 0.005
"""How well the instant at which the sensor's signal began can be told from its readings."""
_LONGEST = 3600.0


def energy_claims(record: Record, store: Store) -> list[Finding]:
    """Energy of the window, idle power, and everything derived from the two."""
    window, idle, metrics, point = record.window, record.idle, record.metrics, record.point
    if window is None or idle is None or "power" not in record.files:
        return [fact("energy", "measured", "no power readings", False)]
    origin = signal_origin(read_table(store.folder(record) / record.files["power"]))
    joules = SIGNAL.energy(window.end - origin) - SIGNAL.energy(window.start - origin)
    seconds, rest = window.seconds, idle.end - idle.start
    watts = (SIGNAL.energy(idle.end - origin) - SIGNAL.energy(idle.start - origin)) / rest
    items = window.steps * point.global_batch * ITEMS_PER_SAMPLE
    error = ORIGIN_SECONDS * (SIGNAL.high - SIGNAL.low)
    truths = {
        "energy": (joules, error),
        "energy_per_item": (joules / items, error / items),
        "items_per_watt_hour": (items * JOULES_PER_WATT_HOUR / joules, items * JOULES_PER_WATT_HOUR * error / joules**2),
        "mean_power": (joules / seconds, error / seconds),
        "energy_time_product": (joules * seconds, error * seconds),
        "idle_power": (watts, error / rest),
        "energy_net": (joules - watts * seconds, error + error / rest * seconds),
    }
    return [number(name.replace("_", " "), truth, metrics.get(name), slack) for name, (truth, slack) in truths.items()]


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
