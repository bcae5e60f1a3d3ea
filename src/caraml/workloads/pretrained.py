"""A trained language model from a folder in Hugging Face's layout: ``config.json``, weights, tokenizer. Nothing is fetched.

A folder of another model is refused with what differs: what would load into the wrong places, or leave some as they were drawn, trains as
fast and gives the wrong quality.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.base.errors import InputError, in_a_line, nearest
from caraml.base.limits import read_json, too_large

if TYPE_CHECKING:
    import torch

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
_AS_TENSORS = "write them as model.safetensors, with save_pretrained(FOLDER) where the model comes from"


def read_config(folder: Path, kind: str, expected: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The configuration of a model of a ``kind``, such as ``bert``, if its values are those expected; what it leaves out counts as such.

    Raises:
        InputError: it is missing, no JSON object, of another kind, or has other values; then with the preset that has them, if one does.
    """
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
    """Fill a network of transformers with the weights of a folder. Only what begins with a name of ``head`` may be missing there.

    Raises:
        InputError: the weights are missing, cannot be read, or are those of another network.
    """
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
        raise InputError(
            f"{path}: found the weights of another network: {'; '.join(faults)}", "compare config.json with the preset's sizes"
        )
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
