"""Comparisons with a known truth: what pairs, what differs, what is said."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factory import broken_record, make_point
from run_factory import metric, repeats, run

from caraml.analysis.compare import ALPHA, FAMILIES, USUAL, Change, Comparison, compare, parse_gate
from caraml.analysis.estimate import POWER, is_known_kind, smallest_change
from caraml.analysis.grouping import axes, names
from caraml.base.errors import InputError, UnknownNameError
from caraml.metrics.model import METRICS, Metric, OwnMetric
from caraml.reference import Side
from caraml.report.comparison import comparison_sections
from caraml.results.record import Record
from caraml.suite.model import Placement

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "analysis"))
import verdicts


def against(a: list[Record], b: list[Record], *metrics: str) -> Comparison:
    return compare(Side("a", tuple(a)), Side("b", tuple(b)), metrics)


def only(found: Comparison, metric: str = "throughput") -> Change:
    return next(change for _, change in found.changes if change.metric == metric)


RATES = [1000.0, 1003.0, 998.0]
FASTER = [1100.0, 1097.0, 1103.0]


def test_a_clear_change_is_called_by_its_direction() -> None:
    new = {"software": "caraml 0.2"}
    slower, faster = only(against(repeats(FASTER), repeats(RATES, **new))), only(against(repeats(RATES), repeats(FASTER, **new)))
    assert (slower.verdict, faster.verdict) == ("worse", "better")
    assert slower.ratio is not None and slower.ratio.value == pytest.approx(0.9094, abs=1e-3)
    assert slower.harm == pytest.approx(0.0906, abs=1e-3) and slower.runs == (3, 3)
    costs = [repeats(RATES, energy=joules, software=name) for joules, name in ((1.0, "a"), (1.3, "b"))]
    assert only(against(*costs), "energy_per_item").verdict == "worse"


def test_placements_are_named_as_points_are() -> None:
    placed = [run(1000, placement=Placement(tp=tp, sp=sp), devices=4) for tp, sp in ((1, False), (2, True), (4, True))]
    found = axes(placed[1].point)["placement"], names([[one] for one in placed])
    assert found[0] == "tp2+sp" and not any("{" in name for name in found[1]), found
    assert len({axes(one.point)["placement"] for one in placed}) == 3 and axes(placed[0].point)["placement"] == "whole copies"


def test_energy_of_nodes_is_compared_where_nobody_knows_that_of_devices() -> None:
    def side(software: str, joules: float, devices: float | None) -> list[Record]:
        nodes = [metric(joules + n / 1000, "J/token", 0.001, scope="node_ac") for n in range(3)]
        return [run(1000, energy=devices, repeat=n, software=software, more={"node_energy_per_item": nodes[n]}) for n in range(3)]

    found = against(side("old", 1.0, None), side("new", 1.33, None))
    assert only(found, "node_energy_per_item").verdict == "worse"
    for devices, expected in ((None, {"node_energy_per_item"}), (0.5, {"energy_per_item"})):
        found = against(side("old", 1.0, devices), side("new", 1.33, devices))
        assert {change.metric for _, change in found.changes if "energy" in change.metric} == expected


def test_noise_is_not_called_a_change() -> None:
    found = against(repeats(RATES), repeats([1001.0, 999.0, 1004.0], software="new"))
    assert only(found).verdict == "same", "three runs each that vary by 0.25 % show that sides differ by less than 1 %"
    assert only(found).smallest is not None and 0 < only(found).smallest < 0.05


def test_single_runs_show_only_what_repeats_of_others_never_did() -> None:
    a, b, c = run(1000), run(950, software="new"), run(300, software="new")
    assert only(against([a], [b])).verdict == "indistinguishable"
    assert only(against([a], [c])).verdict == "worse", "a fall by a factor is seen at once"
    single = only(against([a], [b]))
    assert single.ratio is not None and single.ratio.reach == pytest.approx(1.95996 * math.sqrt(2 * (0.023**2 + 0.00255**2)), rel=0.02)
    assert single.smallest == pytest.approx(0.156, abs=0.005)


def test_one_run_without_an_interval_gives_no_verdict() -> None:
    found = against([run(1000, half=None)], [run(300, half=None, software="new")], "throughput")
    change = only(found)
    assert change.verdict == "unknown" and change.smallest is None and "repeats" in (change.reason or "")
    assert found.variation == (("throughput", "nothing was repeated, so its run-to-run variation is not known"),)
    (with_one,) = against([run(1000, half=None)], [run(300, software="new")], "throughput").variation
    assert with_one[1] == "nothing was repeated: 2.3% from run to run is assumed"


def test_what_differs_everywhere_is_what_is_compared() -> None:
    a = [run(1000, global_batch=batch) for batch in (16, 32)]
    b = [run(1000, global_batch=batch, precision="bf16", device="H100 x1") for batch in (16, 32)]
    found = against(a, b)
    assert [pair.name.split()[1] for pair in found.pairs] == ["b16", "b32"] and not found.unmatched
    assert {one.name for one in found.differences} == {"precision", "device"}
    assert next(one for one in found.differences if one.name == "precision").a == "fp32"


@pytest.mark.parametrize(("theirs", "pairs"), [(4, [(None, None), (3, 4)]), (3, [(None, None), (3, 3)]), (None, [(None, None)])])
def test_work_by_epochs_pairs_among_windows(theirs: int | None, pairs: list[tuple[int | None, int | None]]) -> None:
    a = [run(1000), run(500, benchmark="by-epochs", global_batch=32, measure={"epochs": 3})]
    b = [run(1000, software="new"), run(500, benchmark="by-epochs", global_batch=32, software="new", measure={"epochs": theirs})]
    if theirs is None:
        b[1:] = [run(500, benchmark="else", global_batch=64, software="new")]
    found, epochs = against(a, b), {record.key: record.point.measure.epochs for record in (*a, *b)}
    assert [tuple(epochs[keys[0]] for keys in pair.keys) for pair in found.pairs] == pairs
    told = [(one.a, one.b) for pair in found.pairs for one in pair.differences if one.name == "measure.epochs"]
    assert told == ([("3", "4")] if theirs == 4 else []) and bool(found.unmatched) == (theirs is None)


def test_other_models_are_no_pair_beside_work_that_has_one() -> None:
    a = [run(1000), run(500, benchmark="net", params={"model": "resnet50"})]
    b = [run(1000, software="new"), run(300, benchmark="net", software="new", params={"model": "resnet101"})]
    found = against(a, b)
    assert len(found.pairs) == 1 and len(found.unmatched) == 2


def test_what_nobody_stated_of_either_side_is_unknown() -> None:
    """Two tables that name no system may be of two machines; one that names it differs from one that does not."""
    untold = {"environment": {"missing": {"point.system": "not in the table", "window": "not in the table"}}}
    a, b = (run(1000, system=f"not stated ({name})", benchmark=name, **untold) for name in ("jan", "feb"))
    found = against([a], [b])
    assert found.unknown == ("system",) and "system" not in {one.name for one in found.differences}
    assert comparison_sections(found)[0].notes[1] == "stated of neither side, so it may differ: system"
    told = against([a], [run(1000, system="jedi")])
    assert told.unknown == () and ("system", "not stated", "jedi") in {(one.name, one.a, one.b) for one in told.differences}


def test_work_without_a_partner_is_named() -> None:
    found = against([run(1000), run(1000, global_batch=32)], [run(1000, software="new"), run(1000, global_batch=64, software="new")])
    assert {(one.name.split()[1], one.side) for one in found.unmatched} == {("b32", "B"), ("b64", "A")}


def test_work_that_lost_its_result_is_worse_than_any_number() -> None:
    point = make_point(global_batch=32, micro_batch=32, software="new")
    found = against([run(1000), run(1000, global_batch=32)], [run(1000, software="new"), broken_record(point, "oom", "no memory left")])
    assert [(one.side, one.reason) for one in found.lost] == [("B", "oom: no memory left")]
    assert len(parse_gate("worse:5%").lost(found)) == 1


def test_work_that_b_never_ran_fails_the_gate_and_what_a_never_ran_does_not() -> None:
    found = against([run(1000), run(1000, global_batch=32)], [run(1000, software="new"), run(1000, global_batch=64, software="new")])
    (lost,) = parse_gate("worse").lost(found)
    assert " b32 " in lost and lost.endswith(": not run")


@pytest.mark.parametrize("others", [0, 1])
def test_a_result_that_b_lost_is_told_beside_runs_of_both_sides(others: int) -> None:
    """One point was measured again and failed, a repeat of it failed before; of the rest both sides have the same runs, or others."""
    kept, gone, later = run(1000), run(1000, global_batch=32), "2026-10-02T12:00:00+00:00"
    broken = broken_record(gone.point, "oom", "no memory left")
    before = broken_record(make_point(global_batch=32, micro_batch=32, repeat=1), "failed", "no driver")
    a = [kept, gone, before, *[run(1000, global_batch=64)] * others]
    b = [kept, broken, before.model_copy(), *[run(1000, global_batch=64, started_at=later)] * others]
    found = against(a, b)
    assert [(one.name, one.side) for one in found.lost] == [("gpt-mini b32 fp32", "B")] and found.shared == 1
    assert len(found.pairs) == others and len(parse_gate("worse").lost(found)) == 1
    assert comparison_sections(found)[-1].rows == (("gpt-mini b32 fp32", "B", "oom: no memory left"),)


def test_a_record_of_both_sides_counts_once() -> None:
    old, new = repeats(RATES), run(1001, repeat=3)
    (pair,) = against(old, [*old, new]).pairs
    assert [len(keys) for keys in pair.keys] == [3, 1]


def test_nothing_in_common_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(InputError, match=r"no work in common: A has .*b16"):
        against([run(1), run(1, precision="bf16")], [run(1, global_batch=32), run(1, global_batch=64)])
    with pytest.raises(InputError, match="unknown metric 'throughputt'"):
        against([run(1)], [run(1)], "throughputt")


def test_a_run_without_energy_has_no_other_boundary() -> None:
    """Of the runs that have energy one sensor read all: not `None, device`."""
    before, after = ([run(100, energy=1.0, repeat=repeat, software=name) for repeat in range(3)] for name in ("old", "new"))
    found = against([*before, run(100, repeat=3, software="old")], after, "energy_per_item")
    change = only(found, "energy_per_item")
    assert change.ratio is not None and change.ratio.value == pytest.approx(1.0), change.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"more": {"throughput": metric(1000.0, "image/s")}}, "different units: image/s, token/s"),
        ({"method_version": 99}, "different methods"),
        ({"more": {"throughput": metric(1000.0, "token/s", scope="node")}}, "different energy boundaries"),
    ],
)
def test_numbers_of_different_kinds_are_not_judged(changes: dict[str, object], reason: str) -> None:
    change = only(against([run(100)], [run(1000, software="new", **changes)]))
    assert change.verdict == "unknown" and change.ratio is None and reason in (change.reason or "")


def test_a_missing_number_is_named_with_its_reason() -> None:
    change = only(against([run(100, energy=1.0)], [run(100, software="new")]), "energy_per_item")
    assert change.b is None and change.reason == "B has none: no sensor"


def test_the_environment_is_looked_at() -> None:
    gpu = {"power_limit_w": 700.0, "sm_clock_max_mhz": 1980, "ecc": True, "mig": False, "pcie_generation": 5, "pcie_width": 16}
    before = {"versions": {"driver": "535.1", "torch": "2.11"}, "gpus": [gpu], "variables": {"NCCL_ALGO": "Ring"}}
    after = {"versions": {"driver": "550.2", "torch": "2.11"}, "gpus": [{**gpu, "power_limit_w": 500.0}]}
    later = "2026-10-02T12:00:00+00:00"
    a, b = run(1000, environment=before), run(900, environment=after, flags=["throttled"], started_at=later)
    found = {one.name: (one.a, one.b) for one in against([a], [b]).differences}
    assert found == {
        "driver": ("535.1", "550.2"),
        "power limit": ("700.0", "500.0"),
        "variable NCCL_ALGO": ("Ring", "–"),
        "flag throttled": ("0 of 1", "1 of 1"),
    }


def test_many_tests_are_corrected_together() -> None:
    batches = [4 * index for index in range(1, 21)]
    a = [one for batch in batches for one in repeats([1000, 1010], global_batch=batch)]
    b = [one for batch in batches for one in repeats([1000, 1010] if batch > 4 else [985, 995], global_batch=batch, software="new")]
    change = only(against(a, b))
    assert change.p is not None and change.adjusted is not None
    assert change.p < ALPHA < change.adjusted == pytest.approx(20 * change.p, rel=1e-6)
    assert change.verdict == "indistinguishable" and "one of 20" in (change.reason or "")
    alone = only(against(a[:2], b[:2]))
    assert alone.smallest is not None and change.smallest is not None


def test_the_families_share_the_error() -> None:
    assert sum(FAMILIES.values()) / 2 == ALPHA
    assert set(USUAL) <= set(METRICS)


def test_the_smallest_change_is_found_as_often_as_it_says() -> None:
    """Of two comparisons of the same runs the first says what it can show and the second looks for it. Four degrees of freedom."""
    import numpy as np

    rng, sd, dof = np.random.default_rng(5), 0.01, 4
    said, here = (sd * np.sqrt(rng.chisquare(dof, 20000) / dof) for _ in range(2))
    changes = math.log1p(smallest_change(sd, dof)) * said / sd
    found = np.abs((changes + sd * rng.standard_normal(20000)) / here) > 2.7764
    assert found.mean() == pytest.approx(POWER, abs=0.01)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(100, 10000), min_size=2, max_size=4), st.lists(st.floats(100, 10000), min_size=2, max_size=4))
def test_exchanging_the_sides_turns_the_verdict(ours: list[float], theirs: list[float]) -> None:
    there, back = (
        only(against(*sides, "throughput"))
        for sides in ((repeats(ours), repeats(theirs, software="n")), (repeats(theirs, software="n"), repeats(ours)))
    )
    assert there.p == pytest.approx(back.p or 0, abs=1e-12) and there.ratio is not None and back.ratio is not None
    assert there.ratio.value == pytest.approx(1 / back.ratio.value)
    turned = {"worse": "better", "better": "worse"}
    assert back.verdict == turned.get(there.verdict, there.verdict) or there.ratio.value == 1


class TestGate:
    SLOWER = repeats([1000.0, 1003.0, 998.0]), repeats([960.0, 957.0, 962.0], software="new")

    def test_the_size_counts(self) -> None:
        found = against(*self.SLOWER, "throughput")
        assert len(parse_gate("worse").failures(found)) == 1
        assert len(parse_gate("worse:3%").failures(found)) == 1
        assert parse_gate("worse:5%").failures(found) == []

    def test_runs_that_could_not_have_shown_it_are_named(self) -> None:
        found = against([run(1000)], [run(1000, software="new")], "throughput")
        assert parse_gate("worse:5%").failures(found) == [] and len(parse_gate("worse:5%").blind(found)) == 1
        assert parse_gate("worse:20%").blind(found) == []

    @pytest.mark.parametrize("text", ["better", "worse:", "worse:5", "worse:-5%", "worse:five%"])
    def test_nonsense_is_refused(self, text: str) -> None:
        with pytest.raises(InputError, match="expected `worse` or `worse:PERCENT%`"):
            parse_gate(text)


@pytest.mark.slow
def test_nothing_is_called_worse_where_runs_only_vary() -> None:
    """At most 5 % of comparisons, however the works vary; of 10, chance adds up to 15 %. Each failed when works shared one variance."""
    for model in ("as published", "one in four 3 %, others 0.2 %"):
        found = verdicts.comparisons(verdicts.Case(model, 50, (3, 3)), 10)
        assert found.worse <= 0.2 and 0.92 <= found.held <= 0.97


@pytest.mark.slow
def test_sides_may_vary_unequally_and_be_of_different_size() -> None:
    for runs, noisier in (((20, 2), 10.0), ((5, 5), 10.0), ((2, 2), 10.0)):
        found = verdicts.comparisons(verdicts.Case("all 1 %", 1, runs, noisier=noisier), 120)
        assert found.worse <= 0.09 and found.held > 0.86


@pytest.mark.slow
def test_a_fall_is_found_as_often_as_the_best_test_finds_it() -> None:
    for model, repeats_each in (("as published", 3), ("all 3 %", 5)):
        found = verdicts.comparisons(verdicts.Case(model, 50, (repeats_each, repeats_each), change=0.05), 5)
        assert found.slower > 0.9 * found.best - 0.05 and found.best > 0.2


def test_two_sensors_and_two_sessions_are_no_change() -> None:
    assert verdicts.of_sensors(200) == (0.0, 1.0)
    for machines, sessions in ((1, 1), (1, 3), (2, 5)):
        worse, held = verdicts.of_machines(machines, sessions, 200)
        assert worse <= 0.06 and held >= 0.9, "more days on the same machines tell nothing of others"
    worse, held = verdicts.of_sessions(1, 200)
    assert worse <= 0.06 and held > 0.93


@pytest.mark.slow
def test_the_same_is_said_of_what_differs_in_at_most_one_of_twenty() -> None:
    assert verdicts.same_within(0.003, 5, 0.0, 200) > 0.8 and verdicts.same_within(0.003, 5, 0.01, 200) <= 0.09


def test_what_is_shown_to_be_equal_is_called_the_same() -> None:
    found = compare(Side("a", tuple(repeats(RATES * 2))), Side("b", tuple(repeats(RATES * 2, software="new"))), ("throughput",))
    assert only(found).verdict == "same" and found.margin == 0.01
    strict = compare(Side("a", tuple(repeats(RATES * 2))), Side("b", tuple(repeats(RATES * 2, software="new"))), ("throughput",), 0.0005)
    assert only(strict).verdict == "indistinguishable"


def triad(factor: float, better: str = "higher", units: str = "GB/s", name: str = "triad", **more: Any) -> list[Record]:
    """Three runs with a metric of the suite; ``units``: of each, the last for the rest."""
    unit = [*units.split(), *[units.rsplit(maxsplit=1)[-1]] * 3]
    return [
        run(
            rate,
            repeat=number,
            more={name: Metric(value=factor * rate, unit=unit[number])},
            definitions={name: OwnMetric(unit=unit[number], better=better, source="the suite")},  # type: ignore[arg-type]
            **more,
        )
        for number, rate in enumerate(RATES)
    ]


@pytest.mark.parametrize(
    ("better", "verdict", "words"),
    [
        ("higher", "worse", None),
        ("lower", "better", None),
        ("neither", "unknown", "neither direction is better"),
        ("unknown", "unknown", "direction unknown: nobody said which is better"),
    ],
)
def test_a_metric_of_the_suite_is_judged_where_its_direction_is_known(better: str, verdict: str, words: str | None) -> None:
    sides = triad(1.0, better), triad(0.9, better, software="new")
    change = only(against(*sides, "triad"), "triad")
    assert (change.verdict, change.reason, change.unit) == (verdict, words, "GB/s")
    assert (
        change.ratio is not None
        and change.ratio.value == pytest.approx(0.9)
        and change.harm == pytest.approx(0.1 if better == "higher" else -0.1)
    )
    assert ("triad" in [one.metric for _, one in against(*sides).changes]) == (better in ("higher", "lower")), "unless asked otherwise"
    with pytest.raises(UnknownNameError, match="unknown metric 'tirad'") as refused:
        against(*sides, "tirad")
    assert refused.value.guess == "triad"


@pytest.mark.parametrize("units", ["MB/s", "MB/s GB/s"])
def test_numbers_of_different_units_are_neither_averaged_nor_compared(units: str) -> None:
    """Nor do they say how much other work varies."""
    others = [triad(factor, global_batch=32, software=name) for factor, name in ((1.0, "old"), (0.9, "new"))]
    found = against([*triad(1.0, software="old"), *others[0]], [*triad(1.0, units=units, software="new"), *others[1]], "triad")
    alone = against(*others, "triad").pairs[0].changes[0]
    mixed, same = (pair.changes[0] for pair in found.pairs)
    assert (mixed.a, mixed.b, mixed.ratio, mixed.verdict) == (None, None, None, "unknown")
    assert mixed.reason == "measured in different units: GB/s, MB/s" and same == alone


@pytest.mark.parametrize(("zeros", "runs"), [(1, "1 of 3 runs"), (3, "3 of 3 runs")])
def test_runs_at_zero_or_below_are_not_left_out_of_a_mean(zeros: int, runs: str) -> None:
    ours = [
        one.model_copy(update={"metrics": {**one.metrics, "triad": Metric(value=0.0 if number < zeros else 5.0, unit="GB/s")}})
        for number, one in enumerate(triad(1.0))
    ]
    change = only(against(ours, triad(1.0, software="new"), "triad"), "triad")
    assert (change.a, change.ratio, change.verdict) == (None, None, "unknown")
    assert change.reason == f"A is not above zero in {runs}, so it has no ratio"


def test_energies_of_several_boundaries_on_one_side_have_no_mean() -> None:
    """Nor do they say how much other work varies: 20 % more of it was indistinguishable."""
    others = [repeats(RATES, energy=joules, global_batch=32, software=name) for joules, name in ((1.0, "old"), (1.2, "new"))]
    sides = [repeats(RATES, energy=1.0, software=name) for name in ("old", "new")]
    sides[0][1].metrics["energy_per_item"] = metric(3.0, "J/token", 0.01, scope="node_dc")
    mixed, same = (pair.changes[0] for pair in against(sides[0] + others[0], sides[1] + others[1], "energy_per_item").pairs)
    assert (mixed.a, mixed.ratio, mixed.reason) == (None, None, "of different energy boundaries: device, node_dc")
    assert same == against(*others, "energy_per_item").pairs[0].changes[0] and same.verdict == "worse"


def test_programs_may_mean_different_things_by_one_name() -> None:
    """Where a score should be high in one and low in the other, neither was compared."""
    sides = [
        [*triad(factor, "higher", software=name), *triad(factor, "lower", software=name, global_batch=32)]
        for factor, name in ((1.0, "old"), (0.9, "new"))
    ]
    changes = [one for _, one in against(*sides).changes if one.metric == "triad"]
    assert [one.verdict for one in changes] == ["worse", "better"]


def test_a_metric_of_the_suite_is_no_energy_because_of_its_name() -> None:
    """By its first letters it had the error of a power sensor, and the spread that was published for energies."""
    sides = triad(1.0, name="energy_error"), triad(0.9, name="energy_error", software="new")
    change = only(against(*sides, "energy_error"), "energy_error")
    assert change.ratio is not None and change.ratio.bound == 0 and not is_known_kind("energy_error") and is_known_kind("energy_per_item")
