"""Reference tables of the site, made from the code when it is built. A page says where a table belongs: see ``MARKER``.

MkDocs calls ``on_page_markdown`` (``hooks`` in ``mkdocs.yml``); ``python docs/tables.py NAME`` prints a table.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import caraml

PACKAGE = Path(caraml.__file__).parent
MARKER = re.compile(r"\*\(`make docs` puts the table ([a-z-]+) here\)\*")
"""Words for whoever reads the Markdown file itself."""


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the tables into a page. Called by MkDocs."""
    del kwargs
    return MARKER.sub(lambda match: TABLES[match[1]](), markdown)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in line)} |" for line in lines)


def code(value: object) -> str:
    """A value as it is written in a file."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


# -- keys of models ----------------------------------------------------------------------------------------------------


def kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, such as ``integer ≥ 1``. A list beside the type of its elements only says that the key can be swept: left out."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        alternatives = [one for one in arguments if one is not type(None) and typing.get_origin(one) is not list]
        return ", ".join(kind(one, metadata) for one in alternatives or [one for one in arguments if one is not type(None)])
    if origin is Literal:
        return ", ".join(code(value) for value in arguments)
    if origin in (list, tuple):
        return f"list of {kind(arguments[0])}"
    if origin is dict or annotation is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    words = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}
    return " ".join([words.get(annotation, "value"), *_limits(metadata)])


def _limits(metadata: Sequence[Any]) -> Iterator[str]:
    """``≥ 1``, ``< 1`` and their like from pydantic's and annotated_types' constraints."""
    from caraml.base.limits import COUNT

    for one in metadata:
        for constraint in getattr(one, "metadata", [one]):
            for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
                limit = getattr(constraint, attribute, None)
                if limit is not None and limit != COUNT:  # that nobody can count so far is a limit of files, not of the key
                    yield f"{sign} {limit:g}"


def default(field: FieldInfo) -> str:
    """The default as text: empty where the key is required or absent without one."""
    if field.is_required():
        return "required"
    value = field.default
    return "" if value is None or value in ([], {}, ()) or isinstance(value, BaseModel) else code(value)


def keys(model: type[BaseModel], *, defaults: dict[str, str] | None = None, meanings: dict[str, str] | None = None) -> str:
    """Table of a model's keys."""
    rows = []
    for name, field in model.model_fields.items():
        meaning = field.description or (meanings or {}).get(name, "")
        usual = (defaults or {}).get(name) or default(field)
        usual = "by `preset`" if usual == "required" and "preset" in model.model_fields else usual
        rows.append([f"`{name}`", kind(field.annotation, field.metadata), usual, meaning])
    return table(["key", "value", "default", "meaning"], rows)


def benchmark() -> str:
    """Keys of a ``[[benchmark]]``; placement and knobs are explained where they are used."""
    from caraml.suite.expand import DEFAULTS
    from caraml.suite.load import Benchmark
    from caraml.suite.model import Knobs, Placement

    inner = {**Placement.model_fields, **Knobs.model_fields}
    defaults = {name: default(field) for name, field in inner.items()} | {name: code(value) for name, value in DEFAULTS.items()}
    meanings = {name: field.description or "" for name, field in inner.items()}
    return keys(Benchmark, defaults={**defaults, "repeats": "`1`"}, meanings=meanings)


def workloads() -> str:
    """Every workload with its parameters."""
    from caraml.suite.model import WORKLOAD_ALIASES
    from caraml.workloads import WORKLOADS, load_workload

    short = {name: alias for alias, name in WORKLOAD_ALIASES.items()}
    parts = []
    for name, title in WORKLOADS.items():
        alias = f" Short name: `{short[name]}`." if name in short else ""
        packages = load_workload(name).packages
        needs = f" Needs the packages {', '.join(f'`{package}`' for package in packages)}." if packages else ""
        parts += [f"## {name}", f"{title[0].upper()}{title[1:]}.{alias}{needs}", keys(load_workload(name).params)]
    return "\n\n".join(parts)


def models(*names: str) -> str:
    """Several models of one module, each with a heading."""
    module, *classes = names
    found = [getattr(__import__(module, fromlist=["x"]), name) for name in classes]
    return "\n\n".join(f"## {one.__name__}\n\n{plain(one.__doc__)}\n\n{keys(one)}" for one in found)


def plain(docstring: str | None) -> str:
    """A docstring as Markdown: one kind of code quotes, no line breaks."""
    return " ".join((docstring or "").replace("``", "`").split())


# -- numbers, flags, variables -----------------------------------------------------------------------------------------


def metrics() -> str:
    """Every metric: name, unit, which direction is better, definition, and what an energy is computed from."""
    from caraml.metrics.model import METRICS

    rows = []
    for name, metric in METRICS.items():
        better = "" if metric.better == "neither" else metric.better
        how = f" Computed from: {metric.source}." if metric.sensor and metric.source else ""
        rows.append([f"`{name}`", metric.unit.format(item="item"), better, f"{metric.definition.format(item='item')}{how}"])
    return table(["metric", "unit", "better", "definition"], rows)


def flags() -> str:
    """Flags of a record."""
    from caraml.results.record import FLAGS

    return table(["flag", "meaning"], [[f"`{name}`", meaning] for name, meaning in FLAGS.items()])


def power_flags() -> str:
    """Flags of an energy, and whether the number is valid with them."""
    from caraml.power.model import BLOCKING, ENERGY_FLAGS

    rows = [[f"`{name}`", "no" if name in BLOCKING else "yes", meaning] for name, meaning in ENERGY_FLAGS.items()]
    return table(["flag", "number valid", "meaning"], rows)


