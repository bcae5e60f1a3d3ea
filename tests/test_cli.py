"""The command line as a user meets it: instant help, exit codes, tables, and errors that name the next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TINY = """
name = "tiny"
title = "Tiny"
[[benchmark]]
name = "net"
workload = "gpt"
global_batch = [2, 3]
micro_batch = 2
params = { preset = "4M", width = 16, layers = 1, heads = 1, sequence_length = 8, vocab_size = 64, data = "synthetic" }
measure = { target = 0.5, min_seconds = 0.2, min_steps = 4, max_steps = 40, max_seconds = 60, warm_up_max_seconds = 1, idle_seconds = 0.2 }
"""


def caraml(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caraml", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "120", **environment}, check=False
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one run of a tiny suite, with a made-up power sensor."""
    root = tmp_path_factory.mktemp("cli")
    (root / "tiny.toml").write_text(TINY)
    done = caraml("run", root / "tiny.toml", "--out", root / "out", CARAML_POWER="fake:constant")
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "stdout").write_text(done.stdout)
    return root / "out"


def test_help_and_list_import_nothing_heavy() -> None:
    heavy = "torch,numpy,duckdb,timm,transformers,torchvision"
    for arguments in (["--help"], ["list", "--help"], ["list", "workloads"], ["list", "suites"], ["run", "--help"]):
        code = (
            "import sys\nfrom caraml.__main__ import main\n"
            f"sys.argv = ['caraml', *{arguments!r}]\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            f"print('LOADED', sorted(set({heavy!r}.split(',')) & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "LOADED []" in done.stdout, (arguments, done.stdout[-200:])


@pytest.mark.parametrize(
    ("verb", "driver", "own", "told"),
    [
        ("plan", "/proc", None, "PCI_BUS_ID"),
        ("plan", "/proc", "FASTEST_FIRST", "FASTEST_FIRST"),
        ("power", "/proc", None, "None"),
        ("plan", "/no/such", None, "None"),
    ],
)
def test_gpus_are_counted_as_their_driver_does_unless_the_user_says_otherwise(verb: str, driver: str, own: str | None, told: str) -> None:
    """A program that `caraml power` starts is somebody else's, and what no driver of NVIDIA's is there for stands in no record."""
    others = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    code = f"import os, caraml.power.__main__\nfrom caraml import __main__ as start\nstart.NVIDIA = start.Path({driver!r})\n"
    code += "told = lambda *words, **options: print(os.environ.get('CUDA_DEVICE_ORDER'))\n"
    code += "start.verbs, caraml.power.__main__.main = lambda: told, told\nstart.main()"
    environment = others if own is None else {**others, "CUDA_DEVICE_ORDER": own}
    done = subprocess.run([sys.executable, "-c", code, verb], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{told}\n"


def test_parameters_of_a_workload_are_read_without_torch() -> None:
    """What plans a campaign waits for no library that only its workers need."""
    code = (
        "import sys\nfrom caraml.workloads import WORKLOADS, params_of\n"
        "for name in [*WORKLOADS, 'known']:\n    params_of(name)\n    assert 'torch' not in sys.modules, name\n"
        "print(len(WORKLOADS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 5, done.stderr[-500:]


def test_a_run_logs_lines_and_ends_with_a_table_and_a_page(out: Path) -> None:
    text = (out.parent / "stdout").read_text()
    assert "point 1 of 2, time left unknown: net b2 fp32" in text and "measure" in text
    assert "skipped" in text and "not divisible" in text
    assert f"report: {out / 'tiny.html'}" in text and (out / "tiny.html").stat().st_size > 10_000


def test_the_page_and_the_table_say_what_the_record_says(out: Path) -> None:
    (row,) = [row for row in json.loads(caraml("results", "--out", out, "--json").stdout)["rows"] if row["status"] == "ok"]
    record: dict[str, Any] = json.loads(next(iter(out.glob("points/*/1/record.json"))).read_text())
    assert record["status"] in ("ok", "skipped")
    assert row["energy"] > 0 and row["energy_scope"] == "device"
    assert row["energy_per_item"] * row["throughput"] == pytest.approx(row["mean_power"], rel=1e-6)


def test_results_as_csv_and_sql(out: Path) -> None:
    lines = caraml("results", "--out", out, "--csv").stdout.splitlines()
    assert len(lines) == 3 and "throughput" in lines[0]
    done = caraml("results", "--out", out, "--sql", "select status, count(*) as n from records group by status order by status", "--csv")
    assert done.stdout.split() == ["status,n", "ok,1", "skipped,1"]
    steps = caraml("results", "--out", out, "--sql", "select count(*) as n from steps where phase = 'measure'", "--csv").stdout.split()
    assert int(steps[1]) >= 4


def test_show_explains_every_number(out: Path) -> None:
    key = json.loads(caraml("results", "--out", out, "--sql", "select key from records where status = 'ok'", "--json").stdout)["rows"][0][
        "key"
    ]
    text = caraml("show", key[:6], "--out", out).stdout
    for expected in ("Throughput", "95 % confidence interval", "source:", "window from", "Energy", "J/token", "fake", "counter"):
        assert expected in text, expected


def test_the_same_run_again_measures_nothing(out: Path) -> None:
    done = caraml("run", out.parent / "tiny.toml", "--out", out, CARAML_POWER="fake:constant")
    assert done.returncode == 0 and "known from before" in done.stdout
    assert not list(out.glob("points/*/2"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "quik"], "did you mean 'quick'?"),
        (["run", "no/such.toml"], "no such file"),
        (["show", "zz"], "caraml results"),
        (["results", "nothing"], "caraml status lists suites"),
        (["report", "--out", "/no/such"], "caraml run quick"),
        (["results", "--sql", "select * from record"], "records"),
        (["results", "--sql", "select * from read_csv('/etc/passwd')"], ""),
        (["data", "prepare", "text", "/no/such", "--out", "x"], "/no/such"),
        (["run", "quick", "--only", "gpt", "--out", "/etc/hosts"], "/etc/hosts: found a file, expected a folder"),
        (["plan", "quick", "--only", "gpt", "--out", "/etc/hosts/x"], "/etc/hosts: found a file, expected a folder"),
        (["retry", "--failed", "--out", "/etc/hosts"], "/etc/hosts: found a file, expected a folder"),
        (["doctor", "--out", "/etc/hosts"], "/etc/hosts: found a file, expected a folder"),
        (["report", "--to", "/etc/hosts/x/y.html"], "/etc/hosts: found a file, expected a folder"),
        (["report", "--to", "/etc"], "/etc: found a folder, expected a file"),
        (["report", "--format", "svg", "--to", "/etc/hosts"], "/etc/hosts: found a file, expected a folder"),
        (
            ["report", "--format", "htm"],
            "value of --format 'htm'; known: csv, html, md, pdf, png, svg\n  next step: did you mean 'html'",
        ),
        (["results", "--format", "csv"], "results: unknown option '--format'; known: --out, --runs, --csv, --json, --sql, --help"),
        (["check", "quick", "--baseline", "b", "--flags", "lax"], "unknown value of --flags 'lax'; known: ignore, strict, warn"),
        (["archive", "tiny", "/etc/hosts/x.zip"], "/etc/hosts: found a file, expected a folder"),
        (["data", "prepare", "images", "--out", "/etc/hosts/x"], "/etc/hosts: data cannot be written here: File exists"),
        (["data", "prepare", "text", __file__, "--out", "/etc/hosts/x"], "/etc/hosts: "),
    ],
)
def test_errors_name_the_cause_and_exit_with_2(arguments: list[str], words: str, out: Path) -> None:
    extra = [] if "--out" in arguments else ["--out", str(out)]
    done = caraml(*arguments, *extra)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "root:" not in done.stdout


def test_a_bad_suite_lists_every_fault(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        TINY.replace("global_batch", "global_bach").replace('"4M"', '"5M"').replace("target = 0.5", "target = 5")
    )
    done = caraml("run", tmp_path / "bad.toml")
    assert done.returncode == 2
    assert "bad.toml:7: benchmark[0].global_bach" in done.stderr and "did you mean 'global_batch'" in done.stderr
    assert "bad.toml:10: benchmark[0].measure.target: found 5" in done.stderr


def test_a_failed_point_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "fails.toml").write_text(TINY.replace('data = "synthetic"', 'data = "text", corpus = "/no/such/corpus"'))
    done = caraml("run", tmp_path / "fails.toml", "--out", tmp_path / "out")
    assert done.returncode == 1 and "/no/such/corpus" in done.stdout


def test_data_preparation_and_detection(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world, hello world\n" * 50)
    done = caraml("data", "prepare", "text", tmp_path / "a.txt", "--out", tmp_path / "corpus", "--vocab-size", "300", "--documents", "5")
    assert done.returncode == 0 and (tmp_path / "corpus.bin").exists()
    assert "1 document, " in done.stdout and "; the input has no more" in done.stdout
    done = caraml("data", "prepare", "images", "--out", tmp_path / "images", "--classes", "2", "--per-class", "3")
    assert done.returncode == 0 and "6 images in 2 classes" in done.stdout
    assert json.loads(caraml("system", "detect", "--json").stdout)["name"] == "local"
    assert "local" in caraml("list", "systems").stdout and "quick" in caraml("list", "suites").stdout


def test_doctor_finds_this_machine_fit() -> None:
    done = caraml("doctor")
    assert done.returncode == 0, done.stdout
    assert "torch" in done.stdout and "power" in done.stdout


def test_power_keeps_the_exit_code(tmp_path: Path) -> None:
    assert caraml("power", "--out", tmp_path, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
