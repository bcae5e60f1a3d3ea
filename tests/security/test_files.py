"""What another user can plant where this user's files will be: links under every name that can be guessed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.base import files
from caraml.base.errors import InputError
from caraml.base.files import write_at
from caraml.campaign.attempt import note_handle
from caraml.cli import app
from caraml.power.result import ResultFolder
from caraml.results.archive import pack
from caraml.results.claim import RUNNERS, Runner, alive, myself, take_over
from caraml.results.finish import Failure, note_failure
from caraml.results.record import Record
from caraml.results.rows import write_table
from caraml.results.status import ProgressWriter
from caraml.results.store import Listing, Store, write_record
from caraml.suite.model import Point
from tests.conftest import MakePoint
from tests.security.users import ATTACKER, as_user, needs_two_users, own_folder

pytestmark = pytest.mark.processes

PRECIOUS = "export PATH"


def a_record(point: Point) -> Record:
    return Record(key=point.key, attempt=1, point=point, status="ok", started_at="x")


Action = Callable[[Path, Point], object]
"""What the victim does in a folder of the attacker: the root of a store whose one attempt is ``points/.../1``."""


def attempt_of(root: Path, point: Point) -> Path:
    return root / "points" / f"{point.workload}-{point.key}" / "1"


ACTIONS: dict[str, tuple[list[str], Action]] = {
    "list results": ([".index.jsonl.PID.tmp"], lambda root, point: Store(root).rows()),
    "write a record": (
        ["points/NAME/1/.record.json.PID.tmp"],
        lambda root, point: write_record(attempt_of(root, point), a_record(point)),
    ),
    "note a handle": (["points/NAME/1/.handle.tmp"], lambda root, point: note_handle(attempt_of(root, point), "local:1:2", "local")),
    "write a table": (
        ["points/NAME/1/.steps.PID.csv", "points/NAME/1/.steps.PID.parquet"],
        lambda root, point: write_table(attempt_of(root, point), "steps", ("step",), [(1,)]),
    ),
    "say how far it is": (["points/NAME/1/progress.jsonl"], lambda root, point: _tried(lambda: _progress(attempt_of(root, point)))),
    "take over": (["points/NAME/1/.claim.PID.tmp"], lambda root, point: take_over(attempt_of(root, point), 1, myself())),
    "ask for the time": ([f"{RUNNERS}/.PID.now"], lambda root, point: _tried(lambda: alive(Runner("other~1~2", 1, "1"), root))),
    "fail": (
        ["points/NAME/1/.failure.json.PID.tmp"],
        lambda root, point: note_failure(attempt_of(root, point), Failure(status="failed", reason="r", rank=0, started_at="x")),
    ),
    "remember a suite": (["suites/.s.json.PID.tmp"], lambda root, point: Store(root).remember(Listing(name="s", points=[(point.key, "")]))),
    "pack": ([".all.zip.tmp"], lambda root, point: _packed(root, point)),  # noqa: PLW0108 -- defined below
    "write a part": (["part.bin"], lambda root, point: _tried(lambda: write_at(root / "part.bin", 0, b"part"))),
    "measure a command": (["readings.csv", ".energy.json.PID"], lambda root, point: ResultFolder(root, "csv", None)),
}


def _progress(folder: Path) -> None:
    writer = ProgressWriter(folder, 0.0)
    writer.write("measure", steps=1)
    writer.close()


def _packed(root: Path, point: Point) -> None:
    Store(root).remember(Listing(name="s", points=[(point.key, "")]))
    pack(root, "s", root / "all.zip")


def _tried(act: Callable[[], object]) -> None:
    """Refusing is an answer, too; only what the link points to must stay."""
    with suppress(OSError):
        act()


@pytest.fixture
def attacked(shared: Path, make_point: MakePoint) -> tuple[Path, Point, Path]:
    """A store of the attacker with one record, its point, and a file of the victim that only the victim may write."""
    point = make_point()
    root = own_folder(shared, "results", ATTACKER)
    (root / RUNNERS).mkdir()
    (root / "suites").mkdir()
    attempt = attempt_of(root, point)
    attempt.mkdir(parents=True)
    (attempt / "record.json").write_text(a_record(point).model_dump_json())
    for path in (root, *root.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER)
        path.chmod(0o777)
    home = own_folder(shared, "home", os.geteuid(), 0o755)
    precious = home / ".bashrc"
    precious.write_text(PRECIOUS)
    os.utime(precious, (0, 0))
    return root, point, precious


@needs_two_users
@pytest.mark.parametrize("name", ACTIONS)
def test_nothing_is_written_through_a_planted_link(name: str, attacked: tuple[Path, Point, Path]) -> None:
    (root, point, precious), (places, action) = attacked, ACTIONS[name]

    def plant() -> int:
        count = 0
        for place in (place.replace("NAME", f"{point.workload}-{point.key}") for place in places):
            (root / place.replace("PID", str(os.getppid()))).symlink_to(precious)
            count += 1
        return count

    assert as_user(ATTACKER, plant)
    action(root, point)
    assert precious.read_text() == PRECIOUS and precious.stat().st_mtime == 0


@needs_two_users
def test_reading_leaves_nothing_in_a_folder_of_somebody_else(attacked: tuple[Path, Point, Path]) -> None:
    root, _, _ = attacked
    before = sorted(root.rglob("*"))

    def read() -> int:
        store = Store(root)
        alive(Runner("other~1~2", 1, "1"), root)
        return len(store.rows()) + len(store.records())

    assert read() == 2
    assert sorted(root.rglob("*")) == before
    os.chown(root, os.geteuid(), os.getegid())
    assert read() == 2
    assert (root / "index.jsonl").exists(), "in a folder of one's own, reading keeps an index"


READING = (
    *(
        ("results",),
        ("results", "s", "--csv"),
        ("results", "--sql", "select * from records"),
        ("show", "KEY"),
        ("status",),
        ("logs", "KEY"),
    ),
    *(("compare", "s", "s"), ("scaling",), ("history",), ("advise",), ("report", "s", "--to", "page.html")),
    *(("report", "s"), ("report", "--format", "csv"), ("report", "--format", "md")),
)


@needs_two_users
@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_verb_that_reads_writes_nothing_into_a_folder_of_somebody_else(
    words: tuple[str, ...], attacked: tuple[Path, Point, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, point, _ = attacked
    Store(root).remember(Listing(name="s", points=[(point.key, "")]))
    for path in (root / "suites").iterdir():
        os.chown(path, ATTACKER, ATTACKER)
    monkeypatch.chdir(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))}
    done = CliRunner().invoke(app, [*(point.key if word == "KEY" else word for word in words), "--out", str(root)])
    assert {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))} == before
    if words[0] != "report":
        return
    assert done.exit_code == 0 and list(tmp_path.iterdir()), (done.output, done.exception)
    said = f"{root} belongs to user {ATTACKER}: the report goes into {tmp_path}"
    assert (said in done.output) is ("--to" not in words)


@needs_two_users
def test_a_report_with_no_place_of_its_own_asks_for_one(
    attacked: tuple[Path, Point, Path], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, _ = attacked
    monkeypatch.chdir(own_folder(shared, "elsewhere", ATTACKER))
    done = CliRunner().invoke(app, ["report", "--out", str(root)])
    assert isinstance(done.exception, InputError) and "--to" in str(done.exception) and list(Path().iterdir()) == []


@needs_two_users
def test_a_library_writes_into_the_folder_that_was_made_for_it(shared: Path) -> None:
    """The owner of the folder swaps the new folder for a link as soon as it is there."""
    root, home = own_folder(shared, "results", ATTACKER), own_folder(shared, "home", os.geteuid(), 0o755)
    (home / "power.parquet").write_text(PRECIOUS)

    def swap() -> None:
        (made,) = root.glob(".power.parquet.*.tmp")
        made.rename(root / "aside")
        made.symlink_to(home)

    with files.replacing_by_name(root / "power.parquet") as inside:
        as_user(ATTACKER, swap)
        inside.write_text("numbers")
    assert (home / "power.parquet").read_text() == PRECIOUS
    assert (root / "power.parquet").read_text() == "numbers"
