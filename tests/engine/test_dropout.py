"""Masks of dropout from random words: as likely as asked, independent, repeatable, chosen by time, alike on all ranks, and given back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from caraml.engine import replacement
from caraml.engine.ranks import Ranks
from caraml.engine.replacement import Masks, by_words
from caraml.engine.step import make_step
from caraml.engine.steps import StepOutcome
from tests.conftest import MakePoint
from tests.engine.test_matmul import Counting, made_of
from tests.suite.test_knobs import CPU, plan
from tests.tasks import built

NUMBERS = 400_000


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch, replacement, "by_words")


@pytest.fixture
def masks(make_point: MakePoint) -> Iterator[Any]:
    yield from made_of(Masks, make_point)


def stepped(masks: Masks, work: Any = lambda: None, steps: int = 1) -> list[Any]:
    """What ``work`` returned in each step."""
    found: list[Any] = []

    def step() -> StepOutcome:
        found.append(work())
        return StepOutcome(None, 0.0)

    around = masks.around(step, lambda name: nullcontext())
    for _ in range(steps):
        around()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [2**-8, 0.05, 0.5, 0.9, 1 - 2**-8])
def test_as_many_ones_as_asked_and_independent_of_each_other(p: float, dtype: torch.dtype) -> None:
    """All quarters of a word, neighbours, and the parts in which a large mask is drawn."""
    torch.manual_seed(0)
    at_once = replacement._AT_ONCE
    mask = by_words(torch.empty(8 * at_once - 3, dtype=dtype), p).double()
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    for part in (mask, *(mask[quarter::4] for quarter in range(4)), mask[:at_once], mask[at_once:], mask[-at_once:]):
        assert abs(part.mean() - p).item() < 5 * math.sqrt(p * (1 - p) / len(part))
    for lag in (1, 2, 3, 64, at_once):
        covariance = ((mask[lag:] - p) * (mask[:-lag] - p)).mean()
        assert abs(covariance).item() < 5 * p * (1 - p) / math.sqrt(len(mask) - lag), lag


@pytest.mark.parametrize("p", [2**-8, 1 / 3, 0.5, 0.9, 1 - 2**-8])
def test_the_probability_is_met_exactly_on_average(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of the 2**16 numbers once, at evenly spaced draws of the last bits: the share of ones is ``p``."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.int64)
    spaced = iter((turn + 0.5) / 1000 for turn in range(1000))
    monkeypatch.setattr(replacement, "_AT_ONCE", 2**16)
    monkeypatch.setattr(torch.Tensor, "random_", lambda self, *bounds, generator=None: self.copy_(every))
    monkeypatch.setattr(torch, "rand", lambda *shape, **how: torch.tensor([next(spaced)], dtype=torch.float64))
    shares = [by_words(torch.empty(2**16, dtype=torch.float64), p).mean().item() for _ in range(1000)]
    assert sum(shares) / 1000 == pytest.approx(p, abs=2**-16 / 1000) and max(shares) - min(shares) <= 2**-16


@pytest.mark.parametrize("numbers", [2**12, 2**15, 2**17 + 5, 786_432])
def test_words_are_compared_in_one_thread(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """torch divides 2**15 numbers and more; threads that wait for each other made a mask 40 times as slow beside other work."""
    compare, sizes = torch.lt, list[int]()

    def spied(words: torch.Tensor, below: int, out: torch.Tensor) -> None:
        sizes.append(len(words))
        compare(words, below, out=out)

    monkeypatch.setattr(torch, "lt", spied)
    by_words(torch.empty(numbers), 0.5)
    assert sum(sizes) == numbers and max(sizes) < 2**15 and len(sizes) == math.ceil(numbers / (2**15 - 4))


def test_a_layer_drops_and_its_gradient_drops_the_same(masks: Any, words: Counting) -> None:
    x = torch.ones(NUMBERS, requires_grad=True)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        y = F.dropout(x, 0.1)
        return y, torch.autograd.grad(y.sum(), x)[0]

    [(y, slope)] = stepped(masks("words"), work)
    assert words.calls == 1 and torch.equal(y, slope)
    assert torch.allclose(y.unique(), torch.tensor([0.0, 1 / 0.9])) and abs(y.mean().item() - 1) < 0.01


@pytest.mark.parametrize("asked", ["words", "auto"])
def test_the_same_seed_draws_the_same_and_recomputation_too(masks: Any, words: Counting, asked: str) -> None:
    x = torch.randn(64, 4096, requires_grad=True)

    def work() -> list[torch.Tensor]:
        torch.manual_seed(3)
        y = checkpoint(lambda given: F.dropout(given, 0.3).sin(), x, use_reentrant=False)
        z = F.dropout(x, 0.3).sin()
        torch.manual_seed(3)
        whole = F.dropout(x, 0.3).sin()
        return [y, z, whole, *torch.autograd.grad(y.sum(), x), *torch.autograd.grad(whole.sum(), x)]

    for y, z, whole, again, truth in stepped(masks(asked), work, steps=2):
        assert torch.equal(y, whole) and torch.equal(again, truth) and not torch.equal(y, z)
    by_hand = torch.Generator().manual_seed(1)
    first = torch.empty(NUMBERS).bernoulli_(0.5, generator=by_hand)
    assert not torch.equal(first, torch.empty(NUMBERS).bernoulli_(0.5, generator=by_hand))
    assert torch.equal(first, torch.empty(NUMBERS).bernoulli_(0.5, generator=by_hand.manual_seed(1)))


def test_what_words_cannot_fill_torch_draws(masks: Any, words: Counting) -> None:
    stepped(masks("words"))
    assert torch.empty(NUMBERS).bernoulli_(0.0).sum() == 0 and torch.empty(NUMBERS).bernoulli_(1.0).mean() == 1
    assert 0 < torch.empty(NUMBERS).bernoulli_(1e-3).mean() < 0.003, "16 bits are few for what is rare"
    assert 0 < torch.empty(100).bernoulli_(0.5).sum() < 100, "a small mask"
    assert 0 < torch.empty(NUMBERS, dtype=torch.int64).bernoulli_(0.5).double().mean() < 1
    every_other = torch.full((NUMBERS, 2), -1.0)
    every_other[:, 0].bernoulli_(0.5)
    assert (every_other[:, 1] == -1).all() and 0 < every_other[:, 0].mean() < 1
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
        torch.empty(NUMBERS).bernoulli_(1.5)
    with pytest.raises(NotImplementedError, match="Float8"):
        torch.empty(NUMBERS, dtype=torch.float8_e4m3fn).bernoulli_(0.5)
    assert words.calls == 0


@pytest.mark.parametrize(("times", "library"), [((0.010, 0.004), "CARAML"), ((0.004, 0.010), "torch"), ((0.010, 0.0099), "torch")])
def test_auto_takes_the_faster_by_the_sum_over_ranks(
    masks: Any, words: Counting, monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], library: str
) -> None:
    class Two(Ranks):
        def gather(self, mine: Any) -> list[Any]:
            assert mine == [0.0, 0.0], "this rank drops nothing"
            return [mine, list(times)]

    one = masks("auto", Two(world=2))
    stepped(one, lambda: F.dropout(torch.ones(10), 0.1))
    assert one.told["library"] == library and "the masks of a step, of all ranks, take" in one.told["why"]
    F.dropout(torch.ones(NUMBERS), 0.1)
    assert words.calls == (library == "CARAML"), "a rank that drew none draws like the others"
    one.close()
    F.dropout(torch.ones(NUMBERS), 0.1)
    assert words.calls == (library == "CARAML"), "given back"


def test_timing_moves_no_seed(masks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on with the numbers that it would have drawn."""
    monkeypatch.setattr(replacement, "times_of", lambda own, other: (own(), other(), (1.0, 2.0))[2])
    x = torch.ones(NUMBERS)
    torch.manual_seed(0)
    truth = [F.dropout(x, 0.1) for _ in range(2)]
    torch.manual_seed(0)
    found = stepped(masks("auto"), lambda: F.dropout(x, 0.1), steps=2)
    assert all(torch.equal(*pair) for pair in zip(truth, found, strict=True))


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"mode": "inference"}, "mode inference drops nothing"),
        ({"mode": "data"}, "mode data drops nothing"),
    ],
)
def test_auto_says_why_it_does_not_look(masks: Any, point: dict[str, Any], why: str) -> None:
    one = masks("auto", **point)
    step = lambda: StepOutcome(None, 0.0)  # noqa: E731
    assert one.around(step, lambda name: nullcontext()) is step
    assert one.told["library"] == "torch" and why in one.told["why"]


