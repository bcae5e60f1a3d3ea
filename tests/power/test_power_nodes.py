"""Many nodes and ranks: one total, nothing twice, nothing missing in silence; and the meters that belong to a node."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest

from caraml.base.errors import InputError
from caraml.base.processes import Election, job, rank, world_size
from caraml.metrics.energy import powers
from caraml.metrics.model import Metric
from caraml.power import Meter
from caraml.power.energy import boundary_energy
from caraml.power.merge import displaced, merge, merge_folder, over_nodes
from caraml.power.model import Boundary, Channel, ChannelEnergy, Kind, Reading, WindowEnergy
from caraml.power.source import SourceUnavailable, create
from caraml.power.sources.board import RedfishSource
from caraml.power.sources.csvfile import CsvSource
from tests.fakes.power.sensors import channel


def window(
    node: str, domains: dict[str, float | None], *, boundary: Boundary = "device", length: float = 10.0, start: float = 0.0
) -> WindowEnergy:
    channels = [
        ChannelEnergy(
            id=name,
            label=name,
            source="s",
            boundary=boundary,
            hardware="h",
            method="counter",
            energy_j=energy,
            bound_j=None if energy is None else 0.01 * energy,
            mean_w=None if energy is None else energy / length,
            partial_j=5.0 if energy is None else None,
            flags=["partial_coverage"] if energy is None else [],
            reason="dead" if energy is None else None,
        )
        for name, energy in domains.items()
    ]
    found = WindowEnergy("train", start, start + length, channels, {boundary: boundary_energy(channels, length)}, node=node)
    found.valid = found.boundaries[boundary].valid
    return found


def test_nodes_add_up_with_their_bounds() -> None:
    merged = merge([("n1", window("n1", {"a": 100, "b": 200})), ("n2", window("n2", {"a": 300}))], ["n1", "n2"])
    total = merged.boundaries["device"]
    assert merged.valid
    assert (total.total_j, total.partial_j) == (600, None)
    assert total.bound_j == pytest.approx(6.0)
    assert total.mean_w == pytest.approx(60)
    assert total.nodes == {"n1": 300, "n2": 300}


@pytest.mark.parametrize("early", [False, True])
def test_a_node_whose_edges_lie_beside_the_others_has_that_in_its_bound(early: bool) -> None:
    """Ten seconds at 500 W between two at rest, and a node that opens or closes its window one second away from the others."""
    first, late = window("n1", {"a": 5000}), window("n2", {"b": 5000}, length=11, start=-1.0 if early else 0.0)
    late.channels[0].peak_w = 500.0
    late.channels[0].mean_va, late.channels[0].bound_va, late.channels[0].peak_va = 550.0, 1.0, 600.0
    late.flags = ["clock_step"]
    wider = displaced(late, 1.0)
    assert wider.channels[0].bound_j == pytest.approx(sum(wider.channels[0].bound_parts.values()) + 50) == pytest.approx(550)
    assert wider.flags == ["clock_step"] and wider.valid and displaced(late, 0.0) is late
    assert wider.boundaries["device"].bound_va == pytest.approx(1 + 600 / 11), "apparent power has the same edges"
    truth, boundary = 10_000.0, over_nodes({"n1": first, "n2": wider}).boundaries["device"]
    assert boundary.energy_j is not None and boundary.bound_j is not None
    assert 0 < truth - boundary.energy_j <= boundary.bound_j < 0.06 * truth
    assert displaced(window("n2", {"b": None}), 1.0).boundaries["device"].partial_j == 5.0, "no number, and no bound of it"


def test_ranks_of_one_node_count_each_device_once() -> None:
    parts = [
        ("rank 0", window("n1", {"gpu0": 100, "gpu1": 100})),
        ("rank 1", window("n1", {"gpu1": 101, "gpu2": 100}, length=10.1)),
    ]
    total = merge(parts).boundaries["device"]
    assert total.total_j == 301


@pytest.mark.parametrize("first", ["n1", "n2"])
def test_the_energy_of_nodes_that_worked_for_unequal_times_is_their_sum(first: str) -> None:
    """A command takes as long as it takes on each node: no order of the files makes its energy that of another time."""
    parts = {"n1": window("n1", {"a": 1000}), "n2": window("n2", {"b": 2000}, length=20.0)}
    total = merge([(node, parts[node]) for node in sorted(parts, key=first.__ne__)]).boundaries["device"]
    assert (total.total_j, total.bound_j, total.nodes) == (3000, pytest.approx(30), {"n1": 1000, "n2": 2000})


def test_a_missing_node_makes_the_total_unknown() -> None:
    merged = merge([("n1", window("n1", {"a": 100}))], ["n1", "n2"])
    total = merged.boundaries["device"]
    assert (total.total_j, total.partial_j) == (None, 100)
    assert merged.missing == ["n2"]
    assert not merged.valid


def test_a_dead_sensor_on_one_node_makes_the_total_unknown() -> None:
    merged = merge([("n1", window("n1", {"a": 100})), ("n2", window("n2", {"a": None}))])
    total = merged.boundaries["device"]
    assert (total.total_j, total.partial_j) == (None, 105)
    assert not merged.valid
    assert "dead" in (merged.reason or "")


def test_a_boundary_that_one_node_lacks_is_not_a_total() -> None:
    merged = merge([("n1", window("n1", {"a": 100})), ("n2", window("n2", {"c": 50}, boundary="cpu"))])
    assert merged.boundaries["device"].total_j is None
    assert merged.boundaries["cpu"].total_j is None


@pytest.mark.parametrize("ended", [{}, {"signal": 11, "reason": "the command was ended by SIGSEGV"}])
def test_a_total_is_valid_where_no_rank_was_ended_also_without_a_sensor(tmp_path: Path, ended: dict[str, Any]) -> None:
    """One rank of a node reads its processors: that a signal had ended another, which has no sensor, went unnoticed."""
    bare = WindowEnergy("train", 0.0, 10.0, reason="no power sensor", node="n1")
    of_ranks = [
        {"energy": window("n1", {"a": 100}, boundary="cpu").to_dict(), "valid": True},
        {"energy": bare.to_dict(), "valid": False, "reason": bare.reason, **ended},
    ]
    for number, known in enumerate(of_ranks):
        (tmp_path / f"energy.{number}.json").write_text(json.dumps({"rank": number, "world_size": 2, **known}))
    merged = merge_folder(tmp_path)
    assert (merged.valid, merged.boundaries["cpu"].total_j) == (not ended, 100)
    assert merged.reason == (f"rank 1: {ended['reason']}" if ended else None)


def test_only_windows_of_one_name_are_merged() -> None:
    other = window("n2", {"a": 1})
    other.name = "test"
    with pytest.raises(InputError, match="different names"):
        merge([("n1", window("n1", {"a": 1})), ("n2", other)])
    with pytest.raises(InputError):
        merge([])


def test_one_process_per_node_is_elected(tmp_path: Path) -> None:
    first, second = Election("job 1", tmp_path), Election("job 1", tmp_path)
    assert (first.elected, second.elected) == (True, False)
    assert Election("job 2", tmp_path).elected
    second.close()
    first.close()
    assert Election("job 1", tmp_path).elected


def test_ranks_come_from_the_launcher() -> None:
    assert rank({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}) == 3
    assert rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}) is None
    assert rank({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) == 1
    assert rank({}) is None
    assert world_size({"PMI_SIZE": "x"}) is None


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_job_s_script_is_no_rank_of_its_tasks(step: dict[str, str]) -> None:
    script = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", **step}
    assert (rank(script), world_size(script)) == (None, None)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert (rank(script | mpi), world_size(script | mpi)) == (1, 2)
    assert rank(script | {"PMIX_RANK": "3"}) == 3, "of a launcher that does not say how many there are"


def test_what_a_shell_under_srun_hands_on_makes_no_rank() -> None:
    """``srun --pty bash`` where PMIx is Slurm's default, then sbatch: the job inherits the shell's rank, which was 0."""
    shell = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.4.0"}
    script = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", **shell}
    assert (rank(script), world_size(script)) == (None, None)
    steps = [{**script, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"} for step in ("0", "1")]
    assert [rank(step) for step in steps] == [3, 3], "of a step that is started without PMIx"
    assert [job(step) for step in steps] == ["5.0", "5.1"]
    own = steps[0] | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.5.0"}
    assert (rank(own), world_size(own), job(own)) == (3, 4, "5.0")


def test_ranks_of_flux_and_of_pals_share_the_name_of_their_launch() -> None:
    """Both say the rank as PMI does; Flux has a job for each launch, and PALS numbers those within a job of PBS."""
    flux = [{"FLUX_JOB_ID": "f2Z", "FLUX_TASK_LOCAL_ID": "0", "PMI_RANK": each, "PMI_SIZE": "2"} for each in ("0", "1")]
    assert [rank(each) for each in flux] == [0, 1] and {job(each) for each in flux} == {"f2Z"}
    inside = [{"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "FLUX_JOB_ID": launch} for launch in ("f2Z", "f3A")]
    assert [job(each) for each in inside] == ["5.f2Z.0", "5.f3A.0"], "srun has started Flux once"
    pals = [{"PBS_JOBID": "7.pbs", "PALS_APID": launch, "PMI_RANK": "1", "PMI_SIZE": "2"} for launch in ("a", "b")]
    assert [job(each) for each in pals] == ["7.pbs.a", "7.pbs.b"]


# --- meters of the node -----------------------------------------------------------------------------------------------


def test_a_csv_file_that_grows_is_a_meter(tmp_path: Path) -> None:
    file, stop = tmp_path / "pdu.csv", threading.Event()
    file.write_text("timestamp,power_w,apparent_va\n")

    def log() -> None:
        while not stop.wait(0.05):
            with file.open("a") as out:
                out.write(f"{datetime.now(UTC).isoformat()},400.0,500.0\n")

    logger = threading.Thread(target=log)

    def written(lines: int) -> None:
        """Wait for so many lines more, whatever the machine does meanwhile."""
        wanted, deadline = file.read_text().count("\n") + lines, time.monotonic() + 300
        while file.read_text().count("\n") < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    logger.start()
    try:
        written(10)
        with Meter([f"csv:{file}"]) as meter:
            written(6)
            with meter.window("w") as found:
                written(30)
            energy = found.energy
    finally:
        stop.set()
        logger.join()
    node = energy.boundaries["node_ac"]
    assert node.energy_j == pytest.approx(400 * energy.duration_s, abs=node.bound_j)
    assert energy.channels[0].readings > 15
    assert len(energy.channels) == 1, "apparent power is no energy of its own"
    assert (node.mean_va, node.peak_va) == (pytest.approx(500), pytest.approx(500))
    assert meter.latest_power_w() in (400.0, None)


def test_apparent_power_is_summed_over_nodes_that_all_have_it() -> None:
    first, second = window("n1", {"a": 5000}, boundary="node_ac"), window("n2", {"b": 5000}, boundary="node_ac")
    first.boundaries["node_ac"].mean_va, first.boundaries["node_ac"].peak_va, first.boundaries["node_ac"].bound_va = 600.0, 700.0, 6.0
    found = powers(over_nodes({"n1": first, "n2": second}))
    assert {(found[name].value, found[name].reason) for name in APPARENT} == {(None, "n2: its sensor gives watts only")}
    found = powers(over_nodes({"n1": first, "n2": WindowEnergy("w", 0, 10, reason="no power sensor")}))
    assert {(found[name].value, found[name].reason) for name in APPARENT} == {(None, "n2: no power sensor")}
    second.boundaries["node_ac"].mean_va, second.boundaries["node_ac"].peak_va = 400.0, 450.0
    second.boundaries["node_ac"].bound_va = 4.0
    total = over_nodes({"n1": first, "n2": second}).boundaries["node_ac"]
    assert (total.mean_va, total.bound_va, total.peak_va) == (1000, 10, 1150)


def test_meters_of_one_file_name_are_told_apart(tmp_path: Path) -> None:
    """Two supplies, each with its log, far below the folders that tell them apart: their powers add up, and neither's readings are the
    other's."""
    files = [tmp_path / place / ("below" * 20) / "pdu.csv" for place in ("left", "right")]
    now = time.time()
    for file, watts in zip(files, (400, 100), strict=True):
        file.parent.mkdir(parents=True)
        file.write_text("time,power_w,apparent_va\n" + "".join(f"{now - 60 + second},{watts},{1.25 * watts}\n" for second in range(61)))
    with Meter([f"csv:{file}" for file in files]) as meter:
        now = time.monotonic()
    node = meter.energy("w", now - 50, now - 10).boundaries["node_ac"]
    assert (node.mean_w, node.mean_va) == (pytest.approx(500), pytest.approx(625)) and len(set(node.channels)) == 2


