"""The meter from the command line, without the rest of CARAML: ``python -m caraml.power``.

A command that is measured keeps its exit code and signals, and what it drew is written, whatever happens to either.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from caraml.base import processes
from caraml.base.errors import CaramlError, InputError
from caraml.base.files import write_file
from caraml.base.format import printable
from caraml.base.signals import on_signals
from caraml.power.merge import merge_folder
from caraml.power.meter import Meter
from caraml.power.model import BLOCKING, ENERGY_FLAGS, WindowEnergy
from caraml.power.result import CommandResult, Format, ResultFolder, energy_frame, svg, write_hdf5
from caraml.power.sampler import available_sources
from caraml.power.source import POWER_SOURCES, check_methods, chosen_sources, entries, how_often, names_in, source_names

PROGRAM = "caraml power"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCONT)
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a command that could not be started, as shells have them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words[0] if words and words[0] in PARSERS else ""
    try:
        given = PARSERS[verb]().parse_args(words[1:] if verb else words)
        if not verb:
            return _run(given)
        code = {"watch": lambda given: watch(**vars(given)), "sources": _sources, "merge": _merge}[verb](given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read has left, as ``| head`` does
        if not verb:
            raise
        with suppress(BrokenPipeError):
            sys.stdout.close()  # or the interpreter tries again at its end
        return 128 + signal.SIGPIPE
    except CaramlError as error:
        _say(f"{PROGRAM}: {error}", file=sys.stderr)
        return int(error.exit_code)


METHODS = f"sources, separated by commas (default: those that {POWER_SOURCES} names, else every one that answers)"


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure the energy of a command. Other uses: 'watch' (power now), 'sources' (what is here), 'merge FOLDER'.",
    )
    parser.add_argument("--methods", type=names_in, help=METHODS)
    parser.add_argument(
        "--devices", type=names_in, help="accelerators by UUID, PCI address or number among those that open; 'all' ignores the mask"
    )
    parser.add_argument("--interval", type=float, default=0.1, help="sampling interval in seconds (default: 0.1)")
    parser.add_argument("--idle", type=float, default=0.0, help="measure an idle baseline for this many seconds first")
    parser.add_argument("--out", type=Path, help="folder for the results (default: caraml-power/<job or time>)")
    parser.add_argument("--rank", type=int, help="number in the file names (default: what srun or mpirun says)")
    formats = parser.add_mutually_exclusive_group()
    formats.set_defaults(fmt="csv")
    for name in ("csv", "json", "parquet"):
        formats.add_argument(f"--{name}", dest="fmt", action="store_const", const=name, help=f"raw readings as {name}")
    parser.add_argument("--h5", action="store_true", help="power and energy also as HDF5 files like jpwr's (pandas)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    return parser


def _watch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} watch", description="Print the power now, once per second.")
    parser.add_argument("--methods", type=names_in, help=METHODS)
    parser.add_argument("--interval", type=float, default=0.1, help="sampling interval in seconds (default: 0.1)")
    parser.add_argument("--seconds", type=float, help="stop after this long (default: at Ctrl-C)")
    return parser


def _merge_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} merge", description="Add up the results of all ranks in a folder.")
    parser.add_argument("folder", type=Path, help="what --out named")
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "": _run_parser,
    "watch": _watch_parser,
    "sources": lambda: argparse.ArgumentParser(
        prog=f"{PROGRAM} sources",
        description="List every source: whether it is here, may be read, how to mend that, how often it refreshes.",
    ),
    "merge": _merge_parser,
}
"""The parser of each verb; without one, a command is measured."""


def _say(text: str, file: TextIO | None = None) -> None:
    """Print text, part of which a meter's file or a controller may have: nothing in it commands the terminal."""
    print(printable(text, lines=True), file=file, flush=True)


def _run(given: argparse.Namespace) -> int:
    options = vars(given)
    command = options.pop("command")
    return exit_like(measure(command[1:] if command[:1] == ["--"] else command, idle_s=options.pop("idle"), **options))


def _sources(given: argparse.Namespace) -> int:
    for line in available_sources():
        state = "ok" if line["readable"] else "closed" if line["found"] else "absent"
        _say(f"{line['name']:10s} {state:7s} {line['title']}")
        if line["reason"]:
            _say(f"{'':19s}{line['reason']}" + (f"\n{'':19s}fix: {line['fix']}" if line["fix"] else ""))
        for channel in line["channels"]:
            seen = how_often(channel["measured_period_s"], channel["declared_period_s"])
            _say(f"{'':19s}{channel['boundary']:8s} {channel['kind']:14s} {channel['label']} ({channel['id']}), {seen}")
    return 0


