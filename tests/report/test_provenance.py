"""Every name that can appear has words, and looking at the room costs no heavy import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from record_factory import make_record

from caraml import power
from caraml.metrics.model import METRICS, Metric
from caraml.power.model import BLOCKING, ENERGY_FLAGS
from caraml.report.section import flag_meaning, flag_text, source, window_text
from caraml.results.record import FLAGS


def test_every_power_flag_is_explained() -> None:
    files = [file for file in Path(power.__file__).parent.rglob("*.py") if file.name != "model.py"]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    used = set(re.findall(r'flags\.add\("(\w+)"', code)) | set(re.findall(r'flags=\("(\w+)"', code)) | BLOCKING
    assert len(used) > 10 and used <= ENERGY_FLAGS.keys()
    of_others = {"estimated"}  # no source of ours models power
    assert ENERGY_FLAGS.keys() - of_others <= set(re.findall(r'"(\w+)"', code)), "explained, and set by nobody"
    assert not ENERGY_FLAGS.keys() & FLAGS.keys()
    assert "no explanation" in flag_meaning("from_the_future")


def test_every_metric_has_a_source() -> None:
    record = make_record(watts=100.0)
    for name in METRICS:
        assert source(record, name) not in {"", "not described", "not measured"}
    assert source(record, "mean_power").startswith("boundary device: "), "the definition is the formula; the sensor is told"


def test_a_window_says_which_changes_its_intervals_speak_of() -> None:
    old = make_record(watts=100.0)
    assert old.window is not None
    new = old.model_copy(update={"window": old.window.model_copy(update={"shortest_seen": 0.05, "longest_seen": 0.25})})
    told = "its intervals speak of changes that take 50.0 ms to 250 ms: slower ones, and what changes from run to run, are not in them"
    assert window_text(new) == f"{window_text(old)}; {told}"
    assert source(new, "throughput").endswith("(from the slowest changes of the steps)")
    assert source(old, "throughput").endswith("(the wider of batch means and AR(1))")


def test_numbers_of_a_program_are_not_explained_as_a_training_s() -> None:
    record = make_record(watts=100.0)
    program = record.model_copy(update={"point": record.point.model_copy(update={"workload": "command"})})
    assert source(program, "throughput").endswith(", of one run of the program")
    assert "of a command, the program's run" in source(program, "runtime")


def test_input_bound_comes_with_its_numbers() -> None:
    record = make_record(watts=100.0)
    bound = Metric(value=250.0, unit="image/s", reason="input-bound: 20 % of the window was spent waiting for batches")
    slow = record.model_copy(update={"metrics": {**record.metrics, "throughput_without_wait": bound}})
    assert flag_text(slow, "input_bound").endswith("waiting for batches; without the wait 250 image/s)")
    assert flag_text(slow, "imprecise") == flag_meaning("imprecise")


@pytest.mark.parametrize("module", ["caraml.report", "caraml.report.terminal", "caraml.report.page", "caraml.analysis.table"])
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'vl_convert', 'duckdb', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
