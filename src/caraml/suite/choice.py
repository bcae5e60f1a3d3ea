"""What a user chooses of a suite by hand: other values (``--set``), and which of its points are to run (``--only``, ``--where``)."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from caraml.base.errors import InputError, nearest
from caraml.base.toml import TomlDocument
from caraml.suite.expand import DEFAULTS, NOT_IN_LABELS, Plan
from caraml.suite.expression import NAMES, Condition, condition_names, known_texts
from caraml.suite.load import Benchmark, Suite, SuiteFile
from caraml.suite.model import OF_EPOCHS, Knobs, Placement, Point, Policy
from caraml.suite.placement import Machine

_NOT_VALUES = {"name", "workload", "on", "needs"}


def with_settings(
    file: SuiteFile, settings: Sequence[str], params_of: Callable[[str], type[BaseModel]], chosen: Collection[str] | None = None
) -> SuiteFile:
    """The suite with ``settings`` (each ``key=value``) in every benchmark that knows the key.

    Keys are those of a benchmark, ``params.NAME`` and ``measure.NAME``; values are TOML, and a bare word is text. Raises ``InputError``
    for a key that none of the ``chosen`` benchmarks has, or none where all are, with the nearest that one has, and for a value that does
    not fit one of them; what it does not fit else is noted as ``unfit``.
    """
    if not settings:
        return file
    data = copy.deepcopy(file.document.data)
    models = [params_of(benchmark.workload) for benchmark in file.suite.benchmark]
    changed: list[set[str]] = [set(before) for before in file.changed] or [set() for _ in models]
    for setting in settings:
        key, value = _parsed(setting)
        touched = [table for table, model in zip(data["benchmark"], models, strict=True) if key in _known([model], [table])]
        if not any(not chosen or table["name"] in chosen for table in touched):
            among = [each for each in zip(models, data["benchmark"], strict=True) if not chosen or each[1]["name"] in chosen]
            known = _known(*zip(*among, strict=True))
            hint = _hint(key, known)
            which = f"of suite {file.suite.name!r}" + (f" that is chosen ({', '.join(sorted(chosen))})" if chosen else "")
            raise InputError(f"--set {setting}: no benchmark {which} has the key {key!r}", hint)
        for table, model, names in zip(data["benchmark"], models, changed, strict=True):
            if table not in touched:
                continue
            if key.startswith("params.") or key in NOT_IN_LABELS or key.removeprefix("measure.") in OF_EPOCHS:
                others = [found for override in table.get("on", {}).values() if (found := _value(override, key)) is not None]
                if any(found != value for found in (_found(table, key, model), *others)):
                    names.add(key)
            _put(table, key, value)
            for override in table.get("on", {}).values():  # what is asked for by hand goes before every other word
                if _value(override, key) is not None:
                    _put(override, key, value)
    by_hand = {**file.document.settings, **{setting.partition("=")[0].strip(): setting for setting in settings}}
    told = f" with --set {' '.join(settings)}"
    files = {location: name + told for location, name in file.document.others.items()}
    document = replace(file.document, name=file.document.name + told, data=data, others=files, settings=by_hand)
    unfit = _kept_out(document, file.document.data["benchmark"], chosen)
    touched_by, settings = tuple(map(frozenset, changed)), (*file.settings, *settings)
    return replace(file, suite=document.validate(Suite), document=document, unfit=unfit, changed=touched_by, settings=settings)


def _kept_out(document: TomlDocument, before: list[dict[str, Any]], chosen: Collection[str] | None) -> dict[int, list[str]]:
    """Put benchmarks that are not ``chosen`` back as they were ``before`` where what was set by hand does not fit; its faults there."""
    faults = {}
    for index, table in enumerate(document.data["benchmark"]):
        if chosen is None or table["name"] in chosen:
            continue
        try:
            Benchmark.model_validate_json(json.dumps(table, default=str), strict=True)
        except ValidationError as error:
            faults[index] = document.faults(error, Benchmark, ("benchmark", index))
            document.data["benchmark"][index] = before[index]
    return faults


def _parsed(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set {setting}: expected key=value", "for example: --set global_batch=8 --set params.preset=4M")
    if f"{key}.".startswith("params.env."):  # the setting itself is not shown
        found = "--set params.env: variables may hold secrets, and every user of a machine sees its command lines"
        raise InputError(found, 'write them into the suite: env = { NAME = "$NAME" } takes one that is exported')
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return key, text
    if len(values) > 1:  # more lines, each a key of its own
        raise InputError(f"--set {setting}: found {len(values)} keys, expected one key=value", "an option --set for each")
    return key, values["value"]


def _known(models: Sequence[type[BaseModel]], tables: Sequence[dict[str, Any]]) -> list[str]:
    own = [name for name in Benchmark.model_fields if name not in _NOT_VALUES | {"params", "measure"}]
    params = {f"params.{name}": None for model in models for name in model.model_fields}
    params |= {f"params.{name}": None for table in tables for name in table.get("params", {})}
    return [*own, *params, *(f"measure.{name}" for name in Policy.model_fields)]


def _hint(key: str, known: Sequence[str]) -> str:
    """The key that is spelt most like it, of its table where that is known: all of ``params`` begin alike; else which there are."""
    table = key[: key.rfind(".") + 1]
    own = [name for name in known if name.startswith(table)]
    guess = nearest(key.removeprefix(table), [name.removeprefix(table) for name in own]) if own else nearest(key, known)
    return f"did you mean {(table if own else '') + guess!r}?" if guess else f"known: {', '.join(own or known)}"


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value


def _found(table: dict[str, Any], key: str, model: type[BaseModel]) -> Any:
    """What a key is without the setting: as the table says, else the default of the workload, or of benchmarks."""
    if (value := _value(table, key)) is not None:
        return value
    name = key.removeprefix("params.")
    if name == key:
        return DEFAULTS.get(key)
    return model.model_fields[name].default if name in model.model_fields else None


def _value(table: dict[str, Any], key: str) -> Any:
    """What a table has under a key; ``None`` for nothing, as no value of TOML is."""
    value: Any = table
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class SuitePart:
    """What is to be run of a suite: the points of some benchmarks, as far as they meet all conditions."""

    names: Sequence[str] = ()
    """Names of benchmarks, or words of them: ``800M`` is `gpt-800M`; none for all."""
    where: Sequence[str] = ()

    def benchmarks(self, file: SuiteFile) -> frozenset[str] | None:
        """The benchmarks that are chosen by name, and those that they need; ``None`` for all. Raises ``InputError`` for an unknown name."""
        if not self.names:
            return None
        return file.with_needed(name for asked in self.names for name in _benchmarks(asked, file))

    def keys(self, file: SuiteFile, plan: Plan, machine: Machine, params_of: Callable[[str], type[BaseModel]]) -> frozenset[str] | None:
        """Keys of the points; ``None`` for all. Raises ``InputError`` for a name or a condition that nothing here has or meets."""
        if not self.names and not self.where:
            return None
        benchmarks = {name for asked in self.names for name in _benchmarks(asked, file)} or file.names
        conditions = [Condition(text) for text in self.where]
        models = {one.point.workload: params_of(one.point.workload) for one in plan.points}
        own = {name for one in plan.points for name in one.point.params.keys() - models[one.point.workload].model_fields}
        texts = known_texts(models.values(), own) if conditions else {}
        known = {"repeat", *NAMES, *Placement.model_fields, *Knobs.model_fields, *own}
        for condition in conditions:
            condition.know(known.union(*(model.model_fields for model in models.values())))
            condition.see_texts(texts)

        def meets(point: Point) -> bool:
            """The conditions speak as those of a suite do, and of the repeat, which a suite has only afterwards."""
            names = {"repeat": point.repeat, **condition_names(point, models[point.workload], machine)} if conditions else {}
            return all(condition.holds(names) for condition in conditions)

        found = frozenset(one.key for one in plan.points if not one.benchmarks.isdisjoint(benchmarks) and meets(one.point))
        if not found:
            words = [f"--only {name}" for name in self.names] + [f"--where {text!r}" for text in self.where]
            raise InputError(f"no point of suite {file.suite.name} is meant by {' '.join(words)}", "caraml plan shows all of its points")
        needed: set[str] = set()
        for one in reversed(plan.points):
            if one.key in found or one.point.folder_name in needed:
                found |= {one.key}
                needed |= set(one.point.needs)
        return found


WHOLE = SuitePart()


def called(asked: str, own: Sequence[str]) -> list[str]:
    """The benchmarks of a name, or those that have it as words of theirs."""
    return [name for name in own if name == asked] or [
        name for name in own if re.search(rf"(?<!\w){re.escape(asked)}(?!\w)", name, re.IGNORECASE)
    ]


def begun_with(file: SuiteFile, labels: Iterable[str]) -> frozenset[str]:
    """The benchmarks whose names labels of points begin with, and all that these need."""
    names = set(file.names)
    begins = (" ".join(words[:count]) for words in (label.split(" ") for label in labels) for count in range(1, len(words) + 1))
    return file.with_needed(name for name in begins if name in names)


def words_of(names: Sequence[str]) -> list[str]:
    """The words of benchmarks' names, as :func:`called` knows them."""
    return list(dict.fromkeys(word for name in names for word in re.split(r"[^\w.]+", name)))


def _benchmarks(asked: str, file: SuiteFile) -> list[str]:
    """The benchmarks that are called so. Raises ``InputError`` where there is none."""
    own, found = file.names, called(asked, file.names)
    if not found:
        count = len(asked.split())
        several = [" ".join(words[at : at + count]) for words in map(str.split, own) for at in range(len(words))]
        guess = nearest(asked, [*own, *(several if count > 1 else words_of(own))])  # as many words as were asked for
        what = f"--only {asked}: no benchmark of suite {file.suite.name!r} has this name"
        raise InputError(what, f"did you mean {guess!r}?" if guess else f"known: {', '.join(own)}")
    return found
