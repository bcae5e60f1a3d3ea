"""One command for whoever has a GPU at hand: is it right there, how fast, and how fast beside other programs?

    python bench/gpu.py [--minutes 8] [--out results] [--nanogpt DIR] [--timm FILE] [--torchvision FILE]

Runs from a bare checkout without a network; needs torch, numpy, scipy and pydantic. First correctness: the GPU must compute what the CPU
does. If it does not, nothing is timed. Then the first points of ``gpu.toml``, CARAML beside its peers (``bench/train``), and the other
points, until the time is over: nothing runs longer. What is missing (timm, transformers, a peer's checkout) is named, the rest is measured.
Every part is a process of its own, so that none takes another's result with it. Writes a small table to ``OUT/<device>/gpu.md`` and the
same as ``gpu.json`` after each; the full records stay in ``caraml-results``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))  # of the workers
NEEDED = ("torch", "numpy", "scipy", "pydantic")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    sys.exit(f"not installed: {', '.join(MISSING)}; next step: pip install {' '.join(MISSING)}, or PYTHONPATH with a folder that has them")

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from caraml.base.files import write_file  # noqa: E402
from caraml.base.format import human, percent  # noqa: E402
from caraml.campaign import Campaign  # noqa: E402
from caraml.campaign.attempt import PointTask  # noqa: E402
from caraml.campaign.runner import CampaignRun  # noqa: E402
from caraml.engine.device import AcceleratorDevice, StepTimer, accelerator_type, open_device  # noqa: E402
from caraml.engine.precision import autocast, set_matmul_precision  # noqa: E402
from caraml.engine.step import make_step  # noqa: E402
from caraml.launch.launchers import LocalLauncher  # noqa: E402
from caraml.results.record import Record  # noqa: E402
from caraml.results.status import ProgressLine  # noqa: E402
from caraml.results.store import Store  # noqa: E402
from caraml.suite.expand import PlannedPoint  # noqa: E402
from caraml.suite.load import load_suite  # noqa: E402
from caraml.suite.model import Knobs, Point, Precision, StepGraph  # noqa: E402
from caraml.system.detect import detect  # noqa: E402
from caraml.system.families import pins  # noqa: E402
from caraml.workloads import load_workload  # noqa: E402
from caraml.workloads.base import BuildContext  # noqa: E402
from caraml.workloads.gpt.model import (  # noqa: E402
    GPT,
    GPTConfig,
    linear_cross_entropy,
)

STEPS = 5
SMALL = GPTConfig(vocab_size=512, sequence_length=128, width=128, layers=2, heads=2)
ANSWER = "check "
"""Begins a line of the process that checks."""
RESERVE = 60.0
"""Seconds that a point is assumed to need at least; fewer left, and no further one is begun."""


CHECKING = 150.0
"""Seconds that the checks may take; of one that has not ended then, nothing is known."""
ROUNDS, TURN = 5, 1.5
"""Turns of CARAML and its peers, and seconds of each."""
BESIDE = ("gpt2-1024", "resnet50-b256")
"""Works of ``bench/train/compare.py``."""


@dataclass(frozen=True)
class Check:
    """One statement about the device, its deviation and the deviation allowed."""

    claim: str
    deviation: float | None
    """``None``: nobody knows, and ``unknown`` says why."""
    allowed: float
    unknown: str = ""

    @property
    def holds(self) -> bool:
        """NaN never does."""
        return self.deviation is not None and self.deviation <= self.allowed

    @property
    def in_words(self) -> str:
        """What came of it."""
        if self.deviation is None:
            return f"unknown: {self.unknown}"
        return "yes" if self.holds else "**no**"


def gpt_losses(device: torch.device, precision: Precision, compiled: bool = False) -> list[float]:
    """Losses of a small GPT over a few AdamW steps, from the same weights and batches on every device."""
    set_matmul_precision(precision)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = GPT(SMALL).to(device)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(SMALL.vocab_size, (8, SMALL.sequence_length + 1), generator=generator).to(device)
        with autocast(precision, device):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def image_losses(device: torch.device, precision: Precision) -> list[float]:
    """The same for a small convolution network of timm, channels last, with the batch of images normalised on the device."""
    from caraml.workloads import make_torchvision_importable
    from caraml.workloads.image_classification.images import normalize_images

    make_torchvision_importable()
    import timm

    set_matmul_precision(precision)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    losses = []
    for _ in range(STEPS):
        images = torch.randint(256, (8, 3, 64, 64), dtype=torch.uint8, generator=generator).to(device)
        labels = torch.randint(10, (8,), generator=generator).to(device)
        with autocast(precision, device):
            loss = F.cross_entropy(model(normalize_images(images)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def largest_relative(found: list[float], truth: list[float]) -> float:
    """Largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))


