"""Matrix products by the faster library: the same losses and gradients, chosen by time, alike on all ranks, and given back afterwards."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.engine import matmul, replacement
from caraml.engine.matmul import OVERHEAD, BatchedProducts, Key, Products, choice, replacements
from caraml.engine.ranks import Ranks
from caraml.engine.replacement import Replacement
from caraml.engine.step import make_step
from caraml.engine.steps import StepOutcome
from caraml.suite.model import Knobs
from tests.conftest import MakePoint
from tests.suite.test_knobs import CPU, GPT, plan
from tests.tasks import built

pytestmark = pytest.mark.skipif(not matmul._has_onednn(), reason="this build of torch has no linear layers of oneDNN")
WIDE: Key = ((64, 32), (32, 96), True, True, False, False)
TALL: Key = ((96, 64), (64, 32), False, True, False, False)


class Counting:
    """How often a function of the replaced kernels was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.calls, self._own = 0, getattr(module, name)
        monkeypatch.setattr(module, name, self._count)

    def _count(self, *given: Any) -> torch.Tensor:
        self.calls += 1
        done: torch.Tensor = self._own(*given)
        return done


def made_of(kind: type[Replacement], make_point: MakePoint) -> Iterator[Any]:
    """What makes those of a point by the knob's value, and closes them in the end."""
    made: list[Any] = []

    def make(asked: str, ranks: Ranks | None = None, **point: Any) -> Any:
        made.append(kind(make_point(knobs=Knobs.model_validate({kind.knob: asked}), **point), ranks or Ranks()))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch, matmul, "_by_onednn")


@pytest.fixture
def products(make_point: MakePoint) -> Iterator[Any]:
    yield from made_of(Products, make_point)


def once(products: Products, work: Any) -> Any:
    """Have ``work`` done as a step."""
    products.around(lambda: StepOutcome(work(), 0.0), lambda name: nullcontext())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 33, 17), (2, 3, 33, 17)])
def test_a_layer_and_its_gradients_are_those_of_torch(products: Any, onednn: Counting, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    *rows, inner, outer = shape
    x, weight = torch.randn(*rows, inner, requires_grad=True), torch.randn(outer, inner, requires_grad=True)
    shift = torch.randn(outer, requires_grad=True) if bias else None
    wanted = [x, weight] + ([shift] if shift is not None else [])

    def work() -> list[torch.Tensor]:
        y = F.linear(x, weight, shift)
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    truth = work()
    once(products("onednn"), work)
    found = work()
    assert onednn.calls == 3
    for own, other in zip(truth, found, strict=True):
        assert own.stride() == other.stride() and torch.allclose(own, other, rtol=1e-5, atol=1e-5 * own.abs().max().item())


def test_operands_of_every_kind_are_multiplied_right(products: Any, onednn: Counting) -> None:
    """Transposes, columns of a wider matrix, expanded rows, memory given; and what is no product of two fp32 matrices."""
    torch.manual_seed(0)
    wide, expanded, double = torch.randn(12, 40), torch.randn(1, 9).expand(12, 9), torch.randn(5, 5).double()
    spread = torch.randn(24, 40)
    cases: list[tuple[torch.Tensor, torch.Tensor]] = [
        (wide.t(), wide),
        (wide[:, 3:12], wide[:, 20:29].t()),
        (wide.t(), expanded),
        (expanded.t(), wide),
    ]
    once(products("onednn"), lambda: None)
    for a, b in cases:
        truth = (a.double() @ b.double()).float()
        out = torch.empty(truth.shape)
        assert torch.mm(a, b, out=out) is out
        for found in (
            a @ b,
            out,
            torch.addmm(truth[0], a, b) - truth[0],
            torch.addmm(truth, a, b) - truth,
            torch.addmm(truth[0], a, b, alpha=2) - truth[0] - truth,
        ):
            assert torch.allclose(found, truth, rtol=1e-4, atol=1e-4)
    assert onednn.calls == 3 * len(cases)
    for bias in (spread[:, 3], spread[0].repeat_interleave(3)[::3][:12], torch.tensor(2.0).expand(12)):
        left, right = spread[:12], torch.randn(40, len(bias))
        assert torch.allclose(torch.addmm(bias, left, right), left @ right + bias, atol=1e-4), "numbers of a bias need not lie side by side"
    onednn.calls = 3 * len(cases)
    assert torch.equal(double @ double, torch.einsum("ij,jk->ik", double, double)) and torch.randn(4, 0).mm(torch.randn(0, 3)).sum() == 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(wide, wide)
    assert onednn.calls == 3 * len(cases)


@pytest.mark.slow
def test_compiled_layers_and_autocast_go_the_same_way(products: Any, onednn: Counting) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(24, 40), torch.randn(12, 24)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]

    truth = gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = gradient()
    once(products("onednn"), lambda: None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gradient(), half) and onednn.calls == 0, "products of 16 bits are oneDNN's already"
    layer.compile(backend="aot_eager")
    assert torch.allclose(gradient(), truth, rtol=1e-5, atol=1e-4) and onednn.calls == 2


