"""JUBE scripts of CARAML's two benchmarks as suites: the same points, and by name what is not in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from caraml.base.errors import InputError, UnknownNameError
from caraml.base.toml import read_toml
from caraml.suite.expression import Formula
from caraml.suite.jube import suite_from_script
from caraml.suite.load import suite_of

LANGUAGE = """\
name: tiny-llm
parameterset:
  - name: machine
    parameter:
      - {name: system_name, tag: "A100", _: "A100"}
      - {name: system_name, tag: "JEDI", _: "JEDI"}
  - name: model
    parameter:
      - {name: size, tag: "800M", _: "800M"}
      - {name: size, tag: "13B", _: "13B"}
      - {name: row, mode: python, _: "{'800M': '0', '13B': '1'}['$size']"}
      - {name: nhidden, mode: python, _: "[2048,5120][$row]"}
      - {name: nlayers, mode: python, _: "[16,40][$row]"}
      - {name: nheads, mode: python, _: "[8,32][$row]"}
      - {name: tp_size, mode: python, _: "[1,2][$row]"}
      - {name: pp_size, mode: python, _: "[1,2][$row]"}
      - {name: copies, mode: python, _: "int($nodes*$gpus_per_node/($tp_size*$pp_size))"}
      - {name: micro_batch_size, mode: python, _: "[4,2][$row]"}
      - {name: global_batch_size, tag: "800M+!quick", _: "64,128,256"}
      - {name: global_batch_size, tag: "800M+quick", _: "64"}
      - {name: global_batch_size, tag: "!800M", mode: python, _: "$copies * $micro_batch_size * 64"}
      - {name: sequence_length, type: int, _: 2048}
      - {name: dataset, _: OSCAR}
      - {name: version, mode: shell, _: "rm -rf $$HOME"}
      - {name: more, tag: "13B", mode: text, _: --bf16}
      - name: arguments
        _: >
          --num-layers $nlayers
          --lr 1e-4 --clip-grad 1.0
          --sequence-parallel
          --recompute-granularity selective
          --position-embedding-type rope
          --lr-decay-style cosine
          $more
  - name: job
    init_with: platform.xml
    parameter:
      - {name: queue, _: dc-gpu}
      - {name: nodes, tag: "800M", _: 1}
      - {name: nodes, tag: "13B", _: 44}
      - {name: gpus_per_node, _: 4}
step:
  - name: setup
    use: machine
    do: bash setup.sh
  - name: train
    depend: setup
    iterations: 2
    use: [machine, model, job, {from: platform.xml, _: jobfiles}]
    do: {done_file: ready, _: $submit job}
result:
  use: analyse
"""

IMAGES = """\
<?xml version="1.0"?>
<jube><benchmark name="Tiny Images" outpath="run">
  <parameterset name="job">
    <parameter name="system_name" tag="A100">A100</parameter>
    <parameter name="system_name" tag="MI250">MI250</parameter>
    <parameter name="nodes" separator=";" mode="python">{ "A100": "1;2", <!-- two of them --> "MI250": "1" }["${system_name}"]</parameter>
    <parameter name="taskspernode" separator=";" mode="python">{"A100": "1;2;3", "MI250": "8"}["${system_name}"]</parameter>
  </parameterset>
  <parameterset name="model">
    <parameter name="model">resnet50</parameter>
    <parameter name="dataset" tag="!real">Synthetic(Host)</parameter>
    <parameter name="dataset" tag="real">ImageNet</parameter>
    <parameter name="total" mode="python">${nodes}*${taskspernode}</parameter>
    <parameter name="global_batch_size" separator=";">16;64</parameter>
    <parameter name="batch_size_per_device" mode="python">int(${global_batch_size}/${total})</parameter>
    <parameter name="precision" separator=";" tag="precision">fp32;bf16;int4</parameter>
    <parameter name="args_exec" separator="!" tag="!precision">--use_fp16=True --variable_update horovod</parameter>
    <parameter name="compiler" tag="inductor">inductor</parameter>
    <parameter name="compiler_mode" separator=";" tag="inductor">default;max-autotune</parameter>
  </parameterset>
  <step name="execute"><use>job,model</use><do>$submit</do></step>
