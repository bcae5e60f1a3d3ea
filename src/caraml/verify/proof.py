"""The proof of ``caraml verify``: findings about known work that ran through campaign, launcher, worker and store, and about what of this
machine can make numbers wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from caraml import METHOD_VERSION, __version__
from caraml.base.files import open_new, write_file
from caraml.base.format import human, percent
from caraml.base.processes import NODE, variables_set
from caraml.campaign import Campaign, Options, Watcher
from caraml.campaign.machine import DeviceLock, machine_of, refuse_login_node
from caraml.campaign.runner import run_campaign
from caraml.engine.device import Device, StepTimer, accelerator_type, open_device
from caraml.engine.instruments import cpu_time, share_of_others
from caraml.engine.start import LOOPBACK, MEET, PEER, own_folder
from caraml.launch import Launcher
from caraml.launch.launchers import LocalLauncher
from caraml.metrics.model import Metric
from caraml.power import Meter
from caraml.power.source import POWER_SOURCES
from caraml.results.finish import LOG, finish, now
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.expand import expand
from caraml.suite.load import SuiteFile, load_suite
from caraml.suite.model import Point
from caraml.system import affinity, host
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.families import OVERRIDE
from caraml.system.model import DeviceModel, System
from caraml.verify.claims import SOURCE, claims, source_of
from caraml.verify.finding import Finding, Verdict, fact, number, seen_twice
from caraml.workloads import params_of

COARSEST_CLOCK = 1e-5
DEAREST_MARK = 1e-4
"""Seconds that marking the end of a step may cost: a hundredth of a step of 10 ms."""
QUIET = 0.05
"""Share of the CPU time that others may use, and of one CPU that the sampler may."""
CLOCK_DRIFT = 1e-3
_CLOCK_SECONDS, _CLOCK_TRIES, _MOST_PRODUCTS = 0.5, 5, 100_000
"""Of the check of an accelerator's clock: least time that counts [s], most tries, and most products of a try."""
COUNTER_MISMATCH = 0.05
_WATCH_SECONDS = 1.5
_CHILD_SECONDS = 60.0


def machine_findings(system: System) -> list[Finding]:
    """Every check of this machine."""
    state = environment()
    return [_clock(), _mark(system), *_sampler_and_other_work(system), _governor(state), _binding(system), *_gpu_findings(system, state)]


def _noted(claim: str, truth: str, measured: str, holds: bool) -> Finding:
    """A finding about the machine, not the ruler: it is good to know and no reason to distrust the numbers."""
    return Finding(claim, truth, measured, "right" if holds else "note")


def _absent(claim: str, reason: str) -> Finding:
    return Finding(claim, "", reason, "not here")


def _clock() -> Finding:
    """Differences of 100,000 consecutive reads: none negative, the smallest positive one is what the clock can tell apart."""
    steps = [after - before for before, after in pairwise(time.monotonic() for _ in range(100_000))]
    finest = min(step for step in steps if step > 0)
    found = f"{finest * 1e9:.0f} ns, {sum(step < 0 for step in steps)} steps back"
    sound = min(steps) >= 0 and finest <= COARSEST_CLOCK
    return fact("clock: resolution, steps back", f"below {COARSEST_CLOCK * 1e6:.0f} µs, none", found, sound)


def _mark(system: System) -> Finding:
    """What the engine itself adds to a step."""
    device, count = open_device(system.device_class, 0), 5000
    timer = StepTimer(device)
    begin = time.perf_counter()
    for _ in range(count):
        timer.step_ended()
    each = (time.perf_counter() - begin) / count
    return _noted("cost of timing a step", f"below {human(DEAREST_MARK, 's')}", human(each, "s"), each < DEAREST_MARK)


