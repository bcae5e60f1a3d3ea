"""From a suite to its points: sweeps and their combinations, conditions, and the reasons why some points cannot run."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from caraml.base.errors import InputError, UnknownNameError, nearest
from caraml.base.limits import COUNT, POINTS
from caraml.base.toml import Fault
from caraml.base.toml_lines import Location
from caraml.suite.expression import NAMES, Condition, condition_names, known_texts
from caraml.suite.load import SuiteFile
from caraml.suite.model import OF_EPOCHS, Compile, Knobs, Mode, Placement, Point, Policy
from caraml.suite.placement import Machine, extent, not_kept, waited_for, why_skipped

ParamsOf = Callable[[str], type[BaseModel]]
"""Gives the parameter model of a workload by its name; raises ``InputError`` for an unknown one."""
SoftwareOf = Callable[[str], str | None]
"""Gives the plug-in that a workload comes from, with its version; ``None`` for one of CARAML's own."""
_REMEMBERED = 1000
"""Parameters that are kept for other combinations with the same: each takes some kB."""
_PLAIN = (str, int, float, list, dict, type(None))
NOT_IN_LABELS = ("micro_batch", "seed")
"""Keys of a benchmark that labels say nothing of, but where they are swept or replaced."""
DEFAULTS = {"nodes": 1, "devices": 1, "mode": "train", "precision": "fp32", "seed": 0, "deterministic": False, "profile": False}
"""Values of a benchmark that a suite need not give."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point, and why it will not be run if it cannot."""

    point: Point
    skip: str | None = None
    key: str = ""
    """The point's key once it is known: a hash that is better taken once."""
    changes: int = 0
    """How many parameters of its benchmark are not as the file says, so that its name may be wrong."""
    swept: tuple[tuple[str, Any], ...] = ()
    """Names and values of what its benchmark sweeps: by them a point finds the one of several points that it takes files from."""
    benchmarks: frozenset[str] = frozenset()
    """Every benchmark of the suite that asks for this work, once that is known."""


@dataclass(frozen=True)
class Plan:
    """All points of a suite on one machine, in file order, each once before any is repeated; ``left_out`` counts combinations that a
    `where` condition excludes."""

    points: list[PlannedPoint]
    left_out: int


def expand(
    file: SuiteFile,
    machine: Machine,
    params_of: ParamsOf,
    software_of: SoftwareOf = lambda workload: None,
    chosen: Collection[str] | None = None,
) -> Plan:
    """Expand every benchmark of a suite. Raises one ``InputError`` that lists every fault of the suite's values.

    Of ``chosen``, names of benchmarks, and of no others the values set by hand must fit, and combinations are counted. Others that they do
    not fit have no points.
    """
    faults: list[str] = []
    parts, by_name, number = list[_Expansion](), dict[str, list[PlannedPoint]](), 0
    elsewhere = replace(machine, packages_here=False)  # where it is not chosen, what is installed does not matter
    for index in file.needed_first(faults):
        known = chosen is None or file.suite.benchmark[index].name in chosen
        part = _Expansion(file, index, machine if known else elsewhere, params_of, software_of, chosen=known)
        before, over = number, number + part.surely > POINTS  # from there on values are looked at for their faults alone
        part.expand(by_name.get(part.benchmark.needs or "", ()), only_faults=over)
        number += part.surely if over else len(part.points)
        if before <= POINTS < number:
            faults.append(file.document.fault(("benchmark", index), number, f"at most {POINTS:,} points in a suite"))
        by_name.setdefault(part.benchmark.name, []).extend(part.points)
        parts.append(part)
    faults += [fault for part in parts if part.chosen or not file.settings for fault in part.faults]
    if faults:
        file.document.refuse(faults)
    # Each point once before any a second time: what changes while a campaign runs is then between the repeats, and not between the points.
    points = sorted((one for part in parts for one in part.points), key=lambda one: one.point.repeat)
    return Plan(without_unmet(_without_twins(points)), sum(part.excluded for part in parts if part.chosen))


def without_unmet(points: list[PlannedPoint]) -> list[PlannedPoint]:
    """The points, those skipped that need one which is skipped; what is needed stands before."""
    unmet: dict[str, str] = {}
    found = []
    for one in points:
        why = next((unmet[name] for name in one.point.needs if name in unmet), None)
        found.append(one if why is None or one.skip else replace(one, skip=f"needs {why}"))
        if skip := found[-1].skip:
            unmet[one.point.folder_name] = f"{one.point.label}, which is skipped: {skip}"
    return found


