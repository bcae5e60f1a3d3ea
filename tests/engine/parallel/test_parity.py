"""Every placement trains as one process does, in fp32, over five or ten steps, within 1e-4 relative."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias

from caraml.engine.parallel.divide import attend_in_pieces, masks_of

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-4
HALF = 5
WIDE = {"micro_batch": 4}
"""Of models with divided matrices, where each operator costs the host most: the global batch in two passes instead of four."""
OTHER = {"positions": "rotary", "tied_head": True}
DEEP = {"layers": 4}
"""For the interleaved schedule, whose two devices have two stages each, and to see that layers which are alike are compiled once."""
OTHERS = ("variant", "fp16", "bf16", "resumed", "half", "deep")
"""First words of jobs that are not compared with the plain one."""
Results = dict[str, dict[str, Any]]

ALONE = [
    {"name": "alone"},
    {"name": "deep", "params": DEEP},
    {"name": "variant", "params": OTHER, "steps": HALF},
    {"name": "half", "steps": HALF, "params": {"save_to": "{}/from-one"}},
    {"name": "fp16", "point": {"precision": "fp16"}, "steps": HALF},
    {"name": "deep fp16", "point": {"precision": "fp16"}, "params": DEEP, "steps": HALF},
    {"name": "fp16 overflow", "point": {"precision": "fp16"}, "steps": HALF, "scale": 2.0**40},
    {"name": "bf16", "point": {"precision": "bf16"}, "steps": HALF},
    {"name": "bf16 half residual", "point": {"precision": "bf16", "knobs": {"half_residual": True}}, "steps": HALF},
]
TWO = [
    {"name": "dp2"},
    {"name": "fsdp2", "placement": {"fsdp": 2}, "exchanges": True},
    {"name": "distributed optimizer", "placement": {"distributed_optimizer": True}, "steps": HALF},
    {"name": "tp2", "placement": {"tp": 2}, "point": WIDE, "steps": HALF},
    {"name": "deep compiled fsdp2", "placement": {"fsdp": 2}, "point": {"compile": "default"}, "params": DEEP, "steps": HALF},
    {"name": "tp2+sp", "placement": {"tp": 2, "sp": True}, "point": WIDE, "steps": HALF},
    {"name": "pp2 gpipe", "placement": {"pp": 2, "schedule": "gpipe"}, "steps": HALF},
    {"name": "pp2 1f1b", "placement": {"pp": 2}},
    {"name": "deep pp2 interleaved", "placement": {"pp": 2, "schedule": "interleaved"}, "params": DEEP, "steps": HALF},
    {
        "name": "variant tp2+sp",
        "placement": {"tp": 2, "sp": True},
        "point": WIDE,
        "params": {**OTHER, "recompute": "full"},
        "steps": HALF,
    },
    {"name": "variant fsdp2", "placement": {"fsdp": 2}, "params": {**OTHER, "recompute": "selective"}, "steps": HALF},
    {"name": "cp2", "placement": {"cp": 2}, "point": WIDE, "steps": HALF},
    {"name": "variant cp2", "placement": {"cp": 2}, "point": WIDE, "params": {**OTHER, "recompute": "full"}, "steps": HALF},
    {
        "name": "variant compiled cp2",
        "placement": {"cp": 2, "fsdp": 2},
        "point": {**WIDE, "compile": "default"},
        "params": OTHER,
        "steps": HALF,
    },
    {
        "name": "variant selective cp2",
        "placement": {"cp": 2, "distributed_optimizer": True},
        "point": WIDE,
        "params": {**OTHER, "recompute": "selective"},
        "steps": HALF,
    },
    {"name": "bf16 cp2", "placement": {"cp": 2, "fsdp": 2}, "point": {**WIDE, "precision": "bf16"}, "steps": HALF},
    {"name": "onednn dp2", "matmul": "onednn", "steps": HALF},
    {"name": "onednn fsdp2", "matmul": "onednn", "placement": {"fsdp": 2}, "params": {"recompute": "selective"}, "steps": HALF},
    {"name": "onednn tp2+sp", "matmul": "onednn", "placement": {"tp": 2, "sp": True}, "point": WIDE, "steps": HALF},
    {"name": "auto pp2", "matmul": "auto", "placement": {"pp": 2}, "steps": HALF},
    {"name": "fp16 tp2+sp", "placement": {"tp": 2, "sp": True}, "point": {**WIDE, "precision": "fp16"}, "steps": HALF},
    *(
        {"name": f"fp16 overflow {name}2", "placement": {name: 2}, "point": {"precision": "fp16"}, "steps": HALF, "scale": 2.0**40}
        for name in ("fsdp", "pp")
    ),
    {"name": "bf16 fsdp2", "placement": {"fsdp": 2}, "point": {"precision": "bf16"}, "steps": HALF, "exchanges": True},
    {
        "name": "bf16 optimizer",
        "placement": {"distributed_optimizer": True},
        "point": {"precision": "bf16"},
        "steps": HALF,
        "exchanges": True,
    },
    {"name": "bf16 pp2", "placement": {"pp": 2}, "point": {"precision": "bf16", "knobs": {"half_residual": True}}, "steps": HALF},
    {
        "name": "deep fp16 pp2",
        "placement": {"pp": 2, "schedule": "interleaved"},
        "point": {"precision": "fp16"},
        "params": DEEP,
        "steps": HALF,
    },
    {"name": "resumed fsdp2", "placement": {"fsdp": 2}, "steps": HALF, "skip": HALF, "params": {"start_from": "{}/from-one"}},
    {"name": "resumed pp2", "placement": {"pp": 2}, "steps": HALF, "skip": HALF, "params": {"start_from": "{}/from-one"}},
    {
        "name": "resumed cp2",
        "placement": {"cp": 2, "fsdp": 2},
        "point": WIDE,
        "steps": HALF,
        "skip": HALF,
        "params": {"start_from": "{}/from-one"},
    },
    {
        "name": "half pp2",
        "placement": {"pp": 2, "schedule": "interleaved"},
        "steps": HALF,
        "params": {**DEEP, "save_to": "{}/from-pp2"},
    },
]
FOUR = [
    {"name": "dp2 x tp2", "placement": {"tp": 2}, "point": WIDE, "steps": HALF},
    {
        "name": "deep resumed fsdp2 x tp2",
        "placement": {"tp": 2, "fsdp": 2},
        "point": WIDE,
        "steps": HALF,
        "skip": HALF,
        "params": {**DEEP, "start_from": "{}/from-pp2"},
    },
    {
        "name": "deep resumed tp2 x pp2",
        "placement": {"tp": 2, "pp": 2},
        "steps": HALF,
        "skip": HALF,
        "params": {**DEEP, "start_from": "{}/from-pp2"},
    },
    {"name": "dp2 x cp2", "placement": {"cp": 2, "fsdp": 4}, "point": WIDE, "steps": HALF},
    {"name": "cp4", "placement": {"cp": 4}, "point": WIDE, "steps": HALF},
    {"name": "cp2 x tp2+sp", "placement": {"cp": 2, "tp": 2, "sp": True}, "point": WIDE, "steps": HALF},
    {"name": "deep cp2 x pp2", "placement": {"cp": 2, "pp": 2, "schedule": "interleaved"}, "params": DEEP, "steps": HALF},
]
EIGHT = [{"name": "dp2 x tp2 x pp2", "placement": {"tp": 2, "pp": 2}, "steps": HALF}]


def run(folder: Path, world: int, jobs: list[dict[str, Any]]) -> Results:
    """Train the jobs on ``world`` processes; ``{}`` in a path stands for the folder."""
    path = folder / f"world{world}" / "jobs.json"
    path.parent.mkdir()
    path.write_text(json.dumps(jobs).replace("{}/", f"{folder}/"))
    command = [sys.executable, "-m", "caraml.engine.start", f"--devices={world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "tests.engine.parallel.training", str(path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    results: Results = json.loads((path.parent / "losses.json").read_text())
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("parity")
    return {
        name: found for world, jobs in ((1, ALONE), (2, TWO), (4, FOUR), (8, EIGHT)) for name, found in run(folder, world, jobs).items()
    }


def difference(found: dict[str, Any], truth: list[float]) -> float:
    losses = found["losses"]
    assert len(losses) == len(truth) and all(map(math.isfinite, losses)), losses
    return max(abs(loss - true) / true for loss, true in zip(losses, truth, strict=True))


@pytest.mark.parametrize(
    "name",
    [job["name"] for job in [*TWO, *FOUR, *EIGHT] if str(job["name"]).split()[0] not in OTHERS],
)
def test_every_placement_trains_as_one_process(results: Results, name: str) -> None:
    truth = results["alone"]["losses"]
    assert truth[-1] < 0.8 * truth[0], "the parity of a model that learns nothing proves nothing"
    assert difference(results[name], truth[: len(results[name]["losses"])]) < TOLERANCE


@pytest.mark.parametrize("name", ["deep compiled fsdp2", "deep pp2 interleaved", "deep cp2 x pp2"])
def test_a_deeper_model_does_as_well(results: Results, name: str) -> None:
    assert difference(results[name], results["deep"]["losses"][:HALF]) < TOLERANCE


def test_layers_alike_are_compiled_once(results: Results) -> None:
    """Four of them, each by itself inside FSDP's hooks, over two micro-batches."""
    assert results["deep compiled fsdp2"]["graphs"] == 1 and results["fsdp2"]["graphs"] == 0


