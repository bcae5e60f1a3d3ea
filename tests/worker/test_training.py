"""The whole worker on a device of known speed: every number of the record is compared with the truth."""

from __future__ import annotations

import errno
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, cast

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from caraml import verify as known
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.campaign.attempt import finish_attempt
from caraml.engine.loop import MeasuringLoop
from caraml.engine.ranks import Ranks
from caraml.engine.steps import Batches, RankSummary, StepRow, StepTable
from caraml.launch.script import environment_of
from caraml.metrics.model import Facts, Peak
from caraml.results import finish as finishing
from caraml.results import rows
from caraml.results.finish import MEASURED, NOT_DONE, finish, note_start, put_away, write_as_it_fits
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import RECORD, ROOM, Store, read_record, write_record
from caraml.suite.model import Knobs, Point, Policy
from caraml.system.files import cpu_numbers
from caraml.system.host import cores
from caraml.verify import PEAK_FLOPS
from caraml.verify.claims import energy_claims
from caraml.worker import training
from caraml.worker.record import stopped
from caraml.worker.so_far import SoFar
from caraml.worker.together import Known, together
from caraml.worker.training import Worker
from caraml.workloads import computes_with
from caraml.workloads.base import Task
from tests.conftest import MakePoint
from tests.engine.together import Meeting
from tests.report.record_factory import make_record

ROOT = Path(__file__).parents[2]
CORES = cores(os.sched_getaffinity(0))
"""Of which two CPUs may be one."""


def run(root: Path, point: Point, **variables: str) -> Record:
    """Run the worker as a script would: in processes of its own, bound to cores also beside other tests, failures finished afterwards."""
    folder = Store(root).new_attempt(point.model_copy(update={"workload": "known"}))
    command = [sys.executable, "-m", "caraml.worker", str(folder)]
    if point.world > 1:
        command[2:2] = ["caraml.engine.start", f"--devices={point.world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("CARAML_BIND", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        finish(folder, done.returncode)
    assert (folder / RECORD).exists(), done.stderr
    return read_record(folder / RECORD)


def test_known_step_time_comes_out_as_the_rate(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"step_seconds": 0.05}))
    truth = 4 * known.ITEMS_PER_SAMPLE / 0.05
    metrics = record.metrics
    assert record.status == "ok" and not {"imprecise", "not_steady"} & set(record.flags)
    assert metrics["throughput"].value == pytest.approx(truth, rel=1e-3)
    assert metrics["throughput"].low <= truth <= metrics["throughput"].high  # type: ignore[operator]
    assert metrics["throughput"].unit == "thing/s"
    assert metrics["step_time_median"].value == pytest.approx(0.05, rel=1e-3)
    assert metrics["achieved_flops_per_device"].value == pytest.approx(truth * known.FLOPS_PER_ITEM, rel=1e-3)
    assert metrics["input_bandwidth"].value == pytest.approx(4 * 11 / 0.05, rel=1e-3)
    assert metrics["peak_memory"].value == 3 * 2**30
    assert record.window is not None
    assert record.window.items == record.window.steps * 4 * known.ITEMS_PER_SAMPLE
    assert record.window.seconds == pytest.approx(record.window.steps * 0.05, rel=1e-3)


def test_raw_steps_add_up_to_the_window(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point())
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    inside = [seconds for seconds, phase in zip(steps["seconds"], steps["phase"], strict=True) if phase == "measure"]
    assert record.window is not None
    assert len(inside) == record.window.steps
    assert sum(inside) == pytest.approx(record.window.seconds, rel=1e-3)
    assert steps["step"].index(record.window.first_step) == steps["phase"].index("measure")