def head_deviation(device: torch.device) -> float:
    """Chunked loss with GPT-2's vocabulary against the plain one in float64: largest relative deviation of the gradients."""
    set_matmul_precision("fp32")
    torch.manual_seed(0)
    rows, chunk_bytes = (1500, 2**26) if device.type != "cpu" else (375, 2**24)  # five chunks, the last of which is not full
    hidden, weight = torch.randn(rows, 256, device=device, requires_grad=True), torch.randn(50304, 256, device=device, requires_grad=True)
    targets = torch.randint(50304, (rows,), device=device)
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight * 0.05, targets, chunk_bytes=chunk_bytes), (hidden, weight))
    exact = F.cross_entropy(hidden.double() @ (weight.double() * 0.05).t(), targets)
    truth = torch.autograd.grad(exact, (hidden, weight))
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True))


def prefetch_deviation(device: torch.device) -> float:
    """Largest difference between 50 batches as the loader made them and as they arrived while the device was busy."""
    from caraml.data.loader import stream, to_device
    from caraml.workloads.gpt.tokens import synthetic_tokens

    dataset = synthetic_tokens(1000, 64, samples=400)
    truth = stream(dataset, 8, workers=0, seed=3)
    loaded = stream(dataset, 8, workers=2, pin_memory=pins(device), seed=3)
    arrived, worst, busy = to_device(loaded, device), 0, torch.randn(512, 512, device=device)
    for _ in range(50):
        batch = next(arrived)
        busy = busy @ busy / 512**0.5
        worst = max(worst, int((batch.cpu() - next(truth)).abs().max()))
    loaded.close()
    return float(worst)


def clock_deviation(device: torch.device, size: int = 4096, steps: int = 100) -> float:
    """Sum of step times by device events against the host's clock over the same synchronised stretch, relative."""
    clock, matrix = open_device("gpu", device.index or 0), torch.randn(size, size, device=device)
    for _ in range(5):
        matrix @ matrix
    clock.synchronize()
    begin = clock.now()
    timer = StepTimer(clock)
    for _ in range(steps):
        matrix @ matrix
        timer.step_ended()
    clock.synchronize()
    return abs(sum(timer.finished()) / (clock.now() - begin) - 1)


def interface_deviation(device: torch.device, size: int = 4096, steps: int = 100) -> float:
    """Step times by torch's interface for all accelerators against those by the device's own, marks of both around the same products."""
    clocks = open_device("gpu", device.index or 0), AcceleratorDevice(device.type, device.index or 0)
    matrix = torch.randn(size, size, device=device)
    for _ in range(5):  # the device is busy when the first marks come
        matrix @ matrix
    timers = [StepTimer(clock) for clock in clocks]
    for _ in range(steps):
        matrix @ matrix
        for timer in timers:
            timer.step_ended()
    clocks[1].synchronize()
    own, general = (sum(timer.finished()) for timer in timers)
    return max(abs(general / own - 1), abs((clocks[1].peak_memory() or 0) / (clocks[0].peak_memory() or 1) - 1))


