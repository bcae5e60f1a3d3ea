"""A metric of your own, computed from records and their raw tables: by how much the steps of a window differ.

python examples/metric.py caraml-results
"""

from __future__ import annotations

import sys

import numpy as np

import caraml


def step_spread(seconds: np.ndarray) -> float:
    """Range from the 5th to the 95th percentile of the step times, over their median [1]."""
    low, middle, high = np.quantile(seconds, [0.05, 0.5, 0.95])
    return float((high - low) / middle)


def bootstrap(seconds: np.ndarray, draws: int = 500) -> tuple[float, float]:
    """95 % interval of ``step_spread``: steps are drawn again with replacement. Too narrow where neighbouring steps are alike."""
    rng = np.random.default_rng(0)
    again = [step_spread(rng.choice(seconds, len(seconds))) for _ in range(draws)]
    return float(np.quantile(again, 0.025)), float(np.quantile(again, 0.975))


def main(folders: list[str]) -> None:
    """Print the metric of every point that has a result."""
    for result in caraml.load(*folders).where(status="ok"):
        if "steps" not in result.record.files:  # as of a program, or of published rows
            print(f"{result.point.label}: no raw table of steps")
            continue
        measured = np.array(result.steps.measured())
        low, high = bootstrap(measured)
        print(f"{result.point.label}: {100 * step_spread(measured):.1f} % ({100 * low:.1f} to {100 * high:.1f} %) of the median step")


if __name__ == "__main__":
    main(sys.argv[1:])