def _sampler_and_other_work(system: System) -> list[Finding]:
    """A sampler alone in a quiet process: its rhythm, its cost, and what others did meanwhile."""
    before, cpu = cpu_time([os.getpid()]), time.process_time()
    with Meter([SOURCE]) as meter:
        asked = meter.interval
        time.sleep(_WATCH_SECONDS)
        readings = meter.readings()
    cost = (time.process_time() - cpu) / _WATCH_SECONDS
    share = share_of_others(before, cpu_time([os.getpid()]), _WATCH_SECONDS, system.cpu.threads or 1)
    one = readings["channel"][0]
    times = [at for channel, at in zip(readings["channel"], readings["t_before"], strict=True) if channel == one]
    gaps = sorted(after - before for before, after in pairwise(times))  # type: ignore[operator]
    typical, late = median(gaps), quantiles(gaps, n=20)[-1]
    rhythm = f"{human(typical, 's')}, 95 % within {human(late, 's')}"
    found = [
        _noted("rhythm of the power sampler", f"{human(asked, 's')}", rhythm, late < 3 * asked),
        _noted("CPU that the sampler uses", f"below {percent(QUIET)} of one", percent(cost), cost < QUIET),
    ]
    if share is None:
        return [*found, _absent("CPU that others use", "the kernel does not tell")]
    return [*found, _noted("CPU that others use", f"below {percent(QUIET)} of all", percent(share), share < QUIET)]


def _governor(state: dict[str, Any]) -> Finding:
    governor = state["cpu"]["governor"]
    if governor is None:
        return _absent("CPU frequency governor", "the kernel does not show it")
    return _noted("CPU frequency governor", "performance", governor, governor == "performance")


def _binding(system: System) -> Finding:
    """Processes bound as those of a point would be, one for each device or NUMA node: where the kernel lets each of them run."""
    claim = "NUMA binding as planned"
    count = max(2, system.devices_per_node if system.device_class == "gpu" else system.cpu.numa_nodes or 1)
    planned, rule = affinity.plan(count, system, host.mask())
    if not planned:
        return _absent(claim, rule)
    commands = [[sys.executable, "-P", "-m", "caraml.system.affinity", str(rank), str(count)] for rank in range(count)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]  # noqa: S603 -- this interpreter with a module of ours
    told = [json.loads(process.communicate(timeout=_CHILD_SECONDS)[0] or "{}") for process in running]
    reasons = sorted({seen["reason"] for seen in told if seen.get("reason")})
    if reasons:
        return _absent(claim, "; ".join(reasons))
    wanted = [{cpu for core in cores for cpu in core.cpus} for cores in planned]
    kept = [bool(seen.get("bound")) and set(seen["ran_on"]) <= cpus for seen, cpus in zip(told, wanted, strict=True)]
    places = " | ".join(str(seen.get("cpus") or "?") for seen in told)
    return fact(claim, f"{count} of {count} processes on CPUs of their own", f"{sum(kept)} of {count}, on CPUs {places}", all(kept))


def _gpu_findings(system: System, state: dict[str, Any]) -> list[Finding]:
    names = ("GPU clock against host clock", "GPU energy counter against its power", "GPU clock held back", "GPU ECC", "GPU link")
    if system.device_class != "gpu":
        return [_absent(name, "no GPU") for name in names]
    kind = accelerator_type()
    if kind is None:
        return [_absent(name, "torch sees no GPU") for name in names]
    clock, gpus = accelerator_clock(open_device("gpu", 0)), state["gpus"]
    if kind != "cuda" or not gpus:
        why = "NVML does not tell" if kind == "cuda" else f"not known of {kind} devices"
        return [clock, *(_absent(name, why) for name in names[1:])]
    reasons = sorted({reason for gpu in gpus for reason in gpu["throttle"] or () if reason != "gpu_idle"})
    links = sorted({f"generation {gpu['pcie_generation']} x{gpu['pcie_width']}" for gpu in gpus})
    ecc = sorted({{True: "on", False: "off", None: "not told"}[gpu["ecc"]] for gpu in gpus})
    return [
        clock,
        _gpu_counter(),
        _noted(names[2], "not", ", ".join(reasons) or "not", not reasons),
        _noted(names[3], "on", ", ".join(ecc), ecc == ["on"]),
        _noted(names[4], "one for all GPUs", ", ".join(links), len(links) == 1),
    ]


def accelerator_clock(device: Device, size: int = 2048) -> Finding:
    """About a second of matrix products of ``size``, timed by the accelerator's events and by the host.

    How many products take a second is told by those timed before. A GPU at rest takes a while to raise its clocks, so the first numbers are
    too low. Where the clocks disagree, the products are timed again: the host may have been interrupted between its own clock and the mark.
    """
    claim = "GPU clock against host clock"
    if not getattr(device, "events_tell_time", True):
        return _absent(claim, f"events of {device.torch_device.type} devices tell no time")
    a = torch.ones(size, size, device=device.torch_device)

    def work(count: int) -> tuple[float, float | None]:
        device.synchronize()
        begin, first = device.now(), device.mark()
        for _ in range(count):
            a @ a
        last = device.mark()
        device.synchronize()
        return device.now() - begin, device.between(first, last)

    work(2)  # loads the kernel
    count = 10
    for _ in range(_CLOCK_TRIES):
        host, seconds = work(count)
        found = number(claim, host, Metric(value=seconds, unit="s"), CLOCK_DRIFT * host + 1e-3)
        if host > _CLOCK_SECONDS and found.verdict == "right":
            break
        count = max(1, min(int(count / max(host, 1e-9)), _MOST_PRODUCTS))
    return found


