"""Every command in the README and the docs runs and does what the page says.

``quick`` runs once, for real, and is looked at closely: its windows have a number of steps here instead of seconds, so that what was
learned in them does not depend on the speed of the machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from caraml.base.errors import ExitCode
from caraml.cli import app
from caraml.metrics.model import METRICS
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import Store

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BIN = Path(sys.executable).parent


ELSEWHERE = {
    "caraml verify",
    "caraml run quick",
    "caraml run maelstrom",
    "caraml run maelstrom-nonio",
    "caraml verify --system jureca-a100 --launcher slurm --nodes 3",
    "caraml run curves.toml",
    "caraml power --methods ina -- sleep 10",
    "caraml compare quick@1 quick",
    "caraml compare KEY/1 KEY",
    "caraml compare other-results caraml-results --fail-if worse:5%",
}
"""Part of another command of its page, run by the fixture, too long for here, for a machine with Slurm, or for results of two rounds: every
suite of the catalogue is expanded, every workload trained, the ruler proved through a real Slurm, rounds compared, and the templates of
extensions used, in tests of their own."""

SUITES = ROOT / "src" / "caraml" / "suite" / "catalog"
QUICK = (("gpt", 9, 'preset = "4M"', "sequence_length = 32"), ("resnet50", 4, 'model = "resnet50"', "image_size = 32"))
"""Steps after which, in any case, both have learned something, from samples of an eighth and of a 49th of the size: the model, the batch
and the input are those of the suite."""


def run(command: str, folder: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``caraml run quick`` has run."""
    folder = tmp_path_factory.mktemp("quick")
    suite = (SUITES / "quick.toml").read_text(encoding="utf-8")
    for name, steps, model, smaller in QUICK:
        window = f"target = 0.5, min_seconds = 0, max_seconds = 900, min_steps = {steps}, max_steps = {steps}, warm_up_max_seconds = 0.1"
        suite = re.sub(r"^measure = \{ target = 0\.02.*$", f"measure = {{ {window} }}", suite, count=1, flags=re.MULTILINE)
        assert f'name = "{name}"' in suite and suite.count(model) == 1
        suite = suite.replace(model, f"{model}, {smaller}")
    (folder / "quick.toml").write_text(suite)
    done = run("caraml run quick.toml", folder, timeout=1800)
    (folder / "quick.toml").unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture(scope="session")
def records(quick: Path) -> list[Record]:
    return Store(quick / "caraml-results").records("quick")


def test_quick_trains_both_models_on_real_input_with_falling_loss(quick: Path, records: list[Record]) -> None:
    assert [record.point.workload for record in records] == ["gpt", "image_classification"]
    for record in records:
        assert record.status == "ok"
        assert record.facts is not None and record.facts.data["kind"] in ("text", "images") and record.point.mode == "train"
        first, last = record.value("loss_first"), record.value("loss_last")
        assert first is not None and last is not None and last < 0.9 * first
        steps = read_table(Store(quick / "caraml-results").folder(record) / record.files["steps"])
        third = len(steps["loss"]) // 3
        assert sum(steps["loss"][-third:]) < sum(steps["loss"][:third])


def test_quick_s_numbers_agree_with_each_other(records: list[Record]) -> None:
    for record in records:
        window, facts = record.window, record.facts
        assert window is not None and facts is not None
        throughput = record.metrics["throughput"]
        assert throughput.value == pytest.approx(window.items / window.seconds)
        if throughput.low is None or throughput.high is None:  # other work on the machine made the steps too erratic
            assert throughput.reason and "imprecise" in record.flags
        else:
            assert throughput.low < throughput.value < throughput.high  # type: ignore[operator]
        assert record.value("achieved_flops_per_device") == pytest.approx(facts.flops_per_item * throughput.value)  # type: ignore[operator]
        assert all(metric.value is not None or metric.reason for metric in record.metrics.values())
        phases = [phase.name for phase in record.phases]
        assert phases.index("first_step") < phases.index("warm_up") < phases.index("measure")
        assert record.value("other_cpu_share") is not None or record.metrics["other_cpu_share"].reason


def test_quick_says_where_its_page_is(quick: Path) -> None:
    text = (quick / "stdout").read_text()
    assert "report: caraml-results/quick.html" in text
    page = (quick / "caraml-results" / "quick.html").read_text(encoding="utf-8")
    assert "gpt b8 fp32" in page and "resnet50 b8 fp32" in page


def test_quick_s_page_shows_the_records_numbers(quick: Path, records: list[Record]) -> None:
    class Cells(HTMLParser):
        values: set[str]

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.values |= {value for name, value in attributes if name == "value" and value}

    parser = Cells()
    parser.values = set()
    parser.feed((quick / "caraml-results" / "quick.html").read_text(encoding="utf-8"))
    for record in records:
        for name in ("throughput", "step_time_median", "peak_memory"):
            assert any(_same(text, record.value(name)) for text in parser.values), name


def _same(text: str, value: float | None) -> bool:
    try:
        return value is not None and float(text) == pytest.approx(value, rel=1e-9)
    except ValueError:
        return False


