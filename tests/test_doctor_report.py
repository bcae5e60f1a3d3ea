"""``caraml doctor --json``: everything that a report of a fault needs, and nothing that tells whose machine it is."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.cli import app
from caraml.doctor import Check, without_names

pytestmark = pytest.mark.processes


PAGE = Path(__file__).parents[1] / "docs" / "reference" / "doctor.md"
SECRET = "s3cr3t-value"


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One finding that names this host, instead of looking at everything."""
    found = [Check("disk", "warn", f"/scratch/{platform.node()} is full on {platform.node()}", f"ls {Path.home()}/results")]
    monkeypatch.setattr("caraml.doctor.checks", lambda out: found)


def report(*words: str) -> tuple[str, dict]:  # type: ignore[type-arg]
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert done.exit_code == 0, done.output
    return done.output, json.loads(done.output)


@pytest.mark.usefixtures("quick_checks")
def test_no_name_of_host_user_or_job_and_no_secret_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "CARAML_API_KEY", "NCCL_AUTH_SECRET", "MY_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    text, told = report()
    assert SECRET not in text and "hostname" not in text and "4711" not in text and "slurm" not in told["environment"]
    assert told["environment"]["variables"]["OMP_NUM_THREADS"] == "3"
    assert told["checks"] == [{"name": "disk", "status": "warn", "found": "/scratch/HOST is full on HOST", "fix": "ls ~/results"}]
    assert not re.search(rf"(?<![\w-]){re.escape(platform.node())}(?![\w-])", text)


@pytest.mark.usefixtures("quick_checks")
def test_names_are_there_when_they_are_asked_for() -> None:
    _, told = report("--names")
    assert told["system"]["hostname"] == platform.node() and platform.node() in told["checks"][0]["found"]


@pytest.mark.usefixtures("quick_checks")
def test_the_page_has_the_keys_of_the_report() -> None:
    _, told = report()
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE) == [*told, *told["checks"][0]]


def test_a_missing_part_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.doctor.checks", lambda out: [Check("torch", "missing", "not installed", "pip install torch")])
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 3 and json.loads(done.output)["checks"][0]["status"] == "missing"


def test_only_whole_words_are_replaced() -> None:
    hidden = {"node": "HOST", "/home/anna": "~", "anna": "USER", "node.example.org": "HOST"}
    told = {"a": ["node-1 of node", "/home/anna/x", "susanna", "at node.example.org"], "hostname": "node", "b": {"uuid": "GPU-1", "n": 3}}
    assert without_names(told, hidden) == {"a": ["node-1 of HOST", "~/x", "susanna", "at HOST"], "b": {"n": 3}}
