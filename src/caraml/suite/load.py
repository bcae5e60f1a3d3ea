"""Suite files: what they may say, finding and reading them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue

from caraml.base.errors import InputError, nearest, unknown_name
from caraml.base.limits import DEPTH, INCLUDED, TOML, too_large
from caraml.base.toml import FaultsError, FrozenModel, Location, TomlDocument, read_toml
from caraml.suite.model import (
    WORKLOAD_ALIASES,
    Attention,
    Binding,
    Compile,
    Count,
    DropoutMasks,
    Matmul,
    Mode,
    Point,
    Policy,
    Schedule,
    Seed,
    Stated,
    StepGraph,
)
from caraml.suite.placement import needed_first, reached
from caraml.system.model import DeviceClass
from caraml.system.variables import hidden

CATALOG = Path(__file__).parent / "catalog"
_OF_JUBE = {"llm_benchmark_nvidia_amd": "llm", "llm_benchmark_ipu": "caraml-ipu", "image_classification_torch_benchmark": "vision"}
"""Suites with the work of CARAML's scripts for JUBE."""


class _Asked(FrozenModel):
    """The values of a benchmark that an override may replace. A list is swept."""

    params: dict[str, JsonValue] | None = Field(None, description="parameters of the workload; a list is swept")
    nodes: Count | list[Count] | None = Field(None, description="number of nodes")
    devices: Count | Literal["all"] | list[Count | Literal["all"]] | None = Field(
        None, description="devices per node, one process each; `all`: every device of the machine"
    )
    world: Count | list[Count] | None = Field(
        None, description="devices in all, instead of `nodes`; equally many on each node, as many as it has and divide them"
    )
    tp: Count | list[Count] | None = None
    sp: bool | list[bool] | None = None
    cp: Count | list[Count] | None = None
    pp: Count | list[Count] | None = None
    schedule: Schedule | list[Schedule] | None = None
    fsdp: Count | Literal["all"] | list[Count | Literal["all"]] | None = None
    distributed_optimizer: bool | list[bool] | None = None
    mode: Mode | list[Mode] | None = Field(
        None,
        description="`train`: real input; `compute`: batches stay on the device; `data`: the input pipeline alone; "
        "`inference`: real input, forward passes only",
    )
    precision: Stated | list[Stated] | None = Field(
        None,
        description="arithmetic of matrix products; `fp32` never uses TF32, `bf16` and `fp16` are autocast over fp32 weights; `fp8`: the "
        "linear layers of a GPT's blocks in it, the rest in `bf16` (GPUs, needs caraml[fp8])",
    )
    compile: Compile | list[Compile] | None = Field(
        None,
        description="mode of `torch.compile`; those with CUDA graphs take one micro-batch per step and whole models only; "
        "absent: `default` on NVIDIA, AMD and Intel GPUs, `off` elsewhere and for work that cannot be compiled",
    )
    channels_last: bool | list[bool] | None = None
    fused_optimizer: bool | list[bool] | None = None
    keep_freed_memory: bool | list[bool] | None = None
    attention: Attention | list[Attention] | None = None
    convolution_search: bool | list[bool] | None = None
    half_residual: bool | list[bool] | None = None
    matmul: Matmul | list[Matmul] | None = None
    dropout_masks: DropoutMasks | list[DropoutMasks] | None = None
    frozen_weights: bool | list[bool] | None = None
    step_graph: StepGraph | list[StepGraph] | None = None
    affinity: Binding | list[Binding] | None = None
    emulated: bool | list[bool] | None = None
    global_batch: Count | list[Count] | None = Field(None, description="samples per optimizer step over all devices")
    accumulation: Count | list[Count] | None = Field(
        None, description="micro-batches per step and copy of the model, instead of `global_batch`, which then grows with the copies"
    )
    micro_batch: Count | list[Count] | None = Field(
        None, description="samples per copy of the model and forward pass; by default the copy's whole share of `global_batch`"
    )
    seed: Seed | list[Seed] | None = Field(None, description="of starting weights and of the order of samples")
    deterministic: bool | list[bool] | None = Field(
        None, description="only algorithms that give the same bits every time; equal points then have an equal `fingerprint`"
    )
    profile: bool | None = Field(
        None, description="trace a few steps after the window with torch's profiler; what is measured is over by then"
    )
    repeats: Count | None = Field(None, description="number of points that repeat the same work")
    measure: Policy | None = Field(None, description="when a measurement starts and stops")