@pytest.mark.parametrize(("ahead", "words"), [(-3.0, None), (0.9, None), (3.0, "s later than this"), (40.0, "s later than this")])
def test_a_meter_whose_clock_is_ahead_is_not_read(tmp_path: Path, ahead: float, words: str | None) -> None:
    """What it logged before the window was taken for the window's power."""
    file, now = tmp_path / "pdu.csv", time.time()
    file.write_text("time,power_w\n" + "".join(f"{now - 60 + second + ahead},400\n" for second in range(61)))
    with Meter([f"csv:{file}"]) as meter:
        assert [words in reason for reason in meter.reasons] == [True] if words is not None else not meter.reasons


def test_a_file_s_times_are_none_in_a_window_in_which_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows were dated by both clocks, and the power at one time was taken for that at another."""
    file, real, now = tmp_path / "pdu.csv", time.time, time.time()
    file.write_text("time,power_w\n" + "".join(f"{now - 60 + 0.1 * step},400.0\n" for step in range(609)))
    with Meter([f"csv:{file}"]) as meter:
        start = meter.mark()
        monkeypatch.setattr(time, "time", lambda: real() - 3)
        found = meter.energy("w", start, meter.mark())
    assert found.flags == ["clock_step", "partial_coverage"] and not found.valid
    assert found.boundaries["node_ac"].energy_j is None and "which was set meanwhile" in (found.reason or "")


def test_a_node_whose_clock_is_set_back_meanwhile_reads_no_row_of_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = tmp_path / "pdu.csv", time.time()
    file.write_text("time,power_w,apparent_va\n" + "".join(f"{now - 60 + second},400,500\n" for second in range(61)))
    source = CsvSource(file)
    source.open()
    assert len(source.read()) == 2 * 61
    monkeypatch.setattr(time, "time", lambda: now - 40)
    with file.open("a") as out:
        out.write(f"{now + 1},400,500\n")
    (found,) = source.read()
    assert found.value is None and "41 s later than this node's clock" in (found.error or "")


@pytest.mark.parametrize("outlet", ["", "left"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_meter_that_several_nodes_read_is_not_added_to_itself(tmp_path: Path, shared: bool, outlet: str) -> None:
    """One file on a disk that nodes share, or a file of one name on the disk of each."""
    windows, now = {}, time.time()
    rows = "".join(f"{now - 60 + second},400,500{outlet and ','}{outlet}\n" for second in range(61))
    for node in ("n1", "n2"):
        file = tmp_path / ("" if shared else node) / "pdu.csv"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"time,power_w,apparent_va{outlet and ',channel'}\n{rows}")
        with Meter([f"csv:{file}"]) as meter:
            later = time.monotonic()
        windows[node] = meter.energy("w", later - 50, later - 10)
    total = over_nodes(windows)
    node, found = total.boundaries["node_ac"], powers(total)
    if not shared:
        assert (node.mean_w, node.mean_va) == (pytest.approx(800), pytest.approx(1000)) and total.valid
        return
    assert node.energy_j is None and node.mean_va is None and not total.valid and node.partial_j == pytest.approx(16_000)
    reasons = {str(found[name].reason) for name in ("node_energy", *APPARENT)}
    assert all(reason.startswith("n2: its meter csv:") and "is that of n1, too" in reason for reason in reasons), reasons


@pytest.mark.parametrize("second", ["pdu.csv", "./pdu.csv", "{here}/pdu.csv", "linked.csv", "hard.csv", "below/../pdu.csv"])
def test_one_meter_by_two_paths_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    """Its energy was added to itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pdu.csv").write_text(f"time,power_w\n{time.time()},400\n")
    (tmp_path / "linked.csv").symlink_to("pdu.csv")
    (tmp_path / "hard.csv").hardlink_to("pdu.csv")
    (tmp_path / "below").mkdir()
    second = second.format(here=tmp_path)
    with pytest.raises(InputError, match="named twice" if second == "pdu.csv" else rf"csv:pdu\.csv and csv:{second} are one meter"):
        Meter(["csv:pdu.csv", f"csv:{second}"])