def _gpu_counter() -> Finding:
    """Energy counter and integral of power over the same three seconds of work, where the sensors have both."""
    claim = "GPU energy counter against its power"
    with Meter(["nvml"]) as meter, meter.window("work") as window:
        a = torch.randn(4096, 4096, device="cuda")
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()
    energy = window.energy
    ratios = [channel.crosscheck_ratio for channel in (energy.channels if energy else ()) if channel.crosscheck_ratio is not None]
    if not ratios:
        return _absent(claim, "the sensors do not offer both")
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    verdict: Verdict = "right" if abs(worst - 1) < COUNTER_MISMATCH else "note"
    return Finding(claim, "100 %", f"{percent(worst)} ± {percent(COUNTER_MISMATCH)}", verdict, "1", 1.0, worst, COUNTER_MISMATCH)


HERE = Path(__file__).parent
FILE = "verify.json"
FOLDER = "verify"
"""The known work has a store of its own, so that nobody takes it for a result."""
NODES = "nodes.toml"
LOCAL = "local"
_KNOWN = {POWER_SOURCES: SOURCE, OVERRIDE: "cpu"}
"""Environment variables of work on devices and with sensors that are known."""
_BATCH = 4
"""Samples of each node in the work that goes over several."""


@dataclass(frozen=True)
class Place:
    """Where the known work runs: a system, the launcher that brings it there, and over how many nodes one point of it goes."""

    system: System
    launcher: Callable[[Path], Launcher]
    """Makes the launcher for a store's folder."""
    nodes: int = 1
    name: str = LOCAL
    """The launcher's name."""

    @property
    def cpus(self) -> System:
        """The system without its accelerators: a device of known speed needs none."""
        if self.system.device_class == "cpu":
            return self.system
        cpu = DeviceModel(model=self.system.cpu.model, kind="cpu")
        return self.system.model_copy(update={"devices": (cpu,), "devices_per_node": 1, "affinity": None})


def here() -> Place:
    """This machine."""
    return Place(detect(), lambda root: LocalLauncher())