def test_two_ranks_double_the_rate(tmp_path: Path, make_point: MakePoint) -> None:
    alone = run(tmp_path, make_point(params={"step_seconds": 0.05}))
    both = run(tmp_path, make_point(params={"step_seconds": 0.05}, devices=2, global_batch=8))
    assert both.value("throughput") == pytest.approx(2 * alone.value("throughput"), rel=2e-3)  # type: ignore[operator]
    assert both.value("throughput_per_device") == pytest.approx(alone.value("throughput"), rel=2e-3)
    steps = read_table(Store(tmp_path).folder(both) / both.files["steps"])
    assert set(steps["rank"]) == {0, 1}
    first, second = both.environment["affinity"]
    if len(CORES) > 1:
        assert first["bound"] and second["bound"], "where there are cores enough"
        assert not cpu_numbers(first["cpus"]) & cpu_numbers(second["cpus"]), "on cores of their own"
    else:
        assert "would share" in first["reason"] and "would share" in second["reason"]
    assert [rank["reason"] for rank in alone.environment["affinity"]] == ["one process alone may use every CPU of the job"]


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be divided")
@pytest.mark.parametrize("wanted", ["compact", "spread", "none"])
def test_ranks_run_where_the_point_wants_them(wanted: Literal["compact", "spread", "none"], tmp_path: Path, make_point: MakePoint) -> None:
    point = make_point(params={"step_seconds": 0.02}, devices=2, global_batch=8, knobs=Knobs(affinity=wanted))
    record = run(tmp_path, point, **environment_of(point, 2))
    ranks = record.environment["affinity"]
    assert isinstance(ranks, list)
    assert [rank["found"] for rank in ranks] == [rank["cpus"] for rank in ranks], "as the kernel has it, and not as it was wanted"
    if wanted == "none":
        assert [rank["reason"] for rank in ranks] == ['affinity = "none"'] * 2
    else:
        assert ranks[0]["bound"] and not cpu_numbers(ranks[0]["found"]) & cpu_numbers(ranks[1]["found"])
    assert record.environment["variables"]["OMP_PROC_BIND"] in ("close", "spread", "false")


def test_the_slow_rank_sets_the_pace(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"step_seconds": 0.05, "slow_rank_extra": 0.03}, devices=2, global_batch=8))
    assert record.value("step_time_median") == pytest.approx(0.08, rel=1e-3)
    assert record.value("throughput") == pytest.approx(8 * known.ITEMS_PER_SAMPLE / 0.08, rel=2e-3)


FACTS = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="known")


def test_the_slowest_rank_counts_in_everything(tmp_path: Path, make_point: MakePoint) -> None:
    def rank(seconds: float, wait: float, loss: float) -> RankSummary:
        rows = [StepRow("first", 0.0, 9 * seconds, 5.0), *(StepRow("measure", 0.0, seconds, wait) for _ in range(10))]
        return RankSummary(1.0, 1.0 + 10 * seconds, StepTable(rows), [loss] * 11, 9 * seconds, 0.0, 0)

    point = make_point(devices=2, global_batch=8)
    probed = Peak(value=None, dtype="fp32", reason="not probed")
    known = Known(tmp_path, point, FACTS, origin=0.0, started_at="", runtime=60.0, phases=[], probed=probed)
    quick, slow = rank(0.5, 0.25, 1.0), rank(0.75, 0.125, 3.0)
    for ranks in ([quick, slow], [slow, quick]):
        run = together([RankSummary.from_data(each.to_data()) for each in ranks], known)
        assert list(run.window_steps) == [0.75] * 10 and run.window.seconds == 7.5 and run.first_step_time == 6.75
        assert run.data_wait == 2.5, "the longest wait, which is not the slow rank's; the first step's is not in the window"
        assert run.whole_data_wait == 7.5 and run.rank_steps == [rank.window_rows.seconds[0] for rank in ranks]
        assert run.losses == [2.0] * 11


def test_updates_that_overflowed_are_not_trained(tmp_path: Path, make_point: MakePoint) -> None:
    measure = Policy(min_seconds=1, max_seconds=5, idle_seconds=0, max_steps=40)
    record = run(tmp_path, make_point(params={"step_seconds": 0.05, "overflow_every": 4}, precision="fp16", measure=measure))
    window = record.window
    assert window is not None
    skipped = len([step for step in range(window.first_step, window.first_step + window.steps) if step % 4 == 0])
    assert skipped >= 5 and window.samples == 4 * (window.steps - skipped)
    truth = 4 * known.ITEMS_PER_SAMPLE * (window.steps - skipped) / (0.05 * window.steps)
    assert record.value("throughput") == pytest.approx(truth, rel=1e-3)