def test_two_meters_that_are_not_there_yet_are_two(tmp_path: Path) -> None:
    with Meter([f"csv:{tmp_path}/a.csv", f"csv:{tmp_path}/b.csv"]) as meter:
        assert len(meter.reasons) == 2
    with pytest.raises(InputError, match="are one meter"):
        Meter([f"csv:{tmp_path}/a.csv", f"csv:{tmp_path}/./a.csv"])
    with pytest.raises(InputError, match="fake is named twice"):
        Meter(["fake", "fake"])


@pytest.mark.parametrize("period", [0.5, 1.0, 5.0])
def test_a_meter_that_logs_seldom_has_no_gaps_but_where_rows_are_missing(tmp_path: Path, period: float) -> None:
    file, now = tmp_path / "pdu.csv", time.time()
    rows = [(now - 300 + period * number, 400.0) for number in range(int(300 / period) + 1)]

    def measured(kept: list[tuple[float, float]]) -> WindowEnergy:
        file.write_text("time,power_w\n" + "".join(f"{at},{watts}\n" for at, watts in kept))
        with Meter([f"csv:{file}"]) as meter:
            shift = time.monotonic() - time.time()
        return meter.energy("w", now - 250 + shift, now - 50 + shift)

    whole, holed = measured(rows), measured([(at, watts) for at, watts in rows if not -200 < at - now < -180])
    assert whole.valid and whole.channels[0].coverage == 1 and whole.boundaries["node_ac"].mean_w == pytest.approx(400)
    assert not holed.valid and "partial_coverage" in holed.flags and 0.85 < holed.channels[0].coverage < 0.92


