"""The weather suites ask for what the report ran: device counts, nodes, batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from caraml.suite.expand import expand
from caraml.suite.load import load_suite
from caraml.suite.model import Point
from caraml.suite.placement import Machine
from caraml.workloads import params_of

GPU = Machine("cluster", "GPU", "gpu", "test", nodes=64, devices_per_node=8, device_memory_gib=80.0)


def points(suite: str, benchmark: str, machine: Machine = GPU) -> list[Point]:
    found = [planned.point for planned in expand(load_suite(suite), machine, params_of).points if planned.skip is None]
    return [point for point in found if point.benchmark == benchmark and not point.repeat]


@pytest.mark.parametrize(
    ("benchmark", "extents", "batch"),
    [
        ("ap1", {(1, 1), (1, 4), (1, 8)}, 32),
        ("ap2", {(1, 1), (1, 2), (1, 4), (1, 8)}, 32),
        ("ap3", {(1, 1), (1, 8)}, 512),
        ("ap3-nocache", {(1, 1), (1, 8)}, 512),
        ("ap4", {(1, 1)}, 1),
        ("ap5", {(1, 1), (1, 2), (1, 4), (1, 8)}, 32),
        ("ap6", {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4), (4, 4)}, 64),
    ],
)
def test_every_application_runs_on_the_published_devices(benchmark: str, extents: set[tuple[int, int]], batch: int) -> None:
    found = points("maelstrom", benchmark)
    assert {(point.nodes, point.devices) for point in found} == extents
    assert all((point.micro_batch, point.global_batch) == (batch, batch * point.world) for point in found)


def test_regimes_are_cropped_to_the_published_area() -> None:
    assert {point.params["crop_area"] for point in points("maelstrom", "ap6")} == {0.75}


def test_the_printed_batch_of_regimes_runs_where_it_fits() -> None:
    assert {point.micro_batch for point in points("maelstrom", "ap6", replace(GPU, device_memory_gib=288.0))} == {64, 750}


def test_the_transformer_scales_from_4_to_128_devices() -> None:
    found = points("maelstrom", "atmorep", replace(GPU, devices_per_node=4))
    assert [point.world for point in found] == [4, 8, 16, 32, 64, 128] and {point.micro_batch for point in found} == {4}


@pytest.mark.parametrize(
    ("benchmark", "devices", "batches"),
    [
        ("ap1", {1, 4, 8}, {1, 2, 4, 8, 16, 32, 64}),
        ("ap3", {1, 4, 8}, {32, 64, 128, 256, 384, 512}),
        ("ap5", {1, 4, 8}, {8, 16, 32, 64, 128, 256}),
    ],
)
def test_runs_without_input_sweep_the_batch_on_one_and_on_all_devices(benchmark: str, devices: set[int], batches: set[int]) -> None:
    found = points("maelstrom-nonio", benchmark)
    assert {(point.devices, point.micro_batch) for point in found} == {(count, batch) for count in devices for batch in batches}