</benchmark></jube>
"""


@pytest.fixture
def language(tmp_path: Path) -> Path:
    path = tmp_path / "llm.yaml"
    path.write_text(LANGUAGE)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "images.xml"
    path.write_text(IMAGES)
    return path


def benchmark(text: str, tmp_path: Path) -> dict[str, Any]:
    """The one benchmark of a suite, after the suite was read as any other."""
    path = tmp_path / "suite.toml"
    path.write_text(text)
    assert len(suite_of(read_toml(path)).suite.benchmark) == 1
    found: dict[str, Any] = tomllib.loads(text)["benchmark"][0]
    return found


def test_tags_choose_and_parameters_are_computed(language: Path, tmp_path: Path) -> None:
    small = benchmark(suite_from_script(language, ["800M", "A100"]), tmp_path)
    assert small == {
        "name": "gpt", "workload": "gpt", "repeats": 2, "nodes": 1, "devices": 4, "tp": 1, "pp": 1, "micro_batch": 4,
        "global_batch": [64, 128, 256],
        "params": {
            "width": 2048, "layers": 16, "heads": 8, "sequence_length": 2048, "data": "text", "learning_rate": 1e-4, "clip_norm": 1.0,
            "recompute": "selective", "positions": "rotary",
        },
    }  # fmt: skip
    one = LANGUAGE.replace('_: "64,128,256"', "_: 16")  # four on each of four devices at once, and still four in a larger batch
    language.write_text(one)
    assert benchmark(suite_from_script(language, ["800M", "A100"]), tmp_path)["micro_batch"] == 4
    language.write_text(LANGUAGE)
    line = LANGUAGE.splitlines().index("      - {name: dataset, _: OSCAR}") + 1
    told = suite_from_script(language, ["800M", "A100"])
    assert f"llm.yaml:{line}: the text is not fetched; until params.corpus names it" in told and "tied_head" not in told
    assert "params.tied_head = false where pp > 1" in suite_from_script(language, ["13B", "JEDI"])
    large = benchmark(suite_from_script(language, ["13B", "JEDI"]), tmp_path)
    assert [large[key] for key in ("nodes", "tp", "pp", "sp", "global_batch", "precision")] == [44, 2, 2, True, 44 * 2 * 64, "bf16"]
    assert large["params"]["tied_head"] is False and large["params"]["width"] == 5120
    assert benchmark(suite_from_script(language, ["800M", "quick"]), tmp_path)["global_batch"] == 64


@pytest.mark.parametrize("tag", ["800M,13B", "800M^!13B", "800M+"])
def test_tags_that_cannot_be_read_are_refused_with_their_line(tag: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(LANGUAGE.replace('tag: "800M", _: "800M"', f'tag: "{tag}", _: "800M"'))
    with pytest.raises(InputError, match=r"old.yaml:9: tag = .* cannot be read; expected names with"):
        suite_from_script(tmp_path / "old.yaml", ["800M", "A100"])


@pytest.mark.parametrize(
    "form", ["tags: {{check_tags: '{}'}}", "tags:\n  check_tags: ['{}', '!13B|!quick']", "check_tags: '{}'", "xml", "old xml"]
)
def test_tags_that_a_script_refuses_are_refused_with_what_is_missing(form: str, tmp_path: Path) -> None:
    """`check_tags` of JUBE wherever it reads one: `+` and, `|` or, `!` not."""
    path, asked = tmp_path / "checked.yaml", "(A100 | MI250) + (800M | 13B) + !(A100 + MI250)"
    check = f"<check_tags>{asked}</check_tags>"
    check = check if form == "old xml" else f"<tags>{check}<tag name='13B'>the larger one</tag></tags>"
    words = '<parameterset name="all"><parameter name="x" tag="800M">1</parameter></parameterset>'
    whole = IMAGES.replace("<jube>", f"<jube>{check}{words}") if "xml" in form else f"{form.format(asked)}\n{LANGUAGE}"
    path.write_text(whole.replace("JEDI", "MI250"))
    assert benchmark(suite_from_script(path, ["800M", "A100"]), tmp_path)
    for tags, found in (([], "none"), (["800M"], "800M"), (["A100"], "A100"), (["MI250", "A100", "800M"], "800M A100 MI250")):
        with pytest.raises(InputError) as refused:
            suite_from_script(path, tags)
        text, said = f"check_tags: found the tags {found}; expected {asked}", str(refused.value.args[0])
        assert re.fullmatch(rf"{re.escape(str(path))}:\d+: {re.escape(text)}", said), said
        assert refused.value.hint is not None and refused.value.hint.startswith("its tags, for --tag: 13B, 800M, A100, MI250")
    with pytest.raises(UnknownNameError, match=r"(?s)unknown tag of checked.yaml 'MI25O'.*did you mean 'MI250'"):
        suite_from_script(path, ["800M", "MI25O"])


def test_what_is_not_turned_is_named_with_its_line(language: Path) -> None:
    text = suite_from_script(language, ["800M", "A100"], "mine")
    lines = {line.removeprefix("# llm.yaml:") for line in text.splitlines() if line.startswith("# llm.yaml:")}
    where = dict(enumerate(LANGUAGE.splitlines(), 1))

    def told(what: str) -> str:
        (found,) = [line for line in lines if what in line]
        number, _, said = found.partition(": ")
        assert what.rsplit(maxsplit=1)[-1] in where[int(number)] or "name: arguments" in where[int(number)] or "init_with" in what
        return said

    assert text.startswith("# caraml run THIS_FILE --system A100\n") and 'name = "mine"' in text
    assert told("parameter version").endswith("shell commands are not executed")
    assert told("parameter queue").endswith("the system's file says it")
    assert told("--lr-decay-style").endswith("no key of a suite")
    assert told("step setup") == "step setup: bash setup.sh is not executed"
    assert "other files are not read" in told("init_with platform.xml")
    assert told("result").startswith("result: rates and energy are measured")
    assert not any("nlayers" in line or "train" in line for line in lines)


def test_swept_parameters_are_swept_and_rounded_batches_told(images: Path, tmp_path: Path) -> None:
    text = suite_from_script(images, ["A100"])
    found = benchmark(text, tmp_path)
    assert found == {
        "name": "image-classification", "workload": "image_classification", "nodes": [1, 2], "devices": [1, 2, 3], "global_batch": [16, 64],
        "precision": "fp16", "params": {"model": "resnet50", "data": "synthetic"},
    }  # fmt: skip
    assert 'name = "tiny-images"' in text
    assert "images.xml:14: 4 of 12 points: JUBE rounds the batch of a device" in text
    assert "--variable-update horovod: no key" in text


def test_combinations_that_are_no_product_go_side_by_side(images: Path, tmp_path: Path) -> None:
    images.write_text(IMAGES.replace('{"A100": "1;2;3", "MI250": "8"}["${system_name}"]', '"1;2" if ${nodes} == 1 else "4"'))
    found = benchmark(suite_from_script(images, ["A100"]), tmp_path)
    assert found["sweep"] == "zip"
    assert list(zip(found["nodes"], found["devices"], found["global_batch"], strict=True)) == [
        (1, 1, 16), (1, 1, 64), (1, 2, 16), (1, 2, 64), (2, 4, 16), (2, 4, 64),
    ]  # fmt: skip


def test_options_in_the_commands_of_the_training_step_count(language: Path, tmp_path: Path) -> None:
    command = "python x.py --lr $$(cat lr) --weight_decay $decay --out $here --bf16; a --verbose && --use-distributed-optimizer > log"
    own = LANGUAGE.replace("do: {done_file: ready, _: $submit job}", f"do: [echo, '{command}']").replace("--lr 1e-4 ", "")
    language.write_text(own.replace("- {name: dataset", "- {name: decay, _: 0.1}\n      - {name: dataset"))
    text = suite_from_script(language, ["800M", "A100"])
    line = next(number for number, one in enumerate(language.read_text().splitlines(), 1) if "x.py" in one)
    assert f"llm.yaml:{line}: --out $here: no key of a suite" in text
    assert f"llm.yaml:{line}: --verbose: no key of a suite" in text and f"llm.yaml:{line}: --lr = $(cat: no value of learning_rate" in text
    found = benchmark(text, tmp_path)
    assert (found["precision"], found["distributed_optimizer"], found["params"]["weight_decay"]) == ("bf16", True, 0.1)
    assert "learning_rate" not in found["params"] and "parameter decay" not in text


@pytest.mark.parametrize("after", [" 2>&1 | tee log", " train.py", " $undefined"])
def test_what_follows_a_flag_is_not_its_value(images: Path, tmp_path: Path, after: str) -> None:
    """And a command's mode is nothing to JUBE, which has none."""
    own = IMAGES.replace("--use_fp16=True ", "").replace(
        "<do>$submit</do>", f'<do mode="shell">python x.py --bf16{after.replace("&", "&amp;")}</do>'
    )
    images.write_text(own)
    assert benchmark(suite_from_script(images, ["A100"]), tmp_path)["precision"] == "bf16"