@pytest.mark.parametrize(
    ("header", "written", "bound_w"), [("power_kw", "0.4", 50), ("power_kw", "0.44", 5), ("power_w", "440", 0.5), ("power_w", "4.4e+02", 5)]
)
def test_powers_of_a_csv_file_are_known_to_the_last_written_decimal(tmp_path: Path, header: str, written: str, bound_w: float) -> None:
    file, now = tmp_path / "pdu.csv", time.time()
    file.write_text(f"time,{header}\n" + "".join(f"{now - number},{written}\n" for number in range(300, -1, -1)))
    with Meter([f"csv:{file}"]) as meter:
        shift = time.monotonic() - time.time()
    found = meter.energy("w", now - 250 + shift, now - 50 + shift)
    (one,) = found.channels
    assert found.valid and one.bound_parts["resolution"] == pytest.approx(200 * bound_w)
    assert one.energy_j == pytest.approx(440 * 200, abs=one.bound_j)


class Supply:
    """A supply's sensor with these channels, of which apparent power is silent from ``silent[0]`` to ``silent[1]`` s."""

    name, min_interval_s = "supply", 0.0
    SHOWN: ClassVar[dict[Kind, float]] = {"power_instant": 400.0, "apparent_va": 500.0}

    def __init__(self, kinds: tuple[Kind, ...], silent: tuple[float, float] = (0.0, 0.0)) -> None:
        self._kinds, self._silent, self._begin = kinds, silent, time.monotonic()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def channels(self) -> list[Channel]:
        return [channel(kind, source=self.name, boundary="node_ac", domain="supply", hardware="node") for kind in self._kinds]

    def read(self) -> list[Reading]:
        now = time.monotonic()
        hushed = self._silent[0] < now - self._begin < self._silent[1]
        return [Reading(f"t:{kind}", now, now, self.SHOWN[kind]) for kind in self._kinds if kind != "apparent_va" or not hushed]


