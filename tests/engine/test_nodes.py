"""Several nodes in one record: sums with their bounds, what is missing by name, and in what nodes differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from caraml.engine.instruments import NO_PROCESS, Nodes, NodeSummary, put_together
from caraml.engine.steps import RankSummary, StepRow, StepTable
from caraml.metrics.energy import energies
from caraml.metrics.model import Window
from caraml.power.energy import boundary_energy, subtract_idle
from caraml.power.model import Boundary, ChannelEnergy, WindowEnergy

WINDOW = Window(start=10.0, end=20.0, steps=5, samples=500, items=1000, first_step=1)
VERSIONS = {"torch": "2.13.0", "driver": "570"}


def channel(watts: float | None, seconds: float, name: str, boundary: Boundary) -> ChannelEnergy:
    joules = None if watts is None else watts * seconds
    return ChannelEnergy(
        id=name,
        label=name,
        source="s",
        boundary=boundary,
        hardware="h",
        energy_j=joules,
        bound_j=None if joules is None else 0.01 * joules,
        mean_w=watts,
        peak_w=watts,
        partial_j=100.0 if watts is None else None,
        flags=[] if watts is not None else ["partial_coverage"],
        reason="the sensor went silent" if watts is None else None,
    )


def node(
    watts: dict[str, float | None], idle: float | None = 100.0, start: float = 10.0, boundary: Boundary = "device", **changes: Any
) -> NodeSummary:
    """A node with a sensor for each name; its window is 10 s long and its idle one 2 s."""
    rest = None
    if idle is not None:
        resting = [channel(None if each is None else idle, 2.0, name, boundary) for name, each in watts.items()]
        rest = WindowEnergy("idle", start - 5, start - 3, resting, {boundary: boundary_energy(resting, 2.0)}, valid=True)
    channels = [channel(each, 10.0, name, boundary) for name, each in watts.items()]
    for each in channels:
        subtract_idle(each, rest.channels[0] if rest else None, 10.0, 2.0)
    boundaries = {boundary: boundary_energy(channels, 10.0)} if channels else {}
    window = WindowEnergy("measure", start, start + 10, channels, boundaries, valid=bool(channels))
    if not channels:
        window.reason, window.flags = "no power sensor: none was asked for", ["no_source"]
    values = {
        "other_cpu_share": 0.01,
        "device": "GPU x1",
        "cpu": "CPU",
        "environment": {"versions": VERSIONS, "cpu": {"clock_mhz": 2400.0}},
    }
    return NodeSummary(window, rest, **{**values, **changes})  # type: ignore[arg-type]


def of(*nodes: NodeSummary | list[NodeSummary]) -> Nodes:
    summaries = {f"n{index + 1}:boot": each if isinstance(each, list) else [each] for index, each in enumerate(nodes)}
    return put_together(summaries, {key: [index] for index, key in enumerate(summaries)}, WINDOW)


def test_energy_idle_and_net_of_unequal_nodes_add_up_with_their_bounds() -> None:
    nodes = of(node({"a": 300.0}), node({"a": 500.0}, idle=150.0), node({"a": 700.0}, idle=250.0))
    metrics = energies(WINDOW, "token", nodes.energy, nodes.idle)
    assert metrics["energy"].value == pytest.approx(15_000) and metrics["energy"].bound == pytest.approx(150)
    assert metrics["mean_power"].value == pytest.approx(1500) and metrics["energy_per_item"].value == pytest.approx(15)
    assert metrics["idle_power"].value == pytest.approx(500) and metrics["energy_net"].value == pytest.approx(10_000)
    total = nodes.energy.boundaries["device"]
    assert (total.idle_j, total.net_j) == (pytest.approx(5000), pytest.approx(10_000))
    assert [channel.id for channel in nodes.energy.channels] == ["n1/a", "n2/a", "n3/a"] == total.channels
    assert nodes.energy.valid and metrics["energy"].reason is None


def test_each_node_stands_beside_the_sum() -> None:
    nodes = of(node({"a": 300.0}, other_cpu_share=0.01), node({"a": 500.0}, other_cpu_share=0.2, throttled={"GPU-2": {"thermal": 0.5}}))
    first, second = nodes.each
    assert (first.name, first.ranks, second.name, second.ranks) == ("n1", [0], "n2", [1])
    assert second.energy is not None and second.energy.boundaries["device"].energy_j == 5000
    assert (second.other_cpu_share, second.throttled, second.versions) == (0.2, {"GPU-2": {"thermal": 0.5}}, VERSIONS)
    assert second.state["cpu"] == {"clock_mhz": 2400.0} and not second.differs
    assert nodes.flags == ["busy_machine", "throttled"] and (nodes.other_cpu.value, nodes.other_cpu.scope) == (0.2, "n2")


@pytest.mark.parametrize("last", [node({}), node({"a": None})], ids=["no sensor", "the sensor dies"])
def test_one_node_without_an_energy_leaves_none_and_is_named(last: NodeSummary) -> None:
    nodes = of(node({"a": 300.0}), node({"a": 500.0}), last)
    metric = energies(WINDOW, "token", nodes.energy, nodes.idle)["energy"]
    why = "no power sensor" if not last.energy.channels else "the sensor went silent"
    assert metric.value is None and metric.scope == "device" and metric.reason is not None
    assert "n3: " in metric.reason and why in metric.reason and "n1" not in metric.reason
    known = 8000 + (100 if last.energy.channels else 0)
    assert nodes.energy.boundaries["device"].partial_j == known and f"adds up to {known / 1e3:.2f} kJ" in metric.reason
    assert not nodes.energy.valid


def test_a_dead_sensor_is_not_replaced_by_another_boundary() -> None:
    """A processor's energy is not the energy of the devices, also where it is known on every node."""
    first, second = node({"a": 300.0}), node({"a": None})
    for each in (first, second):
        cpu = channel(50.0, 10.0, "cpu:package-0", "cpu")
        each.energy.channels.append(cpu)
        each.energy.boundaries["cpu"] = boundary_energy([cpu], 10.0)
    nodes = of(first, second)
    assert nodes.energy.boundaries["cpu"].energy_j == 1000
    assert energies(WINDOW, "token", nodes.energy, nodes.idle)["energy"].value is None


