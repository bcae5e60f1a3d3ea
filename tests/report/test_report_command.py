"""``caraml report`` and ``caraml results --csv`` as a user meets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from record_factory import full_store, make_point, make_record, save
from typer.testing import CliRunner

from caraml.__main__ import verbs
from caraml.base.errors import InputError
from caraml.cli import app
from caraml.results.store import Store

COMMANDS: Any = typer.main.get_group(verbs()).commands


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    full_store(root)
    return root


def caraml(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), prog_name="caraml")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_the_default_is_a_page_beside_the_results(out: Path) -> None:
    assert caraml("report", "quick", "--out", out).strip() == str(out / "quick.html")
    assert (out / "quick.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("kind", "begins"), [("md", "# quick\n"), ("csv", "key,suite,")])
def test_text(out: Path, tmp_path: Path, kind: str, begins: str) -> None:
    path = tmp_path / "new" / f"file.{kind}"
    assert caraml("report", "quick", "--out", out, "--format", kind, "--to", path).strip() == str(path)
    assert path.read_text(encoding="utf-8").startswith(begins)


@pytest.mark.slow
def test_a_report_is_headed_by_the_suite_s_own_title(out: Path, tmp_path: Path) -> None:
    store = Store(out)
    store.remember(store.current("quick")[0].model_copy(update={"name": "named", "title": "Two models in a hurry"}))
    for kind, heading in (("html", "<h1>Two models in a hurry</h1>"), ("md", "# Two models in a hurry\n")):
        caraml("report", "named", "--out", out, "--format", kind, "--to", tmp_path / kind)
        assert heading in (tmp_path / kind).read_text(encoding="utf-8")


def test_figures_get_a_folder(out: Path) -> None:
    text = caraml("report", "quick", "--out", out, "--format", "svg")
    found = sorted((out / "quick-figures").glob("*.svg"))
    assert text.strip() == f"{len(found)} figures in {out / 'quick-figures'}"
    assert found[0].name == "01-rate-over-global-batch-gpt-mini.svg"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--serve", "--format", "md"], "--serve shows every campaign"),
        (["quick", "--serve"], "--serve shows every campaign"),
        (["--port", "80"], "--port is for --serve"),
        (["--serve", "--out", "/nowhere"], "is not a folder"),
    ],
)
def test_what_does_not_go_together_is_said(out: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        caraml("report", *(arguments if "--out" in arguments else [*arguments, "--out", out]))


def test_a_report_on_results_that_cannot_be_written_goes_into_this_folder(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("caraml.cli.results.writable", lambda folder: folder != out)
    assert f"{out} cannot be written: the report goes into {tmp_path}" in caraml("report", "quick", "--format", "csv", "--out", out)
    assert Path("quick.csv").is_file()
    for name in ("quick.md", "quick-figures/"):
        (Path(name).mkdir if name.endswith("/") else Path(name).touch)()
        with pytest.raises(InputError, match=rf"this folder has {name.strip('/')} already: (.|\n)*caraml report --to {name.strip('/')}"):
            caraml("report", "quick", "--format", "svg" if name.endswith("/") else "md", "--out", out)
        assert Path(name).is_dir() or Path(name).read_bytes() == b"", "nobody says that it is CARAML's"
    monkeypatch.setattr("caraml.cli.results.writable", lambda folder: False)
    with pytest.raises(InputError, match=r"this folder cannot be written: nothing(.|\n)*--to quick.html"):
        caraml("report", "quick", "--out", out)


def test_an_option_that_a_verb_does_not_have_is_told_with_those_that_it_has() -> None:
    inside = [f"{group} {name}" for group in ("list", "system", "data") for name in COMMANDS[group].commands]
    for verb in {*COMMANDS, *inside} - {"power"}:  # which starts without the parser of the others
        with pytest.raises(InputError, match=f"^{verb}: unknown option '--hepl'; known: .*--help\n  next step: did you mean '--help'"):
            caraml(*verb.split(), "--hepl")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reslts"], "unknown verb of caraml: 'reslts'; known: (.|\n)*did you mean 'results'"),
        (["data", "prepare", "imags"], "unknown verb of caraml data prepare: 'imags'; known: (.|\n)*did you mean 'images'"),
        (["results", "--jso"], "^results: unknown option '--jso'; known: --out, (.|\n)*did you mean '--json'"),
        (["plan", "--jsn"], "^plan: unknown option '--jsn'; known: (.|\n)*next step: caraml plan --help"),
        (["run", "--no-reprt"], "^run: unknown option '--no-reprt'; known: (.|\n)*did you mean '--no-report'"),
        (["results", "--out"], "^results: Option '--out' requires an argument(.|\n)*next step: caraml results --help"),
        (["report", "--port", "many"], "^report: Invalid value for '--port'(.|\n)*next step: caraml report --help"),
        (["show"], "^show: Missing argument(.|\n)*next step: caraml show --help"),
    ],
)
def test_words_that_a_verb_does_not_take_are_told_with_the_next_step(words: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        caraml(*words)


def test_a_group_of_verbs_without_a_word_shows_its_help() -> None:
    done = CliRunner().invoke(app, ["system"], prog_name="caraml")
    assert done.exit_code == 2 and "Usage: caraml system" in done.output


def test_a_spreadsheet_takes_no_name_for_a_formula(tmp_path: Path) -> None:
    save(Store(tmp_path), make_record(make_point(benchmark="=1+1")))
    assert ",'=1+1," in caraml("results", "--csv", "--out", tmp_path)
    assert ",=1+1" not in caraml("results", "--csv", "--out", tmp_path, "--sql", "SELECT key, benchmark, status FROM records")
