"""What `caraml plan` sees of the input that points name: what is not here, and what is here and of another kind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from caraml import __version__
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.campaign.machine import machine_of
from caraml.cli import app
from caraml.suite.model import WORKLOAD_ALIASES
from caraml.system.catalogue import load_system
from caraml.system.model import Container, Scheduler, Software
from caraml.workloads import load_workload, see_packages
from caraml.workloads.gpt.tokens import IndexedTokensWriter
from caraml.workloads.weather import prepare_weather

LOOKED_AT = """\
name = "given"
title = "What is there is looked at"
[[benchmark]]
name = "one"
workload = "{workload}"
global_batch = [2, 4]
params = {params}
"""


def planned(folder: Path, workload: str, params: str, *options: str) -> tuple[int, str]:
    suite = folder / "given.toml"
    suite.write_text(LOOKED_AT.format(workload=workload, params=params))
    result = CliRunner().invoke(app, ["plan", str(suite), "--out", str(folder / "results"), *options], env={"COLUMNS": "2000"})
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("workload", "name", "others"),
    [
        ("tweet_rain_classification", "weights", ""),
        ("image_classification", "path", ', data = "lmdb"'),
        ("gpt", "corpus", ', preset = "4M"'),
        ("radiation_emulation", "folder", ""),
    ],
)
def test_plan_notes_input_that_is_not_here_once_and_refuses_nothing(tmp_path: Path, workload: str, name: str, others: str) -> None:
    code, text = planned(tmp_path, workload, f'{{ {name} = "gone/x"{others} }}')
    assert code == 0 and "2 to run" in text
    assert text.count(f"params.{name}: {tmp_path}/gone/x is not here, and is needed where the points run") == 1


def test_plan_says_that_a_run_will_refuse_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It planned into folders from which nothing is started, that nobody may write to, or that are full."""
    out = tmp_path / "results"
    assert planned(tmp_path, "radiation_emulation", "{ }")[0] == 0 and not out.exists()
    out.mkdir()
    for total, refused in ((1, True), (0, False)):  # a file system that says nothing of its size says nothing of its room
        disk = SimpleNamespace(total=total, used=total, free=0)
        monkeypatch.setattr("shutil.disk_usage", lambda path, disk=disk: disk)
        code, text = planned(tmp_path, "radiation_emulation", "{ }")
        assert (code == 2) == refused == (f"refused: {out}: found 0 bytes free" in text)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9, used=8, free=1))
    monkeypatch.setattr("caraml.campaign.preview._earlier", lambda campaign, names: ({}, dict.fromkeys(names, 4e3)))
    code, text = planned(tmp_path, "radiation_emulation", "{ }")
    assert code == 0 and "disk: 8,000 bytes are expected, and 1 are free" in text, "it is an estimate, and `run` begins"
    usual = os.access
    monkeypatch.setattr("os.access", lambda path, mode, **rest: mode == os.R_OK or (path != out and usual(path, mode, **rest)))
    code, text = planned(tmp_path, "radiation_emulation", "{ }")
    assert code == 2 and f"refused: {out}: you may not write to it" in text
    out.chmod(0o777)
    code, text = planned(tmp_path, "radiation_emulation", "{ }")
    assert code == 2 and f"refused: {out}: nothing is started from here" in text and list(out.iterdir()) == []


