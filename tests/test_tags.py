"""``--tag`` as CARAML's scripts for JUBE have it: what chooses a machine, a benchmark or its input, and what only names a campaign."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.base.errors import InputError
from caraml.cli import app
from caraml.cli.asked import Asked, by_tags
from caraml.suite.load import load_suite


def meant(suite: str, *words: str, system: str = "local") -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """System, benchmarks, settings and labels of `caraml run SUITE --tag WORD WORD ...`."""
    asked = by_tags(Asked(suite, Path("results"), system), words[:1], words[1:])
    return asked.system, tuple(asked.options.part.names), asked.options.settings, asked.options.tags


def test_tags_choose_as_they_did(capsys: pytest.CaptureFixture[str]) -> None:
    found = meant("llm", "800M", "A100", "synthetic")
    assert found == ("A100", ("800M",), ("params.data=synthetic",), ("800M", "A100", "synthetic"))
    assert capsys.readouterr().err == "--tag 800M A100 synthetic: --system A100 --only 800M --set params.data=synthetic\n"
    assert meant("llm-large", "175b", "jedi")[:3] == ("jedi", ("175b",), ())
    assert meant("vision", "WAIH100")[:3] == ("WAIH100", (), ())
    assert meant("caraml-ipu", "117M", "synthetic")[1:3] == (("117M",), ()), "those programs make their input anyway"
    assert meant("llm", "A100", system="A100")[0] == meant("llm", "A100", system="jureca-a100")[0], "one machine by two names"


def test_synthetic_is_of_the_benchmarks_that_the_other_words_choose(tmp_path: Path) -> None:
    program = '[[benchmark]]\nname = "prog"\nworkload = "command"\nparams = { argv = ["true"], energy = false }\n'
    gpt = '[[benchmark]]\nname = "gpt"\nworkload = "gpt"\nglobal_batch = 1\n'
    (suite := tmp_path / "mixed.toml").write_text(f'name = "mixed"\ntitle = "Mixed"\n{program}{gpt}')
    assert meant(str(suite), "synthetic", "prog")[1:3] == (("prog",), ())
    assert meant(str(suite), "prog", "gpt", "synthetic")[1:3] == (("prog", "gpt"), ("params.data=synthetic",))
    assert meant(str(suite), "synthetic")[1:3] == ((), ("params.data=synthetic",))


def test_other_words_name_the_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    assert by_tags(Asked("llm", Path("r")), ["nightly", "cold"], None).options.tags == ("nightly", "cold")
    assert by_tags(Asked("llm", Path("r")), None, None) == Asked("llm", Path("r"))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("suite", "words", "told"),
    [
        ("llm", ("80OM", "A100"), "--tag 80OM: no system, and no benchmark of suite 'llm'.*did you mean '800M'"),
        ("llm", ("800M", "A10O"), "--tag A10O.*did you mean 'A100'"),
        ("vision", ("sinthetic",), "--tag sinthetic.*did you mean 'synthetic'"),
        ("maelstrom", ("ap9", "MI250"), "--tag ap9: no system.*did you mean 'ap[1-6]'"),
        ("llm", ("800M", "xyz"), "--tag xyz: no system.*caraml list systems; to name the campaign only: --tag xyz, with a --tag of its"),
        ("llm", ("800M", "test"), "did you mean 'WestAI'. to name the campaign only: --tag test, with a --tag of its own"),
        ("llm", ("A10O",), "--tag A10O.*did you mean 'A100'. a word to find the campaign by must be less like a name"),
        ("llm", ("13B", "JEDI"), "--tag 13B: no benchmark of suite 'llm' has this size.*caraml run llm-large --tag 13B JEDI"),
        ("vision", ("container", "H100"), "--tag container: images are not made by `run`.*caraml container build containers/cuda.def"),
        ("llm", ("800M A100",), "--tag 800M A100: found several tags in one word.*--tag 800M A100$"),
        ("llm", ("13B,A100,synthetic",), "several tags in one word.*--tag 13B A100 synthetic$"),
        ("llm", ("A100", "H100"), "one system: found A100 and H100"),
        ("A100", ("800M", "llm", "synthetic"), "found 'A100' where the suite stands.*caraml run llm --tag 800M A100 synthetic$"),
    ],
)
def test_a_tag_that_there_is_not_gets_the_nearest_name_or_the_right_command(suite: str, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(InputError, match=f"(?s){told}"):
        meant(suite, *words)


def test_words_without_the_option_and_scripts_of_jube_get_the_command() -> None:
    with pytest.raises(InputError, match=r"(?s)found '800M A100' after the suite.*caraml run llm --tag 800M A100"):
        by_tags(Asked("llm", Path("r")), None, ["800M", "A100"])
    with pytest.raises(InputError, match=r"(?s)found a script of JUBE.*caraml import --jube llm_training/.*suite 'llm', .*caraml run llm"):
        load_suite("llm_training/llm_benchmark_nvidia_amd.yaml")


def test_tags_of_a_script_follow_each_other_as_jube_takes_them(tmp_path: Path) -> None:
    script = tmp_path / "tiny.yaml"
    script.write_text(
        "name: tiny\nparameterset:\n  - name: all\n    parameter:\n      - {name: system_name, tag: A100, _: A100}\n"
        '      - {name: nlayers, tag: "4M", _: 4}\n      - {name: global_batch_size, tag: "4M", _: "8,16"}\n'
        "      - {name: sizes, _: --hidden-size 256 --num-attention-heads 4 --seq-length 256}\n"
        "step: {name: train, use: all, do: run}\n"
    )
    runner = CliRunner()
    together, apart = (
        runner.invoke(app, ["import", "--jube", str(script), *words])
        for words in (["--tag", "4M", "A100"], ["--tag", "4M", "--tag", "A100"])
    )
    assert together.exit_code == 0 and together.stdout == apart.stdout and "--system A100" in together.stdout
    refused = runner.invoke(app, ["import", "--jube", str(script), "4M"])
    assert isinstance(refused.exception, InputError) and "found '4M' after the file" in str(refused.exception)
    planned = runner.invoke(app, ["plan", "llm", "--where", "global_batch <"])
    assert "cannot be read: invalid syntax" in str(planned.exception) and "<unknown>" not in str(planned.exception)
