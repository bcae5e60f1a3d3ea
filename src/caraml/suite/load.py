"""Finding and reading suite files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from caraml.base.errors import unknown_name
from caraml.base.toml import Location, TomlDocument, checked, read_toml
from caraml.suite.model import Measure, Point, Suite
from caraml.system.variables import hidden

CATALOG = Path(__file__).parent / "catalog"


@dataclass(frozen=True)
class SuiteFile:
    """A suite and the document it was read from, which knows the line of every key."""

    suite: Suite
    document: TomlDocument
    changed: tuple[frozenset[str], ...] = ()
    """Of each benchmark, the parameters (``params.NAME``) that are not as its file says: its name says nothing of them."""
    settings: tuple[str, ...] = ()
    """The ``key=value`` that were laid over the file, as they may be shown."""
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What stands behind the references of ``env`` in the suite and its document, which have no value themselves that may be a secret."""


def policy(**keys: Any) -> Measure:
    """When a measurement starts and stops: the keys of ``measure`` in suites. Raises ``InputError`` with every fault."""
    return checked("caraml.Policy", keys, Measure)


def load_suite(name: str) -> SuiteFile:
    """Read a suite by its name in the catalogue or by the path of a file.

    Raises:
        InputError: no such suite or file, or the file is wrong; every fault at once.
    """
    path = Path(name)
    if path.suffix != ".toml" and "/" not in name:
        path = CATALOG / f"{name}.toml"
        if not path.exists():
            raise unknown_name("suite", name, catalog_suites())
    return suite_of(read_toml(path))


def suite_of(document: TomlDocument) -> SuiteFile:
    """The suite that a document describes, with references in place of the values of ``env``.

    Raises:
        InputError: the document's faults, all of them.
    """
    data, values = without_values(document, document.data)
    if values:
        import tomli_w  # only suites with hidden values are written anew

        head = "# Values of env are hidden, and comments left out: they may repeat them.\n"
        document = replace(document, data=data, text=head + tomli_w.dumps(data))
    return SuiteFile(document.validate(Suite), document, values=values)


def without_values(document: TomlDocument, data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A suite's content with references in place of the values of ``env``, and the values by their references.

    Raises:
        InputError: a value with a brace that is none of a parameter.
    """
    data, values = copy.deepcopy(data), {}
    parameters = {
        *Point.model_fields,
        "world",
        "folder",
        "suite_folder",
        *(name for _, _, params in _tables(document.data) for name in params),
    }
    for location, env in _environments(data):
        if not isinstance(env, dict):
            document.refuse([document.fault(location, type(env).__name__, "a table of variables")])
        for name, template in env.items():
            if not isinstance(template, str):  # told here: the workload's model would show the value
                document.refuse([document.fault((*location, name), type(template).__name__, "text")])
            try:
                env[name] = hidden(name, template, parameters)
            except ValueError:
                document.refuse([document.fault((*location, name), "a brace", "{{ or }} for one in a value, {NAME} for a parameter")])
            if env[name] != template:
                values[env[name]] = template
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
