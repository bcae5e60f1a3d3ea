"""What CARAML does on the emulated accelerator: run in processes of their own by ``test_accelerator.py``."""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import caraml
from caraml.base.errors import EnvironmentUnfitError, is_out_of_memory
from caraml.data.loader import to_device
from caraml.engine.device import AHEAD, AcceleratorDevice, StepTimer, accelerator_type, open_device, sensors_of
from caraml.engine.loop import Hooks, MeasuringLoop
from caraml.engine.precision import check_graphs, check_precision
from caraml.engine.ranks import Ranks
from caraml.engine.step import make_step
from caraml.engine.steps import Batches, StepOutcome
from caraml.metrics.model import Facts
from caraml.suite.model import Point, Policy
from caraml.system import families, limits
from caraml.system.detect import detect
from caraml.verify import proof
from caraml.verify.proof import accelerator_clock
from caraml.worker.place import place_of
from caraml.workloads.base import Task
from tests.accelerator.inside_torch import DEVICE, emulated

KERNEL = 0.005
KERNELS = 10
"""In a step of the window's test."""


class Manual(AcceleratorDevice):
    """The accelerator with the host's clock under the same hand as its own."""

    settle_seconds = window_seconds = 0.0

    def now(self) -> float:
        return emulated.now()


def a_window_is_exactly_its_steps() -> None:
    """Launching takes a tenth of the work's time, and the queue holds whatever comes."""
    emulated.configure(manual=1, kernel_seconds=KERNEL, queue=0, now=1000)
    device, looks = Manual(DEVICE, 0), list[float]()
    weight, sums = torch.ones(4, device=DEVICE), list[torch.Tensor]()

    def step() -> StepOutcome:
        emulated.configure(now=emulated.now() + KERNELS * KERNEL / 10)
        for _ in range(KERNELS - 1):
            weight.mul_(1.0)
        sums.append(weight.sum())
        return StepOutcome(sums[-1], 0.0)

    hooks = Hooks(progress=lambda progress: looks.append(emulated.now()))
    policy = Policy(min_seconds=1, max_seconds=4, idle_seconds=0)
    measured = MeasuringLoop(device, Ranks(), policy, hooks).run(step)
    seconds, took = [row.seconds for row in measured.window_rows], measured.end - measured.begin
    assert took == pytest.approx(KERNELS * KERNEL * len(seconds), rel=5e-3) and sum(seconds) == pytest.approx(took, rel=1e-9)
    assert seconds[1:] == [pytest.approx(KERNELS * KERNEL)] * (len(seconds) - 1)
    assert measured.end - looks[-1] <= AHEAD + KERNELS * KERNEL and took <= policy.max_seconds + 2 * AHEAD
    assert measured.losses == [4.0] * len(sums)


def events_are_asked_and_not_waited_for() -> None:
    emulated.configure(manual=1, kernel_seconds=1.0, queue=0)
    device, x = Manual(DEVICE, 0), torch.ones(1, device=DEVICE)
    device.synchronize()
    timer, begin = StepTimer(device), emulated.now()
    for _ in range(2):
        x.mul_(2.0)
        timer.step_ended()
    assert list(timer.finished()) == [] and emulated.now() == begin, "the device has not come so far, and nobody waits"
    emulated.configure(now=begin + 1.0)
    assert list(timer.finished()) == [1.0]
    device.synchronize()
    assert list(timer.finished()) == [1.0, 1.0] and emulated.now() == begin + 2.0


def the_clock_of_its_events_is_held_against_the_host_s() -> None:
    emulated.configure(manual=1, kernel_seconds=0.01, queue=0)
    device = Manual(DEVICE, 0)
    found = accelerator_clock(device, size=16)
    assert (found.verdict, found.truth_value, found.value) == ("right", pytest.approx(1.0), pytest.approx(1.0)), found

    class Fast(Manual):
        """Its host's clock runs slower than that of its events."""

        def now(self) -> float:
            return 0.9 * super().now()

    assert accelerator_clock(Fast(DEVICE, 0), size=16).verdict == "wrong"
    device.events_tell_time = False
    assert accelerator_clock(device).verdict == "not here"
    patch = pytest.MonkeyPatch()
    patch.setattr(proof, "accelerator_clock", lambda device: found)
    first, *others = proof._gpu_findings(detect(), {"gpus": []})
    assert first is found and {other.measured for other in others} == {"not known of emulated devices"}
    patch.undo()


