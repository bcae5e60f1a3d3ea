"""What it takes to begin: `caraml --help`, `caraml results` on 100 records, a worker's way to its first step; and which imports cost most.

    python bench/startup.py [--rounds N] [--imports]

User and system time of the processes beside wall time: on a busy machine only the former says anything of CARAML. Medians of rounds in
turns, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench" / "train"), str(ROOT)]
RECORDS = 100
TARGETS = {"caraml --help": 0.15, "caraml results, 100 records": 0.5, "worker, imports to first step": 8.0}
POINT = {"preset": "4M", "data": "synthetic"}


def run(command: list[str]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a command and its children. Raises where it fails."""
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    wall, after = time.perf_counter() - begin, os.times()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def make_records(folder: Path) -> None:
    """A folder of records as campaigns leave it."""
    from caraml.results.store import Store, write_record
    from tests.report.record_factory import make_point, make_record
    from tests.stores import remember_suite

    store, record = Store(folder), make_record()
    keys = []
    for index in range(RECORDS):
        point = make_point(repeat=index)
        write_record(store.new_attempt(point), record.model_copy(update={"key": point.key, "attempt": 1, "point": point}))
        keys.append(point.key)
    remember_suite(store, point.suite, keys)


def worker_command(folder: Path) -> list[str]:
    """A worker that trains a small GPT for a window of four steps, without idle baseline."""
    from caraml.suite.model import Policy
    from caraml.workloads import load_workload
    from tests.report.record_factory import make_point

    params = load_workload("gpt").params.model_validate(POINT).model_dump(mode="json")
    measure = Policy(min_seconds=0, max_seconds=1, min_steps=4, max_steps=4, idle_seconds=0, warm_up_max_seconds=0.1)
    point = make_point(workload="gpt", params=params, measure=measure, global_batch=1, micro_batch=1, device_class="cpu", mode="compute")
    folder.mkdir()
    (folder / "point.json").write_text(point.model_dump_json(), encoding="utf-8")
    return [sys.executable, "-m", "caraml.worker", str(folder)]


def first_step(command: list[str], attempt: Path) -> tuple[float, float]:
    """Seconds until the end of a worker's first step as its record tells, less the probes; and CPU seconds of the whole worker."""
    _, cpu = run([*command[:-1], str(attempt)])
    record = json.loads((attempt / "record.json").read_text(encoding="utf-8"))
    probe = sum(phase["end"] - phase["start"] for phase in record["phases"] if phase["name"] in ("probe", "idle"))
    return record["metrics"]["time_to_first_step"]["value"] - probe, cpu


def imports(command: list[str], most: int = 12) -> list[tuple[float, str]]:
    """The imports that took longest by themselves: seconds and module."""
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, check=False, cwd=ROOT)
    rows = [line.split(":", 1)[1].split("|") for line in done.stderr.splitlines() if line.startswith("import time:") and "[us]" not in line]
    return sorted(((int(own) / 1e6, name.strip()) for own, _, name in rows), reverse=True)[:most]


def main() -> None:
    """Measure and print."""
    from turns import median

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--imports", action="store_true", help="also the imports that take longest")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results"
        make_records(results)
        program = [sys.executable, "-m", "caraml"]
        commands = {"caraml --help": [*program, "--help"], "caraml results, 100 records": [*program, "results", "--out", str(results)]}
        template = Path(scratch) / "1"
        worker = worker_command(template)
        told: dict[str, list[tuple[float, float]]] = {name: [] for name in TARGETS}
        for number in range(asked.rounds):
            for name in random.sample(list(TARGETS), len(TARGETS)):
                if name in commands:
                    told[name].append(run(commands[name]))
                    continue
                attempt = Path(scratch) / str(number + 2)
                attempt.mkdir()
                (attempt / "point.json").write_bytes((template / "point.json").read_bytes())
                told[name].append(first_step(worker, attempt))
        print(f"load {os.getloadavg()[0]:.1f}\n\n| | wall [s] | CPU [s] | target [s] |\n|---|---|---|---|")
        for name, times in told.items():
            print(f"| {name} | {median([wall for wall, _ in times])} | {median([cpu for _, cpu in times])} | {TARGETS[name]} |")
        if asked.imports:
            for name, command in commands.items():
                print(f"\n{name}:")
                print("\n".join(f"  {seconds * 1e3:6.1f} ms  {module}" for seconds, module in imports(command)))


if __name__ == "__main__":
    main()
