"""From suite text to points: sweeps, overrides, conditions, impossible points, and faults."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from caraml.base.errors import InputError, unknown_name
from caraml.base.toml import FaultsError, parse_toml
from caraml.campaign import Options
from caraml.cli.asked import refuse_with_all_faults
from caraml.suite.choice import SuitePart, with_settings
from caraml.suite.expand import Plan, expand
from caraml.suite.load import Suite, SuiteFile, catalog_suites, load_suite, suite_of
from caraml.suite.model import Point, Policy
from caraml.suite.placement import Machine
from caraml.system.model import DeviceClass
from caraml.workloads import params_of as real_params_of
from caraml.workloads.gpt import PRESETS


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = Field(64, ge=1)
    kind: Literal["a", "b"] = "a"


def params_of(name: str) -> type[BaseModel]:
    if name != "net":
        raise unknown_name("workload", name, ["net"])
    return Params


def machine(device_class: DeviceClass = "cpu", devices: int = 4) -> Machine:
    return Machine("local", "test device", device_class, "test", nodes=1, devices_per_node=devices, device_memory_gib=80.0)


def plan(text: str, device_class: DeviceClass = "cpu") -> Plan:
    document = parse_toml('name = "s"\ntitle = "S"\n' + text, "s.toml")
    return expand(SuiteFile(document.validate(Suite), document), machine(device_class), params_of)


HEAD = '[[benchmark]]\nname = "n"\nworkload = "net"\n'


class Paths(Params):
    """As of a plug-in, which makes a path of what is given."""

    folder: Path = Path()

    @field_validator("folder", mode="before")
    @classmethod
    def _below_here(cls, text: str) -> Path:
        return Path("/data") / text


def test_values_are_strict_beside_what_a_validator_makes() -> None:
    def paths(params: str) -> list[object]:
        document = parse_toml('name = "s"\ntitle = "S"\n' + HEAD + f"global_batch = 1\nparams = {{ {params} }}", "s.toml")
        return [one.point.params["folder"] for one in expand(suite_of(document), machine(), lambda _: Paths).points]

    assert paths('folder = ["a", "b"]') == ["/data/a", "/data/b"]
    with pytest.raises(InputError, match=r"^s.toml:\d: benchmark\[0\].params.width: found true, expected an integer$"):
        paths('folder = "a", width = true')


def test_product_and_zip() -> None:
    swept = HEAD + "global_batch = [8, 16]\nparams = { width = [1, 2, 3] }\n"
    assert [(p.point.global_batch, p.point.params["width"]) for p in plan(swept).points] == [(b, w) for b in (8, 16) for w in (1, 2, 3)]
    zipped = HEAD + 'sweep = "zip"\nglobal_batch = [8, 16]\nparams = { width = [1, 2] }\n'
    assert [(p.point.global_batch, p.point.params["width"]) for p in plan(zipped).points] == [(8, 1), (16, 2)]


def test_defaults_are_filled_in_so_that_equal_work_has_an_equal_key() -> None:
    spelt = plan(HEAD + 'global_batch = 8\nparams = { width = 64, kind = "a" }\n').points[0].point
    short = plan(HEAD + "global_batch = 8\n").points[0].point
    assert spelt.key == short.key and short.params == {"width": 64, "kind": "a"}


def test_the_key_ignores_names_and_follows_everything_else() -> None:
    point = plan(HEAD + "global_batch = 8\n").points[0].point
    assert point.model_copy(update={"suite": "other", "benchmark": "other"}).key == point.key
    changed = {"global_batch": 16, "device": "another", "software": "torch 9", "precision": "bf16", "repeat": 1, "seed": 3}
    for name, value in changed.items():
        assert point.model_copy(update={name: value}).key != point.key, name
    assert point.model_copy(update={"measure": Policy(target=0.5)}).key != point.key


def test_a_profile_is_asked_for_by_yes_or_no_and_leaves_other_keys_alone() -> None:
    plain, traced = (plan(HEAD + f"global_batch = 8\n{more}").points[0].point for more in ("profile = false\n", "profile = true\n"))
    assert plain.key == plan(HEAD + "global_batch = 8\n").points[0].point.key != traced.key
    assert plain.key == "fe34b1bcf5f273e7", "a point that was measured before there were profiles is still the same"
    assert traced.label == plain.label + " profile"
    with pytest.raises(InputError, match=r"profile: found \[false, true\], expected .*true or false"):
        plan(HEAD + "global_batch = 8\nprofile = [false, true]\n")
    text = HEAD.replace("net", "command") + 'profile = true\nparams = { argv = ["true"], item = "run" }\n'
    text = 'name = "s"\ntitle = "S"\n' + text
    document = parse_toml(text, "s.toml")
    with pytest.raises(InputError, match=r"s.toml:6: benchmark\[0\].profile: found true, expected false: .* params.argv"):
        expand(SuiteFile(document.validate(Suite), document), machine(), real_params_of)


def test_results_of_another_method_are_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    point = plan(HEAD + "global_batch = 8\n").points[0].point
    before = point.key
    monkeypatch.setattr("caraml.suite.model.METHOD_VERSION", 99)
    assert point.key != before


def test_override_by_device_class_merges_params_and_measure() -> None:
    text = HEAD + (
        "global_batch = 8\nparams = { width = 2 }\nmeasure = { target = 0.5, min_seconds = 1 }\n"
        '[benchmark.on.gpu]\nglobal_batch = 32\nprecision = "bf16"\nparams = { kind = "b" }\nmeasure = { target = 0.1 }\n'
    )
    cpu, gpu = plan(text).points[0].point, plan(text, "gpu").points[0].point
    assert (cpu.global_batch, cpu.precision, cpu.params) == (8, "fp32", {"width": 2, "kind": "a"})
    assert (gpu.global_batch, gpu.precision, gpu.params) == (32, "bf16", {"width": 2, "kind": "b"})
    assert (gpu.measure.target, gpu.measure.min_seconds) == (0.1, 1)


def test_where_leaves_combinations_out_and_counts_them() -> None:
    found = plan(HEAD + 'global_batch = [4, 8, 16]\ndevices = [1, 4]\nwhere = ["global_batch >= 8 * devices", "width < 100"]\n')
    assert [(p.point.global_batch, p.point.devices) for p in found.points] == [(8, 1), (16, 1)]
    assert found.left_out == 4


def chosen(suite: str, *names: str, where: tuple[str, ...] = ()) -> set[str]:
    """Benchmarks and batches of what is meant by names and conditions."""
    file, there = load_suite(suite), machine("gpu")
    whole = expand(file, there, real_params_of)
    keys = SuitePart(names, where).keys(file, whole, there, real_params_of)
    assert keys is not None
    return {f"{one.point.benchmark} b{one.point.global_batch}" for one in whole.points if one.key in keys}


def test_a_part_of_a_suite_is_named_by_benchmarks_their_words_and_conditions() -> None:
    assert chosen("llm", "800M", where=("global_batch <= 32",)) == {"gpt-800M b16", "gpt-800M b32"}
    assert chosen("llm", "117m", "800M", where=("global_batch == 4096", "micro_batch == 4")) == {"gpt-117M b4096", "gpt-800M b4096"}
    assert {name.split()[0] for name in chosen("maelstrom", "ap3")} == {"ap3"}, "a whole name goes before a word of others"
    assert {name.split()[0] for name in chosen("maelstrom", "nocache")} == {"ap3-nocache"}
    assert chosen("llm", "117M", where=("global_batch == 64", "repeat == 0", '"16" in precision')) == {"gpt-117M b64"}
    assert SuitePart().keys(load_suite("quick"), Plan([], 0), machine(), real_params_of) is None


def test_a_repeat_is_chosen_by_its_number_and_a_program_s_parameter_may_be_any_text() -> None:
    """`repeat` is in records and tables. `mine` is no data set of a workload, and a parameter of a program."""
    program = """
