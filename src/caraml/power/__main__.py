"""``python -m caraml.power``: the meter from the command line, without the rest of CARAML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from caraml.errors import CaramlError
from caraml.power.command import exit_like, measure, watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["watch"]:
            return _watch(words[1:])
        if words[:1] == ["sources"]:
            return _sources()
        if words[:1] == ["merge"]:
            return _merge(words[1:])
        return _run(words)
    except CaramlError as error:
        print(f"caraml power: {error}", file=sys.stderr)
        return int(error.exit_code)


def _methods(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m caraml.power",
        description="Measure the energy of a command. Other uses: 'watch' (power now), 'sources' (what is here), 'merge FOLDER'.",
    )
    parser.add_argument("--methods", type=_methods, help="sources, separated by commas (default: every one that answers)")
    parser.add_argument("--devices", type=_methods, help="accelerators by UUID, PCI address or index; 'all' ignores the mask")
    parser.add_argument("--interval", type=float, default=0.1, help="sampling interval in seconds (default: 0.1)")
    parser.add_argument("--idle", type=float, default=0.0, help="measure an idle baseline for this many seconds first")
    parser.add_argument("--out", type=Path, help="folder for the results (default: caraml-power/<job or time>)")
    parser.add_argument("--rank", type=int, help="number in the file names (default: what srun or mpirun says)")
    formats = parser.add_mutually_exclusive_group()
    for name in ("csv", "json", "parquet"):
        formats.add_argument(f"--{name}", dest="fmt", action="store_const", const=name, help=f"raw readings as {name}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    given = parser.parse_args(words)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    return exit_like(
        measure(
            command,
            methods=given.methods,
            interval=given.interval,
            out=given.out,
            fmt=given.fmt or "csv",
            rank=given.rank,
            idle_s=given.idle,
            devices=given.devices,
        )
    )


def _watch(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m caraml.power watch", description="Print the power now, once per second.")
    parser.add_argument("--methods", type=_methods)
    parser.add_argument("--interval", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, help="stop after this long (default: at Ctrl-C)")
    given = parser.parse_args(words)
    return watch(given.methods, given.interval, given.seconds)


def _sources() -> int:
    from caraml.power.doctor import available_sources

    for line in available_sources():
        state = "ok" if line["readable"] else "closed" if line["found"] else "absent"
        print(f"{line['name']:10s} {state:7s} {line['title']}")
        if line["reason"]:
            print(f"{'':19s}{line['reason']}" + (f"\n{'':19s}fix: {line['fix']}" if line["fix"] else ""))
        for channel in line["channels"]:
            period = channel["measured_period_s"]
            seen = "update period not seen" if period is None else f"updates every {1000 * period:.0f} ms"
            print(f"{'':19s}{channel['boundary']:8s} {channel['kind']:14s} {channel['label']} ({channel['id']}), {seen}")
    return 0


def _merge(words: list[str]) -> int:
    import json
    from dataclasses import asdict

    from caraml.power.merge import merge_folder

    parser = argparse.ArgumentParser(prog="python -m caraml.power merge", description="Add up the results of all ranks in a folder.")
    parser.add_argument("folder", type=Path)
    merged = merge_folder(parser.parse_args(words).folder)
    print(json.dumps(asdict(merged), indent=1, allow_nan=False))
    return 0 if merged.valid else 1


if __name__ == "__main__":
    sys.exit(main())
