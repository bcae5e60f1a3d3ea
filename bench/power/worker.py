"""Measures windows with one tool, in the interpreter that has it installed, on the fake GPU. Prints one JSON line.

    worker.py TOOL errors LENGTH COUNT    energy of COUNT windows of LENGTH seconds, against the known truth
    worker.py TOOL cost LENGTH            CPU time of LENGTH seconds of measuring
    worker.py TOOL dies                   the GPU is lost in the middle of a window of 4 s

The fake GPU and its signal come from the environment (``FAKE_GPUS``, ``FAKE_T0``); see ``compare.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from caraml.power import signals

Stop = Callable[[], tuple[float | None, float | None, bool | None]]
"""Ends the measurement: energy [J], bound [J], and whether the tool calls the number valid; None where it does not say."""


def caraml() -> Callable[[], Stop]:
    """CARAML's meter: counter, with power as a cross-check."""
    from caraml.power import Meter

    meter = Meter(["nvml"])
    meter.start()

    def start() -> Stop:
        begin = meter.mark()

        def stop() -> tuple[float | None, float | None, bool | None]:
            end = meter.mark()
            energy = meter.energy("w", begin, end)
            device = energy.boundaries.get("device")
            return (device.energy_j, device.bound_j, energy.valid) if device else (None, None, energy.valid)

        return stop

    return start


def caraml_power() -> Callable[[], Stop]:
    """CARAML's meter on the power reading alone, as for devices that have no counter."""
    from caraml.power import Meter
    from caraml.power.energy import domain_energy
    from caraml.power.readings import ChannelReadings

    meter = Meter(["nvml"])
    meter.start()

    def start() -> Stop:
        begin = meter.mark()

        def stop() -> tuple[float | None, float | None, bool | None]:
            end = meter.mark()
            meter.energy("w", begin, end)
            channel = next(c for c in meter.channels if c.kind != "energy")
            found = domain_energy([ChannelReadings(channel, meter.store.series(channel.id))], begin, end)
            return found.energy_j, found.bound_j, not {"too_short", "partial_coverage"} & set(found.flags)

        return stop

    return start


def jpwr() -> Callable[[], Stop]:
    """jpwr: integral of sampled power."""
    from jpwr.ctxmgr import get_power
    from jpwr.gpu.pynvml import power

    def start() -> Stop:
        context = get_power([power()], 100, {"ignore_measure_errors": False})
        context.__enter__()

        def stop() -> tuple[float | None, float | None, bool | None]:
            context.__exit__(None, None, None)
            frame, _ = context.energy()
            return float(frame.sum()) * 3600, None, None

        return stop

    return start


def zeus() -> Callable[[], Stop]:
    """zeus: difference of the energy counter."""
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])

    def start() -> Stop:
        monitor.begin_window("w", sync_execution=False)
        return lambda: (monitor.end_window("w", sync_execution=False).total_energy, None, None)

    return start


def zeus_power() -> Callable[[], Stop]:
    """zeus: integral of polled power."""
    from zeus.monitor import PowerMonitor

    monitor = PowerMonitor(gpu_indices=[0], update_period=0.1, power_domains=["device_instant"])
    time.sleep(8.0)  # its processes import everything again before they poll

    def start() -> Stop:
        begin = time.time()

        def stop() -> tuple[float | None, float | None, bool | None]:
            end = time.time()
            time.sleep(0.3)
            energy = monitor.get_energy(begin, end)
            return (None if energy is None else sum(energy.values())), None, None

        return stop

    return start


def codecarbon() -> Callable[[], Stop]:
    """codecarbon: difference of the energy counter in a timer thread."""
    from codecarbon import OfflineEmissionsTracker

    def start() -> Stop:
        tracker = OfflineEmissionsTracker(country_iso_code="DEU", measure_power_secs=1, save_to_file=False, log_level="error")
        tracker.start()

        def stop() -> tuple[float | None, float | None, bool | None]:
            tracker.stop()
            return tracker.final_emissions_data.gpu_energy * 3.6e6, None, None

        return stop

    return start


TOOLS = {"caraml": caraml, "caraml (power)": caraml_power, "jpwr": jpwr, "zeus": zeus, "zeus (power)": zeus_power, "codecarbon": codecarbon}


def truth() -> signals.Signal:
    """The load of the fake GPU."""
    shape, parameters = json.loads(os.environ["FAKE_GPUS"])[0]["signal"]
    module = importlib.import_module("telegraph") if shape == "Telegraph" else signals
    return getattr(module, shape)(**parameters)  # type: ignore[no-any-return]


def errors(start: Callable[[], Stop], length: float, count: int) -> list[dict[str, float | bool | None]]:
    """Windows at random phases of the load; what the caller's own clock says is the truth."""
    signal, origin = truth(), float(os.environ["FAKE_T0"])
    rows: list[dict[str, float | bool | None]] = []
    for _ in range(count):
        time.sleep(random.uniform(0.5, 1.5))
        stop = start()
        # The window begins when the tool says that it measures, and ends when it is asked to stop.
        begin = time.monotonic() - origin
        time.sleep(length)
        end = time.monotonic() - origin
        energy, bound, valid = stop()
        rows.append({"energy_j": energy, "bound_j": bound, "valid": valid, "truth_j": signal.energy(end) - signal.energy(begin)})
    return rows


def cost(start: Callable[[], Stop], length: float) -> dict[str, float]:
    """CPU time, own and children's, of measuring for ``length`` seconds beyond what starting and stopping cost."""

    def used() -> float:
        return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))

    spent = []
    for seconds in (1.0, 1.0, 1.0 + length):  # the first is to warm up
        before = used()
        stop = start()
        time.sleep(seconds)
        stop()
        spent.append(used() - before)
    return {"cpu_ms_per_s": 1000 * (spent[2] - spent[1]) / length}


def dies(start: Callable[[], Stop]) -> dict[str, object]:
    """Lose the GPU two seconds into a window of four; what does the tool return, and how long does it take?"""
    stop = start()
    time.sleep(2.0)
    Path(os.environ["FAKE_LOST"]).touch()
    time.sleep(2.0)
    asked = time.monotonic()
    try:
        energy, _, valid = stop()
        outcome: dict[str, object] = {"energy_j": energy, "valid": valid}
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is its answer
        outcome = {"raises": f"{type(error).__name__}: {error}"[:80]}
    return outcome | {"return_s": time.monotonic() - asked}


def main() -> None:
    """Run what the command line says."""
    tool, mode, *rest = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        start = TOOLS[tool]()
        if mode == "errors":
            result: object = errors(start, float(rest[0]), int(rest[1]))
        elif mode == "cost":
            result = cost(start, float(rest[0]))
        else:
            result = dies(start)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # some tools leave threads or processes behind that would keep us


if __name__ == "__main__":
    main()
