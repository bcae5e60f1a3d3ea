"""Trained weights from a folder: what transformers computes with them, and what is said of a folder that is another model's."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from caraml.base.errors import InputError
from caraml.workloads import make_torchvision_importable
from caraml.workloads.base import Task
from caraml.workloads.question_answering import PRESETS, Params, _datasets, _network
from caraml.workloads.question_answering.data import SquadWindows, default_squad, train_word_pieces
from caraml.workloads.weather.tweet_rain_classification import (
    SIZES,
    VOCABULARY,
    TweetClassifier,
    TweetSamples,
    deberta_config,
    piece_ids,
    pieces_of,
    trained,
    write_lookalike,
)
from tests.tasks import built

IDS = torch.arange(1, 25).reshape(2, 12)

TINY = SIZES["tiny"]


@pytest.fixture(autouse=True)
def quiet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path / "data-home"))


def build(name: str, values: dict[str, Any]) -> Task:
    return built(name, {"preset": "tiny", "workers": 0, **values})


def theirs(name: str) -> Any:
    """A class of transformers: imported where a test runs, since that takes seconds of every process that collects."""
    make_torchvision_importable()
    return getattr(importlib.import_module("transformers"), name)


def bert(**changes: Any) -> Any:
    return theirs("BertConfig")(**{"vocab_size": 100, **PRESETS["tiny"], **changes})


def saved(model: Any, folder: Path) -> Path:
    """A folder as transformers writes it, each weight moved away from where all models begin."""
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    return torch.stack([out.start_logits, out.end_logits])


def rewritten(folder: Path, change: Any) -> dict[str, torch.Tensor]:
    """The folder's tensors after ``change``, written back."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("form", ["safetensors", "pickle", "old pickle", "old names"])
def test_bert_computes_what_transformers_does_with_the_same_folder(tmp_path: Path, form: str) -> None:
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    truth = logits(theirs("BertForQuestionAnswering").from_pretrained(folder, local_files_only=True))
    if form != "safetensors":
        tensors = load_file(folder / "model.safetensors")
        if form == "old names":
            tensors = {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
                for name, tensor in tensors.items()
            }
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form != "old pickle")
        (folder / "model.safetensors").unlink()
    model = _network(Params(preset="tiny", weights=str(folder)))
    assert torch.equal(logits(model), truth) and model.config.vocab_size == 100


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertModel"])
def test_the_network_below_any_head_is_taken_and_the_head_drawn(tmp_path: Path, kind: str) -> None:
    """As published: a checkpoint of the first training, whose own heads are left, or of the bare network, whose names have no prefix."""
    folder = saved(theirs(kind)(bert()), tmp_path / "bert")
    truth = load_file(folder / "model.safetensors")
    ours = _network(Params(preset="tiny", weights=str(folder))).state_dict()
    prefix = "" if kind == "BertModel" else "bert."
    body = {name: tensor for name, tensor in ours.items() if name.startswith("bert.")}
    assert len(body) == len(ours) - 2 and all(torch.equal(tensor, truth[prefix + name[5:]]) for name, tensor in body.items())
    heads = [_seeded(folder, seed) for seed in (1, 2)]
    assert not torch.equal(*heads) and heads[0].std() < 0.03


def _seeded(folder: Path, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return _network(Params(preset="tiny", weights=str(folder))).qa_outputs.weight.detach()


def test_deberta_computes_what_transformers_does_with_the_same_folder(tmp_path: Path) -> None:
    folder = saved(theirs("DebertaV2ForSequenceClassification")(deberta_config(TINY)), tmp_path / "deberta")
    model = TweetClassifier(TINY)
    trained(model, folder, TINY)
    original = theirs("DebertaV2ForSequenceClassification").from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS), original.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pos_att_type": "p2c|c2p"}))  # as its authors wrote it
    trained(TweetClassifier(TINY), folder, SIZES["tiny"])


def test_deberta_s_first_training_has_other_heads(tmp_path: Path) -> None:
    folder = saved(theirs("DebertaV2ForMaskedLM")(deberta_config(TINY)), tmp_path / "deberta")
    model = TweetClassifier(TINY)
    trained(model, folder, TINY)
    truth = load_file(folder / "model.safetensors")
    ours = model.network.deberta.state_dict()
    assert all(torch.equal(tensor, truth[f"deberta.{name}"]) for name, tensor in ours.items())


