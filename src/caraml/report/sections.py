"""Which figures a page or an export has, in which order, and why one is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from caraml.analysis.raw import Steps, raw_file, read_power, read_steps
from caraml.errors import InputError
from caraml.report import charts, energies, heat, rooflines, runtimes, scalings, sweeps
from caraml.report.explain import energy_reason
from caraml.report.figure import Figure
from caraml.report.groups import MOST_SERIES
from caraml.report.labels import labels
from caraml.results.record import Record
from caraml.results.store import Store

MOST_TRACES = 6
"""Points whose power is a figure of its own; of any other, the page draws it on demand."""
MOST_NAMED = 8
"""Points that a note names."""


@dataclass(frozen=True)
class Section:
    """Figures under one heading, or the reason why there are none."""

    id: str
    title: str
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)


def sections(store: Store, records: Sequence[Record]) -> list[Section]:
    """All figures that the records allow."""
    steps, faults = _read_steps(store, records)
    rates, more_rates = sweeps.over_batch(records)
    maps, more_maps = heat.heat_maps(records)
    roofs, more_roofs = rooflines.rooflines(records)
    growth, more_growth = scalings.efficiencies(records)
    nothing = [] if steps or faults else ["No step tables: nothing was measured."]
    times = [
        *runtimes.split(records),
        *(charts.phases(records) if len(records) <= charts.MOST_PHASES else []),
        *runtimes.epochs(records),
        *charts.step_distributions(records, steps),
        *charts.over_steps(charts.STEP_TIME, records, steps),
    ]
    losses = charts.over_steps(charts.LOSS, records, steps)
    no_loss = [] if losses or nothing else ["No losses: nothing was trained."]
    energy = [*energies.time_and_energy(records), *energies.node_and_devices(records), *energies.action(records)]
    found = [
        Section("throughput", "Rate and batch", rates, more_rates if rates else ["No point has a throughput."]),
        Section("maps", "Machines and batches", maps, more_maps),
        Section("limits", "Distance to the limit", roofs, more_roofs),
        Section("energy", "Time and energy", energy),
        Section("scaling", "Scaling", [*growth, *scalings.matrices(records)], more_growth),
        Section("times", "Where the time went", times, faults + nothing),
        Section("loss", "Training loss", losses, no_loss + nothing),
        _power(store, records),
        Section("history", "Results over time", *scalings.histories(store.root, records)),
    ]
    return [section for section in found if section.figures or section.notes]


def _read_steps(store: Store, records: Sequence[Record]) -> tuple[dict[str, Steps], list[str]]:
    """The steps of the records that figures draw, and what could not be read: a broken file costs its lines, not the page."""
    steps: dict[str, Steps] = {}
    faults = []
    drawn: dict[str, int] = {}
    for record in records:
        path = raw_file(store, record, "steps")
        if path is None or drawn.get(record.point.benchmark, 0) >= MOST_SERIES:
            continue
        try:
            steps[record.key] = read_steps(path)
        except InputError as error:
            faults.append(relative(store, error))
            continue
        drawn[record.point.benchmark] = drawn.get(record.point.benchmark, 0) + 1
    return steps, faults


def _power(store: Store, records: Sequence[Record]) -> Section:
    named = labels(records)
    figures: list[Figure] = []
    notes = []
    with_power = [record for record in records if raw_file(store, record, "power") is not None]
    for record in with_power[:MOST_TRACES]:
        path = raw_file(store, record, "power")
        assert path is not None
        try:
            figure = charts.power(record, named[record.key], read_power(path))
        except InputError as error:
            notes.append(relative(store, error))
            continue
        figures += [figure] if figure is not None else []
    if len(with_power) > MOST_TRACES:
        notes.append(f"The first {MOST_TRACES} of {len(with_power)} points; choose any point under One point in full to see its power.")
    silent = [named[record.key] for record in records if energy_reason(record) is not None]
    if silent:
        more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
        notes.append(f"No energy for {', '.join(silent[:MOST_NAMED])}{more}; the reason stands below the table of results.")
    elif not with_power:
        notes.append("No power was recorded.")
    return Section("power", "Power", figures, notes)


def relative(store: Store, error: InputError) -> str:
    """An error without the folder of this machine."""
    return str(error).replace(f"{store.root}/", "")
