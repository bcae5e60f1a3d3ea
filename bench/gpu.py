"""One command for whoever has a GPU at hand: is it right there, and how fast?

    python bench/gpu.py [--minutes 9] [--out results]

Runs from a bare checkout; needs torch, numpy, scipy, pydantic, and timm for the images. First correctness: the GPU must train as the CPU
does. If it does not, nothing is timed. Then the points of ``gpu.toml``, the most telling first, until the time is over. Writes a small
table to ``OUT/<device>/gpu.md`` and the same as ``gpu.json``; the full records stay in ``caraml-results``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from caraml.base.files import write_file  # noqa: E402
from caraml.base.format import human, percent  # noqa: E402
from caraml.campaign import Campaign  # noqa: E402
from caraml.engine.device import AcceleratorDevice, StepTimer, accelerator_type, open_device  # noqa: E402
from caraml.engine.precision import autocast, set_matmul_precision  # noqa: E402
from caraml.launch.local import LocalLauncher  # noqa: E402
from caraml.results.record import Record  # noqa: E402
from caraml.results.status import ProgressLine  # noqa: E402
from caraml.results.store import Store  # noqa: E402
from caraml.suite.load import load_suite  # noqa: E402
from caraml.suite.model import Point, Precision  # noqa: E402
from caraml.system.detect import detect  # noqa: E402
from caraml.system.streams import pins  # noqa: E402
from caraml.workloads.gpt.model import (  # noqa: E402
    GPT,
    GPTConfig,
    linear_cross_entropy,
)

STEPS = 5
SMALL = GPTConfig(vocab_size=512, sequence_length=128, width=128, layers=2, heads=2)
RESERVE = 60.0
"""Seconds that a point is assumed to need at least; fewer left, and no further one is begun."""


@dataclass(frozen=True)
class Check:
    """One statement about the device, its deviation and the deviation allowed."""

    claim: str
    deviation: float
    allowed: float

    @property
    def holds(self) -> bool:
        """NaN never does."""
        return self.deviation <= self.allowed


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
    from caraml.compat import make_torchvision_importable
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
    hidden, weight = torch.randn(3000, 256, device=device, requires_grad=True), torch.randn(50304, 256, device=device, requires_grad=True)
    targets = torch.randint(50304, (3000,), device=device)
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight * 0.05, targets, chunk_bytes=2**27), (hidden, weight))
    exact = F.cross_entropy(hidden.double() @ (weight.double() * 0.05).t(), targets)
    truth = torch.autograd.grad(exact, (hidden, weight))
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True))


def prefetch_deviation(device: torch.device) -> float:
    """Largest difference between 50 batches as the loader made them and as they arrived while the device was busy."""
    from caraml.data.loader import stream, to_device
    from caraml.data.synthetic import synthetic_tokens

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


def correctness(device: torch.device) -> Iterator[Check]:
    """What must hold before a number of this device is worth anything."""
    cpu = torch.device("cpu")
    truth = gpt_losses(cpu, "fp32")
    yield Check("GPT, fp32: losses as on the CPU", largest_relative(gpt_losses(device, "fp32"), truth), 1e-4)
    yield Check("GPT, tf32: close", largest_relative(gpt_losses(device, "tf32" if device.type == "cuda" else "fp32"), truth), 1e-3)
    yield Check("GPT, bf16: close", largest_relative(gpt_losses(device, "bf16"), truth), 1e-2)
    yield Check("ResNet-18, fp32: losses as on the CPU", largest_relative(image_losses(device, "fp32"), image_losses(cpu, "fp32")), 2e-3)
    yield Check("GPT-2's head, chunked against plain", head_deviation(device), 1e-4)
    yield Check("prefetched batches as the loader made them", prefetch_deviation(device), 0)
    if device.type == "cuda":
        yield Check("GPT, fp32, compiled: losses as on the CPU", largest_relative(gpt_losses(device, "fp32", compiled=True), truth), 1e-4)
    if device.type != "cpu":
        yield Check("device events against the host's clock", clock_deviation(device), 0.01)
        yield Check("torch's interface for all accelerators: step times and peak memory", interface_deviation(device), 0.01)


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


def markdown(title: str, checks: list[Check], records: list[Record], left_out: list[str]) -> str:
    """The small table that is worth keeping."""
    lines = [f"# {title}", "", "| claim | deviation | allowed | holds |", "|---|---|---|---|"]
    lines += [f"| {check.claim} | {check.deviation:.2g} | {check.allowed:g} | {'yes' if check.holds else '**no**'} |" for check in checks]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(column(record) for column in COLUMNS.values()) + " |" for record in records]
    if left_out:
        lines += ["", f"Left out, because the time was over: {', '.join(left_out)}."]
    return "\n".join(lines) + "\n"


def small(record: Record) -> dict[str, Any]:
    """A record without the machine's description and the raw files."""
    return record.model_dump(mode="json", exclude={"system", "environment", "files", "idle"})


def write(folder: Path, title: str, checks: list[Check], records: list[Record], left_out: list[str]) -> None:
    """Write the table so far; called after each point, so that nothing is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "gpu.md", markdown(title, checks, records, left_out))
    content = {"checks": [asdict(check) for check in checks], "left_out": left_out, "records": [small(record) for record in records]}
    write_file(folder / "gpu.json", json.dumps(content, indent=1))


def main() -> int:
    """Correctness, then rates; 0 if every check held and every point has a result."""
    parser = argparse.ArgumentParser(description="Check and measure this machine's GPU.")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything (default: 9)")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the small tables (default: results)")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    kind = accelerator_type()
    if kind is None:
        say("torch sees no GPU and no other accelerator; next step: caraml doctor")
        return 3
    system = detect()
    folder = options.out / re.sub(r"[^a-z0-9]+", "-", system.identity.lower()).strip("-")
    title = f"{system.identity}, torch {torch.__version__}, driver {system.driver}"
    checks: list[Check] = []
    for check in correctness(torch.device(kind, 0)):
        say(f"{'holds' if check.holds else 'FAILS'}  {check.claim}: {check.deviation:.2g} (allowed {check.allowed:g})")
        checks.append(check)
    write(folder, title, checks, [], [])
    if not all(check.holds for check in checks):
        say("the device does not compute what it should; nothing is timed")
        return 1
    torch.accelerator.empty_cache()
    campaign = Campaign(
        load_suite(str(ROOT / "bench" / "gpu.toml")), system, Store(Path("caraml-results")), LocalLauncher(), Lines(), again=True
    )
    plan = campaign.plan().points
    records: list[Record] = []
    for index, planned in enumerate(plan):
        if time.monotonic() > deadline - RESERVE:
            break
        records.append(campaign.settle(planned, index, len(plan)))
        write(folder, title, checks, records, [other.point.label for other in plan[index + 1 :]])
    say((folder / "gpu.md").read_text(encoding="utf-8"))
    return 0 if all(record.status in ("ok", "oom") for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
