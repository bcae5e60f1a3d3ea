"""Short texts with the rain that fell where they were written, from NetCDF files, and DeBERTa-v3-small as a classifier of them.

The network of MAELSTROM's second application (deliverable D3.7, section 4.3): 141,896,450 parameters, random or trained before. The
architecture (He et al., arXiv 2111.09543) is that of the ``transformers`` library; its sizes stand here, so that nothing is fetched.
"""

from __future__ import annotations

import re
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.workloads import make_torchvision_importable
from caraml.workloads.base import COUNTED, BuildContext, Task, counted_facts, given_path
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.pretrained import find_tokenizer, load_tokenizer, load_weights, read_config
from caraml.workloads.weather import TweetParams, check_files, open_input
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLES_WITHOUT_FILES = 148_000
"""Texts in an epoch of random data: as many as the report's training set has."""
LAYOUT = Layout({"text_normalized": ("index",), "tp_h": ("index",)}, {})
RAINING_ABOVE = 1e-8
"""Precipitation of the hour [m] above which a text counts as written in rain."""
_TRAINING_SHARE = 0.8
_FIRST_WORD = 4
"""Ids below it are special: 0 padding, 1 start, 2 end, 3 unknown."""
_WORD = re.compile(r"\w+|[^\w\s]")
LOOKALIKE = {"tiny": (1, 160), "small": (2, 20_000)}
"""Files, texts in each."""
_WET = ("rain", "umbrella", "soaked", "puddles", "pouring", "drizzle", "wet")
_DRY = ("sunny", "beach", "picnic", "sunglasses", "dry", "warm", "blue sky")
_FILLER = ("today", "again", "in town", "love it", "on my way", "what a day", "with friends", "@user", "walking home", "so tired")


class TweetSamples(WeatherSamples):
    """A sample is ``(tokens int64 (T,), label int64 ())``; the label is 1 where it rained.

    All texts and labels are read at once: they are a few megabytes. Without ``pieces``, the tokenizer of trained weights, a word becomes an
    id by its CRC-32, so that no vocabulary has to be fetched; two words may share one. Both labels are split 80 to 20 into training and
    validation.
    """

    application = "ap2"

    def __init__(self, folder: Path, tokens: int, vocabulary: int, split: Split = "train", pieces: Tokenizer | None = None) -> None:
        """Read ``folder/*.nc``. Errors as :class:`NetcdfFiles`; also a part without a text."""
        self.files = NetcdfFiles(find_files(folder, "*.nc"), LAYOUT)
        self._length, self._vocabulary, self._pieces = tokens, vocabulary, pieces
        texts: list[str] = []
        rain = []
        for number, path in enumerate(self.files.paths):
            texts += self.files.texts(number, "text_normalized")
            rain.append(complete(self.files.read(number, "tp_h"), path, "tp_h"))
        labels = (np.concatenate(rain) > RAINING_ABOVE).astype(np.int64)
        self.files.close()
        chosen = _stratified(labels, split)
        if not len(chosen):
            raise InputError(f"{folder}: found {count(len(texts), 'text')}, none of them for {split}; expected at least 5 of one label")
        self._texts, self._labels = [texts[index] for index in chosen], labels[chosen]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, position: int) -> Sample:
        """Text ``position``, cut or padded with 0 to T tokens."""
        text, length = self._texts[position], self._length
        ids = word_ids(text, length, self._vocabulary) if self._pieces is None else piece_ids(text, length, self._pieces)
        return torch.from_numpy(ids), torch.tensor(self._labels[position])


def word_ids(text: str, length: int, vocabulary: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids of a text's words, int64 (length,): start, words, end, then 0."""
    words = _WORD.findall(text.lower())[: length - 2]
    ids = [_FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - _FIRST_WORD) for word in words]
    padded = np.zeros(length, np.int64)
    padded[: len(ids) + 2] = [1, *ids, 2]
    return padded