def supplied(*kinds: Kind, silent: tuple[float, float] = (0.0, 0.0)) -> tuple[WindowEnergy, dict[str, Metric]]:
    """A window of ten seconds, from the first on, and its metrics."""
    with Meter([Supply(kinds, silent)]) as meter:
        time.sleep(1)
        with meter.window("w") as found:
            time.sleep(10)
        return found.energy, powers(found.energy)


APPARENT = ("node_mean_apparent_power", "node_max_apparent_power", "power_factor", "node_apparent_energy")


@pytest.mark.usefixtures("virtual_time")
def test_power_factor_is_watts_over_volt_amperes() -> None:
    energy, metrics = supplied("power_instant", "apparent_va")
    assert [metrics[name].value for name in APPARENT] == [pytest.approx(value) for value in (500, 500, 0.8, 500 * energy.duration_s / 3600)]
    assert energy.boundaries["node_ac"].energy_j == pytest.approx(4000, rel=1e-3)


@pytest.mark.parametrize("period", [0.5, 2.0])
def test_apparent_energy_is_the_integral_with_a_bound_that_holds_it(tmp_path: Path, period: float) -> None:
    """Apparent power that rises by 1 VA/s, of which each row is the mean since the one before, and watts that do not: each has its own
    integral, and no joule comes from volt-amperes."""
    file, now = tmp_path / "pdu.csv", time.time()
    rows = [(period * number, 100 + period * (number - 0.5)) for number in range(int(300 / period) + 1)]
    file.write_text("time,power_w,apparent_va\n" + "".join(f"{now - 300 + at},80,{va}\n" for at, va in rows))
    with Meter([f"csv:{file}"]) as meter:
        shift = time.monotonic() - time.time()
    energy = meter.energy("w", now - 250 + shift, now - 50 + shift)
    found, mean = powers(energy)["node_apparent_energy"], powers(energy)["node_mean_apparent_power"]
    assert (found.unit, found.scope, found.low) == ("VAh", "node_ac", None) and found.bound is not None and mean.bound is not None
    assert found.value == pytest.approx((100 + 150) * 200 / 3600, abs=found.bound) and 0 < found.bound < 0.02 * (found.value or 0)
    assert (mean.value, mean.bound) == (pytest.approx(18 * (found.value or 0)), pytest.approx(18 * found.bound))
    assert energy.boundaries["node_ac"].energy_j == pytest.approx(80 * 200) and len(energy.boundaries["node_ac"].channels) == 1


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(("silent", "words"), [((3, 8), "no reading during"), ((3, 99), "silent for the last"), ((-1, 99), "no reading")])
def test_apparent_power_with_a_gap_is_unknown_and_the_watts_beside_it_stay(silent: tuple[float, float], words: str) -> None:
    energy, metrics = supplied("power_instant", "apparent_va", silent=silent)
    assert energy.valid and metrics["node_energy"].value == pytest.approx(4000, rel=1e-3)
    for name in APPARENT:
        assert metrics[name].value is None and words in str(metrics[name].reason), metrics[name]


@pytest.mark.usefixtures("virtual_time")
def test_a_sensor_of_apparent_power_alone_has_no_energy() -> None:
    energy, metrics = supplied("apparent_va")
    assert [metrics[name].value for name in APPARENT] == [pytest.approx(500), 500, None, pytest.approx(500 * energy.duration_s / 3600)]
    assert not energy.valid and metrics["node_energy"].value is None
    assert "apparent power only" in str(metrics["node_energy"].reason) and metrics["power_factor"].reason == "no power is known"