[[benchmark]]
name = "program"
workload = "command"
params = { argv = ["true", "{lookalike}"], lookalike = ["mine", "small"] }
repeats = 2
"""
    text = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "a"\nworkload = "ap3"\nglobal_batch = 1\nrepeats = 2\n' + program
    file = suite_of(parse_toml(text, "s.toml"))
    whole = expand(file, machine("gpu"), real_params_of)
    part = SuitePart(("program",), ('lookalike == "mine"', "repeat == 1"))
    keys = part.keys(file, whole, machine("gpu"), real_params_of)
    assert [one.point.label for one in whole.points if one.key in (keys or ())] == ["program lookalike=mine #2"]


def test_what_the_published_figure_of_table_4_draws_as_a_line_is_one_benchmark() -> None:
    """Batch 10 on two devices is in both of its benchmarks."""
    points = [one.point for one in expand(load_suite("pearc22"), machine("gpu"), real_params_of).points]
    assert [point.world for point in points if point.benchmark == "table 4 devices"] == [1, 2, 4, 8, 16]
    assert [point.micro_batch for point in points if point.benchmark == "table 4 batches"] == [128, 256, 512]


@pytest.mark.parametrize(
    ("names", "where", "words"),
    [
        (("80M",), (), "--only 80M: no benchmark of suite 'llm'.*did you mean '800M'"),
        ((), ("global_bach < 4",), "unknown name 'global_bach'.*did you mean 'global_batch'"),
        ((), ('params.preset == "800M"',), "found 'params.preset', and names have no dots.*write 'preset'"),
        ((), ('workload == "gpt"',), "unknown name 'workload'.*--only chooses benchmarks"),
        ((), ("mode != inference",), "unknown name 'inference'.*text stands in quotes"),
        ((), ('mode != "infer"',), "mode is never 'infer'.*did you mean 'inference'"),
        ((), ('"fp17" == precision',), "precision is never 'fp17'.*did you mean 'fp16'"),
        ((), ('compile in ["off", "on"]',), "compile is never 'on'.*it is one of default, max-"),
        ((), ('attention not in ["flush"]',), "attention is never 'flush'.*did you mean 'flash'"),
        ((), ("devices = 1",), "'devices = 1' cannot be read: .*comparisons \\(==, "),
        (("800M",), ("global_batch == 7",), "no point of suite llm is meant by --only 800M --where 'global_batch == 7'"),
    ],
)
def test_a_part_that_there_is_not_gets_the_nearest_name(names: tuple[str, ...], where: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as caught:
        chosen("llm", *names, where=where)
    assert re.search(words, f"{caught.value} {caught.value.hint}", re.DOTALL)


def test_words_of_a_name_that_are_misspelt_get_as_many() -> None:
    with pytest.raises(InputError) as caught:
        chosen("pearc22", "tabel 4 device")
    assert caught.value.hint == "did you mean 'table 4 devices'?"
    with pytest.raises(InputError) as caught:
        chosen("pearc22", "tabel 4")
    assert caught.value.hint == "did you mean 'table 4'?"


def test_impossible_points_are_kept_with_their_reason() -> None:
    found = plan(HEAD + "global_batch = [6, 8]\ndevices = [2, 8]\nmicro_batch = 4\n").points
    reasons = {(p.point.global_batch, p.point.devices): p.skip for p in found}
    assert reasons[(8, 2)] is None
    assert reasons[(6, 2)] == "global batch 6 is not divisible by micro-batch x devices = 4 x 2 = 8"
    assert reasons[(8, 8)] == "needs 8 devices per node, local has 4"
    assert plan(HEAD + 'global_batch = 8\nprecision = "tf32"\n').points[0].skip == "tf32 is an arithmetic of GPUs"


def test_repeats_are_points_of_their_own_and_twins_are_one() -> None:
    found = plan(HEAD + "global_batch = [8, 8]\nrepeats = 3\n").points
    assert [p.point.repeat for p in found] == [0, 1, 2]
    assert len({p.point.key for p in found}) == 3


def test_all_devices_and_default_micro_batch() -> None:
    point = plan(HEAD + 'global_batch = 16\ndevices = "all"\n').points[0].point
    assert (point.devices, point.micro_batch, point.accumulation) == (4, 4, 1)
    accumulated = plan(HEAD + "global_batch = 16\nmicro_batch = 2\ndevices = 2\n").points[0].point
    assert accumulated.accumulation == 4


def test_every_fault_is_reported_with_its_line() -> None:
    text = (
        '[[benchmark]]\nname = "a"\nworkload = "nett"\nglobal_batch = 8\n'
        '[[benchmark]]\nname = "b"\nworkload = "net"\n'
        '[[benchmark]]\nname = "c"\nworkload = "net"\nglobal_batch = 8\nparams = { widht = 3, kind = "z" }\n'
        '[[benchmark]]\nname = "d"\nworkload = "net"\nglobal_batch = []\nwhere = ["devices ** 2 > 1"]\n'
    )
    with pytest.raises(InputError) as caught:
        plan(text)
    message = str(caught.value)
    for expected in (
        's.toml:5: benchmark[0].workload: found "nett"',
        "did you mean 'net'?",
        "s.toml:7: benchmark[1].global_batch: found nothing",
        "s.toml:14: benchmark[2].params.widht: found 3",
        "(did you mean 'width'?)",
        "s.toml:14: benchmark[2].params.kind: found \"z\", expected 'a' or 'b'",
        "s.toml:18: benchmark[3].global_batch: found []",
        "s.toml:19: benchmark[3].where[0]",
    ):
        assert expected in message, f"{expected!r} not in:\n{message}"


def test_a_key_of_a_table_within_params_is_one_of_its_own() -> None:
    text = '[[benchmark]]\nname = "a"\nworkload = "command"\nparams = { argv = ["x"], metrics.m = { key = "k", unti = "s", unit = "s" } }\n'
    document = parse_toml('name = "s"\ntitle = "S"\n' + text, "s.toml")
    with pytest.raises(InputError, match=r"metrics\.m\.unti: found .*, expected one of the keys unit, better, .*did you mean 'unit'"):
        expand(SuiteFile(document.validate(Suite), document), machine(), real_params_of)


def test_structural_faults_come_all_at_once() -> None:
    text = '[[benchmark]]\nname = "a"\nworkload = "net"\nglobal_batch = "8"\nprecison = "bf16"\ncompile = "of"\n'
    with pytest.raises(InputError) as caught:
        plan(text)
    message = str(caught.value)
    assert "s.toml:6: benchmark[0].global_batch" in message
    assert "did you mean 'precision'?" in message and "did you mean 'off'?" in message


def test_zip_needs_equal_lengths() -> None:
    with pytest.raises(InputError, match="lists of one length"):
        plan(HEAD + 'sweep = "zip"\nglobal_batch = [8, 16]\ndevices = [1, 2, 4]\n')


def test_a_late_bad_name_in_where_is_a_fault() -> None:
    with pytest.raises(InputError, match="did you mean 'devices'"):
        plan(HEAD + 'global_batch = 8\nwhere = ["device > 1"]\n')


@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
@pytest.mark.parametrize("name", catalog_suites())
def test_catalogue_suites_expand_on_every_kind_of_machine(name: str, device_class: DeviceClass) -> None:
    points = expand(load_suite(name), machine(device_class), real_params_of).points
    assert points and any(planned.skip is None for planned in points)


def test_llm_and_vision_sweep_as_caraml_does() -> None:
    for name, per_benchmark in (("llm", 2), ("vision", 1)):
        points = [
            one.point for one in expand(load_suite(name), machine("gpu"), real_params_of).points if "micro" not in one.point.benchmark
        ]
        assert sorted({point.global_batch for point in points}) == [2**k for k in range(4, 13)]
        assert len(points) == 9 * per_benchmark


def test_llm_has_micro_batches_that_fill_a_gpu_on_gpus_only() -> None:
    """Beside CARAML's own of 4, and not meant by the words that ask for those."""
    for device_class, wanted in (("gpu", {("gpt-117M_micro32", 32), ("gpt-800M_micro16", 16)}), ("cpu", set())):
        points = [one.point for one in expand(load_suite("llm"), machine(device_class), real_params_of).points]
        found = {(one.benchmark, one.micro_batch) for one in points if one.micro_batch != 4}
        assert found == wanted and all(one.micro_batch * one.world <= one.global_batch for one in points if one.micro_batch != 4)


