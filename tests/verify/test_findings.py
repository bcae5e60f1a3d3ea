"""The judge is judged: right numbers pass, wrong ones do not, and the known device does what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from caraml.base.errors import InputError
from caraml.campaign.machine import DeviceLock, machine_of
from caraml.cli.asked import place_of
from caraml.engine.device import CpuDevice
from caraml.metrics.model import Metric
from caraml.power.model import WindowEnergy
from caraml.power.signals import Constant, Square
from caraml.power.source import POWER_SOURCES
from caraml.report.tables import as_toml
from caraml.results.store import Store
from caraml.suite.expand import expand
from caraml.suite.load import SuiteFile, load_suite
from caraml.suite.model import Policy
from caraml.system.families import OVERRIDE
from caraml.system.model import System
from caraml.verify import Clock, KnownDevice, Params, VirtualClock, proof
from caraml.verify.claims import SIGNAL, SOURCE, readings_in_time, signal_origin
from caraml.verify.finding import Finding, fact, number, seen_twice, undecided
from caraml.verify.proof import HERE, LOCAL, accelerator_clock, right, write
from caraml.workloads import params_of
from tests.test_campaign import Watcher


def metric(value: float | None, half: float | None = None) -> Metric:
    if value is None or half is None:
        return Metric(value=value, unit="s", reason="no sensor" if value is None else None)
    return Metric(value=value, unit="s", low=value - half, high=value + half)


def test_a_wrong_number_beside_other_work_is_not_decided_and_a_wrong_fact_is() -> None:
    others = Metric(value=0.5, unit="1")
    off = undecided(number("x", 1.0, metric(1.5)), others)
    assert off.verdict == "note" and "others used 50.0 % of the CPU time" in off.measured
    assert undecided(fact("x", "1", "2", False), others).verdict == "wrong"
    assert undecided(number("x", 1.0, metric(None)), others).verdict == "wrong", "missing is missing"
    assert undecided(number("x", 1.0, metric(1.0)), others).verdict == "right"
    rate = [undecided(number("x", 1.0, Metric(value=value, unit="thing/s")), others).verdict for value in (2.0, 0.5)]
    assert rate == ["wrong", "note"], "others make no work faster"


class Gpu(CpuDevice):
    """A GPU at rest, whose clocks rise fivefold in the first 30 ms of work, on a made-up clock.

    ``events`` is how fast the clock of its events runs, ``interruption`` how long the host is held up before the mark of one long stretch.
    """

    def __init__(self, events: float = 1.0, interruption: float = 0.0) -> None:
        self.events, self.interruption, self.host, self.queue, self.busy = events, interruption, 0.0, 0.0, 0.0

    def now(self) -> float:
        return self.host

    def product(self) -> None:
        seconds = 3.5e-4 if self.busy > 0.03 else 5 * 3.5e-4
        self.queue, self.busy = max(self.queue, self.host) + seconds, self.busy + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.queue) + 2e-5

    def mark(self) -> float:
        if self.busy > 0.1:
            self.host, self.interruption = self.host + self.interruption, 0.0
        self.queue = max(self.queue, self.host)
        return self.queue * self.events


@pytest.mark.parametrize(
    ("gpu", "verdict"),
    [(Gpu(), "right"), (Gpu(events=1.005), "wrong"), (Gpu(events=0.995), "wrong"), (Gpu(interruption=0.02), "right")],
    ids=["right", "fast", "slow", "interrupted"],
)
def test_a_wrong_clock_is_found_on_a_gpu_at_rest_and_an_interruption_is_none(gpu: Gpu, verdict: str) -> None:
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten.mm.default:
                return func(*args, **(kwargs or {}))
            gpu.product()
            return args[0]

    with Products():
        found = accelerator_clock(gpu, size=1)
    assert found.verdict == verdict and found.truth_value is not None and found.truth_value > 0.5, found


def test_only_what_is_wrong_twice_is_wrong() -> None:
    first = [number("a", 1.0, metric(1.0)), number("b", 1.0, metric(1.5)), number("c", 1.0, metric(1.5)), fact("d", "1", "2", False)]
    second = [number("a", 1.0, metric(2.0)), number("b", 1.0, metric(1.0)), number("c", 1.0, metric(1.4))]
    a, b, c, d = seen_twice(first, second)
    assert a == first[0] and c == first[2] and d == first[3], "what the second did not measure stays"
    assert b.verdict == "note" and b.measured.startswith("1.000 s") and "at first 1.500 s" in b.measured


def test_a_disturbed_point_is_measured_once_more_and_a_fault_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = load_suite(str(HERE / "suite.toml")), []
    monkeypatch.setattr(proof, "claims", lambda record, store: record.found)

    def runs(*values: list[float]) -> Callable[[SuiteFile], list[Any]]:
        left = [iter(of_one) for of_one in values]

        def run(part: SuiteFile) -> list[Any]:
            names = [benchmark.name for benchmark in part.suite.benchmark][: len(values)]
            asked.append(names)
            each = zip(names, left if len(names) > 1 else left[-1:], strict=True)
            return [
                SimpleNamespace(point=SimpleNamespace(benchmark=name), found=[number(name, 1.0, metric(next(of)))]) for name, of in each
            ]

        return run

    two = replace(file, suite=file.suite.model_copy(update={"benchmark": file.suite.benchmark[:2]}))
    names = [benchmark.name for benchmark in two.suite.benchmark]
    assert [one.verdict for one in proof._claimed(two, runs([1.0], [1.5, 1.0]), Store(tmp_path))] == ["right", "note"]
    assert asked == [names, names[1:]]
    assert [one.verdict for one in proof._claimed(two, runs([1.0], [1.5, 1.5]), Store(tmp_path))] == ["right", "wrong"]


@pytest.mark.parametrize(
    ("measured", "slack", "verdict"),
    [
        (metric(1.0), 0.0, "right"),
        (metric(1.001), 0.0, "wrong"),
        (metric(1.001, 0.002), 0.0, "right"),
        (metric(1.003, 0.002), 0.0, "wrong"),
        (metric(1.003, 0.002), 0.002, "right"),
        (metric(0.996, 0.002), 0.001, "wrong"),
        (metric(None), 9.0, "wrong"),
        (None, 9.0, "wrong"),
    ],
)
def test_a_number_is_right_within_its_interval_and_the_truth_s(measured: Metric | None, slack: float, verdict: str) -> None:
    assert number("x", 1.0, measured, slack).verdict == verdict


def test_a_number_that_may_be_anything_is_not_called_right() -> None:
    """Else the interval of a window with hardly a reading, or one that is itself wrong, would make any number right."""
    assert number("x", 1.0, metric(1.0, 0.6)).verdict == number("x", 1.0, metric(1.0, 1e300)).verdict == "note"
    assert number("x", 1.0, metric(2.0, 0.6)).verdict == "wrong" and number("x", 1.0, metric(1.3, 0.4)).verdict == "right"
    assert number("net", 0.1, metric(2.0, 5.0), of=100.0).verdict == number("none", 0.0, metric(0.1, 0.2)).verdict == "right"


@pytest.mark.parametrize(("name", "file"), [("pace", "suite.toml"), ("nodes", "nodes.toml")])
def test_the_energy_of_a_window_depends_on_when_it_is_taken(name: str, file: str) -> None:
    """Over whole periods of the sensor's signal it would be the same wherever the window is taken to be."""
    (benchmark,) = (one for one in load_suite(str(HERE / file)).suite.benchmark if one.name == name)
    params, policy = Params.model_validate(benchmark.params), benchmark.measure or Policy()
    seconds = policy.min_steps * (params.step_seconds + params.slow_rank_extra)
    assert (
        policy.max_steps == policy.min_steps
        and policy.min_seconds <= seconds <= policy.max_seconds
        and seconds % SIGNAL.period == pytest.approx(SIGNAL.period / 2)
    )


