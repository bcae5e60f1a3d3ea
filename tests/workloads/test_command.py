"""Any program as a workload: templates that cannot do more than name, numbers that are found or an error, energy between marks."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from caraml.analysis.grouping import axes
from caraml.analysis.run_variation import mean_metric
from caraml.base.errors import InputError
from caraml.base.toml import parse_toml
from caraml.campaign import Campaign, Options
from caraml.campaign.attempt import PointTask, RunningPoint, record_of_program
from caraml.campaign.runner import run_campaign
from caraml.engine.instruments import CpuTime
from caraml.launch.launchers import LocalLauncher
from caraml.launch.script import program_script
from caraml.metrics.model import definition_of
from caraml.power.model import Boundary, BoundaryEnergy, ChannelEnergy, WindowEnergy
from caraml.power.signals import Constant
from caraml.report.grouping import unknown_energy
from caraml.report.progress import LogLines
from caraml.report.section import source, written
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.expand import PlannedPoint
from caraml.suite.load import Suite, SuiteFile
from caraml.suite.model import COMMAND_KEYS, Point, Policy
from caraml.system.detect import detect
from caraml.worker.command import COMMAND, Command, CommandWorker
from caraml.worker.command_record import Output, Ran, Sensors, how_it_ran, read_metrics, record_of_run
from caraml.workloads.command import MetricSpec, Params, filled
from tests.conftest import MakePoint
from tests.fakes.power.meter import logged
from tests.waiting import until

METRIC = 'metrics = { x = { pattern = "x=(.*)", unit = "s" } }'
HEAD = 'name = "c"\ntitle = "C"\n[[benchmark]]\nname = "p"\nworkload = "command"\n'


def run(tmp_path: Path, body: str) -> list[Record]:
    document = parse_toml(HEAD + body, str(tmp_path / "c.toml"))
    with (tmp_path / "said").open("w") as said:
        campaign = Campaign(
            SuiteFile(document.validate(Suite), document),
            detect(),
            Store(tmp_path / "out"),
            LocalLauncher(),
            LogLines(said),
            options=Options(file=str(tmp_path / "c.toml")),
        )
        return run_campaign(campaign)


def test_the_suite_model_knows_which_keys_are_the_commands_own() -> None:
    assert tuple(Params.model_fields) == COMMAND_KEYS


def test_a_template_names_and_does_nothing_else() -> None:
    assert filled("a{n:03d}{{b}}", {"n": 7}) == "a007{b}"
    for bad in ("{n.__class__}", "{n[0]}", "{0}", "{}", "{n!r}", "{n:{m}}", "{n:>100000000}"):
        with pytest.raises(ValidationError, match=r"expected|braces|plain"):
            Params.model_validate({"argv": ["echo", bad], "n": 1, "m": 2})

    with pytest.raises(ValidationError, match=r"\{\{ or \}\} for a brace that begins or ends no name, but found '\{'"):
        Params.model_validate({"argv": ["echo", "{"]})


def test_a_misspelt_key_is_an_unused_parameter() -> None:
    with pytest.raises(ValidationError, match="did you mean 'metrics'"):
        Params.model_validate({"argv": ["true"], "metric": 3})
    with pytest.raises(ValidationError, match=r"did you mean \{size\}"):
        Params.model_validate({"argv": ["true", "{sise}"], "size": 3})


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"unit": "s", "pattern": "x"}, "group"),
        ({"unit": "s", "pattern": "("}, "regular expression"),
        ({"unit": "s"}, "exactly one"),
        ({"unit": "s", "key": "a", "column": "b"}, "exactly one"),
        ({"unit": "s", "column": "b"}, "file"),
    ],
)
def test_a_metric_is_found_in_one_way(spec: dict[str, str], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        Params.model_validate({"argv": ["true"], "metrics": {"x": spec}})


def test_what_is_said_of_a_metric_decides_no_result(make_point: MakePoint) -> None:
    """Written later, or never, it leaves the point the same work; where a number is found does not."""

    def point(**more: str) -> Point:
        params = Params.model_validate({"argv": ["true"], "metrics": {"x": {"unit": "s", "key": "a", **more}}})
        return make_point(workload="command", params=params.model_dump(mode="json"))

    plain, said = point(), point(better="lower", definition="a time")
    before = plain.model_copy(update={"params": {**plain.params, "metrics": plain.deciding_params["metrics"]}})  # as 0.1.0 had it
    assert plain.params != before.params and plain.key == said.key == before.key != point(key="b").key
    assert axes(plain) == axes(said) == axes(before) != axes(point(key="b"))


def test_a_known_metric_has_its_own_unit() -> None:
    with pytest.raises(ValidationError, match="image/s"):
        Params.model_validate({"argv": ["true"], "item": "image", "metrics": {"throughput": {"unit": "token/s", "key": "rate"}}})


@pytest.mark.parametrize("energy", ["false", "true"])
def test_numbers_come_from_patterns_json_lines_and_files(tmp_path: Path, energy: str) -> None:
    (tmp_path / "prog.py").write_text(
        "import json, os, sys\n"
        "n, folder = int(sys.argv[1]), sys.argv[2]\n"
        "print('speed: 2.5 m/s'); print('speed: 3.5 m/s')\n"
        "print(json.dumps({'loss': {'last': 1 / n}})); print('{ not json')\n"
        "open(folder + '/t.csv', 'w').write('epoch,seconds\\n1,4\\n2,6\\n')\n"
        "print('word', os.environ['WORD'])\n"
    )
    records = run(
        tmp_path,
        f"""[benchmark.params]
