"""A trained language model from a folder in Hugging Face's layout: ``config.json``, weights, tokenizer. Nothing is fetched.

A folder of another model is refused with what differs: what would load into the wrong places, or leave some as they were drawn, trains as
fast and gives the wrong quality.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.base.errors import InputError, in_a_line, nearest
from caraml.base.limits import GROWTH, TOKENIZER, TOKENIZER_VALUES, VOCABULARY, counted, read_bytes, read_json, too_large

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZERS = ("tokenizer.json", "vocab.txt")
_TAKERS = {"bert": "question_answering", "deberta-v2": "tweet_rain_classification"}
"""Workloads by the kind of model that they train."""
_SPARE = ("pooler.", "embeddings.position_ids")
"""Parts of a network that checkpoints have and ours may do without."""
_ROOM = 1 << 30
"""Bytes of what a file of weights may have besides: the heads of the first training."""
_OLD = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of names in checkpoints that were converted from TensorFlow."""
_MOST_NAMED = 2
_CHARACTER = 4
"""Bytes of a character at most."""
_AS_TENSORS = "write them as model.safetensors, with save_pretrained(FOLDER) where the model comes from"


def read_config(folder: Path, kind: str, expected: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The configuration of a model of a ``kind``, such as ``bert``, if its values are those expected; what it leaves out counts as such.
    Raises ``InputError`` where it is missing, no JSON object, of another kind, or has other values; then with the preset that has them, if
    one does."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"weights: found no config.json in {folder.absolute()}; expected a folder that transformers wrote")
    try:
        config = json.loads(read_json(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON: {in_a_line(error)}") from error
    if not isinstance(config, dict) or config.get("model_type") != kind:
        found = config.get("model_type") if isinstance(config, dict) else config
        taker = _TAKERS.get(str(found))
        hint = f"workload = {taker!r} takes these weights" if taker else f"give the folder of a trained {kind} as `weights`"
        raise InputError(f"{path}: model_type: found {str(found)[:100]!r}, expected {kind!r}", hint)
    if isinstance(config.get("pos_att_type"), str):  # as the authors wrote lists
        config["pos_att_type"] = config["pos_att_type"].split("|")
    unlike = (name for name, value in expected.items() if config.get(name, value) != value)
    other = [f"{name}: found {str(config[name])[:100]}, expected {expected[name]}" for name in unlike]
    if other:
        fitting = (name for name, sizes in presets.items() if all(config.get(key) == value for key, value in sizes.items()))
        preset = next(fitting, None)
        raise InputError(f"{path}: {'; '.join(other)}", f"preset = {preset!r} has the sizes of these weights" if preset else None)
    return config


def load_weights(model: Any, folder: Path, head: tuple[str, ...]) -> None:
    """Fill a network of transformers with the weights of a folder. Only what begins with a name of ``head`` may be missing there. Raises
    ``InputError`` where the weights are missing, cannot be read, or are those of another network."""
    wanted: dict[str, torch.Tensor] = model.state_dict()
    path, found = _read(folder, sum(value.nbytes for value in wanted.values()))
    prefix = f"{model.base_model_prefix}."
    whole = any(name.startswith(prefix) for name in found)  # else they are those of the network without a head
    named = {_modern(name if whole or name.startswith(head) else prefix + name): value for name, value in found.items()}
    missing = [name for name in wanted if name not in named and not name.startswith(head)]
    unlike = [name for name in wanted if name in named and named[name].shape != wanted[name].shape]
    spare = [name for name in named if name not in wanted]
    more = [name for name in spare if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_SPARE)]
    faults = [
        *_listed("missing", [f"{name} (nearest there: {nearest(name, spare) or 'none'})" for name in missing[:_MOST_NAMED]], len(missing)),
        *_listed("of another shape", [f"{name}: {_shape(named[name])}, expected {_shape(wanted[name])}" for name in unlike], len(unlike)),
        *_listed("not part of this network", more, len(more)),
    ]
    if faults:
        what = f"{path}: found the weights of another network: {'; '.join(faults)}"
        raise InputError(what, "compare config.json with the preset's sizes")
    model.load_state_dict({name: value for name, value in named.items() if name in wanted}, strict=False)


def _read(folder: Path, size: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file of weights, and the tensors in it by name. ``size``: bytes of the network that they are for."""
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        several = any((folder / f"{name}.index.json").is_file() for name in WEIGHTS)
        hint = 'write them as one with save_pretrained(FOLDER, max_shard_size="100GB")' if several else None
        raise InputError(f"{folder}: found no {' or '.join(WEIGHTS)}; expected the weights in one file beside config.json", hint)
    if (found := path.stat().st_size) > (most := _ROOM + 4 * size):
        raise too_large(path, found, most, "bytes of weights", "read for a network of this size")
    try:
        weights: Any
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(path)
        else:
            import torch

            weights = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = "it is damaged, or a pickle of more than tensors, which can run any program and is not loaded"
        raise InputError(f"{path}: not readable as tensors by name: {why}", _AS_TENSORS) from error
    except Exception as error:  # the libraries raise of their own, and whatever a damaged pickle leads to
        raise InputError(f"{path}: not readable as tensors by name: {in_a_line(error)}", "copy the file again") from error
    pairs = weights.items() if isinstance(weights, dict) else [("", weights)]
    other = next((pair for pair in pairs if not isinstance(pair[0], str) or not hasattr(pair[1], "detach")), None)
    if other is not None or not isinstance(weights, dict):
        what = f"{other[0]!r}: {type(other[1]).__name__}" if isinstance(weights, dict) and other else f"one {type(weights).__name__}"
        raise InputError(f"{path}: not readable as tensors by name: found {what[:100]}", _AS_TENSORS)
    return path, {name: tensor.detach() for name, tensor in weights.items()}


def _modern(name: str) -> str:
    """A parameter's name as it is today."""
    return next((name.removesuffix(old) + new for old, new in _OLD.items() if name.endswith(old)), name)


def _listed(what: str, names: list[str], count: int) -> list[str]:
    more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
    return [f"{count} {what}: {', '.join(names[:_MOST_NAMED])}{more}"] if count else []


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"


def find_tokenizer(folder: Path, names: tuple[str, ...] = TOKENIZERS) -> Path:
    """The file of a folder that its tokenizer is read from. Raises ``InputError`` where there is none that can be read without more."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        convert = f"from transformers import AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('{folder}')"
        hint = f'where sentencepiece is installed: python -c "{convert}"' if any(folder.glob("sp*.model")) else None
        raise InputError(f"{folder}: found no {' or '.join(names)}; expected the tokenizer of the weights", hint)
    return path


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a folder with one or with ``vocab.json`` and ``merges.txt``, which Megatron-LM's users
    have as ``gpt2-vocab.json`` and ``gpt2-merges.txt``. Raises ``InputError`` if there is none, or it cannot be read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    single = path / "tokenizer.json" if path.is_dir() else path
    named = "" if (path / "vocab.json").is_file() else "gpt2-"
    vocab, merges = path / f"{named}vocab.json", path / f"{named}merges.txt"
    if single.is_file():
        content = _tokenizer_json(single)
        try:
            encoder = Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            hint = "give a tokenizer.json as the package tokenizers writes it, or a folder with vocab.json and merges.txt"
            raise InputError(f"{single}: not a tokenizer: {in_a_line(error)}", hint) from error
        _refuse_growth(encoder, single)
        encoder.no_padding()  # what they say of lengths is for other uses: a file could ask for any
        encoder.no_truncation()
        return encoder
    if not (vocab.is_file() and merges.is_file()):
        raise InputError(f"{path}: found no tokenizer; expected a tokenizer.json, or a folder with one or with vocab.json and merges.txt")
    ids = _read_vocabulary(vocab)
    encoder = Tokenizer(models.BPE(vocab=ids, merges=_read_merges(merges, ids)))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def _refuse_growth(encoder: Tokenizer, path: Path) -> None:
    """Raise ``InputError`` for a tokenizer with more tokens than are read, or that would make a text many times as long."""
    if (tokens := encoder.get_vocab_size(with_added_tokens=True)) > VOCABULARY:
        raise too_large(path, tokens, VOCABULARY, "tokens")
    parts = [json.loads(encoder.normalizer.__getstate__())] if encoder.normalizer is not None else []
    growth = 1
    for part in parts:
        parts += part.get("normalizers", [])
        growth *= 1 + len(part.get("prepend", ""))
        if "content" in part:
            replaced = len(part["pattern"].get("String", "")) or 1  # an expression may match one character, or none
            growth *= max(1, len(part["content"]) // replaced)
        longest = max(map(len, _charsmap(part["precompiled_charsmap"]))) if part.get("precompiled_charsmap") else 1
        growth *= max(1, longest // _CHARACTER)
    if growth > GROWTH:
        raise too_large(path, growth, GROWTH, "times the length of a text after its normalizers", "allowed")


def _charsmap(coded: str) -> list[bytes]:
    """The replacements in a map of sentencepiece: after the size of a trie and the trie, each ended by a zero."""
    content = base64.b64decode(coded)
    return content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")


def _tokenizer_json(path: Path) -> bytes:
    try:
        return counted(read_bytes(path, TOKENIZER), path, TOKENIZER_VALUES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error


def read_table(path: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size. Raises ``InputError`` for anything else."""
    try:
        table = json.loads(_tokenizer_json(path).decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(table, dict):
        raise InputError(f"{path}: found {type(table).__name__}; expected a table")
    return table


def _read_vocabulary(path: Path) -> dict[str, int]:
    ids = read_table(path)
    if len(ids) > VOCABULARY:
        raise too_large(path, len(ids), VOCABULARY, "tokens")
    for token, number in ids.items():
        if not isinstance(number, int) or not 0 <= number < 2**31:
            raise InputError(f"{path}: id of {token[:80]!r}: found {str(number)[:80]}; expected a whole number from 0 to 2147483647")
    return ids


def _read_merges(path: Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of GPT-2's ``merges.txt``: two tokens a line, best first, after a line ``#version``."""
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(io.BytesIO(read_bytes(path, TOKENIZER)), start=1):
        text = line.decode(errors="replace").removesuffix("\n")
        if not text or text.startswith("#version"):
            continue
        left, _, right = text.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            found = f"{path}, line {number}: found {text[:80]!r}; expected two tokens that are in the vocabulary, as is their union"
            raise InputError(found)
        merges.append((left, right))
        if len(merges) > TOKENIZER_VALUES:
            raise too_large(path, len(merges), TOKENIZER_VALUES, "merges")
    return merges
