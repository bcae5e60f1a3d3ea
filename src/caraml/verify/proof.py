"""The whole proof: run the known work through campaign, launcher, worker and store, compare, look at the machine, write it down."""

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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from caraml import __version__
from caraml.base.files import open_new, write_file
from caraml.campaign import Campaign, Options, Watcher, run_campaign
from caraml.campaign.machine import machine_of
from caraml.engine.instruments import POWER_SOURCES
from caraml.engine.start import LOOPBACK, MEET, PEER, own_folder
from caraml.launch.base import Launcher
from caraml.launch.launchers import LocalLauncher
from caraml.power.model import METHOD_VERSION
from caraml.power.node import NODE
from caraml.results.finish import LOG, finish
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.expand import expand
from caraml.suite.load import SuiteFile, load_suite
from caraml.suite.model import Machine, Point
from caraml.system.detect import detect
from caraml.system.families import OVERRIDE
from caraml.system.model import DeviceModel, System
from caraml.verify.claims import SOURCE, Finding, claims, seen_twice, source_of
from caraml.verify.machine import machine_findings
from caraml.workloads import params_of

HERE = Path(__file__).parent
FILE = "verify.json"
FOLDER = "verify"
"""The known work has a store of its own, so that nobody takes it for a result."""
NODES = "nodes.toml"
LOCAL = "local"
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


def prove(out: Path, watcher: Watcher, place: Place | None = None) -> list[Finding]:
    """Every finding, the machine's last. Records stay below ``out/verify`` and the findings in ``out/verify.json``.

    With a ``place`` that is not this machine, nothing is said of the machine itself, since this process does not run on it.
    """
    store, known = Store(out / FOLDER), place or here()
    with _environment({POWER_SOURCES: SOURCE, OVERRIDE: "cpu"}):
        findings = measure("suite.toml", known.cpus, known, store, watcher)
        if known.nodes > 1:
            findings += over_nodes(known, store, watcher)
    findings += measure("real.toml", known.system, known, store, watcher)
    if known.name == LOCAL:
        findings += machine_findings(detect())
    else:
        findings.append(Finding("machine", "", f"run caraml verify on a node of {known.system.name} to look at the machine", "not here"))
    write(out / FILE, findings)
    return findings


def right(findings: Sequence[Finding]) -> bool:
    """True when nothing that was claimed is wrong."""
    return all(finding.verdict != "wrong" for finding in findings)


def write(path: Path, findings: Sequence[Finding]) -> None:
    """The findings as JSON, whole or not at all."""
    content = {
        "caraml": __version__,
        "method_version": METHOD_VERSION,
        "finished_at": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        "right": right(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    write_file(path, json.dumps(content, indent=1, ensure_ascii=False))


def measure(suite: str, system: System, place: Place, store: Store, watcher: Watcher) -> list[Finding]:
    """Findings about every point of one of our suites, measured anew."""
    return _measured(load_suite(str(HERE / suite)), system, place, store, watcher)


def over_nodes(place: Place, store: Store, watcher: Watcher) -> list[Finding]:
    """Findings about work that goes over several nodes with unequal sensors. On this machine alone, processes of it play the nodes."""
    file, system, findings = load_suite(str(HERE / NODES)), place.cpus, []
    for benchmark in file.suite.benchmark:
        wide = benchmark.model_copy(update={"nodes": place.nodes, "global_batch": place.nodes * _BATCH})
        one = replace(file, suite=file.suite.model_copy(update={"benchmark": [wide]}))
        with _environment({POWER_SOURCES: source_of(place.nodes, last_dies=benchmark.name != "nodes")}):
            if place.name != LOCAL:
                findings += _measured(one, system, place, store, watcher)
                continue
            machine = machine_of(system.model_copy(update={"nodes": place.nodes}), "played")
            findings += _claimed(one, partial(_played, machine, store), store)
    return findings


def _played(machine: Machine, store: Store, file: SuiteFile) -> list[Record]:
    return [play(planned.point, store) for planned in expand(file, machine, params_of).points]


def _measured(file: SuiteFile, system: System, place: Place, store: Store, watcher: Watcher) -> list[Finding]:
    options = Options(launcher=place.name)
    return _claimed(
        file, lambda file: run_campaign(Campaign(file, system, store, place.launcher(store.root), watcher, True, options)), store
    )


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


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables of the processes started inside, put back afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
