"""Records, logs and files that others wrote, in a terminal: no byte of theirs commands it, whichever verb shows them."""

from __future__ import annotations

import ast
import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from caraml.__main__ import main
from caraml.base.format import printable
from caraml.cli import app
from caraml.metrics.model import Metric
from caraml.power.__main__ import watch
from caraml.report.progress import LiveTable, LogLines
from caraml.report.tables import plain_table
from caraml.results.record import Record
from caraml.results.store import Listing, Store, write_record
from tests.conftest import MakePoint
from tests.security.users import ROOT

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\b\x7f\u202e"
"""Clears the screen, names the window, recolours in one byte, goes back, and turns the direction of writing."""
COMMANDS = [*map(chr, range(9)), *map(chr, range(11, 32)), *map(chr, range(127, 160)), "\u202e"]


@pytest.fixture
def root(tmp_path: Path, make_point: MakePoint) -> Path:
    """Results in which every text is hostile."""
    store = Store(tmp_path / "out")
    point = make_point(suite="evil", benchmark=f"name{EVIL}", variant=EVIL, params={"x": EVIL}, device=f"GPU{EVIL} x1", system=f"s{EVIL}")
    folder = store.new_attempt(point)
    metric = Metric(value=1.0, unit=f"thing/s{EVIL}", scope=EVIL, reason=EVIL)
    record = Record(key=point.key, attempt=1, point=point, status="failed", reason=f"why{EVIL}", started_at=EVIL, flags=[f"flag{EVIL}"],
                    metrics={"throughput": metric}, system={"name": EVIL}, environment={"python": EVIL}, traceback=EVIL)  # fmt: skip
    write_record(folder, record)
    (folder / "worker.log").write_text(f"line{EVIL}\nnext\n")
    store.remember(Listing(name="evil", title=EVIL, comment=EVIL, tags=[EVIL], system=EVIL, points=[(point.key, f"label{EVIL}")]))
    return tmp_path / "out"


def commands_in(text: str) -> list[str]:
    return [character for character in text if character in COMMANDS]


@pytest.mark.parametrize(
    "words",
    [
        ["show", "{key}"],
        ["logs", "{key}"],
        ["status"],
        ["results"],
        ["results", "--csv"],
        ["results", "--json"],
        ["results", "--sql", "select label, reason from records"],
        ["results", "--csv", "--sql", "select label, reason from records"],
        ["history"],
        ["cancel", "label"],
    ],
    ids=" ".join,
)
def test_no_verb_lets_a_record_command_the_terminal(words: list[str], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "")
    key = Store(root).current("evil")[0].points[0][0]
    done = CliRunner().invoke(app, [*(word.format(key=key) for word in words), "--out", str(root)])
    said = done.output + str(done.exception or "")
    assert "\N{REPLACEMENT CHARACTER}" in said or words[0] in ("history", "cancel") or "--json" in words, said
    assert commands_in(done.output) == [], done.output


@pytest.mark.usefixtures("handlers_back")
def test_a_wrong_file_s_words_are_told_without_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "evil.toml"
    suite.write_text(
        'name = "\\u001b[2J\\u009b31m"\ntitle = "t"\n"\\u001b[2Jkey" = 1\n[[benchmark]]\nname = "b"\nworkload = "\\u001bgpt"\n'
    )
    monkeypatch.setattr("sys.argv", ["caraml", "plan", str(suite)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and "evil.toml" in said.err and commands_in(said.out + said.err) == []


def test_a_terminal_s_tables_keep_their_own_colours_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from caraml.cli import console

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    screen = console()
    with screen.capture() as captured:
        screen.print(f"mine{EVIL}", style="bold red")
    said = captured.get()
    assert said.startswith("\x1b[1;31mmine") and said.rstrip("\n").endswith("\x1b[0m"), said
    assert "\x1b[2J" not in said and "\x9b" not in said and "\x1b]0" not in said


def test_a_campaign_s_lines_are_lines(make_point: MakePoint) -> None:
    stream = io.StringIO()
    LogLines(stream).started(make_point(benchmark=f"a{EVIL}\nb"), 0, 1)
    assert commands_in(stream.getvalue()) == [] and stream.getvalue().count("\n") == 1


def test_text_stays_as_long_as_it_was() -> None:
    assert printable("a\x1bb\n") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    assert printable("a\x1b\tb\n", lines=True) == "a\N{REPLACEMENT CHARACTER}\tb\n" and printable("é – 漢") == "é – 漢"


def test_verbs_print_through_one_place() -> None:
    for path in (*(ROOT / "src" / "caraml" / "cli").glob("*.py"), ROOT / "src" / "caraml" / "__main__.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("print", "typer.secho", "sys.stdout.write", "Console"), f"{path}: {name}"
                assert name != "typer.echo" or path.name == "__init__.py", path


@pytest.mark.parametrize("label", ["a[/b]", "a[link=http://elsewhere]b[/link]", "[red]a"])
def test_nothing_in_a_table_is_read_as_markup(label: str, make_point: MakePoint) -> None:
    """A bracket in a parameter ended the campaign, or the reason of an imported record was a link."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="truecolor")
    table = LiveTable(screen)
    table.started(make_point(variant=label), 0, 1)
    screen.print(table._table())
    screen.print(plain_table([label], [["1"]]))
    assert isinstance(screen.file, io.StringIO) and screen.file.getvalue().count(label) >= 2
    assert "\x1b]8" not in screen.file.getvalue()


def test_nothing_in_the_live_table_commands_the_terminal(make_point: MakePoint) -> None:
    screen = Console(file=io.StringIO(), width=120)
    table = LiveTable(screen)
    table.started(make_point(variant=EVIL), 0, 1)
    screen.print(table._table())
    assert isinstance(screen.file, io.StringIO) and commands_in(screen.file.getvalue()) == []


def test_a_meter_s_file_does_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meter = tmp_path / "meter.csv"
    meter.write_text(f"time,power_w,channel\n{time.time() - 1},300,a\x1b[2Jb\n")
    assert watch([f"csv:{meter}"], seconds=0.2, every=0.1) == 0
    assert "meter.csv a\N{REPLACEMENT CHARACTER}[2Jb" in (said := capsys.readouterr().out) and commands_in(said) == []