def test_labels_tell_points_apart() -> None:
    point: Point = plan(HEAD + "global_batch = 8\n").points[0].point
    assert point.label == "n b8 fp32"
    changed = point.model_copy(update={"devices": 2, "compile": "default", "mode": "compute", "repeat": 1})
    assert changed.label == "n b8 1x2 fp32 compiled compute #2"
    program = {"workload": "command", "params": {"argv": ["mpirun"], "limit": 3}}
    assert changed.model_copy(update=program).label == "n limit=3 b8 1x2 #2", "programs on other devices have other names"


def test_swept_parameters_are_part_of_the_label_and_not_of_the_key() -> None:
    swept = plan(HEAD + 'global_batch = 8\nparams = { width = [1, 2], kind = ["a", "b"] }\nsweep = "zip"\n').points
    assert [one.point.label for one in swept] == ["n width=1 a b8 fp32", "n width=2 b b8 fp32"]
    (alone,) = plan(HEAD + 'global_batch = 8\nparams = { width = 1, kind = "a" }\n').points
    assert alone.point.label == "n b8 fp32" and alone.point.key == swept[0].point.key


def test_how_long_is_trained_is_part_of_the_label_where_it_was_set_by_hand() -> None:
    file = suite_of(parse_toml('name = "s"\ntitle = "s"\n' + HEAD + "global_batch = 8\nmeasure = { epochs = 2 }\n", "s.toml"))

    def labels(*settings: str) -> list[str]:
        return [one.point.label for one in expand(with_settings(file, settings, params_of), machine("cpu"), params_of).points]

    assert labels() == labels("measure.epochs=2") == labels("measure.max_seconds=90") == ["n b8 fp32"]
    assert labels("measure.epochs=4", "measure.until_loss=0.5") == ["n epochs=4 until_loss=0.5 b8 fp32"]


