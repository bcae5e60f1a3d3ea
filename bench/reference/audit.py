"""What the sources say against what follows from their own numbers.

A check compares one printed number with one computed from other printed numbers. Every number counts as all values that round to its
digits, and two numbers disagree only if no such values fit. Where a source does not say over which window a number was taken, the rule
has a tolerance, which its name states.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from claims import claims
from spans import Span, exact, printed_span, span_of

from caraml.base.format import significant
from caraml.reference import Reference, load

Relation = Literal["is", "at most", "at least", "unlike"]


@dataclass(frozen=True)
class Check:
    """One comparison."""

    printed: Reference
    rule: str
    expected: Span
    """In the unit of ``printed``."""
    relation: Relation = "is"
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the source agrees with itself."""
        span = span_of(self.printed)
        if self.relation == "at most":
            return span.low <= self.expected.high * (1 + self.tolerance)
        if self.relation == "at least":
            return span.high >= self.expected.low * (1 - self.tolerance)
        return self.relation == "is" and span.overlaps(self.expected, self.tolerance)

    @property
    def difference(self) -> float:
        """Relative distance of the printed number from the recomputed one."""
        return span_of(self.printed).middle / self.expected.middle - 1 if self.expected.middle else math.inf

    @property
    def recomputed(self) -> float:
        """The expected number in the printed unit."""
        value = self.printed.value
        return self.expected.middle * printed_span(self.printed.printed).middle / value if value else self.expected.middle


Experiment = Mapping[str, Reference]
"""The numbers of one run, by metric."""


def checks() -> Iterator[Check]:
    """Every comparison that the published numbers allow, in the order of sources, tables and rules."""
    rows = [row for row in load() if row.value is not None]
    runs: dict[tuple[str, str, int], list[Reference]] = {}
    for row in rows:
        runs.setdefault((row.source, row.table, row.run), []).append(row)
    for of_run in runs.values():
        experiment = {row.metric: row for row in reversed(of_run) if row.parameters.get("method") != "counter"}
        if of_run[0].run:
            for rule in RULES:
                yield from rule(experiment)
    yield from _actions(rows)
    yield from _copies(rows)
    for printed, text, readings, tolerance in claims(rows):
        fitting = [one for one in readings if span_of(printed).overlaps(one, tolerance)]
        yield Check(printed, text, (fitting or list(readings))[0], "is", tolerance)


def disagreements() -> list[Check]:
    """The comparisons that fail."""
    return [check for check in checks() if not check.holds]


AT_MOST = [
    ("training_time", "runtime"),
    ("epoch_time_min", "epoch_time_mean"),
    ("epoch_time_mean", "epoch_time_max"),
    ("epoch_time_min", "epoch_time_first"),
    ("epoch_time_first", "epoch_time_max"),
    ("step_time_mean", "step_time_max"),
    ("mean_device_power", "max_device_power"),
    ("max_device_power", "max_aggregate_power"),
    ("aggregate_power", "max_aggregate_power"),
    ("node_mean_power", "node_max_power"),
    ("node_mean_power", "node_mean_apparent_power"),
]
"""The first of two metrics cannot exceed the second."""


def _bounds(e: Experiment) -> Iterator[Check]:
    for small, large in AT_MOST:
        if small in e and large in e:
            yield Check(e[small], f"at most {large}", span_of(e[large]), "at most")
    if {"max_aggregate_power", "max_device_power"} <= e.keys():
        devices = e["max_device_power"].devices or 1
        yield Check(e["max_aggregate_power"], "at most max_device_power x devices", span_of(e["max_device_power"]) * devices, "at most")


def _energy(e: Experiment) -> Iterator[Check]:
    if {"device_energy", "aggregate_power", "runtime"} <= e.keys():
        window = span_of(e["aggregate_power"]) * span_of(e["runtime"])
        yield Check(e["device_energy"], "aggregate_power x runtime, within 5 %", window, tolerance=0.05)
    if {"device_energy", "mean_device_power", "runtime"} <= e.keys():
        devices = e["mean_device_power"].devices or 1
        yield Check(
            e["device_energy"], "mean_device_power x devices x runtime", span_of(e["mean_device_power"]) * span_of(e["runtime"]) * devices
        )
    if {"node_energy", "node_mean_power", "runtime"} <= e.keys():
        nodes = e["node_energy"].nodes or 1
        yield Check(e["node_energy"], "node_mean_power x nodes x runtime", span_of(e["node_mean_power"]) * span_of(e["runtime"]) * nodes)
    if {"action", "node_energy", "runtime"} <= e.keys():
        yield Check(e["action"], "node_energy x runtime", span_of(e["node_energy"]) * span_of(e["runtime"]))
    if {"node_apparent_energy", "node_mean_apparent_power", "runtime"} <= e.keys():
        hours = span_of(e["node_mean_apparent_power"]) * span_of(e["runtime"]) / 3600
        yield Check(e["node_apparent_energy"], "node_mean_apparent_power x runtime", hours)