def test_plan_refuses_a_path_that_no_system_can_look_at(tmp_path: Path) -> None:
    code, text = planned(tmp_path, "gpt", f'{{ corpus = "{"a" * 300}", preset = "4M" }}')
    assert code == 2 and f"refused: {tmp_path}/{'a' * 300}" in text and "File name too long" in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CARAML_PROBE_SECONDS", "3s", "found '3s', expected a number of seconds, 0 or more"),
        ("CARAML_HANG_SECONDS", "never", "found 'never', expected a number of seconds, 0 or more"),
        ("CARAML_HANG_SECONDS", "inf", r"found 'inf', .*\n.*export CARAML_HANG_SECONDS=10, 0 for never, or unset it"),
        ("CARAML_MEMORY_GIB", "all", "found 'all', expected a number of GiB above 0, or off"),
        ("CARAML_BIND", "0", "found '0', expected off, or on"),
    ],
)
def test_a_variable_that_would_fail_every_point_is_told_first(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv(name, value)
    for verb in ("plan", "run"):
        with pytest.raises(InputError, match=f"^{name}: {words}"):
            raise CliRunner().invoke(app, [verb, "quick"]).exception or AssertionError(f"{verb} takes it")


def test_no_memory_of_a_gpu_is_planned_for_points_that_only_programs_of_others_run() -> None:
    result = CliRunner().invoke(app, ["plan", "llm", "--system", "jureca-ipu", "--only", "117M"], env={"COLUMNS": "2000"})
    assert result.exit_code == 0 and "torch drives no IPU" in result.stdout
    assert "GiB of each device" not in result.stdout and "do not fit" not in result.stdout


def test_plan_refuses_input_that_is_here_and_of_another_kind(tmp_path: Path) -> None:
    import lmdb

    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "deberta-v2"}')
    with lmdb.open(str(tmp_path / "other.lmdb"), subdir=False) as other, other.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    (tmp_path / "other.json").write_text('{"questions": []}')
    for name, classes in (("three", "abc"), ("others", "abd")):
        with lmdb.open(str(tmp_path / f"{name}.lmdb"), subdir=False) as images, images.begin(write=True) as transaction:
            transaction.put(b"__meta__", json.dumps({"format": 1, "classes": list(classes), "images": 1}).encode())
    for name in "abc":
        (tmp_path / "photos" / name).mkdir(parents=True)
    ids = np.arange(5000, dtype=np.int64) % 7
    ids[30] = 5000
    with IndexedTokensWriter.at(tmp_path / "corpus", 6000) as writer:
        writer.add(ids)
    for workload, params, told in (
        ("question_answering", '{ weights = "weights" }', "model_type: found 'deberta-v2', expected 'bert'"),
        ("question_answering", '{ data = "squad", file = "other.json" }', "other.json: found no 'data'; expected SQuAD's form"),
        ("image_classification", '{ data = "./other.lmdb" }', "other.lmdb: an LMDB, but not one of images: found 1 key: 'key'"),
        ("image_classification", '{ data = "./three.lmdb", classes = 2 }', f"classes: found 2; the data at {tmp_path}/three.lmdb has 3"),
        (
            "image_classification",
            '{ data = "./three.lmdb", validation = "others.lmdb" }',
            f"validation: the classes at {tmp_path}/others.lmdb are not those of the training images",
        ),
        ("image_classification", '{ path = "photos", classes = 2 }', f"classes: found 2; the data at {tmp_path}/photos has 3"),
        ("image_classification", '{ path = "photos/a" }', "photos/a: no image folder (found no folder of a class in it)"),
        ("gpt", '{ preset = "4M", corpus = "corpus" }', "corpus: sample 0 has token 5000; expected ids from 0 to 4095"),
    ):
        code, text = planned(tmp_path, workload, params)
        assert code == 2 and text.count(told) == 1 and "refused: " in text and "\ufffd" not in text, text


def test_plan_knows_nothing_of_images_that_are_closed_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_workload("image_classification")
    monkeypatch.setattr("os.access", lambda *_: False)  # as for anybody who is not root
    assert found.check is not None
    found.check(found.params.model_validate({"path": "photos", "classes": 2}), tmp_path)


def test_plan_takes_the_two_parts_of_a_set_as_a_run_does(tmp_path: Path) -> None:
    import lmdb

    for part in ("train", "val"):
        with lmdb.open(str(tmp_path / part)) as images, images.begin(write=True) as transaction:
            transaction.put(b"__meta__", json.dumps({"format": 1, "classes": ["a", "b"], "images": 1}).encode())
    code, text = planned(tmp_path, "image_classification", '{ data = "lmdb", path = ".", classes = 2 }')
    assert code == 0 and "2 to run" in text, text


def test_weather_folders_are_looked_at(tmp_path: Path) -> None:
    """Each application takes its own look-alikes, and refuses those of every other."""
    applications = {**WORKLOAD_ALIASES, "atmorep": "atmorep"}
    for name in applications:
        prepare_weather(name, tmp_path / name)
    for name, workload in applications.items():
        found = load_workload(workload)
        assert found.check is not None
        for other in applications:
            params, place = found.params.model_validate({"folder": other}), re.escape(str(tmp_path / other))
            with nullcontext() if other == name else pytest.raises(InputError, match=f"^{place}"):
                found.check(params, tmp_path)
    code, text = planned(tmp_path, "radiation_emulation", '{ folder = "ap6" }')
    assert code == 2 and f"refused: {tmp_path}/ap6/era5_pl_" in text