def test_what_is_set_for_chosen_epochs_leaves_windows_as_they_are() -> None:
    second = "[[benchmark]]" + (HEAD + "global_batch = 8\n").split("[[benchmark]]")[1].replace('"n"', '"w"')
    text = 'name = "s"\ntitle = "s"\n' + HEAD + "global_batch = 8\nmeasure = { epochs = 3 }\n" + second
    file = with_settings(suite_of(parse_toml(text, "s.toml")), ["measure.count_epoch=2"], params_of, {"n"})
    found = {one.point.label for one in expand(file, machine("cpu"), params_of, chosen={"n"}).points}
    assert "n count_epoch=2 b8 fp32" in found


def test_labels_have_what_alone_tells_swept_points_apart() -> None:
    """Equal labels of two points would stand for both in tables and figures."""

    def labels(text: str) -> list[str]:
        return [one.point.label for one in plan(HEAD + text).points]

    assert labels("global_batch = 8\nmicro_batch = [2, 4]\n") == ["n micro_batch=2 b8 fp32", "n micro_batch=4 b8 fp32"]
    assert labels("global_batch = 8\nseed = [1, 2]\nrepeats = 2\n")[1:3] == ["n seed=2 b8 fp32", "n seed=1 b8 fp32 #2"]
    assert labels("accumulation = 1\nmicro_batch = [2, 4]\n") == ["n b2 fp32", "n b4 fp32"], "the batch tells them apart"
    crossed = labels("accumulation = [1, 2]\nmicro_batch = [2, 4]\n")
    assert crossed == ["n b2 fp32", "n micro_batch=4 b4 fp32", "n micro_batch=2 b4 fp32", "n b8 fp32"]
    program = HEAD.replace("net", "command") + 'seed = [1, 2]\nparams = { argv = ["x", "{seed}", "{limit}"], limit = [3, 4] }\n'
    points = expand(suite_of(parse_toml(f'name = "s"\ntitle = "S"\n{program}', "s.toml")), machine(), real_params_of).points
    assert {one.point.label for one in points} == {f"n limit={limit} seed={seed}" for limit in (3, 4) for seed in (1, 2)}


def test_every_point_is_measured_once_before_any_a_second_time() -> None:
    """What changes while a campaign runs is then between the repeats of a point, and not between the points that are compared."""
    other = HEAD.replace('"n"', '"o"')
    points = plan(f"{HEAD}global_batch = [4, 8]\nrepeats = 2\n\n{other}global_batch = 16\nrepeats = 3\n").points
    found = [(one.point.benchmark, one.point.global_batch, one.point.repeat) for one in points]
    once = [("n", 4), ("n", 8), ("o", 16)]
    assert found == [*((*one, 0) for one in once), *((*one, 1) for one in once), ("o", 16, 2)]


def test_work_that_two_benchmarks_ask_for_is_part_of_both() -> None:
    """Table 4 of PEARC '22 has two devices with a batch of 10 in its batches and in its devices; EPICURE's curves meet in a point."""
    text = HEAD + 'global_batch = [4, 8]\n[[benchmark]]\nname = "other"\nworkload = "net"\nglobal_batch = [8, 16]\n'
    file, whole, there = suite_of(parse_toml('name = "s"\ntitle = "S"\n' + text, "s.toml")), plan(text), machine()
    batches = {one.key: one.point.global_batch for one in whole.points}
    for name, wanted in (("n", [4, 8]), ("other", [8, 16])):
        keys = SuitePart((name,)).keys(file, whole, there, params_of)
        assert keys is not None and sorted(batches[key] for key in keys) == wanted
    renamed = with_settings(load_suite("llm"), ["global_batch=16", "params.preset=800M"], real_params_of)
    points = expand(renamed, machine("gpu"), real_params_of)
    assert SuitePart(("117M",)).keys(renamed, points, machine("gpu"), real_params_of) == {points.points[0].key}, (
        "though it is called gpt-800M now"
    )


