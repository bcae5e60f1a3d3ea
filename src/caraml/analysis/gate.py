"""``--fail-if worse:5%``: the condition under which a comparison fails, for benchmarks that watch a machine or a code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from caraml.analysis.compare import Change, Comparison, Pair
from caraml.errors import InputError


@dataclass(frozen=True)
class Gate:
    """Fails on every metric that is proven worse by at least ``least``, and on work that lost its result."""

    least: float
    """As a share: 0.05 for 5 %."""

    def failures(self, comparison: Comparison) -> list[tuple[Pair, Change]]:
        """Changes that fail the comparison."""
        return [(pair, change) for pair, change in comparison.changes if change.verdict == "worse" and change.harm >= self.least]

    def lost(self, comparison: Comparison) -> list[str]:
        """Work with a result in A and none in B: worse than any number."""
        return [f"{one.name}: {one.reason}" for one in comparison.lost if one.side == "B"]

    def blind(self, comparison: Comparison) -> list[tuple[Pair, Change]]:
        """Changes without a verdict that could hide what the gate looks for: these runs could not have shown it."""
        undecided = [(pair, change) for pair, change in comparison.changes if change.verdict in ("indistinguishable", "unknown")]
        return [(pair, change) for pair, change in undecided if change.smallest is None or change.smallest > max(self.least, 1e-9)]


def parse_gate(text: str) -> Gate:
    """``worse`` or ``worse:5%``. Raises ``InputError`` for anything else."""
    match = re.fullmatch(r"worse(?::(\d+(?:\.\d+)?)\s*%)?", text.strip())
    if match is None:
        raise InputError(f"--fail-if {text!r}: expected `worse` or `worse:PERCENT%`", "--fail-if worse:5%")
    return Gate(float(match[1] or 0) / 100)