class GivenUp(torch.nn.Module):
    """A model that the compiler leaves to Python, whose functions it then compiles one by one as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            return self.layer(x)
        finally:
            pass


@pytest.mark.slow
def test_the_compiler_does_not_take_the_kernels_for_the_model(products: Any, onednn: Counting) -> None:
    """Where a model runs eagerly under its eyes, it compiled the Python of the kernels, too, and failed on some."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = GivenUp(), torch.randn(12, 24)
    truth = model(x)
    once(products("onednn", compile="default"), lambda: None)
    model.compile(backend="aot_eager")
    assert torch.allclose(model(x), truth, atol=1e-5) and onednn.calls == 1
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] == 0, "there is nothing of the model to compile"
    torch._dynamo.reset()


class Clock(TorchDispatchMode):
    """A machine whose libraries have known rates [FLOP/s] that depend on which operands are transposed, and in oneDNN on how many parts a
    product has: products take their time on a clock that nothing else moves, but for others' work during one in ten of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
        super().__init__()
        self.now, self._rng, self._by_onednn = 0.0, rng, matmul._by_onednn
        self.rates = {
            (library, left, right): 10 ** rng.uniform(9, 11)
            for library in ("own", "other")
            for left in (True, False)
            for right in (True, False)
        }
        self.rates |= {
            ("parts", *kind): rate * rng.uniform(0.7, 1.4) for (library, *kind), rate in self.rates.items() if library == "other"
        }
        self.disturbed = True
        for module in (matmul, replacement):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(matmul, "_by_onednn", self._onednn)
        self.best = 0.0
        """What the products would have taken by the better library of each."""
        self._taken = 0

    def _seconds(self, library: str, a: torch.Tensor, b: torch.Tensor) -> float:
        return 2.0 * a.shape[0] * b.numel() / self.rates[library, a.is_contiguous(), b.is_contiguous()]

    def _spend(self, library: str, a: torch.Tensor, b: torch.Tensor) -> None:
        seconds = self._seconds(library, a, b)
        self.now += seconds * (self._rng.uniform(1, 10) if self.disturbed and self._rng.random() < 0.1 else 1.0)

    def _onednn(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
        self._taken += 1
        self._spend("parts" if parts > 1 else "other", a, b)
        return self._by_onednn(a, b, bias, parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = self._taken
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm"):
            a, b = args[-2:]
            divisible = b.is_contiguous() and len(b) >= 1.5 * matmul._INNER
            self.best += min(self._seconds(way, a, b) for way in ("own", "other", *(("parts",) if divisible else ())))
            if self._taken == taken:
                self._spend("own", a, b)
            else:
                self.now += OVERHEAD
        return out


@pytest.mark.parametrize("seed", range(12))
def test_a_step_is_never_slower_than_with_the_better_library(products: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Measured, chosen and installed as in a worker, on libraries of drawn rates: but for the detours at least 0.98 times as fast as the
    better one, of both for all products and of each product. They are large enough to be cut, and many to be multiplied in parts."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(matmul, "_ENOUGH", 2.0 * 48**3 / torch.get_num_threads())
    monkeypatch.setattr(matmul, "_INNER", 20)
    layers = [(rng.randint(16, 96), rng.randint(16, 96), rng.randint(16, 96)) for _ in range(4)]
    weights = [torch.randn(outer, inner, requires_grad=True) for _, inner, outer in layers]
    inputs = [torch.randn(rows, inner, requires_grad=True) for rows, inner, _ in layers]

    def work() -> StepOutcome:
        for x, weight in zip(inputs, weights, strict=True):
            torch.autograd.grad(F.linear(x, weight).square().sum(), [x, weight])
        return StepOutcome(None, 0.0)

    took = {}
    with Clock(monkeypatch, rng) as clock:
        for asked in ("mkl", "onednn", "auto"):
            own = products(asked)
            step = own.around(work, lambda name: nullcontext())
            step()
            clock.disturbed, begin, clock.best = False, clock.now, 0.0
            step()
            took[asked], clock.disturbed = clock.now - begin, True
            own.close()
    detours = OVERHEAD * 3 * len(layers)
    assert took["auto"] <= clock.best / 0.98 + detours, (took, clock.best)
    assert took["auto"] <= min(took["mkl"], took["onednn"]) / 0.98 + detours, took


@pytest.mark.parametrize(("inner", "parts"), [(40, 1), (40, 2), (41, 3), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_in_parts_is_the_product(inner: int, parts: int, bias: bool) -> None:
    """Also of transposes, of columns of wider matrices, and where the last part is the smallest."""
    torch.manual_seed(0)
    shift = torch.randn(24) if bias else None
    right = torch.randn(inner, 24)
    for left in (torch.randn(12, inner), torch.randn(inner, 12).t(), torch.randn(12, 3 * inner)[:, inner : 2 * inner]):
        truth = left.double() @ right.double() + (shift.double() if shift is not None else 0.0)
        found = matmul._by_onednn(left, right, shift, parts)
        assert found.is_contiguous() and torch.allclose(found.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("right", [torch.randn(40, 48)[:, :24], torch.randn(24, 80)[:, :40].t(), torch.randn(40, 1).expand(40, 24)])
def test_the_layer_gets_no_columns_of_a_wider_matrix(monkeypatch: pytest.MonkeyPatch, right: torch.Tensor) -> None:
    """Of the weights, of which oneDNN's layer has no fast kernel then: it took a thousand times as long."""
    given: list[torch.Tensor] = []
    own = torch.ops.mkldnn._linear_pointwise.default

    def linear(a: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        given.append(weight)
        return own(a, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=linear))
    left = torch.randn(12, 40)
    for parts in (1, 2):
        assert torch.allclose(matmul._by_onednn(left, right, None, parts), left @ right, atol=1e-4)
    assert len(given) == 3 and all(weight.is_contiguous() or weight.t().is_contiguous() for weight in given)


