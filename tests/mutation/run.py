"""Plant one fault at a time in a copy of the package and see whether the tests notice: ``python tests/mutation/run.py [--only NAME]``.

Exit status 1 if a fault survives, or no longer fits the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if __package__:
    from tests.mutation.faults import FAULTS, Fault
else:
    from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LONGEST = 300.0
"""Seconds that the tests of one fault may take; a fault that makes them hang is caught, too."""


def fits(fault: Fault) -> bool:
    """True when the fault's old text stands exactly once in today's source."""
    return (ROOT / "src" / "caraml" / fault.file).read_text(encoding="utf-8").count(fault.old) == 1


def caught(fault: Fault) -> bool:
    """True when the tests of ``fault`` fail on a copy of the package that has it."""
    with tempfile.TemporaryDirectory(prefix="caraml-mutation-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "src" / "caraml" / fault.file
        path.write_text(path.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 1):  # no tests found, or they could not be collected: that is no proof
            raise RuntimeError(f"{fault.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        return done.returncode == 1


def run(faults: list[Fault], say: Callable[[str], object]) -> int:
    """Try every fault and report; returns the exit status."""
    lost = [fault.name for fault in faults if not fits(fault)]
    survived = []
    for fault in faults:
        if fault.name in lost:
            say(f"does not fit    {fault.name}: the text to replace must stand exactly once in {fault.file}\n")
            continue
        noticed = caught(fault)
        if not noticed:
            survived.append(fault.name)
        say(f"{'caught' if noticed else 'SURVIVED':<15} {fault.name}\n")
    tried = len(faults) - len(lost)
    say(f"{tried - len(survived)} of {tried} faults caught; {len(lost)} do not fit\n")
    return 1 if survived or lost else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="faults whose name contains this")
    only = parser.parse_args().only

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return run([fault for fault in FAULTS if only is None or only in fault.name], say)


if __name__ == "__main__":
    sys.exit(main())