def graph_deviation(device: torch.device, precision: Precision, steps: int = 12) -> float:
    """Losses of steps that a graph replays against those of usual ones, with a schedule and two micro-batches a step."""

    def losses(asked: StepGraph) -> list[float]:
        own, told = load_workload("gpt"), dict[str, Any]()
        set_matmul_precision(precision)
        sizes = {"preset": "4M", "data": "synthetic-device", "warm_up_steps": 4, "decay_steps": 40}
        context = BuildContext(own.params.model_validate(sizes), device, 0, 1, 1, 8, 0, lambda name: nullcontext(), accumulation=2)
        names = {"suite": "b", "benchmark": "b", "workload": "gpt", "params": {}, "system": "local", "device": "g", "software": "b"}
        wanted = Point(**names, device_class="gpu", global_batch=16, micro_batch=8, precision=precision, knobs=Knobs(step_graph=asked))
        step = make_step(own.build(context), wanted, device, told=told)
        found = [step().loss for _ in range(steps)]
        if told["step_graph"]["used"] != (asked == "on"):
            raise RuntimeError(told["step_graph"]["why"])
        return [loss.item() for loss in found if loss is not None]

    return largest_relative(losses("on"), losses("off"))


def checks_of(device: torch.device) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """What must hold before a number of this device is worth anything: claim, deviation allowed, and how it is found."""
    cpu, truth = torch.device("cpu"), list[float]()

    def gpt(precision: Precision, compiled: bool = False) -> float:
        truth[:] = truth or gpt_losses(cpu, "fp32")
        return largest_relative(gpt_losses(device, precision, compiled), truth)

    yield "GPT, fp32: losses as on the CPU", 1e-4, lambda: gpt("fp32")
    yield "GPT, tf32: close", 1e-3, lambda: gpt("tf32" if device.type == "cuda" else "fp32")
    yield "GPT, bf16: close", 1e-2, lambda: gpt("bf16")
    yield "GPT-2's head, chunked against plain", 1e-4, lambda: head_deviation(device)
    yield "prefetched batches as the loader made them", 0, lambda: prefetch_deviation(device)
    if device.type != "cpu":
        yield "device events against the host's clock", 0.01, lambda: clock_deviation(device)
        yield "torch's interface for all accelerators: step times and peak memory", 0.01, lambda: interface_deviation(device)
        yield "GPT, fp32, compiled: losses as on the CPU", 1e-4, lambda: gpt("fp32", compiled=True)
        yield "GPT, bf16, compiled: close", 1e-2, lambda: gpt("bf16", compiled=True)
    if device.type == "cuda":
        yield "GPT, fp32, steps replayed by a graph: losses of usual steps", 1e-4, lambda: graph_deviation(device, "fp32")
        yield "GPT, bf16, steps replayed by a graph: close to usual steps", 1e-2, lambda: graph_deviation(device, "bf16")
    yield "ResNet-18, fp32: losses as on the CPU", 2e-3, lambda: largest_relative(image_losses(device, "fp32"), image_losses(cpu, "fp32"))


def check(device: torch.device) -> Iterator[Check]:
    """Each check; one that cannot be made says why, and the others are made."""
    for claim, allowed, deviation in checks_of(device):
        try:
            yield Check(claim, deviation(), allowed)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other checks count
            yield Check(
                claim, None, allowed, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
            )


def ran(command: list[str], seconds: float, hear: Callable[[str], None]) -> str | None:
    """Run a program for at most so long, and hear each line that it prints. ``None`` if it ended well, else why not. It is ended with all
    that it started."""
    program = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    last = ""
    try:
        assert program.stdout is not None
        for line in program.stdout:
            last = line.strip() or last
            hear(line.rstrip())
        program.wait()
    except TimeoutError:
        return f"not ready within {seconds:.0f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    return None if program.returncode == 0 else f"ended with {program.returncode}: {last[:200]}"


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError


def correctness(kind: str, seconds: float) -> list[Check]:
    """All checks, in a process of their own."""
    found: list[Check] = []

    def hear(line: str) -> None:
        if line.startswith(ANSWER):
            found.append(Check(**json.loads(line.removeprefix(ANSWER))))
            say(f"{found[-1].in_words:8} {found[-1].claim}" + (f": {found[-1].deviation:.2g}" if found[-1].deviation is not None else ""))

    failed = ran([__file__, "--device", kind, "--only-check"], seconds, hear)
    for claim, allowed, _ in checks_of(torch.device(kind)):
        if claim not in {one.claim for one in found}:
            found.append(Check(claim, None, allowed, failed or "not asked"))
    return found


