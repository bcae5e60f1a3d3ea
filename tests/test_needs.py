"""Benchmarks that need another first: order, handing over, and what becomes of those whose need is not met."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from caraml.api import load
from caraml.base.errors import InputError
from caraml.base.toml import parse_toml
from caraml.launch import Job
from caraml.launch.batch import SlurmOptions
from caraml.launch.launchers import PrintLauncher
from caraml.launch.slurm import SlurmLauncher
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.choice import SuitePart, with_settings
from caraml.suite.expand import Plan, expand
from caraml.suite.load import SuiteFile, load_suite, suite_of
from caraml.suite.placement import Machine
from caraml.system.model import Scheduler
from caraml.workloads import params_of
from tests.test_campaign_verbs import caraml

HEAD = 'name = "needs"\ntitle = "T"\n'
SECOND = """[[benchmark]]
name = "second"
workload = "command"
needs = "first"
params = { argv = ["sh", "-c", "cat '{folder}/needed/kept' && exit {ends}"], ends = [0, 4], energy = false }
"""
FIRST = """[[benchmark]]
name = "first"
workload = "command"
params = { argv = ["sh", "-c", "echo 42 >'{folder}/kept'; exit {code}"], code = 0, energy = false }
"""
THIRD = '[[benchmark]]\nname = "third"\nworkload = "command"\nneeds = "second"\nparams = { argv = ["true"], energy = false }\n'
GPT = '[[benchmark]]\nname = "{0}"\nworkload = "gpt"\nglobal_batch = [4, 8]\n{1}\nparams = {{ preset = "4M" }}\n'
SMALL = """[[benchmark]]
name = "gpt-175B {0}"
world = 1
tp = 1
pp = 1
sp = false
where = []
accumulation = {1}
[benchmark.params]
preset = "4M"
recompute = "off"
data = "synthetic"
sequence_length = 16
width = 32
heads = 4
layers = 1
vocab_size = 64
"""


def machine(nodes: int = 4) -> Machine:
    return Machine("local", "test device", "gpu", "test", nodes=nodes, devices_per_node=4, device_memory_gib=80.0)


def expanded(text: str, there: Machine | None = None) -> tuple[SuiteFile, Plan]:
    file = suite_of(parse_toml(HEAD + text, "needs.toml"))
    return file, expand(file, there or machine(), params_of)


def test_what_is_needed_goes_first_and_is_part_of_the_key() -> None:
    first, *others = (one.point for one in expanded(SECOND + FIRST)[1].points)
    assert [first.benchmark, *(one.benchmark for one in others)] == ["first", "second", "second"]
    assert all(one.needs == (first.folder_name,) for one in others) and not first.needs
    changed = [one.point.key for one in expanded(SECOND + FIRST.replace("code = 0", "code = 1"))[1].points[1:]]
    assert not set(changed) & {one.key for one in others}, "the same work after other work is other work"
    alone = others[0].model_copy(update={"needs": ()})
    assert alone.key != others[0].key and "needs" not in alone.model_dump(exclude_defaults=True)


def test_a_part_has_what_it_needs() -> None:
    file, plan = expanded(THIRD + SECOND + FIRST)
    keys = SuitePart(("third",)).keys(file, plan, machine(), params_of)
    assert keys == {one.key for one in plan.points}
    assert SuitePart(("first",)).keys(file, plan, machine(), params_of) == {plan.points[0].key}


def test_what_needs_an_impossible_point_is_skipped_with_its_reason() -> None:
    wide = GPT.format("wide", "nodes = 9")
    for text, why in (
        (wide + GPT.format("after", 'needs = "wide"'), "needs wide b4 9x1 .*, which is skipped: needs 9 nodes"),
        (
            wide.replace("nodes = 9", 'where = ["nodes > 1"]') + GPT.format("after", 'needs = "wide"'),
            "needs wide, of which there is no point on local",
        ),
    ):
        points = [one for one in expanded(text)[1].points if one.point.benchmark == "after"]
        assert len(points) == 2 and all(re.match(why, one.skip or "") for one in points), points


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FIRST + SECOND.replace('"first"', '"frist"'), "needs.toml:10: benchmark[1].needs: found \"frist\", expected the name"),
        (GPT.format("a", 'needs = "a"'), 'benchmark[0].needs: found "a", expected no circle: it would wait for itself'),
        (
            "".join(GPT.format(name, f'needs = "{other}"') for name, other in zip("adbecf", "bdacab", strict=True)),
            'benchmark[2].needs: found "a", expected no circle: a, b wait for each other',
        ),
        (
            "".join(GPT.format(name, f'needs = "{other}"') for name, other in zip("abcdef", "badcca", strict=True)),
            'benchmark[3].needs: found "c", expected no circle: c, d wait for each other',
        ),
        (GPT.format("a", "needs = 3"), "benchmark[0].needs: found 3, expected a string"),
    ],
)  # fmt: skip
def test_a_need_that_cannot_be_met_is_a_fault(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        expanded(text)
    assert words in str(caught.value), caught.value
    assert "frist" not in words or "did you mean 'first'" in str(caught.value)
    assert not any(f"benchmark[{index}]" in str(caught.value) for index in (4, 5)), "they wait for a circle and are in none"


def test_needs_are_those_of_the_file() -> None:
    file = suite_of(parse_toml(HEAD + GPT.format("a", "") + GPT.format("b", 'needs = "a"'), "s.toml"))
    with pytest.raises(InputError, match="no benchmark of suite 'needs' has the key 'needs'"):
        with_settings(file, ["needs=a"], params_of, None)


KEPT = """[[benchmark]]
name = "{0}"
workload = "gpt"
{1}
params = {{ preset = "4M", {2} }}
"""
SAVED, TAKEN = 'save_to = "kept"', 'start_from = "needed/kept"'


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("global_batch = [4, 8]", "global_batch = [8, 4]", [1, 0]),
        ("global_batch = [4, 8]", "global_batch = 8\nprecision = ['fp32', 'bf16']", [1, 1]),
        ("global_batch = [4, 8]\nrepeats = 2", "global_batch = 8\nrepeats = 2", [1, 3]),
        ("global_batch = [4, 8]\nseed = [1, 2]\nsweep = 'zip'", "global_batch = [8, 4]\nseed = [2, 1]\nsweep = 'zip'", [1, 0]),
        ("global_batch = 4", "global_batch = [4, 8]", [0, 0]),
    ],
)
def test_of_several_points_each_needs_the_one_that_is_alike(first: str, second: str, pairs: list[int]) -> None:
    points = [
        one.point
        for one in expanded(KEPT.format("first", first, SAVED) + KEPT.format("second", f'needs = "first"\n{second}', TAKEN))[1].points
    ]
    kept = [one.folder_name for one in points if one.benchmark == "first"]
    assert [one.needs for one in points if one.benchmark == "second"] == [(kept[index],) for index in pairs]


def test_parameters_of_the_workload_decide_what_is_alike() -> None:
    first, second = (f"width = [64, 128], heads = 4, {one}" for one in (SAVED, TAKEN))
    text = KEPT.format("first", "global_batch = 4", first) + KEPT.format("second", 'needs = "first"\nglobal_batch = [4, 8]', second)
    points = [one.point for one in expanded(text)[1].points]
    widths = {one.folder_name: one.params["width"] for one in points[:2]}
    assert len(points) == 6 and all(widths[one.needs[0]] == one.params["width"] and len(one.needs) == 1 for one in points[2:])


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("global_batch = [4, 8]", "global_batch = [8, 16]", "0 of its 2 points have global_batch = 16"),
        ("global_batch = 4\nrepeats = 2", "global_batch = 4\nrepeats = 3", "0 of its 2 points have repeats = 2"),
        ("global_batch = [4, 4]", "global_batch = 4", "2 of its 2 points have global_batch = 4"),
    ],
)
def test_files_of_no_point_or_of_several_are_refused_before_anything_runs(first: str, second: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        expanded(KEPT.format("first", first, SAVED) + KEPT.format("second", f'needs = "first"\n{second}', TAKEN))
    assert 'benchmark[1].needs: found "first", expected a benchmark of one point, or with one for each of these' in str(caught.value)
    assert words in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("first", "kept", "taken", "words"),
    [
        ("", SAVED, 'start_from = "needed/ketp"', 'found "needed/ketp", expected "needed/kept", which benchmark \'first\' saves to'),
        ("", 'save_to = "./a//kept"', 'start_from = "./needed/a/kept/"', None),
        ("", 'save_to = "/d/kept"', TAKEN, "expected \"/d/kept\", which benchmark 'first' saves to"),
        ("", "layers = 4", TAKEN, "expected what benchmark 'first' keeps, and it has no params.save_to"),
        ("mode = 'compute'", SAVED, TAKEN, "expected a checkpoint of mode 'train': benchmark 'first' has 'compute', which keeps none"),
        ("", f"{SAVED}, layers = 3, tied_head = false", TAKEN, "'first' has layers 3, not 4, tied_head false, not true"),
        ("", f"{SAVED}, heads = 8", TAKEN, "'first' has heads 8, not 4"),  # whose weights have the same shapes
        ("", "layers = 4", 'start_from = "needed/needed/kept"', None),  # of what `first` needs
        ("", f"{SAVED}, vocab_size = 4097", TAKEN, "'first' has padded vocabulary 4160, not 4096"),
        ("", f"{SAVED}, sequence_length = 64", TAKEN, "'first' has sequence_length 64, not 256"),
        ("", f'{SAVED}, positions = "rotary", sequence_length = 64', f'{TAKEN}, positions = "rotary"', None),
        ("", f"{SAVED}, recompute = 'full', learning_rate = 1e-3", TAKEN, None),
    ],
)
def test_a_checkpoint_that_will_not_be_there_is_told_before_anything_runs(first: str, kept: str, taken: str, words: str | None) -> None:
    text = KEPT.format("first", f"global_batch = 4\n{first}", kept) + KEPT.format("second", 'needs = "first"\nglobal_batch = 4', taken)
    if words is None:
        assert len(expanded(text)[1].points) == 2
        return
    with pytest.raises(InputError) as caught:
        expanded(text)
    assert "benchmark[1].params.start_from: " in str(caught.value) and words in str(caught.value), caught.value


def test_files_of_what_is_needed_may_be_a_program_s_and_never_of_nothing() -> None:
    second = KEPT.format("second", 'needs = "first"\nglobal_batch = 4', TAKEN)
    assert len(expanded(FIRST + second)[1].points) == 2
    with pytest.raises(InputError, match=r"start_from: found \"needed/kept\", expected a path of its own, or `needs` beside it"):
        expanded(second.replace('needs = "first"', ""))


def test_what_takes_no_files_waits_for_all_points() -> None:
    points = [
        one.point for one in expanded(FIRST.replace("code = 0", "code = [0, 0.5]") + SECOND.replace("/needed/kept", "/other"))[1].points
    ]
    assert [len(one.needs) for one in points] == [0, 0, 2, 2]


def records(out: Path) -> dict[str, Record]:
    return {record.point.label: record for record in Store(out).records("needs")}


@pytest.mark.processes
def test_points_run_after_what_they_need_and_find_its_files(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "needs.toml").write_text(HEAD + THIRD + SECOND + FIRST)
    caraml(tmp_path, "run", "needs.toml", "--out", "r", "--only", "third")
    found = records(tmp_path / "r")
    assert {label: record.status for label, record in found.items()} == {
        "first code=0": "ok",
        "second ends=0": "ok",
        "second ends=4": "failed",
        "third": "skipped",
    }
    assert (found["third"].reason or "").startswith("needs second ends=4, which is failed: ")
    log = Store(tmp_path / "r").points / found["second ends=0"].point.folder_name / "1" / "worker.log"
    assert log.read_text() == "42\n" and not (log.parent / "needed").readlink().is_absolute()


@pytest.mark.processes
def test_where_the_needed_point_fails_the_others_are_skipped_until_it_succeeds(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    once = FIRST.replace("exit {code}", "test -e {suite_folder}/good").replace("code = 0, ", "")
    (tmp_path / "needs.toml").write_text(HEAD + SECOND.replace("[0, 4]", "0") + once)
    assert caraml(tmp_path, "run", "needs.toml", "--out", "r").returncode == 1
    assert [record.status for record in records(tmp_path / "r").values()] == ["failed", "skipped"]
    (tmp_path / "good").touch()
    done = caraml(tmp_path, "run", "needs.toml", "--out", "r")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(record.status, record.attempt) for record in records(tmp_path / "r").values()] == [("ok", 2), ("ok", 2)]


@pytest.mark.processes
def test_slurm_is_told_what_waits_for_what(tmp_path: Path) -> None:
    def job(name: str, **more: object) -> Job:
        folder = tmp_path / f"gpt-{name}" / "1"
        folder.mkdir(parents=True)
        (folder / "run.sh").write_text("#!/bin/bash\n")
        return Job(folder, folder / "run.sh", 1, 1, 60.0, **more)  # type: ignore[arg-type]

    first, second, third = job("a", awaited=True), job("b", after=("slurm:7:/x",)), job("c", after=("slurm:7:/x",))
    for pack in (1, 4):
        launcher = SlurmLauncher(Scheduler(), tmp_path / "jobs", SlurmOptions(one_at_a_time=True, pack=pack))
        groups = launcher.scripts([first, second, third])
        assert [len(group) for group, _ in groups] == [1, 1, 1]
        words = launcher.command(*reversed(groups[1]))
        assert words[2:5] == ["--dependency=singleton,afterok:7", "--kill-on-invalid-dep=yes", "--job-name=caraml"]
    shown: list[str] = []
    printer = PrintLauncher(shown.append, SlurmLauncher(Scheduler(), tmp_path / "jobs", asks=False))
    (handle,) = printer.submit([first])
    printer.submit([Job(second.folder, second.script, 1, 1, 60.0, (handle,))])
    assert shown == [
        f"job_gpt_a=$(sbatch --parsable {first.script})",
        f'sbatch --parsable "--dependency=afterok:$job_gpt_a" --kill-on-invalid-dep=yes {second.script}',
    ]


@pytest.mark.processes
def test_epicure_s_snapshot_is_after_60_steps_and_its_copies_go_on_from_it(tmp_path: Path) -> None:
    """The suite of the catalogue with another model: 60 steps of 192 x 2048 tokens are 23.6 million."""
    large = next(one for one in load_suite("epicure-language").suite.benchmark if one.name == "gpt-175B snapshot")
    assert large.accumulation == 192 and large.micro_batch == 1
    short = "measure = { min_seconds = 0, max_seconds = 5, warm_up_max_seconds = 1, max_steps = 10, idle_seconds = 0 }\n"
    text = SMALL.format("snapshot", 1).replace("[benchmark.params]", "measure = { idle_seconds = 0 }\n[benchmark.params]")
    text += SMALL.format("weak", "[1, 2]").replace("[benchmark.params]", short + "[benchmark.params]")
    text += '[[benchmark]]\nname = "gpt-175B strong"\nwhere = ["layers == 1"]\n'  # it keeps its sizes, which are not the snapshot's
    (tmp_path / "locks").mkdir()
    (tmp_path / "own.toml").write_text(HEAD + 'include = ["epicure-language"]\n' + text)
    done = caraml(tmp_path, "run", "own.toml", "--out", "r", "--only", "gpt-175B weak", "--no-report", "--set", "deterministic=true")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {record.point.label: record for record in Store(tmp_path / "r").records("needs")}
    assert {record.status for record in found.values()} == {"ok"} and len(found) == 3
    steps = load(tmp_path / "r").sql("select key, count(*) as n from steps group by key")
    counts = {row["key"]: row["n"] for row in steps}
    snapshot = next(record for record in found.values() if "snapshot" in record.point.label)
    assert counts[snapshot.key] == 60
    others = [record for record in found.values() if record is not snapshot]
    assert all("load_checkpoint" in {phase.name for phase in record.phases} for record in others)
