"""Power and energy of accelerators, processors and nodes: a meter that says how right it is. Usable alone.

    with Meter() as meter, meter.window("train") as window:  # every sensor that answers; or Meter(["nvml", "rapl"])
        train()
    print(window.energy.valid, window.energy.reason, window.energy.boundaries)

docs/energy.md shows idle baselines, windows whose ends are known afterwards, and what the numbers mean. What is not known is ``None`` with
a ``reason``, never 0. Energy is in joules, power in watts, time in seconds of the monotonic clock; nothing here imports torch or numpy.
"""

from __future__ import annotations

from caraml.power.meter import Meter, MeterWindow
from caraml.power.model import BoundaryEnergy, Channel, ChannelEnergy, Reading, WindowEnergy
from caraml.power.source import Source, SourceEntry, SourceUnavailable, source_names

__all__ = [
    "BoundaryEnergy",
    "Channel",
    "ChannelEnergy",
    "Meter",
    "MeterWindow",
    "Reading",
    "Source",
    "SourceEntry",
    "SourceUnavailable",
    "WindowEnergy",
    "source_names",
]
