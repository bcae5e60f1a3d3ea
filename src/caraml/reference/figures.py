"""Published figures as data, and the experiments of the tables that each of them shows.

``data/figures.toml`` says of every figure which tables it takes, how their runs are grouped and what is drawn of them, by formulas in the
language of suites' conditions. Formulas and conditions see the fields of an experiment: those of its rows, their parameters, and its
numbers by metric, in our units.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

from pydantic import Field

from caraml.base.errors import InputError
from caraml.base.toml import FrozenModel
from caraml.reference import Reference, load
from caraml.suite.expression import Formula
from caraml.suite.model import WORKLOAD_ALIASES

T = TypeVar("T")
APPLICATIONS = {workload: alias.upper() for alias, workload in WORKLOAD_ALIASES.items()}
"""MAELSTROM's names of its applications."""
_FLAGS = {"": "cached", "-nocache": "no cache", "-dl_test -nocache": "loading alone"}
"""What AP3's flags in the tables mean."""


class Panel(FrozenModel):
    """One pair of axes of a figure."""

    axis: str = Field(description="title of the axis of values, with its unit")
    unit: str = ""
    values: dict[str, str] = Field(description="what is drawn: a formula over a published experiment for each name")
    own: dict[str, str] = Field({}, description="the same over a result of the user, where it is another formula")
    log: bool = False
    x: str = Field("", description="formula of the horizontal axis, where it is not the figure's")
    x_axis: str = ""


class PublishedFigure(FrozenModel):
    """A figure of a source that its tables allow to draw."""

    source: str
    name: str = Field(description="`Figure 27`, or what else the source calls it")
    title: str
    section: str = Field(description="heading of the gallery")
    command: str = Field(description="what measures the same")
    tables: list[str]
    where: str = Field("", description="condition on the runs of the tables")
    form: Literal["dots", "bars", "lines", "cells", "ratios"] = Field(description="how it is drawn")
    row: str = Field("{system}", description="name of a row, or of a line")
    series: str = Field("", description="name of a series in a row, where there is more than one")
    repeats: Literal["each", "mean", "median"] = Field("each", description="what stands for runs of one row, series and number of devices")
    least: str = Field("", description="formula: of several numbers of devices, the one where it is least is shown")
    x: str = Field("", description="formula of the horizontal axis of lines, and of the columns of cells")
    x_axis: str = ""
    x_own: str = Field("", description="the same of the user's results")
    panels: list[Panel]
    own: str = Field("", description="condition on the user's results; absent: those of the same workloads and modes")
    any_devices: bool = Field(False, description="it is over the number of devices, so the user's may be on any; otherwise on as many only")
    along: list[str] = Field(["batch"], description="in what the user's results along one line differ")
    note: str
    table_batches: dict[str, dict[str, int]] = Field({}, description="table, run: the batch of its device where the heading is wrong")


@dataclass(frozen=True)
class Experiment:
    """One run of a table, repeats of it, or a result of the user: its fields and numbers by name."""

    fields: Mapping[str, Any]
    notes: tuple[tuple[str, str], ...] = ()
    """What is wrong with its printed numbers: metric and sentence."""

    def number(self, formula: str) -> float | None:
        """What a formula is worth here; ``None`` where a number that it needs is not known."""
        try:
            value = _parsed(formula).value(self.fields)
        except InputError:
            return None
        return None if value is None or isinstance(value, str) else float(value)

    def holds(self, condition: str) -> bool:
        """Whether a condition is true; one on something that is not known here is not."""
        try:
            return not condition or _parsed(condition).holds(self.fields)
        except InputError:
            return False


_parsed = cache(Formula)


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("caraml.reference") / "data" / "figures.toml").read_text(encoding="utf-8"))


def has_published_size(workload: str, params: Mapping[str, Any]) -> bool:
    """Whether parameters make work of the size that the sources have; one that is ``None`` is left to the files, or as published."""
    wanted: dict[str, Any] = _data()["size"].get(workload, {})
    if params.get("folder") or params.get("data", "files") != "files":  # there are no look-alikes then
        wanted = {name: value for name, value in wanted.items() if name != "lookalike"}
    return all(name in params and params[name] in {value, None} for name, value in wanted.items())


