"""Knobs: asked for by name, part of a point's label and key when changed, and the same arithmetic either way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.toml import parse_toml
from caraml.campaign.machine import machine_of
from caraml.engine.precision import attention_kernel, check_precision, set_attention
from caraml.engine.step import make_step
from caraml.launch.script import environment_of
from caraml.suite.expand import PlannedPoint, expand
from caraml.suite.load import Suite, SuiteFile
from caraml.suite.model import Knobs
from caraml.suite.placement import Machine
from caraml.system.catalogue import load_system
from caraml.system.model import Cpu, DeviceClass, DeviceModel, DType, Figure, System
from caraml.workloads import params_of
from caraml.workloads.base import Task
from tests.conftest import MakePoint
from tests.tasks import built

CPU = torch.device("cpu")
GPT = {"preset": "4M", "width": 64, "layers": 2, "heads": 2, "sequence_length": 64, "vocab_size": 512, "data": "synthetic-device"}
RESNET = {"model": "resnet10t", "image_size": 32, "classes": 10, "learning_rate": 1e-3, "data": "synthetic-device"}


def plan(lines: str, device_class: DeviceClass = "cpu", devices: int = 1, emulates: tuple[str, ...] = ()) -> list[PlannedPoint]:
    text = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 8\n{lines}\n'
    machine = Machine("m", "test device", device_class, "test", nodes=1, devices_per_node=devices, emulates=emulates)
    return expand(suite_of(text), machine, params_of).points


def suite_of(text: str) -> SuiteFile:
    document = parse_toml(text, "s.toml")
    return SuiteFile(document.validate(Suite), document)


def test_knobs_are_swept_like_everything_else() -> None:
    points = [planned.point for planned in plan('fused_optimizer = [true, false]\nattention = ["auto", "math"]')]
    assert [point.label for point in points] == [
        "n b8 fp32",
        "n b8 fp32 attention=math",
        "n b8 fp32 fused_optimizer=false",
        "n b8 fp32 fused_optimizer=false attention=math",
    ]
    assert len({point.key for point in points}) == 4
    conditioned = plan('attention = ["flash", "math"]\nwhere = ["attention == \'math\'"]')
    assert [planned.point.knobs.attention for planned in conditioned] == ["math"]


def test_affinity_is_swept_and_told_to_processes_threads_and_slurm(make_point: MakePoint) -> None:
    points = [planned.point for planned in plan('affinity = ["auto", "compact", "spread", "none"]')]
    assert [point.label.removeprefix("n b8 fp32").strip() for point in points] == [
        "", "affinity=compact", "affinity=spread", "affinity=none",
    ]  # fmt: skip
    told = [{name: value for name, value in environment_of(point, 8).items() if name.startswith(("OMP_P", "CARAML_"))} for point in points]
    assert told == [
        {},
        {"CARAML_AFFINITY": "compact", "OMP_PROC_BIND": "close", "OMP_PLACES": "cores"},
        {"CARAML_AFFINITY": "spread", "OMP_PROC_BIND": "spread", "OMP_PLACES": "cores"},
        {"CARAML_AFFINITY": "none", "OMP_PROC_BIND": "false"},
    ]
    program = make_point(workload="command", knobs=Knobs(affinity="spread"))
    assert environment_of(program, 8)["SLURM_DISTRIBUTION"] == "block:cyclic" and program.label.endswith("affinity=spread")
    with pytest.raises(InputError, match=r"(?s)affinity.*packed"):
        plan('affinity = "packed"')


def test_a_point_that_changes_no_knob_has_the_key_of_one_that_never_heard_of_them(
    make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of earlier runs are found by this key, so it is written down here, for the version of the method that it had first."""
    monkeypatch.setattr("caraml.suite.model.METHOD_VERSION", 1)
    (spelt,), (silent,) = plan("channels_last = true"), plan("")
    assert spelt.point.key == silent.point.key
    content = make_point().model_dump(mode="json")
    del content["knobs"]
    assert make_point(**content).key == make_point().key == "41f36d40ef3c211a"


def test_what_has_no_effect_on_a_device_makes_no_other_point() -> None:
    for knob, effective, other in (("keep_freed_memory", "cpu", "gpu"), ("convolution_search", "gpu", "cpu")):
        assert len(plan(f"{knob} = [true, false]", effective)) == 2  # type: ignore[arg-type]
        assert len(plan(f"{knob} = [true, false]", other)) == 1  # type: ignore[arg-type]
    residual = plan('precision = ["fp32", "bf16"]\nhalf_residual = [false, true]')
    assert [planned.point.label for planned in residual] == ["n b8 fp32", "n b8 bf16", "n b8 bf16 half_residual=true"]


def test_a_kernel_of_gpus_is_skipped_on_a_cpu() -> None:
    (planned,) = plan('attention = "cudnn"')
    assert planned.skip is not None and "'cudnn'" in planned.skip
    assert plan('attention = "cudnn"', "gpu")[0].skip is None


