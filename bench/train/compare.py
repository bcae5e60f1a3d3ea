"""CARAML's step beside those of its peers: programs of one process tree that take turns in random order.

    python bench/train/compare.py gpt2 resnet50-b16 --nanogpt DIR --timm FILE --torchvision FILE [--threads 1 2] [--json FILE]
    python bench/train/compare.py gpt2-1024 resnet50-b128 --device cuda --precision bf16 --compile compiled
    python bench/train/compare.py gpt2 resnet50-b16 --inference --compile eager

With ``--limit``, who is not ready in time is left out, and what there is of the rounds is shown when the time is over.
Ratio first: time of the other's step over CARAML's in the same round, median over rounds with its 95 % bootstrap interval; above 1,
CARAML is faster. A peer whose path is not given is left out and named; of timm and torchvision, where they are installed, the network then
runs in a plain loop. All train in fp32, or in --precision; with --bf16 CARAML also trains in bf16, which is compared with its own fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gate import PIPES
from spec import Spec, point_of
from turns import Program, Turn, median, ratio, take_turns

from caraml.base.files import write_file
from caraml.launch.script import environment_of
from caraml.workloads.gpt import Params

HERE = Path(__file__).parent
KNOBS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "keep_freed_memory": (False, ("gpt", "image_classification", "question_answering")),
    "fused_optimizer": (False, ("gpt", "image_classification", "question_answering")),
    "channels_last": (False, ("image_classification",)),
    "matmul": ("mkl", ("gpt", "question_answering")),
    "dropout_masks": ("torch", ("question_answering",)),
}
"""CARAML's knobs: the value that takes its gain away, and the workloads that it means anything for."""


@dataclass(frozen=True)
class Work:
    """What all contestants of one comparison train."""

    title: str
    workload: str
    params: dict[str, object]
    batch: int
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """CARAML's step computed in other ways: what differs from the first one."""


ATTENTION = {f"attention={kernel}": {"knobs": {"attention": kernel}} for kernel in ("flash", "efficient")}
GRAPH = {"knobs": {"step_graph": "on"}}
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
    "gpt2-1024": Work(
        "GPT-2 124M, T 1024, for accelerators",
        "gpt",
        {"preset": "117M", "vocab_size": 50304},
        16,
        {**ATTENTION, "half_residual": {"knobs": {"half_residual": True}}, "eager": {"compile": False}},
    ),
    "gpt2-small-step": Work(
        "GPT-2 124M, T 1024, small steps for accelerators",
        "gpt",
        {"preset": "117M", "vocab_size": 50304},
        4,
        {
            "step_graph": GRAPH,
            "reduce-overhead": {"compile": "reduce-overhead"},
            "eager": {"compile": False},
            "eager, step_graph": {"compile": False, **GRAPH},
        },
    ),
    "resnet50-b128": Work(
        "ResNet-50, for accelerators",
        "image_classification",
        {"model": "resnet50", "image_size": 224},
        128,
        {
            "eager": {"compile": False},
            "eager, convolution_search=false": {"compile": False, "knobs": {"convolution_search": False}},
            "eager, channels_last=false": {"compile": False, "knobs": {"channels_last": False}},
        },
    ),
    "bert": Work("BERT base, answers in 128 tokens", "question_answering", {"preset": "base", "tokens": 128}, 4),
    "resnet50-b16": Work("ResNet-50, 224 pixels", "image_classification", {"model": "resnet50", "image_size": 224}, 16),
    "resnet50-b32": Work("ResNet-50, 224 pixels", "image_classification", {"model": "resnet50", "image_size": 224}, 32),
}


