"""The verbs over several results, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from record_factory import make_point, make_record, save
from run_factory import repeats, run
from typer.testing import CliRunner

from caraml.cli import app
from caraml.results.store import Listing, Store, write_record
from tests.stores import remember_suite


def caraml(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caraml", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "160"}, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two campaigns: `new` is 10 % slower at one of two batches; and a scaling sweep with raw steps."""
    root = tmp_path_factory.mktemp("verbs")
    store, names = Store(root), {"old": "caraml 1", "new": "caraml 2"}
    for name, software in names.items():
        keys = []
        for batch, rate in ((16, 1000.0), (32, 1900.0)):
            slow = 0.9 if name == "new" and batch == 32 else 1.0
            for made in repeats([rate * slow * f for f in (0.999, 1.0, 1.001)], global_batch=batch, energy=1.0, software=software):
                day = 1 + made.point.repeat + 3 * (name == "new")
                record = made.model_copy(update={"started_at": f"2026-10-0{day}T12:00:00+00:00"})
                write_record(store.new_attempt(record.point), record)
                keys.append(record.key)
        remember_suite(store, name, keys)
    sizes = [
        save(
            store,
            make_record(make_point(params={"layers": 8}, devices=n, global_batch=32, micro_batch=32 // n), step=0.1 / n**0.9, watts=100.0),
            n,
        )
        for n in (1, 2, 4)
    ]
    remember_suite(store, "sizes", [record.key for record in sizes])
    return root


def test_compare_says_what_is_worse_and_fails_if_asked(out: Path) -> None:
    plain = caraml("compare", "old", "new", "--out", out)
    assert plain.returncode == 0, plain.stderr
    assert re.search(r"^Throughput .* -10\.0 % .* worse", plain.stdout, re.MULTILINE)
    assert "software" in plain.stdout and "caraml 2" in plain.stdout
    gated = caraml("compare", "old", "new", "--out", out, "--fail-if", "worse:5%")
    assert gated.returncode == 1 and "failed: gpt-mini b32 fp32: Throughput -10.0 %" in gated.stdout
    assert "b16" not in gated.stdout[gated.stdout.index("failed:") :].replace("note", "")
    large = caraml("compare", "old", "new", "--out", out, "--fail-if", "worse:20%", "--metric", "throughput")
    assert large.returncode == 0 and "passed: nothing is shown to be worse by 20 % or more" in large.stdout


@pytest.mark.parametrize("side", ["old", "new"])
def test_no_comparison_passes_with_a_record_that_cannot_be_read(tmp_path: Path, side: str) -> None:
    store = Store(tmp_path)
    for name in ("old", "new"):
        made = [one for batch in (16, 32) for one in repeats([999.0, 1000.0, 1001.0], global_batch=batch, software=name)]
        for record in made:
            write_record(store.new_attempt(record.point), record)
        remember_suite(store, name, [record.key for record in made])
    gate = ["compare", "old", "new", "--fail-if", "worse:20%", "--metric", "throughput", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, gate).exit_code == 0
    path = store.folder(store.records(side)[0]) / "record.json"
    path.write_text("{")
    for words in (gate, ["results", side, "--json", "--out", str(tmp_path)]):
        done = CliRunner().invoke(app, words)
        assert (
            done.stderr.startswith("caraml: 1 record cannot be read, taken as invalid:\n  points/gpt-") and "caraml retry " in done.stderr
        )
        if words == gate:
            assert done.exit_code == 1 and "passed" not in done.stdout and "failed: cannot be read: points/gpt-" in done.stdout
        else:
            found = json.loads(done.stdout)["rows"]
            assert done.exit_code == 0 and [row["status"] for row in found] == ["invalid", *["ok"] * 5]
    assert path.read_text() == "{"


def test_a_record_of_an_earlier_round_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """`status` of the round ended, and `history` and the verbs on a round went on without it and said nothing."""
    store, key = Store(tmp_path), ""
    for night in range(4):
        record = repeats([1000.0 + night])[0].model_copy(update={"attempt": night + 1})
        key = record.key
        store.remember(Listing(name="s", points=[(key, "")]), anew=True)
        write_record(store.new_attempt(record.point), record)
    path = store.folder(store.records("s")[0]).parent / "2" / "record.json"
    path.write_text("{")
    told = f"points/{path.parents[1].name}/2/record.json: not a CARAML record"
    for words in (["history", "s"], ["results", "s@2"], ["results", "s@2", "--csv"], ["show", "s@2"], ["report", "s@2", "--format", "csv"]):
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
        assert done.stderr.startswith(f"caraml: 1 record cannot be read, taken as invalid:\n  {told}"), (words, done.output, done.exception)
    done = CliRunner().invoke(app, ["status", "s@2", "--out", str(tmp_path)], env={"COLUMNS": "1000"})
    assert done.exit_code == 1 and "1 point: 1 invalid" in done.stdout and told in done.stdout
    path.parents[1].joinpath("4", "record.json").write_text("{")
    done = CliRunner().invoke(app, ["results", "--sql", "select count(*) from records", "--out", str(tmp_path)])
    assert done.stderr.startswith("caraml: 1 record cannot be read") and done.exit_code == 0


def test_compare_in_markdown(out: Path) -> None:
    done = caraml("compare", "old", "new", "--out", out, "--markdown")
    assert done.returncode == 0 and "| metric | A | B | B against A | shown from | verdict |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "old", "nwe"), "did you mean 'new'?"),
        (("compare", "old", "new", "--fail-if", "5%"), "expected `worse`"),
        (("compare", "old", "new", "--metric", "through"), "unknown metric 'through'"),
        (("scaling", "old"), "differ in the number of devices only"),
        (("history", "--metric", "speed"), "unknown metric 'speed'"),
        (("advise", "nothing"), "no suite, tag or point"),
    ],
)
def test_wrong_input_ends_with_2_and_a_next_step(out: Path, arguments: tuple[str, ...], words: str) -> None:
    done = caraml(*arguments, "--out", out)
    assert done.returncode == 2 and words in done.stderr, done.stdout + done.stderr