argv = ["{sys.executable}", "prog.py", "{{n}}", "{{folder}}"]
env = {{ WORD = "w{{n}}; $(exit 7) 'x'" }}
n = [2, 4]
item = "image"
items = "{{n}}"
energy = {energy}
[benchmark.params.metrics]
speed = {{ pattern = 'speed: (?P<value>[0-9.]+)', unit = "m/s", take = "mean" }}
loss = {{ key = "loss.last", unit = "1", better = "lower", definition = "Loss of the last step" }}
seconds = {{ file = "{{folder}}/t.csv", column = "seconds", unit = "s", take = "sum" }}
""",
    )
    assert [record.status for record in records] == ["ok", "ok"], records[0].reason
    for record, n in zip(records, (2, 4), strict=True):
        assert [record.value(name) for name in ("speed", "loss", "seconds")] == [3.0, 1 / n, 10.0]
        assert definition_of("loss", [record]).definition == "Loss of the last step. Lower is better."
        assert record.definitions.keys() == {"speed", "loss", "seconds"} and definition_of("speed", [record]).better == "unknown"
        assert record.metrics["speed"].n == 2 and record.window is not None and record.window.items == n
        assert record.value("throughput") == pytest.approx(n / record.window.seconds)
        assert all(metric.value is not None or metric.reason for metric in record.metrics.values())
        log = (Store(tmp_path / "out").folder(record) / "worker.log").read_text()
        assert f"word w{n}; $(exit 7) 'x'" in log  # no shell looked into it
        assert record.metrics["energy"].value is None and record.metrics["energy"].reason
    assert Record.model_validate_json(records[0].model_dump_json()) == records[0]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('params = { argv = ["sh", "-c", "echo gone; exit 3"], energy = false }', "failed", "exit status 3: gone"),
        ('params = { argv = ["no-such-program"], energy = false }', "failed", "127"),
        ('params = { argv = ["no-such-program"] }', "failed", "command not found"),
        ('params = { argv = ["no-such-program"], marks = { begin = "B", end = "E" } }', "failed", "No such file"),
        ('params = { argv = ["true"], cwd = "{at}/x", at = "no", marks = { begin = "B", end = "E" } }', "failed", "params.at=FOLDER names"),
        ('params = { argv = ["true"], cwd = "gone", marks = { begin = "B", end = "E" } }', "failed", "--set params.cwd=FOLDER"),
        (f'params = {{ argv = ["true"], energy = false, {METRIC} }}', "invalid", "not in the output"),
        (f'params = {{ argv = ["echo", "x=nan"], energy = false, {METRIC} }}', "invalid", "NaN"),
        (f'params = {{ argv = ["echo", "x=fast"], energy = false, {METRIC} }}', "invalid", "no number"),
        ('params = { argv = ["true"], energy = false, items = "many" }', "invalid", "expected a number"),
        ('params = { argv = ["true"], energy = false, items = "2.7" }', "invalid", "items: found 2.7, expected a whole number"),
        ('params = { argv = ["true"], energy = false, items = "inf" }', "invalid", "items: found inf, expected a whole number"),
        (f'params = {{ argv = ["echo", "x=1e120"], energy = false, {METRIC} }}', "invalid", "found 1e+120, expected"),
        ('params = { argv = ["sh", "-c", "echo gone; exit 255"], energy = false }', "failed", "program ended with exit status 255: gone"),
        ('params = { argv = ["echo", "B"], marks = { begin = "^B", end = "^E" } }', "invalid", "mark `end`"),
        ('params = { argv = ["sh", "-c", "kill -9 $$"] }', "failed", "SIGKILL"),
        ('params = { argv = ["sleep", "30"] }\nmeasure = { idle_seconds = 0, timeout_seconds = 2 }', "timeout", "no result after 2 s"),
        ('params = { argv = ["sleep", "30"], energy = false }\nmeasure = { timeout_seconds = 1 }', "timeout", "no result after 1 s"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said(tmp_path: Path, body: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")  # then there are sensors, unless `energy = false`
    (record,) = run(tmp_path, body)
    assert record.status == status and words in (record.reason or ""), record.reason


@pytest.mark.parametrize("take", ["mean", "sum", "median"])
def test_numbers_that_are_too_large_together_are_told(tmp_path: Path, take: str) -> None:
    (tmp_path / "worker.log").write_text("x=1e308\nx=1e308\n")
    specs = {"x": MetricSpec.model_validate({"pattern": "x=(.*)", "unit": "1", "take": take})}
    numbers, faults = read_metrics(specs, tmp_path, {})
    assert numbers["x"].value is None and "1e+100" in faults[0]


@pytest.mark.parametrize(
    ("table", "words"),
    [("a, seconds\n1, 2.5\n", None), ("\ufeffseconds,a\n2.5,1\n", None), (f"a,seconds\n{'x' * 200_000},2\n", "field limit")],
)
def test_csv_as_spreadsheets_write_it_is_read_and_what_is_none_is_told(tmp_path: Path, table: str, words: str | None) -> None:
    (tmp_path / "t.csv").write_text(table, encoding="utf-8")
    specs = {"s": MetricSpec.model_validate({"file": "t.csv", "column": "seconds", "unit": "s"})}
    numbers, faults = read_metrics(specs, tmp_path, {})
    assert numbers["s"].value == 2.5 and not faults if words is None else words in faults[0]


def test_a_file_of_the_attempt_is_found_in_results_of_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metric = '{ file = "{folder}/t.csv", column = "s", unit = "s" }'
    program = r"""argv = ["sh", "-c", "printf 's\\n4\\n' >$0", "{folder}/t.csv"], energy = false"""
    (record,) = run(Path(), f"params = {{ {program}, metrics = {{ t = {metric} }} }}")
    assert record.value("t") == 4.0, record.reason


@pytest.mark.parametrize(
    ("params", "fault"),
    [({"argv": ["{x:04d}"], "x": 0.5}, "{x:04d}"), ({"argv": ["{mode:d}"]}, "{mode:d}"), ({"argv": ["a"], "items": 0}, "items from 1")],
)
def test_what_no_run_could_use_is_refused_before_it(params: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(fault)):
        Params.model_validate(params)


def test_the_window_lies_between_the_marks(tmp_path: Path) -> None:
    program = "import time\\nprint('go', flush=True); time.sleep(0.3); print('end', flush=True); time.sleep(5)"
    (record,) = run(tmp_path, f'params = {{ argv = ["{sys.executable}", "-c", "{program}"], marks = {{ begin = "^go$", end = "^end$" }} }}')
    assert record.status == "ok" and record.window is not None, record.reason
    runtime = record.value("runtime")
    assert runtime is not None and 0 < record.window.seconds < runtime - 1


def test_what_a_program_leaves_behind_is_no_part_of_its_run(tmp_path: Path) -> None:
    """It holds the output open, where the marks are looked for, for longer than the point may take. A line comes in parts, the last without
    its end."""
    program = "echo go; head -c 200000 /dev/zero | tr '\\\\0' x; sleep 0.3; echo; echo end; printf 'the last'; sleep 100 & exit 0"
    params = f'params = {{ argv = ["sh", "-c", "{program}"], marks = {{ begin = "^go$", end = "^end$" }} }}'
    (record,) = run(tmp_path, f"{params}\nmeasure = {{ timeout_seconds = 50 }}")
    assert record.status == "ok" and record.window is not None, record.reason
    assert record.window.seconds <= (record.value("runtime") or 0) < 50
    (log,) = tmp_path.rglob("worker.log")
    assert log.read_text().endswith(f"go\n{'x' * 200_000}\nend\nthe last")


def test_a_window_too_short_for_its_marks_is_flagged(tmp_path: Path) -> None:
    (record,) = run(tmp_path, 'params = { argv = ["printf", "a\\nb\\n"], marks = { begin = "a", end = "b" }, energy = false }')
    assert record.flags == ["short_window"] and record.status == "ok", record.reason


def test_energy_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a sensor of constant power: energy is power times the marked window, and not times the run."""
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    program = "import time\\ntime.sleep(0.4); print('go', flush=True); time.sleep(0.6); print('end', flush=True)"
    argv = f'argv = ["{sys.executable}", "-c", "{program}"]'
    body = f'params = {{ {argv}, item = "image", items = 5, marks = {{ begin = "go", end = "end" }} }}\nmeasure = {{ idle_seconds = 0.2 }}'
    (record,) = run(tmp_path, body)
    energy, seconds, power = record.value("energy"), record.value("window_time"), record.value("mean_power")
    assert energy is not None and seconds is not None and power is not None and record.energy is not None, record.reason
    assert power == pytest.approx(Constant().watts, abs=record.metrics["mean_power"].bound) and energy == pytest.approx(power * seconds)
    assert record.value("energy_per_item") == pytest.approx(energy / 5) and record.idle is not None
    assert record.files["power"] and record.energy.end - record.energy.start == pytest.approx(seconds)


