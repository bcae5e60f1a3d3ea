"""One command for whoever has a GPU at hand: is it right there, how fast, and how fast beside other programs?

    python bench/gpu.py [--minutes 8] [--out results] [--nanogpt DIR] [--timm FILE] [--torchvision FILE]

Runs from a bare checkout without a network; needs torch, numpy, scipy and pydantic. First correctness: the GPU must compute what the CPU
does. If it does not, nothing is timed; the first points compile meanwhile. Then these points of ``gpu.toml``, CARAML beside its peers
(``bench/train``), and the other points, until the time is over: nothing runs longer. What is missing (timm, transformers, a peer's
checkout) is named, the rest is measured. Every part is a process of its own, so that none takes another's result with it. Writes a small
table to ``OUT/<device>/gpu.md`` and the same as ``gpu.json`` after each; the full records stay in ``caraml-results``.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench"), str(ROOT / "bench" / "train")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))  # of the workers
NEEDED = ("torch", "numpy", "scipy", "pydantic")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    sys.exit(f"not installed: {', '.join(MISSING)}; next step: pip install {' '.join(MISSING)}, or PYTHONPATH with a folder that has them")

import torch  # noqa: E402
from gpu_checks import Check, check, checks_of, compiles  # noqa: E402
from spec import step_of  # noqa: E402

from caraml.base.files import write_file  # noqa: E402
from caraml.base.format import human, percent  # noqa: E402
from caraml.campaign import Campaign  # noqa: E402
from caraml.campaign.attempt import PointTask  # noqa: E402
from caraml.campaign.runner import CampaignRun  # noqa: E402
from caraml.engine.device import accelerator_type  # noqa: E402
from caraml.launch.launchers import LocalLauncher  # noqa: E402
from caraml.results.record import Record  # noqa: E402
from caraml.results.status import ProgressLine  # noqa: E402
from caraml.results.store import Store  # noqa: E402
from caraml.suite.expand import PlannedPoint  # noqa: E402
from caraml.suite.load import load_suite  # noqa: E402
from caraml.suite.model import Point  # noqa: E402
from caraml.system.detect import detect  # noqa: E402
from caraml.system.nvml import session  # noqa: E402

ANSWER = "check "
"""Begins a line of the process that checks."""
RESERVE = 75.0
"""Seconds that a point needs at least, compiled already: 15 of warm-up and 20 of its window, 5 at rest; fewer left, and none is begun."""
CHECKING = 150.0
"""Seconds that the checks may take; of one that has not ended then, nothing is known. And those for which points compile."""
SHARED = 0.8
"""Share of the device's memory that points may take while they compile, all together; the rest is for the checks."""
AT_ONCE = 3
"""Points that compile while the device is checked, at most: each is a process with a pool of its own."""
ROUNDS, TURN = 5, 1.5
"""Turns of CARAML and its peers, and seconds of each."""
BESIDE = ("gpt2-1024", "resnet50-b256")
"""Works of ``bench/train/compare.py``."""


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


@contextmanager
def meanwhile(commands: Sequence[Sequence[str]], seconds: float) -> Iterator[Callable[[], None]]:
    """Run programs while the block runs; its end ends them. The function that it gets waits for them, until so long after their start."""
    end = time.monotonic() + seconds
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    programs = [subprocess.Popen([sys.executable, *command], **quiet) for command in commands]

    def wait() -> None:
        for program in programs:
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(end - time.monotonic(), 0.0))

    try:
        yield wait
    finally:
        for program in programs:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def first_step(point: Point, device: str, memory_share: float) -> None:
    """Compile a point's step, which torch keeps on disk for whoever comes next, and take it if this share of the memory is enough."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "set_per_process_memory_fraction"):
        module.set_per_process_memory_fraction(memory_share)
    with suppress(torch.OutOfMemoryError):
        step_of(point)()


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError


def correctness(options: argparse.Namespace, points: Sequence[PlannedPoint], seconds: float) -> list[Check]:
    """All checks, in a process of their own. The first points compile meanwhile, which would take a minute of each."""
    kind, own = options.device, [__file__, "--device", options.device, "--suite", str(options.suite)]
    compiled = [str(index) for index, planned in enumerate(points[: min(options.before, AT_ONCE)]) if planned.point.compile != "off"]
    compiled = [] if one_process_at_a_time() else compiled
    with meanwhile([[*own, "--first-step", index, str(SHARED / len(compiled))] for index in compiled], seconds) as wait:
        found = _checked(kind, seconds)
        if not any(one.wrong for one in found):
            wait()
    return found


def one_process_at_a_time() -> bool:
    """Whether the driver lets only one process use a GPU (compute mode ``EXCLUSIVE_PROCESS``): a second one would end with an error."""
    with session() as nvml:
        modes = [] if isinstance(nvml, str) else [nvml.quietly("nvmlDeviceGetComputeMode", handle) for _, handle in nvml.gpus()]
        return any(modes)  # 0 is the usual one


def _checked(kind: str, seconds: float) -> list[Check]:
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
    kept, how = options.folder / f"beside-{work}.json", "compiled" if compiles(options.device) else "eager"
    paths = [f"--{peer}={getattr(options, peer)}" for peer in ("nanogpt", "timm", "torchvision") if getattr(options, peer)]
    asked = [work, "--device", options.device, "--precision", options.precision, "--compile", how, "--json", str(kept), *paths]
    asked += ["--rounds", str(ROUNDS), "--seconds", str(TURN), *(["--batch", str(options.batch)] if options.batch else [])]
    failed = ran(
        [str(ROOT / "bench/train/compare.py"), *asked, "--threads", "1"], seconds, lambda line: lines.append(line) or say(f"    {line}")
    )
    told = [line for line in lines if line.startswith(("|", "left out"))]
    return {"work": work, "how": how, "table": told, "failed": failed}


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
            lines += ["", f"## {one_beside['work']}, all {one_beside['how']}", "", *one_beside["table"]]
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
    """A record without the machine's description and name, and the raw files."""
    left_out = dict.fromkeys(("system", "environment", "files", "idle"), True) | {"energy": {"node"}}
    return record.model_dump(mode="json", exclude=left_out)


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
    parser.add_argument("--before", type=int, default=3, help="points that come before the peers (default: 3)")
    parser.add_argument("--nanogpt", help="checkout of karpathy/nanoGPT")
    parser.add_argument("--timm", help="train.py of huggingface/pytorch-image-models")
    parser.add_argument("--torchvision", help="references/classification/train.py of pytorch/vision")
    parser.add_argument("--only-check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-step", nargs=2, type=float, metavar=("POINT", "MEMORY"), help=argparse.SUPPRESS)
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended, as on Ctrl-C
    deadline = time.monotonic() + 60 * options.minutes

    def left() -> float:
        return deadline - time.monotonic()

    system = detect()
    campaign = Campaign(load_suite(str(options.suite)), system, Store(Path("caraml-results")), LocalLauncher(), Lines(), again=True)
    points, works = campaign.plan().points, list(options.beside)
    if options.first_step:
        index, share = options.first_step
        first_step(points[int(index)].point, options.device, share)
        return 0
    options.folder = options.out / re.sub(r"[^a-z0-9]+", "-", system.identity.lower()).strip("-")
    title = f"{system.identity}, torch {torch.__version__}, driver {system.driver}"
    found = Found(title, correctness(options, points, min(CHECKING, left())), [], [], [])
    found.write(options.folder)
    if any(one.wrong for one in found.checks):
        say("the device does not compute what it should; nothing is timed")
        return 1
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
