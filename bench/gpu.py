"""One command for whoever has a GPU at hand: is it right there, how fast, and how fast beside other programs?

    python bench/gpu.py [--minutes 8] [--out results] [--nanogpt DIR] [--timm FILE] [--torchvision FILE]

Runs from a bare checkout without a network; needs torch, numpy, scipy and pydantic. First correctness: the GPU must compute what the CPU
does. If it does not, nothing is timed. Meanwhile CARAML's peers and the first points compile. Then, in turns, CARAML beside its peers and
itself in other ways (``bench/train``) and a point of ``gpu.toml``, until the time is over: nothing runs longer. What is missing (timm,
transformers, a peer's checkout) is named, the rest is measured. Every part is a process of its own, so that none takes another's result
with it. Writes a small table to ``OUT/<device>/gpu.md`` and the same as ``gpu.json`` after each check and part; every turn is in
``beside-*.json`` from the end of its round on, and the full records stay in ``caraml-results``.
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
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
"""Loading torch, which a new machine's disk may take a minute for, is part of the time."""
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench"), str(ROOT / "bench" / "train")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))  # of the workers
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as points have it: checks and comparisons are of the same GPU
NEEDED = ("torch", "numpy", "scipy", "pydantic")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    sys.exit(f"not installed: {', '.join(MISSING)}; next step: pip install {' '.join(MISSING)}, or PYTHONPATH with a folder that has them")

import torch  # noqa: E402
from compare import table  # noqa: E402
from gpu_checks import Check, check, checks_of, compiles  # noqa: E402
from spec import step_of  # noqa: E402
from turns import Turn  # noqa: E402

