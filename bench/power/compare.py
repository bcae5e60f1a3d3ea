"""CARAML, jpwr, zeus and codecarbon side by side on the same fake GPU, whose energy is known exactly.

    python -m venv peers && peers/bin/pip install jpwr==0.0.10 zeus==0.16.0 codecarbon==3.3.2
    python bench/power/compare.py --peers peers/bin/python --out results.json

Every tool sees the same fake NVML (``tests/fakes/power/modules/pynvml.py``): 100 W and 500 W, or 300 W, with counter and
power refreshed every 20 ms. The load runs on the monotonic clock, so each tool's own processes see the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
FAKES = [ROOT / "tests" / "fakes" / "power" / name for name in ("modules/pynvml.py", "telegraph.py")]
TOOLS = ("caraml", "caraml (power)", "jpwr", "zeus", "zeus (power)", "codecarbon")
SIGNALS = {
    "constant": ["Constant", {}],
    "square 1 s": ["Square", {"period": 1.0}],
    "random 0.3 s": ["Telegraph", {"dwell": 0.3, "seed": 1, "length": 600.0}],
}
WINDOWS = {0.35: 8, 3.0: 3, 10.0: 1}
START_UP = {
    "caraml": ["{bin}/python", "-m", "caraml.power", "--methods", "nvml", "--out", "{tmp}/out", "--", "true"],
    "jpwr": ["{bin}/jpwr", "--methods", "pynvml", "--df-out", "{tmp}", "--df-filetype", "csv", "true"],
    "codecarbon": ["{bin}/codecarbon", "monitor", "--offline", "--country-iso-code", "DEU", "--", "true"],
}


def environment(signal: list[object], folder: Path) -> dict[str, str]:
    """What the fake GPU and the tools need to find each other."""
    command = folder / "nvidia-smi"  # codecarbon looks for it before it looks for the library
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    for fake in FAKES:
        shutil.copy(fake, folder)
    return {
        **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "power-bench-bytecode"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
        "FAKE_GPUS": json.dumps([{"uuid": "GPU-1", "signal": signal}]),
        "FAKE_T0": repr(time.monotonic()),
        "FAKE_LOST": str(folder / "lost"),
        "ZEUS_LOG_LEVEL": "ERROR",
    }


def ask(python: str, tool: str, signal: str, *words: str, timeout: float = 180) -> dict[str, object]:
    """One run of the worker."""
    with tempfile.TemporaryDirectory() as name:
        command = [python, str(WORKER), tool, *words]
        process = subprocess.Popen(
            command,
            env=environment(SIGNALS[signal], Path(name)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return {"failed": f"no answer within {timeout:g} s"}
        line = next((line for line in out.splitlines() if line.startswith("RESULT ")), None)
        return {"result": json.loads(line[7:])} if line else {"failed": (err.strip().splitlines() or ["nothing printed"])[-1][:200]}


def start_up(python: str, tool: str) -> float | None:
    """Median wall time of the tool's wrapper around ``true``, minus that of ``true`` [s]."""
    times = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as name:
            words = [word.format(tmp=name, bin=Path(python).parent) for word in START_UP[tool]]
            begin = time.monotonic()
            done = subprocess.run(words, env=environment(SIGNALS["constant"], Path(name)), cwd=name, capture_output=True, check=False)
            if done.returncode != 0:
                return None
            middle = time.monotonic()
            subprocess.run(["true"], check=True)
            times.append(middle - begin - (time.monotonic() - middle))
    return sorted(times)[2]


def main() -> None:
    """Measure everything, write it, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, help="interpreter that has jpwr, zeus and codecarbon")
    parser.add_argument("--out", type=Path, required=True, help="file for all results (JSON)")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS))
    given = parser.parse_args()
    python = {tool: sys.executable if tool.startswith("caraml") else given.peers for tool in TOOLS}
    found: dict[str, dict[str, object]] = {}
    for tool in given.tools:
        row: dict[str, object] = {}
        for signal in SIGNALS:
            for length, count in WINDOWS.items():
                row[f"{signal}, {length:g} s"] = ask(python[tool], tool, signal, "errors", str(length), str(count))
        row["cost"] = ask(python[tool], tool, "square 1 s", "cost", "10")
        row["dies"] = ask(python[tool], tool, "constant", "dies", timeout=40)
        row["start_up_s"] = start_up(python[tool], tool) if tool in START_UP else None
        found[tool] = row
        given.out.write_text(json.dumps(found, indent=1))
        print(f"{tool} done", file=sys.stderr, flush=True)
    print(table(found))


def summary(answer: dict[str, object]) -> str:
    """Largest error of a cell's windows in percent, and the largest bound."""
    if "failed" in answer:
        return str(answer["failed"])[:24]
    rows = answer["result"]
    assert isinstance(rows, list)
    if any(r["energy_j"] is None for r in rows):
        return "no number"
    worst = max((100 * (r["energy_j"] - r["truth_j"]) / r["truth_j"] for r in rows), key=abs)
    bounds = [100 * r["bound_j"] / r["truth_j"] for r in rows if r["bound_j"] is not None]
    return f"{worst:+.1f}" + (f" ± {max(bounds):.1f}" if bounds else "")


def table(found: dict[str, dict[str, object]]) -> str:
    """Markdown: one line per measurement, one column per tool."""
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for signal in SIGNALS:
        for length in WINDOWS:
            name = f"{signal}, {length:g} s"
            lines.append(f"| {name} | " + " | ".join(summary(row[name]) for row in found.values()) + " |")  # type: ignore[arg-type]

    def cell(row: dict[str, object], key: str) -> str:
        answer = row[key]
        if isinstance(answer, dict):
            return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in (answer.get("result") or answer).items())
        return "-" if answer is None else f"{answer:.2f}"

    for key, name in (("cost", "CPU ms per s"), ("dies", "GPU lost after 2 of 4 s, 300 W"), ("start_up_s", "wrapper over `true` [s]")):
        lines.append(f"| {name} | " + " | ".join(cell(row, key) for row in found.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