def test_an_idle_window_of_another_length_counts_by_its_power() -> None:
    slow = node({"a": 500.0}, idle=200.0)
    assert slow.idle is not None
    resting = [channel(200.0, 3.0, "a", "device")]
    slow.idle = WindowEnergy("idle", 5.0, 8.0, resting, {"device": boundary_energy(resting, 3.0)}, valid=True)
    metric = energies(WINDOW, "token", of(node({"a": 300.0}), slow).energy, of(node({"a": 300.0}), slow).idle)["idle_power"]
    assert metric.value == pytest.approx(300) and metric.bound == pytest.approx(3)


def test_a_node_without_a_baseline_leaves_the_gross_energy() -> None:
    nodes = of(node({"a": 300.0}), node({"a": 500.0}, idle=None))
    metrics = energies(WINDOW, "token", nodes.energy, nodes.idle)
    assert metrics["energy"].value == 8000 and metrics["idle_power"].value is None and metrics["energy_net"].value is None
    assert "n2: no idle baseline" in (metrics["idle_power"].reason or "")


def test_clocks_an_hour_apart_change_nothing() -> None:
    here, there = of(node({"a": 300.0}), node({"a": 500.0})), of(node({"a": 300.0}), node({"a": 500.0}, start=3610.0))
    assert there.energy == here.energy and there.idle == here.idle
    assert [(each.energy.start, each.energy.end) for each in there.each if each.energy] == [(10.0, 20.0)] * 2
    assert there.each[1].idle is not None and there.each[1].idle.start == 5.0, "5 s before the window, as on the first node"


def test_nodes_with_different_numbers_of_devices_add_all_of_them() -> None:
    nodes = of(node({"a": 300.0, "b": 310.0, "c": 320.0}), node({"a": 500.0}))
    assert nodes.energy.boundaries["device"].energy_j == pytest.approx(14_300)


def test_processes_of_one_node_count_its_sensors_once() -> None:
    nodes = of([node({"a": 300.0}), node({"a": 300.0, "b": 50.0})], node({"a": 500.0}))
    assert nodes.energy.boundaries["device"].energy_j == pytest.approx(8500)
    alone = of([node({"a": 300.0}), node({"a": 300.0})])
    assert alone.energy.boundaries["device"].energy_j == 3000 and alone.each == []


def test_a_number_that_is_of_all_nodes_counts_once() -> None:
    def slurm() -> NodeSummary:
        summary = node({"a": 300.0})
        everything = replace(channel(900.0, 10.0, "slurm:7.0", "node_dc"), spans_nodes=True)
        summary.energy.channels.append(everything)
        summary.energy.boundaries["node_dc"] = boundary_energy([everything], 10.0)
        return summary

    for nodes in (of(slurm(), slurm()), of(node({"a": 300.0}), slurm()), of(slurm(), node({"a": 300.0}))):
        assert nodes.energy.boundaries["node_dc"].energy_j == 9000 and nodes.energy.boundaries["device"].energy_j == 6000


def test_a_node_that_differs_is_flagged_and_says_in_what() -> None:
    other = node({"a": 300.0}, device="GPU x2", environment={"versions": {**VERSIONS, "driver": "560"}})
    nodes = of(node({"a": 300.0}), other)
    assert "mixed_nodes" in nodes.flags
    assert nodes.each[1].differs == ["device: GPU x2, not GPU x1", "driver 560, not 570"] and nodes.each[0].differs == []


def test_a_node_whose_sensors_nobody_reads_is_missing() -> None:
    nodes = of(node({"a": 300.0}), [])
    metric = energies(WINDOW, "token", nodes.energy, nodes.idle)["energy"]
    assert metric.value is None and f"n2: {NO_PROCESS}" in (metric.reason or "")
    assert "mixed_nodes" not in nodes.flags, "what nobody looked at does not differ"


def test_a_summary_survives_as_plain_data() -> None:
    rows = StepTable([StepRow("first", 0.0, 0.5, 0.1), StepRow("measure", 1.0, 0.25, 0.0)])
    summary = RankSummary(1.0, 2.0, rows, [3.0, 2.0], 0.5, 0.5, 1, ["imprecise"], clock="n1", waits=(0.1, None), node=node({"a": 300.0}))
    again = RankSummary.from_data(summary.to_data())
    assert list(again.rows) == list(rows) and again.node == summary.node
    assert {**vars(again), "rows": 0} == {**vars(summary), "rows": 0}