@cache
def published_figures() -> tuple[PublishedFigure, ...]:
    """Every figure, in the order of the gallery. One that is ``like`` another has its keys, where it has none of its own."""
    whole: dict[str, dict[str, Any]] = {}
    for table in _data()["figure"]:
        found = {name: value for name, value in (whole.get(table.get("like", ""), {}) | table).items() if name != "like"}
        whole[f"{found['source']} {found['name']}"] = found
    return tuple(PublishedFigure.model_validate(found) for found in whole.values())


def own_names(panels: Iterable[Panel]) -> frozenset[str]:
    """Every name in a formula of some panels over results of the user: the numbers that are drawn of them."""
    return frozenset(name for panel in panels for text in (panel.values | panel.own).values() for name in _parsed(text).names)


@cache
def drawn_names() -> frozenset[str]:
    """Those of all figures."""
    return own_names(panel for figure in published_figures() for panel in figure.panels)


def experiments(figure: PublishedFigure) -> list[Experiment]:
    """The published experiments that a figure shows, in the order of its tables; integrals of power rather than counters."""
    found = [one for table in figure.tables for one in _runs(figure.source, table, tuple(figure.table_batches.get(table, {}).items()))]
    chosen = [one for one in found if one.holds(figure.where)]
    if figure.repeats != "each":
        chosen = _together(figure, chosen)
    if figure.least:
        chosen = [
            min(group, key=lambda one: one.number(figure.least) or float("inf"))
            for group in _grouped(chosen, lambda one: (figure.row.format_map(one.fields), figure.series.format_map(one.fields)))
        ]
    return chosen


@cache
def _runs(source: str, table: str, batches: tuple[tuple[str, int], ...]) -> list[Experiment]:
    found, batch_of, numbers = [], dict(batches), _tables().get((source, table), [])
    shown = [row for row in numbers if row.value is not None and row.system and row.parameters.get("method") != "counter"]
    # A text has no runs: what it says of one system belongs together.
    for rows in _grouped(shown, lambda row: (row.run, row.parameters.get("epoch")) if row.run else (row.system, row.devices)):
        first = rows[0]
        fields: dict[str, Any] = {**dict.fromkeys(_parameters(), ""), **first.parameters}
        fields |= {
            name: getattr(first, name) for name in ("source", "table", "run", "system", "device", "devices", "nodes", "workload", "mode")
        }
        fields |= {"app": APPLICATIONS.get(first.workload, first.workload), "flags": _FLAGS.get(fields["flags"], fields["flags"])}
        if str(first.run) in batch_of:
            fields["batch"] = batch_of[str(first.run)]
        for metric in dict.fromkeys(row.metric for row in rows):  # a text may state both ends of a range
            fields[metric] = statistics.fmean(row.value for row in rows if row.metric == metric and row.value is not None)
        if "node_mean_power" in fields:
            fields.setdefault("node_energy", fields["node_mean_power"] * fields.get("runtime", fields.get("training_time")))
        notes = tuple((row.metric, f"{table}, run {row.run}, {row.metric}: {row.note}") for row in rows if row.note)
        found.append(Experiment(fields, notes))
    return found


@cache
def _tables() -> dict[tuple[str, str], list[Reference]]:
    tables: dict[tuple[str, str], list[Reference]] = {}
    for row in load():
        tables.setdefault((row.source, row.table), []).append(row)
    return tables


@cache
def _parameters() -> frozenset[str]:
    return frozenset(name for row in load() for name in row.parameters)


def _together(figure: PublishedFigure, found: Sequence[Experiment]) -> list[Experiment]:
    """Repeats as one experiment, with the mean or median of each of their numbers."""
    middle = statistics.fmean if figure.repeats == "mean" else statistics.median
    merged = []
    for group in _grouped(found, lambda one: (*_place(figure, one), one.fields["devices"], one.fields["nodes"])):
        fields = dict(group[0].fields)
        for name in [name for name, value in fields.items() if isinstance(value, float)]:
            fields[name] = middle(float(one.fields[name]) for one in group if isinstance(one.fields.get(name), float))
        merged.append(Experiment(fields, tuple(note for one in group for note in one.notes)))
    return merged


def _place(figure: PublishedFigure, one: Experiment) -> tuple[object, ...]:
    names = figure.row.format_map(one.fields), figure.series.format_map(one.fields)
    return (*names, one.number(figure.x) if figure.x else None)


def _grouped(found: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    groups: dict[object, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())