def _without(name: str) -> Any:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def _renamed(old: str, new: str) -> Any:
    return lambda tensors: {new if key == old else key: tensor for key, tensor in tensors.items()}


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without(QUERY), ["1 missing", QUERY, "nearest there: none"]),
        (
            _renamed(QUERY, QUERY.replace("query", "querry")),
            ["1 missing", f"nearest there: {QUERY.replace('query', 'querry')}", "1 not part of"],
        ),
        (
            lambda tensors: {**tensors, "bert.embeddings.word_embeddings.weight": torch.zeros(100, 64)},
            ["1 of another shape", "bert.embeddings.word_embeddings.weight: 100 x 64, expected 100 x 128"],
        ),
        (
            lambda tensors: {**tensors, **{f"bert.encoder.layer.{n}.output.dense.bias": torch.zeros(128) for n in range(2, 12)}},
            ["10 not part of this network: bert.encoder.layer.", "and 8 more"],
        ),
        (lambda tensors: {**tensors, "qa_outputs.bias": torch.zeros(3)}, ["1 of another shape: qa_outputs.bias: 3, expected 2"]),
    ],
)
def test_weights_of_another_network_are_refused_by_name(tmp_path: Path, change: Any, words: list[str]) -> None:
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    rewritten(folder, change)
    with pytest.raises(InputError) as caught:
        _network(Params(preset="tiny", weights=str(folder)))
    assert all(word in str(caught.value) for word in [*words, "model.safetensors: found the weights of another network"]), str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "roberta"}, "model_type: found 'roberta', expected 'bert'"),
        (PRESETS["base"], "hidden_size: found 768, expected 128; .*\n.*preset = 'base' has the sizes"),
        ({"num_attention_heads": 4}, "num_attention_heads: found 4, expected 2"),
        ({"hidden_act": "relu"}, "hidden_act: found relu, expected gelu"),
        ({"vocab_size": -1}, "vocab_size: found -1, expected 1 to"),
        ({"vocab_size": "many"}, "vocab_size: found 'many', expected 1 to"),
        (None, "not readable as JSON"),
    ],
)
def test_the_configuration_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any] | None, words: str) -> None:
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text("{" if change is None else json.dumps({**config, **change}))
    with pytest.raises(InputError, match=rf"config.json: (?s:.*){words}"):
        _network(Params(preset="tiny", weights=str(folder)))


def test_a_folder_without_a_part_says_which(tmp_path: Path) -> None:
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    with pytest.raises(InputError, match=r"found no model.safetensors or pytorch_model.bin(?s:.*)max_shard_size"):
        _network(Params(preset="tiny", weights=str(folder)))
    with pytest.raises(InputError, match=r"found no tokenizer.json or vocab.txt"):
        _datasets(Params(preset="tiny", weights=str(folder)), 0)
    (folder / "spm.model").touch()
    with pytest.raises(InputError, match=r"found no tokenizer.json(?s:.*)sentencepiece is installed: python -c"):
        pieces_of(folder, VOCABULARY)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"found no config.json in .*expected a folder that transformers wrote"):
        _network(Params(preset="tiny", weights=str(folder)))
    with pytest.raises(InputError, match=rf"found no config.json in {Path.cwd()}/bert;"):
        _network(Params(preset="tiny", weights="bert"))


class Harmful:
    """Runs a program when it is unpickled without care."""

    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


NESTED = {"model": {"a": torch.zeros(1)}}
NOT_BY_NAME = [b"", b"no tensors", {"a": 1}, {"a": Harmful()}, [torch.zeros(1)], torch.zeros(1), {0: torch.zeros(1)}, NESTED]
"""Contents of a file of weights."""


@pytest.mark.parametrize(
    ("content", "words"),
    [({"a": Harmful()}, "can run any program and is not loaded"), (NESTED, "found 'model': dict"), (torch.zeros(1), "found one Tensor")],
)
def test_what_a_file_of_weights_holds_instead_is_said_with_what_to_do(tmp_path: Path, content: Any, words: str) -> None:
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=words) as refused:
        _network(Params(preset="tiny", weights=str(folder)))
    assert "save_pretrained" in str(refused.value) and "weights_only" not in str(refused.value)


