"""The measuring loop on a device that works behind the host's back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from caraml.engine.device import AHEAD, CpuDevice, CudaDevice, StepTimer
from caraml.engine.instruments import CpuTime, cpu_time, share_of_others
from caraml.engine.loop import Hooks, MeasuringLoop, Progress
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepOutcome
from caraml.suite.model import Policy
from caraml.verify import KnownDevice, VirtualClock
from caraml.worker.record import PhaseLog, process_start

POLICY = Policy(min_seconds=1, max_seconds=4, idle_seconds=0)


def fake(launch_cost: float = 0.001) -> KnownDevice:
    return KnownDevice(VirtualClock(1000.0), launch_cost, queue=1.0)


def measure(device: KnownDevice, seconds: float, policy: Policy = POLICY) -> tuple[RankSummary, list[Progress], list[float]]:
    progress: list[Progress] = []
    edges: list[float] = []
    losses = count()

    def step() -> StepOutcome:
        device.launch(seconds)
        return StepOutcome(torch.tensor(float(next(losses))), 0.0)

    hooks = Hooks(progress=progress.append, edge=lambda: edges.append(device.now()))
    return MeasuringLoop(device, Ranks(), policy, hooks).run(step), progress, edges


def test_the_window_is_exactly_its_steps() -> None:
    device = fake()
    measured, _, edges = measure(device, 0.05)
    assert measured.end - measured.begin == pytest.approx(0.05 * len(measured.window_rows), rel=2e-3)
    assert edges == [pytest.approx(measured.begin), pytest.approx(measured.end)]


def test_a_look_that_was_cut_short_is_made_up_for() -> None:
    """By what the owner raises from a signal, say, and goes on: a look that is never made ends no window."""
    device, told = fake(), list[Progress]()

    def show(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 5:
            raise TimeoutError

    with MeasuringLoop(device, Ranks(), POLICY, Hooks(progress=show)) as loop:
        for _ in range(1000):
            device.launch(0.05)
            with suppress(TimeoutError):
                loop.step_ended(StepOutcome(None, 0.0))
    assert loop.done and loop.steps < 1000, "steps after the window are none of it"


def ended(steps: int) -> RankSummary:
    """A loop of somebody's own, of steps of 0.05 s, that does something for half a minute between its last step and its end."""
    clock = VirtualClock(1000.0)
    device = KnownDevice(clock, 0.001, queue=1.0)
    loop = MeasuringLoop(device, Ranks(), POLICY.model_copy(update={"min_seconds": 100, "max_seconds": 100}), Hooks())
    with loop:
        for _ in range(steps):
            device.launch(0.05)
            loop.step_ended(StepOutcome(None, 0.0))
        clock.wait_until(clock.time + 30.0)
        loop.end()
    assert loop.done
    return loop.summary()


@pytest.mark.parametrize("steps", [9, 22, 23, 24, 25, 26, 79])
def test_a_window_ends_with_the_last_step_of_a_loop_that_ends(steps: int) -> None:
    """Wherever that is: in the warm-up, with a step or two in the window, or with many. What follows would be a part of the rate."""
    measured = ended(steps)
    inside = measured.window_rows
    assert len(measured.rows) == steps and len(inside) >= 4
    length = measured.end - measured.begin
    assert length == pytest.approx(sum(inside.seconds), rel=1e-6) and length < 0.06 * len(inside)
    assert measured.waits[1] is None, "ranks meet after their last steps, however far apart these were"


@pytest.mark.parametrize(("at_most", "expected"), [(60.0, 10.0), (4.0, 4.0)])
def test_a_warm_up_gives_clocks_their_time_to_settle(at_most: float, expected: float) -> None:
    """Steps that are even from the first on, on a device that needs 10 s: only the time for warm-up is shorter."""
    device = fake()
    device.settle_seconds = 10.0
    measured, _, _ = measure(device, 0.05, POLICY.model_copy(update={"warm_up_max_seconds": at_most}))
    warming = [row.seconds for row in measured.rows if row.phase == "warm_up"]
    assert expected <= sum(warming) < expected + 2 and "not_steady" not in measured.flags
    assert CudaDevice.settle_seconds == 15.0 and CpuDevice.settle_seconds == 0.0


def test_steps_that_still_try_ways_to_run_are_of_the_warm_up_even_after_its_time() -> None:
    device, launched = fake(), count(1)

    def step() -> StepOutcome:
        number = next(launched)
        device.launch(0.05 if number > 60 else 0.08)
        return StepOutcome(None, 0.0, undecided=number < 60)

    policy = POLICY.model_copy(update={"warm_up_max_seconds": 1.0})
    measured = MeasuringLoop(device, Ranks(), policy, Hooks()).run(step)
    assert 60 <= sum(row.phase != "measure" for row in measured.rows) < 90
    assert [row.seconds for row in measured.window_rows] == pytest.approx([0.05] * len(measured.window_rows), rel=0.05)


