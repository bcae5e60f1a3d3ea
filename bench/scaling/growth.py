"""How cost grows: step time and memory against batch, sequence length and model size, and everything against ranks and the length of a run.

    python bench/scaling/growth.py [batch sequence width layers world length readings] [--rounds N] [--json FILE]

For the first four CARAML's own step trains small GPTs, one process for each size, in turns of random order; ``world`` runs whole points on
devices of known speed (steps of 50 ms, whatever the number of ranks), so that what grows is CARAML's own; ``length`` drives the measuring
loop with such a device on a virtual clock, so that a million steps of 50 ms take seconds; ``readings`` gives the meter's store a million
readings of a counter and a power sensor (28 hours at 100 ms), and makes energy and a table of all of them. The exponent is the slope of a
straight line through the logarithms: 1 is proportional, 0 is constant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "train"))

SMALL = {"preset": "4M", "width": 128, "layers": 2, "heads": 4, "sequence_length": 128, "vocab_size": 1024, "data": "synthetic"}
SIZES = {
    "batch": [2, 4, 8, 16],
    "sequence": [64, 128, 256, 512],
    "width": [64, 128, 256, 512],
    "layers": [1, 2, 4, 8],
    "world": [1, 2, 4, 8],
    "length": [10_000, 100_000, 1_000_000],
    "readings": [10_000, 100_000, 1_000_000],
}


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def trained(axis: str, rounds: int) -> list[dict[str, float]]:
    """Seconds of CPU of a step and highest resident set, for every size along one axis."""
    from gate import PIPES
    from spec import Spec, point_of
    from turns import Program, take_turns

    from caraml.launch.script import environment_of

    with tempfile.TemporaryDirectory() as scratch:
        programs = []
        for size in SIZES[axis]:
            own = {"sequence": {"sequence_length": size}, "width": {"width": size}, "layers": {"layers": size}}.get(axis, {})
            spec = Spec("caraml", "gpt", {**SMALL, **own}, size if axis == "batch" else 4)
            command = [str(HERE.parent / "train" / "contestants.py"), spec.to_json()]
            log = Path(scratch) / f"{size}.log"
            programs.append(Program(str(size), command, environment_of(point_of(spec), threads=1), log, PIPES))
        try:
            for program in programs:
                if failed := program.started():
                    raise RuntimeError(f"{axis} {program.name}: {failed}")
            turns = take_turns(programs, rounds, 1.0)
        finally:
            for program in programs:
                program.end()
    return [
        {"size": size, "step_cpu": median(turn.cpu for turn in turns[str(size)]), "memory": turns[str(size)][-1].memory}
        for size in SIZES[axis]
    ]


def over_world(world: int) -> dict[str, float]:
    """One point of so many ranks on this node (more than it has devices, which does not matter to ranks that only wait)."""
    from caraml.results.store import RECORD, read_record
    from caraml.suite.model import Point, Policy

    names = dict.fromkeys(("suite", "benchmark", "system", "device", "software"), "bench")
    point = Point(
        **names,
        workload="known",
        params={"device": "asynchronous", "step_seconds": 0.05},
        device_class="cpu",
        devices=world,
        global_batch=world,
        micro_batch=1,
        measure=Policy(min_seconds=5, max_seconds=6, idle_seconds=0),
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "known" / "1"
        folder.mkdir(parents=True)
        (folder / "point.json").write_text(point.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "caraml.engine.start", f"--devices={world}", "caraml.worker"]
        environment = {**os.environ, "CARAML_POWER": "fake:constant", "OMP_NUM_THREADS": "1"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, str(folder)], check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        record = read_record(folder / RECORD)
        return {
            "size": world,
            "step": record.value("step_time_median") or math.nan,
            "first_step": record.value("time_to_first_step") or math.nan,
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "record": (folder / RECORD).stat().st_size,
            "steps_file": (folder / record.files["steps"]).stat().st_size,
        }


def long_run(steps: int) -> dict[str, float]:
    """In this process: memory, time and raw table of a window of so many steps of 50 ms that jitter by 1 %."""
    import random

    import torch

    from caraml.engine.loop import Hooks, MeasuringLoop
    from caraml.engine.ranks import Ranks
    from caraml.engine.steps import StepOutcome
    from caraml.results.rows import write_table
    from caraml.suite.model import Policy
    from caraml.verify import KnownDevice, VirtualClock

    device, rng = KnownDevice(VirtualClock(1000.0), launch_cost=0.001, queue=1.0), random.Random(0)
    looks: list[int] = []

    def step() -> StepOutcome:
        device.launch(rng.gauss(0.05, 0.0005))
        return StepOutcome(torch.rand(()), rng.random() * 1e-5)

    policy = Policy(target=1e-9, max_seconds=1e9, min_steps=steps, max_steps=steps, idle_seconds=0)
    before, begin = _resident(), time.process_time()
    hooks = Hooks(progress=lambda progress: looks.append(_resident() - before))
    done = MeasuringLoop(device, Ranks(), policy, hooks).run(step)
    looping, held = time.process_time() - begin, _resident() - before
    columns = ("step", "rank", "phase", "start", "seconds", "data_wait", "loss")
    rows = ((index, 0, row.phase, row.start, row.seconds, row.data_wait, done.losses[index]) for index, row in enumerate(done.rows))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / write_table(Path(folder), "steps", columns, rows)
        size = file.stat().st_size
    return {"size": steps, "loop_cpu": looping, "memory": looks[-1], "memory_after": held, "steps_file": size, "looks": len(looks)}


def long_metering(readings: int) -> dict[str, float]:
    """In this process: memory held by so many readings of two channels at 100 ms, and the highest while they become energy and a table."""
    from caraml.power.energy import window_energy
    from caraml.power.model import Channel, Reading
    from caraml.power.readings import ChannelReadings
    from caraml.power.store import ROW, ReadingStore
    from caraml.results.rows import write_table

    one = {"source": "bench", "boundary": "device", "label": "bench", "domain": "bench", "hardware": "bench", "update_period_s": 0.1}
    channels = [Channel(id=kind, kind=kind, **one) for kind in ("energy", "power_instant")]  # type: ignore[arg-type]
    before, store = _resident(), ReadingStore()
    store.register(channels)
    for index in range(readings):
        t = index * 0.1
        store.add([Reading("energy", t, t + 1e-4, 300 * t), Reading("power_instant", t, t + 1e-4, 300.0 + index % 7)])
    held, begin = _resident() - before, time.process_time()
    series = [ChannelReadings(channel, store.series(channel.id)) for channel in channels]
    energy = window_energy("measure", series, 1.0, t - 1.0)
    concluded = time.process_time() - begin
    with tempfile.TemporaryDirectory() as folder:
        size = (Path(folder) / write_table(Path(folder), "power", ROW, store.rows())).stat().st_size
    assert energy.valid, energy.reason
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"size": readings, "memory": held, "peak": peak, "energy_cpu": concluded, "power_file": size}


def _resident() -> int:
    """Resident set of this process now [B]."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Measure, fit, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-run", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one_run is not None:
        print(json.dumps({"length": long_run, "readings": long_metering}[asked.axes[0]](asked.one_run)))
        return
    kept = {}
    for axis in asked.axes:
        if axis in ("length", "readings"):  # each in a process of its own: what one leaves behind must not count for the next
            command = [sys.executable, __file__, axis, "--one-run"]
            found = [json.loads(subprocess.run([*command, str(size)], check=True, capture_output=True).stdout) for size in SIZES[axis]]
        elif axis == "world":
            found = [over_world(size) for size in SIZES[axis]]
        else:
            found = trained(axis, asked.rounds)
        sizes = [row["size"] for row in found]
        kept[axis] = found
        print(f"\n{axis}; load {os.getloadavg()[0]:.1f}\n")
        print("| size | " + " | ".join(str(size) for size in sizes) + " | exponent |")
        print("|---" * (len(sizes) + 2) + "|")
        for name in [name for name in found[0] if name != "size"]:
            costs = [row[name] for row in found]
            slope = f"{exponent(sizes, costs):.2f}" if min(costs) > 0 else "–"
            print(f"| {name} | " + " | ".join(f"{cost:.4g}" for cost in costs) + f" | {slope} |", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
