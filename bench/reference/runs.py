"""The runs of a published table as the gallery needs them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draw import Look

from caraml.reference import Reference, select

WH = 3600.0
DEVICE = {"A2": 0, "A100": 1, "H100 PCIe": 2, "MI250 GCD": 3, "GH200": 4, "GC200": 5, "V100": 6}
"""Number of the colour and marker of each device, the same in every drawing."""
APPS = {
    "AP1": "temperature_postprocessing",
    "AP2": "tweet_rain_classification",
    "AP3": "radiation_emulation",
    "AP4": "ensemble_postprocessing",
    "AP5": "downscaling_gan",
    "AP6": "regime_clustering",
}


@dataclass(frozen=True)
class Run:
    """One run of a table: what it ran on, and its numbers by metric, in our units."""

    system: str
    device: str
    devices: int
    workload: str
    parameters: Mapping[str, str | int | float]
    numbers: Mapping[str, float]


def runs(table: str | int, source: str = "maelstrom") -> list[Run]:
    """The runs of a table in their order; integrals of power rather than counters."""
    found: dict[int, list[Reference]] = {}
    for row in select(source=source, table=str(table)):
        if row.value is not None and row.parameters.get("method") != "counter" and row.run:
            found.setdefault(row.run, []).append(row)
    return [
        Run(
            group[0].system,
            group[0].device,
            group[0].devices or 1,
            group[0].workload,
            group[0].parameters,
            {row.metric: row.value for row in group if row.value},
        )
        for group in found.values()
    ]


def mean(of: Sequence[Run], metric: str) -> float | None:
    """Mean of a metric over runs; ``None`` where none has it."""
    values = [run.numbers[metric] for run in of if metric in run.numbers]
    return statistics.fmean(values) if values else None


def look(device: str, hollow: bool = False) -> Look:
    """A device's colour and marker."""
    return Look(DEVICE[device], DEVICE[device] % 5, hollow)