def test_ranks_multiply_with_the_same_library(results: Results) -> None:
    """The stages of a pipeline have different products; all know the times of all."""
    first, second = results["auto pp2"]["matmul"]
    assert first == second and first["asked"] == "auto" and len(first["products"]) > 4
    assert [told["library"] for told in results["onednn tp2+sp"]["matmul"]] == ["oneDNN"] * 2


@pytest.mark.parametrize("name", ["variant tp2+sp", "variant fsdp2", "variant cp2", "variant compiled cp2", "variant selective cp2"])
def test_rotary_positions_a_tied_head_and_recomputation_change_nothing(results: Results, name: str) -> None:
    assert difference(results[name], results["variant"]["losses"]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("fp16 tp2+sp", "fp16"),
        ("deep fp16 pp2", "deep fp16"),
        ("fp16 overflow fsdp2", "fp16 overflow"),
        ("fp16 overflow pp2", "fp16 overflow"),
    ],
)
def test_the_loss_scale_of_fp16_holds_over_all_devices(results: Results, name: str, truth: str) -> None:
    assert difference(results[name], results[truth]["losses"]) < 1e-3


@pytest.mark.parametrize("name", ["bf16 fsdp2", "bf16 optimizer", "bf16 cp2", "bf16 half residual", "bf16 pp2"])
def test_parameters_and_states_in_16_bits_train_alike(results: Results, name: str) -> None:
    """FSDP gathers in autocast's format, as keys and values are, and the last two keep hidden states in it, too: also between the stages
    of a pipeline."""
    truth = results["bf16"]["losses"]
    assert 0 < difference(results[name], truth) < 1e-2
    assert truth[-1] < 0.95 * truth[0]


