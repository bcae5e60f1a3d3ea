"""What the start of ranks costs a training: throughput of two ranks, started by ``caraml.engine.start`` over started by torchrun.

    python bench/ranks.py [--rounds N] [--seconds S]

Each round trains the same small GPT on CPUs both ways, in an order drawn anew: its gradients are small and steps short, so that what
ranks say to each other weighs. Torchrun's processes meet in a folder as ours do, but beside its own store, and over the network interface
that gloo chooses. Prints the median of the rounds' ratios with its 95 % bootstrap interval: of the rate of the window, which on a busy
machine is mostly that of others, and of the time of the fastest tenth of its steps, which is less so.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench" / "train"), str(ROOT)]

from turns import ratio  # noqa: E402

from caraml.analysis.table import read_steps  # noqa: E402
from caraml.engine.start import MEET, own_folder  # noqa: E402
from caraml.results.store import RECORD, Store, read_record  # noqa: E402
from caraml.suite.model import Point, Policy  # noqa: E402
from caraml.workloads import load_workload  # noqa: E402
from tests.report.record_factory import make_point  # noqa: E402

SMALL = {"width": 64, "layers": 2, "heads": 2, "sequence_length": 64, "vocab_size": 256}
STARTERS = {
    "start": ["-m", "caraml.engine.start", "--devices=2", "caraml.worker"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "caraml.worker"],
}


def point_of(seconds: float) -> Point:
    """A small GPT on two ranks, measured for so many seconds."""
    params = load_workload("gpt").params.model_validate({"preset": "4M", "data": "synthetic", **SMALL}).model_dump(mode="json")
    measure = Policy(min_seconds=seconds, max_seconds=seconds, target=1e-6, idle_seconds=0, warm_up_max_seconds=3)
    own = {"device_class": "cpu", "mode": "compute", "devices": 2, "global_batch": 2, "micro_batch": 1}
    return make_point(workload="gpt", params=params, measure=measure, **own)


def measured(starter: str, point: Point, store: Store) -> tuple[float, float]:
    """Throughput [items/s] of the point, started in one way, and seconds of the fastest tenth of its steps.

    Raises:
        RuntimeError: it failed; with what its ranks said first.
    """
    folder, meet = store.new_attempt(point), own_folder()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **({MEET: str(meet)} if starter == "torchrun" else {})}
    try:
        command = [sys.executable, *STARTERS[starter], str(folder.resolve())]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=ROOT)
    finally:
        shutil.rmtree(meet, ignore_errors=True)
    if done.returncode or (value := read_record(folder / RECORD).metrics["throughput"].value) is None:
        raise RuntimeError(f"{starter}: {done.stderr.strip()[:2000]}")
    steps = read_steps(folder / "steps.parquet")
    seconds = sorted(
        seconds for phase, seconds in zip(steps.phase, steps.seconds, strict=True) if phase == "measure" and seconds is not None
    )
    return value, statistics.quantiles(seconds, n=10)[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window")
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {starter: [] for starter in STARTERS}
    steps: dict[str, list[float]] = {starter: [] for starter in STARTERS}
    with tempfile.TemporaryDirectory() as scratch:
        point, store = point_of(asked.seconds), Store(Path(scratch))
        for number in range(asked.rounds):
            for starter in random.sample(list(STARTERS), len(STARTERS)):
                value, fast = measured(starter, point, store)
                rates[starter].append(value)
                steps[starter].append(fast)
            told = (f"{name} {rates[name][-1]:.4g}/s, {1e3 * steps[name][-1]:.3g} ms" for name in STARTERS)
            print(f"round {number + 1}: {'; '.join(told)}", flush=True)
    print(f"rate, start over torchrun: {ratio(rates['start'], rates['torchrun'])}, load {os.getloadavg()[0]:.1f}")
    print(f"fast steps, torchrun's time over start's: {ratio(steps['torchrun'], steps['start'])}")


if __name__ == "__main__":
    main()
