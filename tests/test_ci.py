"""What other machines run: the files of GitHub and GitLab ask for the same, and for nothing that the Makefile does not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from caraml.cli import app

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
GITLAB = ROOT / ".gitlab"
JOBS = {"check": "make check", "test": "make test", "docs": "make docs"}


def read(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_job_runs_its_target_on_both() -> None:
    github, gitlab = read(GITHUB / "workflows" / "ci.yml")["jobs"], read(ROOT / ".gitlab-ci.yml")
    assert github.keys() == JOBS.keys() <= gitlab.keys()
    for job, command in JOBS.items():
        assert [step["run"] for step in github[job]["steps"] if step.get("run", "").startswith("make")] == [command]
        assert gitlab[job]["script"] == command and gitlab[job]["stage"] in gitlab["stages"]


def test_a_run_in_which_many_tests_hang_ends_with_its_report() -> None:
    """Each waits to its limit: twenty of them would reach the job's, after which nothing is told."""
    github, gitlab = read(GITHUB / "workflows" / "ci.yml")["jobs"]["test"], read(ROOT / ".gitlab-ci.yml")["test"]
    assert github["env"] == gitlab["variables"] and gitlab["timeout"] == f"{github['timeout-minutes']} minutes"
    whole = int(github["env"]["PYTEST_ADDOPTS"].removeprefix("--session-timeout="))
    one = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["timeout"]
    making = 20 * 60  # the environment, types and format before the tests
    assert making + whole + one < 60 * github["timeout-minutes"]
    own = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.timeout\(", path.read_text(encoding="utf-8"))]
    assert own == [], "no test has a longer limit of its own"


def test_every_target_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in JOBS.values():
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, flags=re.MULTILINE), command


def test_both_check_with_the_same_pythons_from_the_oldest_on() -> None:
    github = read(GITHUB / "workflows" / "ci.yml")["jobs"]["check"]["strategy"]["matrix"]["python"]
    (gitlab,) = read(ROOT / ".gitlab-ci.yml")["check"]["parallel"]["matrix"]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"].removeprefix(">=")
    assert github == gitlab["PYTHON_VERSION"] and github[0] == oldest


def test_templates_are_read_and_name_verbs_that_exist() -> None:
    for form in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        if form.stem != "config":
            assert {"name", "description", "body"} <= read(form).keys()
    text = "".join(path.read_text(encoding="utf-8") for folder in (GITHUB, GITLAB) for path in folder.rglob("*") if path.is_file())
    assert "caraml doctor --json" in text
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"\bcaraml ([a-z]+)", text)) <= set(verbs)
    proof = (GITHUB / "pull_request_template.md").read_text(encoding="utf-8")
    assert proof == (GITLAB / "merge_request_templates" / "Default.md").read_text(encoding="utf-8")
