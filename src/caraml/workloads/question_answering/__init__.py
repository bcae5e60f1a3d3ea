"""Question answering: BERT fine-tuned on SQuAD, as in the PEARC '22 accelerator study (its Table 2 counts items per second)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from caraml.base.errors import InputError
from caraml.base.limits import VOCABULARY
from caraml.base.toml import FrozenModel
from caraml.metrics.model import Metric
from caraml.metrics.run import mean
from caraml.workloads.base import COUNTED, BuildContext, Quality, Task, Workload, counted_facts, given_path, open_source
from caraml.workloads.pretrained import find_tokenizer, load_weights, read_config

if TYPE_CHECKING:
    import torch

PRESETS: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
}
"""Sizes of Devlin et al. 2018, table 1 and section 3, and a tiny network for laptops and tests."""
_OF_BERT = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
}
"""What all published sizes have, and what computes something else with other values."""
FULL_VOCABULARY = 30522
"""Words of the published uncased BERT; a smaller vocabulary that is trained here does not make the network smaller."""


class Params(FrozenModel):
    """Parameters of the `question_answering` workload."""

    preset: Literal["base", "large", "tiny"] = Field("base", description="BERT base (109 M parameters), BERT large, or a tiny one")
    weights: str | None = Field(
        None, description="folder of a trained BERT of the preset's size, as transformers writes it; from random weights if absent"
    )
    data: Literal["squad", "synthetic", "synthetic-device"] = Field(
        "squad", description="SQuAD's JSON, random tokens made by the loader, or random tokens already on the device"
    )
    file: str | None = Field(None, description="train-v1.1.json or train-v2.0.json; without it, a small set about invented people")
    validation: str | None = Field(None, description="dev-v1.1.json or dev-v2.0.json; the invented set has its own")
    vocabulary: str | None = Field(
        None, description="vocab.txt of WordPiece, or tokenizer.json; of `weights`, or trained on the file, if absent"
    )
    vocabulary_size: int = Field(2000, ge=100, description="words of a vocabulary that is trained")
    tokens: int = Field(384, ge=16, le=512, description="tokens per window, question and text together")
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")
    learning_rate: float = Field(3e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.01, ge=0, description="of the optimizer")


def build(ctx: BuildContext[Params]) -> Task:
    """Build BERT with a span head, AdamW, and the stream of ``[int64 (B, 3, T), int64 (B, 2)]``."""
    import torch
    from torch.nn import functional as F

    from caraml.data.loader import InOrder

    params = ctx.params
    if params.weights is not None:
        # Another model's folder is refused before its tokenizer is looked for and the data is cut.
        _words_of(params, given_path(params.weights))
    with ctx.phase("data"):
        dataset, unseen = _datasets(params, ctx.seed)
        source = open_source(dataset, ctx, workers=params.workers, resident=params.data == "synthetic-device")
    torch.manual_seed(ctx.seed)
    model = _network(params).to(ctx.device).train()
    words = model.config.vocab_size
    if params.data == "squad" and dataset.vocabulary_size > words:
        raise InputError(f"{dataset.vocabulary}: found {dataset.vocabulary_size:,} words, expected at most the {words:,} of the network")
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=ctx.fused)
    size, formula = 8 * (3 * params.tokens + 2), f"{COUNTED}; of a full window"
    facts = counted_facts("item", model, source, flops_per_item(params), bytes_per_sample=size, formula=formula)

    def scores(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Logits of being the first and the last token of the answer, (B, 2, T)."""
        ids, segments, mask = batch[0].unbind(1)
        out = net(input_ids=ids, token_type_ids=segments, attention_mask=mask)
        return torch.stack([out.start_logits, out.end_logits], dim=1).float()

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(scores(net, batch).flatten(0, 1), batch[1].flatten())

    def judge(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        found = scores(net, batch)
        right = (found.argmax(-1) == batch[1]).all(1).sum()
        losses = F.cross_entropy(found.flatten(0, 1), batch[1].flatten(), reduction="sum") / 2
        return torch.stack([losses, right, right.new_tensor(len(found))])

    def quality(most: int | None) -> dict[str, Metric]:
        return answer_quality(unseen.answers(lambda windows: scores(model, [windows.to(ctx.device)]), ctx.micro_batch, most))

    if unseen is None:
        return source.task(model, optimizer, loss, facts, clip_norm=1.0, predict=scores, judge=judge)
    own = Quality(("exact_match", "f1"), quality)
    source = replace(source, validation=lambda: InOrder(unseen, ctx.micro_batch, ctx.device))
    return source.task(model, optimizer, loss, facts, clip_norm=1.0, predict=scores, judge=judge, quality=own)


def flops_per_item(params: Params) -> tuple[float, float]:
    """FLOPs of one window: forward, and forward with backward. Embeddings, masks and dropout count nothing."""
    import torch

    from caraml.workloads.flops import forward_and_training_flops

    with torch.device("meta"):
        model = _network(params.model_copy(update={"weights": None}))
        tokens = torch.ones(2, params.tokens, dtype=torch.int64)
        return forward_and_training_flops(lambda: model(input_ids=tokens).start_logits.sum() + model.qa_outputs.bias.sum(), 2)


def _network(params: Params) -> Any:
    """BERT with a span head; of trained weights, the vocabulary has their size."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from transformers import BertConfig, BertForQuestionAnswering

    sizes, words = PRESETS[params.preset], FULL_VOCABULARY
    if params.weights is None:
        return BertForQuestionAnswering(BertConfig(vocab_size=words, **sizes))
    folder = given_path(params.weights)
    model = BertForQuestionAnswering(BertConfig(vocab_size=_words_of(params, folder), **sizes))
    load_weights(model, folder, head=("qa_outputs.",))
    return model


def _words_of(params: Params, folder: Path) -> int:
    """Words of the vocabulary of the trained weights in a folder. Raises ``InputError`` for those of another model."""
    found = read_config(folder, "bert", {**PRESETS[params.preset], **_OF_BERT}, PRESETS).get("vocab_size", FULL_VOCABULARY)
    if not isinstance(found, int) or not 0 < found <= VOCABULARY:
        raise InputError(f"{folder / 'config.json'}: vocab_size: found {found!r}, expected 1 to {VOCABULARY:,}")
    return found


def _datasets(params: Params, seed: int) -> tuple[Any, Any]:
    from caraml.workloads.question_answering.data import SquadWindows, default_squad, synthetic_windows, train_word_pieces

    if params.data != "squad":
        return synthetic_windows(FULL_VOCABULARY, params.tokens, seed=seed), None
    file = given_path(params.file) if params.file else default_squad()
    if params.vocabulary is not None:
        vocabulary = given_path(params.vocabulary)
    else:
        vocabulary = find_tokenizer(given_path(params.weights)) if params.weights else train_word_pieces(file, params.vocabulary_size)
    held_out = given_path(params.validation) if params.validation else default_squad(held_out=True) if params.file is None else None
    return SquadWindows(file, vocabulary, params.tokens), None if held_out is None else SquadWindows(held_out, vocabulary, params.tokens)


def check(params: Params, folder: Path) -> None:
    """See that the weights are a BERT's of the preset's sizes, and that questions are in SQuAD's form."""
    from caraml.workloads.question_answering.data import read_squad

    if params.weights is not None:
        _words_of(params, folder / params.weights)
    for path in filter(None, (params.file, params.validation)):
        read_squad(folder / path)


# -- answers: the rules of SQuAD's evaluation script, version 2.0 (Rajpurkar et al. 2016, 2018) ------------------------------


def answer_quality(answers: Iterable[tuple[str, Sequence[str]]]) -> dict[str, Metric]:
    """Exact match and F1 over pairs of an answer and the given ones, the best of which counts. No answer is the empty text, and none given
    means that it is right."""
    exact, overlap = [], []
    for found, given in answers:
        truths = [truth for truth in given if normalized(truth)] or [""]
        exact.append(max(float(normalized(found) == normalized(truth)) for truth in truths))
        overlap.append(max(f1(found, truth) for truth in truths))
    return {"exact_match": mean("exact_match", exact), "f1": mean("f1", overlap)}


def normalized(answer: str) -> str:
    """In lower case, without ASCII punctuation and English articles, words one space apart."""
    plain = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(found: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words, each as often as it occurs; without a word on one side, whether both have none."""
    words, true_words = normalized(found).split(), normalized(truth).split()
    if not words or not true_words:
        return float(words == true_words)
    common = (Counter(words) & Counter(true_words)).total()
    return 2 * common / (len(words) + len(true_words))


WORKLOAD = Workload(title="question answering", params=Params, build=build, packages=("transformers",), check=check)
