"""A captured step against the same step done kernel by kernel, on a graph that is emulated on the CPU.

The emulation freezes what a device's graph freezes: which operators run, on which tensors, with which numbers from the host. Nothing that
was recorded has been done, and each replay does all of it again on the memory of the capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from caraml.engine import step as module
from caraml.engine.step import ASIDE, TRIALS, GraphedPasses, TrainStep, make_step, refusal
from caraml.engine.steps import Batches
from caraml.suite.model import Knobs, StepGraph
from caraml.workloads.base import Task
from tests.conftest import MakePoint
from tests.tasks import built

CPU = torch.device("cpu")
SIZES = {"preset": "4M", "width": 32, "layers": 2, "heads": 2, "sequence_length": 16, "vocab_size": 128, "data": "synthetic-device"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", SIZES),
    ("gpt", {**SIZES, "recompute": "full", "positions": "rotary"}),
    ("image_classification", {"model": "resnet18", "image_size": 32, "classes": 4, "data": "synthetic-device"}),
]
STEPS = 1 + ASIDE + 4


class EmulatedGraph(TorchDispatchMode):
    """Records operators with their tensors; a replay runs them again and puts their results where they were."""

    def __init__(self, state: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__()
        self._state, self._calls = state, list[tuple[Any, Any, Any, Any]]()
        self.replays, self.dropped, self.events = 0, False, list[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = operator(*args, **(kwargs or {}))
        self._calls.append((operator, args, kwargs or {}, found))
        return found

    def aside(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As on any stream of the CPU."""
        self.events.append("aside")
        return work()

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Whatever the recorded operators did to the state is undone: a device would not have done it."""
        self.events.append("capture")
        state = self._state()
        before, random = [tensor.clone() for tensor in state], torch.get_rng_state()
        try:
            with self:
                return work()
        finally:
            torch.set_rng_state(random)
            with torch.no_grad():
                for tensor, values in zip(state, before, strict=True):
                    tensor.copy_(values)

    def replay(self) -> None:
        """All operators once more, in order."""
        self.replays += 1
        with torch.no_grad():
            for operator, args, kwargs, found in self._calls:
                again = operator(*args, **kwargs)
                for into, values in zip(pytree.tree_leaves(found), pytree.tree_leaves(again), strict=True):
                    if isinstance(into, torch.Tensor) and into.data_ptr() != values.data_ptr():
                        into.copy_(values)

    def drop(self) -> None:
        """Remember it."""
        self.dropped = True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def state_of(task: Task) -> list[torch.Tensor]:
    """All that a step changes and keeps."""
    held = [value for state in task.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [*task.model.parameters(), *task.model.buffers(), *held]


def trained(task: Task, step: TrainStep, steps: int = STEPS) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(1)
    losses = [step().loss for _ in range(steps)]
    return [loss.item() for loss in losses if loss is not None], [tensor.clone() for tensor in state_of(task)]


def graphed(task: Task, point: Any, told: dict[str, Any]) -> tuple[TrainStep, EmulatedGraph]:
    """A step as it is on a GPU, and its graph."""
    emulated = EmulatedGraph(lambda: state_of(task))
    return TrainStep(task, Batches(task.batches), point, CPU, graph=lambda: emulated, told=told), emulated


def on(make_point: MakePoint, workload: str, **more: Any) -> Any:
    return make_point(workload=workload, global_batch=4, **{"micro_batch": 4, "knobs": Knobs(step_graph="on"), **more})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("workload", "params"), CASES)
def test_replayed_steps_are_the_usual_ones_to_the_bit(
    workload: str, params: dict[str, Any], accumulation: int, make_point: MakePoint
) -> None:
    """Losses, weights, optimizer state and running statistics; with clipping, recomputation and several micro-batches."""
    point, told = on(make_point, workload, micro_batch=4 // accumulation), dict[str, Any]()
    usual = built(workload, params, 4 // accumulation, accumulation=accumulation)
    truth, weights = trained(usual, TrainStep(usual, Batches(usual.batches), point, CPU))
    task = built(workload, params, 4 // accumulation, accumulation=accumulation)
    step, emulated = graphed(task, point, told)
    losses, found = trained(task, step)
    assert losses == truth
    assert all(torch.equal(one, other) for one, other in zip(found, weights, strict=True))
    assert (emulated.events, emulated.replays) == (["aside"] * ASIDE + ["capture"], STEPS - 1 - ASIDE)
    assert told["used"] and told["left"] == 0 and told["input_bytes"] > 0
    assert len(set(losses[-4:])) > 1, "every step had another batch, or other weights"


def test_replays_draw_the_random_numbers_of_the_usual_steps(make_point: MakePoint) -> None:
    def dropping(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        return net(*batch) * torch.nn.functional.dropout(torch.ones(64)).mean()

    point, told = on(make_point, "gpt"), dict[str, Any]()
    usual, task = built("gpt", SIZES), built("gpt", SIZES)
    usual.loss = task.loss = dropping
    truth, _ = trained(usual, TrainStep(usual, Batches(usual.batches), point, CPU))
    assert trained(task, graphed(task, point, told)[0])[0] == truth and told["used"]


def test_bf16_is_captured_too(make_point: MakePoint) -> None:
    point = on(make_point, "gpt", precision="bf16")
    usual, task = built("gpt", SIZES), built("gpt", SIZES)
    truth, _ = trained(usual, TrainStep(usual, Batches(usual.batches), point, CPU))
    assert trained(task, graphed(task, point, {})[0])[0] == truth


@pytest.mark.parametrize(
    ("workload", "params"),
    [("gpt", {**SIZES, "warm_up_steps": 6, "decay_steps": 20}), (*CASES[2][:1], {**CASES[2][1], "schedule": "goyal", "samples": 8})],
)
def test_a_schedule_reaches_the_captured_update(workload: str, params: dict[str, Any], make_point: MakePoint) -> None:
    """The usual step reads the rate as a tensor here, as the captured one has to: in float32."""
    point = on(make_point, workload)
    usual, task = built(workload, params), built(workload, params)
    module.rates_on_device(usual.optimizer, CPU)
    truth = trained(usual, TrainStep(usual, Batches(usual.batches), point, CPU))
    step, emulated = graphed(task, point, {})
    found = trained(task, step)
    assert found[0] == truth[0] and all(torch.equal(one, other) for one, other in zip(found[1], truth[1], strict=True))
    rate = task.optimizer.param_groups[0]["lr"]
    assert emulated.replays == STEPS - 1 - ASIDE and isinstance(rate, torch.Tensor)
    assert task.rate is not None and task.rate(STEPS) != task.rate(STEPS - 1)
    assert float(rate) == pytest.approx(task.rate(STEPS) * float(task.optimizer.param_groups[0]["initial_lr"]))


def shorter(batches: Iterator[Any], at: set[int]) -> Iterator[Any]:
    """The same batches, some of them without their last sample."""
    for index, batch in enumerate(batches):
        yield tuple(part[:-1] for part in batch) if index in at else batch


@pytest.mark.parametrize("at", [{6}, {6, 7}, {STEPS * 2 - 1}])
def test_a_batch_of_another_shape_leaves_the_graph(at: set[int], make_point: MakePoint) -> None:
    """For that step only, whichever of its micro-batches it is: here two a step, and the graph is captured in the fifth step."""
    at = {4 + index for index in at}
    point, told = on(make_point, "gpt", micro_batch=2), dict[str, Any]()
    usual, task = (built("gpt", SIZES, 2, accumulation=2) for _ in range(2))
    usual.batches, task.batches = shorter(usual.batches, at), shorter(task.batches, at)
    truth = trained(usual, TrainStep(usual, Batches(usual.batches), point, CPU), STEPS + 3)
    step, emulated = graphed(task, point, told)
    found = trained(task, step, STEPS + 3)
    assert found[0] == truth[0] and all(torch.equal(one, other) for one, other in zip(found[1], truth[1], strict=True))
    assert told["left"] == 1 and told["used"] and emulated.replays == STEPS + 3 - 1 - ASIDE - 1


def test_a_step_that_asks_the_device_runs_as_usual(make_point: MakePoint) -> None:
    """The failed capture leaves nothing behind, and its batch is trained."""

    def asking(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = net(*batch)
        return loss if loss.item() > 0 else -loss

    point, told = on(make_point, "gpt"), dict[str, Any]()
    usual, task = built("gpt", SIZES), built("gpt", SIZES)
    usual.loss = task.loss = asking
    truth = trained(usual, TrainStep(usual, Batches(usual.batches), point, CPU))
    step, emulated = graphed(task, point, told)
    found = trained(task, step)
    assert found[0] == truth[0] and all(torch.equal(one, other) for one, other in zip(found[1], truth[1], strict=True))
    assert told["why"] == "capture failed: operation not permitted when stream is capturing"
    assert not told["used"] and not emulated.replays


class Timed:
    """A graph and passes that take known times, on a clock that they advance. Launching is a share of the usual step."""

    def __init__(self, usual: float, launching: float, replayed: float) -> None:
        self.now, self._device, self._usual, self._launching, self._replayed = 0.0, 0.0, usual, launching, replayed
        self.dropped = False

    def passes(self, batches: Iterator[Any]) -> torch.Tensor:
        """Take the host ``launching`` and the device ``usual`` seconds."""
        list(batches)
        self.now += self._launching
        self._device = max(self._device, self.now - self._launching) + self._usual
        return torch.zeros(())

    def aside(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return torch.zeros(())

    def replay(self) -> None:
        self._device = max(self._device, self.now) + self._replayed

    def drop(self) -> None:
        self.dropped = True

    def synchronize(self) -> None:
        self.now = max(self.now, self._device)


@pytest.mark.parametrize(
    ("usual", "launching", "replayed", "used", "why"),
    [
        (0.001, 0.001, 0.0004, True, "instead of"),
        (0.001, 0.0002, 0.0004, False, "the device is busy"),
        (0.001, 0.001, 0.0011, False, "no faster"),
        (0.001, 0.001, 0.00099, False, "no faster"),
        (0.2, 0.2, 0.0004, False, "which no launching does"),
    ],
)
def test_auto_keeps_the_graph_where_launching_takes_the_time(  # noqa: PLR0917
    usual: float, launching: float, replayed: float, used: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, told = Timed(usual, launching, replayed), dict[str, Any]()
    monkeypatch.setattr(module.time, "perf_counter", lambda: timed.now)
    weight = torch.nn.Parameter(torch.zeros(1))
    run = GraphedPasses(timed.passes, torch.optim.SGD([weight]), "auto", timed, told)
    for steps in range(1, 1 + ASIDE + 1 + TRIALS + 1 + TRIALS + 1):
        run(iter([torch.zeros(2)]))
        assert run.undecided == (told["why"] == "too few steps to decide" or (told["used"] and "graph_seconds" not in told))
        if steps == 1 + ASIDE:
            assert told["why"] == "too few steps to decide"
    assert (told["used"], timed.dropped) == (used, why == "no faster") and why in told["why"]
    assert told.get("usual_seconds", usual) == pytest.approx(usual, rel=0.15)
    before = timed.now
    run(iter([torch.zeros(2)]))
    assert (timed.now == before) == used, "who launches the steps that follow"


FUSED = {"fused": True}
REFUSED: list[tuple[StepGraph, dict[str, Any], dict[str, Any], str]] = [
    ("off", {}, FUSED, "not asked for"),
    ("auto", {"devices": 2, "global_batch": 8}, FUSED, "several ranks"),
    ("on", {"compile": "reduce-overhead", "device_class": "gpu"}, FUSED, "graphs of its own"),
    ("on", {"precision": "fp16"}, FUSED, "loss scaler"),
    ("on", {}, {"fused": None}, "not fused"),
    ("auto", {"deterministic": True}, FUSED, "may differ between runs"),
    ("on", {"deterministic": True}, FUSED, ""),
    ("auto", {"compile": "default", "device_class": "gpu", "precision": "bf16"}, FUSED, ""),
]


@pytest.mark.parametrize(("asked", "point", "optimizer", "reason"), REFUSED)
def test_what_cannot_be_captured_says_why(
    asked: StepGraph, point: dict[str, Any], optimizer: dict[str, Any], reason: str, make_point: MakePoint
) -> None:
    task = built("gpt", SIZES)
    task.optimizer = torch.optim.AdamW(task.model.parameters(), **optimizer)
    found = refusal(task, make_point(knobs=Knobs(step_graph=asked), **point), torch.device("cuda", 0))
    assert (found is None) == (not reason) and reason in (found or "")


def test_a_step_of_its_own_and_a_cpu_are_refused(make_point: MakePoint) -> None:
    task, told = built("gpt", SIZES), dict[str, Any]()
    make_step(task, make_point(workload="gpt", global_batch=4, micro_batch=4), CPU, told=told)()
    assert told["step_graph"] == {"asked": "off", "used": False, "why": "not asked for"}
    make_step(task, make_point(workload="gpt", global_batch=4, micro_batch=4, knobs=Knobs(step_graph="auto")), CPU, told=told)()
    assert told["step_graph"] == {"asked": "auto", "used": False, "why": "torch captures no graphs of cpu devices here"}
    task.own_step = lambda tools: lambda: torch.zeros(())
    assert refusal(task, make_point(knobs=Knobs(step_graph="auto")), torch.device("cuda", 0)) == "the workload makes its own step"


def test_batches_with_other_things_in_them_leave_the_graph() -> None:
    """A number beside the tensors is a part of what was captured."""
    seen = list[int]()

    class Kept(Timed):
        def replay(self) -> None:
            seen.append(-1)

    def passes(batches: Iterator[Any]) -> torch.Tensor:
        seen.extend(batch["k"] for batch in batches)
        return torch.zeros(())

    run = GraphedPasses(passes, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), "on", Kept(1, 1, 1), told := {})
    for k in itertools.chain([1] * (1 + ASIDE + 2), [2, 1]):
        run(iter([{"x": torch.ones(1), "k": k}]))
    assert seen == [1] * (1 + ASIDE) + [-1, -1, 2, -1] and told["left"] == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_batches_that_are_sparse_leave_the_graph() -> None:
    """They have no strides, and no places that stay when others are copied into them."""
    seen = list[float]()

    class Kept(Timed):
        def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
            return work()

    def passes(batches: Iterator[Any]) -> torch.Tensor:
        seen.extend(float(batch.sum()) for batch in batches)
        return torch.zeros(())

    run = GraphedPasses(passes, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), "on", Kept(1, 1, 1), told := {})
    sums = [float(1 + index) for index in range(1 + ASIDE + 3)]
    for number in sums:
        run(iter([(number * torch.eye(1)).to_sparse_csr()]))
    assert seen == sums and told["left"] == 2


def test_a_compiled_model_sees_buffers_laid_out_as_its_batches() -> None:
    """Torch's compiler looks at strides: with others it would compile within the capture, which a GPU does not permit."""
    tokens, one = torch.arange(10).view(2, 5), torch.arange(2)[:, None].expand(2, 3)
    batches = [(tokens[:, :-1], tokens[:, 1:].t(), one), (1 + tokens[:, :-1], 1 + tokens[:, 1:].t(), 1 + one)]
    seen = list[list[tuple[int, ...]]]()

    def passes(taken: Iterator[Any]) -> torch.Tensor:
        (batch,) = taken
        seen.append([part.stride() for part in batch])
        return sum(part.sum() for part in batch) + torch.zeros(())

    class Replayed(Timed):
        def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
            self.work, self.found = work, torch.zeros(())
            return self.found

        def replay(self) -> None:
            self.found.copy_(self.work())

    run = GraphedPasses(passes, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), "on", Replayed(1, 1, 1), told := {})
    losses = [float(run(iter([batches[index % 2]]))) for index in range(STEPS)]
    assert losses == [float(sum(part.sum() for part in batches[index % 2])) for index in range(STEPS)] and told["left"] == 0
    assert seen[-1][:2] == seen[0][:2] == [(5, 1), (1, 5)], "a part of a tensor is no tensor of its own"
