"""The matrices of MAELSTROM's deliverable D3.7, Figs. 1 to 3: what using more devices did to time and energy to solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from caraml.analysis.estimate import Estimate
from caraml.analysis.grouping import axes, grouped, same_work, without
from caraml.analysis.spread import estimates
from caraml.results.record import Record

Quantity = Literal["time", "energy"]


@dataclass(frozen=True)
class Solution:
    """Cost of one amount of work on a number of devices; from records or from published tables."""

    row: str
    """Application."""
    column: str
    """Device."""
    devices: int
    time: Estimate | None
    energy: Estimate | None

    def cost(self, quantity: Quantity) -> Estimate | None:
        """The named cost."""
        return self.time if quantity == "time" else self.energy


@dataclass(frozen=True)
class Cell:
    """``0.9, 1 → 4``: the ratio of a cost at the best number of devices to that at the smallest."""

    row: str
    column: str
    ratio: Estimate | None
    """``None`` where one of the two is not known."""
    smallest: int
    best: int

    @property
    def text(self) -> str:
        """The cell as the report prints it."""
        ratio = "–" if self.ratio is None else f"{self.ratio.value:.2g}"
        return f"{ratio}, {self.smallest} → {self.best}"


def matrix(solutions: Sequence[Solution], quantity: Quantity, best_by: Quantity | None = None) -> list[Cell]:
    """A cell for each row and column with two or more numbers of devices.

    Figs. 1a and 2a: ``time``; 1b and 2b: ``energy``; Fig. 3: ``energy`` with ``best_by="time"``. Several solutions with one number of
    devices (other batch sizes, say) count by their best.
    """
    cells = []
    for row, column in dict.fromkeys((one.row, one.column) for one in solutions):
        here = [one for one in solutions if (one.row, one.column) == (row, column)]
        by: Quantity = best_by or quantity
        ranked = sorted((one for one in here if one.cost(by) is not None), key=lambda one: _value(one, by))
        if len({one.devices for one in ranked}) < 2:
            continue
        smallest, best = min(one.devices for one in ranked), ranked[0]
        first = next(one for one in ranked if one.devices == smallest)
        ours, theirs = best.cost(quantity), first.cost(quantity)
        ratio = None if ours is None or theirs is None else Estimate(1.0, 0.0) if best is first else ours.over(theirs)
        cells.append(Cell(row, column, ratio, smallest, best.devices))
    return cells


def solutions_of(records: Sequence[Record]) -> list[Solution]:
    """Time and energy per item of every record with a result: the same amount of work for all of one benchmark on one device."""
    ok = [record for record in records if record.status == "ok"]
    placement = ("nodes", "devices", "global_batch", "micro_batch", "device", "system", "device_class", "software")
    found = []
    for family in grouped(ok, lambda record: without(axes(record.point), placement)):
        groups = same_work(family)
        rates, _ = estimates(groups, "throughput")
        energies, _ = estimates(groups, "energy_per_item")
        for group, rate, energy in zip(groups, rates, energies, strict=True):
            point = group[0].point
            if rate is not None:
                name = f"{point.benchmark} {point.precision}"
                found.append(Solution(name, point.device.rpartition(" x")[0] or point.device, point.world, rate.inverse(), energy))
    return found


def _value(solution: Solution, quantity: Quantity) -> float:
    cost = solution.cost(quantity)
    assert cost is not None
    return cost.value