@pytest.mark.parametrize("name", ["backend", "order"])
def test_plan_says_that_megatron_is_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = f'{{ preset = "4M", {name} = "megatron" }}'
    assert "not installed here" not in planned(tmp_path, "gpt", params)[1]
    monkeypatch.setattr("caraml.workloads.gpt.find_spec", lambda name: None)
    code, text = planned(tmp_path, "gpt", params)
    assert code == 0 and text.count(f"params.{name} = 'megatron' needs megatron-core, not installed here") == 1


def test_only_what_is_chosen_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "transformers" else found(name, *more))
    one = CliRunner().invoke(app, ["plan", "pearc22", "--only", "figure 1"])
    assert one.exit_code == 0 and "figure 1 resnet50" in one.output, one.output
    other = CliRunner().invoke(app, ["plan", "pearc22", "--only", "bert"])
    assert isinstance(other.exception, EnvironmentUnfitError) and "needs transformers, not installed here" in str(other.exception)
    assert CliRunner().invoke(app, ["plan", "pearc22", "--only", "bert", "--launcher", "print"]).exit_code == 0


def without_torch(patch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def absent(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    patch.setitem(sys.modules, "torch", None)
    patch.setattr(metadata, "version", absent)
    for name in ("caraml.engine.memory", "caraml.workloads.question_answering.data"):
        patch.delitem(sys.modules, name, raising=False)


def test_a_login_node_whose_jobs_alone_have_torch_plans_all_but_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "squad.json"
    corpus.write_text("{}")
    jobs = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "torch-9.9.dist-info"
    jobs.mkdir(parents=True)
    (jobs / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9+jobs\n")
    without_torch(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name, parameters in (
        ("gpt", '{ preset = "4M" }'),
        ("question_answering", '{ file = "squad.json" }'),
        ("command", '{ argv = ["true"] }'),
    ):
        text = LOOKED_AT.format(workload=name, params=parameters)
        Path(f"{name}.toml").write_text(text if name != "command" else text.replace("global_batch = [2, 4]\n", ""))
    printed = {name: CliRunner().invoke(app, ["plan", f"{name}.toml", "--launcher", "print"]) for name in ("gpt", "question_answering")}
    assert [done.exit_code for done in printed.values()] == [0, 0], printed
    assert "memory: not planned, which needs torch here" in printed["gpt"].output
    assert "input of question_answering is not looked into, which needs torch here" in printed["question_answering"].output.replace(
        "\n", " "
    )
    see_packages("command")
    refused = CliRunner().invoke(app, ["plan", "gpt.toml"]).exception
    assert isinstance(refused, EnvironmentUnfitError) and "'gpt' needs torch, not installed here" in str(refused)
    assert "software.modules, venv or python" in str(refused)
    local = load_system("local")
    for software, torch in ((Software(), "of unknown version"), (Software(venv=str(tmp_path / "venv")), "9.9+jobs")):
        system = local.model_copy(update={"site": local.site.model_copy(update={"software": software})})
        assert machine_of(system, "slurm").software == f"caraml {__version__}, torch {torch}"


def test_what_keeps_points_from_running_is_said_once_and_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = load_system("local")
    site = local.site.model_copy(update={"scheduler": Scheduler(max_minutes=60, exclusive=True)})
    imaged = site.model_copy(update={"container": Container(runtime="apptainer", image=str(tmp_path / "x.sif"))})
    late, absent = "timeout_seconds = 7200 is 120 min; jobs here end after 60 min (scheduler.max_minutes); next", "container.image: no file"
    for jobs, why in ((site, late), (imaged, absent)):
        monkeypatch.setattr("caraml.cli.asked.load_system", lambda *_, jobs=jobs: local.model_copy(update={"site": jobs}))
        code, text = planned(tmp_path, "gpt", '{ preset = "4M" }\nmeasure.timeout_seconds = 7200', "--launcher", "print")
        assert code == 2 and "\ufffd" not in text and text.count("refused: ") == 1 == text.count(f"refused: one b2 fp32: {why}")
        ran = CliRunner().invoke(app, ["run", str(tmp_path / "given.toml"), "--launcher", "print", "--out", str(tmp_path / "results")])
        assert f"one b2 fp32: failed: {why}" in ran.output and "nothing was started" in ran.output
