"""Samples in Megatron-LM's order: those that Megatron-Core's own builder and data set give by the rule of Megatron-LM's sampler."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.suite.model import Placement
from caraml.suite.placement import Machine, why_skipped
from caraml.workloads.base import BuildContext
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.megatron_core import MegatronSamples
from caraml.workloads.gpt.tokens import IndexedTokens, IndexedTokensWriter
from caraml.workloads.gpt.training import build
from tests.conftest import MakePoint
from tests.engine.parallel.test_parity import HALF, TOLERANCE, Results, difference, run

T, VOCABULARY, SEED, SPLIT = 32, 128, 7, "80,15,5"
MICRO, GLOBAL, STEPS = 2, 8, 6
TINY: dict[str, Any] = {"preset": "4M", "width": 32, "layers": 1, "heads": 2, "sequence_length": T, "vocab_size": VOCABULARY}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """200 documents of 1 to 80 tokens, about 200 samples."""
    prefix, rng = tmp_path / "corpus" / "some.text", np.random.default_rng(3)
    prefix.parent.mkdir()
    with IndexedTokensWriter.at(prefix, VOCABULARY) as writer:
        for length in rng.integers(1, 80, 200):
            writer.add(rng.integers(VOCABULARY // 4, size=length))
    return prefix


@pytest.mark.slow
@pytest.mark.processes
def test_every_backend_and_placement_trains_on_the_same_samples(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    order = {"data": "text", "corpus": str(corpus), "order": "megatron"}
    theirs = {**order, "backend": "megatron"}
    placed: dict[int, list[dict[str, Any]]] = {
        1: [
            {"name": "ours", "params": order},
            {"name": "theirs", "params": theirs},
            {"name": "default order", "params": {**order, "order": "caraml"}},
        ],
        2: [
            {"name": "dp2", "params": order},
            {"name": "cp2", "params": order, "placement": {"cp": 2}},
            {"name": "theirs dp2", "params": theirs},
            {"name": "theirs tp2", "params": theirs, "placement": {"tp": 2}},
            {"name": "theirs pp2", "params": theirs, "placement": {"pp": 2}},
        ],
    }
    results: Results = {}
    for world, jobs in placed.items():
        results |= run(tmp_path, world, [{"steps": HALF, **job} for job in jobs])
    apart = {name: difference(found, results["ours"]["losses"]) for name, found in results.items()}
    assert apart.pop("default order") > TOLERANCE
    assert max(apart.values()) < TOLERANCE, apart


def megatrons(corpus: Path, cache: Path, run_samples: int | None) -> Any:
    """The training part as Megatron-LM builds it: a builder for all parts, with a folder of caches."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=T,
        blend=([str(corpus)], None),
        split=SPLIT,
        path_to_cache=str(cache),
        tokenizer=SimpleNamespace(eod=0, vocab_size=VOCABULARY, unique_identifiers={"class": "test"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [run_samples, None, None], lambda: True, config).build()[0]


def pretraining_sampler(total: int, micro_batch: int, rank: int, dp: int) -> Iterator[list[int]]:
    """``MegatronPretrainingSampler`` of Megatron-LM's ``megatron/training/datasets/data_samplers.py``, its last batch dropped."""
    batch: list[int] = []
    for position in range(total):
        batch.append(position)
        if len(batch) == micro_batch * dp:
            yield batch[rank * micro_batch : (rank + 1) * micro_batch]
            batch = []


def batches(params: Params, rank: int, dp: int) -> list[torch.Tensor]:
    """The micro-batches, (micro-batch, T + 1) each, that a rank trains on in the first steps."""
    context = BuildContext(
        params, torch.device("cpu"), rank, dp, 512, MICRO, SEED, lambda _: nullcontext(), accumulation=GLOBAL // (MICRO * dp)
    )
    task = build(context)
    found = [torch.cat([x, y[:, -1:]], 1) for x, y in itertools.islice(task.batches, STEPS * GLOBAL // (MICRO * dp))]
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in itertools.islice(task.batches, 1))
    task.close()
    return found


@pytest.mark.parametrize("run_samples", [None, 400], ids=["an epoch", "epochs"])
@pytest.mark.parametrize("dp", [1, 2])
def test_every_rank_trains_step_by_step_on_what_megatron_gives_it(dp: int, run_samples: int | None, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    given = {**TINY, "corpus": str(corpus)}
    asked = {"order": "megatron", "order_split": SPLIT, "order_samples": run_samples}
    before = sorted(corpus.parent.rglob("*"))
    found = [batches(Params.model_validate({**given, **asked}), rank, dp) for rank in range(dp)]
    assert sorted(corpus.parent.rglob("*")) == before, "written beside the corpus"
    theirs = megatrons(corpus, tmp_path / "cache", run_samples)
    for rank, own in enumerate(found):
        for got, positions in zip(own, pretraining_sampler(len(theirs), MICRO, rank, dp), strict=False):
            samples = [theirs[position] for position in positions]
            assert torch.equal(got, torch.stack([torch.cat([one["tokens"], one["labels"][-1:]]) for one in samples]))
    ours = batches(Params.model_validate(given), 0, dp)
    assert not any(torch.equal(a, b) for a, b in zip(ours, found[0], strict=True))


def test_what_a_record_says_of_the_samples(corpus: Path) -> None:
    """An epoch is a pass over the part that is trained on, also where a run is of several; workers may get the data set in a message."""
    pytest.importorskip("megatron.core")
    tokens = IndexedTokens(corpus)
    one = MegatronSamples(tokens, T, VOCABULARY, seed=SEED, split=SPLIT)
    more = MegatronSamples(tokens, T, VOCABULARY, seed=SEED, split=SPLIT, run_samples=400)
    part = (int(tokens.index.lengths[:160].sum()) - 1) // T
    assert len(one) == one.samples_per_epoch == more.samples_per_epoch == part and len(more) >= 400
    told = more.describe()
    assert told["order"].startswith("megatron-core ") and told["split"] == SPLIT
    assert (told["items"], told["tokens"]) == (200, tokens.index.token_count), "of the corpus"
    assert (told["split_documents"], told["split_tokens"]) == (160, int(tokens.index.lengths[:160].sum())), "of the part"
    assert torch.equal(pickle.loads(pickle.dumps(more))[5], more[5])
    params = Params.model_validate({**TINY, "corpus": str(corpus), "order": "megatron", "order_split": SPLIT, "order_samples": 400})
    task = build(BuildContext(params, torch.device("cpu"), 0, 1, 512, MICRO, SEED, lambda _: nullcontext(), accumulation=GLOBAL // MICRO))
    assert task.facts.samples_per_epoch == part and task.facts.data is not None and task.facts.data["samples"] == len(more)


def test_the_default_order_is_in_no_key_and_the_other_has_the_librarys_version() -> None:
    plain = Params.model_validate(TINY)
    assert not [name for name in plain.model_dump(mode="json") if name.startswith("order")] and plain.software is None
    asked = Params.model_validate({**TINY, "order": "megatron"})
    dumped = asked.model_dump(mode="json")
    assert (dumped["order"], dumped["order_split"], dumped["order_samples"]) == ("megatron", "969,30,1", None)
    for split in ("969, 30,1", " 969,30,1 "):
        assert Params.model_validate({**dumped, "order_split": split}) == asked, "however it is written"
    assert Params.model_validate({**dumped, "order_split": 1}).order_split == "1"
    assert Params.model_validate(dumped) == asked and (asked.software or "").startswith("megatron-core")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": "synthetic"}, "order megatron is of a corpus, found data 'synthetic': expected data 'text', or order 'caraml'"),
        ({"data": "synthetic-device"}, "found data 'synthetic-device'"),
        ({"order_split": "0,1"}, "expected a first part above 0"),
        ({"order_split": "most"}, "expected one to three shares such as 969,30,1"),
        ({"order_split": "1,1,1,1"}, "expected one to three shares"),
        ({"order": "caraml", "order_split": "98,2"}, "expected order = 'megatron' beside them"),
        ({"order": "caraml", "order_samples": 10}, "expected order = 'megatron' beside them"),
        ({"order_samples": 0}, "order_samples"),
    ],
    ids=str,
)
def test_what_has_no_such_order_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Params.model_validate({**TINY, "order": "megatron", **given})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "inference"}, "expected mode = 'train' or 'data', or params.order = 'caraml'"),
        ({"seed": -1}, "expected seed = 0 to 4294967295"),
        ({"mode": "data"}, None),
        ({"placement": Placement(cp=2), "devices": 2}, None),
    ],
    ids=str,
)
def test_points_that_it_is_not_for_are_skipped(values: dict[str, Any], words: str | None, make_point: MakePoint) -> None:
    machine = Machine(name="m", device="d", device_class="cpu", software="s", nodes=1, devices_per_node=2)
    point = make_point(workload="gpt", **{"global_batch": 8, "micro_batch": 2, **values})
    found = why_skipped(point, machine, Params.model_validate({**TINY, "tied_head": False, "order": "megatron"}))
    assert found is None if words is None else words in (found or ""), found


def test_too_little_text_is_told_with_the_part_that_was_asked_for(corpus: Path) -> None:
    pytest.importorskip("megatron.core")
    with pytest.raises(InputError, match=r"found 0 tokens in the first part of order_split '1,999'; expected at least 33") as caught:
        MegatronSamples(IndexedTokens(corpus), T, VOCABULARY, seed=0, split="1,999", run_samples=10)
    assert "params.order_split = '100,0,0'" in (caught.value.hint or "")
    with pytest.raises(InputError, match=r"expected ids from 0 to 9"):
        MegatronSamples(IndexedTokens(corpus), T, 10, seed=0, split="1")[0]


def test_without_the_library_the_command_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron", "megatron.core", "megatron.core.datasets", "megatron.core.datasets.gpt_dataset"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentUnfitError, match=r"params\.order = 'megatron' needs Megatron-Core") as caught:
        MegatronSamples(IndexedTokens(corpus), T, VOCABULARY, seed=0, split="1")
    assert "caraml[megatron]" in (caught.value.hint or "")
