"""Clocks of several nodes: compared by themselves, with an uncertainty that holds, and never at a measurement's expense."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from caraml.power import partners
from caraml.power.clock import ClockOffset, drift, node_key
from caraml.power.command import measure
from caraml.power.exchange import Address, ClockServer, measure_offset, own_hosts
from caraml.power.merge import MergedEnergy, Part, merge, merge_folder
from caraml.power.model import WindowEnergy
from caraml.power.node import job, node_count, rank, world_size
from caraml.power.partners import ADDRESS_FILE, Asking, Reference, find, partner, publish

ELSEWHERE = Path(__file__).resolve().parents[1] / "fakes" / "power" / "elsewhere.py"
SHIFTS = (0.0, 1234.5, -77.25)


def node(base: Path, number: int, size: int, *, shift: float, rate: float = 0.0) -> subprocess.Popen[str]:
    """The wrapper on a node of its own, with its own folder for locks and a shared one for results."""
    own = base / f"node{number}"
    own.mkdir()
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(number), "SLURM_NTASKS": str(size), "SLURM_NNODES": str(size)}
    words = [f"node{number}", str(shift), str(rate), "--methods", "fake:constant", "--out", str(base / "r"), "--", "sleep", "1"]
    environment = {**os.environ, **slurm, "TMPDIR": str(own), "XDG_RUNTIME_DIR": str(own)}
    return subprocess.Popen([sys.executable, str(ELSEWHERE), *words], stderr=subprocess.PIPE, text=True, env=environment)


def results(base: Path, processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The results of all ranks, after they have ended."""
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    return [json.loads((base / "r" / f"energy.{n}.json").read_text()) for n in range(len(processes))]


def test_the_offset_between_nodes_is_their_shift_within_its_uncertainty(tmp_path: Path) -> None:
    documents = results(tmp_path, [node(tmp_path, n, 3, shift=shift) for n, shift in enumerate(SHIFTS)])
    assert documents[0]["clock"] == {"reference": documents[0]["energy"]["node"], "start": None, "end": None, "reason": None}
    for document, shift in zip(documents[1:], SHIFTS[1:], strict=True):
        clock = document["clock"]
        assert clock["reason"] is None
        assert clock["reference"] == documents[0]["energy"]["node"]
        assert clock["end"]["at"] > clock["start"]["at"]
        for phase in ("start", "end"):
            assert abs(clock[phase]["offset_s"] + shift) <= clock[phase]["half_width_s"] + 1e-9
            assert 0 < clock[phase]["half_width_s"] < 1  # a thousandth of that on a quiet machine
    merged = merge_folder(tmp_path / "r")
    starts = [document["energy"]["start"] - shift for document, shift in zip(documents, SHIFTS, strict=True)]
    assert merged.skew_s is not None
    assert merged.skew_half_width_s is not None
    assert abs(merged.skew_s - (max(starts) - min(starts))) <= merged.skew_half_width_s + 1e-9
    assert (merged.flags, merged.clock_reason, len(merged.nodes)) == ([], None, 3)
    assert not (tmp_path / "r" / ADDRESS_FILE).exists()


def test_a_clock_that_runs_fast_is_flagged(tmp_path: Path) -> None:
    results(tmp_path, [node(tmp_path, 0, 2, shift=0), node(tmp_path, 1, 2, shift=10, rate=0.2)])
    merged = merge_folder(tmp_path / "r")
    assert merged.flags == ["clock_drift"]
    assert merged.drift_s is not None
    assert merged.drift_s < -0.01  # 0.2 s per second between the first and the last question


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_partner_costs_little_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(partners, "START_S", 1000.0)
    for key, value in {"SLURM_JOB_ID": "78", "SLURM_PROCID": str(number), "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(key, value)
    begin = time.monotonic()
    outcome = measure(["true"], methods=["fake:constant"], out=tmp_path / "r")
    assert time.monotonic() - begin < 100, "the partner is looked for while the command runs, and not after it"
    document = json.loads((tmp_path / "r" / f"energy.{number}.json").read_text())
    assert outcome.exit_code == 0
    assert document["status"] == "finished"
    assert document["energy"]["boundaries"]["device"]["energy_j"] > 0
    assert (document["clock"]["start"], document["clock"]["end"]) == (None, None)
    assert "compared" in document["clock"]["reason"]
    merged = merge_folder(tmp_path / "r")
    assert merged.missing == [f"rank {1 - number}"]
    assert merged.boundaries["device"].total_j is None
    assert merged.boundaries["device"].partial_j == document["energy"]["boundaries"]["device"]["energy_j"]


def test_the_result_is_there_before_clocks_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def finish(self: Reference) -> None:
        seen.append(json.loads((tmp_path / "r" / "energy.0.json").read_text())["status"])

    monkeypatch.setattr(partners.Reference, "finish", finish)
    for key, value in {"SLURM_JOB_ID": "79", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(key, value)
    measure(["true"], methods=["fake"], out=tmp_path / "r")
    assert seen == ["finished"]


def test_one_node_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partners, "END_S", 1000.0)
    for part in (
        partner(tmp_path, 0, 1, elected=True),
        partner(tmp_path, 1, None, elected=False),
        partner(tmp_path, 0, None, elected=True),  # how many nodes there are is not known, and none has asked
    ):
        begin = time.monotonic()
        part.begin()
        assert part.finish().start is None
        assert time.monotonic() - begin < 100


def test_a_rank_on_the_first_ranks_node_needs_no_offset(tmp_path: Path) -> None:
    first, second = Reference(tmp_path, None), Asking(tmp_path)
    first.begin()
    second.begin()
    record = second.finish()
    assert (record.reference, record.start, record.reason) == (node_key(), None, None)
    assert first.finish().reason is None


def test_an_old_address_is_replaced_by_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / ADDRESS_FILE, Address("old:0", ["127.0.0.1"], 9, "old"))
    assert (tmp_path / ADDRESS_FILE).stat().st_mode & 0o077 == 0
    late = Asking(tmp_path)
    late._own = "other:1"
    late.begin()
    time.sleep(0.2)
    first = Reference(tmp_path, 2)
    first.begin()
    assert find(tmp_path / ADDRESS_FILE).node == node_key()
    time.sleep(0.6)
    record = late.finish()
    assert first.finish().reason is None
    assert record.start is not None
    assert record.end is not None
    assert abs(record.end.offset_s) <= record.end.half_width_s + 1e-9