def test_a_benchmark_that_the_tags_exclude_is_not_read(images: Path, tmp_path: Path) -> None:
    first, rest = IMAGES.index("<benchmark"), IMAGES.index("</jube>")
    body = IMAGES[first:rest]
    other = re.sub(r"<benchmark ", '<benchmark tag="old" ', body, count=1).replace("16;64", "8")
    images.write_text(IMAGES[:first] + other + body + IMAGES[rest:])
    assert benchmark(suite_from_script(images, ["A100"]), tmp_path)["global_batch"] == [16, 64]
    assert benchmark(suite_from_script(images, ["A100", "old"]), tmp_path)["global_batch"] == 8
    images.write_text(IMAGES[:first] + other + IMAGES[rest:])
    with pytest.raises(InputError, match="these tags leave no benchmark"):
        suite_from_script(images, ["A100"])


@pytest.mark.parametrize("of_set", [False, True])
def test_of_two_parameters_of_one_name_the_later_counts_unless_duplicate_asks_for_both(images: Path, tmp_path: Path, of_set: bool) -> None:
    """What JUBE joins would be lost: two of three batches."""
    first = '<parameter name="global_batch_size" separator=";">16;64</parameter>'

    def found(word: str) -> Any:
        own = "" if of_set else f' duplicate="{word}"'
        whole = IMAGES.replace(first, f'{first}<parameter{own} name="global_batch_size">128</parameter>')
        of_one = whole.replace("<parameter ", '<parameter duplicate="none" ')  # which is what the set's says
        images.write_text(of_one.replace('name="model">\n', f'name="model" duplicate="{word}">\n', 1) if of_set else whole)
        return benchmark(suite_from_script(images, ["MI250"]), tmp_path)["global_batch"]

    assert found("replace") == 128
    for word in ("concat", "error"):
        with pytest.raises(InputError, match=rf"images.xml:1\d: parameter \w+: found duplicate {word}, expected replace") as refused:
            found(word)
        assert refused.value.hint == "write all values into one parameter"


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", ["model", "unused"])
def test_two_parameter_sets_of_one_name_are_refused_as_by_jube(images: Path, outside: bool, name: str) -> None:
    """The later one alone was taken, and what the other had was lost."""
    whole, tagged = IMAGES.replace('  <parameterset name="job">', '  <parameterset name="unused"/>\n  <parameterset name="job">'), "!old"
    other = f'<parameterset name="{name}" tag="{tagged}"><parameter name="seed">7</parameter></parameterset>'
    before = "<benchmark" if outside else "  <step"
    images.write_text(whole.replace(before, f"{other}\n{before}", 1))
    with pytest.raises(InputError, match=rf"images.xml:\d+: parameterset {name}: is in line \d+ already, .* JUBE refuses") as refused:
        suite_from_script(images, ["A100"])
    assert "give one of them another name" in str(refused.value.hint)
    assert suite_from_script(images, ["A100", "old"])


