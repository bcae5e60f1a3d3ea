"""``CARAML_POWER`` names the sources that are read, wherever power is read; a wrong name is told before anything runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.base.errors import InputError
from caraml.cli import app
from caraml.doctor import power_checks
from caraml.power import Meter
from caraml.power.__main__ import main, measure, watch
from caraml.power.sampler import available_sources
from caraml.power.source import POWER_SOURCES
from tests.fakes.power.meter import logged


@pytest.fixture
def pdu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A meter that logs, chosen beside a sensor that is not here."""
    file = tmp_path / "pdu.csv"
    monkeypatch.setenv(POWER_SOURCES, f" csv:{file}, rapl,")
    with logged(file, "time,power_w,apparent_va", "200,250"):
        yield f"csv:{file}"


@pytest.mark.processes
def test_what_it_names_is_read_by_a_meter_and_around_a_command(pdu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Meter() as meter, Meter([]) as none, Meter(["fake"]) as other:
        assert [channel.id for channel in meter.channels] == [pdu, f"{pdu}:va"]
        assert none.channels == [] and {channel.source for channel in other.channels} == {"fake"}
    found = measure(["sleep", "0.2"], out=tmp_path / "a")
    assert [channel.source for channel in found.channels] == ["csv", "csv"]
    assert found.energy.boundaries["node_ac"].energy_j == pytest.approx(200 * found.energy.duration_s)
    told = f"mean 200.0 W of 250.0 VA ({250 * found.energy.duration_s / 3600:.3g} VAh)"
    assert told in capsys.readouterr().err
    assert watch(seconds=0.1) == 0 and "pdu.csv [node_ac] 200.0 W" in capsys.readouterr().out
    named = measure(["true"], methods=["fake"], out=tmp_path / "b")
    assert {channel.source for channel in named.channels} == {"fake"}, "who asks by name is given what was asked for"


def test_what_is_here_has_it_too(pdu: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no sensor's program is started
    lines = {line["name"]: line for line in available_sources(seconds=0.0)}
    assert [name for name, line in lines.items() if line["auto"]] == [pdu, "rapl"] and "csv" not in lines and "fake" not in lines
    assert lines[pdu]["readable"] and [channel["kind"] for channel in lines[pdu]["channels"]] == ["power_mean", "apparent_va"]
    assert main(["sources"]) == 0
    said = capsys.readouterr().out
    assert f"{pdu} ok" in said and f"({pdu}), taken to have a new value every 200 ms" in said, "its rows tell, where the power stays"
    (check,) = [check for check in power_checks([lines[pdu]]) if check.name == f"power: {pdu}"]
    assert check.found == "pdu.csv (node_ac power_mean, taken to have a new value every 200 ms)"


def told(*lines: tuple[str, bool, bool, bool]) -> dict[str, tuple[str, str, str | None]]:
    """Findings for sources of a name that are read, asked for and readable, or not."""
    some = [
        {
            "name": name,
            "title": "",
            "auto": auto,
            "asked": asked,
            "found": here,
            "readable": here,
            "reason": "gone",
            "fix": None,
            "channels": [],
        }
        for name, auto, asked, here in lines
    ]
    return {check.name: (check.status, check.found, check.fix) for check in power_checks(some)}


def test_doctor_judges_by_what_is_read() -> None:
    asked = told(("rapl", False, False, True), ("csv:a", True, True, True))
    assert "power sensor" not in asked and asked["power: csv:a"][0] == "ok"
    gone = told(("rapl", False, False, True), ("csv:a", True, True, False))
    assert gone["power: csv:a"][:2] == ("warn", "gone"), "asked for, it is no sensor that a machine may lack"
    assert gone["power sensor"] == (
        "warn",
        "none that CARAML_POWER names can be read here: energy will be null",
        "to read what answers: CARAML_POWER=rapl",
    )
    board = told(("rapl", True, False, False), ("ipmi", False, False, True))
    assert board["power sensor"][2] == "to read what answers: CARAML_POWER=ipmi" and board["other sensors"][1].endswith("rapl")
    assert "power sensor" not in told(("rapl", True, False, True))


def test_a_wrong_name_in_it_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POWER_SOURCES, "nvlm")
    touch = str(shutil.which("touch"))
    monkeypatch.setenv("PATH", "")  # no sensor's program is started
    with pytest.raises(InputError, match="CARAML_POWER: unknown power source 'nvlm'"):
        measure([touch, str(tmp_path / "ran")], out=tmp_path / "a")
    done = CliRunner().invoke(app, ["run", "quick", "--out", str(tmp_path / "b")])
    assert isinstance(done.exception, InputError) and "nvlm" in str(done.exception) and "'nvml'" in str(done.exception.hint)
    assert list(tmp_path.iterdir()) == []
    line = next(line for line in available_sources(seconds=0.0) if line["name"] == "nvlm")
    assert not line["readable"] and "unknown power source" in line["reason"] and "nvml" in line["fix"]
    monkeypatch.setenv(POWER_SOURCES, "csv:")
    line = next(line for line in available_sources(seconds=0.0) if line["name"] == "csv:")
    assert not line["readable"] and "needs a file" in line["reason"]