def test_all_of_the_known_work_runs_on_a_cpu_that_emulates_half_precision() -> None:
    system = proof.here().cpus
    cpu = system.cpu.model_copy(update={"emulates": ("bf16", "fp16"), "usable_threads": 2})
    plan = expand(load_suite(str(HERE / "suite.toml")), machine_of(system.model_copy(update={"cpu": cpu}), LOCAL), params_of)
    assert len(plan.points) == 9 and not [planned.skip for planned in plan.points if planned.skip is not None]


def test_the_proof_has_its_turn_and_leaves_no_verdict_when_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign and a proof on one device would disturb each other."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("caraml.campaign.machine._SOON_SECONDS", 0.0)
    place = proof.here()
    campaign, said, asked = DeviceLock(place.system.identity, "suite quick"), list[str](), []

    def say(text: str) -> None:
        said.append(text)
        campaign.release()

    def measured(file: SuiteFile, system: System, *_: object) -> list[Finding]:
        another = DeviceLock(place.system.identity, "another")
        asked.append((system.site.software.variables, another.acquire()))
        another.release()
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "_measured", measured)
    (tmp_path / proof.FILE).write_text('{"right": true}')
    assert campaign.acquire()
    with pytest.raises(KeyboardInterrupt):
        proof.prove(tmp_path, Watcher(), place, say)
    assert asked == [({POWER_SOURCES: SOURCE, OVERRIDE: "cpu"}, False)] and "suite quick uses" in said[0]
    assert not (tmp_path / proof.FILE).exists() and campaign.acquire(), "its turn is over"


