"""Entry point of ``caraml`` and ``python -m caraml``."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from caraml.base.errors import CaramlError, ExitCode
from caraml.base.files import AWAY
from caraml.base.format import spell_out

if TYPE_CHECKING:
    import typer

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM)
_NAMES = {errno.ENOTDIR: "a file, expected a folder", errno.EISDIR: "a folder, expected a file"}
_NAMES |= {errno.ELOOP: "links in a circle", errno.ENAMETOOLONG: "a name that is too long"}
"""What a disk says that is full or not ours to write to, and of a name that a user must mend; any other failure of the system is a fault of
ours and shows its trace."""

NVIDIA = Path("/proc/driver/nvidia")
"""Where NVIDIA's driver is; elsewhere CUDA's variables are no part of the surroundings, and none is put into records."""


def main() -> None:
    """Run the command line: errors that users can mend become a sentence and an exit code.

    ``caraml power`` goes straight to the meter: a wrapper around a command must start in no time, and the command as it would without.
    """
    spell_out()
    if sys.argv[1:2] == ["power"]:
        from caraml.power.__main__ import main as measure

        sys.exit(measure(sys.argv[2:]))
    from caraml.cli import say

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    if NVIDIA.exists():
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # before torch is loaded: CUDA counts GPUs as drivers do
    try:
        verbs()(prog_name="caraml")
    except CaramlError as error:
        say(f"caraml: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno in _NAMES:
            whole = Path(error.filename or "a file")
            place = next((path for path in reversed([whole, *whole.parents]) if os.path.isfile(path)), whole)  # noqa: PTH113
            say(f"caraml: {place}: found {_NAMES[error.errno]}\n  next step: name another, or move it away", err=True)
            sys.exit(ExitCode.WRONG_INPUT)
        if error.errno in AWAY and error.filename is not None:
            step = "run the same command again once its disk answers: campaigns go on where they stopped"
            say(f"caraml: {error.filename}: {error.strerror}; results that are there stay whole\n  next step: {step}", err=True)
            sys.exit(ExitCode.ENVIRONMENT_UNFIT)
        if error.errno not in _DISK:
            raise
        step = "make room there" if error.errno in _FULL else "have its owner open it to you, or name another place: --out, --to"
        text = f"{error.filename or 'a file'}: {error.strerror}; results that are there stay whole\n  next step: {step}"
        say(f"caraml: {text}", err=True)
        sys.exit(ExitCode.ENVIRONMENT_UNFIT)
    except ModuleNotFoundError as error:
        package = (error.name or "caraml").partition(".")[0]
        if package == "caraml":
            raise
        from caraml.workloads import how_to_install

        where = ", or run the same in a job that has it" if package == "torch" else ""
        say(f"caraml: needs {package}, not installed here\n  next step: {how_to_install([package])}{where}", err=True)
        sys.exit(ExitCode.ENVIRONMENT_UNFIT)


def verbs() -> typer.Typer:
    """The application with its verbs, in the order in which help shows them: their files register them when they are imported."""
    from caraml.cli import app, run, results, check, setup  # noqa: F401  # isort: skip

    return app


def _stop(number: int, frame: FrameType | None) -> None:
    """An administrator's or a batch system's wish to end takes the same way out as Ctrl-C: what runs is ended, and its record says so."""
    from caraml.cli import say

    del frame
    say("caraml: stopped; run the same command again to go on", err=True)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