@pytest.mark.usefixtures("real_start")
@pytest.mark.parametrize("large", [False, True])
def test_the_memory_of_a_program_is_not_that_of_what_started_it(tmp_path: Path, large: bool) -> None:
    # What was started counts as large as its parents have ever been, and this process as large as the tests before made it.
    size = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 300_000_000
    argv = [sys.executable, "-c", f"x = b'1' * {size}"] if large else ["true"]
    (record,) = run(tmp_path, f"params = {{ argv = {json.dumps(argv)} }}\nmeasure = {{ idle_seconds = 0 }}")
    memory = record.metrics["peak_host_memory"]
    if large:
        assert memory.value is not None and size < memory.value < size + 200e6
    else:
        assert memory.value is None and "hide it" in (memory.reason or "")


@pytest.mark.usefixtures("real_start")
def test_the_memory_of_a_program_is_not_that_of_a_sensor_s(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vendors' programs are started, and end, while the program runs."""
    argv = ["sh", "-c", "until [ -e read ]; do sleep 0.01; done"]
    point = make_point(workload="command", params={"argv": argv, "energy": False})
    folder = Store(tmp_path / "out").new_attempt(point)
    (folder / COMMAND).write_text(Command(argv=argv, env={}, cwd=str(tmp_path), suite_folder=str(tmp_path)).model_dump_json())
    monkeypatch.setattr("caraml.worker.command.signal.signal", lambda *_: None)
    monkeypatch.setattr("caraml.worker.command._BEAT", 0.01)
    worker = CommandWorker(folder)

    def write(*_: object, **__: object) -> None:
        if worker._child is not None and not (tmp_path / "read").exists():
            size = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 300_000_000
            subprocess.run([sys.executable, "-c", f"x = b'1' * {size}"], check=True)
            (tmp_path / "read").touch()

    monkeypatch.setattr(worker._progress, "write", write)
    assert worker.run() == 0
    memory = read_record(folder / RECORD).metrics["peak_host_memory"]
    assert memory.value is None and "hide it" in (memory.reason or "")


@pytest.mark.parametrize("sensor", [True, False])
def test_a_program_without_marks_needs_no_worker_and_its_record_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sensor: bool
) -> None:
    body = (
        'params = { argv = ["sh", "-c", "sleep 0.3; echo x=1"], metrics = { x = { pattern = "x=(.*)", unit = "1" } } }\n'
        "measure = { idle_seconds = 0.2 }"
    )
    monkeypatch.setenv("CARAML_POWER", "fake:constant" if sensor else f"csv:{tmp_path}/none")
    found: list[Record] = []
    for worker in (True, False):
        (out := tmp_path / str(worker)).mkdir()
        with monkeypatch.context() as patch:
            if worker:
                patch.setattr(Campaign, "is_light", lambda *_: False)
            (record,) = run(out, body)
        assert (Store(out / "out").folder(record) / COMMAND).exists() is worker, "the worker's input"
        found.append(record)
    by_worker, by_shell = found
    assert by_worker.status == by_shell.status == "ok" and set(by_worker.metrics) == set(by_shell.metrics)
    assert by_shell.value("x") == 1 and by_shell.value("run_time") == by_shell.value("runtime")
    for name in ("energy", "energy_per_item", "mean_power", "idle_power", "run_energy"):
        ours, theirs = by_shell.metrics[name], by_worker.metrics[name]
        assert ours.unit == theirs.unit and (ours.value is None) is (theirs.value is None) is not sensor, name
        assert sensor or "no power sensor" in (ours.reason or ""), name
    if sensor:
        power, seconds = by_shell.metrics["mean_power"], by_shell.value("window_time")
        assert power.value == pytest.approx(Constant().watts, abs=power.bound) and seconds is not None and power.value is not None
        assert by_shell.value("energy") == pytest.approx(power.value * seconds) and by_shell.files["power"] and by_shell.idle is not None
        assert by_shell.energy is not None and (by_shell.energy.start, by_shell.energy.end) == (0.0, pytest.approx(seconds))


