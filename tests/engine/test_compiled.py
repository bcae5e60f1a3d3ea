"""Compiled steps: whole graphs, one compilation, the same numbers as eager ones, and a loss that goes over its logits once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from caraml.engine.afterwards import validate, validation_loss
from caraml.engine.precision import set_attention, set_deterministic
from caraml.engine.ranks import Ranks
from caraml.engine.step import make_step
from caraml.engine.steps import RankSummary, StepTable
from caraml.metrics.model import Peak
from caraml.suite.expand import expand
from caraml.suite.model import Attention
from caraml.suite.placement import Machine
from caraml.worker.together import Known
from caraml.worker.training import Worker
from caraml.workloads import params_of
from caraml.workloads.base import Task
from caraml.workloads.gpt.model import TILE, linear_cross_entropy, rows_of_chunk
from caraml.workloads.weather.atmorep import PRESETS
from caraml.workloads.weather.regime_clustering import RegimeNetwork
from tests.conftest import MakePoint
from tests.debian import compiler_missing
from tests.engine.together import Meeting, ThreadRanks
from tests.suite.test_knobs import GPT, RESNET, suite_of
from tests.tasks import built
from tests.workloads.test_modes import CASES

CPU = torch.device("cpu")
GRAPHS = {"regime_clustering": 2}
"""Its images come in two sizes."""
UNCOMPILED = {case for case in CASES if case == "downscaling_gan" or "recompute" in CASES[case]}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compilation up to the graphs that the code generator would get, which run as they are; counted."""
    own = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: own(module, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def of_case(case: str, micro_batch: int, **params: Any) -> Task:
    return built(case.split(maxsplit=1)[0], {**CASES.get(case, {}), **params}, micro_batch, accumulation=4 // micro_batch)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES.keys() - UNCOMPILED))
def test_every_step_is_compiled_whole_and_once(graphs: Any, make_point: MakePoint, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches in a step, where there can be several: a break would leave parts of the step to Python, in every step."""
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], layers=1))
    monkeypatch.setattr("caraml.workloads.weather.atmorep._TAILS", 2)  # AtmoRep's three fields, of two layers and 16 ends: 800 operators
    shallow = partial(RegimeNetwork, stages=((64, 2, 1), (128, 1, 2)))  # both kinds of block; a ResNet-50's 16 take three times as long
    monkeypatch.setattr("caraml.workloads.weather.regime_clustering.RegimeNetwork", shallow)
    task = of_case(case, 2)
    point = make_point(workload=case.split(maxsplit=1)[0], precision="bf16", compile="default")
    batch = {"global_batch": 2 if task.own_step else 4, "micro_batch": 2}
    step = make_step(task, point.model_copy(update=batch), CPU)
    for _ in range(3):
        step()
    assert not graphs["graph_break"], dict(graphs["graph_break"])
    assert graphs["stats"]["unique_graphs"] == GRAPHS.get(case, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "params"), [("gpt", GPT), ("image_classification", RESNET), ("question_answering", {})])
def test_compiled_training_is_the_eager_one(graphs: Any, make_point: MakePoint, case: str, params: dict[str, Any]) -> None:
    """Losses and parameters after three steps, with and without accumulation, in both memory orders and formats."""
    for precision, micro_batch in (("fp32", 2), ("bf16", 4)):
        torch.compiler.reset()  # a worker compiles for one shape: of several, torch 2.11 cannot compile GPT's loss
        found = []
        for compiled in ("off", "default"):
            torch.manual_seed(1)  # of dropout
            task = of_case(case, micro_batch, **params)
            for module in task.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            asked = {"global_batch": 4, "micro_batch": micro_batch, "precision": precision, "compile": compiled}
            step = make_step(task, make_point(workload=case, **asked), CPU)
            losses = torch.stack([loss for _ in range(3) if (loss := step().loss) is not None])
            found.append((losses, torch.cat([parameter.detach().flatten() for parameter in task.model.parameters()])))
        (eager, weights), (compiled_losses, compiled_weights) = found
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        assert torch.allclose(compiled_losses, eager, rtol=tolerance), (precision, micro_batch, eager, compiled_losses)
        assert (compiled_weights - weights).norm() <= tolerance * weights.norm()
    assert graphs["stats"]["unique_graphs"] >= 2


def test_nothing_is_compiled_anew_after_the_window(graphs: Any, make_point: MakePoint, tmp_path: Path) -> None:
    """For evaluation mode and for a smaller last batch, that is, which takes a GPU minutes. Epochs go through it again and again."""

    class Network(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)

    network = Network(4, 1)
    batches = [torch.ones(8, 4), torch.ones(3, 4)]
    facts, optimizer = of_case("gpt", 2, **GPT).facts, torch.optim.SGD(network.parameters(), lr=0.1)
    task = Task(network, optimizer, iter(batches * 9), lambda net, batch: net(batch).mean(), facts, validation=lambda: iter(batches))
    worker = Worker(tmp_path, make_point(mode="train", compile="default"))
    worker._known = Known(tmp_path, worker.point, facts, 0.0, "", Peak(value=None, dtype="fp32", reason="not probed"))
    make_step(task, worker.point, CPU)()
    worker._validate_and_save(task, CPU, RankSummary(0.0, 1.0, StepTable(), [], 0.0, 0.0, 0, []), Ranks())
    assert worker._known.validation_loss is not None and graphs["stats"]["unique_graphs"] == 1
    assert validation_loss(task, "fp32", CPU) == worker._known.validation_loss and graphs["stats"]["unique_graphs"] == 3


@pytest.mark.slow
def test_the_compiled_loss_goes_over_its_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by the compiler's own count of what its kernels read and write, in bf16: the product writes two a logit, one kernel reads
    them and writes the slopes. Passes through float32 in memory took 14. Nothing reads single logits: on GPUs the compiler did so for all
    chunks in its last kernel, and kept them until then, 6.6 GB of 64 x 1024 tokens."""
    if (reason := compiler_missing()) is not None:
        pytest.skip(reason)
    import torch._inductor.config as inductor
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    rows, words, width = 4 * TILE, 6288, 32
    passes: list[int] = []
    picks: list[str] = []
    own = GraphLowering.compile_to_module

    def counted(graph: Any, *given: Any, **named: Any) -> Any:
        module = own(graph, *given, **named)
        passes.extend(
            node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)
        )
        for node in graph.graph.nodes:
            sizes = [given.meta["val"].shape for given in node.all_input_nodes if isinstance(given.meta.get("val"), torch.Tensor)]
            if (2 * TILE, words) in sizes and ("gather" in str(node.target) or "index" in str(node.target)):
                picks.append(str(node.target))
        return module

    monkeypatch.setattr(GraphLowering, "compile_to_module", counted)
    # What is fused is decided before it is written for vectors, and which ones there are takes seconds to find out.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    torch._dynamo.reset()
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets = torch.randint(words, (rows,))

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(hidden, weight, targets, chunk_bytes=4 * words * 2 * TILE)

    with inductor.patch(force_disable_caches=True):  # a setting of torch's that pytest puts back is gone
        found = torch.compile(loss)(hidden, weight)
        gradients = torch.autograd.grad(found, (hidden, weight))
    besides = 5 * (2 + 4 + 4) * width * (rows + words)  # weights and their gradients, a few passes over them
    assert 2 + (sum(passes) - besides) / (rows * words) <= 8, passes
    assert sum(passes) > 4 * rows * words, "the count sees the kernel"
    assert picks == []
    exact = torch.nn.functional.cross_entropy((hidden.bfloat16() @ weight.bfloat16().t()).float(), targets)
    truth = torch.autograd.grad(exact, (hidden, weight))
    assert found.item() == pytest.approx(exact.item(), rel=1e-2)
    assert all((one - true).norm() < 0.02 * true.norm() for one, true in zip(gradients, truth, strict=True))


@pytest.mark.parametrize(
    ("count", "most", "rows"), [(65536, 2668, 2048), (5000, 2668, 2560), (2668, 2668, 2668), (100, 2668, 100), (300, 40, 40), (3, 0, 1)]
)
def test_chunks_of_the_loss_are_whole_tiles_and_if_they_can_equal(count: int, most: int, rows: int) -> None:
    assert rows_of_chunk(count, most) == rows


def plan(workload: str, lines: str = "", **machine: Any) -> Any:
    where = Machine("m", "test device", "gpu", "test", nodes=1, devices_per_node=1, compiles=True)
    text = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "{workload}"\nglobal_batch = 8\n{lines}\n'
    (planned,) = expand(suite_of(text), where, params_of).points
    return planned


def test_models_are_compiled_where_torch_compiles_for_the_device() -> None:
    """Nobody has to ask; what cannot be compiled is not, and says why if somebody asks."""
    silent, spelt, off = plan("gpt"), plan("gpt", 'compile = "default"'), plan("gpt", 'compile = "off"')
    assert (silent.point.compile, silent.point.key) == ("default", spelt.point.key) and off.point.compile == "off"
    assert plan("gpt", 'mode = "data"').point.compile == "off"
    for workload, line, why in (("downscaling_gan", "", "differentiated twice"), ("gpt", 'params = { recompute = "full" }', "recompute")):
        assert (plan(workload, line).point.compile, plan(workload, line).skip) == ("off", None)
        asked = plan(workload, f'compile = "default"\n{line}')
        assert asked.skip is not None and why in asked.skip and 'expected compile = "off"' in asked.skip
    assert plan("command", 'params = { argv = ["true"], item = "x", items = 1 }').point.compile == "off"


def test_convolutions_are_searched_for_unless_bits_must_repeat() -> None:
    switches = torch.backends.cudnn
    before = switches.benchmark
    try:
        set_deterministic(False, search=True)
        assert switches.benchmark
        set_deterministic(False, search=False)
        assert not switches.benchmark
    finally:
        switches.benchmark = before


def test_statistics_are_not_sent_in_every_step_and_agreed_on_before_validation(
    make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def of_now(model: torch.nn.Module, forward_sync_buffers: bool | None = None, **options: Any) -> torch.nn.Module:
        asked.update(forward_sync_buffers=forward_sync_buffers)
        return model

    def of_torch_2_12(model: torch.nn.Module, broadcast_buffers: bool | None = None, **options: Any) -> torch.nn.Module:
        asked.update(broadcast_buffers=broadcast_buffers)
        return model

    for wrapper in (of_now, of_torch_2_12):
        monkeypatch.setattr("caraml.engine.ranks.DistributedDataParallel", wrapper)
        task = of_case("image_classification", 2)
        make_step(task, make_point(workload="image_classification", devices=2, global_batch=4, micro_batch=2), CPU)
    assert asked == {"forward_sync_buffers": False, "broadcast_buffers": False}

    def validated(ranks: ThreadRanks) -> list[float]:
        own = of_case("image_classification", 2)
        own.validation = lambda: iter([])
        norm = next(module for module in own.model.modules() if isinstance(module, torch.nn.BatchNorm2d))
        assert norm.running_mean is not None and norm.num_batches_tracked is not None
        norm.running_mean.fill_(float(ranks.rank))
        norm.num_batches_tracked.fill_(7)
        validate(own, "fp32", CPU, ranks)
        return [norm.running_mean[0].item(), float(norm.num_batches_tracked)]

    assert Meeting(2).run(validated) == [[0.5, 7.0], [0.5, 7.0]]


@pytest.mark.slow
def test_a_kernel_of_attention_is_not_what_another_choice_left_on_disk() -> None:
    """Torch keeps what it has compiled, for whoever compiles the same model, whichever kernels that one allows."""
    from torch._functorch import config
    from torch._inductor.utils import fresh_cache

    if (reason := compiler_missing()) is not None:
        pytest.skip(reason)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    def kernels(kernel: Attention) -> set[str]:
        """Of a process of its own, so far as the compiler can tell."""
        torch._dynamo.reset()
        set_attention(kernel)
        compiled, x = torch.compile(attend), torch.randn(1, 2, 32, 16, requires_grad=True)
        compiled(x).backward()
        with torch.profiler.profile() as traced:
            compiled(x).backward()
        return {one.key for one in traced.key_averages() if "flash_attention" in one.key}

    try:
        with config.patch(enable_autograd_cache=True), fresh_cache():
            assert kernels("auto") and not kernels("math")
    finally:
        set_attention("auto")
        torch._dynamo.reset()