def beside(work: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """CARAML and its peers in turns: the table, the turns, and why there is less than that."""
    lines: list[str] = []
    kept = options.folder / f"beside-{work}.json"
    paths = [f"--{peer}={getattr(options, peer)}" for peer in ("nanogpt", "timm", "torchvision") if getattr(options, peer)]
    asked = [work, "--device", options.device, "--precision", options.precision, "--compile", "compiled", "--json", str(kept), *paths]
    asked += ["--rounds", str(ROUNDS), "--seconds", str(TURN), *(["--batch", str(options.batch)] if options.batch else [])]
    failed = ran(
        [str(ROOT / "bench/train/compare.py"), *asked, "--threads", "1"], seconds, lambda line: lines.append(line) or say(f"    {line}")
    )
    told = [line for line in lines if line.startswith(("|", "left out"))]
    return {"work": work, "table": told, "failed": failed}


class Lines:
    """Says what happens, one line each. A watcher of a campaign."""

    def started(self, point: Point, index: int, total: int) -> None:
        """A point begins."""
        say(f"{index + 1}/{total} {point.label}")

    def progress(self, point: Point, line: ProgressLine) -> None:
        """Too much to say."""

    def finished(self, record: Record, reused: bool) -> None:
        """A point has ended."""
        metric = record.metrics.get("throughput")
        say(f"    {record.status} {human(metric.value, metric.unit) if metric else record.reason}{' (known)' if reused else ''}")

    def left(self, seconds: float) -> None:
        """Too much to say."""


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _with_bound(record: Record, name: str) -> str:
    metric = record.metrics.get(name)
    if metric is None or metric.value is None:
        return "–"
    if metric.low is None or metric.high is None or not metric.value:
        return human(metric.value, metric.unit)
    return f"{human(metric.value, metric.unit)} ± {percent((metric.high - metric.low) / 2 / metric.value, 2)}"


def crosscheck(record: Record) -> str:
    """Integrated power over counter difference, per device: near 1, or the energy is in doubt."""
    ratios = [channel.crosscheck_ratio for channel in record.energy.channels if channel.crosscheck_ratio] if record.energy else []
    return ", ".join(f"{ratio:.3f}" for ratio in ratios) or "–"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "point": lambda record: record.point.label + (f" (micro {record.point.micro_batch})" if record.point.accumulation > 1 else ""),
    "status": lambda record: " ".join([record.status, *record.flags]),
    "rate": lambda record: _with_bound(record, "throughput"),
    "MFU sheet": lambda record: percent(record.value("mfu")),
    "MFU probe": lambda record: percent(record.value("mfu_measured")),
    "W": lambda record: _with_bound(record, "mean_power"),
    "J/item": lambda record: _with_bound(record, "energy_per_item"),
    "memory": lambda record: human(record.value("peak_memory"), "B"),
    "median step": lambda record: human(record.value("step_time_median"), "s"),
    "integral / counter": crosscheck,
}


@dataclass
class Found:
    """What there is so far."""

    title: str
    checks: list[Check]
    records: list[Record]
    beside: list[dict[str, Any]]
    left_out: list[str]

    def markdown(self) -> str:
        """The small table that is worth keeping."""
        lines = [f"# {self.title}", "", "| claim | deviation | allowed | holds |", "|---|---|---|---|"]
        for one in self.checks:
            deviation = "–" if one.deviation is None else f"{one.deviation:.2g}"
            lines.append(f"| {one.claim} | {deviation} | {one.allowed:g} | {one.in_words} |")
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(column(record) for column in COLUMNS.values()) + " |" for record in self.records]
        for one_beside in self.beside:
            lines += ["", f"## {one_beside['work']}, all compiled", "", *one_beside["table"]]
            lines += [f"\n{one_beside['failed']}"] if one_beside["failed"] else []
        if self.left_out:
            lines += ["", f"Left out, because the time was over: {', '.join(self.left_out)}."]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write the table so far; called after each part, so that nothing is lost."""
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "gpu.md", self.markdown())
        content = {
            "checks": [asdict(one) for one in self.checks],
            "beside": self.beside,
            "left_out": self.left_out,
            "records": [small(record) for record in self.records],
        }
        write_file(folder / "gpu.json", json.dumps(content, indent=1))


def small(record: Record) -> dict[str, Any]:
    """A record without the machine's description and the raw files."""
    return record.model_dump(mode="json", exclude={"system", "environment", "files", "idle"})


