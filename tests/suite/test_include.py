"""Suites that include others: whose keys hold, whose file and line an error names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from caraml.base.errors import InputError
from caraml.base.toml import parse_toml
from caraml.suite.choice import with_settings
from caraml.suite.expand import expand
from caraml.suite.load import SuiteFile, load_suite, suite_of
from caraml.suite.model import Point
from caraml.suite.placement import Machine
from caraml.workloads import params_of

HEAD = 'name = "{0}"\ntitle = "T"\n'
GPT = '[[benchmark]]\nname = "{0}"\nworkload = "gpt"\nglobal_batch = {1}\nparams = {{ preset = "4M", data = "synthetic" }}\n'


def write(folder: Path, **texts: str) -> Path:
    """Suite files; the path of the first."""
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(HEAD.format(name) + text)
    return folder / f"{next(iter(texts))}.toml"


def points(file: SuiteFile) -> list[Point]:
    machine = Machine("local", "test device", "gpu", "test", nodes=1, devices_per_node=4, device_memory_gib=80.0)
    return [one.point for one in expand(file, machine, params_of).points]


def told(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        points(load_suite(str(path)))
    return str(caught.value)


def test_included_benchmarks_come_first_and_a_table_without_a_workload_changes_keys(tmp_path: Path) -> None:
    own = 'include = ["below.toml", "llm"]\n' + GPT.format("mine", "[1, 2]")
    own += '[[benchmark]]\nname = "gpt-800M"\nglobal_batch = [64]\nparams = { learning_rate = 1e-4 }\n'
    path = write(tmp_path, top=own, below=GPT.format("inner", 8))
    found = points(load_suite(str(path)))
    assert {one.suite for one in found} == {"top"}
    micro = [one for one in found if "micro" in one.benchmark]  # those for GPUs come with the others
    counts = {
        name: sum(one.benchmark == name for one in found) for name in dict.fromkeys(one.benchmark for one in found if one not in micro)
    }
    assert counts == {"inner": 1, "gpt-117M": 9, "gpt-800M": 1, "mine": 2}
    large = next(one for one in found if one.benchmark == "gpt-800M")
    assert (large.global_batch, large.params["learning_rate"], large.params["preset"]) == (64, 1e-4, "800M")


def test_the_innermost_file_has_the_last_word_last(tmp_path: Path) -> None:
    change = '[[benchmark]]\nname = "inner"\n{0}\n'
    path = write(
        tmp_path,
        top='include = ["middle.toml"]\n' + change.format("global_batch = 16"),
        middle='include = ["below.toml"]\n' + change.format("global_batch = 32\nseed = 3"),
        below=GPT.format("inner", 8),
    )
    assert [(one.global_batch, one.seed) for one in points(load_suite(str(path)))] == [(16, 3)]


def test_what_is_included_twice_is_run_once(tmp_path: Path) -> None:
    path = write(
        tmp_path, top='include = ["a.toml", "b.toml"]\n', a='include = ["b.toml"]\n' + GPT.format("mine", 4), b=GPT.format("inner", 8)
    )
    assert [one.benchmark for one in points(load_suite(str(path)))] == ["inner", "mine"]


def test_the_kept_text_is_whole_and_names_every_file(tmp_path: Path) -> None:
    path = write(tmp_path, top='include = ["below.toml"]\n', below=GPT.format("inner", 8))
    file = load_suite(str(path))
    kept = suite_of(parse_toml(file.document.text, "kept.toml"))
    assert [one.key for one in points(kept)] == [one.key for one in points(file)]
    assert str(tmp_path / "below.toml") in file.document.text.splitlines()[0] and file.included == (str(tmp_path / "below.toml"),)
    with pytest.raises(InputError, match="no `include` in a suite that was kept"):
        suite_of(parse_toml(HEAD.format("s") + 'include = ["/etc/other.toml"]\n', "theirs.toml"))


def test_settings_and_their_faults_reach_included_benchmarks(tmp_path: Path) -> None:
    path = write(tmp_path, top='include = ["below.toml"]\n', below=GPT.format("inner", 8))
    changed = with_settings(load_suite(str(path)), ["global_batch=4"], params_of)
    assert [one.global_batch for one in points(changed)] == [4] and changed.included
    with pytest.raises(InputError, match=r"--set global_batch=x: found \"x\", expected .*; concerns inner$"):
        with_settings(load_suite(str(path)), ["global_batch=x"], params_of)


def test_errors_name_the_file_and_line_where_a_fault_stands(tmp_path: Path) -> None:
    bad = GPT.format("inner", 8).replace("4M", "5M")
    path = write(
        tmp_path,
        top='include = ["below.toml"]\n' + GPT.format("mine", '"many"') + '[[benchmark]]\nname = "inner"\nprecison = "bf16"\n',
        below=bad,
    )
    text = told(path)
    assert f'{path}:7: benchmark[1].global_batch: found "many"' in text
    assert f"{path}:11: benchmark[0].precison" in text and "did you mean 'precision'" in text
    path.write_text(HEAD.format("top") + 'include = ["below.toml"]\n')
    assert f'{tmp_path / "below.toml"}:7: benchmark[0].params.preset: found "5M"' in told(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('include = "llm"', 'top.toml:3: include: found "llm", expected an array of suites'),
        ("include = [3]", "top.toml:3: include: found [3], expected an array of suites"),
        ('include = ["lm"]', "top.toml:3: include[0]: found \"lm\", expected a suite of the catalogue, or the path of a file, NAME.toml "),
        ('include = ["llm",\n"belw.toml"]', "top.toml:4: include[1]: found \"belw.toml\", expected a suite file in the folder"),
        ('include = ["lm", "belw.toml"]', "include[1]: found \"belw.toml\", expected a suite file in the folder"),
        ('include = ["../outside.toml"]', 'include[0]: found "../outside.toml", expected a suite file in the folder'),
        ('include = ["/etc/outside.toml"]', 'include[0]: found "/etc/outside.toml", expected a suite file in the folder'),
        (f'include = ["{"x" * 300}/a.toml"]', "expected a suite file in the folder"),
        ('include = ["top.toml"]', "expected no suite that includes itself"),
        ('include = ["round.toml"]', "round.toml:3: include[0]: found \"top.toml\", expected no suite that includes itself: "),
        ('include = ["keys.toml"]', "keys.toml:3: titel: found \"x\", expected one of the keys"),
        ('include = ["broken.toml"]', "broken.toml:3: not valid TOML"),
        ('include = ["one.toml"]', "one.toml:3: benchmark: found \"gpt\", expected an array of tables"),
        ('include = ["below.toml"]\n[[benchmark]]\nname = "iner"\n', "top.toml:5: benchmark[0].name: found \"iner\", expected the name of"),
        ('include = ["below.toml"]\n[[benchmark]]\nnmae = "inner"\n', "benchmark[0].nmae: found \"inner\", expected the key `name`"),
        ('include = []\n[[benchmark]]\nname = "n"\n', "benchmark[0].workload: found nothing"),
        ("include = []", "benchmark: found [], expected at least 1 entry"),
    ],
)  # fmt: skip
def test_what_cannot_be_included_is_told_with_the_nearest_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "outside.toml").write_text(HEAD.format("outside") + GPT.format("n", 1))
    folder = tmp_path / "suites"
    folder.mkdir()
    (folder / "broken.toml").write_text("a = 1\nb = 2\nc =\n")
    path = write(
        folder,
        top=text + "\n",
        below=GPT.format("inner", 8),
        round='include = ["top.toml"]\n',
        keys='titel = "x"\n',
        one='benchmark = "gpt"\n',
    )
    said = told(path)
    assert words in said, said
    guesses = {"lm": "llm", "belw": "below.toml", "titel": "title", "iner": "inner", "nmae": "name"}
    assert all(f"did you mean {guess!r}" in said for word, guess in guesses.items() if f'"{word}' in words or f"{word}:" in words), said


def test_a_long_chain_of_includes_ends(tmp_path: Path) -> None:
    texts = {f"s{number}": f'include = ["s{number + 1}.toml"]\n' for number in range(60)}
    assert "expected no suite that includes itself" in told(write(tmp_path, **texts, s60=GPT.format("n", 1)))


def test_suites_that_double_each_other_are_refused(tmp_path: Path) -> None:
    """Two of each generation, that both include both of the next: twenty are millions of benchmarks, in minutes and gigabytes."""
    both = {f"{which}{number}": f'include = ["a{number + 1}.toml", "b{number + 1}.toml"]\n' for number in range(20) for which in ("a", "b")}
    path = write(tmp_path, **both, a20=GPT.format("n", 1), b20=GPT.format("m", 1))
    with pytest.raises(InputError, match=r"a\d+.toml: found 16,384 benchmarks with all that it includes, at most 10,000 are read"):
        load_suite(str(path))
