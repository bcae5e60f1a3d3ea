"""From a suite to its points: sweeps, conditions, and the reasons why some points cannot run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from caraml.base.errors import InputError, UnknownNameError, nearest
from caraml.base.limits import POINTS
from caraml.base.toml import expected_of
from caraml.base.toml_lines import Location
from caraml.suite.expression import NAMES, Condition, condition_names
from caraml.suite.load import Benchmark, SuiteFile, suite_of
from caraml.suite.model import Compile, Knobs, Machine, Measure, Mode, Placement, Point
from caraml.suite.needs import not_kept, waited_for
from caraml.suite.placement import uncompiled, why_skipped
from caraml.suite.sweep import NOT_IN_LABELS, axes_of, combinations, lists_as_values, variant_of

ParamsOf = Callable[[str], type[BaseModel]]
"""Gives the parameter model of a workload by its name; raises ``InputError`` for an unknown one."""
SoftwareOf = Callable[[str], str | None]
"""Gives the plug-in that a workload comes from, with its version; ``None`` for one of CARAML's own."""


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
    partial: bool = False
    """Whether only the chosen benchmarks are in it, since with the others it has more points than a suite may have."""


@dataclass(frozen=True)
class _Part:
    """One benchmark, expanded."""

    index: int
    chosen: bool
    points: list[PlannedPoint]
    excluded: int
    """Combinations that `where` excludes."""
    faults: list[str]
    too_many: bool = False
    """Whether it would have had points, and the benchmarks that are not chosen have too many."""


def expand(
    file: SuiteFile,
    machine: Machine,
    params_of: ParamsOf,
    software_of: SoftwareOf = lambda workload: None,
    chosen: Collection[str] | None = None,
) -> Plan:
    """Expand every benchmark of a suite. Raises one ``InputError`` that lists every fault of the suite's values.

    Of ``chosen``, names of benchmarks, and of no others the values set by hand must fit, and points and combinations are counted. Others
    that they do not fit have no points, and none has where all together have more than a suite may have. What is wrong with those as they
    are written is told.
    """
    faults: list[str] = []
    parts = list(_parts(file, machine, params_of, software_of, faults, chosen=chosen))
    written, unfit = file.document.written, set[int]()
    if written is not None:
        unfit = {part.index for part in parts if part.faults and not part.chosen}
    faults += [fault for part in parts if part.index not in unfit for fault in part.faults]
    if unfit and written is not None:
        whole = suite_of(written)
        among = whole.with_needed(whole.suite.benchmark[index].name for index in unfit)
        # Nothing is chosen here: a suite may have too many points as it is written, and few as it is set.
        as_written = _parts(whole, machine, params_of, software_of, [], chosen=(), among=among)
        faults += [fault for part in as_written if part.index in unfit for fault in part.faults]
    if faults:
        file.document.refuse(faults)
    partial = any(part.too_many for part in parts) or sum(len(part.points) for part in parts) > POINTS
    points = [one for part in parts if part.chosen or not partial for one in part.points]
    return Plan(without_unmet(_without_twins(points)), sum(part.excluded for part in parts if part.chosen), partial)


def _parts(
    file: SuiteFile,
    machine: Machine,
    params_of: ParamsOf,
    software_of: SoftwareOf,
    faults: list[str],
    *,
    chosen: Collection[str] | None,
    among: Collection[str] | None = None,
) -> Iterator[_Part]:
    """Each benchmark of those ``among`` which are asked for, after what it needs; faults of `needs` are noted. Those that are not
    ``chosen`` are expanded until they have too many points, which are of no use."""
    by_name: dict[str, list[PlannedPoint]] = {}
    counts = Counter[bool]()
    for index in file.needed_first(faults):
        benchmark = file.suite.benchmark[index]
        known = chosen is None or benchmark.name in chosen
        if counts[known] > POINTS or (among is not None and benchmark.name not in among):
            continue
        of = machine if known else replace(machine, packages_here=False)  # where it is not chosen, what is installed does not matter
        expansion = _Expansion(file, index, benchmark, of, by_name.get(benchmark.needs or "", ()))
        planned, excluded = expansion.run(params_of, software_of)
        own = [*file.unfit.get(index, ()), *expansion.faults]
        planned = [] if own else planned
        counts[known] += len(planned)
        if (too_many := counts[known] > POINTS) and known:
            file.document.refuse([file.document.fault(("benchmark", index), counts[known], f"at most {POINTS:,} points in a suite")])
        planned = [] if too_many else planned
        by_name.setdefault(benchmark.name, []).extend(planned)
        yield _Part(index, known, planned, excluded, own, too_many)


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
        self._benchmark, self._machine = benchmark, machine
        self._needed = [(one.point, dict(one.swept)) for one in needed]
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
            asked["params"] = lists_as_values(model, asked["params"])
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
        for values in combinations(asked, self._benchmark.sweep):
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
            swept = tuple((name, values[name]) for name in axes_of(asked))
            names = {"variant": variant_of(asked, values, measure, self._changed)}
            for repeat in range(repeats):
                needs = self._needs({**values, **{f"params.{name}": value for name, value in point.params.items()}}, point, params, repeat)
                one = point.model_copy(update={**names, "repeat": repeat, "needs": needs})
                planned.append(PlannedPoint(one, skip, changes=len(self._changed), swept=swept))
        return _told_apart(planned, asked), excluded

    def _needs(self, values: dict[str, Any], point: Point, params: BaseModel, repeat: int) -> tuple[str, ...]:
        """Folders of what goes first."""
        needs = self._benchmark.needs
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
        axes = axes_of(asked)
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
        for name, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                self._fault(self._where_stands(f"params.{name}"), value, "a finite number")
                return None
        try:
            return model.model_validate(given, context={"packages_here": self._machine.packages_here})
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                name = ".".join(str(part) for part in fault["loc"])
                location = self._where_stands(f"params.{name}" if name else "params")
                if fault["type"] == "extra_forbidden":
                    expected, guess = f"one of the keys {', '.join(model.model_fields)}", nearest(name, model.model_fields)
                else:
                    expected, guess = expected_of(fault)
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