def test_shards_are_gathered_in_the_format_that_is_computed_in_and_summed_in_fp32(results: Results) -> None:
    def formats(name: str, collective: str) -> set[str]:
        return {text.split()[-1] for text in results[name]["exchanged"] if collective in text and "c10d" in text}

    assert formats("fsdp2", "gather") == {"torch.float32"}
    for name in ("bf16 fsdp2", "bf16 optimizer"):
        assert formats(name, "gather") == {"torch.bfloat16"}, results[name]["exchanged"]
        assert formats(name, "reduce_scatter") == {"torch.float32"}


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        *((f"resumed {placement}", "alone") for placement in ("fsdp2", "pp2", "cp2")),
        *((f"deep resumed {placement}", "deep") for placement in ("fsdp2 x tp2", "tp2 x pp2")),
    ],
)
def test_a_checkpoint_goes_on_at_another_placement(results: Results, name: str, truth: str) -> None:
    """The first three were saved by one process, the others by a pipeline. The second stage of the last has no matrix that is whole."""
    assert difference(results[name], results[truth]["losses"][HALF:]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("cp2", [[0, 1]]),
        ("cp4", [[0, 1, 2, 3]]),
        ("dp2 x cp2", [[0, 1], [2, 3]]),
        ("deep cp2 x pp2", [[0, 1], [2, 3]]),
        ("cp2 x tp2+sp", [[0, 2], [1, 3]]),
        ("dp2", [[], []]),
    ],
)
def test_each_process_shares_its_sequences_with_its_group_also_on_another_node(
    results: Results, name: str, groups: list[list[int]]
) -> None:
    """Losses alone do not show it: whoever has whole sequences computes the same ones."""
    found = results[name]["beside"]
    assert found == ([next(group for group in groups if rank in group) for rank in range(len(found))] if any(groups) else groups)


@pytest.mark.parametrize("cp", [2, 4])
def test_pieces_of_a_sequence_attend_as_a_whole_and_layers_share_the_masks(cp: int) -> None:
    T = 8 * cp
    q, k, v = torch.randn(3, 1, 2, T, 8, generator=torch.Generator().manual_seed(cp), requires_grad=True)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    pieces = [(rank, 2 * cp - 1 - rank) for rank in range(cp)]
    parts = [torch.cat([torch.arange(4 * number, 4 * number + 4) for number in own]) for own in pieces]
    keys, values = (torch.stack([tensor[:, :, part] for part in parts]) for tensor in (k, v))
    for own, part in zip(pieces, parts, strict=True):
        masks, kept = masks_of(own, 4, torch.device("cpu"), torch.float32), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]  # noqa: B023
            found = attend_in_pieces(q[:, :, part], keys, values, masks)
        torch.testing.assert_close(found, whole[:, :, part])
        places = {tensor.data_ptr() for tensor in kept}
        assert all(mask is None or mask.data_ptr() in places for mask in masks.values())


def test_only_on_nvidia_s_gpus_a_kernel_is_told_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' align a causal mask with the first key whatever they are told: wrong numbers, and no error."""
    of_a_gpu = partial(masks_of, (0, 3), 8, torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(torch.version, "hip", None)
    assert isinstance(of_a_gpu()[3], CausalBias)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with FakeTensorMode():
        masks = of_a_gpu()
    assert isinstance(masks[3], torch.Tensor) and not isinstance(masks[3], CausalBias) and masks[0] is None


def test_each_device_holds_its_part(results: Results) -> None:
    whole = results["alone"]["held"][0]
    assert results["fsdp2"]["held"] == [whole / 2] * 2 and results["dp2"]["held"] == [whole] * 2
    assert results["cp2"]["held"] == [whole] * 2 and results["dp2 x cp2"]["held"] == [whole / 4] * 4
    assert sum(results["pp2 1f1b"]["held"]) == whole
    assert all(0.5 * whole < held < 0.52 * whole for held in results["tp2"]["held"]), "norms, positions and some biases are not divided"
    assert max(results["dp2 x tp2 x pp2"]["held"]) < 0.27 * whole