def pieces_of(folder: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer of a folder of trained weights. Raises ``InputError`` where there is none, or its words are not the network's."""
    path = find_tokenizer(folder, ("tokenizer.json",))
    pieces = load_tokenizer(path)
    if (words := pieces.get_vocab_size()) > vocabulary or pieces.token_to_id("[PAD]") != 0:
        found = f"{words:,} words and [PAD] = {pieces.token_to_id('[PAD]')}"
        raise InputError(f"{path}: found {found}; expected at most {vocabulary:,} words and [PAD] = 0")
    return pieces


def piece_ids(text: str, length: int, pieces: Tokenizer) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids of a text by a tokenizer with its special tokens, int64 (length,), then 0; a text that is cut keeps its end token."""
    ids = pieces.encode(text).ids
    padded = np.zeros(length, np.int64)
    padded[: len(ids)] = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
    return padded


def synthetic_tweet(rng: np.random.Generator, tokens: int, vocabulary: int) -> tuple[Any, ...]:
    """Random ids without padding, and a random label."""
    return rng.integers(1, vocabulary, size=tokens), np.int64(rng.integers(2))


def write_lookalike(folder: Path, size: str, seed: int, number: int) -> int:
    """Write file ``number``: texts whose words tell of the weather nine times out of ten. Its bytes."""
    _, count = LOOKALIKE[size]
    rng = np.random.default_rng([seed, number])
    raining = rng.random(count) < 0.5
    told = raining ^ (rng.random(count) < 0.1)
    texts = [" ".join([*rng.choice(_FILLER, 3), rng.choice(_WET if wet else _DRY), *rng.choice(_FILLER, 2)]) for wet in told]
    rain = np.where(raining, rng.gamma(1.0, 1e-3, count) + 1e-6, 0).astype(np.float32)
    variables = {
        "text_normalized": (("index",), np.array(texts)),
        "tp_h": (("index",), rain),
        "index": (("index",), np.arange(count)),
    }
    return write_netcdf(folder / f"tweets_{number:02d}.nc", {"index": count}, variables)


def _stratified(labels: np.ndarray[Any, Any], split: Split) -> np.ndarray[Any, Any]:
    """Indices of a part, with the whole's share of both labels; the same every time."""
    rng = np.random.default_rng(42)
    chosen = []
    for label in (0, 1):
        indices = rng.permutation(np.flatnonzero(labels == label))
        cut = round(_TRAINING_SHARE * len(indices))
        chosen.append(indices[:cut] if split == "train" else indices[cut:])
    return np.sort(np.concatenate(chosen))


VOCABULARY = 128_100
LABELS = 2
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
"""By preset: the published ones, and some for machines that cannot train these; the vocabulary stays."""

_DECIDES = [
    *("vocab_size", "hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "relative_attention", "share_att_key"),
    *("max_relative_positions", "position_buckets", "norm_rel_ebd", "pos_att_type", "position_biased_input"),
]
"""What computes something else with another value."""


def deberta_config(sizes: dict[str, Any]) -> Any:
    """The ``transformers`` configuration of DeBERTa-v3 with these sizes."""
    from transformers import DebertaV2Config

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        **sizes,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-7,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "pad_token_id": 0,
        "pooler_dropout": 0.0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": sizes["hidden_size"],
        "cls_dropout": 0.1,
        "num_labels": LABELS,
    }
    return DebertaV2Config(**settings)


class TweetClassifier(torch.nn.Module):
    """Token ids int64 (B, T), 0 where there is no token, to scores (B, 2) of "dry" and "raining"."""

    def __init__(self, sizes: dict[str, Any] | None = None) -> None:
        super().__init__()
        make_torchvision_importable()  # transformers imports it, needed or not
        from transformers import DebertaV2ForSequenceClassification

        self.network = DebertaV2ForSequenceClassification(deberta_config(sizes or SIZES["small"]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores before the softmax."""
        return self.network(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


def check_config(folder: Path, sizes: dict[str, Any]) -> None:
    """Raise ``InputError`` for the folder of another network."""
    ours, names = deberta_config(sizes).to_dict(), [*sizes, *_DECIDES]
    read_config(folder, "deberta-v2", {name: ours[name] for name in names}, SIZES)


def trained(model: TweetClassifier, folder: Path, sizes: dict[str, Any]) -> None:
    """Fill the network with the weights of a folder; its head stays as it was drawn. Raises ``InputError`` for those of another network."""
    check_config(folder, sizes)
    load_weights(model.network, folder, head=("pooler.", "classifier."))


def build(ctx: BuildContext[TweetParams]) -> Task:
    """Build the network, AdamW, and the stream of ``[tokens (B, T), labels (B,)]``, int64."""
    params, sizes = ctx.params, SIZES[ctx.params.preset]
    pieces = None
    if params.weights is not None:
        check_config(given_path(params.weights), sizes)
        pieces = pieces_of(given_path(params.weights), VOCABULARY)
    draw = partial(synthetic_tweet, tokens=params.tokens, vocabulary=VOCABULARY)
    given = open_input(
        ctx, "ap2", lambda folder, split: TweetSamples(folder, params.tokens, VOCABULARY, split, pieces), draw, SAMPLES_WITHOUT_FILES
    )
    torch.manual_seed(ctx.seed)
    model = TweetClassifier(sizes)
    if params.weights is not None:
        trained(model, given_path(params.weights), sizes)
    model = model.to(ctx.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=ctx.fused)
    flops, formula = _flops(params, ctx.micro_batch), f"{COUNTED}; of a micro-batch, whose texts share the products for relative positions"
    facts = counted_facts("text", model, given, flops, bytes_per_sample=8 * params.tokens, formula=formula)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return F.cross_entropy(net(tokens).float(), labels)

    return given.task(model, optimizer, loss, facts, predict=lambda net, batch: net(batch[0]))


def _flops(params: TweetParams, texts: int) -> tuple[float, float]:
    """FLOPs of one of ``texts`` that go through the network together: forward, and forward with backward. Dropout and masks count nothing.

    The products for relative positions are made once for all of them.
    """
    with torch.device("meta"):
        model = TweetClassifier(SIZES[params.preset])
        tokens = torch.ones(texts, params.tokens, dtype=torch.int64)
        return forward_and_training_flops(lambda: model(tokens).sum(), texts)


def check(params: TweetParams, folder: Path) -> None:
    """See that the weights are a DeBERTa's of the preset's sizes, and that files are of tweets."""
    if params.weights is not None:
        check_config(folder / params.weights, SIZES[params.preset])
    check_files("tweet_rain_classification", params, folder)