def test_sets_outside_of_the_benchmark_are_used(images: Path) -> None:
    expected = suite_from_script(images, ["A100"])
    begin, end = IMAGES.index('  <parameterset name="job">'), IMAGES.index('  <parameterset name="model">')
    images.write_text(IMAGES.replace(IMAGES[begin:end], "").replace("<jube>", f"<jube>{IMAGES[begin:end]}"))
    found = suite_from_script(images, ["A100"])
    assert tomllib.loads(found) == tomllib.loads(expected)


def test_words_without_a_counterpart_are_named(images: Path, tmp_path: Path) -> None:
    text = suite_from_script(images, ["MI250", "precision", "inductor"])
    assert "images.xml:16: precision = int4: no value of precision says that" in text
    found = benchmark(text, tmp_path)
    assert set(found["compile"]) == {"default", "max-autotune"} and {"fp32", "bf16"} <= set(found["precision"])


def test_a_tag_that_does_not_exist_names_the_nearest(language: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)unknown tag of llm.yaml '800m'.*did you mean '800M'"):
        suite_from_script(language, ["800m"])


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "", "expected benchmark or parameterset, found nothing"),
        ("a.yaml", "- 1", "not a script of JUBE"),
        ("a.yaml", "name: x\nparameterset: &a {name: b}\nstep: *a\n", r"a.yaml:3: found the alias \*a"),
        ("a.xml", "<jube><benchmark></jube>", "a.xml:1: not XML: mismatched tag"),
        ("a.xml", '<!DOCTYPE a [<!ENTITY b "c">]><jube>&b;</jube>', "DOCTYPE"),
        ("a.xml", "<a>" * 50 + "</a>" * 50, "elements within each other"),
        ("a.xml", "<jube><benchmark name='x'/></jube>", "found no step"),
        (
            "a.yaml",
            LANGUAGE.replace("name: nlayers", "name: model, _: 800M}\n      - {name: depth"),
            "model = 800M: the size of a language model",
        ),
        ("a.xml", IMAGES.replace('tag="!real"', 'tag="real+(("'), r"a.xml:11: tag = 'real\+\(\('"),
        ("a.xml", IMAGES.replace("16;64", "${batch}"), r"a.xml:14: global_batch_size: \$batch is known only to a run"),
        ("a.xml", IMAGES.replace("16;64", "${global_batch_size}"), "known only to a run"),
        ("a.xml", IMAGES.replace("16;64", ";".join("16" * 2000)), "at most 1,000 are read"),
        (
            "a.xml",
            IMAGES.replace('separator=";">16;64', 'mode="python">__import__("os").getpid()'),
            "a.xml:14: parameter global_batch_size: Python that is more than arithmetic is not computed",
        ),
        ("a.xml", IMAGES.replace('separator=";">16;64', 'mode="python">"16" * 10'), "arithmetic on"),
    ],
)
def test_what_is_no_script_of_caraml_is_refused(tmp_path: Path, name: str, content: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=told):
        suite_from_script(path, [])