@pytest.mark.parametrize("content", NOT_BY_NAME)
def test_what_is_no_file_of_tensors_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin: not readable as tensors by name"):
        _network(Params(preset="tiny", weights=str(folder)))
    assert not (tmp_path / "harmed").exists()
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InputError, match=r"model.safetensors: not readable as tensors by name"):
        _network(Params(preset="tiny", weights=str(folder)))


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.workloads.pretrained._ROOM", -(1 << 40))
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    with pytest.raises(InputError, match=r"bytes of weights, at most .* are read for a network of this size"):
        _network(Params(preset="tiny", weights=str(folder)))


def test_words_keep_their_case_where_the_weights_say_so(tmp_path: Path) -> None:
    file = default_squad(held_out=True)
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text(train_word_pieces(file, 400).read_text() + "Oslo\n")
    lower = SquadWindows(file, vocabulary, 64)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = SquadWindows(file, vocabulary, 64)
    last = cased.vocabulary_size - 1
    assert not any((lower[place][0][0] == last).any() for place in range(len(lower)))
    assert any((cased[place][0][0] == last).any() for place in range(len(cased)))
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"tokenizer_config.json: not readable as a JSON object"):
        SquadWindows(file, vocabulary, 64)


def test_a_tokenizer_json_cuts_the_same_windows_as_its_vocabulary(tmp_path: Path) -> None:
    from tokenizers import BertWordPieceTokenizer

    file = default_squad(held_out=True)
    vocabulary = train_word_pieces(file, 400)
    BertWordPieceTokenizer(str(vocabulary), lowercase=True).save(str(tmp_path / "tokenizer.json"))
    one, other = SquadWindows(file, vocabulary, 64), SquadWindows(file, tmp_path / "tokenizer.json", 64)
    assert len(one) == len(other) and all(
        torch.equal(a, b) for place in range(len(one)) for a, b in zip(one[place], other[place], strict=True)
    )


def test_more_words_than_the_network_has_are_refused(tmp_path: Path) -> None:
    folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    (folder / "vocab.txt").write_text(train_word_pieces(default_squad(held_out=True), 400).read_text())
    with pytest.raises(InputError, match=r"vocab.txt: found \d+ words, expected at most the 100 of the network"):
        build("question_answering", {"weights": str(folder), "file": str(default_squad(held_out=True)), "tokens": 64})


def test_tweets_are_cut_by_the_tokenizer_of_the_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "rain": 4, "today": 5}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106 -- a word
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made.save(str(tmp_path / "tokenizer.json"))
    pieces = pieces_of(tmp_path, VOCABULARY)
    assert piece_ids("rain today, rain", 8, pieces).tolist() == [1, 4, 5, 3, 4, 2, 0, 0]
    assert piece_ids("rain today, rain", 4, pieces).tolist() == [1, 4, 5, 2], "a text that is cut has its end, too"
    (tmp_path / "ap2").mkdir()
    write_lookalike(tmp_path / "ap2", "tiny", seed=0, number=0)
    samples = TweetSamples(tmp_path / "ap2", 16, VOCABULARY, "train", pieces)
    assert all(set(samples[place][0].tolist()) <= set(range(6)) for place in range(20))
    with pytest.raises(InputError, match=r"tokenizer.json: found 6 words and \[PAD\] = 0; expected at most 5 words"):
        pieces_of(tmp_path, 5)
    folder = saved(theirs("DebertaV2ForSequenceClassification")(deberta_config(TINY)), tmp_path)
    task = build("tweet_rain_classification", {"weights": str(folder), "tokens": 16, "folder": str(tmp_path / "ap2")})
    tokens, _ = next(task.batches)
    assert tokens.max() < 6 and np.isfinite(task.loss(task.model, [tokens, torch.zeros(len(tokens), dtype=torch.int64)]).item())
    task.close()


def test_the_folder_of_another_model_is_refused_before_its_tokenizer_is_looked_for(tmp_path: Path) -> None:
    """Neither folder has a tokenizer, and that is not what is wrong with it."""
    bert_folder = saved(theirs("BertForQuestionAnswering")(bert()), tmp_path / "bert")
    deberta = saved(theirs("DebertaV2ForSequenceClassification")(deberta_config(TINY)), tmp_path / "deberta")
    with pytest.raises(InputError, match=r"found 'deberta-v2', expected 'bert'\n(?s:.*)workload = 'tweet_rain_classification' takes these"):
        build("question_answering", {"weights": str(deberta)})
    with pytest.raises(InputError, match=r"found 'bert', expected 'deberta-v2'\n(?s:.*)workload = 'question_answering' takes these"):
        build("tweet_rain_classification", {"weights": str(bert_folder)})