def test_a_node_without_its_apparent_power_leaves_no_sum_and_its_reason() -> None:
    first, second = window("n1", {"a": 5000}, boundary="node_ac"), window("n2", {"b": None}, boundary="node_ac")
    for one in (first, second):
        one.boundaries["node_ac"].mean_va = one.boundaries["node_ac"].peak_va = 600.0
    assert over_nodes({"n1": first, "n2": second}).boundaries["node_ac"].mean_va == 1200, "known, although the energy is not"
    second.boundaries["node_ac"].mean_va, second.boundaries["node_ac"].va_reason = None, "silent"
    total = over_nodes({"n1": first, "n2": second})
    assert total.boundaries["node_ac"].mean_va is None
    assert powers(total)["node_mean_apparent_power"].reason == "n2: silent"
    assert over_nodes({"n1": first, "n2": WindowEnergy("w", 0, 100)}).boundaries["node_ac"].mean_va is None


def test_a_row_without_apparent_power_has_its_power(tmp_path: Path) -> None:
    file = tmp_path / "m.csv"
    file.write_text(f"time,power_w,apparent_va\n{time.time() - 1},10,11\n")
    source, name = create(f"csv:{file}"), f"csv:{file}"
    source.open()
    assert [(channel.kind, channel.id) for channel in source.channels()] == [("power_mean", name), ("apparent_va", f"{name}:va")]
    assert [reading.value for reading in source.read()] == [10, 11]
    with file.open("a") as out:
        out.write(f"{time.time()},12,\n")
    assert [(reading.channel, reading.value) for reading in source.read()] == [(name, 12)]


def test_units_of_a_csv_file_are_in_its_header(tmp_path: Path) -> None:
    now = time.time()
    file = tmp_path / "m.csv"
    file.write_text(f"time,channel,energy_kwh\n{now - 2},left,1.0\n{now - 1},left,1.5\n{now - 1},right,2.0\n{now},le")
    source, name = create(f"csv:{file}"), f"csv:{file}"
    source.open()
    readings = {(r.channel, round(r.value or 0)) for r in source.read()}
    assert readings == {(f"{name}:left", 3600000), (f"{name}:left", 5400000), (f"{name}:right", 7200000)}
    with file.open("a") as out:
        out.write("ft,1.6\n")
    assert [round(r.value or 0) for r in source.read()] == [5760000]
    with file.open("a") as out:
        out.write("nonsense,left,x\n")
    assert {r.value for r in source.read()} == {None}


def test_an_outlet_that_comes_later_leaves_unknown_what_it_was_not_there_for(tmp_path: Path) -> None:
    """Its energy before its first row is in no sum: a sum of the others would be too little."""
    file, begin = tmp_path / "pdu.csv", time.time()
    file.write_text("time,channel,power_w,apparent_va\n")
    with pytest.raises(SourceUnavailable, match="no outlet yet"):
        create(f"csv:{file}").open()

    def log(first: float, last: float, *outlets: tuple[str, int]) -> None:
        with file.open("a") as out:
            out.writelines(
                f"{begin + at / 10},{name},{watts},{watts}\n" for name, watts in outlets for at in range(int(10 * first), int(10 * last))
            )

    log(-10, -5, ("b", 100), ("a", 10))
    with Meter([f"csv:{file}"]) as meter:
        shift = time.monotonic() - time.time()
        log(-5, 0, ("b", 100), ("a", 10), ("c", 1))
        assert meter.store.wait_until(lambda: len(meter.store.series(f"csv:{file}:c")) == 50, 300)
        assert [channel.label for channel in meter.channels if channel.kind != "apparent_va"] == ["pdu.csv b", "pdu.csv a", "pdu.csv c"]
    later, earlier = (meter.energy("w", begin + at + shift, begin - 1 + shift) for at in (-4, -8))
    assert later.boundaries["node_ac"].energy_j == pytest.approx(3 * 111) and later.valid
    assert earlier.boundaries["node_ac"].energy_j is None and "pdu.csv:c: the first reading came" in str(earlier.reason)
    assert len({row[0] for row in meter.rows()}) == 6


@pytest.mark.parametrize(("text", "words"), [("", "empty"), ("a,b\n", "expected one of")])
def test_a_csv_file_without_a_header_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises((SourceUnavailable, InputError), match=words):
        create(f"csv:{tmp_path / 'm.csv'}").open()
    with pytest.raises(InputError, match="needs a file"):
        create("csv")


DCMI = """
    Instantaneous power reading:                   412 Watts
    Minimum during sampling period:                  8 Watts
    Sampling period:                          00000002 Seconds.
    Power reading state is:                   {state}
"""


def answer(monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0, error: str = "") -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code, text, error))


