"""Workloads and power sources of other packages: found, told apart, named in what they measure; a broken one harms nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from caraml.base import plugins
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.toml import parse_toml
from caraml.cli import app
from caraml.doctor import plugin_checks
from caraml.metrics.model import Facts
from caraml.power import Meter, source_names
from caraml.power.source import BUILT_IN, create
from caraml.suite.expand import Plan, expand
from caraml.suite.load import Suite, SuiteFile
from caraml.suite.placement import Machine
from caraml.system.environment import environment
from caraml.workloads import WORKLOADS, load_workload, params_of, software_of
from caraml.workloads.base import Task, checked

Install = Callable[..., None]

NET = """
from pydantic import BaseModel
from caraml.workloads.base import Workload

class Params(BaseModel):
    width: int = 8

WORKLOAD = Workload(title="a net", params=Params, build=lambda ctx: None)
UNCHECKED = Workload(title="a net", params=dict, build=lambda ctx: None)
UNBUILT = Workload(title="a net", params=Params, build=None)
UNTITLED = Workload(title=3, params=Params, build=lambda ctx: None)
"""

WATTS = """
import time
from caraml.power import Channel, Reading, SourceEntry

class Watts:
    min_interval_s = 0.0
    name = "watts"

    def open(self):
        pass

    def channels(self):
        return [Channel("watts:0", "", "power_instant", "device", "outlet", "watts:0", "outlet")]

    def read(self):
        now = time.monotonic()
        return [Reading("watts:0", now, now, 120.0)]

    def close(self):
        pass

def create(argument, devices, automatic):
    return Watts()

