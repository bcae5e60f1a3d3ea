"""Placements through the real script and worker: the record of a divided model, and what is left when a rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from caraml.results.finish import LOG
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Placement, Point, Policy
from caraml.workloads.gpt import Params
from tests.conftest import MakePoint
from tests.stores import write_script

SHORT = Policy(target=0.5, min_seconds=0, max_seconds=200, min_steps=6, max_steps=6, idle_seconds=0, warm_up_max_seconds=0.1)
TINY = {"preset": "4M", "width": 32, "layers": 4, "heads": 2, "sequence_length": 32, "vocab_size": 128, "data": "synthetic-device"}


def start(root: Path, point: Point) -> tuple[Path, subprocess.Popen[bytes]]:
    folder = Store(root).new_attempt(point)
    return folder, subprocess.Popen([str(write_script(point, folder, threads=2))], start_new_session=True)


def run(root: Path, point: Point) -> Record:
    folder, process = start(root, point)
    process.wait(timeout=300)
    assert (folder / RECORD).exists(), (folder / "worker.log").read_text()[-3000:]
    return read_record(folder / RECORD)


def processes_of(folder: Path) -> dict[int, str]:
    """Rank (empty for what starts them) of every process that has the attempt's folder on its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            command, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and str(folder).encode() in command:
            ranks = [value[5:].decode() for value in variables.split(b"\0") if value.startswith(b"RANK=")]
            found[int(entry.name)] = ranks[0] if ranks else ""
    return found


def test_a_pipeline_is_measured_and_its_checkpoint_starts_one_process(tmp_path: Path, make_point: MakePoint) -> None:
    """Started from the pipeline's weights, one process does not begin at the loss of a fresh model."""
    values = {
        "workload": "gpt",
        "global_batch": 8,
        "micro_batch": 2,
        "measure": SHORT.model_copy(update={"min_steps": 40, "max_steps": 40}),
    }
    kept = tmp_path / "kept"
    rate = {"learning_rate": 3e-3, "warm_up_steps": 2, "decay_steps": 40, "tied_head": False}
    params = Params.model_validate({**TINY, **rate, "save_to": str(kept)}).model_dump(mode="json")
    divided = run(tmp_path, make_point(params=params, devices=2, placement=Placement(pp=2), **values))
    assert divided.status == "ok", divided.reason
    assert divided.point.placement.pp == 2 and "pp2" in divided.point.label
    assert divided.window is not None and divided.window.items == 40 * 8 * 32, "steps enough to learn, however few the warm-up had time for"
    steps = read_table(Store(tmp_path).folder(divided) / divided.files["steps"])
    assert set(steps["rank"]) == {0, 1}
    seen = [loss for loss, rank in zip(steps["loss"], steps["rank"], strict=True) if rank == 1]
    assert len(seen) == len(steps["loss"]) / 2 and all(loss is not None for loss in seen), "the last stage sees the loss"
    assert divided.value("slowest_rank") in (0.0, 1.0) and (divided.value("rank_imbalance") or 0) >= 0
    assert (kept / ".metadata").exists() and "save_model" in {phase.name for phase in divided.phases}
    params = Params.model_validate({**TINY, **rate, "start_from": str(kept)}).model_dump(mode="json")
    alone = run(tmp_path, make_point(params=params, **{**values, "measure": SHORT}))
    assert alone.status == "ok", alone.reason
    assert "torch.distributed is disabled" not in (Store(tmp_path).folder(alone) / LOG).read_text(), "which is meant"
    fresh, last, again = divided.value("loss_first"), divided.value("loss_last"), alone.value("loss_first")
    assert fresh is not None and last is not None and again is not None
    assert abs(again - last) < 0.2 * abs(fresh - last)


def test_a_divided_sequence_counts_once(tmp_path: Path, make_point: MakePoint) -> None:
    """Each of two devices has half of every sample's tokens, and a loss of its own."""
    values = {"workload": "gpt", "global_batch": 8, "micro_batch": 2, "measure": SHORT}
    params = Params.model_validate(TINY).model_dump(mode="json")
    record = run(tmp_path, make_point(params=params, devices=2, placement=Placement(cp=2), **values))
    assert record.status == "ok", record.reason
    assert record.window is not None and record.window.items == 6 * 8 * 32 and "cp2" in record.point.label
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    own = [[loss for loss, of in zip(steps["loss"], steps["rank"], strict=True) if of == rank] for rank in (0, 1)]
    assert len(own[0]) == len(own[1]) > 6 and own[0] != own[1]
    assert record.value("loss_first") == pytest.approx((own[0][0] + own[1][0]) / 2)


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_rank_that_dies_ends_the_point(tmp_path: Path, make_point: MakePoint, how: str) -> None:
    crash = {"crash_at": 3, "crash_on": 1} if how == "raises" else {}
    measure = SHORT.model_copy(update={"max_steps": 1_000_000, "min_steps": 1_000_000, "max_seconds": 3600})
    params = {"device": "real", "step_seconds": 0.02, **crash}
    folder, process = start(tmp_path, make_point(workload="known", params=params, devices=2, global_batch=8, measure=measure))
    if how == "killed":
        deadline = time.monotonic() + 300
        while "measure" not in (text := (folder / "progress.jsonl").read_text() if (folder / "progress.jsonl").exists() else ""):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)
        (victim,) = [pid for pid, rank in processes_of(folder).items() if rank == "1"]
        os.kill(victim, signal.SIGKILL)
        process.wait(timeout=300)
    else:
        guard = threading.Timer(300, process.kill)
        guard.start()
        while not (folder / "failure.json").exists() and process.poll() is None:
            time.sleep(0.05)
        process.wait(timeout=300)
        guard.cancel()
    record = read_record(folder / RECORD)
    assert record.status == "failed"
    assert processes_of(folder) == {}, "no rank is left behind"
    if how == "raises":
        assert "ValueError: the model is broken" in (record.reason or "")
        assert (record.traceback or "").startswith("rank 1: Traceback") and "_fail_where_told" in (record.traceback or "")
    else:
        assert record.reason and record.metrics == {}
        print(record.reason)


def test_megatron_s_copies_are_measured_like_ours(tmp_path: Path, make_point: MakePoint) -> None:
    pytest.importorskip("megatron.core")
    params = Params.model_validate({**TINY, "backend": "megatron", "learning_rate": 3e-3}).model_dump(mode="json")
    record = run(tmp_path, make_point(workload="gpt", params=params, devices=2, global_batch=8, micro_batch=2, measure=SHORT))
    assert record.status == "ok", record.reason
    first, last = record.value("loss_first"), record.value("loss_last")
    assert first is not None and last is not None and last < first
    assert record.window is not None and record.window.items == 6 * 8 * 32