def test_strangers_neither_answer_nor_are_answered() -> None:
    server = ClockServer("127.0.0.1")
    right = Address("n", ["127.0.0.1"], server.port, server.token)
    own = measure_offset(right, "m", "start")
    assert abs(own.offset_s) <= own.half_width_s + 1e-9
    with pytest.raises(ConnectionError):
        measure_offset(Address("n", ["127.0.0.1"], server.port, "guessed"), "stranger", "start", timeout=1.0)
    with socket.create_connection(("127.0.0.1", server.port)) as noise:
        noise.settimeout(60.0)
        noise.sendall(b"x" * 2000)
        assert noise.recv(100) == b""
    assert not server.wait(1, 0.0)  # m has asked once and is not done; the stranger does not count
    measure_offset(right, "m", "end")
    assert server.wait(1, 60.0)
    server.close()
    with pytest.raises(ConnectionError, match="refused"):
        measure_offset(right, "m", "end")


def test_clocks_are_told_on_the_network_of_the_job_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first = Reference(tmp_path, 2)
    first.begin()
    try:
        address = find(tmp_path / ADDRESS_FILE)
        assert address.hosts == ["127.0.0.1"] and listening(address.port) == {"0100007F"}
    finally:
        first.finish()


def listening(port: int) -> set[str]:
    """Addresses at which somebody listens at a port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {words[1].partition(":")[0] for words in lines if words[3] == "0A" and int(words[1].partition(":")[2], 16) == port}


def test_a_stranger_at_the_address_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def lie() -> None:
            connection, _ = listening.accept()
            with connection:
                nonce = connection.recv(1000).split()[2].decode()
                connection.sendall(f"{nonce} 12345.0 {'0' * 64}\n".encode())

        threading.Thread(target=lie, daemon=True).start()
        with pytest.raises(ConnectionError, match="not come from this job"):
            measure_offset(Address("n", ["127.0.0.1"], listening.getsockname()[1], "t"), "m", "start")


def test_silence_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            measure_offset(Address("n", ["127.0.0.1"] * 400, silent.getsockname()[1], "t"), "m", "start", timeout=1.0)
        assert time.monotonic() - begin < 100, "the limit holds for all addresses together"


def test_a_host_can_be_reached_from_outside() -> None:
    hosts = own_hosts()
    assert socket.gethostname() in hosts
    assert hosts[-1].startswith("127.")


# --- merging ----------------------------------------------------------------------------------------------------------


def at(node: str, start: float) -> WindowEnergy:
    return WindowEnergy("w", start, start + 10, node=node)


def test_an_offset_holds_for_all_ranks_of_its_node() -> None:
    merged = merge(
        [
            Part("rank 0", at("a", 100.0), reference="a"),
            Part("rank 1", at("a", 100.1)),
            Part("rank 2", at("b", 0.3), [ClockOffset(100.0, 0.01, 0.3), ClockOffset(100.0, 0.01, 10.0)], "a"),
            Part("rank 3", at("b", 0.5)),
        ]
    )
    assert merged.skew_s == pytest.approx(0.5)
    assert merged.skew_half_width_s == pytest.approx(0.02)


def test_a_node_that_was_not_compared_is_not_taken_for_the_reference() -> None:
    compared = Part("rank 2", at("c", 0.0), [ClockOffset(5.0, 0.01, 0.0)], "a")
    merged: MergedEnergy = merge([Part("rank 1", at("b", 0.0)), compared], ["rank 0", "rank 1", "rank 2"])
    assert merged.skew_s is None
    assert "b" in (merged.clock_reason or "")


def test_drift_is_judged_by_its_uncertainty_and_rate() -> None:
    def pair(moved: float, width: float, span: float) -> list[ClockOffset]:
        return [ClockOffset(1.0, width, 0.0), ClockOffset(1.0 + moved, width, span)]

    assert drift(pair(0.05, 0.001, 1000.0)) == (pytest.approx(0.05), False)
    assert drift(pair(0.2, 0.001, 1000.0))[1]
    assert not drift(pair(0.2, 0.1, 1000.0))[1]


# --- launchers --------------------------------------------------------------------------------------------------------


def test_mpirun_inside_a_slurm_job_is_believed_before_slurm() -> None:
    slurm = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"}
    mpi = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun@1"}
    assert (rank(slurm | mpi), world_size(slurm | mpi), node_count(slurm | mpi)) == (7, 8, 2)
    assert job(slurm | mpi) == "5.prterun@1"
    assert (rank(slurm), node_count(slurm)) == (0, 4)
    assert node_count({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_NNODES": "4"}) is None
    assert node_count({}) is None