class Benchmark(_Asked):
    """One `[[benchmark]]` table: a workload and what to sweep."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$", description="begins the label of every point")
    workload: Annotated[str, AfterValidator(lambda name: WORKLOAD_ALIASES.get(name, name))] = Field(
        description="what is trained: a name of `caraml list workloads`"
    )
    sweep: Literal["product", "zip"] = Field(
        "product", description="of swept lists, every combination, or one point for each position in lists of equal length"
    )
    where: list[str] = Field([], description="conditions on a combination; those that break one are not asked for")
    needs: str | None = Field(
        None,
        description="benchmark of this suite that has to succeed first; `needed` is a link to the folder of its point, or of the one alike",
    )
    on: dict[DeviceClass, _Asked] = Field({}, description="values that replace these on one class of device, `cpu` or `gpu`")

    def asked(self, device_class: DeviceClass) -> dict[str, Any]:
        """The values in force on this class of device; ``params`` and ``measure`` are merged key by key."""
        values = {name: getattr(self, name) for name in _Asked.model_fields}
        override = self.on.get(device_class)
        if override is not None:
            for name in override.model_fields_set:
                ours, theirs = values[name], getattr(override, name)
                if name == "params":
                    values[name] = {**(ours or {}), **theirs}
                elif name == "measure":
                    base = ours.model_dump(exclude_unset=True) if ours else {}
                    values[name] = Policy(**{**base, **theirs.model_dump(exclude_unset=True)})
                else:
                    values[name] = theirs
        return values


class Suite(FrozenModel):
    """A suite file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="names the campaign and its files")
    title: str = Field(description="heads the report")
    description: str = Field("", description="more about it, for readers of the file")
    include: list[str] = Field([], description="suites whose benchmarks come first: names of `caraml list suites`, paths beside this file")
    benchmark: list[Benchmark] = Field(min_length=1, description="one table `[[benchmark]]` each")


@dataclass(frozen=True)
class SuiteFile:
    """A suite and the document it was read from, which knows the line of every key."""

    suite: Suite
    document: TomlDocument
    changed: tuple[frozenset[str], ...] = ()
    """Of each benchmark, the parameters (``params.NAME``) that are not as its file says: its name says nothing of them."""
    settings: tuple[str, ...] = ()
    """The ``key=value`` that were laid over the file, as they may be shown."""
    included: tuple[str, ...] = ()
    """The other files that parts of it come from."""
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What stands behind the references of ``env`` in the suite and its document, which have no value themselves that may be a secret."""
    unfit: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Faults of what was set by hand in benchmarks that it does not fit and that stay as written, by their positions."""

    @property
    def names(self) -> list[str]:
        """Its benchmarks, each name once."""
        return list(dict.fromkeys(benchmark.name for benchmark in self.suite.benchmark))

    def needed_first(self, faults: list[str]) -> list[int]:
        """The benchmarks by their position, each after what it needs, else in their order; faults of `needs` are noted."""
        every, names, document = self.suite.benchmark, self.names, self.document
        order, circles = needed_first([(benchmark.name, benchmark.needs) for benchmark in every])
        for index, circle in circles.items():
            expected = f"{', '.join(circle)} wait for each other" if len(circle) > 1 else "it would wait for itself"
            faults.append(document.fault(("benchmark", index, "needs"), every[index].needs, f"no circle: {expected}"))
        expected = "the name of a benchmark of this suite"
        for index, needs in enumerate(benchmark.needs for benchmark in every):
            if needs is not None and needs not in names:
                faults.append(document.fault(("benchmark", index, "needs"), needs, expected, nearest(needs, names)))
        return order

    def with_needed(self, names: Iterable[str]) -> frozenset[str]:
        """Names of benchmarks, with those of all that they need."""
        every, needs = frozenset(names), dict[str, list[str]]()
        for benchmark in self.suite.benchmark:
            needs.setdefault(benchmark.name, []).extend([benchmark.needs] if benchmark.needs is not None else [])
        return every | reached(every, needs)


