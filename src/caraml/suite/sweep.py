"""Sweeps of a benchmark: which of its values are swept, their combinations, and the words of a combination in labels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from typing import Any, get_origin

from pydantic import BaseModel

from caraml.suite.model import OF_EPOCHS, Measure

NOT_IN_LABELS = ("micro_batch", "seed")
"""Keys of a benchmark that labels say nothing of, but where they are swept or replaced."""
DEFAULTS: dict[str, Any] = {
    "nodes": 1,
    "devices": 1,
    "mode": "train",
    "precision": "fp32",
    "seed": 0,
    "deterministic": False,
    "profile": False,
}
"""Values of a benchmark that a suite need not give."""


def axes_of(asked: dict[str, Any]) -> dict[str, list[Any]]:
    """The swept values; parameters of the workload appear as ``params.NAME``."""
    return {name: value for name, value in _flat(asked).items() if isinstance(value, list)}


def lists_as_values(model: type[BaseModel], params: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters, with a list that is itself one value (an argument vector) as a tuple, which is not swept; a list of lists is."""
    whole = {name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}
    return {
        name: tuple(value) if name in whole and isinstance(value, list) and not any(isinstance(item, list) for item in value) else value
        for name, value in (params or {}).items()
    }


def combinations(asked: dict[str, Any], sweep: str) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values with the fixed ones."""
    axes = axes_of(asked)
    fixed = {name: value for name, value in _flat(asked).items() if name not in axes}
    rows: Iterator[tuple[Any, ...]] = zip(*axes.values(), strict=True) if sweep == "zip" and axes else itertools.product(*axes.values())
    for row in rows:
        yield {**DEFAULTS, **fixed, **dict(zip(axes, row, strict=True))}


def variant_of(asked: dict[str, Any], values: dict[str, Any], measure: Measure, changed: Collection[str]) -> str:
    """The swept parameters of one combination in words (``efficientnet_b0``, ``layers=4``), and those that are not as the file says."""
    words = []
    for name, found in _flat(asked).items():
        swept = isinstance(found, list) and any(one != found[0] for one in found)
        if (name.startswith("params.") and swept) or name in changed:
            value = values[name]
            plain = isinstance(value, str) and name not in changed
            words.append(value if plain else f"{name.removeprefix('params.')}={value if isinstance(value, str) else json.dumps(value)}")
    words += [f"{name}={getattr(measure, name):g}" for name in OF_EPOCHS if f"measure.{name}" in changed and getattr(measure, name)]
    return " ".join(words)


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in asked.items() if name != "params" and value is not None}
    return own | {f"params.{name}": value for name, value in (asked["params"] or {}).items()}
