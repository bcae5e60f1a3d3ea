"""Plant one fault at a time in a copy of the package and see whether the tests notice: ``python tests/mutation/run.py [--only NAME]``.

The same tests also run on copies without a fault, where they must pass: a test that fails anyway proves nothing. Exit status 1 if they do
not, if a fault survives, or no longer fits the source.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __package__:
    from tests.mutation.faults import FAULTS, Fault
else:
    from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LONGEST = 300.0
"""Seconds that the tests of one fault may take; a fault that makes them hang is caught, too."""
AT_A_TIME = 2
LOADED = ["torch.distributed", "pytest", "hypothesis", "numpy", "scipy.special", "pydantic", "duckdb", "typer", "rich.live", "jinja2"]
"""Libraries that a process has before it runs the tests of a fault; nothing of this project."""


def fits(fault: Fault) -> bool:
    """True when the fault's old text stands exactly once in today's source."""
    return (ROOT / "src" / "caraml" / fault.file).read_text(encoding="utf-8").count(fault.old) == 1


def caught(fault: Fault) -> bool:
    """True when the tests of ``fault`` fail on a copy of the package that has it."""
    return _failed(fault.name, fault.tests, lambda package: _plant(fault, package))


def _plant(fault: Fault, package: Path) -> None:
    path = package / fault.file
    path.write_text(path.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")


def _failed(name: str, tests: tuple[str, ...], edit: Callable[[Path], object]) -> bool:
    with tempfile.TemporaryDirectory(prefix="caraml-mutation-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for part in ("src", "tests", "bench/analysis", "bench/campaign"):
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        edit(copy / "src" / "caraml")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        process = context.Process(target=_run_tests, args=(folder, tests))
        process.start()
        process.join(LONGEST)
        if process.is_alive():
            os.killpg(process.pid or 0, 9)
            process.join()
            return True
        if process.exitcode not in (0, 1):  # no tests found, or they could not be collected: that is no proof
            raise RuntimeError(f"{name}: {(copy / 'output').read_text(encoding='utf-8')[-3000:]}")
        return process.exitcode == 1


def _run_tests(folder: str, tests: tuple[str, ...]) -> None:
    """In a process of its own: the tests of the copy in ``folder``."""
    os.setsid()
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    for name in list(sys.modules):
        if name.split(".")[0] in {"tests", "caraml"}:
            del sys.modules[name]
    sys.path.insert(0, f"{folder}/src")
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=f"{folder}/src", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    import pytest
    import torch

    torch.set_num_threads(1)
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def run(faults: list[Fault], say: Callable[[str], object]) -> int:
    """Try every fault and report; returns the exit status."""
    fitting = [fault for fault in faults if fits(fault)]
    for fault in faults:
        if fault not in fitting:
            say(f"does not fit    {fault.name}: the text to replace must stand exactly once in {fault.file}\n")
    alone = sorted({fault.tests for fault in fitting})
    survived = failing = 0
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for fault, noticed in zip(fitting, pool.map(caught, fitting), strict=True):
            survived += not noticed
            say(f"{'caught' if noticed else 'SURVIVED':<15} {fault.name}\n")
        for tests, failed in zip(alone, pool.map(lambda tests: _failed("no fault", tests, str), alone), strict=True):
            failing += failed
            if failed:
                say(f"FAILS ANYWAY    {' '.join(tests)}\n")
    lost = len(faults) - len(fitting)
    say(f"{len(fitting) - survived} of {len(fitting)} faults caught; {lost} do not fit; ")
    say(f"{failing} of {len(alone)} sets of tests fail without a fault\n")
    return 1 if survived or lost or failing else 0


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