def test_what_is_set_by_hand_need_not_fit_the_benchmarks_that_are_not_chosen() -> None:
    """EPICURE's 175B is given by its devices, which `nodes` contradicts; it is no fault where only 857M is to be run."""
    file = with_settings(load_suite("llm-weak"), ["nodes=[1,2]"], real_params_of)
    with pytest.raises(InputError, match="world or nodes, not both"):
        expand(file, machine("gpu"), real_params_of)
    names = SuitePart(("857M",)).benchmarks(file)
    found = expand(file, machine("gpu"), real_params_of, chosen=names)
    assert names == {"gpt-857M weak"} and [one.point.nodes for one in found.points] == [1, 2]
    with pytest.raises(InputError, match="world or nodes, not both"):
        expand(file, machine("gpu"), real_params_of, chosen=SuitePart(("175B",)).benchmarks(file))
    assert SuitePart(where=("nodes == 1",)).benchmarks(file) is None
    wrong = suite_of(
        parse_toml('name = "s"\ntitle = "S"\n' + HEAD + "global_batch = []\n" + HEAD.replace('"n"', '"m"') + "global_batch = 1\n", "s.toml")
    )
    with pytest.raises(InputError, match="at least one value"):
        expand(wrong, machine(), params_of, chosen={"m"})


TWO = HEAD + "global_batch = 1\n" + HEAD.replace('"n"', '"m"')


def set_for(name: str, text: str, *settings: str) -> Plan:
    """The plan of benchmarks with settings of which one is chosen by name."""
    options = Options(settings=settings, part=SuitePart((name,)))
    file = suite_of(parse_toml('name = "s"\ntitle = "S"\n' + text, "s.toml"))
    chosen = options.chosen(file)
    try:
        return expand(with_settings(file, settings, params_of, chosen), machine(), params_of, chosen=chosen)
    except FaultsError as error:
        refuse_with_all_faults(error, machine(), params_of, options)


def test_a_fault_of_the_file_is_told_whatever_is_chosen_unless_something_is_set() -> None:
    """What is set need not fit the others: whose fault it is then would take another look at all of them."""
    expected = r"^s\.toml:10: benchmark\[1\]\.global_batch: found \[\], expected at least one value to sweep$"
    with pytest.raises(InputError, match=expected):
        set_for("n", TWO + "global_batch = []\n")
    assert [one.point.benchmark for one in set_for("n", TWO + "global_batch = []\n", "seed=1").points] == ["n"]
    assert len(set_for("n", TWO + "global_batch = 1\nworld = 1\n", "nodes=1").points) == 1


def test_what_is_set_by_hand_may_break_the_form_of_benchmarks_that_are_not_chosen() -> None:
    text = TWO + "global_batch = 2\nmeasure = { min_seconds = 10 }\n"
    found = set_for("n", text, "measure.max_seconds=6")
    assert [(one.point.benchmark, one.point.measure.max_seconds) for one in found.points] == [("n", 6.0)]
    fault = r"^s\.toml with --set measure\.max_seconds=6:11: benchmark\[1\]\.measure: .*max_seconds of at least min_seconds \(10\), not 6"
    with pytest.raises(InputError, match=fault):
        set_for("m", text, "measure.max_seconds=6")
    with pytest.raises(InputError, match=r"benchmark\[0\]\.measure: .*min_seconds \(5\), not 3$"):
        set_for("n", text + "world = 1\n", "measure.max_seconds=3", "nodes=1")
    file = suite_of(parse_toml('name = "s"\ntitle = "S"\n' + text, "s.toml"))
    with pytest.raises(InputError, match=fault):
        expand(with_settings(file, ["measure.max_seconds=6"], params_of, {"n"}), machine(), params_of)


def test_windows_that_fit_alone_and_not_together_are_a_fault(tmp_path: Path) -> None:
    """Of the benchmark and of its words for one kind of machine."""
    text = TWO + "global_batch = 1\nmeasure = { max_seconds = 60 }\non.cpu.measure = { max_seconds = 20 }\n"
    assert [one.point.measure.min_seconds for one in set_for("n", text, "measure.min_seconds=30", "measure.max_seconds=60").points] == [
        30.0
    ]
    with pytest.raises(InputError, match=r"benchmark\[1\]\.on\.cpu\.measure: .*max_seconds of at least min_seconds \(30\), not 20"):
        set_for("m", text, "measure.min_seconds=30")


def test_a_setting_that_no_chosen_benchmark_has_is_refused() -> None:
    quick = load_suite("quick")
    assert with_settings(quick, ["params.sequence_length=64"], real_params_of, {"gpt"}).changed[0] == {"params.sequence_length"}
    words = r"no benchmark of suite 'quick' that is chosen \(resnet50\) has the key 'params\.sequence_length'"
    with pytest.raises(InputError, match=words):
        with_settings(quick, ["params.sequence_length=64"], real_params_of, {"resnet50"})
    assert with_settings(quick, ["params.sequence_length=64"], real_params_of, frozenset()).settings, "what is tried again may be any"


def test_combinations_that_where_leaves_out_are_counted_of_the_chosen_benchmarks() -> None:
    text = TWO.replace("global_batch = 1", "global_batch = [1, 2]\nwhere = ['global_batch < 2']") + "global_batch = [1, 2, 3]\n"
    text += "where = ['global_batch < 2']\n"
    assert [set_for(name, text).left_out for name in ("n", "m")] == [1, 2]


