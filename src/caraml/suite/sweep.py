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


def flat(asked: dict[str, Any]) -> dict[str, Any]:
    """What is asked for in one table; parameters of the workload appear as ``params.NAME``."""
    own = {name: value for name, value in asked.items() if name != "params" and value is not None}
    return own | {f"params.{name}": value for name, value in (asked["params"] or {}).items()}


def axes_of(asked: dict[str, Any]) -> dict[str, list[Any]]:
    """The swept values of a flat table."""
    return {name: value for name, value in asked.items() if isinstance(value, list)}


def lists_as_values(model: type[BaseModel], params: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters, with a list that is itself one value (an argument vector) as a tuple, which is not swept; a list of lists is."""
    whole = {name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}
    return {
        name: tuple(value) if name in whole and isinstance(value, list) and not any(isinstance(item, list) for item in value) else value
        for name, value in (params or {}).items()
    }


def combinations(asked: dict[str, Any], sweep: str, each: bool = False) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values of a flat table with the fixed ones; with ``each`` only so many that each value is in one of
    them, and whatever is wrong with the lengths of the lists."""
    axes = axes_of(asked)
    fixed = DEFAULTS | {name: value for name, value in asked.items() if not isinstance(value, list)}
    rows: Iterator[tuple[Any, ...]] = itertools.product(*axes.values())
    if sweep == "zip" and axes:
        rows = zip(*axes.values(), strict=not each)
    elif each:
        longest = max(map(len, axes.values()), default=1)
        rows = (tuple(values[number % len(values)] for values in axes.values()) for number in range(longest))
    for row in rows:
        yield fixed | dict(zip(axes, row, strict=True))


def variant_of(asked: dict[str, Any], values: dict[str, Any], measure: Measure, changed: Collection[str]) -> str:
    """The swept parameters of one combination in words (``efficientnet_b0``, ``layers=4``), and those that are not as the file says."""
    words = []
    for name, found in asked.items():
        if name in changed or (isinstance(found, list) and name.startswith("params.") and any(one != found[0] for one in found)):
            value = values[name]
            plain = isinstance(value, str) and name not in changed
            words.append(value if plain else f"{name.removeprefix('params.')}={value if isinstance(value, str) else json.dumps(value)}")
    words += [f"{name}={getattr(measure, name):g}" for name in OF_EPOCHS if f"measure.{name}" in changed and getattr(measure, name)]
    return " ".join(words)
