"""Small files that ask for much: each is refused, by a line that names it and the limit, or read within the limits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest

from caraml.__main__ import main
from caraml.analysis.table import read_power, read_ranks, read_steps
from caraml.base import limits
from caraml.base.errors import InputError
from caraml.base.limits import read_bytes, read_text, tail
from caraml.base.toml import read_toml
from caraml.data.store import refuse_unfinished
from caraml.power.model import ChannelEnergy
from caraml.results.claim import Runner
from caraml.results.record import Record
from caraml.results.store import read_listing, read_record
from caraml.suite.expression import Formula
from caraml.suite.jube_script import Element, iterations
from caraml.suite.load import Suite
from caraml.suite.model import Placement
from caraml.suite.placement import ModelShape, misfit
from caraml.workloads.gpt.tokens import read_index
from caraml.workloads.weather.samples import read_scales
from tests.conftest import MakePoint
from tests.security.taken import taken

# -- reading at all --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_bytes, read_text, tail])
def test_a_pipe_and_a_device_are_no_files(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(InputError, match=f"{name}: not a plain file"):
            read(tmp_path / name)


def test_the_end_of_a_log_of_any_size_is_read(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.truncate(8 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"the last words\n")
    found = taken(lambda: tail(tmp_path / "log"))
    found.within_limits()
    assert tail(tmp_path / "log").endswith("the last words\n")


# -- JSON ------------------------------------------------------------------------------------------------------------------


def record_text(make_point: MakePoint, **changes: Any) -> str:
    point = make_point()
    record = Record(key=point.key, attempt=1, point=point, status="ok", started_at="x").model_dump(mode="json")
    return json.dumps({**record, **changes})


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ({"system": {"x": "DEEP"}}, "recursion|depth|not a CARAML record"),
        ({"phases": [{"name": "x", "start": 0, "end": 1}] * 300_000}, "found .* values, at most 500,000"),
        ({"traceback": "x" * (limits.RECORD + 1)}, "at most 16,777,216"),
        ({"energy": {"channels": [{field.name: [] for field in fields(ChannelEnergy)}] * 16_000}}, "id: Input should be a valid string"),
        ({"energy": {"boundaries": {str(n): {} for n in range(49_000)}}}, "not a CARAML record"),
        ({"metrics": {str(n): {} for n in range(49_000)}}, "faults"),
        ({"fingerprint": {"step": 1, "losses": [1] * 490_000}}, "faults"),
        ({"phases": [{"name": "", "start": 0, "end": 1}] * (limits.PHASES + 1)}, f"at most {limits.PHASES} items"),
        ({"flags": [""] * 200_000}, f"at most {limits.FLAGS} items"),
        ({"attempt": 10**300}, "999999999"),
        ({"attempt": -1}, "greater than or equal to 0"),
        ({"key": "../../x"}, "pattern"),
        ({"system": {"x": [[]] * 2_000_000}}, "values, at most 500,000"),
    ],
)
def test_records_that_ask_for_much(what: dict[str, Any], pattern: str, tmp_path: Path, make_point: MakePoint) -> None:
    text = record_text(make_point, **what).replace('"DEEP"', "[" * 400_000 + "]" * 400_000)
    (tmp_path / "record.json").write_text(text)
    taken(lambda: read_record(tmp_path / "record.json")).refused("record.json", pattern)


def test_the_largest_record_that_is_read_stays_within_the_limits(tmp_path: Path, make_point: MakePoint) -> None:
    lists, text = [[]] * (limits.JSON_VALUES - 1000), "\u20ac" * ((limits.RECORD >> 1) // 6)
    (tmp_path / "record.json").write_text(record_text(make_point, system={"x": lists}, traceback=text))
    found = taken(lambda: read_record(tmp_path / "record.json"))
    found.within_limits()
    assert found.refusal is None


def test_listings_that_ask_for_much(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    with path.open("wb") as file:
        file.truncate(limits.LISTING + 1)
    taken(lambda: read_listing(path)).refused("suite.json", "at most 16,777,216")
    path.write_text('{"name": "s", "points": [' + '["a",""],' * (limits.LISTING // 10) + '["a",""]]}')
    taken(lambda: read_listing(path)).within_limits()
    path.write_text("[" * 400_000)
    taken(lambda: read_listing(path)).refused("suite.json", "not a list of a suite's points")


# -- TOML ------------------------------------------------------------------------------------------------------------------

SUITE = 'name = "s"\ntitle = "t"\n[[benchmark]]\nname = "b"\nworkload = "gpt"\n'
TOML_BOMBS = {
    "a key of 20,000 parts": (".".join(["a"] * 20_000) + " = 1\n", "more than 32 deep"),
    "a header of 20,000 parts, and keys": (f"[{'.'.join(['a'] * 20_000)}]\n" + "".join(f"k{n} = 1\n" for n in range(80_000)), "32 deep"),
    "arrays in arrays": ("a = " + "[" * 400_000 + "]" * 400_000 + "\n", "32 deep"),
    "arrays in arrays, not so many": ("a = " + "[" * 200 + "]" * 200 + "\n", "32 deep"),
    "tables in tables": ("a = " + "{a = " * 100 + "1" + "}" * 100 + "\n", "32 deep"),
    "a long key": ("a" * 500_000 + " = 1\n", "500,000 characters in the key"),
    "many values": ("a = [" + "1," * 400_000 + "]\n", "at most 100,000 are read"),
    "more than is read": ("#" * (limits.TOML + 1), "at most 1,048,576"),
    "an integer of 400 digits": (SUITE + f"global_batch = 1{'0' * 400}\n", "more than 64 bits"),
    "an integer of 10,000 digits": (SUITE + f"global_batch = 1{'0' * 10_000}\n", "not valid TOML"),
    "a hexadecimal integer of 100,000 digits": (SUITE + f"global_batch = 0x1{'0' * 100_000}\n", "more than 64 bits"),
    "an integer that is too large": (SUITE + f"global_batch = {10**16}\n", "less than or equal to 1000000000000000"),
}


@pytest.mark.parametrize("name", TOML_BOMBS)
def test_toml_that_asks_for_much(name: str, tmp_path: Path) -> None:
    text, pattern = TOML_BOMBS[name]
    (tmp_path / "suite.toml").write_text(text)
    taken(lambda: read_toml(tmp_path / "suite.toml").validate(Suite)).refused("suite.toml", pattern)


def test_faults_without_end_are_counted(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(SUITE + "nodes = [" + "0," * 90_000 + "]\n")
    found = taken(lambda: read_toml(tmp_path / "suite.toml").validate(Suite))
    found.within_limits()
    assert found.refusal is not None and found.refusal.startswith("50 faults or more") and found.refusal.count("\n") == 51


def test_a_document_as_large_as_may_be_is_read_within_the_limits(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("".join(f"a{n} = 1\n" for n in range(90_000)))
    found = taken(lambda: read_toml(tmp_path / "a.toml"))
    found.within_limits()
    assert found.refusal is None


# -- raw tables ------------------------------------------------------------------------------------------------------------

POWER = "'gpu' AS channel, 'power' AS kind, i / 10 AS t_before, i / 10 + 0.001 AS t_after, 100.0 AS value"
COUNTER = "'gpu' AS channel, 'energy' AS kind, i / 100 AS t_before, i / 100 + 0.001 AS t_after, i * 1.1 AS value"
STEPS = "i AS step, 0 AS rank, 'measure' AS phase, 0.0 AS start, 0.1 AS seconds, 0.0 AS data_wait, 1.0 AS loss"


def parquet(path: Path, columns: str, rows: int) -> Path:
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT {columns} FROM range({rows}) t(i)) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
    return path


CONSTANT = "'gpu' AS channel, 'power' AS kind, 0.0 AS t_before, 0.0 AS t_after, 100.0 AS value"
READERS: dict[str, Callable[[Path], Any]] = {"steps": read_steps, "ranks": read_ranks, "power": read_power, "energy": read_power}


@pytest.mark.parametrize("reader", READERS)
def test_a_small_parquet_file_of_very_many_rows_is_refused(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.analysis.table.ROWS_SCANNED", 2_000_000)  # making a file of more takes minutes
    monkeypatch.setattr("caraml.analysis.table.RANK_ROWS", 2_000_000)
    path = parquet(tmp_path / "power.parquet", CONSTANT, 2_000_001)
    assert path.stat().st_size < 1 << 20
    taken(lambda: READERS[reader](path)).refused("power.parquet", "found 2,000,001 rows, at most 2,000,000 are read")


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "rows"), [("steps", limits.STEPS), ("ranks", limits.RANK_ROWS), ("energy", limits.ROWS)])
def test_as_many_rows_as_may_be_are_read_within_the_limits(reader: str, rows: int, tmp_path: Path) -> None:
    path = parquet(tmp_path / "table.parquet", {"power": POWER, "energy": COUNTER}.get(reader, STEPS), rows)
    found = taken(lambda: READERS[reader](path))
    found.within_limits()
    assert found.refusal is None


def test_more_steps_than_are_taken_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "steps.parquet", STEPS.replace("i AS step", f"i * {limits.STEPS} AS step"), 2)
    taken(lambda: read_steps(path)).refused("steps.parquet", "found 8,640,001 steps, at most 8,640,000")


def test_one_long_word_in_every_row_is_cut(tmp_path: Path) -> None:
    path = parquet(tmp_path / "power.parquet", POWER.replace("'gpu'", "repeat('x', 4_000_000)"), 300)
    assert path.stat().st_size < 1 << 20
    found = taken(lambda: read_power(path))
    found.within_limits()
    assert found.refusal is None or "power.parquet" in found.refusal


def test_a_contents_table_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    path.write_bytes(b"PAR1" + b"\x00" * 100 + (2**31).to_bytes(4, "little") + b"PAR1")
    taken(lambda: read_steps(path)).refused("steps.parquet", "2,147,483,648 bytes of contents table, at most 8,388,608")
    path.write_bytes(b"PAR1" + b"\x15\x04\x19\xfc" * 2_000_000 + (8_000_000).to_bytes(4, "little") + b"PAR1")
    taken(lambda: read_steps(path)).refused("steps.parquet", "is not a table")


CSV_BOMBS = {
    "columns": lambda: ",".join(f"c{n}" for n in range(300_000)) + "\n" + ",".join(["1"] * 300_000) + "\n",
    "a line without end": lambda: "step,rank,phase,seconds,loss\n" + "1" * 20_000_000,
    "quotes": lambda: "step,rank,phase,seconds,loss\n" + '"' * 10_000_000,
}


@pytest.mark.parametrize("name", CSV_BOMBS)
def test_tables_of_text_that_ask_for_much(name: str, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(CSV_BOMBS[name]())
    taken(lambda: read_steps(tmp_path / "steps.csv")).refused("steps.csv", ".")


# -- what should be a file or a folder and is none ---------------------------------------------------------------------------


@pytest.mark.usefixtures("handlers_back")
@pytest.mark.parametrize("kind", ["pipe", "file", "loop"])
@pytest.mark.parametrize("place", ["points", "points/x-0123456789abcdef", "suites/s.json"])
def test_something_else_in_the_place_of_a_folder_or_file_is_named(
    place: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    {"pipe": os.mkfifo, "file": Path.touch, "loop": lambda path: path.symlink_to(path.name)}[kind](path)
    monkeypatch.setattr(sys, "argv", ["caraml", "status", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr()
    assert "Traceback" not in told.err and (path.stem in told.err or "no campaign" in told.out + told.err), told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x" * (limits.LINE + 1), "at most 65,536 are read"),
        ("[" * 20_000, "not readable"),
        ("a: 2001-99-99", "not readable"),
        ("a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")) + "{}: *h", "found "),
    ],
    ids=["long", "deep", "no date", "many times itself"],
)
def test_a_normalization_that_asks_for_much_is_refused(text: str, words: str, tmp_path: Path) -> None:
    for path in (tmp_path / "scales.yml", tmp_path / "scales.json"):
        path.write_text(text.replace("{}", "wind"))
        found = taken(lambda path=path: read_scales(path, ["wind"]))  # type: ignore[misc]
        found.within_limits()
        assert found.refusal is not None and (words in found.refusal or path.suffix == ".json") and len(found.refusal) < 1000


def test_pipes_are_no_corpus_and_no_normalization(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_index, partial(read_scales, names=["wind"])):
        with pytest.raises(InputError, match="not a plain file"):
            read(tmp_path / "pipe")


# -- what is read on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["h\0st 1 2", "../../h 1 2", "h 1", "h 1 2 3", "h 1 x"])
def test_a_claim_that_names_no_runner_is_none(text: str) -> None:
    assert Runner.parse(text) is None and Runner.parse("host~a~b 12 34\n") == Runner("host~a~b", 12, "34")


@pytest.mark.parametrize("text", ["-" * 19_000 + "1", "(" * 5_000 + "1", "1" + "+1" * 9_000])
def test_a_formula_of_too_much_within_each_other_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="cannot be"):
        Formula(text).value()


def test_iterations_of_thousands_of_digits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a whole number"):
        iterations(tmp_path, [Element("step", 1, {"iterations": "9" * 5_000})])


MARKS = {
    "no JSON": {"plan.json": "{"},
    "no table": {"plan.json": "[]"},
    "deep": {"plan.json": "[" * 30_000},
    "long": {"plan.json": " " * (limits.LINE + 1)},
    "no size": {"plan.json": "{}", "0": "1"},
    "a size without end": {"plan.json": '{"gigabytes": 1e308}', "0": "1" + "0" * 400},
    "no number": {"plan.json": '{"gigabytes": 1}', "0": "x"},
    "inputs": {"plan.json": '{"gigabytes": 1, "inputs": 5}'},
}


@pytest.mark.parametrize("name", MARKS)
def test_marks_of_a_set_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    for file, text in MARKS[name].items():
        (tmp_path / file).write_text(text)
    with pytest.raises(InputError, match=r"not the marks of|at most 65,536"):
        refuse_unfinished(tmp_path, tmp_path)


@pytest.mark.parametrize("plan", ['{"gigabytes": 1e6}', '{"gigabytes": 1e-9}'])
def test_marks_that_speak_of_very_many_parts_are_read_within_the_limits(plan: str, tmp_path: Path) -> None:
    for file, text in {"plan.json": plan, "0": "1", "99999999": "1"}.items():
        (tmp_path / file).write_text(text)
    taken(lambda: refuse_unfinished(tmp_path, tmp_path)).refused("", "not whole")


def test_a_placement_of_very_many_samples_or_devices_is_refused_in_time(make_point: MakePoint) -> None:
    shape = ModelShape(layers=8, heads=6, vocabulary=640, sequence_length=64, tied_head=False)
    for changes in ({"devices": 2}, {"nodes": limits.COUNT}):
        point = make_point(global_batch=limits.COUNT, micro_batch=limits.COUNT, placement=Placement(tp=3), **changes)
        with limits.limited():
            assert "does not divide" in str(misfit(point, shape))