@pytest.mark.parametrize(
    ("old", "new", "told", "hint"),
    [
        (
            'name: nlayers, mode: python, _: "[16,40][$row]"',
            "name: nlayers, mode: shell, _: cat depth",
            "nlayers: shell commands are not",
            "tags",
        ),
        ("name: nhidden, mode", "name: nhidden, tag: 13B, mode", "nhidden: these tags leave it out", "give the tags"),
        ("name: nlayers, mode", "name: nlayers, tag: 13B, mode", "nlayers: these tags leave it out", "give the tags"),
        ("[8,32][$row]", "[8,32][$column]", "nheads: \\$column is known only to a run", "give the tags"),
        ("type: int, _: 2048", "_: long", "sequence_length = long: no value of sequence_length says that", "write the number"),
        (
            "name: dataset",
            "name: precision, _: int4}\n      - {name: dataset",
            "precision = int4: no value of precision says that",
            "bf16, fp16, fp8",
        ),
        (
            "name: dataset",
            "name: precision, mode: shell, _: x}\n      - {name: dataset",
            "precision: shell commands are not executed",
            "tags",
        ),
    ],
)
def test_a_size_or_precision_that_is_lost_is_refused(language: Path, old: str, new: str, told: str, hint: str) -> None:
    """The suite would have its preset's, and be another experiment."""
    language.write_text(LANGUAGE.replace(old, new))
    with pytest.raises(InputError, match=rf"llm.yaml:\d+: {told}") as refused:
        suite_from_script(language, ["800M", "A100"])
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("old", "key", "names"),
    [
        ("nhidden", "width", "nhidden and no --hidden-size"),
        ("nheads", "heads", "nheads and no --num-attention-heads"),
        ("sequence_length", "sequence_length", "sequence_length and no --seq-length"),
    ],
)
def test_a_size_that_the_script_gives_nowhere_is_refused(language: Path, old: str, key: str, names: str) -> None:
    """The suite had that of the preset 117M."""
    language.write_text(LANGUAGE.replace(f"name: {old},", f"name: my_{old},"))
    with pytest.raises(InputError, match=rf"llm.yaml:19: the model of this batch has no {key}: found no {names}") as refused:
        suite_from_script(language, ["800M", "A100"])
    assert "write it into a parameter" in str(refused.value.hint)