MIB = 2**20
BATCHES = {
    "temperature_postprocessing": (3, 89208 // 32),
    "radiation_emulation": (5, 2984960 // 512),
    "ensemble_postprocessing": (3, 1889),
    "downscaling_gan": (4, 96296 // 32),
}
"""Epochs of the full benchmarks, and batches of one epoch over all devices: training samples over batch size."""


def _steps(e: Experiment) -> Iterator[Check]:
    """AP1 and AP3 divide the runtime by all batches; AP4 and AP5 the epoch by the batches of one device."""
    row = e.get("runtime_per_batch", e.get("step_time_mean"))
    if row is None or row.workload not in BATCHES:
        return
    epochs, batches = BATCHES[row.workload]
    if row.metric == "runtime_per_batch":
        yield Check(row, "runtime over batches of all epochs and devices", span_of(e["runtime"]) / (epochs * batches))
    else:
        yield Check(row, "epoch_time_mean over batches of a device", span_of(e["epoch_time_mean"]) / (batches // (row.devices or 1)))


def _epochs(e: Experiment) -> Iterator[Check]:
    mean, training = e.get("epoch_time_mean"), e.get("training_time")
    if mean is None or training is None or mean.mode not in ("train", "data"):
        return
    if mean.workload == "ensemble_postprocessing":
        yield Check(mean, "training_time / 3 epochs", span_of(training) / 3)
        yield Check(e["training_time_less_loading"], "training_time - loading_time", span_of(training) - span_of(e["loading_time"]))
    elif mean.workload == "regime_clustering":
        yield Check(mean, "training_time / epochs, within 50 %", span_of(training) / (50 if mean.system == "e4-a2" else 20), tolerance=0.5)
    elif mean.workload in BATCHES:
        yield Check(mean, "training_time / epochs, within 50 %", span_of(training) / BATCHES[mean.workload][0], tolerance=0.5)
    if mean.workload == "temperature_postprocessing":
        yield Check(e["input_bandwidth"], "329.83 GB over epoch_time_mean", printed_span("329.83") * 2**30 / span_of(mean))


def _batches(e: Experiment) -> Iterator[Check]:
    """AP3 without input: the batch over all devices, data per second in the best epoch, and whether an epoch is the whole data set."""
    rate, whole = e.get("input_bandwidth"), e.get("effective_batch_bytes")
    if rate is None or whole is None:
        return
    facts = {name: whole.parameters[name] for name in ("steps_per_execution", "batch_mb", "effective_batch_mb")}
    devices = float(whole.parameters.get("devices_printed", whole.devices or 1))
    yield Check(whole, "batch size x #GPUs (IPU: #Replicas)", printed_span(f"{facts['batch_mb']:.2f}") * (MIB * devices))
    epoch = exact(float(facts["steps_per_execution"]) * float(facts["effective_batch_mb"]) * MIB)
    yield Check(rate, "steps x effective batch over epoch_time_min, within 20 %", epoch / span_of(e["epoch_time_min"]), tolerance=0.2)
    data = exact(float(whole.parameters["dataset_mb"]) * MIB)
    yield Check(e["epoch_time_min"], "data set over rate, within 5 %", data / span_of(rate), tolerance=0.05)


def _ipu(e: Experiment) -> Iterator[Check]:
    row = e.get("items_per_watt_hour")
    if row is None or row.source != "caraml":
        return
    batch = float(row.parameters["batch"])
    if row.table == "IPU NLP":
        energy = e["epoch_energy_per_device"]
        yield Check(row, "batch over epoch_energy_per_device", exact(batch * 3600) / span_of(energy))
        most = exact(300 * 4 * batch) / span_of(e["throughput"])
        yield Check(energy, "at most 300 W x time of four batches", most, "at most")
    else:
        yield Check(row, "1281167 images over epoch_energy", exact(1281167 * 3600) / span_of(e["epoch_energy"]))
        yield Check(e["epoch_energy"], "at most 300 W x time of 1281167 images", exact(300 * 1281167) / span_of(e["throughput"]), "at most")


def _pearc(e: Experiment) -> Iterator[Check]:
    row = e.get("throughput")
    if row is None or row.source != "pearc":
        return
    if row.table == "Table 3":
        yield Check(e["training_time"], "one epoch of 1281167 images over throughput", exact(1281167) / span_of(row))
    if row.table == "Table 4":
        yield Check(row, "70000 images over epoch_time_second", exact(70000) / span_of(e["epoch_time_second"]))


RULES: Sequence[Callable[[Experiment], Iterator[Check]]] = (_bounds, _energy, _steps, _epochs, _batches, _ipu, _pearc)
"""What is checked within one run."""


def _actions(rows: Sequence[Reference]) -> Iterator[Check]:
    """Action of AP1 in Table 1: mean power of the node in Tables 10 and 11 times the square of the runtime."""
    found = {(row.table, row.run, row.metric): row for row in rows if row.source == "maelstrom"}
    for run in range(1, 7):
        table, column = ("Table 10", run) if run < 4 else ("Table 11", run - 3)
        runtime = span_of(found[table, column, "runtime"])
        action = span_of(found[table, column, "node_mean_power"]) * runtime * runtime
        yield Check(found["Table 1", run, "action"], f"node_mean_power x runtime² of {table}", action)


def _copies(rows: Sequence[Reference]) -> Iterator[Check]:
    """Rows that stand in two tables with the same digits; one of them is not what its table says."""
    seen: dict[tuple[str, ...], Reference] = {}
    series: dict[tuple[str, str, str], list[Reference]] = {}
    for row in rows:
        if row.source == "maelstrom" and row.table.startswith("Table") and row.metric != "effective_batch_bytes":
            series.setdefault((row.table, row.metric, str(row.parameters.get("method"))), []).append(row)
    for group in series.values():
        digits = tuple(row.printed for row in group)
        if len(set(digits)) < 3:
            continue
        first = seen.setdefault(digits, group[0])
        if first.table != group[0].table:
            yield Check(group[0], f"a row of {len(digits)} runs unlike {first.metric} of {first.table}", span_of(first), "unlike")


def audit_text(rows: Sequence[Reference]) -> str:
    """The disagreements about these rows, those of one rule together, and how many comparisons were made."""
    found = about(rows)
    failed = [check for check in found if not check.holds]
    lines = []
    for (source, table, metric, rule), group in groupby(failed, lambda c: (c.printed.source, c.printed.table, c.printed.metric, c.rule)):
        checked = list(group)
        about_it = f" ({checked[0].printed.note})" if table.startswith("text") and checked[0].printed.note else ""
        lines.append(f"{source} {table}: {metric}, expected: {rule}{about_it}")
        for check in checked:
            where = f"run {check.printed.run}" if check.printed.run else ""
            value, difference = _outcome(check)
            lines.append(f"    {where:<8}printed {check.printed.as_printed:<18} recomputed {value:<12} {difference}")
    return "\n".join([*lines, f"{len(found)} comparisons of printed with recomputed numbers; {len(failed)} disagree"])


def _outcome(check: Check) -> tuple[str, str]:
    sign = "+" if check.difference > 0 else "-"
    difference = "identical" if check.relation == "unlike" else f"{sign}{significant(abs(100 * check.difference), 2)} %"
    return significant(check.recomputed, 5), difference


def about(rows: Iterable[Reference]) -> list[Check]:
    """The comparisons whose printed number is one of these rows; those of one table and rule stand together."""
    wanted = set(map(id, rows))
    found = [check for check in checks() if id(check.printed) in wanted]
    order = {key: place for place, key in enumerate(dict.fromkeys((c.printed.source, c.printed.table, c.rule) for c in found))}
    return sorted(found, key=lambda c: order[c.printed.source, c.printed.table, c.rule])


def main() -> None:
    """Print the disagreements of all sources, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="*", help="caraml, maelstrom, pearc or epicure; all if absent")
    wanted = parser.parse_args().source
    print(audit_text([row for row in load() if not wanted or row.source in wanted]))


if __name__ == "__main__":
    main()
