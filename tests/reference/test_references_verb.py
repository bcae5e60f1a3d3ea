"""``caraml references``, and the table ``reference`` of ``caraml results --sql``."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.analysis.table import query
from caraml.base.errors import InputError
from caraml.cli import app
from caraml.reference import FIELDS, load
from caraml.results.store import Store


def references(*options: str) -> str:
    done = CliRunner().invoke(app, ["references", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_without_a_filter_it_lists_the_tables() -> None:
    text = references()
    assert "pearc: Nasari" in text
    assert any("Table 37" in line and "jureca-mi250" in line and "12 runs, 192 numbers" in line for line in text.splitlines())


def test_rows_show_our_unit_the_printed_one_and_the_notes() -> None:
    text = references("--table", "18", "--metric", "runtime")
    assert len(text.splitlines()) == 1 + 9 + 1
    assert "11,990 s" in text or "11.99 ks" in text
    assert "printed 11991.1 s" in text
    assert "[1] misprint: 1199.11 fits the training time" in text


def test_a_machine_is_found_by_any_of_its_names() -> None:
    own = references("--system", "jureca-ipu", "--csv")
    assert own == references("--system", "GC200", "--csv") == references("--system", "jureca-gc200", "--csv")
    assert references("--system", "discoverer", "--csv").count("discoverer-plus") == 4
    with pytest.raises(InputError, match="unknown system 'jureca-a10'"):
        references("--system", "jureca-a10")
    with pytest.raises(InputError, match="no source has a number of lumi-c"):
        references("--system", "LUMI-C")


def test_action_is_called_as_ours_is() -> None:
    """Energy of the nodes times the whole run's time; ``energy_time_product`` is of devices and the window."""
    assert references("--metric", "action", "--csv").count(",action,") == 39
    with pytest.raises(InputError, match="unknown metric 'energy_time_product'"):
        references("--metric", "energy_time_product")


def test_a_workload_is_found_by_its_short_name() -> None:
    assert references("--workload", "AP3", "--csv") == references("--workload", "radiation_emulation", "--csv")


def test_filters_that_no_number_meets_together_are_refused() -> None:
    with pytest.raises(InputError, match="no published number has all of --source 'caraml' --table '2'"):
        references("--source", "caraml", "--table", "2")


def test_files_hold_every_column() -> None:
    rows = list(csv.DictReader(io.StringIO(references("--source", "pearc", "--csv"))))
    assert tuple(rows[0]) == FIELDS
    assert len(rows) == sum(row.source == "pearc" for row in load())
    content = json.loads(references("--source", "pearc", "--table", "4", "--metric", "throughput", "--json"))["rows"]
    assert [row["value"] for row in content][-1] == 21547
    assert json.loads(content[0]["parameters"]) == {"batch": 512}


@pytest.mark.parametrize("verb", ["references", "results"])
def test_two_forms_are_not_one_answer(verb: str) -> None:
    said = CliRunner().invoke(app, [verb, "--csv", "--json"]).exception
    assert isinstance(said, InputError) and "--csv and --json do not go together" in str(said)


def test_a_wrong_filter_is_told() -> None:
    with pytest.raises(InputError, match="did you mean 'radiation_emulation'"):
        references("--workload", "radiation_emulatoin")
    with pytest.raises(InputError, match="unknown table 'Table 99'; known: ") as refused:
        references("--table", "99")
    assert refused.value.hint == "caraml references lists the tables", "it was Table 9, which has other numbers"


def test_sql_sees_the_published_numbers(tmp_path: Path) -> None:
    (tmp_path / "points").mkdir()
    store = Store(tmp_path)
    assert query(store, "SELECT count(*), count(value) FROM reference")[1] == [(len(load()), sum(row.value is not None for row in load()))]
    columns, found = query(
        store,
        "SELECT system, avg(value) / 3600 AS wh FROM reference WHERE source = 'maelstrom' AND metric = 'device_energy' "
        "AND workload = 'tweet_rain_classification' AND \"table\" LIKE 'Table %' AND devices = 1 GROUP BY system ORDER BY wh",
    )
    assert columns == ["system", "wh"]
    assert [(system, round(wh, 2)) for system, wh in found] == [
        ("jureca-h100", 11.77),
        ("jureca-a100", 12.92),
        ("e4-gh200", 15.13),
        ("e4-a2", 17.70),
    ]
    flags = query(store, "SELECT DISTINCT parameters->>'flags' FROM reference WHERE \"table\" = 'Table 17' ORDER BY 1")[1]
    assert flags == [("-dl_test -nocache",), ("-nocache",), (None,)]
    assert query(store, "SELECT count(*) FROM records JOIN reference USING (workload)")[1] == [(0,)]


def test_the_manual_s_comparison_is_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its intervals were those of an earlier method."""
    monkeypatch.setenv("COLUMNS", "140")
    sides = [f"reference:maelstrom/{table}" for table in (12, 13)]
    metrics = [word for name in ("epoch_time_mean", "device_energy") for word in ("--metric", name)]
    said = CliRunner().invoke(app, ["compare", *sides, *metrics], catch_exceptions=False).stdout.splitlines()
    manual = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    begin = said.index("tweet_rain_classification 1x4 (runs of A: 3, of B: 3)")
    for line in said[begin : begin + 4]:
        assert f"    {line.rstrip()}\n" in manual