def events_without_times_are_replaced_by_waiting() -> None:
    emulated.configure(manual=1, kernel_seconds=1.0, queue=0)
    device, x = Manual(DEVICE, 0), torch.ones(1, device=DEVICE)
    device.events_tell_time = False
    first = device.mark()
    x.mul_(2.0)
    assert device.between(first, device.mark()) == 1.0


def copies_ahead_overlap_and_are_waited_for() -> None:
    emulated.configure(manual=1, kernel_seconds=1.0, queue=0)
    host = [torch.full((256,), float(number)).pin_memory() for number in range(8)]
    device = torch.device(DEVICE, 0)
    batches: Iterator[torch.Tensor] = to_device(iter(host), device)
    torch.accelerator.synchronize()
    begin, sums = emulated.now(), list[torch.Tensor]()
    for batch in batches:
        kept = batch * 2.0  # as long as three copies
        sums.append((kept + 1.0).sum())
        del batch, kept
    torch.accelerator.synchronize()
    took = emulated.now() - begin
    assert [value.item() for value in sums] == [256 * (2 * number + 1) for number in range(8)]
    assert took <= 8 * 3 + 1 + 1, "copies run beside the work"


def a_device_loses_to_its_input_what_it_has_no_work_for() -> None:
    """Steps of 1 s. Batches take longer to make, or to copy, or neither, although the host waits for each of them."""
    device, pinned = Manual(DEVICE, 0), torch.ones(4).pin_memory()
    for made, copies, truth in ((1.5, 1, 0.5), (0.1, 15, 0.5), (0.9, 1, 0.0)):
        emulated.configure(manual=1, kernel_seconds=0.1, queue=0, now=emulated.now() + 100)
        device.synchronize()

        def loaded(seconds: float = made, parts: int = copies) -> Iterator[list[torch.Tensor]]:
            for _ in itertools.count():
                emulated.configure(now=emulated.now() + seconds)
                yield [pinned] * parts

        batches, weight = Batches(to_device(loaded(), device.torch_device), device), torch.ones(4, device=DEVICE)
        timer = StepTimer(device)
        for _ in range(20):
            batch = batches.take()
            for part in itertools.islice(itertools.cycle(batch), 10):
                weight.mul_(part)
            outcome = batches.outcome(None)
            timer.step_ended(outcome.data_wait, outcome.takes)
        device.synchronize()
        seconds = list(timer.finished())
        assert list(timer.lost)[5:] == [pytest.approx(truth, abs=1e-6)] * 15, (made, copies, list(timer.lost))
        assert seconds[5:] == [pytest.approx(1 + truth, abs=1e-6)] * 15


