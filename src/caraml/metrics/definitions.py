"""All metrics by name, as tables, the HTML page, ``caraml show`` and the docs take them, so that a number reads the same everywhere."""

from __future__ import annotations

from caraml.metrics import energy, epochs, quality, roofline, run, window
from caraml.metrics.model import MetricDefinition

METRICS: dict[str, MetricDefinition] = {
    **window.DEFINITIONS,
    **roofline.DEFINITIONS,
    **energy.DEFINITIONS,
    **run.DEFINITIONS,
    **epochs.DEFINITIONS,
    **quality.DEFINITIONS,
}


def unit_of(metric: str, item: str = "item") -> str:
    """Unit of a metric for a workload that counts ``item``."""
    return METRICS[metric].unit.format(item=item)


def title_of(metric: str, item: str = "item") -> str:
    """Heading of a metric for a workload that counts ``item``; the name itself of one that only a newer CARAML knows."""
    return METRICS[metric].title.format(item=item) if metric in METRICS else metric
