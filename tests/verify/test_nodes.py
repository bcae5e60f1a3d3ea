"""Nodes played by processes of this machine, with sensors of unequal power: what the record says of them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from caraml.base.processes import NODE
from caraml.power.source import POWER_SOURCES
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.model import Policy
from caraml.verify.claims import WATTS, energy_claims, silence_claims, source_of
from caraml.verify.proof import play
from tests.conftest import MakePoint

POLICY = Policy(min_seconds=1.2, max_seconds=3, idle_seconds=1.0)
PARAMS = {"device": "asynchronous", "step_seconds": 0.02}


def played(root: Path, make_point: MakePoint, nodes: int, delays: tuple[float, ...] = ()) -> Record:
    point = make_point(workload="known", params=PARAMS, nodes=nodes, micro_batch=4, global_batch=4 * nodes, measure=POLICY)
    return play(point, Store(root), delays)


@pytest.mark.exclusive
def test_energy_idle_and_net_of_unequal_nodes_of_which_one_comes_late(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, delays = 3, (0.0, 0.0, 1.5)
    monkeypatch.setenv(POWER_SOURCES, source_of(nodes))
    record = played(tmp_path, make_point, nodes, delays)
    assert record.status == "ok", record.reason
    found = energy_claims(record, Store(tmp_path))
    assert len(found) == 8 and all(finding.verdict == "right" for finding in found), found
    assert all(finding.allowed is not None and finding.allowed < 0.25 * sum(WATTS[:nodes]) * 3 for finding in found[:1])
    assert [node.name for node in record.nodes] == [f"node-{number + 1}" for number in range(nodes)]
    assert [node.ranks for node in record.nodes] == [[number] for number in range(nodes)]
    assert record.window is not None and record.window.opened_within is not None and record.window.closed_within is not None
    for watts, node in zip(WATTS, record.nodes, strict=False):
        assert node.energy is not None and node.energy.duration_s == pytest.approx(record.window.seconds)
        assert node.energy.start == pytest.approx(record.window.start)
        mean = node.energy.boundaries["device"].mean_w
        assert mean == pytest.approx(watts, rel=0.4), "a whole number of periods would give it exactly"
        assert node.versions["torch"] and not node.differs


@pytest.mark.exclusive
def test_a_sensor_that_dies_leaves_no_energy_and_names_its_node(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POWER_SOURCES, source_of(2, last_dies=True))
    record = played(tmp_path, make_point, 2)
    found = silence_claims(record, Store(tmp_path))
    assert record.status == "ok" and [finding.verdict for finding in found] == ["right", "right"], found
    assert record.value("throughput") and record.value("energy_per_item") is None


OWN_LOOP = """
import sys, time, torch.distributed as dist, caraml
rank, world, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=world)
policy = caraml.Policy(target=0.2, min_seconds=0.4, max_seconds=5, min_steps=8, warm_up_max_seconds=5, idle_seconds=0.2)
with caraml.measure("own", out=f"{out}/results", policy=policy) as m:
    while m.step(3):
        time.sleep(0.02)
dist.destroy_process_group()
"""


def own_loops(out: Path, nodes: list[str], sources: list[str], monkeypatch: pytest.MonkeyPatch) -> list[subprocess.CompletedProcess[str]]:
    """A loop of one's own on ranks of these nodes, each with sensors of its own."""
    children, program = [], out / "own_loop.py"
    program.write_text(OWN_LOOP)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank, (node, source) in enumerate(zip(nodes, sources, strict=True)):
        monkeypatch.setenv(NODE, node)
        monkeypatch.setenv(POWER_SOURCES, source)
        argv = [sys.executable, str(program), str(rank), str(len(nodes)), str(out)]
        children.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [child.communicate(timeout=300) for child in children]
    return [subprocess.CompletedProcess(child.args, child.returncode, *words) for child, words in zip(children, said, strict=True)]


@pytest.mark.exclusive
def test_a_loop_of_ones_own_adds_up_its_nodes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = own_loops(tmp_path, ["a", "b"], ["fake:constant:200", "fake:constant:500"], monkeypatch)
    assert [child.returncode for child in done] == [0, 0], done[0].stderr + done[1].stderr
    (record,) = Store(tmp_path / "results").records()
    assert (record.point.nodes, record.point.devices) == (2, 1)
    for name in ("mean_power", "idle_power"):
        assert record.value(name) == pytest.approx(700, abs=record.metrics[name].bound), "the edges of two nodes' windows lie apart"
    assert {"power", "power-1"} <= record.files.keys() and [node.name for node in record.nodes] == ["a", "b"]


@pytest.mark.exclusive
def test_a_sensor_on_one_node_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = own_loops(tmp_path, ["a", "b"], ["fake:constant:200", "rapl:/nowhere"], monkeypatch)
    assert [child.returncode for child in done] == [0, 0], done[0].stderr + done[1].stderr
    (record,) = Store(tmp_path / "results").records()
    energy = record.metrics["energy"]
    assert energy.value is None and "b: no power sensor" in (energy.reason or "") and record.energy is not None
    part, own = record.energy.boundaries["device"].partial_j, record.nodes[0].energy
    assert own is not None and part == pytest.approx(200 * own.duration_s, abs=own.boundaries["device"].bound_j)
    assert own.duration_s == pytest.approx(record.energy.duration_s) and "what is known adds up to" in (energy.reason or "")


def test_nodes_with_different_numbers_of_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = own_loops(tmp_path, ["a", "a", "b"], ["fake:constant"] * 3, monkeypatch)
    assert all(child.returncode for child in done) and "2 on a, 1 on b" in done[2].stderr