def test_a_large_transpose_is_copied_in_parts(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the slopes of all logits a copy would be the largest array of a step."""
    copied: list[int] = []
    own = torch.ops.mkldnn._linear_pointwise.default

    def linear(a: torch.Tensor, *rest: Any) -> torch.Tensor:
        copied.append(0 if a.is_contiguous() else a.numel())
        return own(a, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=linear))
    monkeypatch.setattr(matmul, "_COPIED", 20 * 33)
    slopes, hidden = torch.randn(33, 50), torch.randn(33, 7)
    once(products("onednn"), lambda: None)
    assert torch.allclose(slopes.t() @ hidden, torch.einsum("ji,jk->ik", slopes, hidden), atol=1e-4)
    assert copied[:3] == [17 * 33, 17 * 33, 16 * 33]
    copied.clear()
    found = matmul._by_onednn(slopes, slopes.t().contiguous(), None, 2)
    assert torch.allclose(found, torch.einsum("ij,kj->ik", slopes, slopes), atol=1e-4)
    assert copied and max(copied) <= 20 * 33 - 2 * 33, "columns of a left operand are copied, too, for parts, and their product is added"
    copied.clear()
    assert torch.allclose(slopes @ slopes.t().contiguous(), torch.einsum("ij,kj->ik", slopes, slopes), atol=1e-4)
    assert copied[0] == 0, "what need not be copied is multiplied at once"


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "params"), [("gpt", GPT), ("question_answering", {"preset": "tiny"})])
def test_a_training_has_the_same_losses_and_parameters(
    products: Any, onednn: Counting, make_point: MakePoint, workload: str, params: dict[str, Any]
) -> None:
    states, found = [], []
    for asked in ("mkl", "onednn"):
        task = built(workload, params)
        own = products(asked, workload=workload, global_batch=4, micro_batch=4)
        step = own.around(make_step(task, make_point(workload=workload, global_batch=4, micro_batch=4), CPU), lambda name: nullcontext())
        outcomes = [step().loss for _ in range(3)]
        found.append([loss.item() for loss in outcomes if loss is not None])
        states.append(list(task.model.state_dict()))
        own.close()
    assert onednn.calls and found[1] == pytest.approx(found[0], rel=1e-6) and states[0] == states[1]


def injected(monkeypatch: pytest.MonkeyPatch, times: dict[Key, tuple[float, float]]) -> None:
    """By the BLAS, and by oneDNN whole; none is timed in parts."""
    monkeypatch.setattr(matmul, "product_seconds", lambda key, in_parts: (*times[key], math.inf))


def test_auto_takes_for_each_product_the_library_that_was_faster(products: Any, onednn: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    injected(monkeypatch, {WIDE: (2.0, 1.0), TALL: (1.0, 2.0)})
    left, right, tall = torch.randn(64, 32), torch.randn(32, 96), torch.randn(64, 96).t()

    def work() -> torch.Tensor:
        return (left @ right).sum() + (tall @ left).sum()

    own, phases = products("auto"), list[str]()
    step = own.around(lambda: StepOutcome(work(), 0.0), lambda name: phases.append(name) or nullcontext())
    step()
    assert (onednn.calls, phases) == (0, ["matmul"]), "the first step is torch's own, and notes what there is"
    step()
    step()
    assert (onednn.calls, phases) == (2, ["matmul"])
    assert own.told["library"].startswith("oneDNN and ") and "for 1 of 2 kinds" in own.told["why"]
    assert [(one["product"], one["library"] == "oneDNN") for one in own.told["products"]] == [
        ("64 x 32 x 96", True),
        ("96 x 64 x 32", False),
    ]
    own.close()
    work()
    assert onednn.calls == 2, "the operators are torch's again"


def test_auto_stays_with_torch_where_nothing_is_gained(products: Any, onednn: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    injected(monkeypatch, {WIDE: (1.0, 0.99)})
    left, right = torch.randn(64, 32), torch.randn(32, 96)
    own = products("auto")
    step = own.around(lambda: StepOutcome(left @ right, 0.0), lambda name: nullcontext())
    step()
    step()
    assert onednn.calls == 0 and own.told["library"] != "oneDNN" and "0 of 1 kinds" in own.told["why"]


def test_a_gain_must_outweigh_the_detours() -> None:
    slow, fast = 3 * OVERHEAD, 1.5 * OVERHEAD
    assert choice({WIDE: (slow, fast, fast)}, {WIDE: 10})[0] == {WIDE: 1}
    assert choice({WIDE: (slow, fast, fast), TALL: (slow, slow, slow)}, {WIDE: 10, TALL: 10})[0] == {}
    assert choice({}, {})[1] == "the first step multiplied no fp32 matrices"


@pytest.mark.parametrize(
    ("seconds", "parts"), [((3.0, 2.0, 1.0), 5), ((3.0, 2.0, 1.97), 1), ((2.0, 3.0, 1.0), 5), ((1.0, 2.0, 1.5), 0), ((3.0, 2.0, 2.5), 1)]
)
def test_a_product_is_divided_where_that_is_faster(products: Any, monkeypatch: pytest.MonkeyPatch, seconds: Any, parts: int) -> None:
    """In about as many parts as the fastest ones are long, and only if the right operand is no transpose."""
    long: Key = ((16, 4000), (4000, 24), True, True, False, False)
    monkeypatch.setattr(matmul, "product_seconds", lambda key, in_parts: seconds)
    seen: list[int] = []
    monkeypatch.setattr(matmul, "_by_onednn", lambda a, b, bias, parts: seen.append(parts) or torch.zeros(len(a), b.shape[1]))
    left, right = torch.randn(16, 4000), torch.randn(4000, 24)
    own = products("auto")
    step = own.around(lambda: StepOutcome(left @ right, 0.0), lambda name: nullcontext())
    step()
    step()
    assert seen == ([parts] if parts else [])
    (told,) = own.told["products"]
    assert (told["parts"], told["seconds_in_parts"]) == (max(1, parts), seconds[2])
    assert matmul._parts(long) == 5 and matmul._parts((*long[:3], False, *long[4:])) == 1


def test_all_ranks_choose_alike(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the times of all: here this rank alone would take the other library. A product of the other stage of a pipeline counts, too."""

    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            (text,) = value
            return [value, {text: [3, 1.0, 9.0, 9.0], "[[2, 2], [2, 2], true, true, false, false]": [1, 2.0, 1.0, 1.0]}]

    injected(monkeypatch, {WIDE: (2.0, 1.0)})
    own = products("auto", Two(0, 2))
    own.around(lambda: StepOutcome(torch.randn(64, 32) @ torch.randn(32, 96), 0.0), lambda name: nullcontext())()
    assert {one["product"]: (one["calls"], one["library"] == "oneDNN") for one in own.told["products"]} == {
        "64 x 32 x 96": (4, False),
        "2 x 2 x 2": (1, True),
    }


@pytest.mark.parametrize(("point", "why"), [({"deterministic": True}, "may differ between runs"), ({"mode": "data"}, "multiplies nothing")])
def test_auto_asks_no_clock_where_it_must_not(products: Any, monkeypatch: pytest.MonkeyPatch, point: dict[str, Any], why: str) -> None:
    injected(monkeypatch, {})
    own = products("auto", **point)
    own.around(lambda: StepOutcome(torch.randn(64, 32) @ torch.randn(32, 96), 0.0), lambda name: nullcontext())()
    assert why in own.told["why"] and own.told["library"] == matmul.blas()


def test_both_libraries_are_timed_on_the_product_itself() -> None:
    state = torch.get_rng_state()
    own, whole, parts = matmul.product_seconds(TALL)
    assert 0 < own < 1 and 0 < whole < 1 and parts == math.inf, "too short for parts"
    assert torch.equal(torch.get_rng_state(), state), "a run draws the same numbers, whoever multiplies"
    assert matmul._cut(TALL, matmul._ENOUGH) == TALL
    huge: Key = ((2**16, 4096), (4096, 4096), True, False, True, False)
    (m, k), (same, n), *rest = matmul._cut(huge, matmul._ENOUGH)
    assert k == same and 2.0 * m * k * n <= matmul._ENOUGH * torch.get_num_threads() and rest == list(huge[2:])
    long: Key = ((1024, 50304), (50304, 768), True, True, False, False)
    (m, k), (same, n), *_ = matmul._cut(long, matmul._ENOUGH_IN_PARTS)
    assert k == same >= 8 * matmul._INNER and (m, n) == (1024, 768), "what is gained by parts depends on all sides"


@pytest.mark.parametrize(
    ("matrix", "straight"),
    [
        (torch.zeros(9, 20), True),
        (torch.zeros(20, 9).t(), False),
        (torch.zeros(9, 40)[:, :20], None),
        (torch.zeros(20, 40)[:, :9].t(), None),
        (torch.zeros(9, 1).expand(9, 20), None),
    ],
)
def test_operands_are_timed_as_they_lie_in_memory(
    products: Any, monkeypatch: pytest.MonkeyPatch, matrix: torch.Tensor, straight: bool | None
) -> None:
    """A copy of a part of a wider matrix, which few rows do not outweigh, is timed, too."""
    timed_keys: list[Key] = []
    monkeypatch.setattr(matmul, "product_seconds", lambda key, in_parts: timed_keys.append(key) or (1.0, 2.0, math.inf))
    products("auto").around(lambda: StepOutcome((matrix.t() @ matrix).sum(), 0.0), lambda name: nullcontext())()
    (key,) = timed_keys
    assert key[2:4] == (matmul._straight(matrix.t()), straight)
    numbers = torch.arange(9.0 * (20 + matmul._APART))
    timed = matmul._operand(numbers, (9, 20), straight)
    assert timed.shape == matrix.shape and matmul._straight(timed) is straight


def test_timing_ends_on_a_slow_machine(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model with a large head, at 5 GFLOP/s: what takes long has three turns, what oneDNN is hopeless at has no parts, and some
    time after the beginning none has, so that no other rank waits for minutes."""
    now, rates, turns = [0.0], {0: 5e9, 1: 5e9, 2: 6e9}, list[int]()

    class Done:
        def __init__(self, multiply: Any, parts: int) -> None:
            self._work, self._way = multiply, min(2, parts)

        def __call__(self) -> None:
            rows, inner, columns = multiplied[-1]
            turns.append(self._way)
            now[0] += 2.0 * rows * inner * columns / rates[self._way]

    multiplied: list[tuple[int, int, int]] = []
    cut = matmul._cut

    def noted(key: Key, enough: float) -> Key:
        small = cut(key, enough * torch.get_num_threads() ** -1)
        multiplied.append((*small[0], small[1][1]))
        tiny: Key = ((2, small[0][1]), (small[0][1], 2), *small[2:])
        return tiny

    for module in (matmul, replacement):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(matmul, "partial", Done)
    monkeypatch.setattr(matmul, "_cut", noted)
    long: Key = ((1024, 50304), (50304, 768), True, True, False, False)
    _own, whole, parts = matmul.product_seconds(long)
    assert (turns.count(0), turns.count(1), turns.count(2)) == (3 + 3, 3 + 3, 3) and parts < whole
    rates[1] = 2e9
    assert matmul.product_seconds(long)[2] == math.inf and turns.count(2) == 3
    rates[1], now[0] = 5e9, 0.0
    some = products("auto")
    some._calls = {((1024, 50304 + number), (50304 + number, 768), True, True, False, False): 1 for number in range(9)}
    some.choose()
    divided = [one["seconds_in_parts"] is not None for one in some.told["products"]]
    assert sum(divided) == 1 and now[0] < 120


def test_a_torch_without_the_library_says_so(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_has_onednn", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match="matmul: found 'onednn'"):
        products("onednn")
    own = products("auto")
    once(own, lambda: None)
    assert "none of oneDNN" in own.told["why"]


def test_the_knob_is_one_like_the_others() -> None:
    (silent,), (spelt,), (other,) = plan(""), plan('matmul = "auto"'), plan('matmul = "mkl"')
    assert silent.point.key == spelt.point.key != other.point.key and other.point.label == "n b8 fp32 matmul=mkl"
    assert len(plan('matmul = ["auto", "mkl", "onednn"]', "gpu")) == 1
    with pytest.raises(InputError, match=r'matmul: found "onedn", expected .*did you mean \'onednn\''):
        plan('matmul = "onedn"')


# -- products of batches in bf16 ---------------------------------------------------------------------------------------


@pytest.fixture
def batches(make_point: MakePoint) -> Iterator[Any]:
    yield from made_of(BatchedProducts, make_point)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch, matmul, "_rounded")


def attended(operands: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """The result of attention with dropout under autocast, and the slopes of its operands."""
    given = [operand.clone().requires_grad_() for operand in operands]
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(*given, dropout_p=0.1)
    out.float().square().sum().backward()
    return [out.detach().float(), *(operand.grad for operand in given if operand.grad is not None)]


OPERANDS = [torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def after_a_step(batches: Replacement, phases: list[str] | None = None) -> None:
    """Have attention computed as the first step, and see that it is torch's own."""

    def phase(name: str) -> AbstractContextManager[None]:
        if phases is not None:
            phases.append(name)
        return nullcontext()

    expected = attended(OPERANDS)
    found: list[list[torch.Tensor]] = []
    batches.around(lambda: found.append(attended(OPERANDS)) or StepOutcome(None, 0.0), phase)()  # type: ignore[func-returns-value]
    assert all(map(torch.equal, found[0], expected)), "the first step is torch's own"


def test_attention_with_dropout_in_bf16_is_that_of_torch_within_its_format(batches: Any, rounded: Counting) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    expected = attended(OPERANDS)
    own = batches("onednn", precision="bf16")
    after_a_step(own)
    found = attended(OPERANDS)
    assert rounded.calls == 6 and own.told["library"] == "oneDNN, operands rounded to bf16", "two products forward, four backward"
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 2**-7 * other.norm()
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
    own.close()
    assert torch.equal(attended(OPERANDS)[0], expected[0]) and rounded.calls == 6


def test_operands_that_are_in_bf16_already_lose_nothing(batches: Any, rounded: Counting) -> None:
    after_a_step(batches("onednn", precision="bf16"))
    left, right = torch.randn(6, 40, 16).bfloat16().float(), torch.randn(6, 16, 40).bfloat16().float()
    found, expected = left @ right, torch.einsum("bij,bjk->bik", left.double(), right.double())
    assert rounded.calls == 1 and torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(torch.bmm(left.double(), right.double()), expected, rtol=1e-12) and rounded.calls == 1, "not of doubles"


def test_what_a_network_computes_in_fp32_besides_attention_stays_in_fp32(batches: Any, rounded: Counting) -> None:
    """As timm's linear attention does, which leaves autocast for it."""
    left, right = torch.randn(6, 16, 30), torch.randn(6, 30, 17)
    own, out = batches("onednn", precision="bf16"), list[torch.Tensor]()

    def step() -> StepOutcome:
        attended(OPERANDS)
        out.append(torch.bmm(left, right))
        return StepOutcome(None, 0.0)

    stepped = own.around(step, lambda name: nullcontext())
    stepped()
    stepped()
    assert rounded.calls == 6 and torch.equal(out[0], out[1])


def test_a_refused_product_of_batches_leaves_the_switch_as_it_was(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        matmul._rounded(lambda: 1 // 0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "taken"), [((2.0, 1.0), 6), ((1.0, 0.99), 0)])
def test_auto_rounds_batches_only_where_that_is_faster(
    batches: Any, rounded: Counting, monkeypatch: pytest.MonkeyPatch, seconds: Any, taken: int
) -> None:
    monkeypatch.setattr(BatchedProducts, "seconds", lambda self, key: seconds)
    own, phases = batches("auto", precision="bf16"), list[str]()
    after_a_step(own, phases)
    attended(OPERANDS)
    assert (rounded.calls, phases) == (taken, ["batched_matmul"]) and own.told["asked"] == "auto"
    assert own.told["library"] == ("oneDNN, operands rounded to bf16" if taken else matmul.blas()) and "take" in own.told["why"]


def test_the_shapes_of_attention_are_known_whoever_calls_it(batches: Any, rounded: Counting) -> None:
    """Also where it is computed again in the backward pass, and within a module of torch's."""
    layer = torch.nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)
    hidden = torch.randn(2, 24, 32)

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = torch.utils.checkpoint.checkpoint(lambda x: layer(x, x, x, need_weights=False)[0], hidden, use_reentrant=False)
        out.float().sum().backward()

    own = batches("onednn", precision="bf16")
    own.around(lambda: work() or StepOutcome(None, 0.0), lambda name: nullcontext())()  # type: ignore[func-returns-value]
    work()
    assert rounded.calls == 8, "two products forward, again, and four backward"


@pytest.mark.parametrize(
    ("asked", "point", "watched"),
    [("auto", {}, 1), ("onednn", {}, 1), ("mkl", {}, 0), ("auto", {"compile": "default"}, 0), ("auto", {"deterministic": True}, 0)],
)
def test_no_step_but_the_first_is_watched(batches: Any, asked: str, point: dict[str, Any], watched: int) -> None:
    """Also of a network without such products: every function of torch would take a detour through Python."""
    own, modes = batches(asked, precision="bf16", **point), list[int]()

    def step() -> StepOutcome:
        modes.append(torch._C._len_torch_function_stack())
        return StepOutcome(None, 0.0)

    stepped = own.around(step, lambda name: nullcontext())
    for _ in range(3):
        stepped()
    assert modes == [watched, 0, 0]


def test_both_ways_of_a_product_of_batches_are_timed(batches: Any, rounded: Counting) -> None:
    state = torch.get_rng_state()
    own, other = batches("auto", precision="bf16").seconds(((2, 16, 8), (2, 8, 16)))
    assert own > 0 < other and rounded.calls and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("point", "why"),
    [({"compile": "default"}, "the compiler"), ({"mode": "data"}, "mode data"), ({"deterministic": True}, "deterministic")],
)
def test_batches_are_left_to_torch_where_there_is_nothing_to_choose(batches: Any, point: dict[str, Any], why: str) -> None:
    own = batches("auto", precision="bf16", **point)
    once(own, lambda: None)
    assert own.told["library"] == matmul.blas() and why in own.told["why"]


@pytest.mark.parametrize(("precision", "emulates", "kinds"), [("bf16", (), 3), ("bf16", ("bf16",), 2), ("fp32", (), 2), ("fp16", (), 2)])
def test_batches_are_rounded_only_in_bf16_by_units_for_it(
    make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, precision: str, emulates: tuple[str, ...], kinds: int
) -> None:
    monkeypatch.setattr(matmul.host, "cpu", lambda: SimpleNamespace(emulates=emulates))
    found = replacements(make_point(precision=precision), Ranks())
    assert len(found) == kinds and [one.name for one in found][::2][:1] == ["matmul"]
