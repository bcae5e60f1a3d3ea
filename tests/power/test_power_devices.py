"""How torch's GPUs are found among the sensors: by PCI address, since libraries agree on nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trees
from test_power_sources import cray, energy_at_constant_power, opened, use

from caraml.base.processes import NODE
from caraml.engine.device import CudaDevice, gpus, sensors_of
from caraml.engine.ranks import Ranks
from caraml.power import Meter
from caraml.power.model import HEADLINES
from caraml.power.source import SourceUnavailable, create
from caraml.system.files import names_device
from caraml.worker import place as places


def torch_sees(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, Any]) -> None:
    """Let torch list these GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**devices[index]))


def test_an_amd_gpu_is_found_by_its_address_since_its_uuid_is_spelled_in_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prints HIP's sixteen characters as if they were bytes; amdsmi knows GPU- and the characters."""
    uuid = "-".join(b"1a2b3c4d5e6f7a8b".hex()[first:last] for first, last in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
    torch_sees(monkeypatch, {"pci_domain_id": 0, "pci_bus_id": 0xC6, "pci_device_id": 0, "uuid": uuid})
    found = (("c1", 100), ("c6", 200))
    devices = [{"bdf": f"0000:{bus}:00.0", "uuid": f"GPU-{bus}1a2b3c4d5e6f7a8b", "watts": watts} for bus, watts in found]
    use(monkeypatch, "amdsmi", FAKE_AMD=devices)
    source = create("amdsmi", gpus([0]))
    channels, values = opened(source)
    assert {channel.domain for channel in channels.values()} == {"GPU-c61a2b3c4d5e6f7a8b"}
    assert list(values.values())[-1] == pytest.approx(200)


def test_an_nvidia_gpu_is_found_by_its_address_in_nvml_s_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_sees(monkeypatch, {"pci_domain_id": 0, "pci_bus_id": 0x42, "pci_device_id": 0, "uuid": "whatever"})
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": "GPU-a", "pci": "00000000:41:00.0"}, {"uuid": "GPU-b", "pci": "00000000:42:00.0"}])
    channels, _ = opened(create("nvml", gpus([0])))
    assert {channel.domain for channel in channels.values()} == {"GPU-b"}


def test_a_slice_s_energy_is_that_of_its_gpu_and_said_to_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_sees(monkeypatch, {"pci_domain_id": 0, "pci_bus_id": 0x41, "pci_device_id": 0, "uuid": "slice-0"})
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": "GPU-a", "pci": "00000000:41:00.0", "mig": ["MIG-slice-0", "MIG-slice-1"]}])
    with Meter(["nvml"], devices=gpus([0]), interval=0.02) as meter, meter.window("w") as window:
        pass
    (channel,) = window.energy.channels
    assert (
        channel.id == "GPU-a" and {"mig_parent", "shared_device"} <= set(channel.flags) and channel.users == ["MIG-slice-0", "MIG-slice-1"]
    )


def test_without_addresses_the_uuid_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_sees(monkeypatch, {"uuid": "5a"})
    assert gpus([0]) == ["GPU-5a"]


def test_some_of_several_accelerators_without_addresses_have_no_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of all of the node, nor that of its processors."""
    device = torch.device("xpu", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 6))
    some, parts = sensors_of(device, 1), {"": 900, "cpu": 250, **{f"accel{n}": 90 for n in range(6)}}
    trees.pm_counters(tmp_path, parts, parts)
    watts = {f"cray:{part or 'node'}": float(value) for part, value in parts.items()}
    for devices, expected in ((some, None), (sensors_of(device, 6, tmp_path), 5400.0), (sensors_of(torch.device("cpu"), 1), 2500.0)):
        window = energy_at_constant_power(list(opened(cray(tmp_path, tmp_path / "drm", devices))[0].values()), watts)
        sensed = window.sensed(*HEADLINES)
        assert sensed is not None and sensed[1].energy_j == (expected and pytest.approx(expected))
        assert expected or sensed == ("module", window.boundaries["module"])
        assert expected or sensed[1].reason == "cray shows all accelerators of the node, and torch does not tell which are used"
    with Meter(["fake"], devices=some, interval=0.02) as meter:
        assert meter.channels, "which stands for any sensor"
    trees.drm_card(tmp_path, 1, "0000:03:00.0", "xe", {"energy1_input": 7_000_000})
    with pytest.raises(SourceUnavailable, match="torch does not tell which"):
        opened(create(f"intel:{tmp_path}", devices=some))


class Gpu(CudaDevice):
    """The fourth GPU that a process sees, without opening it."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 3)


def test_a_loop_of_one_s_own_reads_the_gpus_that_its_node_s_ranks_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first ones that a rank sees: it may use another, and a launcher may show each rank its own alone."""
    monkeypatch.setenv(NODE, "a")
    monkeypatch.setattr(places, "device_in_use", Gpu)
    torch_sees(monkeypatch, *({"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0} for bus in (1, 2, 3, 4)))
    assert places.place_of(Ranks()).gpus == ["0000:04:00"]

    class Four(Ranks):
        def gather(self, value: Any) -> list[Any]:
            space = value[3]
            return [value, ["a", ["0000:05:00"], 7, space], ["b", ["0000:04:00"], 8, space], ["b", ["0000:05:00"], 9, space]]

    monkeypatch.setattr(os, "getppid", lambda: 77)
    place = places.place_of(Four(rank=0, world=4))
    assert (place.nodes, place.leads, place.gpus) == (2, True, ["0000:04:00", "0000:05:00"])
    assert place.family == [7, 77], "what started the ranks of this node"
    assert not places.place_of(Four(rank=1, world=4)).leads


@pytest.mark.parametrize(
    ("word", "name", "same"),
    [
        ("0000:c1:00.0", "00000000:C1:00.0", True),
        ("0000:c1:00", "0000:c1:00.3", True),
        ("0000:c1:00.1", "0000:c1:00.3", False),
        ("0001:c1:00", "0000:c1:00.0", False),
        ("c1:00.0", "0000:c1:00.0", True),
        ("GPU-a", "gpu-A", True),
        ("0", "00000000:00:00.0", False),
    ],
)
def test_an_address_has_several_spellings(word: str, name: str, same: bool) -> None:
    assert names_device(word, name) is same
