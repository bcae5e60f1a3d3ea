"""Operators of torch whose kernel for CPUs is replaced where another is faster, below autograd and everything else that calls them.

Whoever calls them, forward or backward, eager or compiled, under autocast, DDP, FSDP, tensor parallelism or recomputation, calls the same
operators on the same parameters as before.

Masks of dropout: torch draws every number of a mask by itself (`bernoulli_`), which takes a tenth of a BERT's step on two cores. Here its
generator fills words of 64 bits, and each quarter of them is compared with the probability, which is met on average over the parts of a
mask. Seeds, recomputation and generators given by hand work as before; only the numbers drawn are others. The words of a process come from
one thread, while torch draws with several on some CPUs: which is faster depends on the machine.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from timeit import timeit
from typing import Any

import torch

from caraml.base.format import human
from caraml.engine.ranks import Ranks
from caraml.engine.steps import Step, StepOutcome
from caraml.suite.model import Point

WORTH = 0.98
"""Share of the usual time below which another way to do the same is taken."""
_FEWEST_TURNS, _MOST_TURNS, _TURNS_SECONDS = 3, 20, 0.2
"""Work is timed in at least so many turns, and in further ones until so much time has passed."""

Seconds = tuple[float, ...]
"""Of the same work by torch's kernel, and by the other; of a product (:mod:`caraml.engine.matmul`) also by the other in parts."""

_FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FEWEST = 2**12
"""Numbers of a mask below which the detour through Python outweighs what it saves."""
_RAREST = 2**-8
"""Probability below which 16 bits for each number would be few."""
_AT_ONCE = 2**15 - 4
"""Numbers that are drawn at a time: their words (64 KiB) stay in the cache of a core, whatever the size of the mask, and torch compares
fewer than 2**15 numbers in one thread. Several would gain little, and wait for each other wherever a core has other work."""