def test_an_emulated_precision_is_asked_for_by_name() -> None:
    """Where the CPU has units for it, the knob has no effect and makes no other point."""
    text = 'precision = ["fp32", "bf16"]\nemulated = [false, true]'
    fp32, refused, asked = plan(text, emulates=("bf16", "fp16"))
    assert fp32.skip is None and asked.skip is None and asked.point.label == "n b8 bf16 emulated=true"
    assert refused.skip is not None and "only emulates bf16" in refused.skip and "emulated = true" in refused.skip
    assert [planned.skip for planned in plan(text, emulates=("fp16",))] == [None, None]


def test_a_gpu_without_units_for_a_format_computes_in_another_or_is_not_asked() -> None:
    """V100s have neither TF32, which torch leaves out there without a word, nor bf16; MI250s have bf16."""
    head = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 8\n'
    suite, found = suite_of(f'{head}precision = ["tf32", "fp16", "bf16"]\n'), {}
    for system in ("juwels-cluster", "jureca-mi250", "jureca-h100"):
        points = expand(suite, machine_of(load_system(system), "local"), params_of).points
        found[system] = [(planned.point.precision, planned.skip is None) for planned in points]
    assert found["juwels-cluster"] == [("fp32", True), ("fp16", True), ("bf16", False)]
    assert found["jureca-mi250"] == [("fp32", True), ("fp16", True), ("bf16", True)]
    assert found["jureca-h100"] == [("tf32", True), ("fp16", True), ("bf16", True)]
    both = suite_of(f'{head}precision = ["fp32", "tf32"]\nemulated = [false, true]\n')
    points = expand(both, machine_of(load_system("juwels-cluster"), "local"), params_of).points
    assert len({planned.point.key for planned in points}) == 1, "the same work, whatever it was asked as"


def test_a_gpu_of_which_nobody_knows_what_it_emulates_can_be_asked_to() -> None:
    """The worker looks at the GPU itself and names `emulated = true` as the way out, so the plan must not drop it."""
    suite = suite_of(
        'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 8\n'
        'precision = ["fp32", "bf16"]\nemulated = true\n'
    )
    listed = load_system("juwels-cluster")
    devices = tuple(device.model_copy(update={"model": "Test GPU", "compute_capability": None}) for device in listed.devices)
    unlisted = listed.model_copy(update={"peak": None, "devices": devices})
    for system, kept in ((unlisted, [False, True]), (load_system("jureca-h100"), [False, False])):
        points = expand(suite, machine_of(system, "local"), params_of).points
        assert [planned.point.knobs.emulated for planned in points] == kept and not any(planned.skip for planned in points)


@pytest.mark.parametrize(
    ("name", "own", "skipped", "named"),
    [
        ("jureca-a100", {}, {"fp8": "no units for fp8: ask for bf16"}, {"tf32", "bf16", "fp8", "fp16"}),
        (
            "juwels-cluster",
            {},
            {"fp8": "no units for fp8: ask for fp16", "bf16": "only emulates bf16"},
            {"fp32", "bf16", "fp8", "fp16"},
        ),
        ("lumi", {}, {"fp8": "no units for fp8: ask for bf16"}, {"fp32", "bf16", "fp8", "fp16"}),
        ("jureca-h100", {}, {}, {"tf32", "bf16", "fp8", "fp16"}),
        ("marenostrum5", {"fp16": 1e15, "bf16": 1e15}, {}, {"tf32", "bf16", "fp8", "fp16"}),
        ("AMD Instinct MI355X", {}, {}, {"fp32", "bf16", "fp8", "fp16"}),
    ],
)
def test_what_a_gpu_has_no_units_for_is_told_by_the_plan(
    name: str, own: dict[DType, float], skipped: dict[str, str], named: set[str]
) -> None:
    """Points in fp8 waited in a queue to be refused; and where a user's own peaks did not name tf32, those in tf32 were run in fp32."""
    suite = suite_of(
        'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 8\n'
        'precision = ["tf32", "bf16", "fp8", "fp16"]\n'
    )
    device = DeviceModel(model=name, kind="rocm")
    system = System(name="x", title="", devices_per_node=1, devices=(device,), cpu=Cpu(model="c")) if " " in name else load_system(name)
    if own:
        system = system.model_copy(update={"peak": {dtype: Figure(value=peak, unit="FLOP/s", source="s") for dtype, peak in own.items()}})
    points = expand(suite, machine_of(system, "local"), params_of).points
    assert {planned.point.precision for planned in points} == named
    assert {planned.point.precision for planned in points if planned.skip} == set(skipped)
    for planned in points:
        assert skipped.get(planned.point.precision, "") in (planned.skip or "")


