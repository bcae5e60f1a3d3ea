"""From a suite to its points: sweeps, conditions, and the reasons why some points cannot run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from caraml.errors import InputError, nearest
from caraml.suite.expression import Condition
from caraml.suite.load import SuiteFile
from caraml.suite.model import Benchmark, Measure, Point
from caraml.system.model import DeviceClass
from caraml.tomllines import Location

ParamsOf = Callable[[str], type[BaseModel]]
"""Gives the parameter model of a workload by its name; raises ``InputError`` for an unknown one."""

_DEFAULTS: dict[str, Any] = {
    "nodes": 1,
    "devices": 1,
    "mode": "train",
    "precision": "fp32",
    "compile": "off",
    "seed": 0,
    "deterministic": False,
}


@dataclass(frozen=True)
class Machine:
    """What expansion must know of the system that the points will run on."""

    name: str
    device: str
    device_class: DeviceClass
    software: str
    nodes: int
    devices_per_node: int
    device_memory_gib: float | None = None


@dataclass(frozen=True)
class PlannedPoint:
    """A point, and why it will not be run if it cannot."""

    point: Point
    skip: str | None = None


@dataclass(frozen=True)
class Plan:
    """All points of a suite on one machine, in file order; ``left_out`` counts combinations that a `where` condition excludes."""

    points: list[PlannedPoint]
    left_out: int


def expand(file: SuiteFile, machine: Machine, params_of: ParamsOf) -> Plan:
    """Expand every benchmark of a suite. Raises one ``InputError`` that lists every fault of the suite's values."""
    points: list[PlannedPoint] = []
    faults: list[str] = []
    left_out = 0
    for index, benchmark in enumerate(file.suite.benchmark):
        expansion = _Expansion(file, index, benchmark, machine)
        planned, excluded = expansion.run(params_of)
        points += planned
        left_out += excluded
        faults += expansion.faults
    if faults:
        file.document.refuse(faults)
    return Plan(_without_twins(points), left_out)