@pytest.mark.parametrize(("at_most", "expected"), [(60.0, 12.0), (8.0, 8.0)])
def test_a_window_is_long_enough_to_see_clocks_that_still_move(at_most: float, expected: float) -> None:
    """Steps that are even, on a device that asks for 12 s: only the time for a window is shorter."""
    device = fake()
    device.window_seconds = 12.0
    measured, progress, _ = measure(device, 0.05, POLICY.model_copy(update={"max_seconds": at_most}))
    assert expected <= measured.end - measured.begin < expected + 2 and "imprecise" not in measured.flags
    known = [one.remaining for one in progress if one.remaining is not None]
    assert 0 < known[len(known) // 2] < expected, "what it says of the time left knows that, too"
    assert CudaDevice.window_seconds == 20.0 and CpuDevice.window_seconds == 0.0


def test_the_device_is_never_waited_for_inside_the_window() -> None:
    device = fake()
    measure(device, 0.05)
    # Twice around the first step, once after warm-up, once at each end of the window: none depends on the number of steps.
    assert device.synchronised == 5


def test_a_window_closes_soon_after_it_is_decided_whatever_the_queue_holds() -> None:
    """A driver that takes any number of launches; the device needs five times as long as the host."""
    device = KnownDevice(VirtualClock(1000.0), launch_cost=0.01, queue=math.inf)
    looks: list[float] = []

    def step() -> StepOutcome:
        device.launch(0.05)
        return StepOutcome(torch.tensor(0.0), 0.0)

    hooks = Hooks(progress=lambda progress: looks.append(device.now()))
    measured = MeasuringLoop(device, Ranks(), POLICY, hooks).run(step)
    assert measured.end - looks[-1] <= AHEAD + 0.05 and measured.end - measured.begin <= POLICY.max_seconds + 2 * AHEAD
    assert all(row.seconds == pytest.approx(0.05) for row in list(measured.window_rows)[1:]), "the device is never out of work"


IMPORTS = """
import sys
from contextlib import contextmanager
import torch
from caraml.engine.loop import Hooks, MeasuringLoop
from caraml.engine.ranks import Ranks
from caraml.engine.steps import StepOutcome
from caraml.suite.model import Policy
from caraml.verify import KnownDevice, VirtualClock

device, seen, number = KnownDevice(VirtualClock(1000.0), 0.001, queue=1.0), [], 0

@contextmanager
def phase(name):
    seen.append((name, set(sys.modules)))
    yield
    seen.append((name, set(sys.modules)))

def step():
    global number
    number += 1
    device.launch(0.01 * (1 + number * 7919 % 13 / 50))
    return StepOutcome(torch.tensor(1.0), 0.0)

MeasuringLoop(device, Ranks(), Policy(min_seconds=1, max_seconds=4, idle_seconds=0), Hooks(phase=phase)).run(step)
print(number, sorted(seen[-1][1] - seen[0][1]))
"""


def test_nothing_is_imported_between_the_steps() -> None:
    """What intervals are computed with takes up to half a second, after a short warm-up within the window."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    steps, _, imported = done.stdout.strip().partition(" ")
    assert int(steps) > 100 and imported == "[]"


def test_launch_times_are_not_taken_for_step_times() -> None:
    """The host launches a step in 1 ms; the device needs 50. A timer that did not ask the device would say 1 ms."""
    measured, _, _ = measure(fake(launch_cost=0.001), 0.05)
    times = [row.seconds for row in measured.window_rows]
    assert times[1:] == [pytest.approx(0.05)] * (len(times) - 1)
    assert times[0] == pytest.approx(0.051), "the first step also holds the launch that the idle device waited for"


def test_a_slow_host_sets_the_pace() -> None:
    measured, _, _ = measure(fake(launch_cost=0.08), 0.05)
    assert measured.window_rows[5].seconds == pytest.approx(0.08, rel=1e-6)


def test_every_step_has_its_own_loss_and_phase() -> None:
    measured, _, _ = measure(fake(), 0.05)
    assert measured.losses == [float(i) for i in range(len(measured.rows))]
    phases = [row.phase for row in measured.rows]
    assert phases[0] == "first" and phases == sorted(phases, key=["first", "warm_up", "measure"].index)


def test_progress_names_rate_and_phase() -> None:
    _, progress, _ = measure(fake(), 0.05)
    assert progress[0].phase == "first_step"
    assert progress[-1].step_time is not None and progress[-1].step_time.mean == pytest.approx(0.05, rel=2e-3)


def test_skipped_updates_are_counted_by_the_fall_of_the_scale() -> None:
    device, scales = fake(), iter([4.0] * 10 + [2.0] * 5 + [1.0] * 1000)

    def step() -> StepOutcome:
        device.launch(0.05)
        return StepOutcome(None, 0.0, torch.tensor(next(scales)))

    measured = MeasuringLoop(device, Ranks(), Policy(min_seconds=1, max_seconds=4, max_steps=20), Hooks()).run(step)
    outside = len(measured.rows) - 20
    assert measured.skipped_updates == sum(fall >= outside for fall in (10, 15))


def test_an_update_skipped_in_the_window_s_first_step_counts_and_one_just_before_does_not() -> None:
    def skipped(fall_at: int) -> int:
        device, scales = fake(), iter([4.0] * fall_at + [2.0] * 1000)

        def step() -> StepOutcome:
            device.launch(0.05)
            return StepOutcome(None, 0.0, torch.tensor(next(scales)))

        measured = MeasuringLoop(device, Ranks(), Policy(min_seconds=1, max_seconds=4, max_steps=20), Hooks()).run(step)
        first.append(len(measured.rows) - 20)
        return measured.skipped_updates

    first: list[int] = []
    skipped(0)
    assert skipped(first[0]) == 1 and skipped(first[0] - 1) == 0 and skipped(first[0] + 19) == 1
    assert len(set(first)) == 1, "the device is deterministic"


def test_cpu_device_times_what_happens() -> None:
    timer = StepTimer(CpuDevice())
    timer.step_ended()
    timer.step_ended()
    assert len(timer.finished()) == 2 and all(seconds >= 0 for seconds in timer.finished())
    assert CpuDevice().peak_memory() > 50 * 2**20, "torch alone takes more than that"


def test_phases_never_overlap_and_survive_a_failure() -> None:
    now = [0.5]  # imports, before anything could be logged
    log = PhaseLog(0.0, lambda name: None, lambda: now[0])
    with pytest.raises(ValueError, match="broken"), log.phase("build"):
        now[0] = 1.0
        with log.phase("data"):
            now[0] = 4.0
        now[0] = 5.0
        raise ValueError("broken")
    assert [(phase.name, phase.start, phase.end) for phase in log.phases] == [("build", 0, 1), ("data", 1, 4), ("build", 4, 5)]


def test_the_process_started_before_now() -> None:
    assert 0 < time.monotonic() - process_start() < 24 * 3600


def test_others_are_what_is_left_of_everyone() -> None:
    begin, end = CpuTime(100.0, 10.0), CpuTime(130.0, 28.0)
    assert share_of_others(begin, end, seconds=10.0, cpus=4) == pytest.approx(12 / 40)
    assert share_of_others(begin, CpuTime(110.0, 40.0), seconds=10.0, cpus=4) == 0
    assert share_of_others(None, end, 1.0, 1) is None


def test_cpu_time_that_the_host_gives_to_other_guests_is_others(tmp_path: Path) -> None:
    def after(stolen: str) -> CpuTime:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/stat").write_text(f"cpu  1000 0 500 9000 0 0 0 {stolen}\nintr 1\n")
        found = cpu_time([os.getpid()], tmp_path)
        assert found is not None
        return found

    assert after("400 0 0").everyone - after("0 0 0").everyone == pytest.approx(400 / os.sysconf("SC_CLK_TCK"))
    assert after("").everyone == after("0 0 0").everyone, "kernels before 2.6.11 do not count it"


def test_ranks_with_a_parent_each_are_one_family(tmp_path: Path) -> None:
    """Two ranks (11, 21) below a wrapper each (10, 20) with a child (22), and somebody else's process (30); below Slurm's (5)."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  9000 0 0 0 0 0 0 0 0 0\n")
    for pid, (parent, ticks) in {5: (1, 1000), 10: (5, 1), 11: (10, 20), 20: (5, 2), 21: (20, 30), 22: (21, 40), 30: (5, 5000)}.items():
        (tmp_path / "proc" / str(pid)).mkdir()
        (tmp_path / "proc" / str(pid) / "stat").write_text(f"{pid} (a b) S {parent} {'0 ' * 9}{ticks} 0 0 0 20\n")
    found = cpu_time([10, 20], tmp_path)
    assert found is not None and found.ours == pytest.approx((1 + 20 + 2 + 30 + 40) / os.sysconf("SC_CLK_TCK"))
    assert cpu_time([], tmp_path) is None


def test_cpu_time_counts_this_process_and_its_children() -> None:
    before = cpu_time([os.getpid()])
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    after = cpu_time([os.getpid()])
    if before is None or after is None:
        pytest.skip("no /proc here")
    assert after.ours - before.ours > 0.3
    assert after.everyone - before.everyone >= after.ours - before.ours - 0.2