def test_a_size_that_only_an_option_has_counts(language: Path, tmp_path: Path) -> None:
    language.write_text(LANGUAGE.replace("name: nheads,", "name: heads,").replace("--clip", "--num-attention-heads $heads --clip"))
    assert benchmark(suite_from_script(language, ["800M", "A100"]), tmp_path)["params"]["heads"] == 8


def test_precision_fp8_is_that_of_suites(language: Path, tmp_path: Path) -> None:
    language.write_text(LANGUAGE.replace("{name: dataset", "{name: precision, _: fp8}\n      - {name: dataset"))
    assert benchmark(suite_from_script(language, ["800M", "A100"]), tmp_path)["precision"] == "fp8"


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("2*(16+16)", 64),
        ("2**6", r"Python that is more than arithmetic is not computed: 2\*\*6"),
        ("','.join([str(2**i) for i in range(5,9)])", "Python that is more than arithmetic is not computed: ','.join"),
        ("len('ab')", "Python that is more than arithmetic is not computed: len"),
        ("9" * 4000 + "*" + "9" * 4000, "limit"),
        ("9*" * 2000 + "1", "cannot be evaluated: RecursionError"),
        ("2 +", "cannot be read"),
    ],
)
def test_python_parameters_are_arithmetic_and_others_are_named(images: Path, tmp_path: Path, text: str, batch: int | str) -> None:
    first = '<parameter name="global_batch_size" separator=";">16;64'
    images.write_text(
        IMAGES.replace(first, f'<parameter name="gbs" mode="python">{text}</parameter><parameter name="global_batch_size">$gbs')
    )
    if isinstance(batch, int):
        assert benchmark(suite_from_script(images, ["MI250"]), tmp_path)["global_batch"] == batch
        return
    with pytest.raises(InputError, match=f"images.xml:14: global_batch_size: parameter gbs: .*{batch}") as refused:
        suite_from_script(images, ["MI250"])
    assert refused.value.hint == "write the values into the script" and "condition" not in str(refused.value)


def test_a_step_has_the_parameters_and_repeats_of_those_that_it_depends_on(language: Path, images: Path, tmp_path: Path) -> None:
    """They were not seen: a sweep that an earlier step brings was lost, and so were its iterations."""
    earlier = '<step name="a" iterations="2"/><step name="b" depend="c"/><step name="c"><use>job</use></step></benchmark>'
    whole = IMAGES.replace("job,model</use>", "model</use>").replace("</benchmark>", earlier)
    images.write_text(whole.replace('name="execute"', 'name="execute" iterations="3" depend="a, b"'))
    found = benchmark(suite_from_script(images, ["A100"]), tmp_path)
    assert (found["nodes"], found["devices"], found["repeats"]) == ([1, 2], [1, 2, 3], 6)
    images.write_text(images.read_text().replace('depend="c"', 'depend="d"'))
    with pytest.raises(UnknownNameError, match=r"unknown step at .*, in depend of step b: 'd'"):
        suite_from_script(images, ["A100"])
    for number in ("$n", "0", "2.5"):
        language.write_text(LANGUAGE.replace("iterations: 2", f"iterations: {number}"))
        with pytest.raises(InputError, match=rf"llm.yaml:46: iterations = {re.escape(number)}: expected a whole number of 1 or more"):
            suite_from_script(language, ["800M", "A100"])