@pytest.mark.parametrize("asked", ["auto", "words"])
def test_no_record_says_that_words_were_drawn_where_the_compiler_draws(masks: Any, asked: str) -> None:
    one = masks(asked, compile="default")
    step = lambda: StepOutcome(None, 0.0)  # noqa: E731
    assert one.around(step, lambda name: nullcontext()) is step and one._library is None
    assert one.told == {"asked": asked, "library": "torch", "why": "compiled: the compiler draws masks by itself"}


def test_without_dropout_nothing_is_timed(masks: Any) -> None:
    one, phases = masks("auto"), list[str]()

    def step() -> StepOutcome:
        return StepOutcome(F.dropout(torch.ones(NUMBERS), 0.1, training=False), 0.0)

    one.around(step, lambda name: phases.append(name) or nullcontext())()
    assert phases == [], "nor is progress told of it"
    assert one.told == {"asked": "auto", "library": "torch", "why": "the first step drew no mask of 4096 numbers or more"}


def test_a_network_with_dropout_learns_as_before(masks: Any, words: Counting, make_point: MakePoint) -> None:
    losses: dict[str, list[float]] = {}
    for asked in ("torch", "words"):
        task = built("question_answering", {"preset": "tiny"})
        step, one = make_step(task, make_point(workload="question_answering", global_batch=4, micro_batch=4), CPU), masks(asked)
        losses[asked] = [loss.item() for loss in stepped(one, lambda step=step: step().loss, steps=12)]
        one.close()
    assert words.calls > 0
    assert max(losses["words"][-3:]) < losses["words"][0] and abs(losses["words"][-1] - losses["torch"][-1]) < 0.5


def test_it_is_a_knob_of_cpus() -> None:
    points = [planned.point for planned in plan('dropout_masks = ["auto", "torch"]')]
    assert [point.label for point in points] == ["n b8 fp32", "n b8 fp32 dropout_masks=torch"]
    assert len(plan('dropout_masks = ["auto", "torch"]', "gpu")) == 1
