"""How often `caraml check` is wrong, and how soon it finds a loss: simulated nights of known truth through the real code.

    python bench/analysis/nights.py                # the tables of docs/check.md, about fifteen minutes
    python bench/analysis/nights.py --nights 100   # fewer nights

A run's rate varies by a normal factor, half of whose variance is that of its night. One night in fifty is disturbed: its runs are 3 to 8 %
slower, each with a probability of 0.8; four of five such runs have a flag, and a retry in the same night is disturbed in half of the cases.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "report"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "analysis"))

from run_factory import run as made_run

from caraml.analysis.baseline import accept
from caraml.analysis.check import NIGHTS, WITHIN, CheckedPoint, WorkRuns, judged, settle, works_of
from caraml.results.record import Record
from caraml.suite.expand import PlannedPoint

START = datetime(2026, 1, 1, tzinfo=UTC)
DISTURBED, SLOWER, HIT, FLAGGED, STAYS = 0.02, (0.03, 0.08), 0.8, 0.8, 0.5
OWN = 1e-4
"""Relative half-width of a run's own interval: small, so that only what changes between runs counts."""


@dataclass(frozen=True)
class Scenario:
    """A kind of suite, and how it is measured."""

    points: int = 6
    sd: float | None = None
    """Of a run; ``None``: each point's own, between 0.3 and 1 %."""
    repeats: int = 1
    accepted: tuple[int, int] = (5, 1)
    """Nights of the baseline, and rounds of all repeats in each."""
    retries: int = 1
    disturbed: bool = True


class Machine:
    """Draws the runs of a machine whose first point is slower by a known share."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self.scenario, self.rng = scenario, rng
        count = scenario.points
        self.sds = rng.uniform(0.003, 0.01, count) if scenario.sd is None else np.full(count, scenario.sd)
        self.blanks = [[made_run(1000.0, OWN, global_batch=16 * (i + 1), repeat=k) for k in range(scenario.repeats)] for i in range(count)]

    def night(self, day: int, loss: float = 0.0) -> None:
        """Begin a night."""
        rng = self.rng
        self.day, self.loss, self.runs = day, loss, 0
        self.state = rng.standard_normal()
        self.slow = float(rng.uniform(*SLOWER)) if self.scenario.disturbed and rng.random() < DISTURBED else 0.0

    def measure(self, keys: frozenset[str] | None = None) -> list[Record]:
        """Runs of all points, or of those again."""
        if keys is not None and self.rng.random() >= STAYS:
            self.slow = 0.0
        return [
            self._record(index, blank) for index, blanks in enumerate(self.blanks) for blank in blanks if keys is None or blank.key in keys
        ]

    def _record(self, index: int, blank: Record) -> Record:
        rng, slow = self.rng, self.slow
        hit = slow > 0 and rng.random() < HIT
        log = float(self.sds[index]) * math.sqrt(0.5) * (self.state + rng.standard_normal())
        log += (math.log1p(-self.loss) if index == 0 else 0.0) + (math.log1p(-slow) if hit else 0.0)
        self.runs += 1
        rate = 1000.0 * math.exp(log)
        metric = blank.metrics["throughput"].model_copy(update={"value": rate, "low": rate * (1 - OWN), "high": rate * (1 + OWN)})
        begun = START + timedelta(days=self.day, minutes=2 * self.runs)
        flags = ["busy_machine"] if hit and rng.random() < FLAGGED else []
        update = {"metrics": {"throughput": metric}, "started_at": begun.isoformat(), "flags": flags, "attempt": 100 * self.day + self.runs}
        return blank.model_copy(update=update)


def baseline_works(machine: Machine) -> list[WorkRuns]:
    """Accept a campaign of the machine, and return the suite's work."""
    nights, runs = machine.scenario.accepted
    records: list[Record] = []
    for day in range(nights):
        machine.night(day)
        for _ in range(runs):
            records += machine.measure()
    points = [PlannedPoint(blank.point) for blanks in machine.blanks for blank in blanks]
    return works_of(points, accept(records, "nights", "simulated"))[0]


def check_night(machine: Machine, works: list[WorkRuns]) -> list[CheckedPoint]:
    """One night's check; its runs become history."""
    measured: list[Record] = machine.measure()
    everything = list(measured)
    for work in works:
        work.newest = [record for record in measured if record.key in work.keys]

    def again(keys: frozenset[str]) -> list[Record]:
        new = machine.measure(keys)
        everything.extend(new)
        return new

    found = settle(works, partial(judged, within=WITHIN, nights=NIGHTS), again, machine.scenario.retries)
    for work in works:
        work.earlier += [record for record in everything if record.key in work.keys]
    return list(found)


@dataclass(frozen=True)
class Nights:
    """What came out of many machines' nights."""

    alarms: float
    """Nights with a "worse" anywhere."""
    undecided: float
    """Nights without a "worse" and with something undecided."""
    first: float
    """Machines whose slow point was found in the first night."""
    within: tuple[float, ...]
    """Machines whose slow point was found by each night."""


def simulate(scenario: Scenario, loss: float, machines: int, nights: int, seed: int = 0) -> Nights:
    """Let machines be checked night by night, each against a baseline of its own."""
    rng = np.random.default_rng(seed)
    alarms = undecided = 0
    by_night = np.zeros(nights)
    for _ in range(machines):
        machine = Machine(scenario, rng)
        works = baseline_works(machine)
        found = False
        for night in range(nights):
            machine.night(30 + night, loss)
            points = check_night(machine, works)
            worse = [one.verdict == "worse" for one in points]
            alarms += any(worse)
            undecided += not any(worse) and any(one.verdict == "undecided" for one in points)
            found |= worse[0]
            by_night[night] += found
    total = machines * nights
    shares = tuple(float(one) / machines for one in by_night)
    return Nights(alarms / total, undecided / total, shares[0], shares)


SCENARIOS = {
    "6 points, 1 run a night": Scenario(),
    "6 points, 3 runs a night": Scenario(repeats=3),
    "1 point, 1 run a night": Scenario(points=1),
    "10 accepted nights": Scenario(accepted=(10, 1)),
    "20 accepted nights": Scenario(accepted=(20, 1)),
    "all 0.3 %": Scenario(sd=0.003),
    "all 1 %": Scenario(sd=0.01),
    "all 1 %, 20 accepted nights": Scenario(sd=0.01, accepted=(20, 1)),
    "all 1 %, 20 accepted nights, 3 runs a night": Scenario(sd=0.01, accepted=(20, 1), repeats=3),
    "5 runs of one night accepted": Scenario(accepted=(1, 5)),
    "no retries": Scenario(retries=0),
    "no disturbed nights": Scenario(disturbed=False),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nights", type=int, default=1000, help="healthy nights of each kind")
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    arguments = parser.parse_args()
    print("| suite | false alarms | undecided | 5 % in the first night | 2 % in the first | 2 % within five |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, scenario in SCENARIOS.items():
        if arguments.only not in name:
            continue
        machines = arguments.nights // NIGHTS
        healthy = simulate(scenario, 0.0, machines, NIGHTS)
        large = simulate(scenario, 0.05, machines, 1, seed=1)
        small = simulate(scenario, 0.02, machines // 2, NIGHTS, seed=2)
        cells = (f"{healthy.alarms:.2%}", f"{healthy.undecided:.0%}", f"{large.first:.1%}", f"{small.first:.0%}", f"{small.within[-1]:.0%}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
