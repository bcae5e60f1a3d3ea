"""How long a comparison of two campaigns takes, in CPU seconds of the whole process.

python bench/analysis/speed.py [--points 500]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "report"))

import resource

from record_factory import make_point, make_record

from caraml.results.store import Store, write_record


def campaign(root: Path, points: int, software: str, slower: float) -> None:
    """A store of ``points`` made records, without raw files."""
    store = Store(root)
    for index in range(points):
        point = make_point(global_batch=4 * (index + 1), software=software)
        record = make_record(point, step=0.01 * (index + 1) * slower, watts=200.0)
        write_record(store.new_attempt(point), record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=500)
    points = parser.parse_args().points
    with tempfile.TemporaryDirectory() as folder:
        sides = [str(Path(folder) / name) for name in ("a", "b")]
        for side, slower in zip(sides, (1.0, 1.02), strict=True):
            campaign(Path(side), points, f"software of {Path(side).name}", slower)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-m", "caraml", "compare", *sides], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"compare of two campaigns of {points} points: {cpu:.1f} s CPU, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