def test_points_are_counted_of_all_benchmarks_and_every_fault_is_told_beside_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of benchmarks behind the first that has too many, and of one with too many by itself."""
    monkeypatch.setattr("caraml.suite.expand.POINTS", 5)
    sizes = {"n": [1, 2, 3, 4], "m": [1, 2, 3], "o": [1, 2, 3, 4, 5]}
    heads = (HEAD.replace('"n"', f'"{name}"') + f"global_batch = {sizes[name]}\n" for name in sizes)
    text = "".join(f"{head}seed = {seed}\n" for seed, head in enumerate(heads))
    for planned in (lambda: plan(text), lambda: set_for("n", text)):
        with pytest.raises(InputError, match=r"s\.toml:8: benchmark\[1\]: found 7, expected at most 5 points in a suite"):
            planned()
    monkeypatch.setattr("caraml.suite.expand.POINTS", 12)
    assert Counter(one.point.benchmark for one in set_for("n", text).points) == {"n": 4, "m": 3, "o": 5}
    monkeypatch.setattr("caraml.suite.expand.POINTS", 5)
    wrong = 'global_batch = [1, 2, 3]\nparams = { kind = ["a", "b", "c"] }\nrepeats = 10\n'
    tables = (("n", "global_batch = 1\n"), ("m", "global_batch = [1, 2, 3, 4, 5]\n"), ("o", wrong), ("p", "global_batch = []\n"))
    text = "".join(HEAD.replace('"n"', f'"{name}"') + values for name, values in tables)
    faults = [r"benchmark\[2\]\.params\.kind: found \"c\"", r"benchmark\[2\]\.sweep: found 90", r"benchmark\[3\]\.global_batch: found \[\]"]
    with pytest.raises(InputError, match=r"(?s)^4 faults .*benchmark\[1\]: found 6, expected at most 5 points in a suite") as error:
        plan(text)
    assert all(re.search(fault, str(error.value)) for fault in faults), error.value


def told(text: str, head: str = 'name = "s"\ntitl = "S"\n') -> list[str]:
    """The faults of benchmarks, those of their form and those of their values, each from its line on."""
    document = parse_toml(head + text, "s.toml")
    with pytest.raises(FaultsError) as form:
        suite_of(document)
    with pytest.raises(FaultsError) as error:
        refuse_with_all_faults(form.value, machine(), params_of, Options())
    return [fault.removeprefix("s.toml:") for fault in error.value.faults]


def test_what_is_wrong_is_told_once_and_where_it_stands() -> None:
    assert told(HEAD + 'global_batch = 1\nwidth = 3\nprecision = ["fp64"]\n') == [
        """2: titl: found "S", expected one of the keys name, title, description, include, benchmark (did you mean 'title'?)""",
        "7: benchmark[0].width: found 3, expected it below params: params = { width = ... }",
        """8: benchmark[0].precision[0]: found "fp64", expected 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8' (did you mean 'fp16'?)""",
    ]


def test_a_missing_key_and_wrong_variables_hide_no_other_fault() -> None:
    """A suite without a title was told of that alone, and of variables one at a time."""
    table = HEAD.replace('name = "n"\n', "") + "global_batch = 1\nparams = { widht = 3 }\n"
    faults = told(table, "")
    assert [fault.partition(", expected")[0] for fault in faults] == [
        "1: name: found nothing",
        "1: title: found nothing",
        "1: benchmark[0].name: found nothing",
        "4: benchmark[0].params.widht: found 3",
    ]
    table = HEAD + 'global_batch = 1\nparams = { env = { A = 1, B = "{", C = "c" } }\nnodes = "x"\n'
    assert [re.sub(", expected.*", "", fault) for fault in told(table, 'name = "s"\n')] == [
        "1: title: found nothing",
        '6: benchmark[0].params.env.A: found "int"',
        '6: benchmark[0].params.env.B: found "a brace"',
        '7: benchmark[0].nodes: found "x"',
    ]


def test_faults_of_one_line_are_told_in_the_same_order_every_time() -> None:
    faults = told(HEAD + "global_batch = 1\nprecision = [" + ", ".join(f'"x{number}"' for number in range(6)) + "]\n")
    assert [fault.partition("[0].precision[")[2][:1] for fault in faults[1:]] == [*"012345"]


def test_every_fault_of_values_is_told_beside_those_of_the_sweep() -> None:
    """Lists without values, types of parameters, keys that are swept and unknown, conditions by their number."""
    text = HEAD + 'global_batch = []\nnodes = []\nwhere = ["=", "batchsize > 2", "width > 1 / 0"]\n'
    text += 'params = { width = ["64", true, 64.0, 64], kid = [1, 2] }\n'
    text += HEAD + "accumulation = 1_000_000_000_000_000\nmicro_batch = 2\n"
    with pytest.raises(FaultsError) as error:
        plan(text)
    keys = [re.sub(r"^s\.toml:\d+: benchmark\[(\d)\]\.(.*?): found (.*?), expected.*", r"\1 \2 \3", fault) for fault in error.value.faults]
    widths = [f"0 params.width {value}" for value in ('"64"', "true", "64.0")]
    assert keys == [
        '0 where[0] "="',
        '0 where[1] "batchsize > 2"',
        "0 nodes []",
        "0 global_batch []",
        widths[0],
        "0 params.kid [1, 2]",
        *widths[1:],
        "1 accumulation 1000000000000000",
    ]
    assert "did you mean 'global_batch'?" in str(error.value)
    with pytest.raises(InputError, match=r"where\[1\]: found \"width > 1 / 0\", expected a condition"):
        plan(HEAD + 'global_batch = 1\nwhere = ["width > 1", "width > 1 / 0"]\n')
    with pytest.raises(InputError, match=r"where\[0\]: found \"mode != 'infer'\", .*mode is never 'infer'; did you mean 'inference'"):
        plan(HEAD + "global_batch = 1\nwhere = [\"mode != 'infer'\"]\n")


def test_of_too_many_points_only_the_values_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.suite.expand.POINTS", 72)
    made: list[int] = []
    monkeypatch.setattr("caraml.suite.expand.why_skipped", lambda point, *_: made.append(point.global_batch))
    with pytest.raises(InputError, match="at most 72 points in a suite"):
        plan(TWO + f"global_batch = {list(range(1, 9))}\nseed = {list(range(9))}\n")
    assert len(made) == 1 + 9, "of the other one, no combination more than its longest list has values"