def test_scaling_shows_efficiency_laws_matrices_steps_and_ranks(out: Path) -> None:
    done = caraml("scaling", "sizes", "--out", out, "--efficiency", "90")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^4 +1 +32 .* 0\.87", done.stdout, re.MULTILINE), "4 ** 0.9 / 4 = 0.871"
    for words in (
        "Amdahl: serial share",
        "below efficiency 90 % beyond",
        "Time to solution",
        "0.29, 1 → 4",
        "elbow",
        "behind the median rank",
    ):
        assert words in done.stdout, words


def test_history_needs_enough_results_and_finds_changes(out: Path) -> None:
    done = caraml("history", "--out", out)
    assert done.returncode == 0 and "gpt-mini b32 fp32" in done.stdout
    assert re.search(r"-10\.0 %. Changed with it: software: caraml 1 → caraml 2", done.stdout)


def test_advise_names_the_best_and_its_limit(out: Path) -> None:
    done = caraml("advise", "old", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "best for time: b32; the next costs +90.0 %" in done.stdout
    assert "best for energy: indistinguishable: b16, b32" in done.stdout or "best for energy: indistinguishable: b32, b16" in done.stdout
    done = caraml("advise", "sizes", "--out", out)
    assert re.search(r"beyond 2 devices, 4 cost .* energy for -46\.\d % .*time", done.stdout)


def test_one_run_has_nothing_to_advise(tmp_path: Path) -> None:
    record = run(1000)
    write_record(Store(tmp_path).new_attempt(record.point), record)
    done = caraml("advise", "--out", tmp_path)
    assert done.returncode == 2 and "no work was run in two ways" in done.stderr
