"""What writing the report of a large campaign costs: CPU seconds, beside a report of nothing, and the size of the page.

    python bench/analysis/report.py [POINTS]

The campaign is made up: four workloads on four machines, 1 to 8 devices, eight batches, 60 steps and two power channels each. CPU seconds
of this process are given, because wall time measures the other work on the machine as well.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "report"))
from campaign_factory import campaign

from caraml.report.page import write_report
from caraml.results.store import Store

POINTS = 500
SECONDS, MEGABYTES = 10.0, 3.0
"""What a report of ``POINTS`` points may cost."""


def cost(store: Store, path: Path) -> tuple[float, float]:
    """CPU and wall seconds from the files of a store to its page."""
    cpu, wall = time.process_time(), time.perf_counter()
    write_report(store, store.records(), path, "A made-up campaign")
    return time.process_time() - cpu, time.perf_counter() - wall


def main(points: int) -> int:
    """Print the costs; 0 if they are within the limits."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        empty, _ = cost(Store(root / "nothing"), root / "nothing.html")
        cpu, wall = cost(campaign(root / "campaign", points), root / "campaign.html")
        size = (root / "campaign.html").stat().st_size / 1e6
    print(f"{points} points: {cpu:.1f} s of CPU ({cpu / empty:.0f} times a report of nothing), {wall:.1f} s of wall time, {size:.2f} MB")
    return 0 if cpu < SECONDS and size < MEGABYTES else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else POINTS))