@pytest.mark.parametrize("worker", [True, False])
def test_a_program_whose_node_alone_has_a_meter_shows_the_node_s_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: bool
) -> None:
    meter = tmp_path / "pdu.csv"
    monkeypatch.setenv("CARAML_POWER", f"csv:{meter}")
    if worker:
        monkeypatch.setattr(Campaign, "is_light", lambda *_: False)
    with logged(meter, "time,power_w,apparent_va", "200,250"):
        (record,) = run(tmp_path, 'params = { argv = ["sleep", "0.5"], item = "image", items = 10 }\nmeasure = { idle_seconds = 0 }')
    assert record.window is not None and record.value("node_energy") == pytest.approx(200 * record.window.seconds)
    assert record.value("node_mean_apparent_power") == pytest.approx(250) and record.value("power_factor") == pytest.approx(0.8)
    known = unknown_energy(record, [record])
    assert known is not None and known[0].endswith("(node)") and " J/image" in known[0]
    assert float(known[0].split()[0]) == pytest.approx(20 * record.window.seconds, rel=0.006), "three digits are shown"
    assert source(record, "node_energy").startswith("boundary node_ac: pdu.csv")


@pytest.mark.parametrize("runs", [1, 3])
def test_window_and_run_of_a_program_without_marks_are_one_time_with_one_interval(tmp_path: Path, runs: int) -> None:
    records = run(tmp_path, f'repeats = {runs}\nparams = {{ argv = ["sleep", "0.2"] }}\nmeasure = {{ idle_seconds = 0 }}')
    times = [mean_metric(records, name) for name in ("window_time", "runtime", "run_time")]
    assert None not in times and times[0] == times[1] == times[2]
    assert len({written(name, mean_metric(records, name)) for name in ("window_time", "runtime", "run_time")}) == 1
    assert len({written(name, records[0].metrics[name]) for name in ("window_time", "runtime", "run_time")}) == 1


