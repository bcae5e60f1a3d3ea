"""Results over several records as sections: of `caraml compare`, `scaling`, `history` and `advise`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from caraml.analysis.advise import Advice, Best, Choice, by_boundary, differs
from caraml.analysis.compare import UNDIRECTED, Change, Comparison, Gate
from caraml.analysis.estimate import Estimate
from caraml.analysis.grouping import Difference
from caraml.analysis.history import Series
from caraml.analysis.laws import SMALLEST_SHARE, EfficiencyLimit, Law
from caraml.analysis.run_variation import INTERVAL
from caraml.analysis.scaling import OTHER_BOUNDARIES, Cell, Curve, ScalingFamily, StepView
from caraml.base.format import count, prefixed, significant
from caraml.metrics.model import Metric, title_of
from caraml.report.numbers import at_most, written
from caraml.report.section import Section

_LARGEST = 1e6
"""Per cent, and devices, beyond which a number says no more than that it is large."""
VERDICTS = ("worse", "better", "same", "unknown", "indistinguishable")


def estimated(estimate: Estimate | None, unit: str) -> str:
    """An estimate with its interval, or ``± ?``; ``–`` if unknown."""
    if estimate is None:
        return "–"
    bound = estimate.value * math.expm1(estimate.bound) or None
    # As a rate is written: it may be anything that varies from run to run.
    metric = Metric(value=estimate.value, unit=unit, low=estimate.low, high=estimate.high)
    return written("throughput", metric) + at_most("throughput", metric.model_copy(update={"bound": bound}))


def change(ratio: Estimate | None) -> str:
    """A ratio as the change that it is: ``+3.2 % (+1.1 to +5.4)``."""
    if ratio is None:
        return "–"
    bound = f", ± at most {significant(100 * math.expm1(ratio.bound), 2)} %" if ratio.bound else ""
    if ratio.low is None or ratio.high is None:
        return f"{_percent(ratio.value)} ± ? %{bound}"
    return f"{_percent(ratio.value)} % ({_percent(ratio.low)} to {_percent(ratio.high)}){bound}"


def _percent(ratio: float) -> str:
    value = 100 * (ratio - 1)
    return f"{value:+.1f}" if abs(value) < 99.95 else f"{value:+.0f}" if value < _LARGEST else f"{value:+.1e}"


# -- compare -----------------------------------------------------------------------------------------------------------


def comparison_sections(comparison: Comparison, every: bool = False) -> list[Section]:
    """What differs, then every change; of many pairs only those with a verdict, unless ``every`` is asked for."""
    title = f"A: {comparison.a}   B: {comparison.b}"
    unknown = (f"stated of neither side, so it may differ: {', '.join(comparison.unknown)}",) if comparison.unknown else ()
    sections = [Section("", notes=(title,))]
    if comparison.pairs:
        sections = [_differences("What differs", comparison.differences, (title, *unknown))]
    local = [(pair.name, one) for pair in comparison.pairs for one in pair.differences]
    if local:
        found = tuple((name, one.name, one.a, one.b, one.why) for name, one in local[:_MOST])
        notes = (f"and {len(local) - _MOST} more",) if len(local) > _MOST else ()
        sections.append(Section("What differs in single pairs", ("pair", "what", "A", "B", "what it may do"), found, notes))
    everything = every or len(comparison.changes) <= _MOST
    hidden = 0
    for pair in comparison.pairs:
        shown = [one for one in pair.changes if everything or one.verdict in ("better", "worse")]
        hidden += len(pair.changes) - len(shown)
        rows = tuple(_change_cells(one, comparison.margin) for one in shown)
        if rows:
            runs = f"runs of A: {len(pair.keys[0])}, of B: {len(pair.keys[1])}"
            sections.append(Section(f"{pair.name} ({runs})", ("metric", "A", "B", "B against A", "shown from", "verdict"), rows))
    said = tuple(_change_notes(comparison, hidden)) if comparison.pairs else ("no work has a result of its own on both sides",)
    sections.append(Section("Verdict", notes=said))
    if comparison.lost or comparison.unmatched:
        missing = tuple((one.name, one.side, one.reason) for one in (*comparison.lost, *comparison.unmatched))
        sections.append(Section("No result on one side", ("work", "side", "why"), missing))
    return sections


_NAMED = 3
"""Metrics and runs of a published note that are named."""
_MOST = 40
"""Rows of a terminal table beyond which only those that matter are shown."""


def _differences(title: str, found: Sequence[Difference], notes: tuple[str, ...]) -> Section:
    rows = tuple((one.name, one.a, one.b, one.why) for one in found)
    return Section(title, ("what", "A", "B", "what it may do"), rows, notes if rows else (*notes, "nothing that is recorded"))


def _change_cells(one: Change, margin: float) -> tuple[str, ...]:
    smallest = "–" if one.smallest is None else f"±{significant(100 * one.smallest, 2)} %" if one.smallest < 10 else "nothing"
    verdict = f"same within {100 * margin:g} %" if one.verdict == "same" else one.verdict
    numbers = (estimated(one.a, one.unit), estimated(one.b, one.unit), change(one.ratio), smallest)
    return (title_of(one.metric), *numbers, verdict)


def _change_notes(comparison: Comparison, hidden: int) -> Iterable[str]:
    changes = [one for _, one in comparison.changes]
    counts = {verdict: sum(one.verdict == verdict for one in changes) for verdict in VERDICTS}
    yield ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    if hidden:
        yield f"not listed: {count(hidden, 'number')} without a better or worse; --all lists them"
    for reason in dict.fromkeys(one.reason for one in changes if one.reason):
        yield f"{reason}: {sum(one.reason == reason for one in changes)} of {len(changes)} numbers"
    if comparison.shared:
        yield f"not set against themselves: {count(comparison.shared, 'run')} that A and B have in common"
    if comparison.left_out:
        yield f"left out: {count(comparison.left_out, 'run')} that something disturbed, where others of the same work were not"
    for note in comparison.notes:
        of = [_some([title_of(metric) for metric in note.metrics], ", ", "number"), _some(note.places, "; ", "run")]
        yield f"{' of '.join(of)}: {note.note}"
    yield f"A and B: {INTERVAL}"
    for metric, sentence in comparison.variation:
        yield f"{title_of(metric)}, B against A: {sentence}"
    yield (
        f'{comparison.tests} tests, corrected together (Holm): if runs vary as said above, any false "worse" is at most 5 % likely. '
        'Intervals are of 95 %, each for itself. "Shown from": the smallest change that these runs show in 9 of 10 comparisons. '
        f'"Same": shown to differ by less than {100 * comparison.margin:g} % (two one-sided tests, 5 % each for itself)'
    )


def _some(found: Sequence[str], between: str, what: str) -> str:
    more = len(found) - _NAMED
    return between.join(found[:_NAMED]) + (f" and {count(more, f'other {what}')}" if more > 0 else "")


def gate_lines(gate: Gate, comparison: Comparison) -> tuple[list[str], bool]:
    """What ``--fail-if`` found, a line each, and whether the comparison fails."""
    what = f"worse by {100 * gate.least:g} % or more" if gate.least else "worse"
    failures = [f"failed: {pair.name}: {title_of(one.metric)} {change(one.ratio)}" for pair, one in gate.failures(comparison)]
    failures += [f"failed: no result in B: {text}" for text in gate.lost(comparison)]
    lines = failures or [f"passed: nothing is shown to be {what}"]
    blind = [one for _, one in gate.blind(comparison)]
    if blind:
        finite = [one.smallest for one in blind if one.smallest is not None]
        shown = f", at best {significant(100 * min(finite), 2)} % and more" if finite and gate.least else ""
        numbers = f"{len(blind)} of {len(comparison.changes)} numbers"
        lines.append(f"note: {numbers} could not have shown this with these runs{shown}; measure more repeats")
    return lines, bool(failures)


# -- scaling -----------------------------------------------------------------------------------------------------------


def scaling_sections(
    families: Sequence[ScalingFamily], cells: Sequence[tuple[str, Sequence[Cell]]], views: Sequence[StepView], missing: str = ""
) -> list[Section]:
    """Curves and laws of every family, the matrices of time and energy, and the single steps; ``missing``: what is left out."""
    sections = [_curve(family, curve) for family in families for curve in family.curves]
    sections += [Section("", (), (), (missing,))] if missing else []
    for title, found in cells:
        shown = tuple((cell.row, cell.column, cell.text, cell.reason or change(cell.ratio)) for cell in found)
        if shown:
            sections.append(Section(title, ("application", "device", "ratio, devices", "change"), shown))
    rows = tuple((view.name, str(len(view.batches)), *_elbow(view)) for view in views)
    if rows:
        note = "elbow: where the cumulative distribution is farthest above its chord; cost: what the steps beyond take more than the median"
        sections.append(Section("Single steps", ("record", "steps", "elbow", "at or below", "cost"), rows, (note,)))
    slow = tuple(row for view in views for row in _slow(view))
    if slow:
        note = "compared step by step; in synchronous training a rank's own delay is partly hidden, as all wait for it"
        sections.append(Section("Ranks", ("record", "rank", "behind the median rank", "slowest in", "waits for input", ""), slow, (note,)))
    return sections


def _curve(family: ScalingFamily, curve: Curve) -> Section:
    unit = {"training": f"{family.records[0].item}/s", "median batch": "sample/s", "epoch": "epoch/s"}[curve.basis]
    with_flops = any(size.flops is not None for size in curve.sizes)
    rows = tuple(
        (
            str(size.world),
            str(size.nodes),
            str(size.global_batch),
            str(len(size.keys)),
            estimated(size.mean, unit),
            *([written("throughput", size.flops)] if with_flops else []),
            estimated(size.speed_up, "1"),
            estimated(size.efficiency, "1"),
        )
        for size in curve.sizes
    )
    notes = [law_text(law) for law in curve.laws]
    notes += [f"rests on flagged runs: {_flagged(family.rests_on)}"] if family.rests_on else []
    notes += [f"rate: {INTERVAL}", f"speed-up, efficiency and laws: {curve.variation}"]
    flops = ["FLOP/s per device"] if with_flops else []
    columns = ("devices", "nodes", "global batch", "runs", "rate", *flops, "speed-up", "efficiency")
    return Section(f"{family.name}, by {curve.basis}", columns, rows, tuple(notes))


def law_text(law: Law) -> str:
    """A law with its interval, whether it fits, and where the efficiency falls."""
    known = law.serial_low is not None and law.serial_high is not None
    band = f" % ({_share(law.serial_low)} to {_share(law.serial_high)} %)" if known else " ± ? %"  # type: ignore[arg-type]
    fits = ", which does not describe these rates" if law.misfit is not None and law.misfit < 0.05 else ""
    return f"{law.name}: serial share {_share(law.serial)}{band}{fits}; {_limit(law.limit)}"


def _share(share: float) -> str:
    return significant(100 * share, 2) if share >= SMALLEST_SHARE else "0"


def _limit(limit: EfficiencyLimit) -> str:
    share = f"efficiency {100 * limit.efficiency:g} %"
    if limit.devices is None or limit.devices > _LARGEST:
        return f"{share} is never reached by this fit (extrapolated)"
    ends = ""
    if limit.low is not None:
        ends = f" (from {significant(limit.low, 2)}{_to(limit.high)})"
    extrapolated = ", extrapolated beyond what was measured" if limit.extrapolated else ""
    return f"below {share} beyond {significant(limit.devices, 2)} devices{ends}{extrapolated}"


def _to(devices: float | None) -> str:
    return " on" if devices is None or devices > _LARGEST else f" to {significant(devices, 2)}"


def _elbow(view: StepView) -> tuple[str, str, str]:
    found = view.elbow
    if found is None:
        return "none", "", ""
    factor, unit = prefixed(found.seconds, "s")
    return f"{significant(found.seconds / factor)} {unit}", f"{100 * found.share:.0f} %", f"{100 * found.cost:.1f} %"


def _slow(view: StepView) -> Iterable[tuple[str, ...]]:
    for one in view.ranks[:_SLOWEST]:
        behind = f"{100 * one.excess:+.2f} % ({100 * one.low:+.2f} to {100 * one.high:+.2f})"
        yield view.name, str(one.rank), behind, f"{100 * one.slowest:.0f} % of steps", f"{100 * one.wait:.1f} %", "slow" if one.slow else ""


_SLOWEST = 3
"""Ranks of one record that are listed."""


# -- history -----------------------------------------------------------------------------------------------------------


def history_sections(series: Sequence[Series], dropped: int = 0) -> list[Section]:
    """A row for each level of each series, and what changed between levels; ``dropped``: results that are not above zero."""
    metric = title_of(series[0].metric)
    rows = tuple(row for one in series for row in _levels(one))
    short = sum(one.note is not None for one in series)
    notes = [f"{short} of {len(series)} series have fewer results, or times, than a change needs"] if short else []
    notes += [f"left out: {count(dropped, 'result')} not above zero, as levels are compared by their ratio"] if dropped else []
    notes += list(dict.fromkeys(UNDIRECTED[one.better] for one in series if one.better in UNDIRECTED))
    notes += [INTERVAL, "changes are between the medians of the stretches"]
    found = [Section(f"{metric} over time", ("work", "device", "from, to", "runs", "mean", "change", ""), rows, tuple(notes))]
    changes = tuple(text for one in series for text in _changes(one))
    alone = tuple(
        f"{one.name}: the newest result is {_percent(one.newest)} % off its level; one is no change, so measure it again"
        for one in series
        if one.newest is not None
    )
    return [*found, Section("Changes", (), (), (*(changes or ("none beyond chance",)), *alone))]


def _levels(one: Series) -> Iterable[tuple[str, ...]]:
    for number, (begin, end, _) in enumerate(one.levels()):
        found = one.changes[number - 1] if number else None
        what = "" if found is None else f"{_percent(found.ratio)} %"
        verdict = "" if found is None or found.better is None else "better" if found.better else "worse"
        span = f"{one.values[begin].time:%Y-%m-%d %H:%M} to {one.values[end].time:%Y-%m-%d %H:%M}"
        name = ("", "") if number else (one.name, one.records[0].point.device)
        yield *name, span, str(end - begin + 1), estimated(one.mean(begin, end), one.unit), what, verdict


def _changes(one: Series) -> Iterable[str]:
    for found in one.changes:
        says = "; ".join(f"{what.name}: {what.a} → {what.b}" for what in found.changed[: _MOST // 4])
        provisional = ", provisional: few results" if found.provisional else ""
        when = f"{one.values[found.index].time:%Y-%m-%d %H:%M}"
        yield f"{when} {one.name} {_percent(found.ratio)} %{provisional}. Changed with it: {says or 'nothing that is recorded'}"


# -- advise ------------------------------------------------------------------------------------------------------------


def advice_sections(advice: Sequence[Advice]) -> list[Section]:
    """Choices, and what follows from them, for each work."""
    return [section for one in advice for section in _advice(one)]


def _advice(one: Advice) -> Iterable[Section]:
    ranked = sorted(one.choices, key=lambda choice: choice.time.value)
    parts = by_boundary(one.choices)
    rows = tuple(_choice(choice, choice in one.front, len(parts) > 1) for choice in ranked)
    columns = ("choice", "runs", "rate", "energy", "bound by", "Pareto")
    yield Section(f"{one.name} on {one.device}", columns, rows, (INTERVAL, f"what tells choices apart: {one.variation}"))
    notes = []
    if one.rests_on:
        notes.append(f"rests on flagged runs, and may change when they are measured again: {_flagged(one.rests_on)}")
    if one.left_out:
        notes.append(f"left out, because something disturbed every run: {_flagged(one.left_out)}; measured again they count")
    notes += [one.unstated] if one.unstated else []
    notes += [_best(best, one) for best in one.best]
    if len(parts) > 1:
        listed = "; ".join(f"{part[0].boundary}: {', '.join(choice.name for choice in part)}" for part in parts)
        notes.append(f"{OTHER_BOUNDARIES} are not compared: {listed}")
    others = any(best.goal == "energy" for best in one.best)
    notes += [one.no_energy if others else f"no advice for energy: {one.no_energy}"] if one.no_energy else []
    for found in one.saturation:
        where = f"batch {found.batch}" if found.low == found.high else f"batch {found.batch} (between {found.low} and {found.high})"
        growing = "; the rate still grew at the largest batch" if found.batch == found.largest else ""
        growing = growing if found.falls is None else f"; with batch {found.falls} it is below that again"
        notes.append(
            f"{found.name}: the rate is within {100 * found.within:g} % of the best (batch {found.best_batch}) from {where} on{growing}"
        )
    for step in one.steps:
        cost = f"{change(step.energy)} energy" if step.energy is not None else f"{change(step.device_time)} device time"
        told = "" if differs(step.time) else "; whether it is faster these runs cannot tell"
        notes.append(f"{step.name}: beyond {count(step.before, 'device')}, {step.after} cost {cost} for {change(step.time)} time{told}")
    notes += [f"{name}: {reason}" for name, reason in one.failed]
    fastest = one.best[0].choice if one.best else one.choices[0]
    notes.append(f"{fastest.name}: {fastest.bottleneck.sentence}")
    yield Section("", (), (), tuple(notes))


def _choice(choice: Choice, on_front: bool, apart: bool) -> tuple[str, ...]:
    """``apart``: energies with their boundary, as it differs."""
    boundary = f" ({choice.boundary})" if apart and choice.boundary else ""
    numbers = written("throughput", choice.rate), written("energy_per_item", choice.joules) + boundary
    return choice.name, str(len(choice.keys)), *numbers, choice.bottleneck.by or "–", "yes" if on_front else ""


def _flagged(found: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    return "; ".join(f"{name}: {', '.join(flags)}" for name, flags in found)


def _best(best: Best, advice: Advice) -> str:
    goal = f"{best.goal} ({best.choice.boundary})" if best.goal != "time" and len(by_boundary(advice.choices)) > 1 else best.goal
    if best.ties:
        names = [best.choice.name, *(choice.name for choice in best.ties)]
        listed = ", ".join(names[:_TIES]) + (f" and {len(names) - _TIES} more" if len(names) > _TIES else "")
        return f"best for {goal}: indistinguishable: {listed}; more repeats may tell them apart"
    lead = "" if best.lead is None else f"; the next costs {change(best.lead)}"
    return f"best for {goal}: {best.choice.name}{lead}{_picked(best, advice)}"


def _picked(best: Best, advice: Advice) -> str:
    """The best of many is also the luckiest: what to expect of it, by an interval that holds for all choices at once."""
    if best.goal != "time":
        return ""
    rate, alone = best.choice.time.inverse().for_all_of(len(advice.choices)), best.choice.rate
    picked = f"; picked as the best of {len(advice.choices)}:"
    if alone is not None and alone.low is not None and rate.low is not None and alone.low < rate.low:  # for what sessions do to all
        return f"{picked} {written('throughput', alone)} by its own runs"
    return f"{picked} {estimated(rate, f'{advice.item}/s')} by an interval that holds for all at once"


_TIES = 6
