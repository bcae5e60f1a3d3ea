"""Power and energy of accelerators, processors and nodes: a meter that says how right it is. Usable alone.

    from caraml.power import Meter

    with Meter() as meter:                                   # every sensor that answers; or Meter(["nvml", "rapl"])
        with meter.window("idle") as quiet:
            time.sleep(10)
        with meter.window("train", idle=quiet.energy) as w:  # windows may nest and overlap
            train()
        print(w.energy.valid, w.energy.reason, w.energy.flags)
        gpu = w.energy.boundaries.get("device")              # also "module", "cpu", "node_dc", "node_ac"
        if gpu is not None:
            print(gpu.energy_j, "±", gpu.bound_j, "J, of which idle", gpu.idle_j)

    @meter.window("step")                                    # as a decorator: one window per call, in meter.windows
    def step(): ...

For a window whose edges are known only afterwards (any two ``time.monotonic()`` instants while the meter ran)::

    start = meter.mark(); ...; end = meter.mark()            # a mark reads all sensors; synchronise the device first
    meter.energy("train", start, end, idle=idle_energy)      # -> WindowEnergy

A ``WindowEnergy`` holds one ``ChannelEnergy`` per domain (a GPU, a package, a rail): ``energy_j ± bound_j`` and the
``bound_parts``, the method, mean and peak power, the cross-check of counter against integral, coverage and flags; and one
``BoundaryEnergy`` per boundary, in which nothing is counted twice. What is not known is ``None`` with a ``reason``:
without a sensor ``valid`` is False, ``flags`` is ``["no_source"]`` and there is no boundary. It is never 0.

``meter.reasons`` lists why sources are missing, each with the command that mends it. ``meter.readings()`` gives all raw
readings as columns. ``meter.latest_power_w()`` is for a live display. ``WindowEnergy.to_dict()`` is plain JSON data.
Energy is in joules, power in watts, time in seconds of the monotonic clock; nothing here imports torch or numpy.
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