@pytest.mark.parametrize("step", [100.0, -100.0, 0.04])
def test_a_clock_that_is_set_while_a_program_runs_changes_neither_its_time_nor_its_energy(
    step: float, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    sensors, begin, real, up = Sensors("run", 0.0), time.time(), time.time, time.monotonic()
    time.sleep(0.3)
    monkeypatch.setattr(time, "time", lambda: real() + step)
    sensors.over()
    now = time.monotonic()
    (tmp_path / "started").write_text(f"1 2 node -\n0 {begin:.6f} {time.time():.6f} {up:.2f} {now:.2f}\n")
    shell = how_it_ran(str(tmp_path))
    assert shell is not None
    found = sensors.completed(make_point(workload="command"), 1, tmp_path, shell)
    assert found.seconds is not None and now - up - 0.011 <= found.seconds < now - up + 2
    assert found.measured["energy"].value == pytest.approx(Constant().watts * found.seconds, abs=found.measured["energy"].bound)


def test_energy_that_nobody_read_to_the_end_is_null_with_the_reason(tmp_path: Path, make_point: MakePoint) -> None:
    """A runner was killed, and another one finds that the program has ended."""
    point = make_point(workload="command", params={"argv": ["true"]})
    work = PointTask(0, PlannedPoint(point), point.key, f"command-{point.key}", Params(argv=["true"]))
    running = RunningPoint(work, tmp_path / "1", "local:1:", LocalLauncher())
    record = record_of_program(running, {}, Ran(0, "x", 0.5, at=1.0), None, None)
    energy = record.metrics["energy"]
    assert record.status == "ok" and energy.value is None and "ended before the program did" in (energy.reason or "")


@pytest.mark.parametrize(("slept", "status"), [(3600.0, "invalid"), (0.1, "ok")])
def test_a_machine_that_slept_while_the_shell_alone_ran_a_program_has_no_time_of_it(
    slept: float, status: str, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lid of a laptop was closed: clock and uptime go on, and an hour would be the program's."""
    point = make_point(workload="command", params={"argv": ["true"]})
    work = PointTask(0, PlannedPoint(point), point.key, f"command-{point.key}", Params(argv=["true"]))
    running = RunningPoint(work, tmp_path / "1", "local:1:", LocalLauncher())
    monkeypatch.setattr("caraml.campaign.attempt.suspended_s", lambda: running.asleep + slept)
    record = record_of_program(running, {}, Ran(0, "x", 0.5 + slept, at=1.0), None, None)
    assert record.status == status and (record.window is not None) == (status == "ok")
    assert status == "ok" or record.reason == "the machine slept while the program ran"


@pytest.mark.parametrize("argv", [["echo", "-e", "x=1"], ["time", "true"], ["true"], ["exit", "0"]])
def test_a_program_called_like_a_word_of_the_shell_s_is_the_program(
    tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as where it is started without a shell."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / argv[0]).write_text('#!/bin/sh\nprintf "program of %s\\n" "$*"\n')
    if argv[0] != "exit":
        (tmp_path / "bin" / argv[0]).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (record,) = run(tmp_path, f"params = {{ argv = {json.dumps(argv)}, energy = false }}")
    said = (Store(tmp_path / "out").folder(record) / "worker.log").read_text()
    if argv[0] == "exit":
        assert (record.status == "failed" and "127" in (record.reason or "")) or "126" in (record.reason or ""), record.reason
    else:
        assert record.status == "ok" and said == f"program of {' '.join(argv[1:])}\n", said


@pytest.mark.parametrize(
    "times, seconds",
    [
        ("1000.000000 1002.500000", 2.5),
        ("1000.000000 1002.500000 77.10 79.60", 2.5),
        ("1000,000000 1002,500000 77.10 79.61", 2.5),
        ("1000.000000 4602.500000 77.10 79.60", 2.5),
        ("1000.000000 400.000000 77.10 79.60", 2.5),
        ("1000.000000 400.000000", None),
    ],
    ids=["earlier-version", "as-it-was", "decimal-comma", "set-forward", "set-back", "set-back-in-an-earlier-version"],
)
def test_a_clock_that_is_set_while_the_shell_alone_runs_a_program_changes_no_time(
    tmp_path: Path, times: str, seconds: float | None
) -> None:
    (tmp_path / "started").write_text(f"1 2 node -\n0 {times}\n")
    found = how_it_ran(str(tmp_path))
    assert found is not None and found.seconds == (None if seconds is None else pytest.approx(seconds, abs=0.011))


def pending(process: int) -> set[int]:
    """Signals that a process has still to take."""
    found = re.search(r"^ShdPnd:\t(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return {number for number in signal.valid_signals() if found and int(found[1], 16) >> (number - 1) & 1}


@pytest.mark.parametrize(
    ("marks", "whole"),
    [(None, False), ({"begin": "go", "end": "end"}, False), ({"begin": "first", "end": "go"}, True)],
    ids=["run", "window", "after the window"],
)
def test_a_program_that_was_ended_has_no_result(tmp_path: Path, make_point: MakePoint, marks: dict[str, str] | None, whole: bool) -> None:
    """Slurm tells all processes of a job to end, one by one: a shell may go on with its next line, and end well."""
    argv = ["sh", "-c", "trap : TERM; echo first; sleep 0.3; sleep 300 & echo $$ $! >pid; echo go; wait; echo end"]
    point = make_point(workload="command", params={"argv": argv, "energy": False, "marks": marks})
    folder = Store(tmp_path / "out").new_attempt(point)
    (folder / COMMAND).write_text(Command(argv=argv, env={}, cwd=str(tmp_path), suite_folder=str(tmp_path)).model_dump_json())
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "caraml.worker.command", str(folder)], stdout=log)
        until(lambda: b"go" in (folder / "worker.log").read_bytes(), "the program")
        time.sleep(0.3)
        shell, child = map(int, (tmp_path / "pid").read_text().split())
        os.kill(shell, signal.SIGSTOP)  # it goes on when all have been told, however long that takes
        until(lambda: "\nState:\tT" in Path(f"/proc/{shell}/status").read_text(), "its stop")
        for pid in (child, process.pid):
            os.kill(pid, signal.SIGTERM)
        until(lambda: signal.SIGTERM in pending(shell), "the signal that is handed on")
        os.kill(shell, signal.SIGCONT)
        code = process.wait(timeout=300)
    assert (code, (folder / RECORD).exists()) == ((0, True) if whole else (143, False))


@pytest.mark.parametrize(
    ("told", "status"), [("SuspendTime=2026-11-27T17:36:48 SecsPreSuspend=4", "invalid"), ("SuspendTime=None SecsPreSuspend=0", "ok")]
)
def test_a_program_that_slurm_suspended_has_no_time(
    told: str, status: str, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by gang scheduling: its rate had the while in it for which nothing ran. On a machine that only hesitates it counts."""
    argv = ["sh", "-c", "until [ -e looked ]; do sleep 0.01; done"]
    point = make_point(workload="command", params={"argv": argv, "energy": False})
    folder = Store(tmp_path / "out").new_attempt(point)
    (folder / COMMAND).write_text(Command(argv=argv, env={}, cwd=str(tmp_path), suite_folder=str(tmp_path)).model_dump_json())
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{told}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    for name, text in {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("caraml.worker.command.signal.signal", lambda *_: None)
    worker = CommandWorker(folder)

    def see_stops() -> None:  # as after a long one
        worker._stopped = 20.0
        (tmp_path / "looked").touch()

    monkeypatch.setattr(worker, "_see_stops", see_stops)
    assert worker.run() == 0
    record = read_record(folder / RECORD)
    assert (record.status, record.value("runtime") is None) == (status, status == "invalid")
    assert status == "ok" or record.reason == "Slurm suspended its job for 20 s while the program ran"


@pytest.mark.parametrize(
    ("others", "job", "flags"),
    [(1.0, {}, ["busy_machine"]), (0.0, {}, []), (1.0, {"SLURM_JOB_ID": "7"}, [])],
    ids=["busy", "quiet", "by srun"],
)
def test_others_at_work_are_told_of_a_program(
    tmp_path: Path, make_point: MakePoint, others: float, job: dict[str, str], flags: list[str]
) -> None:
    """By a kernel that says that others used all CPUs, or none. In a job of Slurm's they may be the program's own, started by srun."""
    all_of_it = others * (os.cpu_count() or 1)
    point = make_point(workload="command", params={"argv": ["sleep", "0.5"]}, measure=Policy(idle_seconds=0))
    folder = Store(tmp_path / "out").new_attempt(point)
    (folder / COMMAND).write_text(Command(argv=["sleep", "0.5"], env={}, cwd=str(tmp_path), suite_folder=str(tmp_path)).model_dump_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURM_JOB_ID", raising=False)
        for name, text in {**job, "CARAML_POWER": "fake:constant"}.items():
            patch.setenv(name, text)
        patch.setattr("caraml.worker.command.signal.signal", lambda *_: None)
        patch.setattr("caraml.engine.instruments.cpu_time", lambda *_: CpuTime(all_of_it * time.monotonic(), 0.0))
        assert CommandWorker(folder).run() == 0
    record = read_record(folder / RECORD)
    found = record.metrics["other_cpu_share"]
    assert record.flags == flags and (found.value is None) is bool(job) is bool(found.reason), found


def test_others_at_work_are_told_also_without_a_worker(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    params = Params(argv=["sleep", "1"])
    point = make_point(workload="command", params=params.model_dump(mode="json"))
    work = PointTask(0, PlannedPoint(point), point.key, f"command-{point.key}", params)
    for ours, seconds, flags in ((0.5, 10.0, ["busy_machine"]), (1.0, 10.0, []), (0.0, 1e-3, [])):  # the last is shorter than a tick
        everyone = seconds * (os.cpu_count() or 1)
        end = CpuTime(everyone, ours * everyone)
        monkeypatch.setattr("caraml.campaign.attempt.cpu_time_of_children", lambda end=end: end)
        running = RunningPoint(work, tmp_path / "1", "local:1:", LocalLauncher(), begun=CpuTime(0.0, 0.0))
        assert record_of_program(running, {}, Ran(0, "x", seconds, at=1.0), None, None).flags == flags


@pytest.mark.parametrize(
    ("kind", "boundary", "told"),
    [("gpu", "device", ["idle_devices"]), ("cpu", "device", ["idle_devices"]), ("gpu", "module", ["idle_devices"]), ("cpu", "module", [])],
)
def test_the_energy_of_devices_that_a_point_does_not_have_is_told(
    tmp_path: Path, make_point: MakePoint, kind: str, boundary: Boundary, told: list[str]
) -> None:
    """On whole nodes a program that uses two of eight GPUs had the energy of all, and nothing in its record said so; nor of MI300A, which
    are modules. Modules of a machine without accelerators are those of its processors. A package of an MI250 counted as one, and no number
    had the flag, too."""
    params = Params(argv=["sleep", "1"], item="image", items=5)
    point = make_point(workload="command", params=params.model_dump(mode="json"), nodes=2, global_batch=2, micro_batch=1, device_class=kind)
    for joules, number, dies, flags in (
        (1.0, 1, 0, []),
        (1.0, 2, 0, []),
        (1.0, 8, 0, told),
        (None, 8, 0, []),
        (1.0, 2, 1, []),
        (1.0, 2, 2, told),
    ):
        ids = [f"n{k % 2}/GPU-{k}" for k in range(number)]
        channels = [ChannelEnergy(name, "", "amdsmi", boundary, "amd", users=[f"0000:{die}" for die in range(dies)]) for name in ids]
        seen = WindowEnergy("measure", 0.0, 1.0, channels, {boundary: BoundaryEnergy(joules, channels=ids)})
        record = record_of_run(point, tmp_path / "k" / "1", params, Output({}, [], 5), Ran(0, "x", 1.0, extras={"energy": seen}))
        assert record.status == "ok" and record.flags == flags


def test_a_program_on_several_nodes_has_no_energy_but_what_is_known_of_it(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensors of the first node are read, where the program is started: that is a part, and no sum."""
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    params = {"argv": ["sleep", "0.4"], "item": "image", "items": 5}
    point = make_point(workload="command", params=params, nodes=3, global_batch=3, micro_batch=1, measure=Policy(idle_seconds=0.2))
    folder = Store(tmp_path / "out").new_attempt(point)
    (folder / COMMAND).write_text(Command(argv=["sleep", "0.4"], env={}, cwd=str(tmp_path), suite_folder=str(tmp_path)).model_dump_json())
    subprocess.run([sys.executable, "-m", "caraml.worker.command", str(folder)], check=True)
    record = read_record(folder / RECORD)
    assert record.status == "ok" and record.window is not None and record.energy is not None, record.reason
    for name in ("energy", "energy_per_item", "mean_power", "idle_power", "energy_net", "run_energy"):
        found = record.metrics[name]
        assert found.value is None and "node 2 of 3: " in (found.reason or "") and "node 3 of 3: " in (found.reason or ""), name
    assert len(record.nodes) == 3 and record.nodes[0].energy is not None and "mixed_nodes" not in record.flags
    truth, bound = Constant().watts * record.window.seconds, record.nodes[0].energy.boundaries["device"].bound_j
    assert record.energy.boundaries["device"].partial_j == pytest.approx(truth, abs=bound)
    assert record.value("run_time") == pytest.approx(record.window.seconds)


def test_a_command_needs_no_torch() -> None:
    code = "import sys, caraml.worker.command, caraml.cli.asked; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_faults_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"c\.toml:6"):
        run(tmp_path, 'params = { argv = ["x", "{m}"], n = [1, 2] }')


def test_a_shell_that_knows_no_time_of_day_runs_programs_too(tmp_path: Path, make_point: MakePoint) -> None:
    """Bash before version 5, as on RHEL 8; unset, the variable means nothing to a newer one."""
    params = Params(argv=["sleep", "0.2"], energy=False)
    point = make_point(workload="command", params=params.model_dump(mode="json"))
    text = program_script(point, params, tmp_path, str(tmp_path))
    (path := tmp_path / "run.sh").write_text(text.replace("set -u\n", "set -u\nunset EPOCHREALTIME\n"))
    before = time.time()
    done = subprocess.run(["bash", str(path)], input="\n", capture_output=True, text=True, check=False)
    found = how_it_ran(str(tmp_path))
    assert done.returncode == 0 and found is not None, done.stderr
    assert found.seconds is not None and 0.15 < found.seconds < 300
    assert found.at is not None and before - 0.1 <= found.at <= time.time()