def test_a_window_whose_updates_all_overflowed_is_no_division_by_zero(tmp_path: Path, make_point: MakePoint) -> None:
    known = Known(tmp_path, make_point(precision="fp16"), FACTS, 0.0, "", Peak(value=None, dtype="fp16", reason="not probed"))
    rows = StepTable(StepRow("measure" if step else "first", float(step), 1.0, 0.0) for step in range(9))
    with pytest.raises(InputError, match="the gradients of all 8 steps overflowed in fp16"):
        together([RankSummary(1.0, 9.0, rows, [1.0] * 9, 1.0, 1.0, skipped_updates=8)], known)


def test_utilisation_is_of_the_arithmetic_used(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"step_seconds": 0.05}, precision="bf16"))
    truth = 4 * known.ITEMS_PER_SAMPLE * known.FLOPS_PER_ITEM / 0.05 / PEAK_FLOPS["bf16"]
    assert record.value("mfu") == pytest.approx(truth, rel=1e-3) and record.value("mfu_measured") == pytest.approx(truth, rel=1e-3)


SHARP = {"energy", "mean power", "energy time product", "idle power"}
"""Claims in which chance has no part: others are as vague as the machine is busy."""


@pytest.mark.exclusive
def test_known_watts(tmp_path: Path, make_point: MakePoint) -> None:
    """The square wave's integral over the window, in closed form, is within the stated bound of every energy."""
    measure = Policy(min_seconds=1.2, max_seconds=3, idle_seconds=1.0)
    point = make_point(params={"device": "asynchronous", "step_seconds": 0.02}, measure=measure)
    record = run(tmp_path, point, CARAML_POWER="fake:square")
    found = energy_claims(record, Store(tmp_path))
    assert len(found) == 8 and all(finding.verdict == "right" for finding in found), found
    sharp = [finding for finding in found if finding.claim in SHARP]
    assert len(sharp) == len(SHARP) and all(each.allowed and each.allowed < 0.2 * abs(each.value or 0) for each in sharp), found
    run_time, phases = record.value("run_time"), {phase.name: phase for phase in record.phases}
    assert run_time is not None and record.window is not None
    assert record.window.seconds < phases["measure"].end - phases["build"].start < run_time < record.value("runtime")  # type: ignore[operator]
    assert record.idle is not None and "drift" in record.idle.channels[0].bound_parts, "idle power was measured before and after"
    assert run_time < phases["idle_after"].start - phases["build"].start + 0.1, "what comes after is not of the run"
    assert record.value("runtime") == pytest.approx(run_time + phases["start"].end, abs=0.5), "two idle baselines of a second are not of it"
    mean = record.value("run_energy") / run_time  # type: ignore[operator]
    assert 100 < mean < 500 and record.metrics["action"].value is None and record.metrics["action"].reason


def test_warm_up_stays_outside_the_window(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"step_seconds": 0.05, "warm_up_extra": 2.0}))
    assert record.value("first_step_time") == pytest.approx(2.05, rel=1e-2)
    assert record.value("throughput") == pytest.approx(4 * known.ITEMS_PER_SAMPLE / 0.05, rel=1e-2)


def test_accumulation_counts_every_micro_batch(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"step_seconds": 0.05}, global_batch=12, micro_batch=4))
    assert record.value("step_time_median") == pytest.approx(3 * 0.05, rel=1e-2)
    assert record.value("throughput") == pytest.approx(12 * known.ITEMS_PER_SAMPLE / 0.15, rel=1e-2)


def test_drifting_steps_are_flagged(tmp_path: Path, make_point: MakePoint) -> None:
    measure = Policy(min_seconds=3, max_seconds=5, idle_seconds=0, warm_up_max_seconds=1, target=0.005)
    record = run(tmp_path, make_point(params={"step_seconds": 0.02, "slope": 0.0005}, measure=measure))
    assert "not_steady" in record.flags


def test_a_device_that_got_hot_is_flagged(tmp_path: Path, make_point: MakePoint) -> None:
    measure = Policy(min_seconds=4, max_seconds=5, idle_seconds=0)
    record = run(tmp_path, make_point(params={"step_seconds": 0.02, "slower_from": 150, "slower_by": 1.1}, measure=measure))
    window = record.window
    assert window is not None and window.first_step + 20 < 150 < window.first_step + window.steps - 20
    assert "not_steady" in record.flags


