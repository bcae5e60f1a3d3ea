"""All metrics by name, as tables, the HTML page, ``caraml show`` and the docs take them, so that a number reads the same everywhere.

Those that only a program or a plug-in has are defined by the records that have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from caraml.base.errors import unknown_name
from caraml.metrics import energy, quality, roofline, run, window
from caraml.metrics.model import DescribedRun, MetricDefinition, OwnMetric, StatedMetric

METRICS: dict[str, MetricDefinition] = {
    **window.DEFINITIONS,
    **roofline.DEFINITIONS,
    **energy.DEFINITIONS,
    **run.DEFINITIONS,
    **quality.DEFINITIONS,
}
_BETTER = {
    "higher": "Higher is better.",
    "lower": "Lower is better.",
    "neither": "Neither direction is better.",
    "unknown": "Direction unknown: nobody said which is better, or not everybody the same.",
}


def unit_of(metric: str, item: str = "item") -> str:
    """Unit of a metric for a workload that counts ``item``."""
    return METRICS[metric].unit.format(item=item)


def title_of(metric: str, item: str = "item") -> str:
    """Heading of a metric for a workload that counts ``item``; the name itself of one that CARAML does not define."""
    return METRICS[metric].title.format(item=item) if metric in METRICS else metric


def definition_of(name: str, records: Iterable[DescribedRun]) -> MetricDefinition:
    """What a metric's name means: in CARAML, else as the records say that have it. Where these contradict each other, its unit names
    all units, and its direction is unknown."""
    if name in METRICS:
        return METRICS[name]
    having = [record for record in records if name in record.metrics]
    said = [record.definitions[name] for record in having if name in record.definitions]
    units = list(dict.fromkeys(record.metrics[name].unit for record in having))
    directions = {one.better for one in said} - {"unknown"}
    better = directions.pop() if len(directions) == 1 else "unknown"
    words = [*dict.fromkeys(f"{one.definition.rstrip('.')}." for one in said if one.definition), _BETTER[better]]
    words += [f"It has different units, and only numbers of one unit are averaged or compared: {', '.join(units)}."] * (len(units) > 1)
    words = words if said or len(units) > 1 else ["This version of CARAML has no definition of this metric, and neither has the record."]
    source = " or ".join(dict.fromkeys(one.source for one in said)) or "not described"
    return MetricDefinition(name, " or ".join(units), better, " ".join(words), source)


def own_names(records: Iterable[DescribedRun]) -> list[str]:
    """Metrics of the records that CARAML does not define."""
    return list(dict.fromkeys(name for record in records for name in record.metrics if name not in METRICS))


def see_known(name: str, records: Iterable[DescribedRun]) -> None:
    """Raise ``InputError``, with the nearest spelling, for a metric that neither CARAML nor one of the records has."""
    if name not in METRICS and name not in (own := own_names(records)):
        raise unknown_name("metric", name, [*METRICS, *own])


def own_definitions(stated: Mapping[str, StatedMetric], source: str) -> dict[str, OwnMetric]:
    """What a record keeps of the metrics that CARAML does not define."""
    own = {name: one for name, one in stated.items() if name not in METRICS}
    return {name: OwnMetric(unit=one.unit, better=one.better, definition=one.definition, source=source) for name, one in own.items()}


def check_stated(stated: Mapping[str, StatedMetric], item: str = "item") -> None:
    """Raise ``ValueError`` for a name that is none, and for one of CARAML's own metrics with another unit, direction or definition."""
    for name, one in stated.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"names of small letters, digits and underscores, but found {name!r}")
        if name not in METRICS:
            continue
        if one.unit != unit_of(name, item):
            raise ValueError(f"unit {unit_of(name, item)!r} for the metric {name!r}, but found {one.unit!r}")
        if one.better not in ("unknown", METRICS[name].better) or one.definition:
            raise ValueError(f"another name: {name!r} is CARAML's {METRICS[name].title!r}, of which {METRICS[name].better} is better")