SOURCE = SourceEntry("watts", __name__, "an outlet")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one module and its entry points, as pip would."""

    def add(distribution: str, module: str, text: str, group: str, points: dict[str, str], *, version: str = "1.0") -> None:
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        plugins._plugins.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield add
    for name in [name for name, module in list(sys.modules.items()) if str(getattr(module, "__file__", "")).startswith(str(tmp_path))]:
        del sys.modules[name]
    monkeypatch.undo()
    plugins._plugins.cache_clear()


def planned(workload: str) -> Plan:
    text = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "{workload}"\nglobal_batch = 4\n'
    document = parse_toml(text, "s.toml")
    machine = Machine("local", "device", "cpu", "caraml 1, torch 2", nodes=1, devices_per_node=1)
    return expand(SuiteFile(document.validate(Suite), document), machine, params_of, software_of)


def test_a_workload_is_found_and_listed(install: Install) -> None:
    install("caraml-net", "plug_net", NET, "caraml.workloads", {"net": "plug_net:WORKLOAD"})
    assert load_workload("net").title == "a net"
    listed = CliRunner().invoke(app, ["list", "workloads"])
    assert listed.exit_code == 0 and "a net (caraml-net 1.0)" in listed.output


@pytest.mark.processes
def test_the_plug_in_s_version_decides_the_point_and_stands_in_the_record(install: Install) -> None:
    with pytest.raises(InputError, match=r'workload: found "net", expected one of'):
        planned("net")
    install("caraml-net", "plug_net", NET, "caraml.workloads", {"net": "plug_net:WORKLOAD"})
    point = planned("net").points[0].point
    assert point.software == "caraml 1, torch 2, caraml-net 1.0"
    assert environment()["versions"]["caraml-net"] == "1.0"
    assert point.key != point.model_copy(update={"software": "caraml 1, torch 2, caraml-net 2.0"}).key


def test_no_plug_in_decides_a_point_of_a_workload_of_caraml(install: Install) -> None:
    before = planned("gpt").points[0].point
    install("caraml-net", "plug_net", NET, "caraml.workloads", {"net": "plug_net:WORKLOAD", "gpt": "plug_net:WORKLOAD"})
    assert planned("gpt").points[0].point.key == before.key


@pytest.mark.parametrize("text", ["import no_such_library", "raise SystemExit('no_such_library')"])
def test_a_plug_in_that_does_not_import_is_named_and_harms_no_other(install: Install, text: str) -> None:
    install("caraml-broken", "plug_broken", text, "caraml.workloads", {"broken": "plug_broken:WORKLOAD"})
    install("caraml-net", "plug_net", NET, "caraml.workloads", {"net": "plug_net:WORKLOAD"})
    with pytest.raises(EnvironmentUnfitError, match=r"plug-in caraml-broken 1\.0 cannot be imported.*no_such_library"):
        load_workload("broken")
    assert load_workload("net").title == "a net" and load_workload("gpt").title
    listed = CliRunner().invoke(app, ["list", "workloads"])
    assert listed.exit_code == 0 and "no_such_library" in listed.output and "a net" in listed.output
    checks = {check.name: check for check in plugin_checks()}
    assert checks["plug-in: net (caraml-net 1.0)"].status == "ok"
    broken = checks["plug-in: broken (caraml-broken 1.0)"]
    assert broken.status == "warn" and "no_such_library" in broken.found and "pip uninstall caraml-broken" in str(broken.fix)


@pytest.mark.parametrize("name", ["gpt", "ap1", "known", "own_loop"])
def test_a_name_of_caraml_is_refused(install: Install, name: str) -> None:
    install("caraml-other", "plug_net", NET, "caraml.workloads", {name: "plug_net:WORKLOAD"})
    if name != "own_loop":
        assert load_workload(name).title != "a net"
    (check,) = plugin_checks()
    assert check.status == "warn" and "CARAML itself has a workload of that name" in check.found
    assert "caraml-other 1.0" in CliRunner().invoke(app, ["list", "workloads"]).output


def test_a_name_of_two_plug_ins_is_refused(install: Install) -> None:
    install("caraml-a", "plug_a", NET, "caraml.workloads", {"net": "plug_a:WORKLOAD"})
    install("caraml-b", "plug_b", NET, "caraml.workloads", {"net": "plug_b:WORKLOAD"}, version="2.0")
    with pytest.raises(InputError, match=r"each of caraml-a 1\.0 and caraml-b 2\.0 has a workload of that name"):
        load_workload("net")


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("Net-1", "plug_net:WORKLOAD", "small letters"),
        ("net", "plug_net:Params", "expected a caraml.workloads.base.Workload"),
        ("net", "plug_net:MISSING", "has no attribute 'MISSING'"),
        ("net", "plug_net:UNCHECKED", "params: found <class 'dict'>, expected a model of pydantic"),
        ("net", "plug_net:UNBUILT", "build: found None, expected a function"),
        ("net", "plug_net:UNTITLED", "title: found 3, expected text"),
    ],
)
def test_what_is_no_workload_is_refused_and_the_doctor_says_so(install: Install, name: str, target: str, message: str) -> None:
    install("caraml-net", "plug_net", NET, "caraml.workloads", {name: target})
    with pytest.raises((InputError, EnvironmentUnfitError), match=message):
        load_workload(name)
    (check,) = plugin_checks()
    assert check.status == "warn" and "plug-in caraml-net 1.0" in check.found and "caraml-net" in str(check.fix)
    assert CliRunner().invoke(app, ["list", "workloads"]).exit_code == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (None, "build: found NoneType, expected a caraml.workloads.base.Task"),
        ({}, r"build: facts: found dict, expected a caraml.metrics.model.Facts"),
        ({"flops_per_item": -1.0}, "build: facts: flops_per_item: found -1, expected 0 or more"),
        ({"items_per_sample": 0}, "build: facts: items_per_sample: found 0, expected 1 or more"),
    ],
)
def test_a_task_is_refused_whose_numbers_would_be_false(task: dict[str, Any] | None, message: str) -> None:
    stated: dict[str, Any] = {"item": "row", "items_per_sample": 1, "parameters": 3, "flops_per_item": 2.0, "flops_formula": "by hand"}
    nothing: Any = None
    built = None if task is None else Task(nothing, nothing, iter(()), nothing, Facts(**stated | task) if task else task)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        checked(built, "net")


def test_the_doctor_looks_into_launchers(install: Install) -> None:
    install("caraml-queue", "plug_queue", "class Queue:\n    slots = None\n", "caraml.launchers", {"queue": "plug_queue:Queue"})
    (check,) = plugin_checks()
    assert check.status == "warn" and "no submit, no poll, no cancel" in check.found and "caraml-queue 1.0" in check.found


@pytest.mark.processes
def test_a_power_source_is_found_and_measured_by_itself(install: Install) -> None:
    install("caraml-watts", "plug_watts", WATTS, "caraml.power_sources", {"watts": "plug_watts:SOURCE"})
    assert "watts" in source_names(auto_only=True)
    with Meter(["watts"], interval=0.01) as meter, meter.window("work") as window:
        meter.mark()
    (channel,) = window.energy.channels
    assert channel.source == "watts" and window.energy.method_version
    assert environment()["versions"]["caraml-watts"] == "1.0"


@pytest.mark.parametrize(
    ("text", "target", "reason"),
    [
        ("import no_such_library", "plug_watts:SOURCE", "no_such_library"),
        (WATTS.replace("return Watts()", "raise OSError('no port')"), "plug_watts:SOURCE", "OSError: no port"),
        (WATTS.replace("return Watts()", "raise SystemExit('no port')"), "plug_watts:SOURCE", "SystemExit: no port"),
        (WATTS.replace('name = "watts"', 'name = "volts"'), "plug_watts:SOURCE", "the source's name is 'volts', expected 'watts'"),
        (WATTS, "plug_watts:create", "expected a caraml.power.source.SourceEntry"),
        (WATTS.replace('"an outlet"', "3"), "plug_watts:SOURCE", "title: found 3, expected text"),
        (WATTS.replace("return Watts()", "return None"), "plug_watts:SOURCE", "found NoneType without open, channels, read, close"),
        (WATTS.replace("def close", "def shut"), "plug_watts:SOURCE", "found Watts without close"),
        (WATTS.replace("min_interval_s = 0.0", "pass"), "plug_watts:SOURCE", "no attribute 'min_interval_s'"),
        (
            WATTS.replace("min_interval_s = 0.0", "min_interval_s = None"),
            "plug_watts:SOURCE",
            "min_interval_s: found None, expected seconds",
        ),
    ],
    ids=["import", "creation", "exit", "name", "type", "title", "nothing", "method", "no interval", "interval"],
)
def test_a_power_source_that_does_not_work_says_so_and_the_others_are_read(install: Install, text: str, target: str, reason: str) -> None:
    install("caraml-watts", "plug_watts", text, "caraml.power_sources", {"watts": target})
    assert {*BUILT_IN, "watts"} == set(source_names())
    with Meter(["fake:constant", "watts"], interval=0.01) as meter:
        assert [channel.source for channel in meter.channels] == ["fake", "fake"]
        (told,) = meter.reasons
    assert "caraml-watts 1.0" in told and reason in told and "fix:" in told


def test_a_power_source_with_a_name_of_caraml_is_refused(install: Install) -> None:
    install("caraml-watts", "plug_watts", WATTS, "caraml.power_sources", {"rapl": "plug_watts:SOURCE"})
    assert source_names() == list(BUILT_IN) and create("rapl").__class__.__name__ == "RaplSource"
    (check,) = plugin_checks()
    assert check.status == "warn" and "CARAML itself has a power source of that name" in check.found


def test_without_plug_ins_there_is_nothing_to_say() -> None:
    assert plugin_checks() == [] and plugins.installed() == {} and set(source_names()) == set(BUILT_IN)
    assert set(WORKLOADS) == {line.split()[0] for line in CliRunner().invoke(app, ["list", "workloads"]).output.splitlines()}