def test_ipmi_watts_and_averaging_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, DCMI.format(state="activated"))
    source = create("ipmi")
    source.open()
    (channel,) = source.channels()
    assert (channel.boundary, channel.mean_window_s, channel.resolution) == ("node_ac", 2.0, 1.0)
    assert source.read()[0].value == 412
    answer(monkeypatch, DCMI.format(state="deactivated"))
    assert source.read()[0].value is None
    answer(monkeypatch, DCMI.format(state="activated").replace("412", "0"))
    assert source.read()[0].value is None, "as controllers without a meter answer"
    answer(monkeypatch, "", code=1, error="Could not open device at /dev/ipmi0")
    with pytest.raises(SourceUnavailable, match="/dev/ipmi0") as closed:
        create("ipmi").open()
    assert closed.value.kind == "unreadable"


@pytest.mark.parametrize(
    ("document", "watts"),
    [
        ({"PowerControl": [{"PowerConsumedWatts": 350}, {"PowerConsumedWatts": 80}]}, 350),
        ({"ReadingType": "Power", "Reading": 351.5, "AveragingInterval": "PT20S"}, 351.5),
        ({"PowerWatts": {"Reading": 352.0, "ApparentVA": 400.0, "PowerFactor": 0.88}}, 352.0),
        ({"PowerWatts": {"Reading": 0.0, "ApparentVA": 0.0}}, 0.0),
        ({"ReadingType": "Temperature", "Reading": 40}, None),
        ({"PowerControl": [{}]}, None),
        ({"PowerControl": [{"PowerConsumedWatts": 0}]}, None),
        ({"PowerControl": [{"PowerConsumedWatts": None}, {"PowerConsumedWatts": 80}]}, None),
        ({"PowerControl": ["text"]}, None),
    ],
)
def test_redfish_watts(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], watts: float | None) -> None:
    seen = []

    class Controller(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Controller)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("REDFISH_USER", "u")
    monkeypatch.setenv("REDFISH_PASSWORD", "p")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of the job, for the web: nobody is there
    source = create(f"redfish:http://127.0.0.1:{server.server_port}/redfish/v1/Chassis/1/Power")
    try:
        if watts is None:
            with pytest.raises(SourceUnavailable, match="PowerConsumedWatts"):
                source.open()
            return
        source.open()
        assert source.read()[0].value == watts
        assert source.channels()[0].mean_window_s == (20.0 if "Reading" in document else 1.0)
        name = source.channels()[0].domain
        assert [(c.kind, c.domain) for c in source.channels()[1:]] == ([("apparent_va", name)] if "PowerWatts" in document else [])
        assert [r.value for r in source.read()[1:]] == ([document["PowerWatts"]["ApparentVA"]] if "PowerWatts" in document else [])
        assert seen[0] == "Basic dTpw"
    finally:
        server.shutdown()
        server.server_close()
    assert {reading.value for reading in source.read()} == {None}


class Outlets(http.server.BaseHTTPRequestHandler):
    """The outlets of a PDU, each with a power of its own, and the root of the service, which says which PDU it is."""

    uuid = "92384634"

    def do_GET(self) -> None:
        number = self.path.rstrip("/").rpartition("/")[2].removeprefix("v1")
        told = {"PowerWatts": {"Reading": int(number) * 100, "ApparentVA": int(number) * 125}} if number else {"UUID": self.uuid}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_outlets_of_one_controller_add_up_and_each_counts_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their readings had one name, so their sum was the mean of them."""
    with pytest.raises(SourceUnavailable, match=r"'10\.0\.0\.7' is no address(?s:.*)redfish:https://"):
        create("redfish:10.0.0.7").open()
    monkeypatch.setattr("caraml.power.sources.board.RedfishSource.min_interval_s", 0.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Outlets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"redfish:http://127.0.0.1:{server.server_port}/redfish/v1/PowerEquipment/RackPDUs/1/Outlets"
        with Meter([f"{address}/1", f"{address}/4"]) as meter, meter.window("w") as both:
            time.sleep(0.3)
        with Meter([f"{address}/4"]) as other, other.window("w") as one:
            time.sleep(0.3)
        first, second = both.energy, one.energy
        server.shutdown()
    assert (first.boundaries["node_ac"].mean_w, first.boundaries["node_ac"].mean_va) == (pytest.approx(500), pytest.approx(625))
    assert len({channel.id for channel in first.channels}) == 2 and second.boundaries["node_ac"].mean_w == pytest.approx(400)
    assert "that of n1, too" in str(over_nodes({"n1": first, "n2": second}).boundaries["node_ac"].reason)


@pytest.mark.parametrize("second", ["http://127.0.0.1:{}/1/", "http://localhost:{}/1"])
def test_one_resource_by_two_addresses_is_not_added_to_itself(second: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Outlets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        with Meter([f"redfish:http://127.0.0.1:{port}/1", f"redfish:{second.format(port)}"]) as meter, meter.window("w") as twice:
            time.sleep(0.1)
        server.shutdown()
    node = twice.energy.boundaries["node_ac"]
    assert (node.energy_j, node.mean_va) == (None, None) and "name it once" in str(node.reason) and "name it once" in str(node.va_reason)
    with pytest.raises(SourceUnavailable, match="a part of a resource"):
        create("redfish:http://127.0.0.1/redfish/v1/Chassis/1/Power#/PowerControl/1").open()


def test_a_uuid_of_zeros_names_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that each had a controller of their own had no sum."""
    windows = {}
    monkeypatch.setattr(Outlets, "uuid", "00000000-0000-0000-0000-000000000000")
    for node in ("n1", "n2"):
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Outlets) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with Meter([f"redfish:http://127.0.0.1:{server.server_port}/1"]) as meter, meter.window("w") as own:
                time.sleep(0.1)
            windows[node] = own.energy
            server.shutdown()
    assert over_nodes(windows).boundaries["node_ac"].mean_w == pytest.approx(200)