class _Expansion:
    """One benchmark's points, and the faults found on the way."""

    def __init__(self, file: SuiteFile, index: int, benchmark: Benchmark, machine: Machine) -> None:
        self._suite, self._document = file.suite, file.document
        self._benchmark, self._machine = benchmark, machine
        self._location: Location = ("benchmark", index)
        self.faults: list[str] = []

    def run(self, params_of: ParamsOf) -> tuple[list[PlannedPoint], int]:
        """The points, and how many combinations `where` excludes."""
        asked = self._benchmark.asked(self._machine.device_class)
        repeats, measure = asked.pop("repeats") or 1, asked.pop("measure") or Measure()
        model, conditions = self._params_model(params_of), self._conditions()
        self._check_axes(asked)
        if self.faults or model is None:
            return [], 0
        planned: list[PlannedPoint] = []
        excluded = 0
        for values in _combinations(asked, self._benchmark.sweep):
            params = self._params(model, {name[7:]: value for name, value in values.items() if name.startswith("params.")})
            if params is None:
                continue
            point = self._point(measure, values, params)
            if not self._asked_for(point, params, conditions):
                excluded += 1
                continue
            skip = _impossible(point, self._machine)
            planned += [PlannedPoint(point.model_copy(update={"repeat": repeat}), skip) for repeat in range(repeats)]
        return planned, excluded

    def _fault(self, location: Location, found: object, expected: str, guess: str | None = None) -> None:
        text = self._document.fault((*self._location, *location), found, expected, guess)
        if text not in self.faults:
            self.faults.append(text)

    def _params_model(self, params_of: ParamsOf) -> type[BaseModel] | None:
        try:
            return params_of(self._benchmark.workload)
        except InputError as error:
            self._fault(("workload",), self._benchmark.workload, str(error))
            return None

    def _conditions(self) -> list[Condition]:
        conditions = []
        for index, text in enumerate(self._benchmark.where):
            try:
                conditions.append(Condition(text))
            except InputError as error:
                self._fault(("where", index), text, str(error))
        return conditions

    def _asked_for(self, point: Point, params: dict[str, Any], conditions: list[Condition]) -> bool:
        names = _names(point, params, self._machine)
        for index, condition in enumerate(conditions):
            try:
                if not condition.holds(names):
                    return False
            except InputError as error:
                self._fault(("where", index), condition.text, str(error))
        return True

    def _check_axes(self, asked: dict[str, Any]) -> None:
        if asked["global_batch"] is None:
            self._fault(("global_batch",), None, "a number of samples per optimizer step, or a list of them")
        axes = _axes(asked)
        for name in (name for name, values in axes.items() if not values):
            self._fault(self._where_stands(name), [], "at least one value to sweep")
        lengths = {name: len(values) for name, values in axes.items()}
        if self._benchmark.sweep == "zip" and len(set(lengths.values())) > 1:
            self._fault(("sweep",), "zip", f"lists of one length, but they are {lengths}")

    def _where_stands(self, name: str) -> Location:
        """Location of a value in the file: in the override of this device class if that has it, else in the benchmark itself."""
        path = tuple(name.split("."))
        override = ("on", self._machine.device_class, *path)
        return override if (*self._location, *override) in self._document.lines else path

    def _params(self, model: type[BaseModel], given: dict[str, Any]) -> dict[str, Any] | None:
        """All parameters of the workload with their defaults filled in, or ``None`` after noting what is wrong with them."""
        try:
            return model.model_validate(given).model_dump(mode="json")
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                name = ".".join(str(part) for part in fault["loc"])
                location = self._where_stands(f"params.{name}" if name else "params")
                if fault["type"] == "extra_forbidden":
                    known = ", ".join(model.model_fields)
                    self._fault(location, fault["input"], f"one of the keys {known}", nearest(name, model.model_fields))
                else:
                    expected = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
                    self._fault(location, fault["input"], expected)
            return None

    def _point(self, measure: Measure, values: dict[str, Any], params: dict[str, Any]) -> Point:
        machine = self._machine
        devices = machine.devices_per_node if values["devices"] == "all" else values["devices"]
        share = max(values["global_batch"] // (values["nodes"] * devices), 1)
        return Point(
            suite=self._suite.name,
            benchmark=self._benchmark.name,
            workload=self._benchmark.workload,
            params=params,
            system=machine.name,
            device=machine.device,
            device_class=machine.device_class,
            software=machine.software,
            nodes=values["nodes"],
            devices=devices,
            mode=values["mode"],
            precision=values["precision"],
            compile=values["compile"],
            global_batch=values["global_batch"],
            micro_batch=values.get("micro_batch") or share,
            seed=values["seed"],
            deterministic=values["deterministic"],
            measure=measure,
        )


def _axes(asked: dict[str, Any]) -> dict[str, list[Any]]:
    """The swept values; parameters of the workload appear as ``params.NAME``."""
    return {name: value for name, value in _flat(asked).items() if isinstance(value, list)}


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in asked.items() if name != "params" and value is not None}
    return own | {f"params.{name}": value for name, value in (asked["params"] or {}).items()}


def _combinations(asked: dict[str, Any], sweep: str) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values with the fixed ones."""
    axes = _axes(asked)
    fixed = {name: value for name, value in _flat(asked).items() if name not in axes}
    rows: Iterator[tuple[Any, ...]] = zip(*axes.values(), strict=True) if sweep == "zip" and axes else itertools.product(*axes.values())
    for row in rows:
        yield {**_DEFAULTS, **fixed, **dict(zip(axes, row, strict=True))}


def _impossible(point: Point, machine: Machine) -> str | None:
    """Why a point cannot run on this machine, or ``None``. Nothing is rounded to make it fit."""
    if point.nodes > machine.nodes:
        return f"needs {point.nodes} nodes, {machine.name} has {machine.nodes}"
    if point.devices > machine.devices_per_node:
        return f"needs {point.devices} devices per node, {machine.name} has {machine.devices_per_node}"
    if point.global_batch % (point.micro_batch * point.world):
        product = f"{point.micro_batch} x {point.world} = {point.micro_batch * point.world}"
        return f"global batch {point.global_batch} is not divisible by micro-batch x devices = {product}"
    if point.precision == "tf32" and point.device_class == "cpu":
        return "tf32 is an arithmetic of GPUs"
    return None


def _names(point: Point, params: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """What a `where` condition may speak of."""
    own = {
        name: getattr(point, name) for name in ("nodes", "devices", "world", "mode", "precision", "compile", "global_batch", "micro_batch")
    }
    return {**params, **own, "device_class": machine.device_class, "device_memory_gib": machine.device_memory_gib or 0.0}


def _without_twins(points: list[PlannedPoint]) -> list[PlannedPoint]:
    """Each piece of work once, under the first benchmark that asks for it."""
    unique: dict[str, PlannedPoint] = {}
    for planned in points:
        unique.setdefault(planned.point.key, planned)
    return list(unique.values())