def prove(out: Path, watcher: Watcher, place: Place | None = None, say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """Every finding, the machine's last. Records stay below ``out/verify`` and the findings in ``out/verify.json``, of which those of
    an earlier proof go at once.

    With a ``place`` that is not this machine, nothing is said of the machine itself, since this process does not run on it. On this one
    the proof waits for its turn on the device, and tells ``say`` what it waits for.
    """
    store, known = Store(out / FOLDER), place or here()
    if known.name == LOCAL:
        refuse_login_node("caraml verify", option="")
    store.make()
    (out / FILE).unlink(missing_ok=True)
    with _turn(known, out, say):
        with variables_set(_KNOWN):
            findings = _measured(load_suite(str(HERE / "suite.toml")), _with(known.cpus, _KNOWN), known, store, watcher)
            if known.nodes > 1:
                findings += over_nodes(known, store, watcher)
        findings += _measured(load_suite(str(HERE / "real.toml")), known.system, known, store, watcher)
        if known.name == LOCAL:
            findings += machine_findings(detect())
    if known.name != LOCAL:
        findings.append(Finding("machine", "", f"run caraml verify on a node of {known.system.name} to look at the machine", "not here"))
    write(out / FILE, findings)
    return findings


@contextmanager
def _turn(place: Place, out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Have this machine's device to ourselves while the block runs, as far as campaigns of this user go: each would disturb the other."""
    lock = DeviceLock(place.system.identity, f"caraml verify into {out.absolute()}") if place.name == LOCAL else None
    while lock is not None and not lock.acquire():
        if (news := lock.news()) is not None:
            say(news)
        time.sleep(_LOOK_SECONDS)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _with(system: System, variables: dict[str, str]) -> System:
    """The system with variables of its points' scripts in place of its own: a site may set its own sensors, and not every queue and
    container passes on what the caller has."""
    software = system.site.software
    software = software.model_copy(update={"variables": {**software.variables, **variables}})
    return system.model_copy(update={"site": system.site.model_copy(update={"software": software})})


def right(findings: Sequence[Finding]) -> bool:
    """True when nothing that was claimed is wrong."""
    return all(finding.verdict != "wrong" for finding in findings)


def write(path: Path, findings: Sequence[Finding]) -> None:
    """The findings as JSON, whole or not at all."""
    content = {
        "caraml": __version__,
        "method_version": METHOD_VERSION,
        "finished_at": now(),
        "right": right(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    write_file(path, json.dumps(content, indent=1, ensure_ascii=False))


def over_nodes(place: Place, store: Store, watcher: Watcher) -> list[Finding]:
    """Findings about work that goes over several nodes with unequal sensors. On this machine alone, processes of it play the nodes."""
    file, system, findings = load_suite(str(HERE / NODES)), place.cpus, []

    def played(file: SuiteFile) -> list[Record]:
        machine = machine_of(system.model_copy(update={"nodes": place.nodes}), "played")
        return [play(planned.point, store) for planned in expand(file, machine, params_of).points]

    for benchmark in file.suite.benchmark:
        wide = benchmark.model_copy(update={"nodes": place.nodes, "global_batch": place.nodes * _BATCH})
        one = replace(file, suite=file.suite.model_copy(update={"benchmark": [wide]}))
        variables = {**_KNOWN, POWER_SOURCES: source_of(place.nodes, last_dies=benchmark.name != "nodes")}
        with variables_set(variables):
            there = _with(system, variables)
            findings += _claimed(one, played, store) if place.name == LOCAL else _measured(one, there, place, store, watcher)
    return findings


def _measured(file: SuiteFile, system: System, place: Place, store: Store, watcher: Watcher) -> list[Finding]:
    """Findings about every point of a suite, measured anew."""

    def run(file: SuiteFile) -> list[Record]:
        return run_campaign(Campaign(file, system, store, place.launcher(store.root), watcher, True, Options(launcher=place.name)))

    return _claimed(file, run, store)


def _claimed(file: SuiteFile, run: Callable[[SuiteFile], Iterable[Record]], store: Store) -> list[Finding]:
    """Claims about every benchmark; those about which one is wrong are measured once more."""
    findings = []
    for record in run(file):
        found = claims(record, store)
        if not right(found):
            alone = [benchmark for benchmark in file.suite.benchmark if benchmark.name == record.point.benchmark]
            again = run(replace(file, suite=file.suite.model_copy(update={"benchmark": alone})))
            found = seen_twice(found, [finding for record in again for finding in claims(record, store)])
        findings += found
    return findings


_LOOK_SECONDS = 0.05


def play(point: Point, store: Store, delays: tuple[float, ...] = ()) -> Record:
    """Measure a point of several nodes here and return its record; node ``i`` comes ``delays[i]`` seconds late."""
    folder, meet = store.new_attempt(point), own_folder()
    children = []
    try:
        with open_new(folder / LOG) as log:
            for number in range(point.nodes):
                place = {MEET: str(meet), PEER: "localhost", "SLURM_PROCID": str(number), NODE: f"node-{number + 1}"}
                network = {"GLOO_SOCKET_IFNAME": LOOPBACK, "CARAML_BIND": "off"}
                command = ["caraml.engine.start", f"--nodes={point.nodes}", f"--devices={point.devices}", "caraml.worker", str(folder)]
                late = ["sh", "-c", f'sleep {delays[number]}; exec "$0" "$@"'] if number < len(delays) else []
                argv = [*late, sys.executable, "-P", "-m", *command]
                children.append(subprocess.Popen(argv, env={**os.environ, **network, **place}, stdout=log, stderr=log))  # noqa: S603 -- this interpreter with a module of ours
            _wait(children, point.measure.timeout_seconds)
    finally:
        for child in children:
            child.kill()
        shutil.rmtree(meet, ignore_errors=True)
    if not (folder / RECORD).exists():
        codes = [child.wait() for child in children]
        finish(folder, next((code for code in codes if code), 1))
    return read_record(folder / RECORD)


def _wait(children: list[subprocess.Popen[bytes]], longest: float) -> None:
    """Until all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes) or any(codes):
            return
        time.sleep(_LOOK_SECONDS)