def test_out_of_memory_is_a_result(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"oom_at": 5}))
    assert record.status == "oom"
    assert "4.00 GiB" in (record.reason or "") and "warm_up" in (record.reason or "")
    assert record.phases and record.metrics == {}


def test_a_crash_names_its_cause(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"crash_at": 0}))
    assert record.status == "failed"
    assert "ValueError: the model is broken" in (record.reason or "")


def test_nan_loss_makes_the_point_invalid(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"nan_at": 12}))
    assert record.status == "invalid" and "nan_loss" in record.flags
    assert record.metrics["loss_last"].value is None and record.metrics["loss_last"].reason


def test_one_rank_failing_ends_the_point(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, make_point(params={"oom_at": 3}, devices=2, global_batch=8))
    assert record.status == "oom"


def test_the_times_of_a_record_count_from_its_wall_clock_time(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its zero is the start of the process, seconds before anything of ours runs."""
    monkeypatch.setattr(training, "process_start", lambda: time.monotonic() - 100)
    worker = Worker(tmp_path, make_point())
    wall = datetime.fromisoformat(worker.started_at).timestamp()
    assert wall - worker.origin == pytest.approx(time.time() - time.monotonic(), abs=50)


def test_a_run_begins_when_the_last_node_knows_its_limits(tmp_path: Path, make_point: MakePoint) -> None:
    """A node that has kept none searches for seconds; the run of the others, and its energy, must not begin meanwhile."""
    begun, seen = threading.Event(), []

    def work(ranks: Ranks) -> None:
        worker = Worker(tmp_path, make_point())

        def limits(device: object) -> tuple[()]:
            if ranks.rank == 1:
                seen.append(begun.wait(0.3))
            return ()

        def begin(device: object) -> NoReturn:
            begun.set()
            raise StopIteration

        device = SimpleNamespace(forget_peak_memory=lambda: None)
        worker.__dict__.update(_open=lambda: (device, ranks), _limits=limits, _build=lambda *_: begin(device))
        with pytest.raises(StopIteration):
            worker.run()

    Meeting(2).run(work)
    assert seen == [False]


def test_a_task_that_does_not_close_costs_no_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    def close() -> NoReturn:
        raise OSError("the loader is gone")

    Worker._close(cast(Any, SimpleNamespace(close=close)))
    assert "OSError: the loader is gone" in capfd.readouterr().err


def test_a_failure_in_a_plug_in_names_it(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path, make_point())
    with worker.log.phase("build"):
        pass
    assert worker.where == " (in phase build)"
    monkeypatch.setattr("caraml.worker.training.software_of", lambda name: "caraml-net 1.0")
    assert worker.where == " (in phase build of plug-in caraml-net 1.0)"


def test_batches_that_end_are_said_to_end() -> None:
    batches = Batches(iter([1]))
    assert batches.take() == 1
    with pytest.raises(InputError, match="came to an end"):
        batches.take()


ROWS = torch.ones(3, 5)


@pytest.mark.parametrize(
    ("batch", "further", "found"),
    [
        (ROWS, {}, "3 samples"),
        (ROWS[:1], {}, "1 sample"),
        ([ROWS, (ROWS[:, 0],)], {}, "3 samples"),
        ({"a": {"x": ROWS}, "n": torch.tensor(4), "name": "b"}, {}, "3 samples"),
        (ROWS, {"samples_in": lambda batch: batch.shape[1]}, "5 samples"),
        (pack_sequence([torch.ones(4)]), {}, "1 sample"),
        (pack_sequence([torch.ones(7)] * 4), {}, None),
        (torch.ones(4, 5), {}, None),
        ([torch.ones(4, 5), ROWS], {}, None),  # a graph's nodes and edges, say
        (["text"] * 3, {}, None),
        ([ROWS] * 4, {}, None),
        ([ROWS] * 2, {}, "3 samples"),
        (torch.ones(5, 4), {"samples_in": lambda batch: batch.shape[1]}, None),
        (ROWS, {"own_step": lambda tools: None}, None),
    ],
    ids=[
        "rows",
        "a last one",
        "pair",
        "tables",
        "said",
        "packed, one",
        "packed",
        "whole",
        "of no one size",
        "no tensors",
        "one by one",
        "pair alike",
        "time first",
        "own step",
    ],
)
def test_a_batch_of_another_size_than_the_rate_counts_ends_the_point(
    batch: Any, further: dict[str, Any], found: str | None, tmp_path: Path, make_point: MakePoint
) -> None:
    """Without that, half of the samples are twice the rate."""
    nothing: Any = None
    facts = Facts(item="row", items_per_sample=1, parameters=3, flops_per_item=2.0, flops_formula="by hand")
    worker = Worker(tmp_path, make_point())
    built = Task(nothing, nothing, iter([batch]), nothing, facts, **further)
    worker.__dict__.update(_params=None, _workload=SimpleNamespace(build=lambda context: built))
    task = worker._build(cast(Any, SimpleNamespace(torch_device=torch.device("cpu"))), Ranks())
    if found is None:
        assert next(task.batches) is batch
        return
    with pytest.raises(InputError, match=f"found one of {found}, expected micro_batch = 4"):
        next(task.batches)


def test_idle_gpus_are_no_sensors_of_a_cpu_s_point(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headline is the energy of devices where there is one, so theirs would stand for the processor's."""
    monkeypatch.setenv("CARAML_BIND", "off")
    asked: list[object] = []
    monkeypatch.setattr(training, "Instruments", lambda devices, **_: asked.append(devices))
    Worker(tmp_path, make_point(workload="known"))._open()
    assert asked == [[]]


@pytest.mark.parametrize("full", ["tables", "record"])
def test_a_full_disk_takes_the_tables_and_not_the_record(
    full: str, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a quota does, which has room for what is small, or none until something goes."""
    folder = tmp_path / "known-0" / "1"
    folder.mkdir(parents=True)
    write, write_table = finishing.write_record, rows.write_table

    def no_room(*arguments: Any) -> Any:
        if full == "tables" or arguments[-1].files:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return write(*arguments)

    monkeypatch.setattr(training.affinity, "bind", lambda *_: {"bound": False})
    monkeypatch.setattr("caraml.worker.record.write_table", no_room if full == "tables" else write_table)
    monkeypatch.setattr(finishing, "write_record", no_room if full == "record" else write)
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    Worker(folder, make_point(workload="known")).run()
    record = read_record(folder / RECORD)
    assert record.status == "ok" and record.value("throughput") and not record.files
    assert {path.name for path in folder.iterdir()} == {RECORD, "progress.jsonl"}
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["_validate_and_save", "quiet_baseline", "write_readings", "write_as_it_fits"])
def test_what_was_measured_outlives_the_worker(
    where: str, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where the kernel kills it, or another rank, once the window is closed."""
    point = make_point(workload="known")
    folder = Store(tmp_path).new_attempt(point)
    worker = Worker(folder, point)

    def killed(*_: Any) -> None:
        if worker._measuring is not None:
            raise SystemExit

    monkeypatch.setattr(training.affinity, "bind", lambda *_: {"bound": False})
    monkeypatch.setattr(Worker if where.startswith("_") else training, where, killed)
    with pytest.raises(SystemExit):
        worker.run()
    worker.rescue()
    finish(folder, 137)
    record = Store(tmp_path).latest(point.key)
    assert record is not None and record.status == "ok" and record.value("throughput") and record.window is not None
    assert (record.reason or "").startswith("the worker ended before it was done: killed by SIGKILL")
    assert [*record.files] == (["steps"] if where == "write_as_it_fits" else []), "of all ranks or of none"
    assert {record.metrics[name].reason for name in ("runtime", "rest_share", "run_time", "run_energy")} == {NOT_DONE}, "it had no end"
    validated = where != "_validate_and_save"
    assert (record.metrics["loss_validation"].reason == NOT_DONE) is not validated
    assert {path.name for path in folder.iterdir()} == {"point.json", RECORD, "progress.jsonl", *record.files.values()}


def test_a_record_for_which_there_is_no_room_at_all_is_as_it_was_before(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    point = make_point(workload="known")
    folder = Store(tmp_path).new_attempt(point)
    monkeypatch.setattr(training.affinity, "bind", lambda *_: {"bound": False})
    monkeypatch.setattr(finishing, "write_record", full)
    Worker(folder, point).run()
    assert {path.name for path in folder.iterdir()} == {"point.json", RECORD, "progress.jsonl"}
    record = Store(tmp_path).latest(point.key)
    assert record is not None and record.status == "ok" and record.value("throughput")


@pytest.mark.parametrize("left", [True, False])
def test_room_that_was_kept_is_for_what_was_measured(
    left: bool, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a disk that others have filled, or nearly."""
    point = make_point(workload="known")
    folder, write = Store(tmp_path).new_attempt(point), finishing.write_file

    def no_room(path: Path, *rest: Any) -> None:
        if not left and (folder / ROOM).exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        write(path, *rest)

    note_start(folder, point.world)
    size = (folder / ROOM).stat().st_size
    monkeypatch.setattr(finishing, "write_file", no_room)
    assert put_away(folder, make_record(point)) and (folder / MEASURED).exists() and (folder / ROOM).exists() is left
    assert size > 4 * (folder / MEASURED).stat().st_size
    finish(folder, 137)
    assert not (folder / ROOM).exists() and not (folder / MEASURED).exists()


def test_a_record_that_was_not_put_away_says_why_it_cannot_be_written(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(finishing, "write_record", full)
    with pytest.raises(OSError, match="No space left"):
        write_as_it_fits(tmp_path, make_record(make_point()))


def test_a_worker_that_is_to_end_makes_no_tables(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a day take longer than it is left: they are made once it is gone."""
    point = make_point(workload="known")
    folder, look = Store(tmp_path).new_attempt(point), SoFar.look

    def ended(self: SoFar, loop: MeasuringLoop, instruments: Any) -> None:
        look(self, loop, instruments)
        if loop.steps > 20:
            raise SystemExit

    def slow(*_: Any) -> NoReturn:
        pytest.fail("a table was written")

    monkeypatch.setattr(training.affinity, "bind", lambda *_: {"bound": False})
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    monkeypatch.setattr(SoFar, "look", ended)
    worker = Worker(folder, point)
    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(rows, "_write_csv", slow)
        with pytest.raises(SystemExit):
            worker.run()
        worker.rescue()
    finish(folder, 143)
    record = read_record(folder / RECORD)
    assert record.status == "failed" and {*record.files} == {"steps", "power"} and "is kept" not in (record.reason or "")
    assert worker._measuring is not None and len(worker._measuring.so_far()) > 4
    assert len(read_table(folder / record.files["steps"])["step"]) == len(worker._measuring.so_far())
    assert record.started_at == worker.started_at and record.phases[-1].name == worker.log.phases[-1].name
    assert {path.name for path in folder.iterdir()} == {"point.json", RECORD, "progress.jsonl", *record.files.values()}


def test_a_folder_that_is_gone_takes_no_measurement_with_it(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed while the worker measured, say: its record is elsewhere, which everybody says who misses it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    point = make_point(workload="known")
    folder = Store(tmp_path / "results").new_attempt(point)
    worker, keep = Worker(folder, point), training.Worker._keep
    monkeypatch.setattr(training.affinity, "bind", lambda *_: {"bound": False})

    def gone(*arguments: Any) -> Any:
        shutil.rmtree(tmp_path / "results")
        return keep(*arguments)

    monkeypatch.setattr(Worker, "_keep", gone)
    monkeypatch.setattr(SoFar, "look", lambda *_: None)  # in the folder that is removed
    with pytest.raises(EnvironmentUnfitError, match="No such file or directory; what was measured is in ") as said:
        worker.run()
    (place,) = (tmp_path / "cache").rglob(RECORD)
    assert str(place) in str(said.value) and str(place) in finishing.kept(folder)
    record = read_record(place)
    assert record.status == "ok" and record.value("throughput")
    assert Store(place.parents[3]).latest(point.key) == record, "it can be reported"
    with pytest.raises(EnvironmentUnfitError, match=str(place)):
        finish_attempt(cast(Any, SimpleNamespace(point=point)), folder, 1)


def test_what_a_training_is_needed_for_decides_how_it_ended(tmp_path: Path, make_point: MakePoint) -> None:
    """It was measured, and did not save what another point goes on from: a lost job is submitted anew, and a timeout is not."""
    for status in ("lost", "timeout", "oom"):
        point = make_point(seed=len(status))
        folder = Store(tmp_path).new_attempt(point)
        put_away(folder, make_record(point).model_copy(update={"status": "failed", "reason": NOT_DONE}))
        finish(folder, 1, status, "Slurm says so")
        record = read_record(folder / RECORD)
        assert (record.status, record.reason) == (status, f"{NOT_DONE}: Slurm says so") and record.value("throughput")


def test_putting_a_measurement_away_is_no_part_of_the_run_and_its_record_says_what_computed(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planned = "caraml 0, torch of unknown version, caraml-net 1.0"
    point, passed, make = make_point(workload="known", software=planned), [0.0], training.make_record
    folder = Store(tmp_path).new_attempt(point)

    def slow(*values: Any, **further: Any) -> Record:
        passed[0] += 1e6
        return make(*values, **further)

    monkeypatch.setattr(training.affinity, "bind", lambda *_: {"bound": False})
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    monkeypatch.setattr(training, "make_record", slow)
    worker = Worker(folder, point)
    monkeypatch.setattr(training, "stopped", lambda mine, resumed: stopped(mine, [mine.end] if resumed is worker.resumed else []))
    worker.run()
    record = read_record(folder / RECORD)
    assert 0 < (record.value("runtime") or 0) < 1e6 and 0 < (record.value("run_time") or 0) < 1e6  # the tests' process began long before
    assert record.status == "invalid" and "stopped" in record.flags, "of a process that was stopped in its window"
    assert record.key == point.key and record.point.software == f"{computes_with(metadata.version('torch'))}, caraml-net 1.0"


def test_while_torch_is_loaded_a_worker_ends_with_its_caller_and_not_by_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Podman the script cannot have it ignore the batch system's warning."""
    heard: list[object] = []

    class Loading:
        @property
        def Worker(self) -> NoReturn:  # noqa: N802 -- as it is called
            heard.append(signal.getsignal(signal.SIGUSR1))
            raise AttributeError

    monkeypatch.setitem(sys.modules, "caraml.worker.training", cast("Any", Loading()))
    monkeypatch.setattr("caraml.base.signals.end_with_caller", lambda: heard.append("caller"))
    monkeypatch.setattr("caraml.base.processes.keep_temporary_files_private", lambda: None)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(ImportError, match="Worker"):
            runpy.run_module("caraml.worker.__main__")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard[:2] == ["caller", signal.SIG_IGN]


def test_a_record_that_is_there_is_the_last_word(tmp_path: Path, make_point: MakePoint) -> None:
    """Also where the worker was killed before it removed what it had put away."""
    point = make_point()
    folder = Store(tmp_path).new_attempt(point)
    put_away(folder, make_record(point).model_copy(update={"reason": NOT_DONE}))
    write_record(folder, make_record(point))
    finish(folder, 137)
    assert read_record(folder / RECORD).reason is None and not (folder / MEASURED).exists()


@pytest.mark.parametrize(("mode", "known_of_waits"), [("train", False), ("inference", False), ("data", True), ("compute", True)])
def test_waits_within_a_step_are_unknown_where_events_tell_no_time(
    mode: Literal["train", "inference", "data", "compute"], known_of_waits: bool, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But of readers, whose waits are all that they do, and of batches that stay on the device."""
    monkeypatch.setattr(training, "make_step", lambda *arguments, **named: None)
    point = make_point(device_class="gpu", global_batch=4, micro_batch=1, mode=mode)
    facts = Known(Path(), point, FACTS, 0.0, "", Peak(value=None, dtype="fp32", reason="none"))
    worker = SimpleNamespace(point=point, _known=facts, _divided=None, _replacements=[])
    task, device = SimpleNamespace(batches_per_step=1, own_step=None), SimpleNamespace(behind=False, torch_device=torch.device("mps"))
    Worker._step(cast("Any", worker), cast("Any", task), cast("Any", device), iter)
    assert (facts.no_wait == "") == known_of_waits
