"""Loops of a user's own, as their tests need them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import caraml
from caraml.engine.ranks import Ranks
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.model import Policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
QUICK = Policy(target=0.2, min_seconds=0.4, max_seconds=5, min_steps=8, warm_up_max_seconds=5, idle_seconds=0)


def example() -> str:
    """The example's source, with a window that ends after a second however much the steps vary: both ranks compute all the time."""
    text = EXAMPLE.read_text(encoding="utf-8")
    longest = "min_seconds=1, max_seconds=10"
    assert text.count(longest) == 1
    return text.replace(longest, "min_seconds=0.3, max_seconds=1, warm_up_max_seconds=0.5")


def only(out: Path) -> Record:
    (record,) = Store(out).records()
    return record


class Twins(Ranks):
    """Rank 0 of two that measure the same."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def agree(self, value: int) -> int:
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def barrier(self) -> None:
        """Nobody to wait for."""


def measured(out: Path, name: str = "loop", items: Callable[[], Any] = lambda: 4, **told: Any) -> Record:
    with caraml.measure(name, out=out, policy=QUICK, **told) as m:
        while m.step(items()):
            time.sleep(0.005)
    assert m.record is not None
    return m.record
