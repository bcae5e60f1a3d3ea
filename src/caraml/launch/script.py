"""The script of a point: everything that decides how it runs, in one file that can be read, edited, and started by hand."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from caraml.results.files import write_atomically
from caraml.results.finish import LOG
from caraml.suite.model import Point

SCRIPT = "run.sh"

# glibc returns every large block to the kernel when it is freed, and takes it back in the next step: page faults that cost a fifth of a
# convolution network's rate on CPUs. These limits keep the blocks.
_KEEP_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}


def environment_of(point: Point, threads: int) -> dict[str, str]:
    """Variables that the point's processes run under; ``threads`` are the node's usable CPUs."""
    variables = {"OMP_NUM_THREADS": str(max(threads // point.devices, 1))}
    if point.device_class == "cpu":
        variables |= _KEEP_BLOCKS
    elif point.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to give the same bits every time
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)  # noqa: PTH100  -- the script changes folder
    return variables


def command_of(point: Point, folder: Path) -> list[str]:
    """The worker's command line: plain Python for one process, torchrun for several."""
    worker = ["-m", "caraml.worker", str(folder)]
    if point.world == 1:
        return [sys.executable, *worker]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={point.devices}", *worker]


def write_script(point: Point, folder: Path, threads: int) -> Path:
    """Write ``run.sh`` into an attempt's folder and return its path."""
    folder = folder.resolve()
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment_of(point, threads).items())
    quoted = shlex.quote(str(folder))
    text = f"""#!/usr/bin/env bash
# {_one_line(point.label)}; point {point.key}, attempt {folder.name}
set -u
cd {quoted}
{exports}

{shlex.join(command_of(point, folder))} >>{LOG} 2>&1
code=$?

# A worker that measured has written its record; for any other the record says what happened.
[ "$code" -eq 0 ] || {shlex.quote(sys.executable)} -m caraml.results.finish {quoted} "$code"
exit "$code"
"""
    path = folder / SCRIPT
    write_atomically(path, text)
    path.chmod(0o755)
    return path


def _one_line(text: str) -> str:
    """Text that cannot leave its comment."""
    return " ".join(text.split())
