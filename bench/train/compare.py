"""CARAML's training step beside those of its peers: programs of one process tree that take turns in random order.

    python bench/train/compare.py gpt-small gpt2 resnet50 --nanogpt DIR --timm FILE --torchvision FILE [--threads 1 2] [--json FILE]

Ratio first: time of the other's step over CARAML's in the same round, median over rounds with its 95 % bootstrap interval; above 1,
CARAML is faster. A peer whose path is not given is left out and named. All train in fp32; with --bf16 CARAML also trains in bf16, which is
compared with its own fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contestants import Spec, point_of
from gate import PIPES
from turns import Program, Turn, median, ratio, take_turns

from caraml.launch.script import environment_of

HERE = Path(__file__).parent
KNOBS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "keep_freed_memory": (False, ("gpt", "image_classification", "question_answering")),
    "fused_optimizer": (False, ("gpt", "image_classification", "question_answering")),
    "channels_last": (False, ("image_classification",)),
    "matmul": ("mkl", ("gpt", "question_answering")),
}
"""CARAML's knobs: the value that takes its gain away, and the workloads that it means anything for."""


@dataclass(frozen=True)
class Work:
    """What all contestants of one comparison train."""

    title: str
    workload: str
    params: dict[str, object]
    batch: int


WORKS = {
    "gpt-tiny": Work(
        "GPT 6 x 384, T 256, vocabulary 64",
        "gpt",
        {"preset": "30M", "layers": 6, "width": 384, "heads": 6, "sequence_length": 256, "vocab_size": 64},
        16,
    ),
    "gpt2": Work(
        "GPT-2 124M, T 256",
        "gpt",
        {"preset": "117M", "layers": 12, "width": 768, "heads": 12, "sequence_length": 256, "vocab_size": 50304},
        4,
    ),
    "bert": Work("BERT base, answers in 128 tokens", "question_answering", {"preset": "base", "tokens": 128}, 4),
    "resnet50-b16": Work("ResNet-50, 224 pixels", "image_classification", {"model": "resnet50", "image_size": 224}, 16),
    "resnet50-b32": Work("ResNet-50, 224 pixels", "image_classification", {"model": "resnet50", "image_size": 224}, 32),
}


def contestants(work: Work, asked: argparse.Namespace, threads: int, scratch: Path) -> tuple[dict[str, Spec], list[str]]:
    """Who trains, by name, and who was left out and why."""
    data = "synthetic" if work.workload == "gpt" else "synthetic-device"
    found: dict[str, Spec] = {}
    missing: list[str] = []

    def add(name: str, peer: str, *, path: str | None = None, needs_path: bool = True, **options: bool) -> None:
        wanted = {"eager", "compiled"} if asked.compile == "both" else {asked.compile}
        if ("compiled" if options.get("compile") else "eager") not in wanted:
            return
        if needs_path and path is None:
            missing.append(f"{name}: no path was given (--{peer})")
            return
        folder = scratch / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        params = {**work.params, "data": data} if peer == "caraml" else work.params
        environment = {"OMP_NUM_THREADS": str(threads)}
        given = str(Path(path).resolve()) if path else None
        found[name] = Spec(peer, work.workload, params, work.batch, path=given, scratch=str(folder), environment=environment, **options)

    for compiled in (False, True):
        tail = " compiled" if compiled else ""
        add(f"CARAML{tail}", "caraml", needs_path=False, compile=compiled)
        if work.workload == "gpt":
            add(f"nanoGPT{tail}", "nanogpt", path=asked.nanogpt, compile=compiled)
        if work.workload in ("gpt", "question_answering"):
            if importlib.util.find_spec("accelerate") is not None:
                add(f"HF Trainer{tail}", "trainer", needs_path=False, compile=compiled)
            else:
                missing.append(f"HF Trainer{tail}: the package accelerate is not installed")
            if not compiled and work.workload == "gpt":
                add("optimum-benchmark", "optimum", path=asked.optimum)
        else:
            add(f"timm channels_last{tail}", "timm", path=asked.timm, compile=compiled, channels_last=True)
            add(f"timm{tail}", "timm", path=asked.timm, compile=compiled)
            add(f"torchvision{tail}", "torchvision", path=asked.torchvision, compile=compiled)
    return _with_environments(found, threads, asked), missing