def test_steps_and_commands_that_are_not_active_do_not_count(images: Path, tmp_path: Path) -> None:
    """They were taken as active."""
    active = '<step name="execute" active="{}">'
    whole = IMAGES.replace('<step name="execute">', active)
    images.write_text(whole.replace(active, active.format("$nodes == 1")))
    text = suite_from_script(images, ["A100"])
    assert "step execute: active = $nodes == 1: is executed here in any case" in text and benchmark(text, tmp_path)["nodes"] == [1, 2]
    images.write_text(whole.replace(active, active.format("false")))
    with pytest.raises(InputError, match="; step execute is not active"):
        suite_from_script(images, ["A100"])
    commands = '<do active="False">x --bf16</do><do active="$nodes">y --epochs 3</do>'
    images.write_text(IMAGES.replace("--use_fp16=True ", "").replace("<do>", f"{commands}<do>").replace("<step ", '<step cycles="2" '))
    text = suite_from_script(images, ["A100"])
    assert "precision" not in benchmark(text, tmp_path) and "do: active = $nodes: is executed here in any case" in text
    assert "step execute: cycles = 2: its commands run once in each point" in text


def test_yaml_is_read_as_by_jube(language: Path, tmp_path: Path) -> None:
    """Numbers in other forms, truth values and lists were taken as they are written, and a key that stands twice as both."""

    def batch(value: str) -> Any:
        written = LANGUAGE.replace(
            '{name: global_batch_size, tag: "800M+!quick", _: "64,128,256"}', f"{{name: global_batch_size, {value}}}"
        )
        language.write_text(written)
        return benchmark(suite_from_script(language, ["800M", "A100"]), tmp_path)["global_batch"]

    assert (batch("_: 0x40"), batch("_: 0100"), batch("_: 1_024"), batch("_: [64, 128]")) == (64, 64, 1024, 128)
    assert batch('separator: "", _: 64') == 64
    language.write_text(LANGUAGE.replace("{name: dataset", "{name: precision, _: yes}\n      - {name: dataset"))
    assert benchmark(suite_from_script(language, ["800M", "A100"]), tmp_path)["precision"] == "fp16", "JUBE has True"
    for more, told in (("parameterset: []\n", "the key 'parameterset' stands twice"), ("? [a]\n: 1\n", "a key that is no word")):
        language.write_text(LANGUAGE + more)
        with pytest.raises(InputError, match=rf"llm.yaml: not YAML: line \d+: {told}"):
            suite_from_script(language, ["800M", "A100"])


def test_other_files_are_named_wherever_a_script_names_them(language: Path, images: Path) -> None:
    """Those in a set, of another set and outside of the benchmark were passed over."""
    text = suite_from_script(language, ["800M", "A100"])
    assert "llm.yaml:49: use jobfiles of platform.xml: other files are not read" in text
    more = LANGUAGE.replace("      - {name: dataset, _: OSCAR}", '      - !include sizes.yaml:["a"]\n      - {name: dataset, _: OSCAR}')
    language.write_text(f"{more}fileset: !include files.yaml\n")
    text = suite_from_script(language, ["800M", "A100"])
    assert 'include sizes.yaml:["a"]: other files are not read' in text and "include files.yaml: other files are not read" in text
    inner = '<include from="more.xml" path="parameter"/><parameter name="total"'
    whole = IMAGES.replace('<parameter name="total"', inner).replace("<jube>", '<jube><parameterset name="x" init_with="a.xml:b"/>')
    images.write_text(whole)
    text = suite_from_script(images, ["A100"])
    assert "images.xml:13: include more.xml: other files are not read" in text and "images.xml:2: init_with a.xml:b: other files" in text


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name="job">', 'name="job"><parameter name="model">resnet18</parameter>', r"model: line \d+ has another value, in another set"),
        ('name="job">', 'name="job"><parameterset name="in"/>', "parameterset in: in parameterset job, which has parameters only"),
    ],
)
def test_sets_that_jube_refuses_are_refused(images: Path, old: str, new: str, told: str) -> None:
    """The later value was taken, and a set within another left out."""
    images.write_text(IMAGES.replace(old, new))
    with pytest.raises(InputError, match=rf"images.xml:\d+: .*{told}"):
        suite_from_script(images, ["A100"])


