"""What the harness costs: an empty step, and the same step with and without it.

    python bench/scaling/cost.py [--steps N] [--rounds N] [--json FILE]

``empty``: the measuring loop over a step that does nothing, with a meter that reads every 100 ms, against a bare ``for`` over the same
function: CPU time per step of looping, marking, keeping, looking and telling. ``a/b``: a step of 50 ms in the loop, and in a bare loop, in
turns of random order; once 50 ms of arithmetic, and once 50 ms of waiting, as for a GPU. CPU time of the whole process between the window's
edges, so the sampler's threads count. The waiting step shows it sharply, since nothing else uses the processor, and at its highest: every
wake of a thread comes from a sleeping core. That of arithmetic moves with the clock of the core, by more than what is looked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from caraml.engine.device import CpuDevice
from caraml.engine.loop import Hooks, MeasuringLoop, Progress
from caraml.engine.ranks import Ranks
from caraml.engine.steps import StepOutcome
from caraml.launch.script import environment_of
from caraml.power import Meter
from caraml.results.status import ProgressWriter
from caraml.suite.model import Policy
from caraml.verify.claims import SOURCE

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from spec import Spec, point_of
from turns import Estimate, median, ratio

STEP_SECONDS = 0.05


def policy(steps: int) -> Policy:
    """A window of exactly so many steps."""
    return Policy(min_seconds=0, max_seconds=3600, min_steps=steps, max_steps=steps, idle_seconds=0, warm_up_max_seconds=0.001)


def harnessed(step: Callable[[], StepOutcome], steps: int) -> float:
    """Seconds of CPU per step inside the window of the measuring loop: all threads, sensors and progress included."""
    edges: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Meter([SOURCE]) as meter:
        progress = ProgressWriter(Path(folder), time.monotonic())

        def show(now: Progress) -> None:
            progress.write(now.phase, steps=now.steps, watts=meter.latest_power_w())

        def edge() -> None:
            if edges:
                edges.append(time.process_time())
            meter.mark()
            if not edges:
                edges.append(time.process_time())

        done = MeasuringLoop(CpuDevice(), Ranks(), policy(steps), Hooks(progress=show, edge=edge)).run(step)
    return (edges[1] - edges[0]) / len(done.window_rows)


def bare(step: Callable[[], StepOutcome], steps: int) -> float:
    """Seconds of CPU per step with nothing around it."""
    begin = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - begin) / steps


def waiting(steps: int, rounds: int) -> Estimate:
    """What the harness adds to a step that waits for a device, as a share of the step."""
    loss = torch.zeros(())

    def step() -> StepOutcome:
        time.sleep(STEP_SECONDS)
        return StepOutcome(loss, 0.0)

    return median([(harnessed(step, steps) - bare(step, steps)) / STEP_SECONDS for _ in range(rounds)])


def empty(steps: int, rounds: int) -> Estimate:
    """Seconds of CPU that the harness adds to a step that does nothing."""
    loss = torch.zeros(())

    def step() -> StepOutcome:
        return StepOutcome(loss, 0.0)

    return median([harnessed(step, steps) - bare(step, steps) for _ in range(rounds)])


def arithmetic() -> Callable[[], StepOutcome]:
    """A step of about 50 ms of CPU: matrix products, as many as that takes now."""
    a = torch.randn(256, 256)
    begin = time.process_time()
    for _ in range(50):
        a @ a
    products = max(1, round(50 * STEP_SECONDS / (time.process_time() - begin)))
    loss = torch.zeros(())

    def step() -> StepOutcome:
        for _ in range(products):
            a @ a
        return StepOutcome(loss + 0, 0.0)

    return step


def beside(steps: int, rounds: int) -> tuple[Estimate, Estimate]:
    """CPU time of the same steps with the harness over without it; and that of one loop over that of another, both without: the noise."""
    step = arithmetic()
    kinds = {"harness": harnessed, "bare": bare, "again": bare}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name in random.sample(list(kinds), len(kinds)):
            seconds = kinds[name](step, steps)
            if number:
                times[name].append(seconds)
    return ratio(times["harness"], times["bare"]), ratio(times["again"], times["bare"])


def _in_a_workers_environment() -> None:
    """Start again with the variables that a point's script sets; those of glibc's allocator count only from a process's start."""
    point = point_of(Spec("caraml", "gpt", {"preset": "4M", "data": "synthetic"}, 4))
    wanted = environment_of(point, threads=1)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="of the empty test")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ab-steps", type=int, default=40, help="of one turn of the a/b test")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    _in_a_workers_environment()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    cost = empty(asked.steps, asked.rounds)
    waited = waiting(asked.ab_steps, asked.rounds)
    over, noise = beside(asked.ab_steps, asked.rounds)
    print(f"load {load:.1f}; {asked.rounds} rounds; medians with 95 % bootstrap intervals of CPU time")
    print(f"empty step: {cost.value * 1e6:.1f} ({cost.low * 1e6:.1f} to {cost.high * 1e6:.1f}) µs per step; target 50")
    print(f"added to 50 ms of waiting: {waited.value:.5f} ({waited.low:.5f} to {waited.high:.5f}); target 0.005")
    print(f"50 ms of arithmetic with the harness over without: {over.value:.5f} ({over.low:.5f} to {over.high:.5f}); target 1.005")
    print(f"the same without over without: {noise.value:.5f} ({noise.low:.5f} to {noise.high:.5f})")
    if asked.json is not None:
        kept = {
            "load": load,
            "empty_seconds": asdict(cost),
            "added_to_waiting": asdict(waited),
            "with_over_without": asdict(over),
            "without_over_without": asdict(noise),
        }
        asked.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