def test_what_is_set_is_counted_and_not_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.suite.expand.POINTS", 5)
    text = "".join(HEAD.replace('"n"', f'"{name}"') + f"global_batch = [1, 2, 3]\nseed = {seed}\n" for seed, name in enumerate("nmo"))
    assert [one.point.benchmark for one in set_for("n", text, "global_batch=1").points] == ["n", "m", "o"]


def test_what_a_chosen_benchmark_needs_is_chosen_too() -> None:
    text = HEAD + "global_batch = 1\n"
    for name, needs in (("b", "n"), ("c", "b"), ("d", "")):
        text += HEAD.replace('"n"', f'"{name}"') + "global_batch = 2\n" + (f'needs = "{needs}"\n' if needs else "")
    file = suite_of(parse_toml('name = "s"\ntitle = "S"\n' + text, "s.toml"))
    assert SuitePart(("c",)).benchmarks(file) == {"c", "b", "n"}


def test_a_condition_may_name_a_parameter_that_a_point_leaves_out_while_it_has_its_default() -> None:
    """Points have `order` only where it is not ours, so that earlier ones keep their keys."""
    assert chosen("llm", "800M", where=("order == 'caraml'", "global_batch == 16")) == {"gpt-800M b16"}
    with pytest.raises(InputError, match="no point of suite llm is meant by"):
        chosen("llm", "800M", where=("order == 'megatron'",))


def test_a_suite_without_benchmarks_is_told_so() -> None:
    with pytest.raises(FaultsError) as caught:
        suite_of(parse_toml('name = "s"\ntitle = "S"\n', "s.toml"))
    with pytest.raises(FaultsError, match=r"^s.toml:1: benchmark: found nothing, expected a value: this key is required$"):
        refuse_with_all_faults(caught.value, machine(), params_of, Options())


def test_a_benchmark_that_set_makes_into_another_s_work_leaves_it_that_name() -> None:
    def labels(*settings: str) -> list[str]:
        file = with_settings(load_suite("llm"), ["global_batch=16", *settings], real_params_of)
        return [one.point.label for one in expand(file, machine("gpu"), real_params_of).points]

    assert labels("params.preset=800M") == ["gpt-800M b16 1x4 bf16 compiled"]
    assert labels("params.preset=117M", "params.learning_rate=1e-3") == ["gpt-117M learning_rate=0.001 b16 1x4 bf16 compiled"]
    assert labels("params.preset=30M") == ["gpt-117M preset=30M b16 1x4 bf16 compiled"], "what none is called says what it is"
    swept = labels('params.preset=["117M", "800M"]')
    assert [label.split(" b16")[0] for label in swept] == ["gpt-117M preset=117M", "gpt-117M preset=800M"]


@pytest.mark.parametrize("key", ["measure.max_seconds", "params.learning_rate"])
def test_values_without_end_are_refused(key: str) -> None:
    """No file of a point can hold them: a worker could not read its own."""
    text = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 8\n{key} = inf\n'
    with pytest.raises(InputError, match=rf"^s\.toml:7: benchmark\[0\]\.{key}: found inf, expected a finite number$"):
        expand(suite_of(parse_toml(text, "s.toml")), machine(), real_params_of)


def test_conditions_may_name_the_seed_unless_a_parameter_is_called_so() -> None:
    text = HEAD + "global_batch = 1\nseed = [1, 2, 3]\nwhere = ['seed > 1 and not deterministic']\n"
    assert [one.point.seed for one in plan(text).points] == [2, 3]
    own = '[[benchmark]]\nname = "n"\nworkload = "command"\nparams = { argv = ["{seed}"], seed = [1, 5] }\nwhere = ["seed > 1"]\n'
    file = suite_of(parse_toml('name = "s"\ntitle = "S"\n' + own, "s.toml"))
    assert [one.point.params["seed"] for one in expand(file, machine(), real_params_of).points] == [5]


def test_measure_refuses_a_window_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least min_seconds"):
        Policy(min_seconds=10, max_seconds=5)


def test_a_suite_s_file_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    with pytest.raises(InputError, match=r"unknown suite 'mine'.*(?s:.)*a file is named whole: mine\.toml"):
        load_suite("mine")
    for folder in (".", str(tmp_path)):
        with pytest.raises(InputError, match=rf"^{folder}: found a folder, expected a suite: .*\n.*a file in it: .*mine\.toml$"):
            load_suite(folder)
    with pytest.raises(InputError, match=r"^unknown suite ''; known: [\w, -]*$"):
        load_suite("")