def _merge(given: argparse.Namespace) -> int:
    merged = merge_folder(given.folder)
    print(json.dumps(asdict(merged), indent=1, allow_nan=False))
    return 0 if merged.valid else 1


def exit_like(result: CommandResult) -> int:
    """End as the command ended: by the same signal, if it was one, so that whoever waits for this process sees it."""
    assert result.exit_code is not None, "it has ended"
    if result.signal is not None and result.signal != signal.SIGKILL:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(result.signal, signal.SIG_DFL)
        os.kill(os.getpid(), result.signal)
    return result.exit_code


def measure(
    argv: Sequence[str],
    *,
    methods: Sequence[str] | None = None,
    interval: float = 0.1,
    out: Path | None = None,
    fmt: Format = "csv",
    h5: bool = False,
    rank: int | None = None,
    idle_s: float = 0.0,
    devices: Sequence[str] | None = None,
) -> CommandResult:
    """Run and measure the command ``argv``; write results, report on standard error; return how it ended (the exit code as a
    shell reports it, 128 + number if a signal ended it) and what it drew.

    Args:
        methods: names of sources; ``None`` for those that ``CARAML_POWER`` names, else every one that answers.
        out: folder for the results; ``None`` for ``caraml-power/<job or time>``. Nothing in it is overwritten.
        fmt: format of the raw readings; the result itself is always JSON, with ``h5`` besides as HDF5 files like jpwr's.
        rank: number in the names of the files; ``None`` to take it from the launcher (srun, mpirun), if there is one.
        idle_s: measure this long before the command starts [s], and report net energy beside gross.
        interval, devices: as for ``Meter``.
    """
    if not argv:
        raise InputError("there is no command to measure", "put it after two dashes: caraml power -- python train.py")
    if not idle_s >= 0:
        raise InputError(f"the idle time is {idle_s!r} s, expected 0 or more")
    methods = methods or chosen_sources()
    check_methods(methods)
    if devices is not None and not devices:
        raise InputError("--devices names no accelerator", "leave it out, or name some: --devices 0,1")
    rank = rank if rank is not None else processes.rank()
    election = processes.Election() if rank is not None else None
    if election and election.trouble:
        print(f"caraml power: no lock among the ranks of this node: {election.trouble}", file=sys.stderr)
    names = methods or source_names(auto_only=True)
    if election and not election.elected:  # one process of a node reads what all of them share
        names = [name for name in names if entries()[name.partition(":")[0]].accelerator]
    # Asked for by nobody, a source first looks for its driver's files: that keeps the start short.
    meter = Meter("auto" if not methods and (not election or election.elected) else names, devices, interval)
    folder = ResultFolder(out or _default_folder(), fmt, rank, h5)
    meter.store.listen(lambda readings: folder.add(readings, meter.store.channels))
    result = CommandResult(list(argv), WindowEnergy("command", 0.0, 0.0), rank=rank, world_size=processes.world_size())
    folder.write(result)
    try:
        return _measured(meter, folder, result, idle_s, devices)
    finally:
        if election:
            election.close()


def _measured(meter: Meter, folder: ResultFolder, result: CommandResult, idle_s: float, devices: Sequence[str] | None) -> CommandResult:
    """Start the meter, run the command inside a window, write the result; Ctrl-C once more does not end the writing."""
    with ExitStack() as until_written:
        with meter:
            try:
                meter.check_devices(devices)
            except InputError:
                folder.discard()
                raise
            result.channels = meter.channels
            folder.write(result)
            if idle_s > 0:
                with meter.window("idle") as quiet:
                    time.sleep(idle_s)
                result.idle = quiet.energy
            child = _Child(result.command)
            # What is ignored, as SIGHUP under ``nohup``, stays so, and is ignored by the command as well.
            heeded = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
            until_written.enter_context(on_signals(heeded, child.forward))
            start = meter.mark()
            code = child.run()
            end = meter.mark()
            result.energy = meter.energy("command", start, end, result.idle)
        result.channels, result.missing_sources = meter.channels, meter.reasons
        _set_status(result, code, child.trouble)
        _report(result, _write(meter, folder, result), folder.trouble)
    return result


def _set_status(result: CommandResult, code: int, trouble: str | None) -> None:
    """Status and validity: the energy of a command that was killed is known, but it is not the command's."""
    result.status = "finished"
    result.exit_code, result.signal = (code, None) if code >= 0 else (128 - code, -code)
    result.valid, result.reason = result.energy.valid, result.energy.reason
    if trouble is not None:
        result.valid, result.reason = False, trouble
    elif code < 0:
        result.valid, result.reason = False, f"the command was ended by {signal.Signals(-code).name}"


