"""From a suite to its points: sweeps, conditions, and the reasons why some points cannot run."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from caraml.base.errors import InputError, UnknownNameError, nearest
from caraml.base.limits import POINTS
from caraml.base.toml_lines import Location
from caraml.suite.expression import NAMES, Condition, condition_names
from caraml.suite.load import Benchmark, SuiteFile, suite_of
from caraml.suite.model import OF_EPOCHS, Compile, Knobs, Machine, Measure, Mode, Placement, Point
from caraml.suite.placement import uncompiled, why_skipped

ParamsOf = Callable[[str], type[BaseModel]]
"""Gives the parameter model of a workload by its name; raises ``InputError`` for an unknown one."""
SoftwareOf = Callable[[str], str | None]
"""Gives the plug-in that a workload comes from, with its version; ``None`` for one of CARAML's own."""

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
    """All points of a suite on one machine, in file order; ``left_out`` counts combinations that a `where` condition excludes."""

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

    Of ``chosen``, names of benchmarks, and of no others the values set by hand must fit, and points and combinations are counted; others
    that they do not fit, or that go beyond as many points again, have none. What is wrong with those as they are written is told.
    """
    points: list[PlannedPoint] = []
    faults: list[str] = []
    left_out = 0
    unfit: set[int] = set()
    for index, known, planned, excluded, own in _parts(file, machine, params_of, software_of, faults, chosen=chosen):
        if own and not known and file.document.written is not None:
            unfit.add(index)
            continue
        points += planned
        left_out += excluded if known else 0
        faults += own
    if unfit and file.document.written is not None:
        as_written = _parts(suite_of(file.document.written), machine, params_of, software_of, [], chosen=chosen)
        faults += [fault for index, _, _, _, own in as_written if index in unfit for fault in own]
    if faults:
        file.document.refuse(faults)
    return Plan(without_unmet(_without_twins(points)), left_out)


def _parts(
    file: SuiteFile, machine: Machine, params_of: ParamsOf, software_of: SoftwareOf, faults: list[str], *, chosen: Collection[str] | None
) -> Iterator[tuple[int, bool, list[PlannedPoint], int, list[str]]]:
    """Each benchmark after what it needs: its position, whether it is chosen, its points, how many combinations `where` excludes, and its
    faults."""
    by_name: dict[str, list[PlannedPoint]] = {}
    counts = Counter[bool]()
    for index in file.needed_first(faults):
        benchmark = file.suite.benchmark[index]
        known = chosen is None or benchmark.name in chosen
        if counts[known] > POINTS:
            continue
        of = machine if known else replace(machine, packages_here=False)  # where it is not chosen, what is installed does not matter
        expansion = _Expansion(file, index, benchmark, of, by_name.get(benchmark.needs or "", ()))
        planned, excluded = expansion.run(params_of, software_of)
        own = [*file.unfit.get(index, ()), *expansion.faults]
        planned = [] if own else planned
        counts[known] += len(planned)
        if counts[known] > POINTS:
            if known:
                file.document.refuse([file.document.fault(("benchmark", index), counts[known], f"at most {POINTS:,} points in a suite")])
            planned = []  # nobody wants them now; of what follows none are made
        by_name.setdefault(benchmark.name, []).extend(planned)
        yield index, known, planned, excluded, own


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
    """One benchmark's points, and the faults found on the way."""

    def __init__(self, file: SuiteFile, index: int, benchmark: Benchmark, machine: Machine, needed: Sequence[PlannedPoint]) -> None:
        self._suite, self._document = file.suite, file.document
        self._benchmark, self._machine, self._needed = benchmark, machine, needed
        self._location: Location = ("benchmark", index)
        self._changed = file.changed[index] if file.changed else frozenset()
        self.faults: list[str] = []

    def run(self, params_of: ParamsOf, software_of: SoftwareOf) -> tuple[list[PlannedPoint], int]:
        """The points, and how many combinations `where` excludes."""
        try:
            asked = self._benchmark.asked(self._machine.device_class)
        except ValidationError as error:  # each table is valid, and both together are not
            self._fault(("on", self._machine.device_class, "measure"), "a table", error.errors()[0]["msg"].split("expected ", 1)[-1])
            return [], 0
        repeats, measure = asked.pop("repeats") or 1, asked.pop("measure") or Measure()
        model = self._params_model(params_of)
        conditions = self._conditions(model)
        if model is not None:
            asked["params"] = _lists_as_values(model, asked["params"])
        is_program = self._benchmark.workload == "command"
        if is_program and asked["profile"]:
            expected = "false: only CARAML's own steps are traced; a profiler can stand in params.argv"
            self._fault(self._where_stands("profile"), True, expected)
        if asked["global_batch"] is None and asked["accumulation"] is None:
            if not is_program:  # which need not have a batch
                self._fault(("global_batch",), None, "a number of samples per optimizer step, or a list of them")
            asked["global_batch"] = 1  # so that the other faults are told, too
        before = len(self.faults)
        self._check_axes(asked, repeats)
        if len(self.faults) > before or model is None:
            return [], 0
        self._software = ", ".join(filter(None, [self._machine.software, software_of(self._benchmark.workload)]))
        planned: list[PlannedPoint] = []
        excluded = 0
        for values in _combinations(asked, self._benchmark.sweep):
            params = self._params(model, {name[7:]: value for name, value in values.items() if name.startswith("params.")})
            if params is None:
                continue
            point = self._point(measure, values, params)
            if not self._asked_for(point, model, conditions):
                excluded += 1
                continue
            skip = why_skipped(point, self._machine, params)
            if self._benchmark.needs is not None and not self._needed:
                skip = f"needs {self._benchmark.needs}, of which there is no point on {self._machine.name}"
            swept = tuple((name, values[name]) for name in _axes(asked))
            names = {"variant": _variant(asked, values, measure, self._changed)}
            for repeat in range(repeats):
                needs = self._needs({**values, **{f"params.{name}": value for name, value in point.params.items()}}, point, repeat)
                one = point.model_copy(update={**names, "repeat": repeat, "needs": needs})
                planned.append(PlannedPoint(one, skip, changes=len(self._changed), swept=swept))
        return _told_apart(planned, asked), excluded

    def _needs(self, values: dict[str, Any], point: Point, repeat: int) -> tuple[str, ...]:
        """Folders of what goes first: of several points that hand files over, the one that agrees in all that its benchmark sweeps."""
        every = self._needed
        if len(every) > 1 and re.search(r"(?<![\w.-])needed/", json.dumps(point.params)):
            again = any(one.point.repeat for one in every)
            found = [one for one in every if all(values.get(name) == value for name, value in one.swept)]
            found = [one for one in found if one.point.repeat == repeat or not again]
            if len(found) != 1:
                axes = [*dict.fromkeys(name for one in every for name, _ in one.swept), *(["repeats"] if again else [])]
                alike = ", ".join(f"{name} = {json.dumps(repeat if name == 'repeats' else values.get(name))}" for name in axes)
                expected = f"a benchmark of one point, or with one for each of these: needed/ names its files, and {len(found)} of its "
                self._fault(("needs",), self._benchmark.needs, f"{expected}{len(every)} points have {alike}")
            every = found
        return tuple(one.point.folder_name for one in every)

    def _fault(self, location: Location, found: object, expected: str, guess: str | None = None) -> None:
        text = self._document.fault((*self._location, *location), found, expected, guess)
        if text not in self.faults:
            self.faults.append(text)

    def _params_model(self, params_of: ParamsOf) -> type[BaseModel] | None:
        try:
            return params_of(self._benchmark.workload)
        except UnknownNameError as error:
            self._fault(("workload",), self._benchmark.workload, f"one of {', '.join(error.known)}", error.guess)
            return None

    def _conditions(self, model: type[BaseModel] | None) -> list[Condition]:
        conditions = []
        for index, text in enumerate(self._benchmark.where):
            try:
                conditions.append(Condition(text))
                if model is not None and self._benchmark.workload != "command":
                    conditions[-1].know({*NAMES, *Placement.model_fields, *Knobs.model_fields, *model.model_fields})
            except InputError as error:
                self._fault(("where", index), text, self._readable(error))
        return conditions

    def _asked_for(self, point: Point, model: type[BaseModel], conditions: list[Condition]) -> bool:
        names = condition_names(point, model, self._machine)
        for index, condition in enumerate(conditions):
            try:
                if not condition.holds(names):
                    return False
            except InputError as error:
                self._fault(("where", index), condition.text, self._readable(error))
        return True

    def _check_axes(self, asked: dict[str, Any], repeats: int) -> None:
        """Note what is wrong with the sweep, before anything is expanded: it may have more combinations than a suite may have points."""
        for one, other in (("global_batch", "accumulation"), ("world", "nodes")):
            if asked[one] is not None and asked[other] is not None:
                self._fault(self._where_stands(other), asked[other], f"{one} or {other}, not both: each follows from the other")
        axes = _axes(asked)
        for name in (name for name, values in axes.items() if not values):
            self._fault(self._where_stands(name), [], "at least one value to sweep")
        lengths = {name: len(values) for name, values in axes.items()}
        if self._benchmark.sweep == "zip" and len(set(lengths.values())) > 1:
            self._fault(("sweep",), "zip", f"lists of one length, but they are {lengths}")
        count = repeats * (max(lengths.values(), default=1) if self._benchmark.sweep == "zip" else math.prod(lengths.values()))
        if count > POINTS:
            self._fault(("sweep",), count, f"at most {POINTS:,} points, repeats counted; sweep fewer values, or in several suites")

    @staticmethod
    def _readable(error: InputError) -> str:
        return f"a condition on a point's names ({'; '.join(filter(None, (error.args[0], error.hint)))})"

    def _where_stands(self, name: str) -> Location:
        """Location of a value in the file: in the override of this device class if that has it, else in the benchmark itself."""
        path = tuple(name.split("."))
        override = ("on", self._machine.device_class, *path)
        return override if (*self._location, *override) in self._document.lines else path

    def _params(self, model: type[BaseModel], given: dict[str, Any]) -> BaseModel | None:
        """All parameters of the workload with their defaults filled in, or ``None`` after noting what is wrong with them."""
        try:
            return model.model_validate(given, context={"packages_here": self._machine.packages_here})
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                name = ".".join(str(part) for part in fault["loc"])
                location = self._where_stands(f"params.{name}" if name else "params")
                if fault["type"] == "extra_forbidden":
                    expected, guess = f"one of the keys {', '.join(model.model_fields)}", nearest(name, model.model_fields)
                else:
                    expected = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
                    guess = nearest(str(fault["input"]), re.findall(r"'([^']+)'", str(fault.get("ctx", {}).get("expected"))))
                self._fault(location, fault["input"], expected, guess)
            return None

    def _point(self, measure: Measure, values: dict[str, Any], params: BaseModel) -> Point:
        machine = self._machine
        if values["precision"] == "tf32" and "tf32" in machine.emulates:  # torch computes plain fp32: the same work has the same key
            values = {**values, "precision": "fp32"}
        nodes, devices = _extent(values, machine)
        whole = {name: None if value == "all" else value for name, value in values.items()}
        placement = Placement.of({**whole, "fsdp": whole.get("fsdp")})
        dp = max(nodes * devices // placement.model_parallel, 1)
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
        return Point(
            suite=self._suite.name,
            benchmark=self._benchmark.name,
            workload=self._benchmark.workload,
            params=params.model_dump(mode="json"),
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
            measure=measure,
            **{name: values[name] for name in ("mode", "precision", "seed", "deterministic", "profile")},
        )

    def _compiled(self, mode: Mode, params: BaseModel) -> Compile:
        """What `compile` is where nobody says: on wherever torch compiles for the device, and the work can be compiled."""
        ours = self._machine.compiles and self._benchmark.workload != "command" and mode != "data"
        return "default" if ours and uncompiled(params) is None else "off"


def _axes(asked: dict[str, Any]) -> dict[str, list[Any]]:
    """The swept values; parameters of the workload appear as ``params.NAME``."""
    return {name: value for name, value in _flat(asked).items() if isinstance(value, list)}


def _variant(asked: dict[str, Any], values: dict[str, Any], measure: Measure, changed: Collection[str]) -> str:
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


def _told_apart(planned: list[PlannedPoint], asked: dict[str, Any]) -> list[PlannedPoint]:
    """The points of a benchmark, with ``micro_batch`` and ``seed`` in the labels of those that differ in nothing else of a label."""
    swept = [name for name in NOT_IN_LABELS if isinstance(asked[name], list)]
    if not swept:
        return planned
    alike: dict[str, list[Point]] = {}
    for one in planned:
        alike.setdefault(one.point.label, []).append(one.point)
    found = []
    for one in planned:
        others = alike[one.point.label]
        words = [f"{name}={getattr(one.point, name)}" for name in swept if len({getattr(other, name) for other in others}) > 1]
        variant = " ".join(filter(None, [one.point.variant, *words]))
        found.append(replace(one, point=one.point.model_copy(update={"variant": variant})) if words else one)
    return found


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in asked.items() if name != "params" and value is not None}
    return own | {f"params.{name}": value for name, value in (asked["params"] or {}).items()}