class _Expansion:
    """One benchmark, its points once they are asked for, and the faults found on the way."""

    def __init__(
        self, file: SuiteFile, index: int, machine: Machine, params_of: ParamsOf, software_of: SoftwareOf, *, chosen: bool
    ) -> None:
        self.benchmark, self.chosen = file.suite.benchmark[index], chosen
        self._suite, self._document, self._machine = file.suite, file.document, machine
        self._location: Location = ("benchmark", index)
        self._changed = file.changed[index] if file.changed else frozenset()
        self.faults = list(file.unfit.get(index, ()))
        self.points: list[PlannedPoint] = []
        self.excluded = self.surely = 0
        """Combinations that `where` excludes, and points where it cannot exclude any: a number that takes no combination to know."""
        self._needed: list[tuple[Point, dict[str, Any]]] = []
        self._params_known: dict[str, tuple[BaseModel, dict[str, Any]] | None] = {}
        self._model = self._params_model(params_of)
        self._software = ", ".join(filter(None, [machine.software, software_of(self.benchmark.workload) if self._model else None]))
        try:
            asked = self.benchmark.asked(machine.device_class)
        except ValidationError as error:  # each table is valid, and both together are not
            self._fault(("on", machine.device_class, "measure"), "a table", error.errors()[0]["msg"].split("expected ", 1)[-1])
            self._model = None
            return
        self._repeats, self._measure = asked.pop("repeats") or 1, asked.pop("measure") or Policy()
        self._conditions = self._conditions_of(self._model)
        if self._model is not None:
            asked["params"] = lists_as_values(self._model, asked["params"])
        self._asked = flat(asked)
        self._check_axes()

    def expand(self, needed: Sequence[PlannedPoint], only_faults: bool) -> None:
        """Find the points, those ``needed`` being the ones of the benchmark that goes first; or only what is wrong with values."""
        if self._model is None:
            return
        self._needed = [(one.point, dict(one.swept)) for one in needed]
        planned: list[PlannedPoint] = []
        only_faults, axes = only_faults or bool(self.faults), axes_of(self._asked)
        for values in combinations(self._asked, self.benchmark.sweep, each=only_faults):
            found = self._params(self._model, {name[7:]: value for name, value in values.items() if name.startswith("params.")}, axes)
            if found is None:
                continue
            params, point = found[0], self._point(values, *found)
            if not self._asked_for(point, self._model):
                self.excluded += not only_faults
                continue
            skip = why_skipped(point, self._machine, params)
            if self.benchmark.needs is not None and not self._needed:
                skip = f"needs {self.benchmark.needs}, of which there is no point on {self._machine.name}"
            swept = tuple((name, values[name]) for name in axes)
            variant = variant_of(self._asked, values, self._measure, self._changed)
            for repeat in range(1 if only_faults else self._repeats):
                needs = self._needs(values, point, params, repeat)
                one = point.model_copy(update={"variant": variant, "repeat": repeat, "needs": needs})
                planned.append(PlannedPoint(one, skip, changes=len(self._changed), swept=swept))
        self.points = [] if only_faults or self.faults else _told_apart(planned, self._asked)

    def _needs(self, values: dict[str, Any], point: Point, params: BaseModel, repeat: int) -> tuple[str, ...]:
        needs = self.benchmark.needs
        if self._needed:
            values = values | {f"params.{name}": value for name, value in point.params.items()}
        found = waited_for(point, repeat, values, self._needed)
        if isinstance(found, str):
            self._fault(("needs",), needs, found)
            return ()
        if (expected := not_kept(point, params, None if needs is None else found)) is not None:
            self._fault(self._where_stands("params.start_from"), point.params["start_from"], expected)
        return tuple(one.folder_name for one in found)

    def _fault(self, location: Location, found: object, expected: str, guess: str | None = None) -> None:
        text = self._document.fault((*self._location, *location), found, expected, guess)
        if text not in self.faults:
            self.faults.append(text)

    def _params_model(self, params_of: ParamsOf) -> type[BaseModel] | None:
        try:
            return params_of(self.benchmark.workload)
        except UnknownNameError as error:
            self._fault(("workload",), self.benchmark.workload, f"one of {', '.join(error.known)}", error.guess)
            return None

    def _conditions_of(self, model: type[BaseModel] | None) -> list[Condition]:
        conditions = []
        for index, text in enumerate(self.benchmark.where):
            try:
                condition = Condition(text)
                if model is not None:
                    own = (self.benchmark.asked(self._machine.device_class)["params"] or {}).keys() - model.model_fields  # a program's
                    condition.know({*NAMES, *Placement.model_fields, *Knobs.model_fields, *model.model_fields, *own})
                    condition.see_texts(known_texts([model], own))
                conditions.append(condition)
            except InputError as error:
                self._fault(("where", index), text, self._readable(error))
        return conditions

    def _asked_for(self, point: Point, model: type[BaseModel]) -> bool:
        names = condition_names(point, model, self._machine) if self._conditions else {}
        for condition in self._conditions:
            try:
                if not condition.holds(names):
                    return False
            except InputError as error:
                self._fault(("where", self.benchmark.where.index(condition.text)), condition.text, self._readable(error))
        return True

    def _check_axes(self) -> None:
        """Note what is wrong with the sweep, before anything is expanded: it may have more combinations than a suite may have points."""
        asked, is_program = self._asked, self.benchmark.workload == "command"
        if is_program and asked.get("profile"):
            expected = "false: only CARAML's own steps are traced; a profiler can stand in params.argv"
            self._fault(self._where_stands("profile"), True, expected)
        if not {"global_batch", "accumulation"} & asked.keys():
            if not is_program:  # which need not have a batch
                self._fault(("global_batch",), None, "a number of samples per optimizer step, or a list of them")
            asked["global_batch"] = 1  # so that the other faults are told, too
        for one, other in (("global_batch", "accumulation"), ("world", "nodes")):
            if {one, other} <= asked.keys():
                self._fault(self._where_stands(other), asked[other], f"{one} or {other}, not both: each follows from the other")
        lengths = {name: len(values) for name, values in axes_of(asked).items()}
        for name in (name for name, length in lengths.items() if not length):
            self._fault(self._where_stands(name), [], "at least one value to sweep")
            del asked[name]
            asked |= {"global_batch": 1} if name in ("global_batch", "accumulation") else {}
        if self.benchmark.sweep == "zip" and len(set(lengths.values())) > 1:
            self._fault(("sweep",), "zip", f"lists of one length, but they are {lengths}")
        count = self._repeats * (max(lengths.values(), default=1) if self.benchmark.sweep == "zip" else math.prod(lengths.values()))
        if count > POINTS:
            self._fault(("sweep",), count, f"at most {POINTS:,} points, repeats counted; sweep fewer values, or in several suites")
        self.surely = 0 if self.benchmark.where or self.faults else count

    @staticmethod
    def _readable(error: InputError) -> str:
        return f"a condition on a point's names ({'; '.join(filter(None, (error.args[0], error.hint)))})"

    def _where_stands(self, name: str) -> Location:
        """Location of a value in the file: in the override of this device class if that has it, else in the benchmark itself."""
        path = tuple(name.split("."))
        override = ("on", self._machine.device_class, *path)
        return override if (*self._location, *override) in self._document.lines else path

    def _params(self, model: type[BaseModel], given: dict[str, Any], axes: Collection[str]) -> tuple[BaseModel, dict[str, Any]] | None:
        """All parameters of the workload with their defaults filled in, also as plain values, or ``None`` after noting what is wrong with
        them; of swept values that were seen before as they were found then."""
        seen = json.dumps([value for name, value in given.items() if f"params.{name}" in axes])
        if len(self._params_known) > _REMEMBERED:
            self._params_known.clear()
        if seen not in self._params_known:
            found = self._validated(model, given)
            self._params_known[seen] = None if found is None else (found, found.model_dump(mode="json"))
        return self._params_known[seen]

    def _validated(self, model: type[BaseModel], given: dict[str, Any]) -> BaseModel | None:
        for name, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                self._fault(self._where_stands(f"params.{name}"), value, "a finite number")
                return None
        context = {"packages_here": self._machine.packages_here}
        try:
            return model.model_validate_json(json.dumps(given), strict=True, context=context)
        except ValidationError as error:
            faults = [fault for fault in error.errors(include_url=False) if isinstance(fault["input"], _PLAIN)]
        try:
            if not faults:  # what a validator of a plug-in made of text, as a path, is no JSON
                return model.model_validate(given, context=context)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        whole = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        merged: dict[Location, Fault] = {}
        for fault in faults:
            told = Fault.of(fault, model, whole)
            known = merged.get(told.location)
            merged[told.location] = known.or_else(told) if known else told
        for location, told in merged.items():
            name, inner = str(location[0]) if location else "", location[1:]
            if inner and isinstance(self._asked.get(f"params.{name}"), list):
                inner = ()  # the place in one of the swept values is none in the file
            # of an unknown key, all that is swept: none of it has a place
            found = self._asked.get(f"params.{name}", told.found) if told.kind == "extra_forbidden" and len(location) == 1 else told.found
            guess = told.guess or (nearest(name, model.model_fields) if name and name not in model.model_fields else None)
            self._fault((*self._where_stands(f"params.{name}" if name else "params"), *inner), found, told.expected, guess)
        return None

    def _point(self, values: dict[str, Any], params: BaseModel, plain: dict[str, Any]) -> Point:
        machine = self._machine
        if values["precision"] == "tf32" and "tf32" in machine.emulates:  # torch computes plain fp32: the same work has the same key
            values = {**values, "precision": "fp32"}
        nodes, devices = extent(values, machine)
        placement = Placement.of({name: None if value == "all" else value for name, value in values.items()})
        dp = placement.copies(nodes * devices)
        if values.get("fsdp") == "all":
            placement = placement.model_copy(update={"fsdp": dp * placement.cp})
        if dp * placement.cp == 1:  # one device has nobody to share its optimizer with
            placement = placement.model_copy(update={"distributed_optimizer": False})
        if "global_batch" in values:
            global_batch = values["global_batch"]
            micro_batch = values.get("micro_batch") or max(global_batch // dp, 1)
        else:
            micro_batch = values.get("micro_batch") or 1
            global_batch = values["accumulation"] * micro_batch * dp
            if global_batch > COUNT:
                self._fault(self._where_stands("accumulation"), values["accumulation"], f"a batch of at most {COUNT:,} samples in all")
                global_batch = COUNT
        return Point(
            suite=self._suite.name,
            benchmark=self.benchmark.name,
            workload=self.benchmark.workload,
            params=plain,
            system=machine.name,
            device=machine.device,
            device_class=machine.device_class,
            software=", ".join(filter(None, [self._software, getattr(params, "software", None)])),
            nodes=nodes,
            devices=devices,
            placement=placement,
            knobs=Knobs.of(values, machine.device_class, machine.emulates + machine.may_emulate),
            compile=values.get("compile") or self._compiled(values["mode"], params),
            global_batch=global_batch,
            micro_batch=micro_batch,
            measure=self._measure,
            **{name: values[name] for name in ("mode", "precision", "seed", "deterministic", "profile")},
        )

    def _compiled(self, mode: Mode, params: BaseModel) -> Compile:
        """What `compile` is where nobody says: on wherever torch compiles for the device, and the work can be compiled."""
        ours = self._machine.compiles and self.benchmark.workload != "command" and mode != "data"
        return "default" if ours and getattr(params, "uncompiled", None) is None else "off"


def _told_apart(planned: list[PlannedPoint], asked: dict[str, Any]) -> list[PlannedPoint]:
    """The points of a benchmark, with ``micro_batch`` and ``seed`` in the labels of those that differ in nothing else of a label."""
    swept = [name for name in NOT_IN_LABELS if isinstance(asked.get(name), list)]
    if not swept:
        return planned
    labels = [one.point.label for one in planned]
    values = defaultdict[tuple[str, str], set[int]](set)
    for label, one in zip(labels, planned, strict=True):
        for name in swept:
            values[label, name].add(getattr(one.point, name))
    found = []
    for label, one in zip(labels, planned, strict=True):
        words = [f"{name}={getattr(one.point, name)}" for name in swept if len(values[label, name]) > 1]
        variant = " ".join(filter(None, [one.point.variant, *words]))
        found.append(replace(one, point=one.point.model_copy(update={"variant": variant})) if words else one)
    return found


def _without_twins(points: list[PlannedPoint]) -> list[PlannedPoint]:
    """Each piece of work once, under the first benchmark that asks for it; work that ``--set`` made the same is the other's."""
    unique: dict[str, PlannedPoint] = {}
    for planned in points:
        key = planned.point.key
        known = unique.get(key)
        names = frozenset({planned.point.benchmark}) | (known.benchmarks if known else frozenset())
        kept = planned if known is None or planned.changes < known.changes else known
        unique[key] = replace(kept, key=key, benchmarks=names)
    return list(unique.values())


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


def variant_of(asked: dict[str, Any], values: dict[str, Any], measure: Policy, changed: Collection[str]) -> str:
    """The swept parameters of one combination in words (``efficientnet_b0``, ``layers=4``), and those that are not as the file says."""
    words = []
    for name, found in asked.items():
        if name in changed or (isinstance(found, list) and name.startswith("params.") and any(one != found[0] for one in found)):
            value = values[name]
            plain = isinstance(value, str) and name not in changed
            words.append(value if plain else f"{name.removeprefix('params.')}={value if isinstance(value, str) else json.dumps(value)}")
    words += [f"{name}={getattr(measure, name):g}" for name in OF_EPOCHS if f"measure.{name}" in changed and getattr(measure, name)]
    return " ".join(words)