def within(planned: PlannedPoint, seconds: float) -> PlannedPoint:
    """The point, stopped when the time is over."""
    policy = planned.point.measure
    shorter = policy.model_copy(update={"timeout_seconds": min(policy.timeout_seconds, seconds)})
    point = planned.point.model_copy(update={"measure": shorter})
    return replace(planned, point=point, key=point.key)


def asked_for() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check and measure this machine's GPU.")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: 8)")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the small tables (default: results)")
    parser.add_argument("--suite", type=Path, default=ROOT / "bench" / "gpu.toml", help="points to measure (default: bench/gpu.toml)")
    parser.add_argument("--device", default=accelerator_type(), help="torch's name of the device (default: the accelerator that there is)")
    parser.add_argument("--precision", default="bf16", help="of CARAML beside its peers (default: bf16)")
    parser.add_argument("--batch", type=int, help="of CARAML beside its peers (default: the work's)")
    parser.add_argument("--beside", nargs="*", default=list(BESIDE), help="works of bench/train/compare.py; none: no peers")
    parser.add_argument("--before", type=int, default=2, help="points that come before the peers (default: 2)")
    parser.add_argument("--nanogpt", help="checkout of karpathy/nanoGPT")
    parser.add_argument("--timm", help="train.py of huggingface/pytorch-image-models")
    parser.add_argument("--torchvision", help="references/classification/train.py of pytorch/vision")
    parser.add_argument("--only-check", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Correctness, then rates; 0 if every check held and every point has a result."""
    options = asked_for()
    if options.device is None:
        say("torch sees no GPU and no other accelerator; next step: caraml doctor")
        return 3
    if options.only_check:
        for one in check(torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")):
            say(ANSWER + json.dumps(asdict(one)))
        return 0
    deadline = time.monotonic() + 60 * options.minutes

    def left() -> float:
        return deadline - time.monotonic()

    system = detect()
    options.folder = options.out / re.sub(r"[^a-z0-9]+", "-", system.identity.lower()).strip("-")
    title = f"{system.identity}, torch {torch.__version__}, driver {system.driver}"
    found = Found(title, correctness(options.device, min(CHECKING, left())), [], [], [])
    found.write(options.folder)
    if any(one.deviation is not None and not one.holds for one in found.checks):
        say("the device does not compute what it should; nothing is timed")
        return 1
    campaign = Campaign(load_suite(str(options.suite)), system, Store(Path("caraml-results")), LocalLauncher(), Lines(), again=True)
    points, works = campaign.plan().points, list(options.beside)
    campaign.store.make()
    while points or works:
        index = len(found.records)
        if left() < RESERVE:
            found.left_out = [planned.point.label for planned in points] + [f"{work} beside peers" for work in works]
            break
        if points and (index < options.before or not works):
            total, task = index + len(points), PointTask.of(campaign, index, within(points.pop(0), left()))
            found.records += CampaignRun(campaign, deque([task]), total).records()
        else:
            found.beside.append(beside(works.pop(0), options, left()))
        found.write(options.folder)
    found.write(options.folder)
    say((options.folder / "gpu.md").read_text(encoding="utf-8"))
    good = all(record.status in ("ok", "oom") for record in found.records) and not any(one["failed"] for one in found.beside)
    return 0 if good and all(one.holds for one in found.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