def micro_batches_together_are_the_whole_batch() -> None:
    """Three steps, clipped and not, over copies that run ahead, in micro-batches of four and at once: the same weights as on the CPU."""
    emulated.configure(manual=1, kernel_seconds=1.0, queue=0)
    samples = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1))

    def trained(where: str, micro_batch: int, clip: float | None) -> torch.Tensor:
        torch.manual_seed(0)
        device, model = torch.device(where), torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(where)
        batches = [part.contiguous() for batch in samples for part in batch.split(micro_batch)]
        moved = to_device(iter([part.pin_memory() for part in batches]), device) if where == DEVICE else iter(batches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        facts = Facts(item="sample", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="none")
        task = Task(model, optimizer, moved, lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean(), facts, clip_norm=clip)
        asked = {"params": {}, "system": "local", "device": "x", "device_class": "gpu", "software": "x", "measure": Policy()}
        point = Point(suite="t", benchmark="t", workload="t", global_batch=16, micro_batch=micro_batch, **asked)
        step = make_step(task, point, device)
        losses = [loss.detach() for _ in range(3) if (loss := step().loss) is not None]
        return torch.cat([one.detach().cpu().flatten() for one in (*losses, *model.parameters())])

    for clip in (None, 1.0):
        whole = trained("cpu", 16, clip)
        assert len(whole) == 3 + 8 * 4 + 4 + 4 + 1
        for where, micro_batch in (("cpu", 4), (DEVICE, 16), (DEVICE, 4)):
            torch.testing.assert_close(trained(where, micro_batch, clip), whole, rtol=1e-5, atol=1e-6)


def each_process_has_its_device() -> None:
    emulated.configure(manual=1, kernel_seconds=1.0, queue=0)
    device = open_device("gpu", 1)
    assert str(device.torch_device) == "emulated:1" and torch.accelerator.current_device_index() == 1
    device.forget_peak_memory()
    before = device.peak_memory() or 0
    begin, x = emulated.now(), torch.zeros(1000, device=DEVICE)
    assert x.device == device.torch_device and (device.peak_memory() or 0) - before == 4096
    first = device.mark()
    x.add_(1.0)
    second = device.mark()
    with torch.accelerator.device_index(0):
        device.wait(second)
    assert device.between(first, second) == 1.0 and emulated.now() == begin + 2.0
    assert sensors_of(device.torch_device, 2) is None and sensors_of(device.torch_device, 1) == ["some"]
    with tempfile.TemporaryDirectory() as folder:
        information, node = Path(folder, "proc/driver/nvidia/gpus/0000:01:00.0/information"), Path(folder, "dev/nvidia0")
        for file, text in ((information, "Model: NVIDIA A100\nDevice Minor: 0\n"), (node, "")):
            file.parent.mkdir(parents=True)
            file.write_text(text)
        assert sensors_of(device.torch_device, 2, Path(folder)) == ["some"], "a GPU of another family beside them"


def more_processes_than_devices_are_refused() -> None:
    with pytest.raises(EnvironmentUnfitError, match="local rank 2 has no accelerator of a plug-in: torch sees 2") as caught:
        open_device("gpu", 2)
    assert "how many processes the launcher starts" in str(caught.value)


def another_device_than_the_one_asked_for_is_refused() -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("CARAML_DEVICE", DEVICE)
    assert families.refusal() is None and accelerator_type() == DEVICE
    patch.setenv("CARAML_DEVICE", "mps")
    with pytest.raises(EnvironmentUnfitError, match="CARAML_DEVICE: found 'mps', but torch's accelerator is 'emulated'"):
        open_device("gpu", 0)
    patch.undo()


def a_probe_leaves_the_device_as_it_was() -> None:
    emulated.configure(kernel_seconds=1e-5)
    device = torch.device(DEVICE, 0)
    for kind in ("arithmetic", "memory"):
        found = limits.measure(kind, device, "fp32", budget_s=0.05)  # type: ignore[arg-type]
        assert found.rate > 0 and found.device == "Emulated Accelerator" and found.library == "torch"
        assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 0, kind
    with pytest.raises(EnvironmentUnfitError, match="tf32"):
        limits.measure("arithmetic", device, "tf32", budget_s=0.05)


def a_precision_that_the_device_lacks_is_refused() -> None:
    device = torch.device(DEVICE, 0)
    check_precision("bf16", device)
    with pytest.raises(EnvironmentUnfitError, match="found 'tf32', which emulated devices lack"):
        check_precision("tf32", device)
    with pytest.raises(EnvironmentUnfitError, match="found 'reduce-overhead', which replays CUDA graphs; emulated devices have none"):
        check_graphs("reduce-overhead", device)
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    with pytest.raises(EnvironmentUnfitError, match="no autocast for emulated devices"):
        check_precision("bf16", device)
    patch.undo()


def a_full_device_is_called_full() -> None:
    emulated.configure(memory=1e6)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**6, device=DEVICE)
    assert is_out_of_memory(caught.value)


def the_bench_for_accelerators_finds_this_one_right() -> None:
    emulated.configure(slowness=4)
    bench = Path(__file__).parents[2] / "bench"
    sys.path[:0] = [str(bench), str(bench / "train")]
    checks, device = importlib.import_module("gpu_checks"), torch.device(DEVICE, 0)
    checks.products = lambda clock: (torch.randn(256, 256, device=device), 20)  # it is a slow one
    assert checks.prefetch_deviation(device) == 0
    truth = checks.gpt_losses(torch.device("cpu"), "fp32")
    assert checks.largest_relative(checks.gpt_losses(device, "fp32"), truth) < 1e-6
    assert 0 <= checks.clock_deviation(device) < 1
    emulated.configure(manual=1, kernel_seconds=0.01)
    assert checks.interface_deviation(device) < 1e-9


def a_loop_of_one_s_own_is_measured_on_the_device() -> None:
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(target=0.5, min_seconds=0, max_seconds=60, min_steps=6, max_steps=6, idle_seconds=0, warm_up_max_seconds=0.1)
        weight = torch.ones(100, 100, device=DEVICE)
        with caraml.measure("loop", item="product", out=folder, policy=policy) as m:
            while m.step(3):
                for _ in range(3):
                    weight = (weight @ weight).clamp(max=1.0)
        assert place_of(Ranks()).gpus == ["some"], "sensors of two devices, of which the loop uses one"
        assert m.record is not None and m.record.status == "ok", m.record
        assert (m.record.point.device_class, m.record.point.device) == ("gpu", "Emulated Accelerator x2")
        peak = m.record.metrics["peak_memory"].value
        assert peak is not None and 80_000 <= peak <= 1_000_000 and m.record.window is not None and m.record.window.items == 18
