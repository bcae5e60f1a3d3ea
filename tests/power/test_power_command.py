"""The wrapper around a command: exit codes, signals, files that survive, and the cost of it all."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.power.__main__ import _Child, _report, _write, main, measure, watch
from caraml.power.merge import merge_folder
from caraml.power.model import BoundaryEnergy, WindowEnergy, window_from_dict
from caraml.power.result import CommandResult, Format, downsampled, read_readings, svg, write_hdf5
from caraml.power.source import check_methods, source_names
from caraml.power.store import ReadingStore
from tests.fakes.power.meter import logged

MODULES = Path(__file__).resolve().parents[1] / "fakes" / "power" / "modules"
UNTIL = "n=0; until {} || [ $n -gt 3000 ]; do n=$((n + 1)); sleep 0.05; done"
"""A command that lasts until a condition of the shell's holds, or for minutes where that never comes."""


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """The wrapper as a process of its own."""
    paths = [str(MODULES), *filter(None, [os.environ.get("PYTHONPATH")]), *[p for p in sys.path if p.endswith("src")]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, "-m", "caraml.power", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finished(*words: str, **environment: str) -> tuple[int, str, str]:
    process = start(*words, **environment)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def result_of(folder: Path, name: str = "energy.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_commands(tmp_path: Path, code: int) -> None:
    assert measure(["sh", "-c", f"exit {code}"], methods=["fake"], out=tmp_path / "r").exit_code == code
    assert result_of(tmp_path / "r")["exit_code"] == code


def test_output_of_the_command_is_untouched(tmp_path: Path) -> None:
    code, out, err = finished("--methods", "fake", "--out", str(tmp_path / "r"), "--", "sh", "-c", "echo one; echo two >&2")
    assert (code, out) == (0, "one\n")
    assert err.startswith("two\n")
    assert "fake: made up by a source" in err


def test_energy_of_a_command_is_right_and_written(tmp_path: Path) -> None:
    measure(["sleep", "1"], methods=["fake:constant"], out=tmp_path, idle_s=0.5)
    document = result_of(tmp_path)
    energy = window_from_dict(document["energy"])
    device = energy.boundaries["device"]
    assert document["valid"]
    assert document["status"] == "finished"
    assert device.energy_j == pytest.approx(300 * energy.duration_s, abs=device.bound_j)
    assert device.net_j == pytest.approx(0, abs=device.net_bound_j)
    assert energy.duration_s >= 1.0 and energy.start >= window_from_dict(document["idle"]).end
    assert {f.name for f in tmp_path.iterdir()} == {"energy.json", "energy.csv", "readings.csv", "power.svg"}
    columns = read_readings(tmp_path / "readings.csv")
    assert len(columns["value"]) > 4
    assert (tmp_path / "power.svg").read_text().count('stroke="#') > 3, "axis, grid, line and legend"


@pytest.mark.parametrize("fmt", ["json", "parquet"])
def test_other_formats_hold_the_same_readings(tmp_path: Path, fmt: str) -> None:
    measure(["true"], methods=["fake"], out=tmp_path, fmt=fmt)  # type: ignore[arg-type]
    file = tmp_path / result_of(tmp_path)["readings"]
    assert file.suffix == f".{fmt}"
    if fmt == "json":
        assert set(json.loads(file.read_text())) == {"channel", "t_before", "t_after", "value", "unit"}
    else:
        import duckdb

        assert duckdb.sql(f"select count(*) from '{file}' where value is not null").fetchall()[0][0] > 0


@pytest.mark.parametrize("fmt", ["csv", "json", "parquet"])
def test_every_raw_reading_has_its_unit(tmp_path: Path, fmt: Format) -> None:
    """Counters, watts and volt-amperes are in one file, and a name of an outlet may have a comma."""
    meter, counter = tmp_path / "power.csv", tmp_path / "energy.csv"
    with logged(meter, "time,channel,power_w,apparent_va", '"left, upper",200,250'), logged(counter, "time,energy_wh", "{number}"):
        measure(["true"], methods=[f"csv:{meter}", f"csv:{counter}"], out=tmp_path / "out", fmt=fmt)
    file = tmp_path / "out" / result_of(tmp_path / "out")["readings"]
    if fmt == "parquet":
        import duckdb

        rows = duckdb.sql(f"select channel, unit from '{file}'").fetchall()
    else:
        columns = read_readings(file) if fmt == "csv" else json.loads(file.read_text())
        rows = list(zip(columns["channel"], columns["unit"], strict=True))
    outlet = f"csv:{meter}:left, upper"
    assert set(rows) == {(outlet, "W"), (f"{outlet}:va", "VA"), (f"csv:{counter}", "J")}


def test_raw_readings_of_earlier_versions_have_no_unit(tmp_path: Path) -> None:
    (tmp_path / "readings.csv").write_text('channel,t_before,t_after,value,error\na,1.0,2.0,3.5,\na,2.0,3.0,,"OSError: gone"\na,3.0')
    found = read_readings(tmp_path / "readings.csv")
    assert (found["value"], found["unit"], found["t_after"]) == ([3.5, None], [None, None], [2.0, 3.0])


def test_hdf5_without_its_packages_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfitError, match=r"(?s)pandas, tables are not installed.*caraml\[pandas\]"):
        measure(["touch", str(tmp_path / "ran")], methods=["fake"], out=tmp_path / "r", h5=True)
    assert main(["--csv", "--h5", "--methods", "fake", "--out", str(tmp_path / "r"), "--", "touch", str(tmp_path / "ran")]) == 3
    assert list(tmp_path.iterdir()) == []


def test_hdf5_files_are_those_of_jpwr(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("tables")
    assert main(["--methods", "fake:constant", "--out", str(tmp_path), "--rank", "3", "--json", "--h5", "--", "sleep", "1"]) == 0
    assert result_of(tmp_path, "energy.3.json")["readings"] == "readings.3.json", "beside the readings in any format"
    power, energy = (pandas.read_hdf(tmp_path / f"{name}.3.h5", key="jpwr") for name in ("power", "energy"))
    assert list(power.columns) == ["timestamps", "fake:0"] and list(energy.index) == ["fake:0"]
    assert power["fake:0"].dropna().tolist() == pytest.approx([300.0] * power["fake:0"].count())
    assert abs(power["timestamps"].iloc[-1] - time.time()) < 300
    window = window_from_dict(json.loads((tmp_path / "energy.3.json").read_text())["energy"])
    assert energy["fake:0"] == pytest.approx(window.channels[0].energy_j / 3600)
    with pytest.raises(InputError, match="never overwritten"):
        write_hdf5(tmp_path, power, energy, "3")


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    outcome = measure(["/no/such/command"], methods=["fake"], out=tmp_path)
    assert outcome.exit_code == 127
    assert not result_of(tmp_path)["valid"]
    assert "cannot be started" in result_of(tmp_path)["reason"]


def test_a_command_that_is_killed_gives_a_result_that_says_so(tmp_path: Path) -> None:
    code, _, _ = finished("--methods", "fake", "--out", str(tmp_path), "--", "sh", "-c", "kill -9 $$")
    document = result_of(tmp_path)
    assert code == 137
    assert document["signal"] == 9
    assert not document["valid"]
    assert "SIGKILL" in document["reason"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_the_command_and_the_result_is_written(tmp_path: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got it; exit 5' {name}; echo ready; while true; do sleep 0.05; done"
    process = start("--methods", "fake", "--out", str(tmp_path), "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert out == "got it\n"
    assert process.returncode == 5
    assert result_of(tmp_path)["exit_code"] == 5


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """``nohup`` must protect the command, too: it got SIGHUP, and ended."""
    paths = [str(MODULES), *[p for p in sys.path if p.endswith("src")]]
    wrapper = (
        f"{sys.executable} -m caraml.power --methods fake --out {tmp_path} -- sh -c 'kill -HUP $$; kill -HUP $PPID; sleep 0.2; exit 6'"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        ["sh", "-c", f"trap '' HUP; {wrapper}"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 6, done.stderr


@pytest.mark.parametrize(("own", "code"), [(True, 5), (False, 4)])
def test_an_interrupt_is_handed_on_unless_the_terminal_has_done_so(tmp_path: Path, own: bool, code: int) -> None:
    """Ctrl-C came twice where standard input was no terminal; where it was one of another session, no signal came any more."""
    import pty

    parent, terminal = pty.openpty()
    script = "trap 'exit 4' INT; trap 'exit 5' USR1; echo ready; while true; do sleep 0.05; done"
    command = [sys.executable, "-m", "caraml.power", "--methods", "fake", "--out", str(tmp_path), "--", "sh", "-c", script]
    wrapped = ["setsid", "--ctty", "sh", "-c", 'exec "$@" </dev/null', "sh", *command] if own else ["setsid", *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(wrapped, stdin=terminal, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(300) == code
    os.close(terminal)
    os.close(parent)


def test_a_signal_that_does_not_interrupt_the_wait_for_the_command_reaches_it(tmp_path: Path) -> None:
    """As one that comes just before the wait begins: here another thread is interrupted."""
    process = start(
        "--methods", "fake", "--out", str(tmp_path), "--", "sh", "-c", "trap 'exit 5' USR1; echo ready; while true; do sleep 0.05; done"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    thread = next(int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir() if int(task.name) != process.pid)
    ctypes.CDLL(None).tgkill(process.pid, thread, signal.SIGUSR1)
    process.communicate(timeout=300)
    assert process.returncode == 5


def test_an_impatient_ctrl_c_does_not_lose_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ended the command; one that came while the result was written left a file that says nothing."""

    def interrupted(*what: Any) -> list[Path]:
        signal.raise_signal(signal.SIGINT)
        return _write(*what)

    monkeypatch.setattr("caraml.power.__main__._write", interrupted)
    measure(["true"], methods=["fake"], out=tmp_path)
    assert result_of(tmp_path)["status"] == "finished"


def test_a_command_ended_by_a_signal_ends_the_wrapper_by_the_same(tmp_path: Path) -> None:
    code, _, _ = finished("--methods", "fake", "--out", str(tmp_path), "--", "sh", "-c", "kill -TERM $$")
    assert code == -signal.SIGTERM
    assert result_of(tmp_path)["exit_code"] == 143


def test_a_killed_wrapper_leaves_files_that_load_and_are_not_valid(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    process = start("--methods", "fake", "--out", str(tmp_path), "--", "sh", "-c", UNTIL.format(f"[ -e {go_on} ]"))
    readings, deadline = tmp_path / "readings.csv", time.monotonic() + 300
    while not readings.exists() or readings.read_text().count("\n") < 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    go_on.touch()
    process.communicate(timeout=300)
    document = result_of(tmp_path)
    assert document["status"] == "running"
    assert not document["valid"]
    assert document["channels"]
    assert len(read_readings(tmp_path / "readings.csv")["value"]) > 5
    assert merge_folder(tmp_path).reason == "energy: the measurement did not come to its end"  # it was: no sensor


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    measure(["true"], methods=["fake"], out=tmp_path)
    before = (tmp_path / "energy.json").read_bytes()
    with pytest.raises(InputError, match="never overwritten"):
        measure(["touch", str(tmp_path / "ran")], methods=["fake"], out=tmp_path)
    assert (tmp_path / "energy.json").read_bytes() == before
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_cannot_be_written_is_told_before_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = finished("--out", str(tmp_path / "file" / "x"), "--", "touch", str(tmp_path / "ran"))
    assert code == 2
    assert "cannot write to" in err
    assert "--out" in err
    assert not (tmp_path / "ran").exists()


def test_an_unknown_method_lists_the_known_ones(tmp_path: Path) -> None:
    code, _, err = finished("--methods", "nvlm", "--", "touch", str(tmp_path / "ran"))
    assert code == 2
    assert all(name in err for name in source_names())
    assert "did you mean 'nvml'" in err
    assert not (tmp_path / "ran").exists()
    check_methods(["rapl", "csv:/some/file"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--methods", "nvml", "--devices", "0,7"], ["'7'", "0: GPU-a", "1: GPU-b"]),
        (["--methods", "nvml", "--devices", "GPU-zzzzzz"], ["'GPU-zzzzzz'", "GPU-a"]),
        (["--methods", "fake", "--devices", "1"], ["'1'", "0: fake:0"]),
        (["--methods", "amdgpu,intel", "--devices", "0"], ["'0'", "present: none"]),
        (["--methods", "fake", "--devices", ","], ["names no accelerator"]),
    ],
)
def test_an_unknown_device_is_told_before_the_command_starts(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    gpus = {"FAKE_GPUS": json.dumps([{"uuid": "GPU-a"}, {"uuid": "GPU-b"}])}
    folder = tmp_path / "r"
    code, _, err = finished(*words, "--out", str(folder), "--", "touch", str(tmp_path / "ran"), **gpus)
    assert code == 2
    assert all(word in err for word in expected), err
    assert not (tmp_path / "ran").exists()
    assert not folder.exists()  # the corrected command can use it


@pytest.mark.parametrize("words", [["--methods", "nvml", "--devices", "1,GPU-a"], ["--methods", "nvml,amdgpu", "--devices", "GPU-b"]])
def test_devices_that_exist_are_measured(tmp_path: Path, words: list[str]) -> None:
    gpus = {"FAKE_GPUS": json.dumps([{"uuid": "GPU-a"}, {"uuid": "GPU-bbbbbbb"}])}
    code, _, err = finished(*[w.replace("GPU-b", "GPU-bbbb") for w in words], "--out", str(tmp_path), "--", "true", **gpus)
    assert code == 0, err
    assert "GPU-bbbbbbb" in [c["id"] for c in result_of(tmp_path)["energy"]["channels"]]


def test_a_source_that_does_not_answer_cannot_judge_devices(tmp_path: Path) -> None:
    code, _, _ = finished("--methods", "nvml", "--devices", "0", "--out", str(tmp_path), "--", "true", FAKE_NVML_FAILS="1")
    assert code == 0
    assert "Driver Not Loaded" in result_of(tmp_path)["reason"]


@pytest.mark.parametrize("words", [[], ["--"], ["--idle", "-1", "--", "true"], ["--interval", "0", "--", "true"]])
def test_wrong_command_lines_end_with_2(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2


def test_without_a_sensor_the_command_runs_and_the_result_says_why(tmp_path: Path) -> None:
    code, _, err = finished("--methods", "nvml", "--out", str(tmp_path), "--", "true", FAKE_NVML_FAILS="1")
    document = result_of(tmp_path)
    assert code == 0
    assert document["energy"]["boundaries"] == {}
    assert document["energy"]["flags"] == ["no_source"]
    assert "Driver Not Loaded" in document["reason"]
    assert "no power sensor" in err


@pytest.mark.parametrize("fault", ["FAKE_LOST", "FAKE_HANGS"])
def test_a_sensor_that_dies_during_the_command(tmp_path: Path, fault: str) -> None:
    """It dies once some of the command's readings are on disk. A sensor that hangs does so for longer than anybody waits here."""
    some = f"[ $(wc -l <{tmp_path}/readings.csv) -gt 20 ]"
    program = f"{UNTIL.format(some)}; touch {tmp_path}/dies; sleep 0.5"
    code, _, err = finished("--methods", "nvml", "--out", str(tmp_path), "--", "sh", "-c", program, **{fault: str(tmp_path / "dies")})
    document = result_of(tmp_path)
    assert code == 0
    assert not document["valid"]
    device = document["energy"]["boundaries"]["device"]
    assert device["energy_j"] is None
    assert 0 < device["partial_j"] < 300 * window_from_dict(document["energy"]).duration_s
    assert "unknown" in err


def test_a_full_disk_does_not_stop_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from caraml.power import result

    def full(path: Path, text: str) -> None:
        if '"status": "finished"' in text:
            raise OSError(28, "No space left on device")
        path.write_text(text)

    monkeypatch.setattr(result, "write_file", full)
    assert measure(["true"], methods=["fake"], out=tmp_path).exit_code == 0
    err = capsys.readouterr().err
    assert "No space left" in err
    assert '"boundaries"' in err


def test_ranks_write_beside_each_other_and_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, gpus = tmp_path / "r", [json.dumps([{"uuid": f"GPU-{letter}"}]) for letter in "ab"]
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    ranks = [
        start("--methods", "nvml", "--out", str(folder), "--", "sleep", "1", FAKE_GPUS=g, SLURM_PROCID=str(r), **step)
        for r, g in enumerate(gpus)
    ]
    for process in ranks:
        process.communicate(timeout=300)
    assert main(["merge", str(folder)]) == 0
    merged = json.loads(capsys.readouterr().out)
    device, seconds = merged["boundaries"]["device"], [result_of(folder, f"energy.{rank}.json")["energy"] for rank in range(2)]
    truth = [300 * (one["end"] - one["start"]) for one in seconds]
    assert device["total_j"] == pytest.approx(sum(truth), rel=0.1)
    ended = folder / "energy.1.json"
    ended.write_text(
        json.dumps(result_of(folder, ended.name) | {"valid": False, "signal": 11, "reason": "the command was ended by SIGSEGV"})
    )
    assert main(["merge", str(folder)]) == 1
    merged = json.loads(capsys.readouterr().out)
    assert (
        not merged["valid"] and merged["reason"] == "rank 1: the command was ended by SIGSEGV" and merged["boundaries"]["device"] == device
    )
    ended.unlink()
    assert main(["merge", str(folder)]) == 1
    merged = json.loads(capsys.readouterr().out)
    assert merged["missing"] == ["rank 1"]
    assert merged["boundaries"]["device"]["total_j"] is None
    assert merged["boundaries"]["device"]["partial_j"] == pytest.approx(truth[0], rel=0.1)


def test_watch_prints_power_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(["fake:constant"], seconds=0.6, every=0.3) == 0
    assert "300.0 W" in capsys.readouterr().out
    assert watch(["rapl:/no/such/tree"], seconds=0.1) == 3


def test_the_list_of_sources_names_all_and_their_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sources"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in source_names() if name != "fake")


def test_a_list_of_which_nobody_reads_the_rest_ends_quietly() -> None:
    process = start("sources")
    assert process.stdout is not None
    process.stdout.close()  # before it has written anything
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


def test_a_peak_is_not_rounded_below_its_mean_and_what_a_number_does_not_cover_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    total = BoundaryEnergy(energy_j=374.6, bound_j=1.0, mean_w=37.46, peak_w=37.48, valid=True)
    flags = ["frozen", "mig_parent", "one_value"]
    _report(CommandResult([], WindowEnergy("w", 0.0, 10.0, boundaries={"device": total}, flags=flags)), [], None)
    table = capsys.readouterr().err
    assert "mean 37.5 W, peak 37.5 W" in table and re.findall(r"\n  (\w+): ", table) == ["mig_parent", "one_value", "written"]


def test_a_picture_keeps_the_peak_and_says_where_nothing_was_read() -> None:
    points = [(float(i), 500.0 if i == 7777 else 100.0) for i in range(20000)]
    assert max(w for _, w in downsampled(points)) == 500.0
    assert len(downsampled(points)) <= 1600
    empty = svg(ReadingStore(), 0.0, 1.0, "sleep <1>")
    assert "no power reading in this window" in empty and "power [W]: sleep &lt;1&gt;" in empty and "NaN" not in empty


def test_import_is_light() -> None:
    heavy = ("torch", "numpy", "pydantic", "pynvml", "pandas", "rich", "ctypes")
    code = f"import sys, caraml.power.__main__; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import caraml.power"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1.5  # of computing; 0.05 s on a quiet machine


def test_sampling_costs_little() -> None:
    from caraml.power import Meter

    with Meter(["fake"]):
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(2.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert used < 0.2  # some 2 ms on a quiet machine


def test_a_signal_that_comes_while_the_command_starts_is_not_lost() -> None:
    child = _Child(["sleep", "30"])
    threading.Thread(target=child.forward, args=(signal.SIGTERM,)).start()
    assert child.run() == -signal.SIGTERM