def test_a_site_s_own_sensors_and_device_are_not_those_of_the_known_work(tmp_path: Path) -> None:
    machine = tmp_path / "mine.toml"
    machine.write_text(
        as_toml(proof.here().system) + f"\n[site.software]\nvariables = {{ {POWER_SOURCES} = 'cray', OMP_PLACES = 'cores' }}\n"
    )
    place = place_of(str(machine), "local", 1)
    variables = proof._with(place.system, proof._KNOWN).site.software.variables
    assert variables == {POWER_SOURCES: SOURCE, OVERRIDE: "cpu", "OMP_PLACES": "cores"}, "the system that was asked for"


def test_a_login_node_is_told_with_a_command_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARAML_HERE")
    monkeypatch.setattr("caraml.campaign.machine.login_node", lambda: "jwlogin01 is none of the 900 nodes of a Slurm cluster")
    with pytest.raises(InputError, match="jwlogin01") as refused:
        proof.prove(tmp_path, Watcher())
    hint = refused.value.hint or ""
    assert hint.startswith("caraml verify --system FILE --launcher slurm") and "CARAML_HERE=1" in hint and "--here" not in hint


def test_one_wrong_number_makes_the_proof_fail(tmp_path: Path) -> None:
    good = [fact("a", "yes", "yes", True), Finding("b", "", "no GPU", "not here"), Finding("c", "", "", "note")]
    assert right(good) and not right([*good, fact("d", "yes", "no", False)])
    write(tmp_path / "verify.json", [*good, number("e", 1.0, metric(1.5, 0.1), 0.1)])
    content = json.loads((tmp_path / "verify.json").read_text())
    assert content["right"] is False
    last = content["findings"][-1]
    assert (last["truth_value"], last["value"], last["allowed"]) == (1.0, 1.5, pytest.approx(0.2))
    assert list(tmp_path.iterdir()) == [tmp_path / "verify.json"]


def test_the_sensor_s_clock_is_found_from_its_counter() -> None:
    """A counter that renews itself every 20 ms and is read every 31 ms from 12 s on; the signal began at 3.7 s."""
    signal, reads = Square(), [12.0 + 0.031 * i for i in range(100)]
    shown = [signal.energy(math.floor((at - 3.7) / 0.02) * 0.02) for at in reads]
    readings = {"channel": ["f:0:energy"] * 100 + ["f:0:power_instant"], "t_before": [*reads, 1.0], "value": [*shown, 500.0]}
    assert signal_origin(readings) == pytest.approx(3.7, abs=0.001)  # type: ignore[arg-type]
    watts = {"channel": ["f:0:energy"], "t_before": [10.0], "value": [600.0]}
    assert signal_origin(watts, Constant(300.0)) == pytest.approx(8.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("origins", "verdict"), [((2.0,), "right"), ((2.1,), "wrong"), ((1.9,), "wrong"), ((1.0, 2.0), "right"), ((1.0, 2.1), "wrong")]
)
def test_readings_at_the_wrong_times_are_found(origins: tuple[float, ...], verdict: str) -> None:
    """A truth that is shifted as they are says that their energy is right."""
    idle = WindowEnergy("idle", 2.0002, 3.0)
    assert readings_in_time((origin, idle) for origin in origins).verdict == verdict


def test_the_known_device_is_behind_its_host() -> None:
    clock = VirtualClock(0.0)
    device = KnownDevice(clock, launch_cost=0.001, queue=1.0)
    first = device.mark()
    device.launch(0.4)
    second = device.mark()
    assert device.now() == pytest.approx(0.001) and device.between(first, second) is None
    for _ in range(4):
        device.launch(0.4)
    assert device.now() == pytest.approx(1.001), "the host waits while more than the queue holds is waiting"
    assert device.between(first, second) == pytest.approx(0.401)
    device.synchronize()
    assert device.now() == pytest.approx(2.001)


def test_the_asynchronous_device_takes_real_time() -> None:
    busy, device = KnownDevice(Clock()), KnownDevice(Clock())
    busy.queue = math.inf
    busy.launch(3600)
    assert busy.between(busy.mark(), busy.mark()) is None, "an hour of work is not done"
    begin = device.now()
    device.launch(0.05)
    device.synchronize()
    assert device.now() - begin >= 0.05