class _Child:
    """The command as a child process, to which signals are passed on."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        """Set when its process is known here: it may run before, and a signal that comes then waits."""
        self.trouble: str | None = None
        """Why it could not be started."""

    def run(self) -> int:
        """Start it and wait for its end; the exit code, or minus the signal that ended it."""
        try:
            self._process = subprocess.Popen(self._argv)  # noqa: S603 -- the command that is to be measured
            self._started.set()
            return self._process.wait()
        except OSError as error:
            self.trouble = f"{self._argv[0]} cannot be started: {error.strerror}"
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        finally:
            self._started.set()

    def forward(self, number: int) -> None:
        self._started.wait()
        if self._process is not None and not (number == signal.SIGINT and _in_the_foreground()):
            with suppress(PermissionError):  # it runs as somebody else
                self._process.send_signal(number)  # does nothing to one that has ended


def _in_the_foreground() -> bool:
    """Whether Ctrl-C at the terminal reaches the command by itself, wherever standard input comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _default_folder() -> Path:
    """Where results go if nobody says: by job and step, so that all ranks meet, else by time and process."""
    name = processes.job() if processes.rank() is not None else f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    return Path("caraml-power") / name


def _write(meter: Meter, folder: ResultFolder, result: CommandResult) -> list[Path]:
    """Write result and picture. If that fails now, the result goes to standard error: it must not be lost."""
    try:
        files = folder.finish(result)
        if result.energy.channels:
            picture = folder.folder / folder.path.name.replace("energy", "power").replace(".json", ".svg")
            write_file(picture, svg(meter.store, result.energy.start, result.energy.end, " ".join(result.command)[:100]), sync="none")
            files.append(picture)
        if folder.h5:
            suffix = f"{platform.node()}.{os.getpid()}" if result.rank is None else str(result.rank)
            files += write_hdf5(folder.folder, meter.power_frame(), energy_frame(result.energy), suffix)
        return files
    except OSError as error:
        print(f"caraml power: cannot write to {folder.folder}: {error.strerror}; the result is:", file=sys.stderr)
        print(json.dumps(asdict(result), allow_nan=False), file=sys.stderr)
        return []


def _report(result: CommandResult, files: list[Path], trouble: str | None) -> None:
    energy = result.energy
    lines = [f"caraml power: {energy.duration_s:.3f} s, exit code {result.exit_code}"]
    for name, total in energy.boundaries.items():
        if total.energy_j is None:
            known = "" if total.partial_j is None else f", {total.partial_j:.6g} J seen"
            lines.append(f"  {name:8s} unknown{known}: {total.reason}")
            continue
        idle = "" if total.idle_j is None else f", of which idle {total.idle_j:.6g} J"
        peak = "" if total.peak_w is None else f", peak {total.peak_w:.1f} W"
        doubt = "" if total.valid else f" NOT VALID ({total.reason})"
        mean = "" if total.mean_w is None else f", mean {total.mean_w:.1f} W"
        mean += "" if total.mean_va is None else f" of {total.mean_va:.1f} VA ({total.mean_va * energy.duration_s / 3600:.3g} VAh)"
        lines.append(f"  {name:8s} {total.energy_j:.6g} J ± {total.bound_j or 0.0:.2g} J{mean}{peak}{idle}{doubt}")
    if not result.valid and result.reason and (not energy.boundaries or result.signal):
        lines.append(f"  not valid: {result.reason}")
    lines += [f"  {flag}: {ENERGY_FLAGS.get(flag, 'a flag of a plug-in')}" for flag in energy.flags if flag not in BLOCKING]
    lines += [f"  {trouble}"] if trouble else []
    lines.append(f"  written: {', '.join(str(f) for f in files) or 'nothing'}")
    _say("\n".join(lines), file=sys.stderr)


def watch(methods: Sequence[str] | None = None, interval: float = 0.1, seconds: float | None = None, every: float = 1.0) -> int:
    """Print the power of every domain once per ``every`` seconds, until interrupted or for ``seconds``. Exit code 3: no sensor."""
    methods = methods or chosen_sources()
    check_methods(methods)
    with Meter(methods or "auto", None, interval) as meter:
        if not meter.channels:
            _say("no power sensor:\n  " + "\n  ".join(meter.reasons), file=sys.stderr)
            return 3
        end = None if seconds is None else time.monotonic() + seconds
        try:
            while end is None or time.monotonic() < end:
                time.sleep(every if end is None else min(every, max(end - time.monotonic(), 0.0)))
                shown = (f"{c.label} [{c.boundary}] {'-' if watts is None else f'{watts:.1f} W'}" for c, watts in meter.powers())
                _say("  ".join((time.strftime("%H:%M:%S"), *shown)))
        except KeyboardInterrupt:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