from caraml.base.errors import CaramlError  # noqa: E402
from caraml.base.files import write_file  # noqa: E402
from caraml.base.format import human, percent  # noqa: E402
from caraml.campaign import Campaign  # noqa: E402
from caraml.campaign.attempt import PointTask  # noqa: E402
from caraml.campaign.runner import CampaignRun  # noqa: E402
from caraml.doctor import gpu_processes  # noqa: E402
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
ENDING = 10.0
"""Seconds of its time that a part has to end: a comparison its programs, a point its worker, which may not listen."""
RESERVE = 65.0 + ENDING
"""Seconds that a part needs at least, compiled already: a point has 10 of warm-up, 15 of its window, 5 at rest. With fewer none begins."""
CHECKING = 150.0
"""Seconds that the checks may take; of one that has not ended then, nothing is known. And those for which others compile."""
MEMORY = 130e9
"""Bytes of a device on which points compile beside the peers, which take 80 GB by then. On a smaller one they compile when they are run."""
BESIDE_MEMORY = 75e9
"""Bytes of a device on which the first comparison's programs, CARAML's in all ways among them, have room beside each other and the checks.
On a smaller one they begin after the checks, without those ways."""
STEPPED = ("gpt-117M", "resnet50")
"""Benchmarks that compile while the device is checked: those whose step needs little memory beside the peers'."""
LATER = 25.0
"""Seconds after which the peers compile whose turns come later: they need memory when the points have given theirs back."""
ROUNDS, TURN = 5, 0.8
"""Turns of CARAML and its peers, and seconds of each."""
BESIDE_SECONDS, HELD_SECONDS = 180.0, 100.0
"""Seconds that one comparison may take, and one whose programs have been compiling: who is not ready in time is left out, or fewer rounds
are taken."""
SHARED = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(max((os.cpu_count() or 1) // 4, 1)))
"""Cores for each of the programs that compile at the same time, where nobody says how many: each would start a process for every one."""
BESIDE = ("gpt2-1024", "resnet50-b128", "gpt2-small-step")
"""Works of ``bench/train/compare.py``."""
ALONE = ("gpt2-small-step",)
"""Those in which CARAML is compared with itself only."""


def begun(command: Sequence[str], **pipes: Any) -> subprocess.Popen[str]:
    """A program of Python with all that it starts in a session of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | pipes
    own = {"env": SHARED | os.environ, "text": True, "errors": "replace", "start_new_session": True}
    return subprocess.Popen([sys.executable, *command], **own, **pipes)


def end(program: subprocess.Popen[str]) -> None:
    """End a program with all that it started. One that its driver does not let go is not waited for."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        program.wait(ENDING)


def heard(program: subprocess.Popen[str], seconds: float, hear: Callable[[str], None]) -> str | None:
    """Hear each line that a program prints, for at most so long; then it is ended. ``None`` if it ended well, else why not."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    last = ""
    try:
        assert program.stdout is not None
        for line in program.stdout:
            last = line.strip() or last
            hear(line.rstrip())
        program.wait()
    except subprocess.TimeoutExpired:
        return f"not ready within {seconds:.0f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        end(program)
    return None if program.returncode == 0 else f"ended with {program.returncode}: {last[:200]}"


@contextmanager
def meanwhile(commands: Sequence[Sequence[str]], seconds: float) -> Iterator[Callable[[], None]]:
    """Run programs while the block runs; its end ends them. The function that it gets waits for them, until so long after their start."""
    until = time.monotonic() + seconds
    programs = [begun(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]

    def wait() -> None:
        for program in programs:
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(until - time.monotonic(), 0.0))

    try:
        yield wait
    finally:
        for program in programs:
            end(program)


def first_step(point: Point, device: str) -> None:
    """Compile a point's step, which torch keeps on disk for whoever comes next, and take it if there is memory for it."""
    os.nice(10)  # the checks have a clock to look at
    with suppress(torch.OutOfMemoryError):
        step_of(point)()


def _too_long(number: int, frame: object) -> None:
    raise subprocess.TimeoutExpired("", 0.0)  # unlike TimeoutError no OSError, which a table that cannot be written is


def correctness(
    options: argparse.Namespace, points: Sequence[PlannedPoint], works: Sequence[str], seconds: float, known: Callable[[Check], None]
) -> None:
    """All checks, in a process of their own; ``known`` gets each. Points and works compile meanwhile, which would take a minute of each."""
    own = [__file__, "--device", options.device, "--suite", str(options.suite)]
    commands: list[list[str]] = []
    if compiles(options.device) and not one_process_at_a_time() and options.memory >= MEMORY:
        commands = [[*own, "--first-step", str(index)] for index, one in enumerate(points) if one.point.benchmark in STEPPED]
        commands += [[*turns_of(work, options), "--rounds", "0", "--after", str(LATER)] for work in works]
    with meanwhile(commands, seconds) as wait:
        if not any(one.wrong for one in _checked(options.device, seconds, known)):
            wait()


def one_process_at_a_time() -> bool:
    """Whether the driver lets only one process use a GPU (compute mode ``EXCLUSIVE_PROCESS``): a second one would end with an error."""
    with session() as nvml:
        modes = [] if isinstance(nvml, str) else [nvml.quietly("nvmlDeviceGetComputeMode", handle) for _, handle in nvml.gpus()]
        return any(modes)  # 0 is the usual one


def _checked(kind: str, seconds: float, known: Callable[[Check], None]) -> list[Check]:
    found: list[Check] = []

    def hear(line: str) -> None:
        if line.startswith(ANSWER):
            found.append(Check(**json.loads(line.removeprefix(ANSWER))))
            say(f"{found[-1].in_words:8} {found[-1].claim}" + (f": {found[-1].deviation:.2g}" if found[-1].deviation is not None else ""))
            known(found[-1])

    failed = heard(begun([__file__, "--device", kind, "--only-check"]), seconds, hear)
    for claim, allowed, _ in checks_of(torch.device(kind)):
        if claim not in {one.claim for one in found}:
            found.append(Check(claim, None, allowed, failed or "not asked"))
            known(found[-1])
    return found


def turns_of(work: str, options: argparse.Namespace) -> list[str]:
    """The program that compares CARAML with its peers and itself at this work."""
    paths = [f"--{peer}={getattr(options, peer)}" for peer in ("nanogpt", "timm", "torchvision") if getattr(options, peer)]
    asked = ["--device", options.device, "--precision", options.precision, "--compile", _how(options), *paths]
    asked += ["--batch", str(options.batch)] if options.batch else []
    asked += ["--only", "CARAML"] if work in ALONE else []
    threads = max((os.cpu_count() or 1) // 8, 1)  # of each program
    asked += ["--variants"] if options.memory >= BESIDE_MEMORY or work in ALONE else []
    return [str(ROOT / "bench/train/compare.py"), work, *asked, "--seconds", str(TURN), "--threads", str(threads)]


def _how(options: argparse.Namespace) -> str:
    return "compiled" if compiles(options.device) else "eager"


def held(work: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """The programs of a work, which start and compile, and take no turns before ``beside`` asks for them."""
    return begun([*turns_of(work, options), "--rounds", str(ROUNDS), "--json", str(_kept(work, options)), "--hold"], stdin=subprocess.PIPE)


def _kept(work: str, options: argparse.Namespace) -> Path:
    """Where every turn of a work lies."""
    return Path(options.folder, f"beside-{work}.json")


def beside(one: dict[str, Any], options: argparse.Namespace, seconds: float, program: subprocess.Popen[str]) -> None:
    """CARAML and its peers in turns: the table of ``one["work"]``, and why there is less than that. What it has come to is there, too,
    if it is ended from outside."""
    lines: list[str] = []
    say(f"{one['work']} in turns")
    assert program.stdin is not None
    with suppress(BrokenPipeError):  # it says itself why it has ended
        program.stdin.write(f"{seconds - ENDING:.0f}\n")
        program.stdin.close()
    try:
        one["failed"] = heard(program, seconds, lambda line: lines.append(line) or say(f"    {line}"))
    finally:
        title, rows, out = ([line for line in lines if re.match(kind, line)] for kind in (r".*; load [\d.]+ before", r"\|", "left out: "))
        one["table"] = _shown(title, rows, out) if title else _rounds(_kept(one["work"], options))


def _rounds(kept: Path) -> list[str]:
    """The table of what was kept after each round, by a program that was ended before it made one; nothing if it took no turns."""
    with suppress(OSError, ValueError):
        (one,) = json.loads(kept.read_text(encoding="utf-8"))
        turns = {name: [Turn(**turn) for turn in own] for name, own in one.get("turns", {}).items() if own}
        if turns:
            title = f"batch {one['batch']}; {one['precision']}, {max(map(len, turns.values()))} rounds"
            return _shown([title], table(turns, one["batch"]), [f"left out: {why}" for why in one["left_out"]])
    return []


def _shown(title: list[str], rows: list[str], out: list[str]) -> list[str]:
    return [*title, "", *rows, *(["", "; ".join(out)] if out else [])]


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


def outcome(record: Record) -> str:
    """What came of a point, and if it has no rate why."""
    told = " ".join([record.status, *record.flags])
    return told if record.value("throughput") is not None or not record.reason else f"{told}: {' '.join(record.reason.split())[:300]}"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "point": lambda record: record.point.label + (f" (micro {record.point.micro_batch})" if record.point.accumulation > 1 else ""),
    "status": lambda record: outcome(record).replace("|", "\\|"),
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
    checks: list[Check] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    beside: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    why: str = "it ended before"
    """Why parts are left out."""
    failed: list[str] = field(default_factory=list)
    """Parts that could not even be begun, each with the reason."""
    disturbed: list[str] = field(default_factory=list)
    """What else ran on the GPUs before anything was begun, by which every rate may be too low."""

    def markdown(self) -> str:
        """The small table that is worth keeping."""
        lines = [
            f"# {self.title}",
            "",
            *(f"{one}\n" for one in self.disturbed),
            "| claim | deviation | allowed | holds |",
            "|---|---|---|---|",
        ]
        for one in self.checks:
            deviation = "–" if one.deviation is None else f"{one.deviation:.2g}"
            lines.append(f"| {one.claim} | {deviation} | {one.allowed:g} | {one.in_words} |")
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(column(record) for column in COLUMNS.values()) + " |" for record in self.records]
        for one_beside in self.beside:
            lines += ["", f"## {one_beside['work']}, all {one_beside['how']}", "", *one_beside["table"]]
            lines += [f"\n{one_beside['failed']}"] if one_beside["failed"] else []
        if self.left_out:
            lines += ["", f"Left out, because {self.why}: {', '.join(self.left_out)}."]
        lines += [f"\nNot measured: {one}" for one in self.failed]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write the table so far; called after each check and part, so that nothing is lost. Where there is no room, that is said."""
        content = {
            "checks": [asdict(one) for one in self.checks],
            "beside": self.beside,
            "left_out": self.left_out,
            "failed": self.failed,
            "disturbed": self.disturbed,
            "records": [small(record) for record in self.records],
        }
        try:
            write_file(folder / "gpu.md", self.markdown())
            write_file(folder / "gpu.json", json.dumps(content, indent=1))
        except OSError as error:  # as on a full disk: the table is shown at the end
            say(f"not written: {error}")


def small(record: Record) -> dict[str, Any]:
    """A record without the machine's description and name, and the raw files."""
    left_out = dict.fromkeys(("system", "environment", "files", "idle"), True) | {"energy": {"node"}}
    return record.model_dump(mode="json", exclude=left_out)


def within(planned: PlannedPoint, seconds: float) -> PlannedPoint:
    """The point, stopped when the time is over."""
    policy = planned.point.measure
    shorter = policy.model_copy(update={"timeout_seconds": min(policy.timeout_seconds, round(seconds, 1))})
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
    parser.add_argument("--nanogpt", help="checkout of karpathy/nanoGPT")
    parser.add_argument("--timm", help="train.py of huggingface/pytorch-image-models")
    parser.add_argument("--torchvision", help="references/classification/train.py of pytorch/vision")
    parser.add_argument("--only-check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-step", type=int, metavar="POINT", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Correctness, then rates; 0 if every check held and all that was begun has a result."""
    options = asked_for()
    if options.device is None:
        say("torch sees no GPU and no other accelerator; next step: caraml doctor")
        return 3
    if options.only_check:
        for one in check(torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")):
            say(ANSWER + json.dumps(asdict(one)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended, as on Ctrl-C
    try:
        system = detect()
        campaign = Campaign(load_suite(str(options.suite)), system, Store(Path("caraml-results")), LocalLauncher(), Lines(), again=True)
        points = campaign.plan().points
        if options.first_step is not None:
            first_step(points[options.first_step].point, options.device)
            return 0
        options.memory = min((one.memory_bytes or 0 for one in system.devices), default=0)
        options.folder = options.out / re.sub(r"[^a-z0-9]+", "-", system.identity.lower()).strip("-")
        options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.folder):
            campaign.store.make()  # before anything is measured, whatever could not be kept
    except CaramlError as error:
        say(str(error))
        return error.exit_code
    except OSError as error:
        say(f"results cannot be written: {error}; next step: --out FOLDER, called from a folder that you may write to")
        return 2
    found = Found(f"{system.identity}, torch {torch.__version__}, driver {system.driver}")
    found.disturbed = [f"{one.name}: {one.found}" for one in gpu_processes() if one.status != "ok"]
    for one in found.disturbed:
        say(one)
    measure(found, campaign, points, options)
    say(found.markdown())
    good = all(record.status in ("ok", "oom") for record in found.records) and not any(one["failed"] for one in found.beside)
    return 0 if good and not found.failed and all(one.holds for one in found.checks) else 1


def measure(found: Found, campaign: Campaign, points: Sequence[PlannedPoint], options: argparse.Namespace) -> None:
    """Fill ``found`` until the time is over, and write it meanwhile. Nothing is timed on a device that does not compute what it should."""
    deadline, works = BEGAN + 60 * options.minutes, list(options.beside)

    def left() -> float:
        return deadline - time.monotonic()

    def known(one: Check) -> None:
        if not found.checks:  # an earlier run's turns are none of this one, whose tables are written from now on
            with suppress(OSError):
                for earlier in options.folder.glob("beside-*.json"):
                    earlier.unlink()
        found.checks.append(one)
        found.write(options.folder)

    def in_turns(work: str) -> None:
        longest = HELD_SECONDS if work in waiting else BESIDE_SECONDS
        program = waiting.pop(work, None) or held(work, options)
        found.beside.append({"work": work, "how": _how(options), "table": [], "failed": "ended before it was done"})
        beside(found.beside[-1], options, min(longest, left()), program)

    waiting: dict[str, subprocess.Popen[str]] = {}
    parts = deque(part for pair in zip_longest(works, points) for part in pair if part is not None)
    found.left_out = [_name(part) for part in parts]
    try:
        if works and compiles(options.device) and options.memory >= BESIDE_MEMORY and not one_process_at_a_time():
            waiting[works[0]] = held(works[0], options)
        correctness(options, points, works[1:] if waiting else (), min(CHECKING, left()), known)
        if any(one.wrong for one in found.checks):
            found.why = "the device does not compute what it should"
            return
        while parts and left() >= RESERVE:
            try:
                if isinstance(part := parts[0], str):
                    in_turns(part)
                else:
                    task = PointTask.of(campaign, len(found.records), within(part, left() - ENDING))
                    found.records += CampaignRun(campaign, deque([task]), len(points)).records()
            except Exception as error:  # noqa: BLE001 -- whatever it is, the other parts count
                found.failed.append(f"{_name(part)}: {type(error).__name__}: {' '.join(str(error).split())}"[:300])
            parts.popleft()
            found.left_out = [_name(part) for part in parts]
            found.write(options.folder)
        found.why = "the time was over"
    finally:
        for program in waiting.values():
            end(program)
        if found.checks:  # else an earlier run's table says more
            found.write(options.folder)


def _name(part: str | PlannedPoint) -> str:
    return f"{part} in turns" if isinstance(part, str) else part.point.label


if __name__ == "__main__":
    sys.exit(main())