def load_suite(name: str) -> SuiteFile:
    """Read a suite by its name in the catalogue or by the path of a file. Raises ``InputError`` where there is none, or the file is wrong;
    every fault at once."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml", ".xml"}:
        same = _OF_JUBE.get(path.stem)
        nearby = f"; or suite {same!r}, its models with settings of CARAML's: caraml run {same}, with the same --tag" if same else ""
        hint = f"caraml import --jube {name} > mine.toml, with the same --tag{nearby}"
        raise InputError(f"{name}: found a script of JUBE, expected a suite", hint)
    path = CATALOG / f"{name}.toml" if _is_name(name) else path
    if name and not path.is_file() and Path(name).is_dir():
        files = sorted(map(str, Path(name).glob("*.toml")))
        hint = f"a file in it: {', '.join(files[:5])}{' ...' if len(files) > 5 else ''}" if files else "caraml list suites"
        raise InputError(f"{name}: found a folder, expected a suite: a name of the catalogue, or a file", hint)
    if _is_name(name) and not path.exists():
        error = unknown_name("suite", name, catalog_suites())
        if Path(f"{name}.toml").is_file():
            error.hint = f"a file is named whole: {name}.toml"
        raise error
    document = read_toml(path)
    if "include" not in document.data:
        return suite_of(document)
    reader = _Includes(path.parent)
    tables = reader.tables(document, (path,))
    places = {("benchmark", number, *keys): place for number, table in enumerate(tables) for keys, place in table.places.items()}
    lines = {keys: line for keys, line in document.lines.items() if keys[0] != "benchmark"}
    whole = replace(
        document,
        data={**document.data, "benchmark": [table.data for table in tables]},
        lines=lines | {keys: line for keys, (line, _) in places.items()},
        others={keys: name for keys, (_, name) in places.items() if name != document.name},
    )
    del whole.data["include"]
    return suite_of(whole, tuple(map(str, reader.read)))


def suite_of(document: TomlDocument, included: Sequence[str] = ()) -> SuiteFile:
    """The suite that a document describes, with references in place of the values of ``env``. Raises ``InputError`` with all its faults.

    What it would include is not read here, as its text may be somebody else's; ``included`` are the files whose benchmarks it has already.
    """
    if "include" in document.data:
        document.refuse([document.fault(("include",), document.data["include"], "no `include` in a suite that was kept: it is whole")])
    data, values = _without_values(document)
    if values or included:
        import tomli_w  # only suites with hidden values, and those of several files, are written anew

        head = "# Values of env are hidden, and comments left out: they may repeat them.\n" if values else ""
        head += f"# With all that it includes: {', '.join(map(repr, included))}. Comments are left out.\n" if included else ""
        document = replace(document, data=data, text=head + tomli_w.dumps(data))
        if len(document.text) > TOML:
            raise too_large(document.name, len(document.text), TOML, "characters with all that it includes")
    return SuiteFile(document.validate(Suite), document, values=values, included=tuple(included))


def _is_name(text: str) -> bool:
    """Whether a suite is asked for by its name in the catalogue, not by a path."""
    return Path(text).suffix != ".toml" and "/" not in text


@dataclass(frozen=True)
class _Table:
    """A benchmark as files have it that was not checked yet, and on which line of which file each of its keys stands."""

    data: dict[str, Any]
    places: dict[Location, tuple[int, str]]


def _laid_over(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """A table with the keys of another; tables in it are merged key by key."""
    inner = {key for key in over.keys() & table.keys() if isinstance(table[key], dict) and isinstance(over[key], dict)}
    return table | {key: _laid_over(table[key], value) if key in inner else value for key, value in over.items()}


class _Includes:
    """Reads the suites that others include; paths stay in the folder ``root``, so that it can be moved or given away as a whole."""

    def __init__(self, root: Path) -> None:
        self._root = _plain(root)
        self.read: dict[Path, list[_Table]] = {}

    def tables(self, document: TomlDocument, chain: tuple[Path, ...]) -> list[_Table]:
        """The benchmarks of a document, those that it includes first; one without a `workload` changes keys of those of its name.

        ``chain`` has the files that include each other up to this one. Raises ``InputError`` with what is wrong with an `include`.
        """
        include, own = document.data.get("include", []), document.data.get("benchmark", [])
        if not isinstance(include, list) or not all(isinstance(text, str) for text in include):
            document.refuse([document.fault(("include",), include, "an array of suites: names of the catalogue, or paths of files")])
        if not isinstance(own, list) or not all(isinstance(table, dict) for table in own):
            document.refuse([document.fault(("benchmark",), own, "an array of tables")])
        included, faults = list[_Table](), list[str]()
        for index, text in enumerate(include):
            try:
                included += self._included(document, index, text, chain)
            except FaultsError as error:
                faults += error.faults
        places: list[dict[Location, tuple[int, str]]] = [{} for _ in own]
        for location, line in document.lines.items():
            if location[0] == "benchmark" and len(location) > 1:
                places[int(location[1])][location[2:]] = line, document.name
        mine = []
        for index, table in enumerate(map(_Table, own, places)):
            name, names = table.data.get("name"), [one.data.get("name") for one in included]
            if "workload" in table.data or not include:
                mine.append(table)
            elif name is None and (typo := nearest("name", map(str, table.data))) is not None:
                faults.append(
                    document.fault(("benchmark", index, typo), table.data[typo], "the key `name` of an included benchmark", "name")
                )
            elif name not in names:
                expected = "the name of an included benchmark, or a `workload` besides"
                faults.append(document.fault(("benchmark", index, "name"), name, expected, nearest(str(name), map(str, names))))
            else:
                included = [
                    _Table(_laid_over(one.data, table.data), one.places | table.places) if old == name else one
                    for one, old in zip(included, names, strict=True)
                ]
        if faults:
            document.refuse(faults)
        return [*included, *mine]

    def _included(self, document: TomlDocument, index: int, text: str, chain: tuple[Path, ...]) -> list[_Table]:
        inside, known, expected = CATALOG, catalog_suites(), "a suite of the catalogue, or the path of a file, NAME.toml"
        path = CATALOG / f"{text}.toml"
        if not _is_name(text):
            inside, path = self._root, _plain(chain[-1].parent / text)
            expected = f"a suite file in the folder {inside}, or below it"
        if not path.is_relative_to(inside) or not os.path.isfile(path):  # noqa: PTH113 -- a name that cannot be is no error
            if path.is_relative_to(self._root) and os.path.isdir(path.parent):  # noqa: PTH112
                known = [os.path.relpath(other, chain[-1].parent) for other in path.parent.glob("*.toml")]
            document.refuse([document.fault(("include", index), text, expected, nearest(text, known))])
        if path in map(_plain, chain) or len(chain) > DEPTH:
            expected = f"no suite that includes itself: {' includes '.join(map(str, [*chain[-3:], path]))}"
            document.refuse([document.fault(("include", index), text, expected)])
        if path not in self.read:
            other = read_toml(path)
            if unknown := other.data.keys() - Suite.model_fields.keys():
                keys, names = ", ".join(Suite.model_fields), Suite.model_fields
                other.refuse([other.fault((key,), other.data[key], f"one of the keys {keys}", nearest(key, names)) for key in unknown])
            self.read[path] = self.tables(other, (*chain, path))
            if (number := len(self.read[path])) > INCLUDED:  # two files that both include two others double them
                raise too_large(path, number, INCLUDED, "benchmarks with all that it includes")
        return self.read[path]


def _plain(path: Path) -> Path:
    """A path as it is written, without detours: a link in a folder is its owner's word."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def _without_values(document: TomlDocument) -> tuple[dict[str, Any], dict[str, str]]:
    """A suite's content with references in place of the values of ``env``, and the values by their references. Raises ``InputError`` for a
    value with a brace that is none of a parameter."""
    data, values = copy.deepcopy(document.data), {}
    parameters = {
        *Point.model_fields,
        "world",
        "folder",
        "suite_folder",
        *(name for _, _, params in _tables(document.data) for name in params),
    }
    faults = []
    for location, env in _environments(data):
        if not isinstance(env, dict):
            faults.append(document.fault(location, type(env).__name__, "a table of variables"))
            continue
        for name, template in env.items():
            if not isinstance(template, str):  # told here: the workload's model would show the value
                faults.append(document.fault((*location, name), type(template).__name__, "text"))
                continue
            try:
                env[name] = hidden(name, template, parameters)
            except ValueError:
                faults.append(document.fault((*location, name), "a brace", "{{ or }} for one in a value, {NAME} for a parameter"))
            if env[name] != template:
                values[env[name]] = template
    if faults:
        rest = copy.deepcopy(document.data)
        for _, _, params in _tables(rest):
            params.pop("env", None)
        document.refuse(faults, replace(document, data=rest))
    return data, values


def _environments(data: dict[str, Any]) -> Iterator[tuple[Location, Any]]:
    """Every table of environment variables in a suite that was not checked yet, or what stands in a program's place of one, and where."""
    for benchmark, location, params in _tables(data):
        env = params.get("env")
        for one in env if isinstance(env, list) else [env]:
            if isinstance(one, dict) or (one is not None and benchmark.get("workload") == "command"):
                yield (*location, "env"), one


def _tables(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Location, dict[str, Any]]]:
    """Every table of parameters in a suite that was not checked yet: its benchmark, where it is, and what is in it."""
    benchmarks = data.get("benchmark")
    for index, benchmark in enumerate(benchmarks if isinstance(benchmarks, list) else ()):
        overrides = benchmark.get("on") if isinstance(benchmark, dict) else None
        places = [((), benchmark), *((("on", kind), one) for kind, one in (overrides.items() if isinstance(overrides, dict) else ()))]
        for place, table in places:
            params = table.get("params") if isinstance(table, dict) else None
            if isinstance(params, dict):
                yield benchmark, ("benchmark", index, *place, "params"), params


def catalog_suites() -> list[str]:
    """Names of the suites that come with CARAML."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))