class Replacement:
    """Who computes some operators of this process: as a knob asks for by name, or `auto`, whoever is faster by what the first step called.

    ``told`` is what a record says of it. What a call's time depends on is its key: a subclass says what that is.
    """

    knob: str
    """Its name in a point."""
    name: str = ""
    """Its name in the record, and of the phase in which both kernels are timed; that of the knob unless there is another."""
    other: str
    """The knob's value that asks for the other kernel."""
    work: str
    """What is computed, in words, and ``few`` of what the first step called none."""
    few: str

    def __init__(self, point: Point, ranks: Ranks, own: str, other: str) -> None:
        """``own`` and ``other`` are torch's kernel and ours in words."""
        self.name = self.name or self.knob
        self._point, self._ranks, self._words = point, ranks, other
        self._asked: str = getattr(point.knobs, self.knob)
        self._library: torch.library.Library | None = None
        self._calls: dict[Any, int] = {}
        self.told: dict[str, Any] = {"asked": self._asked, "library": own, "why": "asked for by name"}

    def kernels(self, takes: Callable[[Any], int]) -> Mapping[str, Callable[..., torch.Tensor]]:
        """By operator, a kernel that computes the calls whose key it ``takes``, in that many parts, and hands all others to torch's own."""
        raise NotImplementedError

    def able(self, key: Any) -> bool:
        """Whether the other kernel can compute a call of this key."""
        return True

    def settled(self) -> str | None:
        """Why `auto` is torch's kernel without a look at the clock, or ``None``."""
        return "deterministic: a choice by time may differ between runs" if self._point.deterministic else None

    def seconds(self, key: Any) -> Seconds:
        """Seconds of one call of this key by torch's kernel and by the other."""
        raise NotImplementedError

    def choose(self) -> None:
        """Time what was called both ways, and install the other kernel where it is faster. Collective: all ranks choose alike.

        Here one way for all, by the sum of their times on all ranks.
        """
        mine = [0.0, 0.0]
        for key, calls in self._calls.items():
            mine = [total + calls * seconds for total, seconds in zip(mine, self.seconds(key), strict=True)]
        own, other = (sum(times) for times in zip(*self._ranks.gather(mine), strict=True))
        if not own:
            self.told["why"] = f"the first step {self.few}"
            return
        self.told["why"] = f"{self.work} of a step, of all ranks, take {human(own, 's')} by torch and {human(other, 's')} by {self._words}"
        if other < WORTH * own:
            self.install(self.able)
            self.told["library"] = self._words

    def around(self, step: Step, phase: Callable[[str], AbstractContextManager[None]]) -> Step:
        """The same step with its kernels as asked: `auto` notes what the first step calls, and then times both kernels in ``phase``."""
        if self._asked == self.other:
            self.install(self.able)
            self.told["library"] = self._words
        if self._asked != "auto":
            return step
        settled = self.settled()
        if settled is not None:
            self.told["why"] = settled
            return step
        self.install(self._noted)
        todo = [phase]

        def first_then_chosen() -> StepOutcome:
            with self.noting() if todo else nullcontext():
                outcome = step()
            if todo:
                timed = todo.pop()
                with timed(self.name) if self._calls else nullcontext():
                    self.close()
                    self.choose()
            return outcome

        return first_then_chosen

    def noting(self) -> AbstractContextManager[object]:
        """A context for the first step, whose calls are noted."""
        return nullcontext()

    def _noted(self, key: Any) -> bool:
        if self.able(key):
            self._calls[key] = self._calls.get(key, 0) + 1
        return False

    def install(self, takes: Callable[[Any], int]) -> None:
        """Have the calls whose key it ``takes`` computed by the other kernel; it says in how many parts, 0 for torch's own."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
            for name, kernel in self.kernels(takes).items():
                # the compiler takes the Python of a kernel for a part of the model where that runs eagerly
                wanted = kernel if self._point.compile == "off" else torch.compiler.disable(kernel)
                library.impl(name, wanted, "CPU", with_keyset=True)
        self._library = library

    def close(self) -> None:
        """Give the operators back to torch."""
        self._library = None  # torch withdraws kernels with the object that brought them


def times_of(*ways: Callable[[], object]) -> Seconds:
    """Seconds of the same work each way: the fastest of a few turns each, which others disturb least."""
    turns, begin = list[list[float]](), time.perf_counter()
    while len(turns) < _FEWEST_TURNS or (len(turns) < _MOST_TURNS and time.perf_counter() - begin < _TURNS_SECONDS):
        turns.append([timeit(way, timer=time.perf_counter, number=1) for way in ways])
    return tuple(map(min, zip(*turns, strict=True)))


# -- masks of dropout --------------------------------------------------------------------------------------------------


class Masks(Replacement):
    """Who draws the masks of dropout in this process; a call's key is how many numbers a mask has."""

    knob, other = "dropout_masks", "words"
    work, few = "the masks", f"drew no mask of {_FEWEST} numbers or more"

    def __init__(self, point: Point, ranks: Ranks) -> None:
        super().__init__(point, ranks, own="torch", other="CARAML")
        if point.compile != "off":  # words that were asked for by name, too, would not be drawn
            self._asked, self.told["why"] = "torch", "compiled: the compiler draws masks by itself"

    def settled(self) -> str | None:
        """Nothing to choose where nothing is dropped."""
        return f"mode {self._point.mode} drops nothing" if self._point.mode in ("data", "inference") else super().settled()

    def seconds(self, key: int) -> Seconds:
        """Torch's generator is left as it was."""
        mask, state = torch.empty(key), torch.get_rng_state()
        try:
            return times_of(lambda: mask.bernoulli_(0.9), lambda: by_words(mask, 0.9))
        finally:
            torch.set_rng_state(state)

    def kernels(self, takes: Callable[[int], int]) -> dict[str, Callable[..., torch.Tensor]]:
        """Only of contiguous masks that are large enough."""
        own: Any = torch.library.get_kernel("aten::bernoulli_.float", "CPU")

        def draw(keys: Any, mask: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
            fits = mask.numel() >= _FEWEST and _RAREST <= p <= 1 - _RAREST and mask.dtype in _FORMATS and mask.is_contiguous()
            if fits and takes(mask.numel()):
                return by_words(mask, p, generator)
            drawn: torch.Tensor = own.call_boxed(keys, mask, p, generator=generator)
            return drawn

        return {"bernoulli_.float": draw}


def by_words(mask: torch.Tensor, p: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fill a contiguous tensor with ones, each with probability ``p``, and zeros."""
    parts = mask.view(-1).chunk(math.ceil(mask.numel() / _AT_ONCE))
    words = torch.empty((len(parts[0]) + 3) // 4, dtype=torch.int64)
    numbers = words.view(torch.int16)
    for part, last in zip(parts, torch.rand(len(parts), dtype=torch.float64, generator=generator).tolist(), strict=True):
        words.random_(-(2**63), None, generator=generator)  # torch's way to ask for all 64 bits
        # Of 2**16 equally likely whole numbers from -2**15 on this many are smaller, or one more: on average exactly the share p.
        torch.lt(numbers[: len(part)], math.floor(p * 2**16 + last) - 2**15, out=part)
    return mask