def _lists_as_values(model: type[BaseModel], params: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters, with a list that is itself one value (an argument vector) as a tuple, which is not swept; a list of lists is."""
    whole = {name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}
    return {
        name: tuple(value) if name in whole and isinstance(value, list) and not any(isinstance(item, list) for item in value) else value
        for name, value in (params or {}).items()
    }


def _combinations(asked: dict[str, Any], sweep: str) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values with the fixed ones."""
    axes = _axes(asked)
    fixed = {name: value for name, value in _flat(asked).items() if name not in axes}
    rows: Iterator[tuple[Any, ...]] = zip(*axes.values(), strict=True) if sweep == "zip" and axes else itertools.product(*axes.values())
    for row in rows:
        yield {**DEFAULTS, **fixed, **dict(zip(axes, row, strict=True))}


def _extent(values: dict[str, Any], machine: Machine) -> tuple[int, int]:
    """Nodes, and devices of each. Of ``world`` devices as many as there are go on a node; a remainder is a node more, which is one too
    many for a placement and refused there."""
    devices = machine.devices_per_node if values["devices"] == "all" else values["devices"]
    if "world" not in values:
        return values["nodes"], devices
    devices = min(machine.devices_per_node, values["world"])
    return math.ceil(values["world"] / devices), devices


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