def test_show_explains_every_number_of_quick(quick: Path, records: list[Record]) -> None:
    for record in records:
        text = run(f"caraml show {record.key}", quick).stdout
        for name in record.metrics:
            assert METRICS[name].title.format(item=record.item).split(",")[0] in text, name
        known = [METRICS[name] for name, metric in record.metrics.items() if metric.value is not None]
        assert text.count("source:") >= len([one for one in known if one.source or one.sensor])


def commands(page: Path) -> list[str]:
    """Commands of a page's code blocks, indented or fenced."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^(?:    )?(caraml .*)$", re.sub(r"```toml.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return [command.split("  #")[0].strip() for command in found]


def runnable(command: str) -> bool:
    """A command, not the pattern of one."""
    return not re.search(r"\[-|\.\.\.|\b(INPUT|PREFIX|DIR|FILE|NAME|COMMAND|FOLDER)\b", command)


SMALLEST = {"width": 32, "layers": 1, "heads": 2, "sequence_length": 16, "vocab_size": 64}
"""What a page's GPT is where the page says nothing else of it."""


def shortened(suite: str) -> str:
    """The same suite with windows of few steps, short sums and small samples, GPTs as small as the page leaves them: no page says how long
    they are."""
    suite = suite.replace("range(10**7)", "range(10**5)").replace("image_size = 64", "image_size = 32")
    window = "min_seconds = 0, max_seconds = 60, min_steps = 4, max_steps = 8"
    suite = re.sub(r"\bmin_seconds = [\d.]+, max_seconds = [\d.]+(, min_steps = \d+)?", window, suite)
    suite = re.sub(r"\bwarm_up_max_seconds = [\d.]+", "warm_up_max_seconds = 0.01", suite)
    return re.sub(r'^params = \{ preset = "4M"(?=.*\bdata\b).*(?= \}$)', _smallest, suite, flags=re.MULTILINE)


def _smallest(params: re.Match[str]) -> str:
    return ", ".join([params[0], *(f"{key} = {value}" for key, value in SMALLEST.items() if f" {key} = " not in params[0])])


WITH_COMMANDS = [page for page in PAGES if any(command not in ELSEWHERE for command in filter(runnable, commands(page)))]


MARKS = {"verify.md": pytest.mark.exclusive}
"""Pages whose commands judge this machine, with nothing beside them."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARKS.get(page.name, ()), id=str(page.relative_to(ROOT))) for page in WITH_COMMANDS]
)
def test_the_commands_of_a_page_run(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    key = "KEY"
    if any("verify" not in command for command in commands(page)):  # others may read results
        shutil.copytree(request.getfixturevalue("quick") / "caraml-results", tmp_path / "caraml-results")
        key = request.getfixturevalue("records")[0].key
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("some words to learn, again and again\n" * 200)
    (tmp_path / "train.py").write_text("print(sum(i * i for i in range(10**6)))\n")
    for name, body in re.findall(r"```(?:toml|python)\n# file: (\S+)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        (tmp_path / name).write_text(shortened(body))
    for command in filter(runnable, commands(page)):
        if command in ELSEWHERE:
            continue
        done = run(command.replace("KEY", key), tmp_path)
        verdicts = (0, ExitCode.WORSE, ExitCode.UNDECIDED) if command.startswith("caraml check") else (0,)
        assert done.returncode in verdicts, f"{page.name}: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


AGAIN = re.findall(r"\| `caraml run ([^`]+)` \|", (ROOT / "docs" / "published.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("words", AGAIN)
def test_what_was_published_can_be_planned_on_its_machine(words: str, tmp_path: Path) -> None:
    """No Slurm is asked: the scripts of the points are those that a person would start."""
    planned = CliRunner().invoke(app, ["plan", *shlex.split(words), "--launcher", "print", "--out", str(tmp_path / "results")])
    assert planned.exit_code == 0, planned.output + str(planned.exception)
    counts = re.match(r"\d+ points?: (\d+) to run", planned.stdout)
    assert counts is not None and int(counts[1]) > 0 and not (tmp_path / "results").exists()


def test_every_verb_that_a_page_names_exists() -> None:
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for page in PAGES:
        named = {match.split()[1] for match in re.findall(r"`(caraml [a-z]+)\b[^`]*`", page.read_text(encoding="utf-8"))}
        assert named <= verbs, page


def test_every_link_of_the_readme_leads_somewhere() -> None:
    """Those of the pages are looked at when the site is built."""
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_the_items_of_the_changelog_are_whole_and_stand_there_once() -> None:
    """Two changes of one item, merged line by line, leave the beginning of one before the other."""
    items = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n- ")[1:]
    assert [item for item in items if not item.split("\n\n")[0].rstrip().endswith((".", ")"))] == []
    begun = [item[:60] for item in items]
    assert [one for one in begun if begun.count(one) > 1] == []


def test_the_readme_s_commands_are_make_s() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\w+)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert json.dumps("make test")[1:-1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