def test_why_no_step_is_found_is_told(language: Path, images: Path) -> None:
    language.write_text(LANGUAGE.replace("[machine, model, job, {", "[machine, modle, job, {"))
    with pytest.raises(UnknownNameError, match=r"(?s)unknown set at .*llm.yaml:49, in use of step train: 'modle'.*did you mean 'model'"):
        suite_from_script(language, ["800M", "A100"])
    language.write_text(LANGUAGE.replace("[machine, model, job, {", "[machine, {from: other.xml, _: model}, job, {"))
    with pytest.raises(InputError, match=r"line 49 uses model of other.xml, and other files are not read") as refused:
        suite_from_script(language, ["800M", "A100"])
    assert refused.value.hint == "write its sets into the script"
    language.write_text(LANGUAGE.replace("[machine, model, job, {", "[machine, model, jobs, 'of_$size', job, {"))
    text = suite_from_script(language, ["800M", "A100"])
    assert ": use jobs: the script has no such set" in text and ": use of_$size: which set that is" in text
    images.write_text(IMAGES.replace("<jube>", "<jube><selection><only>Tiny</only></selection>"))
    with pytest.raises(InputError, match=r"images.xml:2: found a selection, which is not read"):
        suite_from_script(images, [])


@pytest.mark.parametrize("last", ["", "x"])
def test_parameters_that_double_each_other_end(language: Path, last: str) -> None:
    """Thirty of them would be a thousand million texts."""
    doubling = "".join(f'      - {{name: a{n}, _: "${{a{n + 1}}}${{a{n + 1}}}"}}\n' for n in range(30))
    doubling += f'      - {{name: a30, _: "{last}"}}\n'
    language.write_text(LANGUAGE.replace("      - {name: dataset, _: OSCAR}\n", f'{doubling}      - {{name: dataset, _: "$a0"}}\n'))
    told = "with its parameters it has 32,768 characters, and at most 20,000 are read" if last else "dataset = : no value of data says that"
    assert told in suite_from_script(language, ["800M", "A100"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("init_with: platform.xml", 'init_with: "EVIL"'),
        ('tag: "A100", _: "A100"', 'tag: "A100", _: "EVIL"'),
        ("{from: platform.xml,", '{from: "EVIL",'),
        ("_: OSCAR", '_: "EVIL"'),
        ("{name: queue,", '{name: "EVIL",'),
        ("use: [machine,", 'use: [machine, "EVIL",'),
        ("mode: shell", 'mode: "EVIL"'),
    ],
)
def test_nothing_in_a_script_becomes_a_benchmark_of_its_own(language: Path, old: str, new: str) -> None:
    """A comment that the author of the script could end would begin a program, which the suite's user would start as its own."""
    lines = r"x\n[[benchmark]]\nname = 'e'\nworkload = 'command'\nparams = { argv = ['sh', '-c', 'id'] }\n#\e[2J"
    language.write_text(LANGUAGE.replace(old, new.replace("EVIL", lines)))
    text = suite_from_script(language, ["800M", "A100"])
    assert [benchmark["workload"] for benchmark in tomllib.loads(text)["benchmark"]] == ["gpt"] and "[[benchmark]] name = " in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_formulas_are_values_and_never_code() -> None:
    assert Formula("{'a': '1;2', 'b': '3'}['a']").value() == "1;2"
    assert Formula("7 // 2 if (16 == 16) or (4 == 1) else 16").value() == 3
    assert Formula("max(int(32/5), 2)").value() == 6
    for text in ("open('x')", "[].append", "(lambda: 1)()", "{1: 2}[3]", "1/0", "x", "int('x')", "[1 for _ in 'ab']", "int(x=1)"):
        with pytest.raises(InputError):
            Formula(text).value()
    assert re.fullmatch(r"-?\d+", str(Formula("-4").value()))