def test_the_password_of_a_controller_goes_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    class Controller(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(302 if self.path in targets else 200)
            if self.path in targets:
                self.send_header("Location", targets[self.path])
            self.end_headers()
            self.wfile.write(b" " * (17 << 20) if self.path == "/long" else b'{"ReadingType": "Power", "Reading": 5}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Controller) as server:
        port = server.server_port
        targets = {"/moved": "/here", "/away": f"http://localhost:{port}/caught", "/file": "ftp://127.0.0.1/x"}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("REDFISH_USER", "u")
        monkeypatch.setenv("REDFISH_PASSWORD", "p")
        source = create(f"redfish:http://127.0.0.1:{port}/moved")
        source.open()
        assert source.read()[0].value == 5 and seen[-1] == ("/here", "Basic dTpw")
        for path, why in (("/away", f"localhost:{port}"), ("/file", "ftp"), ("/long", "more than 16,777,216 bytes")):
            with pytest.raises(SourceUnavailable, match=why):
                create(f"redfish:http://127.0.0.1:{port}{path}").open()
        server.shutdown()
    assert "/caught" not in [path for path, _ in seen]


def test_of_a_long_csv_file_the_header_and_the_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger may have run for a year."""
    path, now = tmp_path / "meter.csv", time.time()
    path.write_text("time,power_w\n" + "".join(f"{now - 1100 + i},{i}.0\n" for i in range(1000)))
    monkeypatch.setattr("caraml.power.sources.csvfile.LOG_END", 500)
    source = create(f"csv:{path}")
    source.open()
    values = [reading.value for reading in source.read()]
    assert 10 < len(values) < 40 and values[-1] == 999 and values == sorted(values, key=float)  # type: ignore[arg-type]
    with path.open("a") as file:
        file.writelines(f"{now - 100 + i},{1000 + i}.0\n" for i in range(1, 100))
    later = [reading.value for _ in range(10) for reading in source.read()]
    assert later == [1000.0 + i for i in range(1, 100)], "what comes while it is read is read whole, piece by piece"
    with path.open("a") as file:
        file.write("7" * (1 << 17))
    monkeypatch.setattr("caraml.power.sources.csvfile.LOG_END", 1 << 20)
    assert "a line of more than 65,536 bytes" in str(source.read()[0].error)


def test_slurm_energy_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(SourceUnavailable, match="SLURM_JOB_ID"):
        create("slurm").open()
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    answer(monkeypatch, "12345\n")
    source = create("slurm")
    source.open()
    assert source.read()[0].value == 12345
    assert source.channels()[0].domain == "slurm:77.0"
    answer(monkeypatch, "0\n")
    assert source.read()[0].value is None


def test_mpirun_inside_a_slurm_job_is_believed_before_slurm() -> None:
    slurm = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"}
    mpi = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun@1"}
    assert (rank(slurm | mpi), world_size(slurm | mpi)) == (7, 8)
    assert job(slurm | mpi) == "5.prterun@1"
    assert rank(slurm) == 0


@pytest.mark.parametrize("document", [{"PowerControl": 5}, {"PowerWatts": {"Reading": {}}}, {"ReadingType": "Power", "Reading": []}])
def test_redfish_answers_of_another_form_are_no_readings(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    """One of them ended the readings of the whole run."""
    good = {"ReadingType": "Power", "Reading": 5}
    answers = [good, good, document, good, document]
    monkeypatch.setattr(RedfishSource, "_ask", lambda *_: answers.pop(0))
    source = create("redfish:http://127.0.0.1/redfish/v1/Chassis/1/Power")
    source.open()
    assert [source.read()[0].value for _ in range(2)] == [None, 5]
    with pytest.raises(SourceUnavailable, match="does not answer with a power"):
        source.open()
