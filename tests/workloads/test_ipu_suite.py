"""Suites for IPUs: the arguments of the vendor's programs, and what is read of what they say, against stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from caraml.campaign import Campaign, Options
from caraml.campaign.machine import machine_of
from caraml.campaign.runner import run_campaign
from caraml.launch.launchers import LocalLauncher
from caraml.reference import load
from caraml.report.progress import LogLines
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.choice import with_settings
from caraml.suite.expand import expand
from caraml.suite.load import load_suite
from caraml.system.catalogue import load_system
from caraml.workloads import params_of
from caraml.workloads.command import Params as CommandParams
from caraml.workloads.command import names_of

FAKES = Path(__file__).parents[1] / "fakes"
pytestmark = pytest.mark.processes


PROGRAMS = {
    "nlp/gpt2/pytorch/train_gpt2.py": "gpt",
    "vision/cnns/tensorflow2/train.py": "resnet50",
    "vision/cnns/pytorch/train/train.py": "cnns",
}


def run(tmp_path: Path, smallest: set[int], suite: str = "caraml-ipu", system: str = "jureca-ipu") -> list[Record]:
    """The points of the smallest batches, with a checkout whose programs are the stand-ins."""
    for name, program in PROGRAMS.items():
        place = tmp_path / "examples" / name
        place.parent.mkdir(parents=True)
        start = f"import runpy, sys\nsys.argv.insert(1, {program!r})\n"
        place.write_text(f"{start}runpy.run_path({str(FAKES / 'ipu' / 'programs.py')!r}, run_name='__main__')\n")
    settings = (f"params.examples={tmp_path / 'examples'}", f"params.python={sys.executable}", "measure.idle_seconds=0")
    file = with_settings(load_suite(suite), settings, params_of)
    machine = load_system(system)
    points = expand(file, machine_of(machine, "local"), params_of).points
    only = frozenset(one.key or one.point.key for one in points if one.point.global_batch in smallest)
    with (tmp_path / "said").open("w") as said:
        options = Options(file=suite, only=only)
        return run_campaign(Campaign(file, machine, Store(tmp_path / "out"), LocalLauncher(), LogLines(said), options=options))


def test_the_vendor_s_programs_run_and_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "graphcore")
    (tmp_path / "sdk").mkdir()
    (tmp_path / "sdk" / "gcipuinfo.py").symlink_to(FAKES / "power" / "modules" / "gcipuinfo.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "sdk"), prepend=":")
    monkeypatch.setenv("FAKE_IPU", '["100.00W", "101.00W", "99.00W", "100.00W"]')
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    records = {(record.point.benchmark, record.point.global_batch): record for record in run(tmp_path, {16, 64})}
    for (benchmark, batch), (item, items) in {
        ("gpt-117M", 64): ("token", 3 * 64 * 1024),
        ("resnet50", 16): ("image", 1_281_152),
        ("resnet50", 64): ("image", 1_281_152),
        ("resnet50 on several", 16): ("image", 1_281_152),
        ("resnet50 on several", 64): ("image", 1_281_152),
    }.items():
        record = records.pop((benchmark, batch))
        assert record.status == "ok", record.reason
        assert record.window is not None and record.facts is not None and (record.window.items, record.facts.item) == (items, item)
        seconds = record.window.end - record.window.start
        assert record.window.start > 0.5, "the first step compiles, and is not in the window"
        assert record.metrics["throughput"].value == pytest.approx(items / seconds)
        printed = record.metrics["printed_rate"]
        assert record.definitions["printed_rate"].better == "higher"
        assert (printed.unit, printed.value) == ("sample/s", pytest.approx(batch / 0.3 if item == "token" else items / 0.3))
        assert record.metrics["mean_power"].value == pytest.approx(400.0, rel=0.02)
    assert not records


def test_the_batches_are_those_of_both_tables() -> None:
    machine = machine_of(load_system("jureca-ipu"))
    points = [one.point for one in expand(load_suite("caraml-ipu"), machine, params_of).points]
    for benchmark, table in (("gpt-117M", "IPU NLP"), ("resnet50", "IPU CV")):
        published = {row.parameters["batch"] for row in load() if row.source == "caraml" and row.table == table}
        assert {point.global_batch for point in points if point.benchmark == benchmark} == published
    for point in points:
        if point.benchmark == "gpt-117M":
            argv = names_of(point, CommandParams.model_validate(point.params), "", "")
            assert argv["accumulation"] == point.global_batch // 4 and point.params["tokens"] == 3 * point.global_batch * 1024
        else:
            assert point.global_batch % (point.devices * point.micro_batch) == 0
            assert point.params["images"] == 1_281_167 // point.global_batch * point.global_batch


def test_pearc_s_first_table_has_its_devices_and_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {
        (row.devices, row.parameters["instances"])
        for row in load()
        if (row.source, row.table, row.parameters.get("epoch")) == ("pearc", "Table 1", 2)
    }
    points = [one.point for one in expand(load_suite("pearc22-ipu"), machine_of(load_system("ipu-pod16")), params_of).points]
    assert {(point.world, point.params["instances"]) for point in points} == published and len(points) == 6
    assert {1_281_167 // point.global_batch * point.global_batch for point in points} == {points[0].params["images"]}
    (start := tmp_path / "bin" / "poprun").parent.mkdir()
    start.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKES / "ipu" / "programs.py"}" poprun "$@"\n')
    start.chmod(0o755)
    monkeypatch.setenv("PATH", str(start.parent), prepend=":")
    (record,) = run(tmp_path, {2 * 18 * 57}, "pearc22-ipu", "ipu-pod16")
    assert record.status == "ok" and record.window is not None, record.reason
    seconds = record.window.end - record.window.start
    assert record.window.start > 0.5, "the first epoch compiles, and is not in the window"
    assert record.window.items == 1_280_448 and record.metrics["throughput"].value == pytest.approx(1_280_448 / seconds)
    assert record.metrics["printed_rate"].value == pytest.approx(1_280_448 / 0.3, rel=1e-6)


@pytest.mark.parametrize("system", ["ipu-pod64", "jureca-ipu"])
def test_what_torch_cannot_run_on_ipus_is_not_promised(system: str) -> None:
    plan = expand(load_suite("llm"), machine_of(load_system(system)), params_of)
    assert plan.points and all(one.skip is not None and "suite caraml-ipu" in one.skip for one in plan.points)
