#!/usr/bin/env python3
"""What a campaign costs beside the work: N points of ``true``, side by side with JUBE.

    python bench/campaign/scale.py [--n 10,100,1000,10000] [--work DIR] [--jube CHECKOUT [--jube-n 10,100,1000]] [--out FILE]

Every verb is a process of its own; CPU time and peak memory are the kernel's (wait4). ``run`` splits the CPU time into the runner's own
and that of the shells and programs it started. JUBE (https://github.com/FZJ-JSC/JUBE) runs the same: one step, one work package per value,
each of which runs ``true``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

RUN = """import atexit, resource, runpy, sys
atexit.register(lambda: print('own', sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), file=sys.stderr))
sys.argv = ['caraml', *sys.argv[1:]]
runpy.run_module('caraml', run_name='__main__')
"""
"""Starts CARAML so that it says in the end how much CPU time its own process took."""
SUITE = """name = "scale"
title = "Nothing, many times"
[[benchmark]]
name = "true"
workload = "command"
params = {{ argv = ["true", "{{i}}"], energy = false, i = {values} }}
"""
XML = """<?xml version="1.0" encoding="UTF-8"?>
<jube><benchmark name="scale" outpath="run">
<parameterset name="p"><parameter name="i" type="int" mode="python">",".join(str(k) for k in range({n}))</parameter></parameterset>
<step name="s"><use>p</use><do>true</do></step>
<patternset name="pat"><pattern name="v" type="int">$jube_pat_int</pattern></patternset>
<analyser name="a"><use>pat</use><analyse step="s"><file>stdout</file></analyse></analyser>
<result><use>a</use><table name="t" style="csv" sort="i"><column>i</column></table></result>
</benchmark></jube>
"""


def timed(argv: list[str], folder: Path, environment: dict[str, str] | None = None) -> dict[str, float]:
    """Run a process: wall [s], CPU with its children [s], its own CPU if it says so [s], highest resident set of one process [MiB]."""
    begin = time.perf_counter()
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execvpe(argv[0], argv, {**os.environ, **(environment or {})})
    _, status, usage = os.wait4(pid, 0)
    found = {
        "wall_s": time.perf_counter() - begin,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_mib": usage.ru_maxrss / 1024,
        "exit_code": os.waitstatus_to_exitcode(status),
    }
    own = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.startswith("own ")]
    return found | ({"own_cpu_s": float(own[-1].split()[1])} if own else {})


def caraml(n: int, work: Path) -> dict[str, dict[str, float]]:
    """Every verb of CARAML over ``n`` points."""
    folder = fresh(work / f"caraml-{n}")
    (folder / "suite.toml").write_text(SUITE.format(values=list(range(n))))
    verb = [sys.executable, "-c", RUN]
    steps = {
        "run": ["run", "suite.toml", "--no-report"],
        "run again": ["run", "suite.toml", "--no-report"],
        "status": ["status", "scale"],
        "results": ["results", "scale", "--csv"],
        "sql": ["results", "--sql", "select count(*), avg(runtime) from records"],
    }
    return {name: timed([*verb, *arguments], folder) for name, arguments in steps.items()}


def jube(n: int, work: Path, checkout: Path) -> dict[str, dict[str, float]]:
    """Every command of JUBE over ``n`` work packages."""
    folder = fresh(work / f"jube-{n}")
    (folder / "b.xml").write_text(XML.format(n=n))
    command = [sys.executable, str(checkout / "bin" / "jube")]
    environment = {"PYTHONPATH": str(checkout)}
    steps = {
        "run": ["run", "--hide-animation", "b.xml"],
        "run again": ["continue", "--hide-animation", "run", "--id", "last"],
        "status": ["status", "run", "--id", "last"],
        "results": ["result", "run", "--id", "last"],
    }
    return {name: timed([*command, *arguments], folder, environment) for name, arguments in steps.items()}


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def exponent(costs: dict[int, float]) -> float:
    """Slope of log(cost) over log(n), by least squares: 1 is linear, 2 is quadratic."""
    points = [(math.log(n), math.log(cost)) for n, cost in costs.items()]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def show(name: str, n: int, verbs: dict[str, dict[str, float]]) -> None:
    """Print one row per verb."""
    for verb, cost in verbs.items():
        own = f"own {1e3 * cost['own_cpu_s'] / n:8.3f} ms/point" if "own_cpu_s" in cost else ""
        spent = f"wall {cost['wall_s']:8.2f} s  cpu {cost['cpu_s']:8.2f} s = {1e3 * cost['cpu_s'] / n:8.3f} ms/point"
        print(f"{name:7s} {n:6d} {verb:10s} {spent}  {cost['rss_mib']:6.0f} MiB  exit {cost['exit_code']} {own}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", default="10,100,1000,10000")
    parser.add_argument("--jube", type=Path, help="a checkout of JUBE")
    parser.add_argument("--jube-n", default="10,100,1000")
    parser.add_argument("--work", type=Path, default=Path("scale-work"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(
        options.work.resolve()
    )  # so that nobody else's campaign waits for this one, nor this one for theirs
    rows: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    tools = {"caraml": (options.n, caraml)} if options.n else {}
    if options.jube is not None:
        tools["jube"] = (options.jube_n, lambda n, work: jube(n, work, options.jube.resolve()))
    for name, (sizes, measure) in tools.items():
        for n in map(int, sizes.split(",")):
            rows.setdefault(name, {})[n] = measure(n, options.work.resolve())
            show(name, n, rows[name][n])
        runs = {n: verbs["run"] for n, verbs in rows[name].items()}
        if len(runs) > 2:
            # A process costs something before its first point; what grows is the rest.
            first = runs[min(runs)]["cpu_s"]
            grown = {n - min(runs): cost["cpu_s"] - first for n, cost in runs.items() if n > min(runs) and cost["cpu_s"] > first}
            print(f"{name:7s} run: cpu grows with n to the power of {exponent(grown):.2f}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