def contestants(work: Work, asked: argparse.Namespace, threads: int, scratch: Path) -> tuple[dict[str, Spec], list[str]]:
    """Who trains, by name, and who was left out and why."""
    data = "synthetic" if work.workload == "gpt" else "synthetic-device"  # GPT's peers read their tokens on the host, too
    params = _whole(work)
    found: dict[str, Spec] = {}
    missing: list[str] = []

    def add(name: str, peer: str, *, path: str | None = None, needs_path: bool = True, **options: Any) -> None:
        if needs_path and path is None:
            missing.append(f"{name}: no path was given (--{peer})")
            return
        folder = scratch / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_NUM_THREADS": str(threads)}
        given = str(Path(path).resolve()) if path and peer != "plain" else path
        more = {**options, "precision": asked.precision, "device": asked.device, "inference": asked.inference}
        sizes = {**work.params, "data": data} if peer == "caraml" else params
        found[name] = Spec(peer, work.workload, sizes, work.batch, path=given, scratch=str(folder), environment=environment, **more)

    for compiled in {"eager": (False,), "compiled": (True,)}.get(asked.compile, (False, True)):
        tail = " compiled" if compiled else ""
        add(f"CARAML{tail}", "caraml", needs_path=False, compile=compiled)
        if work.workload == "gpt":
            add(f"nanoGPT{tail}", "nanogpt", path=asked.nanogpt, compile=compiled)
        if work.workload in ("gpt", "question_answering"):
            needed = ["transformers"] if asked.inference else ["transformers", "accelerate"]
            absent = [package for package in needed if importlib.util.find_spec(package) is None]
            what = "HF" if asked.inference else "HF Trainer"
            if absent:
                missing.append(f"{what}{tail}: not installed: {', '.join(absent)}")
            else:
                add(f"{what}{tail}", "trainer", needs_path=False, compile=compiled)
            if not compiled and work.workload == "gpt" and asked.device == "cpu" and not asked.inference:
                add("optimum-benchmark", "optimum", path=asked.optimum)
            continue
        for library in ("timm", "torchvision"):
            script = None if asked.inference else getattr(asked, library)
            if script is None and importlib.util.find_spec(library) is None:
                missing.append(f"{library}{tail}: not installed")
                continue
            for last in (True, False) if library == "timm" or script is None else (False,):
                name = library + (" channels_last" if last else "") + ("" if script or asked.inference else ", plain loop") + tail
                way = {"compile": compiled, "channels_last": last}
                add(name, library, path=script, **way) if script else add(name, "plain", path=library, **way)
    return _with_environments(found, work, threads, asked), missing


def _whole(work: Work) -> dict[str, Any]:
    """The parameters with what a preset says."""
    if work.workload != "gpt":
        return dict(work.params)
    return Params.model_validate(work.params).model_dump(mode="json")


def _with_environments(found: dict[str, Spec], work: Work, threads: int, asked: argparse.Namespace) -> dict[str, Spec]:
    """CARAML's programs in the environment of its workers; if asked for, also once without each knob, in the work's other ways, in bf16."""
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
        for way, change in work.variants.items() if asked.variants else ():
            if spec.compile or "compile" not in change:
                everyone[f"{name.removesuffix(' compiled')} {way}"] = _in_its_environment(replace(spec, **change), threads)
    only: Sequence[str] | None = asked.only
    chosen = {name: spec for name, spec in everyone.items() if only is None or spec.peer == "caraml" or any(part in name for part in only)}
    if asked.rounds:
        return chosen
    # Who finds nothing to compile, or what another one compiles, has no need to run.
    return {name: spec for name, spec in chosen.items() if spec.compile and "step_graph" not in spec.knobs}


def _in_its_environment(spec: Spec, threads: int) -> Spec:
    return replace(spec, environment=environment_of(point_of(spec), threads))


def compare(
    work: Work, asked: argparse.Namespace, threads: int, scratch: Path, keep: Callable[[dict[str, list[Turn]], list[str]], None]
) -> tuple[dict[str, list[Turn]], list[str]]:
    """Turns of every contestant that trains, and who does not and why. ``keep`` gets the same after each round."""
    specs, missing = contestants(work, asked, threads, scratch)
    programs, begun = list[Program](), list[Program]()
    until, turning = time.monotonic() + asked.limit, min(1.5 * (asked.rounds + 1) * asked.seconds * len(specs), asked.limit / 2)
    try:
        for name, spec in specs.items():
            log = Path(spec.scratch) / "log"
            begun.append(Program(name, [str(HERE / "contestants.py"), spec.to_json()], spec.environment, log, PIPES))
            if not asked.rounds:  # only its compilation was wanted: it ends, and gives its memory back, once that is done
                begun[-1].dismiss()
            if asked.device == "cpu":  # an accelerator's host has cores enough for all to compile at once
                programs += _ready(begun.pop(), missing, until - turning)
        if asked.hold:
            told = sys.stdin.readline()  # the time begins when it is told
            if not told:
                return {}, [*missing, "nobody asked for turns"]
            until = time.monotonic() + float(told)
        turning = min(turning, max(until - time.monotonic(), 0.0) / 2)
        for program in begun:
            programs += _ready(program, missing, until - turning)
        if not asked.rounds:
            return {}, missing
        if not any(program.name.startswith("CARAML") for program in programs):
            raise RuntimeError(f"CARAML does not run: {'; '.join(missing)}")
        kept = partial(keep, missing=missing)
        return take_turns(programs, asked.rounds, asked.seconds, until=until, failed=missing, after_round=kept), missing
    finally:
        started = dict.fromkeys([*programs, *begun])
        for program in started:
            program.dismiss()
        for program in started:
            program.end()


