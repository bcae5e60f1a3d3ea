"""What somebody else's campaign says is run by nobody who has not seen it: an archive's, and that of a folder of another user."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from caraml.base.toml import parse_toml
from caraml.campaign.machine import machine_of
from caraml.cli import app
from caraml.results.store import Listing, read_listing
from caraml.suite.expand import expand
from caraml.suite.load import suite_of
from caraml.system.catalogue import load_system
from caraml.workloads import params_of, software_of
from tests.security.users import ATTACKER, ROOT, needs_two_users

pytestmark = pytest.mark.processes


SUITE = """
name = "theirs"
title = "Theirs"
[[benchmark]]
name = "b"
workload = "command"
params = { argv = ["sh", "-c", "touch {mark}; exit {code}"], env = { LD_PRELOAD = "x.so" }, energy = false, mark = "MARK", code = [1, 0] }
"""


def caraml(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, [*words, "--out", "out"], input=typed, catch_exceptions=True)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of a campaign whose program leaves a mark was imported here: ``theirs.zip`` into ``out``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", "")
    mark = tmp_path / "mark"
    (tmp_path / "theirs.toml").write_text(SUITE.replace("MARK", str(mark)).replace("x.so", "/dev/null"))
    assert CliRunner().invoke(app, ["run", "theirs.toml", "--out", "made", "--no-report"]).exit_code == 1
    assert CliRunner().invoke(app, ["archive", "theirs", "theirs.zip", "--out", "made"]).exit_code == 0
    (tmp_path / "theirs.toml").unlink()
    assert caraml("import", "theirs.zip").exit_code == 0
    mark.unlink()
    return mark


def test_an_imported_program_is_shown_and_not_run(mark: Path) -> None:
    assert read_listing(Path("out/suites/theirs.json")).imported == "theirs.zip"
    done = caraml("retry", "--failed")
    assert done.exit_code and isinstance(done.exception, Exception) and not mark.exists()
    assert f"sh -c 'touch {mark}; exit 1'" in done.stdout and "LD_PRELOAD" in done.stdout and "exit 0" not in done.stdout
    assert "comes from theirs.zip" in str(done.exception) and "--trust" in str(done.exception)


def test_it_runs_for_who_trusts_it_and_stays_somebody_else_s(mark: Path) -> None:
    for _ in range(2):
        assert caraml("retry", "--failed", "--trust").exit_code == 1 and mark.exists()
        mark.unlink()
        assert caraml("retry", "--failed").exception is not None and not mark.exists()


@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_at_a_terminal_it_asks(answer: str, runs: bool, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.cli.asked.attended", lambda: True)
    done = caraml("retry", "--failed", typed=answer)
    assert "Run it?" in done.stdout and mark.exists() is runs, done.stdout


def forged(path: Path, **changes: object) -> None:
    """Change the listing in an archive, with the hash that its manifest has of it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.startswith("suites/"))
    listing = json.loads(members[name]) | changes
    new = name if "as_file" not in changes else f"suites/{listing.pop('as_file')}.json"
    del members[name]
    members[new] = json.dumps(listing).encode()
    manifest = json.loads(members["manifest.json"])
    del manifest["files"][name]
    manifest["files"][new] = {"sha256": sha256(members[new]).hexdigest(), "bytes": len(members[new])}
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)


@pytest.mark.parametrize(
    "changes",
    [{"imported": ""}, {"as_file": "other", "imported": "", "name": "mine"}, {"text": "", "file": "hidden.toml"}],
    ids=["says it is ours", "calls itself otherwise", "names a file"],
)
def test_an_archive_cannot_say_that_it_is_trusted(changes: dict[str, object], mark: Path) -> None:
    text = read_listing(Path("out/suites/theirs.json")).text
    Path("hidden.toml").write_text(text)
    Path("out/suites/theirs.json").unlink()
    forged(Path("theirs.zip"), **changes)
    assert caraml("import", "theirs.zip").exit_code == 0
    done = caraml("retry", "--failed")
    assert "comes from theirs.zip" in str(done.exception) and not mark.exists()
    assert f"touch {mark}" in done.stdout


def test_setup_lines_of_a_machine_that_an_archive_brings_along_are_shown(mark: Path, tmp_path: Path) -> None:
    listing = json.loads(Path("out/suites/theirs.json").read_text())
    example = (ROOT / "examples" / "system.toml").read_text()
    (tmp_path / "theirs-system.toml").write_text(f'{example}\n[site.software]\nsetup = ["touch {tmp_path}/setup"]\n')
    Path("out/suites/theirs.json").write_text(json.dumps(listing | {"system": str(tmp_path / "theirs-system.toml")}))
    done = caraml("retry", "--failed")
    assert done.exception is not None and "setup of system" in done.stdout and f"touch {tmp_path}/setup" in done.stdout, done
    assert not (tmp_path / "setup").exists() and not mark.exists()


