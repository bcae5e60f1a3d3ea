"""``python -m caraml.power``: the meter from the command line, without the rest of CARAML."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from caraml.base.errors import CaramlError
from caraml.base.format import printable
from caraml.power.command import exit_like, measure, watch
from caraml.power.merge import merge_folder
from caraml.power.sampler import available_sources
from caraml.power.source import POWER_SOURCES, how_often, names_in

PROGRAM = "caraml power"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words[0] if words and words[0] in PARSERS else ""
    try:
        given = PARSERS[verb]().parse_args(words[1:] if verb else words)
        return {"": _run, "watch": lambda given: watch(**vars(given)), "sources": _sources, "merge": _merge}[verb](given)
    except CaramlError as error:
        print(printable(f"{PROGRAM}: {error}", lines=True), file=sys.stderr)
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


def _sources_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} sources",
        description="List every source: whether it is here, may be read, how to mend that, how often it refreshes.",
    )


def _merge_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} merge", description="Add up the results of all ranks in a folder.")
    parser.add_argument("folder", type=Path, help="what --out named")
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "": _run_parser,
    "watch": _watch_parser,
    "sources": _sources_parser,
    "merge": _merge_parser,
}
"""The parser of each verb; without one, a command is measured."""


def _run(given: argparse.Namespace) -> int:
    options = vars(given)
    command = options.pop("command")
    return exit_like(measure(command[1:] if command[:1] == ["--"] else command, idle_s=options.pop("idle"), **options))


def _sources(given: argparse.Namespace) -> int:
    for line in available_sources():
        state = "ok" if line["readable"] else "closed" if line["found"] else "absent"
        print(f"{line['name']:10s} {state:7s} {line['title']}")
        if line["reason"]:
            print(f"{'':19s}{line['reason']}" + (f"\n{'':19s}fix: {line['fix']}" if line["fix"] else ""))
        for channel in line["channels"]:
            seen = how_often(channel["measured_period_s"], channel["declared_period_s"])
            print(f"{'':19s}{channel['boundary']:8s} {channel['kind']:14s} {channel['label']} ({channel['id']}), {seen}")
    return 0


def _merge(given: argparse.Namespace) -> int:
    merged = merge_folder(given.folder)
    print(json.dumps(asdict(merged), indent=1, allow_nan=False))
    return 0 if merged.valid else 1


if __name__ == "__main__":
    sys.exit(main())
