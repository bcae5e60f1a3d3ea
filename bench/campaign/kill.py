#!/usr/bin/env python3
"""Kill the runner of a campaign with SIGKILL at random instants, start it again, and count what ran.

    python bench/campaign/kill.py [--kills 50] [--points 200] [--seed 0] [--metered] [--work DIR]

Every point appends its number to one file. In the end each number must stand there exactly once (nothing lost, nothing twice), every
point must have one record, whole and ok, and every restart must have worked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

SUITE = """name = "kill"
title = "Killed again and again"
[[benchmark]]
name = "append"
workload = "command"
params = {{ argv = ["sh", "-c", "echo b; echo {{i}} >>{ran}; sleep {{pause}}; echo e"], pause = {pause}, {how}, i = {values} }}
measure = {{ idle_seconds = 0 }}
"""

_METERED = 'marks = { begin = "^b$", end = "^e$" }'
"""With marks a worker watches the program."""


def campaign(folder: Path) -> subprocess.Popen[bytes]:
    """Start the campaign."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "caraml", "run", "suite.toml", "--no-report"],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "CARAML_POWER": "fake:constant"},  # its turns on the device are its own
        )


def torment(folder: Path, kills: int, points: int, seed: int, metered: bool) -> dict[str, object]:
    """Kill ``kills`` times, let it end, and say what was found."""
    folder.mkdir(parents=True)
    text = SUITE.format(ran=folder / "ran", pause=0.05, how=_METERED if metered else "energy = false", values=list(range(points)))
    (folder / "suite.toml").write_text(text)
    chance, killed, early = random.Random(seed), 0, 0
    while killed < kills:
        runner = campaign(folder)
        time.sleep(chance.uniform(0.3, 2.5))
        if runner.poll() is not None:
            early += 1
            break  # it was done before we came
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait()
        killed += 1
    last = campaign(folder).wait()
    ran = Counter((folder / "ran").read_text().split())
    records = list((folder / "caraml-results" / "points").glob("*/*/record.json"))
    statuses = Counter(json.loads(path.read_text())["status"] for path in records)
    done = {path.parents[1].name for path in records}
    return {
        "kills": killed,
        "exit code of the last run": last,
        "points": points,
        "never ran": points - len(ran),
        "ran twice or more": sum(count > 1 for count in ran.values()),
        "points without a record": points - len(done),
        "records": dict(statuses),
        "right": last == 0 and len(ran) == points and set(ran.values()) == {1} and len(done) == points and set(statuses) == {"ok"},
    }


def main() -> None:
    """Torment and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metered", action="store_true", help="through the worker instead of the shell alone")
    parser.add_argument("--work", type=Path, default=Path("kill-work"))
    options = parser.parse_args()
    found = torment(options.work.resolve(), options.kills, options.points, options.seed, options.metered)
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["right"] else 1)


if __name__ == "__main__":
    main()