def test_nothing_hides_in_what_is_shown(mark: Path) -> None:
    listing = json.loads(Path("out/suites/theirs.json").read_text())
    listing["text"] = listing["text"].replace("; exit {code}", r"; exit {code}\u001b[2K\r")
    Path("out/suites/theirs.json").write_text(json.dumps(listing))
    done = caraml("retry", *(key for key, _ in listing["points"]))
    assert "\x1b" not in done.output and "\r" not in done.output


EVERYTHING = """
name = "theirs"
title = "Theirs"
[[benchmark]]
name = "b"
workload = "command"
[benchmark.params]
argv = ["true"]
env = { LD_PRELOAD = "/tmp/{code}.so", BASH_ENV = "/tmp/evil-{code}.sh", TOKEN = "$MINE" }
energy = false
code = 1
metrics = { found = { unit = "1", key = "x", file = "/home/other/{code}.json" } }
[[benchmark]]
name = "g"
workload = "gpt"
global_batch = 1
params = { preset = "4M", data = "synthetic", start_from = "/tmp/their-checkpoint", save_to = "/home/other/saved" }
"""

SITE = """
[site.software]
setup = ["SETUP"]
venv = "/tmp/their-venv"
variables = { PATH = "/tmp/their-bin" }
[site.container]
runtime = "podman"
image = "their-image"
python = "/tmp/their-python"
binds = ["/:/host"]
"""


def test_all_that_is_run_loaded_read_or_written_is_shown(mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "not to be shown")
    machine = tmp_path / "theirs-system.toml"
    machine.write_text((ROOT / "examples" / "system.toml").read_text() + SITE.replace("SETUP", f"touch {mark}"))
    listing = read_listing(Path("out/suites/theirs.json"))
    file = suite_of(parse_toml(EVERYTHING, "theirs.toml"))
    points = expand(file, machine_of(load_system(str(machine)), "local"), params_of, software_of).points
    planted = listing.model_copy(update={"text": EVERYTHING, "system": str(machine), "points": [(one.key, "x") for one in points]})
    Path("out/suites/theirs.json").write_text(planted.to_json())
    done = caraml("retry", *(one.key for one in points))
    for part in (
        "/tmp/1.so",
        "BASH_ENV=/tmp/evil-1.sh",
        "TOKEN='$MINE'",
        "/home/other/1.json",
        "/tmp/their-checkpoint",
        "/home/other/saved",
    ):
        assert part in done.stdout, done
    for part in (
        f"setup of system mine: touch {mark}",
        "/tmp/their-venv",
        "PATH=/tmp/their-bin",
        "podman",
        "/tmp/their-python",
        "/:/host",
    ):
        assert part in done.stdout, done
    assert "not to be shown" not in done.stdout and not mark.exists() and "--trust" in str(done.exception)


def test_a_copy_of_another_user_s_results_is_theirs(mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are all this user's, and nothing in them says where they come from."""
    shutil.copytree("made", "copy")
    assert CliRunner().invoke(app, ["retry", "--failed", "--out", "copy"]).exit_code == 1 and mark.exists()
    mark.unlink()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config of another user"))
    done = CliRunner().invoke(app, ["retry", "--failed", "--out", "copy"])
    assert "comes from another user" in str(done.exception) and f"touch {mark}" in done.stdout and not mark.exists()


@pytest.mark.parametrize("changes", [{"seal": ""}, {"seal": "0" * 16}, {"system": "other"}, {"settings": ["params.x=1"]}, {"text": "x"}])
def test_a_listing_that_was_changed_is_somebody_else_s(changes: dict[str, object], mark: Path) -> None:
    listing = json.loads(Path("made/suites/theirs.json").read_text())
    assert read_listing(Path("made/suites/theirs.json")).stranger() == ""
    Path("made/suites/theirs.json").write_text(json.dumps(listing | changes))
    assert read_listing(Path("made/suites/theirs.json")).stranger()


def test_what_is_judged_is_what_was_read(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a folder puts this user's own listing back as soon as the other was read."""
    path, own = Path("made/suites/theirs.json"), Path("made/suites/theirs.json").read_text()
    planted = Path("out/suites/theirs.json").read_text().replace("theirs.zip", "")

    def swapped(path: Path) -> Listing:
        listing = read_listing(path)
        path.write_text(own)
        return listing

    path.write_text(planted)
    monkeypatch.setattr("caraml.results.store.read_listing", swapped)
    done = CliRunner().invoke(app, ["retry", "--failed", "--out", "made"])
    assert "comes from another user" in str(done.exception) and not mark.exists(), done.output


@needs_two_users
def test_a_listing_of_another_user_is_an_imported_one(mark: Path) -> None:
    listing = json.loads(Path("out/suites/theirs.json").read_text())
    Path("out/suites/theirs.json").write_text(json.dumps(listing | {"imported": ""}))
    os.chown("out/suites/theirs.json", ATTACKER, ATTACKER)
    done = caraml("retry", "--failed")
    assert "comes from another user" in str(done.exception) and not mark.exists()


def test_our_own_campaign_asks_nobody(mark: Path) -> None:
    done = CliRunner().invoke(app, ["retry", "--failed", "--out", "made"])
    assert done.exit_code == 1 and mark.exists() and "This would run" not in done.stdout
