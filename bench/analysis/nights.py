"""How often `caraml check` is wrong, and how soon it finds a loss: simulated nights of known truth through the real code.

    python bench/analysis/nights.py                    # the tables of docs/check.md, about ten minutes
    python bench/analysis/nights.py --machines 20      # fewer of each kind

A run's rate varies by a normal factor, half of whose variance is that of its night. One night in fifty is disturbed: its runs are 3 to 8 %
slower, each with a probability of 0.8; four of five such runs have a flag, and a retry in the same night is disturbed in half of the cases.
Scenarios change that: nights like the night before, tails, a shared drift, two levels.
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

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "report"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "analysis"))

from run_factory import run as made_run

from caraml.analysis.baseline import WorkRuns, accept, works_of
from caraml.analysis.check import NIGHTS, WITHIN, CheckedPoint, judged, settle
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
    serial: float = 0.0
    """Correlation of a night's state with that of the night before."""
    apart: int = 1
    """Days between accepted nights."""
    tails: float | None = None
    """Degrees of freedom of Student's t where the noise is not normal."""
    shared: float = 0.0
    """Standard deviation of a shift of all points in a night, besides."""
    drift: float = 0.0
    """Standard deviation of what the shift of all points changes by in a day, and keeps."""
    levels: float = 0.0
    """Share of nights in which a point is 3 % slower."""


class Machine:
    """Draws the runs of a machine whose first point is slower by a known share."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self.scenario, self.rng = scenario, rng
        count = scenario.points
        self.sds = rng.uniform(0.003, 0.01, count) if scenario.sd is None else np.full(count, scenario.sd)
        self.states, self.walk, self.last = self._noise(count), 0.0, 0
        self.blanks = [[made_run(1000.0, OWN, global_batch=16 * (i + 1), repeat=k) for k in range(scenario.repeats)] for i in range(count)]

    def night(self, day: int, loss: float = 0.0) -> None:
        """Begin a night."""
        rng = self.rng
        scenario, days, count = self.scenario, max(day - self.last, 1), self.scenario.points
        self.day, self.loss, self.runs, self.last = day, loss, 0, day
        kept = scenario.serial**days
        self.states = kept * self.states + math.sqrt(1 - kept**2) * self._noise(count)
        self.walk += scenario.drift * math.sqrt(days) * rng.standard_normal()
        self.shift = (
            self.walk + scenario.shared * rng.standard_normal() + np.where(rng.random(count) < scenario.levels, math.log1p(-0.03), 0.0)
        )
        self.slow = float(rng.uniform(*SLOWER)) if self.scenario.disturbed and rng.random() < DISTURBED else 0.0

    def _noise(self, count: int) -> np.ndarray:
        tails = self.scenario.tails
        return self.rng.standard_normal(count) if tails is None else self.rng.standard_t(tails, count) / math.sqrt(tails / (tails - 2))

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
        log = float(self.sds[index]) * math.sqrt(0.5) * (float(self.states[index]) + float(self._noise(1)[0])) + float(self.shift[index])
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
        machine.night((day - nights) * machine.scenario.apart)
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
    """Healthy nights with a "worse" anywhere."""
    undecided: float
    """Healthy nights without a "worse" and with something undecided."""
    found: tuple[float, ...]
    """Machines whose slow point was found by each night of the loss."""


def simulate(scenario: Scenario, loss: float, machines: int, nights: int, *, healthy: int = 0, seed: int = 0) -> Nights:
    """Let machines be checked night by night, each against a baseline of its own: healthy nights, then nights with a loss at one point."""
    rng = np.random.default_rng(seed)
    alarms = undecided = 0
    by_night = np.zeros(nights)
    for _ in range(machines):
        machine = Machine(scenario, rng)
        works = baseline_works(machine)
        for night in range(healthy):
            machine.night(1 + night)
            verdicts = [one.verdict for one in check_night(machine, works)]
            alarms += "worse" in verdicts
            undecided += "worse" not in verdicts and "undecided" in verdicts
        found = False
        for night in range(nights):
            machine.night(1 + healthy + night, loss)
            found |= check_night(machine, works)[0].verdict == "worse"
            by_night[night] += found
    total = max(machines * healthy, 1)
    return Nights(alarms / total, undecided / total, tuple(float(one) / machines for one in by_night))


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
    "heavy tails (t, 3 degrees of freedom)": Scenario(tails=3),
    "all points shift together by 0.5 % a night": Scenario(shared=0.005),
    "all points drift together by 0.1 % a day": Scenario(drift=0.001),
    "nights correlated by 0.7 with the night before": Scenario(serial=0.7),
    "the same, 10 nights accepted, a week apart": Scenario(serial=0.7, accepted=(10, 1), apart=7),
    "every point 3 % slower in a fifth of the nights": Scenario(levels=0.2),
    "the same, 20 accepted nights": Scenario(levels=0.2, accepted=(20, 1)),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=100, help="machines of each kind")
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    arguments = parser.parse_args()
    print("| suite | false alarms | undecided | 5 % in the first night | later | 2 % within five | later |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    machines = arguments.machines
    for name, scenario in SCENARIOS.items():
        if arguments.only not in name:
            continue
        small = simulate(scenario, 0.02, machines // 2, NIGHTS, healthy=20)
        large = simulate(scenario, 0.05, machines // 2, 1, healthy=20, seed=1)
        new_large, new_small = simulate(scenario, 0.05, 2 * machines, 1, seed=2), simulate(scenario, 0.02, machines, NIGHTS, seed=3)
        healthy = [f"{(getattr(small, one) + getattr(large, one)) / 2:.{digits}%}" for one, digits in (("alarms", 2), ("undecided", 0))]
        losses = [f"{one.found[-1]:.0%}" for one in (new_large, large, new_small, small)]
        print(f"| {name} | {' | '.join(healthy + losses)} |", flush=True)


if __name__ == "__main__":
    main()