def test_a_worker_refuses_what_its_cpu_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may run on another machine than the one it was planned on."""
    cpu = Cpu(model="Test CPU", isa=("avx2",))
    monkeypatch.setattr("caraml.engine.precision.host.cpu", lambda: cpu)
    with pytest.raises(
        EnvironmentUnfitError, match=r"found 'bf16', which this Test CPU only emulates, without avx512_bf16 or amx_bf16 or bf16"
    ):
        check_precision("bf16", CPU)
    check_precision("bf16", CPU, emulated=True)
    check_precision("fp32", CPU)
    cpu = Cpu(model="Test CPU", isa=("avx512_bf16",))
    check_precision("bf16", CPU)
    assert cpu.emulates == ("fp16",) and Cpu(model="unknown").emulates == (), "what is not known is not refused"


def test_the_allocator_can_be_left_as_it_is(make_point: MakePoint) -> None:
    assert not any(name.startswith("MALLOC_") for name in environment_of(make_point(knobs=Knobs(keep_freed_memory=False)), threads=1))


def test_the_record_says_which_kernel_computes_attention(attention: Any) -> None:
    """By torch's own choice, which the knob restricts."""
    assert attention_kernel("auto", (2, 64, 32), "bf16", CPU) == {"asked": "auto", "kernel": "flash"}
    attention("math")
    assert attention_kernel("math", (2, 64, 32), "fp32", CPU) == {"asked": "math", "kernel": "math"}


GRAPHS = ("reduce-overhead", "max-autotune")


@pytest.mark.parametrize("mode", ["default", *GRAPHS, "max-autotune-no-cudagraphs"])
def test_cuda_graphs_are_not_trusted_with_what_they_overwrite(mode: str) -> None:
    """Several micro-batches, and a divided model; one micro-batch of a whole model, inference and CPUs are fine."""
    two, divided = f'micro_batch = 4\ncompile = "{mode}"', f'devices = 2\nfsdp = 2\ncompile = "{mode}"'
    reasons = [planned.skip for text in (two, divided) for planned in plan(text, "gpu", devices=2)]
    assert [reason is not None for reason in reasons] == [mode in GRAPHS] * 2, reasons
    assert all(reason is None or ("CUDA graphs" in reason and "max-autotune-no-cudagraphs" in reason) for reason in reasons)
    for fine in (f'compile = "{mode}"', f'{two}\nmode = "inference"'):
        assert [planned.skip for planned in plan(fine, "gpu")] == [None]
    assert [planned.skip for planned in plan(two)] == [None]


def test_a_step_of_several_passes_refuses_cuda_graphs(make_point: MakePoint) -> None:
    task = built("downscaling_gan", {"data": "synthetic-device", "rows": 16, "columns": 16})
    point = make_point(workload="downscaling_gan", device_class="gpu", compile="max-autotune")
    with pytest.raises(InputError, match=r"found 'max-autotune', which replays CUDA graphs; .* expected 'default'"):
        make_step(task, point, CPU)


@pytest.mark.parametrize(("mode", "marked"), [("off", 0), ("reduce-overhead", 1), ("max-autotune", 1), ("max-autotune-no-cudagraphs", 0)])
def test_a_step_with_cuda_graphs_says_where_it_begins(
    mode: str, marked: int, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    task = built("gpt", GPT)
    make_step(task, make_point(workload="gpt", device_class="gpu", compile=mode, global_batch=2, micro_batch=2), CPU)()
    assert len(marks) == marked


@pytest.fixture
def attention() -> Iterator[Any]:
    yield set_attention
    set_attention("auto")


def losses(task: Task, make_point: MakePoint, workload: str) -> list[float]:
    step = make_step(task, make_point(workload=workload, global_batch=4, micro_batch=4), CPU)
    found = [step().loss for _ in range(4)]
    return [loss.item() for loss in found if loss is not None]


@pytest.mark.parametrize(("workload", "params"), [("gpt", GPT), ("image_classification", RESNET)])
@pytest.mark.slow
def test_knobs_change_how_it_is_computed_and_not_what(attention: Any, make_point: MakePoint, workload: str, params: dict[str, Any]) -> None:
    default, other = Knobs(), Knobs(channels_last=False, fused_optimizer=False, attention="math")
    tasks = {knobs: built(workload, params, knobs=knobs) for knobs in (default, other)}
    assert [task.optimizer.param_groups[0]["fused"] for task in tasks.values()] == [True, None]
    if workload == "image_classification":
        for knobs, task in tasks.items():
            images = next(weight for weight in task.model.parameters() if weight.ndim == 4 and weight.shape[1] > 1 and weight.shape[2] > 1)
            assert images.is_contiguous(memory_format=torch.channels_last) is knobs.channels_last
    found = []
    for knobs, task in tasks.items():
        attention(knobs.attention)
        assert torch.backends.cuda.flash_sdp_enabled() is (knobs.attention == "auto")
        found.append(losses(task, make_point, workload))
    assert found[0][0] != found[0][-1] and found[1] == pytest.approx(found[0], rel=1e-4)
