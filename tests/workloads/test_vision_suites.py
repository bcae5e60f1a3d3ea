"""The vision suites ask for what their sources ran, and for something tiny on a CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from caraml.base.errors import InputError
from caraml.base.toml import parse_toml
from caraml.campaign.machine import machine_of
from caraml.suite.choice import with_settings
from caraml.suite.expand import expand
from caraml.suite.load import load_suite, suite_of
from caraml.suite.model import Point
from caraml.suite.placement import Machine
from caraml.system.catalogue import load_system
from caraml.system.model import Container, Software
from caraml.workloads import image_classification, params_of

GPU = Machine("cluster", "GPU", "gpu", "test", nodes=64, devices_per_node=8, device_memory_gib=80.0)
CPU = Machine("laptop", "CPU", "cpu", "test", nodes=1, devices_per_node=2)


def points(name: str, machine: Machine) -> list[Point]:
    return [planned.point for planned in expand(load_suite(name), machine, params_of).points if planned.skip is None]


def test_caraml_s_heat_map() -> None:
    found = points("caraml-vision", GPU)
    cells = {(point.world, point.global_batch) for point in found}
    assert cells == {(world, 2**k) for world in (1, 2, 4, 8, 16) for k in range(4, 13)}
    assert {point.precision for point in found} == {"fp16"} and {point.params["epoch_images"] for point in found} == {1_281_167}


@pytest.mark.parametrize(("memory", "batch"), [(40.0, 128), (64.0, 256), (80.0, 512), (141.0, 512)])
def test_epicure_s_weak_scaling(memory: float, batch: int) -> None:
    found = points("epicure-vision", replace(GPU, device_memory_gib=memory))
    assert {point.micro_batch for point in found} == {batch} and {point.precision for point in found} == {"fp32", "fp16"}
    assert sorted({point.nodes for point in found}) == [1, 2, 4, 8, 16, 32, 64]
    assert all(point.global_batch == batch * point.world for point in found)
    assert {(point.measure.epochs, point.measure.counted_epoch) for point in found} == {(5, 4)}


def test_pearc_s_tables() -> None:
    found = points("pearc22", replace(GPU, nodes=8))
    by_name = {name: [point for point in found if point.benchmark == name] for name in {point.benchmark for point in found}}
    assert {(point.world, point.precision) for point in by_name["figure 1 resnet50"]} == {
        (n, p) for n in (1, 2, 3, 4, 8, 16) for p in ("tf32", "fp16")
    }
    networks = {(point.params["model"], point.world) for point in by_name["table 2 networks"]}
    assert {("efficientnet_b0", 2), ("efficientnet_b0", 4), ("efficientnet_b4", 4), ("mobilenetv3_large_100", 16)} < networks
    small = by_name["table 3 batches"]
    assert sorted(point.micro_batch for point in small) == [2, 4, 8, 14, 16, 18, 20] and {point.accumulation for point in small} == {24}
    spans = by_name["table 3 scaling"]
    assert sorted(point.world for point in spans) == [2, 4, 8, 16, 64] and {point.params["bn_span"] for point in spans} == {2}
    constant = {point.world: point.global_batch for point in by_name["table 3 constant batch"]}
    assert constant == {4: 960, 8: 960, 16: 960, 64: 1280}, "2 devices with 24 batches are in the scaling already"
    assert sorted(point.micro_batch for point in by_name["table 4 batches"]) == [128, 256, 512], "2 x 10 is among the devices already"
    assert {point.world for point in by_name["table 4 devices"]} == {1, 2, 4, 8, 16}
    assert {point.params["epoch_images"] for point in by_name["table 4 devices"]} == {70_000}
    quality = by_name["table 4 quality over batch"]
    assert sorted(point.global_batch for point in quality) == [10, 32, 128, 512] and {point.measure.epochs for point in quality} == {5}
    assert by_name["table 2 bert"][0].params["preset"] == "base"


@pytest.mark.parametrize("memory", [None, 32.0, 64.0, 256.0])
def test_a_cpu_s_memory_does_not_choose_the_batch_of_a_gpu(memory: float | None) -> None:
    (point,) = points("epicure-vision", replace(CPU, nodes=720, device_memory_gib=memory))
    assert (point.params["model"], point.nodes, point.micro_batch, point.precision) == ("test_resnet", 1, 16, "fp32")


@pytest.mark.parametrize("name", ["caraml-vision", "epicure-vision", "pearc22"])
def test_on_a_cpu_everything_is_tiny(name: str) -> None:
    found = points(name, CPU)
    assert found and all(point.micro_batch <= 16 for point in found)
    assert all(point.params["image_size"] <= 64 for point in found if point.workload == "image_classification")
    assert len(found) <= 17


def with_network(name: str, machine: Machine) -> set[object]:
    file = with_settings(load_suite("vision"), [f"params.model={name}"], params_of)
    return {planned.point.params["model"] for planned in expand(file, machine, params_of).points}


def test_a_network_that_timm_has_not_is_told_while_a_suite_is_planned() -> None:
    here = replace(CPU, packages_here=True)
    near = {"resnet5o": " (did you mean 'resnet50'?);", "efficientnet_bo.ra_in1k": " (did you mean 'efficientnet_b", "xxxxx": ";"}
    for name, then in near.items():
        expected = f'params.model={name}: found "{name}", expected a network of the timm that is installed here (timm.list_models()){then}'
        with pytest.raises(InputError, match=re.escape(expected)):
            with_network(name, here)
        assert with_network(name, CPU) == {name}, "what a container has is not known"
    assert with_network("convnext_tiny_in22ft1k", here) == {"convnext_tiny_in22ft1k"}, "a name out of use, which timm takes"


def test_a_network_of_a_benchmark_that_is_not_chosen_may_be_another_timm_s() -> None:
    texts = [
        f"""[[benchmark]]
name = "{name}"
workload = "image_classification"
global_batch = 8
params = {{ model = "{model}" }}
"""
        for name, model in (("new", "nextgen_net"), ("old", "resnet50"))
    ]
    file = suite_of(parse_toml('name = "s"\ntitle = "s"\n' + "".join(texts), "s.toml"))
    here = replace(CPU, packages_here=True)
    assert [one.point.benchmark for one in expand(file, here, params_of, chosen={"old"}).points if one.point.benchmark == "old"]
    assert expand(file, here, params_of, chosen=frozenset()).points, "a retry looks at keys only"
    with pytest.raises(InputError, match="nextgen_net"):
        expand(file, here, params_of)


def test_names_of_networks_are_known_without_importing_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = []

    def broken() -> None:
        imports.append(None)
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(image_classification, "timm_here", broken)
    image_classification._others_than.cache_clear()
    here = replace(CPU, packages_here=True)
    assert with_network("mobilenetv3_large_100", here) == {"mobilenetv3_large_100"} == with_network("mobilenetv3_large_100", CPU)
    assert not imports
    assert with_network("resnet5o", here) == {"resnet5o"}, "a timm that cannot be asked says nothing"
    assert imports
    image_classification._others_than.cache_clear()


def test_points_run_with_the_packages_of_this_python_unless_the_site_says_otherwise() -> None:
    system = load_system("local")
    assert machine_of(system, "local").packages_here and machine_of(system, "slurm").packages_here
    assert not machine_of(system, "print").packages_here
    container, variables = Container(runtime="apptainer", image="a.sif"), {"PYTHONPATH": "/site/newer"}
    for other in ({"container": container}, {"software": Software(venv="/venv")}, {"software": Software(variables=variables)}):
        site = system.site.model_copy(update=other)
        assert not machine_of(system.model_copy(update={"site": site}), "local").packages_here