def _ready(program: Program, missing: list[str], until: float) -> list[Program]:
    """The program, once it has done its first steps; nothing, and a line in ``missing``, if it ends instead or is not ready by then."""
    failed = program.started(max(until - time.monotonic(), 0.0) if until < math.inf else until)
    if failed is None:
        print(f"  {program.name} runs", file=sys.stderr)
        return [program]
    missing.append(f"{program.name}: {failed}")
    program.kill()
    program.end()
    return []


def table(turns: dict[str, list[Turn]], samples: int) -> list[str]:
    """A Markdown table: ratios to CARAML's programs first, then what a step took, and the rate."""
    ours = [name for name in ("CARAML", "CARAML compiled") if name in turns]
    heads = [f"over {name}, {kind}" for name in ours for kind in ("wall", "CPU")]
    lines = ["| step of | " + " | ".join([*heads, "step [ms]", "CPU of a step [ms]", "samples/s"]) + " |", "|---" * (len(heads) + 4) + "|"]
    for name, own in sorted(turns.items(), key=lambda item: statistics.median(turn.wall for turn in item[1])):
        cells = [
            str(ratio([getattr(turn, kind) for turn in own], [getattr(turn, kind) for turn in turns[base]])) if name != base else "1"
            for base in ours
            for kind in ("wall", "cpu")
        ]
        cells += [str(median([1e3 * getattr(turn, kind) for turn in own])) for kind in ("wall", "cpu")]
        cells.append(str(median([samples / turn.wall for turn in own])))
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
    parser.add_argument("--device", default="cpu", help="cpu, or torch's name of an accelerator: all programs run on its first device")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of all programs")
    parser.add_argument("--inference", action="store_true", help="forward passes instead of training steps")
    parser.add_argument("--threads", nargs="+", type=int, help="on a CPU; by default one, and all")
    parser.add_argument("--compile", choices=["eager", "compiled", "both"], default="both")
    parser.add_argument("--only", nargs="+", help="parts of peers' names; all if absent")
    parser.add_argument("--knobs", action="store_true", help="CARAML also without each of its knobs")
    parser.add_argument("--bf16", action="store_true", help="CARAML also in bf16, on a CPU that has units for it")
    parser.add_argument("--batch", type=int, help="in place of the comparison's own")
    parser.add_argument("--variants", action="store_true", help="CARAML also in the other ways that a work for accelerators has")
    parser.add_argument("--rounds", type=int, default=9, help="0: only compile, for who comes next")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn, about")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for everything, of each work")
    parser.add_argument("--hold", action="store_true", help="start, and take turns when standard input says for how many seconds")
    parser.add_argument("--after", type=float, default=0.0, help="seconds to wait first")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    random.seed(asked.seed)
    if not asked.rounds:
        os.nice(10)  # others wait for what they do
    time.sleep(asked.after)
    kept: list[dict[str, Any]] = []
    for name in asked.works:
        work = WORKS[name] if asked.batch is None else replace(WORKS[name], batch=asked.batch)
        for threads in asked.threads or ([1, os.cpu_count() or 1] if asked.device == "cpu" else [os.cpu_count() or 1]):
            before = os.getloadavg()[0]
            sizes = {"work": name, "batch": work.batch, "threads": threads, "device": asked.device, "precision": asked.precision}
            kept.append({**sizes, "inference": asked.inference})
            keep = partial(_keep, kept, before, asked.json)
            with tempfile.TemporaryDirectory(prefix="caraml-bench-") as scratch:
                turns, missing = compare(work, asked, threads, Path(scratch), keep)
            where = f"{threads} threads" if asked.device == "cpu" else asked.device
            how = f"{asked.precision}{', inference' if asked.inference else ''}, {where}"
            rounds = max(map(len, turns.values()), default=0)
            loads = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
            print(f"\n{work.title}, batch {work.batch}; {how}, {rounds} rounds; {loads}")
            print(
                f"torch {torch.__version__}, {platform.machine() if asked.device == 'cpu' else torch.accelerator.current_accelerator()}\n"
            )
            print("\n".join(table(turns, work.batch)))
            print("".join(f"\nleft out: {reason}" for reason in missing), flush=True)
            keep(turns, missing)


def _keep(kept: list[dict[str, Any]], before: float, file: Path | None, turns: dict[str, list[Turn]], missing: list[str]) -> None:
    """Every turn as JSON, the last of ``kept`` with those that there are so far."""
    own = {program: [asdict(turn) for turn in values] for program, values in turns.items()}
    kept[-1] |= {"load": [before, os.getloadavg()[0]], "turns": own, "left_out": missing}
    try:
        if file is not None:
            write_file(file, json.dumps(kept, indent=1))  # whole also if this is ended in between
    except OSError as error:  # as on a full disk: the table is shown all the same
        print(f"not written: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