def statuses() -> str:
    """How a point may end."""
    from caraml.results.record import FINAL, STATUSES

    rows = [[f"`{name}`", "no" if name in FINAL else "yes", meaning] for name, meaning in STATUSES.items()]
    return table(["status", "tried again by the same command", "meaning"], rows)


def attribute_docs(path: Path) -> Iterator[tuple[str, object, str]]:
    """Name, value and docstring of every constant in a file that has a docstring below it, in classes too."""
    for block in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(block, ast.Module | ast.ClassDef):
            continue
        for node, after in zip(block.body, block.body[1:], strict=False):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
            if (
                documented
                and isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Constant)
            ):
                yield node.targets[0].id, node.value.value, after.value.value  # type: ignore[attr-defined]


def exit_codes() -> str:
    """Exit codes with their meaning."""
    from caraml.base.errors import ExitCode

    docs = {name: text for name, _, text in attribute_docs(PACKAGE / "base" / "errors.py")}
    return table(["code", "meaning"], [[f"`{int(one)}`", docs[one.name]] for one in ExitCode])


def variables() -> str:
    """CARAML's own environment variables: every constant whose docstring begins with ``Environment variable``."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for _, value, text in attribute_docs(path):
            if match := re.match(r"Environment variable(?:, ([^:]*))?: (.*)", text, flags=re.DOTALL):
                found[str(value)] = plain(": ".join(filter(None, match.groups())))
    return table(["variable", "meaning"], [[f"`{name}`", f"{text[0].upper()}{text[1:]}"] for name, text in sorted(found.items())])


def limits() -> str:
    """How much of a file is read: every constant of ``caraml.base.limits`` with its docstring."""
    from caraml.base import limits

    block = ast.parse((PACKAGE / "base" / "limits.py").read_text(encoding="utf-8")).body
    rows = []
    for node, after in itertools.pairwise(block):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name) and not name.id.startswith("_")]
            values = ", ".join(f"{value:,}" if isinstance(value := getattr(limits, name), int) else f"{value:g}" for name in names)
            if not names:  # how the limits are kept, which nobody meets
                continue
            rows.append([", ".join(f"`{name}`" for name in names), values, plain(str(after.value.value))])
    return table(["limit", "value", "of"], rows)


def suites() -> str:
    """The suites that come with CARAML."""
    from caraml.suite.load import catalog_suites, load_suite

    return table(["suite", "title"], [[f"`{name}`", load_suite(name).suite.title] for name in catalog_suites()])


# -- commands ----------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every verb with its arguments and options."""
    from caraml.__main__ import verbs

    return "\n\n".join(_verbs(typer.main.get_command(verbs()), "caraml"))


def _verbs(command: Any, path: str) -> Iterator[str]:
    if getattr(command, "commands", None):
        for name, inner in command.commands.items():
            yield from _verbs(inner, f"{path} {name}")
        return
    if path == "caraml power":
        from caraml.power.__main__ import PARSERS

        for word, make in PARSERS.items():
            yield _argparse(make(), " ".join([path, word]).strip())
        return
    context = typer.Context(command, info_name=path)
    rows = [record for one in command.get_params(context) if one.name != "help" and (record := one.get_help_record(context))]
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"## {path}", plain(command.help), f"    {usage}"]
    if rows:
        parts.append(table(["argument or option", "meaning"], [[f"`{name}`", text] for name, text in rows]))
    yield "\n\n".join(parts)


def _argparse(parser: argparse.ArgumentParser, path: str) -> str:
    rows = []
    for action in parser._actions:
        if action.dest == "help":
            continue
        words = ", ".join(action.option_strings) or action.dest.upper()
        value = f" {action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
        rows.append([f"`{words}{value}`", action.help or ""])
    usage = " ".join(parser.format_usage().split()).removeprefix(f"usage: {parser.prog}").strip()
    parts = [f"## {path}", parser.description or "", f"    {path} {usage}".rstrip()]
    return "\n\n".join([*parts, *([table(["argument or option", "meaning"], rows)] if rows else [])])


def _suite_keys() -> str:
    from caraml.suite.load import Suite

    return keys(Suite)


def _measure() -> str:
    from caraml.suite.model import Policy

    return keys(Policy)


def devices() -> str:
    """What was tested on which family of accelerators."""
    sys.path.insert(0, str(Path(__file__).parent))
    import devices_table

    return table(devices_table.head(), devices_table.rows())


_OF_RECORDS = ("Record", "Metric", "OwnMetric", "Window", "Phase", "Facts", "Peak", "Bandwidth", "Fingerprint", "Profile", "Costly")
TABLES: dict[str, Callable[[], str]] = {
    "benchmark": benchmark,
    "commands": commands,
    "devices": devices,
    "exit-codes": exit_codes,
    "flags": flags,
    "limits": limits,
    "measure": _measure,
    "metrics": metrics,
    "power-flags": power_flags,
    "record": lambda: models("caraml.results.record", *_OF_RECORDS),
    "site": lambda: models("caraml.system.model", "Scheduler", "Network", "Container", "Software"),
    "statuses": statuses,
    "suite": _suite_keys,
    "suites": suites,
    "system": lambda: models("caraml.system.model", "System", "DeviceModel", "Cpu", "Link", "Affinity", "Figure"),
    "variables": variables,
    "workloads": workloads,
}

if __name__ == "__main__":
    print(TABLES[sys.argv[1]]())