def test_a_wrong_batch_is_not_called_missing_and_hides_no_other_fault() -> None:
    def told(batch: str) -> str:
        text = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "b"\nworkload = "gpt"\n{batch}params = {{ preset = "4m" }}\n'
        document = parse_toml(text, "s.toml")
        with pytest.raises(InputError) as refused:
            try:
                file = SuiteFile(document.validate(Suite), document)
            except FaultsError as error:
                refuse_with_all_faults(error, machine(), real_params_of, Options())
            expand(file, machine(), real_params_of)
        return str(refused.value)

    assert told("globl_batch = 8\n").count("global_batch: found nothing") == 0, "the misspelt key is told, with this one as the suggestion"
    listed = told("global_batch = [4, -8]\n")
    assert "global_batch[1]: found -8" in listed and "found [4, -8]" not in listed
    missing = told("")
    assert "global_batch: found nothing" in missing and "params.preset" in missing
    wrong = told('global_batch = [4, "x"]\n')
    assert 'global_batch[1]: found "x"' in wrong and "found nothing" not in wrong and "params.preset" in wrong


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("precision=bf61", "found \"bf61\", expected 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8' or an array (did you mean 'bf16'?)"),
        ("micro_batch=-3", "found -3, expected greater than or equal to 1 or an array"),
        ("global_batch={a=1}", "found a table with a, expected an integer or an array"),
        ("params.preset={a=1}", f"found a table with a, expected {', '.join(map(repr, [*PRESETS][:-1]))} or {[*PRESETS][-1]!r}"),
        ("params.data=textt", "found \"textt\", expected 'text', 'synthetic' or 'synthetic-device' (did you mean 'text'?)"),
    ],
)
def test_a_wrong_setting_is_told_once_with_the_benchmarks_that_it_concerns(setting: str, words: str) -> None:
    """Also where it replaced what overrides of a kind of device say."""
    machine = Machine("m", "d", "cpu", "s", nodes=1, devices_per_node=1)
    with pytest.raises(InputError) as caught:
        expand(with_settings(load_suite("llm"), [setting], real_params_of), machine, real_params_of)
    names = ", ".join(load_suite("llm").names)
    assert str(caught.value.args[0]) == f"--set {setting}: {words}; concerns {names}"


def test_a_fault_of_the_file_beside_that_of_a_setting_has_its_line() -> None:
    text = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 8\n'
    document = parse_toml(text + "seed = 3\n", "s.toml")
    file = with_settings(SuiteFile(document.validate(Suite), document), ["seed=4"], real_params_of)
    assert file.document.fault(("benchmark", 0, "seed"), "x", "y") == '--set seed=4: found "x", expected y; concerns n'
    assert file.document.fault(("benchmark", 0, "global_batch"), "x", "y").startswith(
        "s.toml with --set seed=4:6: benchmark[0].global_batch"
    )


@pytest.mark.parametrize("value", ["1e300", "-1e300", "1e-300"])
@pytest.mark.parametrize("key", ["params.s", "measure.timeout_seconds"])
def test_a_number_that_no_record_could_hold_is_refused_before_anything_runs(key: str, value: str) -> None:
    """CARAML ran the points, and then refused to read every result of the folder."""
    text = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "command"\nparams.argv = ["sleep", "{s}"]\nparams.s = 1\n'
    words = f"found {float(value)}, expected 0 or a size between 1e-100 and 1e+100"
    with pytest.raises(InputError, match=rf"^s\.toml:8: benchmark\[0\]\.{re.escape(key)}: {re.escape(words)}$"):
        suite_of(parse_toml((text if key != "params.s" else text.replace("params.s = 1", "")) + f"{key} = {value}\n", "s.toml"))
    with pytest.raises(InputError, match=rf"^--set {re.escape(f'{key}={value}')}: {re.escape(words)}; concerns n$"):
        with_settings(suite_of(parse_toml(text, "s.toml")), [f"{key}={value}"], real_params_of)


def test_a_policy_says_no_time_that_clocks_do_not_have() -> None:
    with pytest.raises(InputError, match=r"timeout_seconds: found 1e\+99, expected less than or equal to 1000000000$"):
        plan(HEAD + "global_batch = 1\nmeasure.timeout_seconds = 1e99\n")


def test_a_setting_of_several_lines_sets_one_key() -> None:
    file = load_suite("quick")
    with pytest.raises(InputError, match=r"found 2 keys, expected one key=value\n  next step: an option --set for each$"):
        with_settings(file, ["global_batch=8\nseed=3"], real_params_of)
    assert with_settings(file, ["global_batch=[8,\n16]"], real_params_of).suite.benchmark[0].global_batch == [8, 16]


def test_a_wrong_parameter_of_a_program_is_one_fault_with_the_key_that_was_meant() -> None:
    program = '[[benchmark]]\nname = "n"\nworkload = "command"\n'
    text = f'name = "s"\ntitle = "S"\n{program}params = {{ argv = ["sleep", 1], METRICS = {{ x = {{ key = "a", unit = "1" }} }} }}\n'
    with pytest.raises(InputError) as caught:
        expand(suite_of(parse_toml(text, "s.toml")), machine(), real_params_of)
    assert str(caught.value).split("\n  ")[1:] == [
        "s.toml:6: benchmark[0].params.argv[1]: found 1, expected a string in quotes",
        "s.toml:6: benchmark[0].params.METRICS: found a table with x, expected true or false or an integer or a number or a string in "
        "quotes (did you mean 'metrics'?)",
    ]


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("precision == 'bf61'", "precision is never 'bf61'; did you mean 'bf16'"),
        ("world == '1'", "world is never '1'; numbers, True and False stand without quotes"),
        ("sp != 'true'", "sp is never 'true'; numbers, True and False stand without quotes"),
        ("sp == true", "unknown name 'true'; write True"),
        ("world >= 1 or nosuch", "unknown name 'nosuch'"),
    ],
)
def test_a_condition_on_a_program_that_never_holds_is_refused(condition: str, words: str) -> None:
    """It left points out, or kept them all, and nobody heard why."""
    text = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "command"\nparams = { argv = ["{s}"], s = ["a", "b"] }\n'
    file = suite_of(parse_toml(f'{text}where = ["{condition}"]\n', "s.toml"))
    with pytest.raises(InputError, match=re.escape(words)):
        expand(file, machine(), real_params_of)
    file = suite_of(parse_toml(f"{text}where = [\"s == 'a'\"]\n", "s.toml"))
    found = expand(file, machine(), real_params_of)
    assert [one.point.params["s"] for one in found.points] == ["a"]
    with pytest.raises(InputError, match=re.escape(words.partition("; ")[0])):
        SuitePart((), (condition,)).keys(file, found, machine(), real_params_of)