def _with_environments(found: dict[str, Spec], threads: int, asked: argparse.Namespace) -> dict[str, Spec]:
    """CARAML's programs in the environment of its workers; if asked for, also once without each knob, and once in bf16."""
    everyone: dict[str, Spec] = {}
    for name, spec in found.items():
        if spec.peer != "caraml":
            everyone[name] = spec
            continue
        everyone[name] = _in_its_environment(spec, threads)
        if asked.bf16:
            everyone[f"{name} in bf16"] = _in_its_environment(replace(spec, precision="bf16"), threads)
        if asked.knobs:
            for knob, (other, workloads) in KNOBS.items():
                if spec.workload in workloads:
                    everyone[f"{name} without {knob}"] = _in_its_environment(replace(spec, knobs={knob: other}), threads)
    only: Sequence[str] | None = asked.only
    return {name: spec for name, spec in everyone.items() if only is None or spec.peer == "caraml" or any(part in name for part in only)}


def _in_its_environment(spec: Spec, threads: int) -> Spec:
    return replace(spec, environment=environment_of(point_of(spec), threads))


def compare(work: Work, asked: argparse.Namespace, threads: int, scratch: Path) -> tuple[dict[str, list[Turn]], list[str]]:
    """Turns of every contestant that trains, and who does not and why."""
    specs, missing = contestants(work, asked, threads, scratch)
    programs = []
    try:
        for name, spec in specs.items():
            log = Path(spec.scratch) / "log"
            program = Program(name, [str(HERE / "contestants.py"), spec.to_json()], spec.environment, log, PIPES)
            failed = program.started()
            if failed is None:
                programs.append(program)
                print(f"  {name} trains", file=sys.stderr)
            else:
                missing.append(f"{name}: {failed}")
                program.end()
        return take_turns(programs, asked.rounds, asked.seconds), missing
    finally:
        for program in programs:
            program.end()


def table(turns: dict[str, list[Turn]]) -> list[str]:
    """A Markdown table: ratios to CARAML's programs first, then what a step took."""
    ours = [name for name in ("CARAML", "CARAML compiled") if name in turns]
    heads = [f"over {name}, {kind}" for name in ours for kind in ("wall", "CPU")]
    lines = ["| step of | " + " | ".join([*heads, "step [ms]", "CPU of a step [ms]"]) + " |", "|---" * (len(heads) + 3) + "|"]
    for name, own in sorted(turns.items(), key=lambda item: statistics.median(turn.cpu for turn in item[1])):
        cells = [
            str(ratio([getattr(turn, kind) for turn in own], [getattr(turn, kind) for turn in turns[base]])) if name != base else "1"
            for base in ours
            for kind in ("wall", "cpu")
        ]
        cells += [str(median([1e3 * getattr(turn, kind) for turn in own])) for kind in ("wall", "cpu")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Compare what was asked for, print the tables, keep every turn if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", choices=list(WORKS))
    parser.add_argument("--nanogpt", help="checkout of karpathy/nanoGPT")
    parser.add_argument("--optimum", help="folder with optimum-benchmark and the transformers that it wants")
    parser.add_argument("--timm", help="train.py of huggingface/pytorch-image-models")
    parser.add_argument("--torchvision", help="references/classification/train.py of pytorch/vision")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, os.cpu_count() or 1])
    parser.add_argument("--compile", choices=["eager", "compiled", "both"], default="both")
    parser.add_argument("--only", nargs="+", help="parts of peers' names; all if absent")
    parser.add_argument("--knobs", action="store_true", help="CARAML also without each of its knobs")
    parser.add_argument("--bf16", action="store_true", help="CARAML also in bf16, on a CPU that has units for it")
    parser.add_argument("--batch", type=int, help="in place of the comparison's own")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn, about")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    random.seed(asked.seed)
    kept = []
    for name in asked.works:
        work = WORKS[name] if asked.batch is None else replace(WORKS[name], batch=asked.batch)
        for threads in asked.threads:
            before = os.getloadavg()[0]
            with tempfile.TemporaryDirectory(prefix="caraml-bench-") as scratch:
                turns, missing = compare(work, asked, threads, Path(scratch))
            loads = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
            print(f"\n{work.title}, batch {work.batch}; fp32, {threads} threads, {asked.rounds} rounds; {loads}")
            print(f"torch {torch.__version__}, {platform.machine()}\n")
            print("\n".join(table(turns)))
            print("".join(f"\nleft out: {reason}" for reason in missing), flush=True)
            own = {program: [asdict(turn) for turn in values] for program, values in turns.items()}
            kept.append(
                {
                    "work": name,
                    "batch": work.batch,
                    "threads": threads,
                    "load": [before, os.getloadavg()[0]],
                    "turns": own,
                    "left_out": missing,
                }
            )
            if asked.json is not None:
                asked.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
