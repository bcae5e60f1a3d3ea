"""`caraml accept` and `check`: the decisions, with made-up records."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_factory import run

from caraml.analysis.baseline import (
    Baseline,
    WorkRuns,
    accept,
    accepted_until,
    add_history,
    failed_repeats,
    find_baseline,
    machine_of_record,
    place,
    read_baseline,
    refuse_other_machine,
    surroundings,
    who_wrote,
    works_of,
    write_baseline,
)
from caraml.analysis.check import ALPHA, SCREEN, CheckedPoint, SuiteCheck, changed_since, judged, settle
from caraml.base.errors import ExitCode, InputError
from caraml.base.format import significant
from caraml.metrics.model import Metric
from caraml.report.comparison import check_json, check_junit, check_sections, verdict_line
from caraml.results.record import Record
from caraml.results.store import Store, write_record
from caraml.suite.expand import PlannedPoint

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "analysis"))

from nights import Scenario, simulate

USUAL = (0.998, 1.001, 1.0, 1.003, 0.999)
SYSTEM = {"hostname": "node7", "cpu": {"model": "Test CPU"}}


def night(day: int, factors: dict[int, float] | None = None, **changes: object) -> list[Record]:
    """One run of each of two batches, on a day of a month."""
    rates = {16: 1000.0, 32: 1900.0}
    begun = f"2026-10-{day:02}T02:00:00+00:00"
    return [
        run(rate * (factors or {}).get(batch, 1.0), global_batch=batch, attempt=day, started_at=begun, system=SYSTEM, **changes)
        for batch, rate in rates.items()
    ]


def accepted(**changes: object) -> Baseline:
    records = [one for day, factor in enumerate(USUAL, start=1) for one in night(day, {16: factor, 32: 2 - factor}, **changes)]
    return accept(records, "nightly", "good")


def works(baseline: Baseline, newest: Sequence[Record], earlier: Sequence[Record] = ()) -> list[WorkRuns]:
    found, _ = works_of([PlannedPoint(record.point) for record in night(1)], baseline)
    for work in found:
        work.newest = [record for record in newest if record.key in work.keys]
        work.earlier = [record for record in earlier if record.key in work.keys]
    return found


def check(baseline: Baseline, points: Sequence[CheckedPoint]) -> SuiteCheck:
    return SuiteCheck("nightly", baseline, 0.02, tuple(points), (), ())


def test_an_accepted_energy_is_of_one_boundary() -> None:
    """It was the mean of devices and nodes, which any energy of the devices was below."""

    def nights(days: Sequence[int], joules: float, scope: str) -> list[Record]:
        more = {"energy_per_item": Metric(value=joules, unit="J/token", scope=scope)}
        return [record for day in days for record in night(day, more=more)]

    baseline = accept([*nights([1], 3.0, "node_dc"), *nights([2, 3, 4], 1.0, "device")], "nightly", "good")
    kept = baseline.points[0].metrics["energy_per_item"]
    assert (kept.mean, kept.scope, len(kept.runs)) == (1.0, "device", 3)
    found = judged(works(baseline, nights([10], 1.3, "device")))[0].metrics[-1]
    assert found.metric == "energy_per_item" and found.ratio is not None and found.ratio.value == pytest.approx(1.3)


def test_the_same_is_the_same_and_a_loss_is_named() -> None:
    baseline = accepted()
    same = check(baseline, judged(works(baseline, night(10, {16: 1.001}))))
    assert same.exit_code == ExitCode.OK == 0 and verdict_line(same) == "same: 2 points, none is 2 % or more worse than good"
    worse = check(baseline, judged(works(baseline, night(10, {16: 0.95}))))
    assert worse.exit_code == ExitCode.WORSE == 4 and [one.verdict for one in worse.points] == ["worse", "same"]
    assert verdict_line(worse).startswith("worse: 1 of 2 points: gpt-mini b16 fp32 5.0 % slower (± 0.")
    better = check(baseline, judged(works(baseline, night(10, {16: 1.1}))))
    assert better.exit_code == ExitCode.OK and verdict_line(better).startswith("better: 1 of 2 points: gpt-mini b16 fp32 10 % faster")


def test_a_loss_within_the_tolerance_is_the_same_also_where_it_is_significant() -> None:
    baseline = accepted()
    newest = night(10, {16: 0.985})
    assert [one.verdict for one in judged(works(baseline, newest), within=0.05)] == ["same", "same"]
    assert judged(works(baseline, newest), within=0.01)[0].verdict == "worse"


def test_runs_that_vary_too_much_decide_nothing() -> None:
    noisy = [one for day, factor in enumerate((0.93, 1.07, 1.0, 1.04, 0.96), start=1) for one in night(day, {16: factor, 32: factor})]
    baseline = accept(noisy, "nightly", "noisy")
    found = check(baseline, judged(works(baseline, night(10, {16: 0.95}))))
    assert found.exit_code == ExitCode.UNDECIDED == 5 and verdict_line(found).startswith("undecided: 2 of 2 points: gpt-mini b16 fp32")
    assert "a loss of 2.0% is not excluded; these runs" in found.points[0].notes[0]
    ratio = found.points[0].metrics[0].ratio
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    half = significant(50 * (ratio.high - ratio.low), 2)
    assert f"% slower (± {half} %)" in verdict_line(found) and ratio.high - ratio.low > 0.1, "as the table has it, also where it is wide"


def test_a_small_loss_that_lasts_is_found_by_the_last_nights_together() -> None:
    rough = (0.9955, 1.004, 1.0, 1.005, 0.996)
    baseline = accept(
        [one for day, factor in enumerate(rough, start=1) for one in night(day, {16: factor, 32: 2 - factor})], "nightly", "rough"
    )
    slow = [one for day, factor in enumerate((0.978, 0.983, 0.979, 0.981), start=10) for one in night(day, {16: factor})]
    last = night(14, {16: 0.985})
    assert judged(works(baseline, last))[0].verdict != "worse"
    found = judged(works(baseline, last, slow))[0]
    assert found.verdict == "worse" and found.metrics[0].nights == 5
    assert judged(works(baseline, last, slow), nights=1)[0].verdict != "worse"
    assert judged(works(baseline, night(14, {16: 1.001}), slow))[0].verdict != "worse", "what was mended is not reported any more"


def test_flags_decide_what_counts() -> None:
    baseline = accepted()
    newest = night(10, {16: 0.9}, flags=["busy_machine"])
    strict, warned, ignored = (judged(works(baseline, newest), flags=flags)[0] for flags in ("strict", "warn", "ignore"))  # type: ignore[arg-type]
    assert strict.verdict == "undecided" and strict.notes == ("1 of 1 runs flagged busy_machine: left out",)
    assert warned.verdict == "worse" and warned.notes == ("1 of 1 runs flagged busy_machine: used all the same",)
    assert ignored.verdict == "worse" and not ignored.notes
    usual = accepted(flags=["input_bound"])
    assert judged(works(usual, night(10, flags=["input_bound"])))[0].verdict == "same", "a flag of the baseline says nothing new"
    assert judged(works(baseline, night(10, flags=["disturbed_probe"])))[0].verdict == "same"


def test_a_disturbed_accepted_run_is_left_out() -> None:
    records = [one for day, factor in enumerate(USUAL, start=1) for one in night(day, {16: factor})]
    baseline = accept([*records, *night(6, {16: 0.9}, flags=["busy_machine"])], "nightly", "good")
    assert [len(point.metrics["throughput"].runs) for point in baseline.points] == [5, 5] and not baseline.points[0].flags


def test_what_failed_is_worse_and_lost_repeats_are_said() -> None:
    baseline = accepted()
    good = night(10)
    failed = [one.model_copy(update={"status": "failed", "reason": "no driver", "metrics": {}}) for one in good]
    none = check(baseline, judged(works(baseline, [failed[0], good[1]])))
    assert none.exit_code == 4 and verdict_line(none) == "worse: 1 of 2 points: gpt-mini b16 fp32 (no result: failed: no driver)"
    some = judged(works(baseline, [*good, failed[0]]))[0]
    assert some.verdict == "same" and some.notes == ("1 of 2 runs have no result: failed: no driver",)
    absent = judged(works(baseline, good[1:]))[0]
    assert absent.verdict == "undecided" and "not measured, or" in absent.notes[0]


def test_a_record_that_cannot_be_read_leaves_a_verdict_open() -> None:
    """It has numbers, which may be worse than any: neither better nor worse than accepted is shown."""
    baseline, newest = accepted(), [one for day in (8, 9, 10) for one in night(day)]
    assert {one.verdict for one in judged(works(baseline, newest))} == {"same"}
    hidden = newest[0].model_copy(
        update={"status": "invalid", "reason": "cannot be read: points/x/8/record.json: { expected", "metrics": {}}
    )
    for some in ([hidden, *newest[1:]], [hidden, newest[1]]):
        found = judged(works(baseline, some))
        assert found[0].verdict == "undecided" and not found[0].failed and check(baseline, found).exit_code is ExitCode.UNDECIDED
        assert any("points/x/8/record.json" in note for note in found[0].notes)


def test_what_nobody_knows_is_not_accepted() -> None:
    """A point that was accepted without a result was never judged again: one damaged record made a check green for ever."""
    good = [one for day in range(1, 4) for one in night(day)]
    changes = {"status": "invalid", "reason": "cannot be read: points/x/1/record.json: {; next step: caraml retry x", "metrics": {}}
    hidden = [one.model_copy(update=changes) if one.point.global_batch == 16 else one for one in good]
    with pytest.raises(InputError, match=r"gpt-mini b16 fp32 has a result that nobody knows: cannot be read(.|\n)*caraml retry x"):
        accept(hidden, "nightly", "good")
    baseline = accept([hidden[0], *good[1:]], "nightly", "good")
    assert [len(point.metrics["throughput"].runs) for point in baseline.points] == [2, 3]


def test_repeats_that_failed_are_told_when_the_others_are_accepted() -> None:
    good = [one for day in range(1, 6) for one in night(day)]
    batch = [one for one in good if one.point.global_batch == 16]
    lost = {"failed": "no driver", "oom": "too large"}
    failed = [
        one.model_copy(update={"status": how, "reason": why, "metrics": {}})
        for one, how, why in zip(batch, lost, lost.values(), strict=False)
    ]
    rest = [one for one in good if one not in batch[:2]]
    told = failed_repeats([*failed, *rest])
    assert told == ["gpt-mini b16 fp32: 2 of 5 runs have no result: 1 x failed: no driver; 1 x oom: too large"]
    assert [len(point.metrics["throughput"].runs) for point in accept([*failed, *rest], "nightly", "good").points] == [3, 5]
    assert failed_repeats(good) == [] == failed_repeats(failed), "none failed, or nothing else is there"


def test_a_point_that_never_had_a_result_is_not_judged() -> None:
    full = [one.model_copy(update={"status": "oom", "reason": "too large", "metrics": {}}) for one in night(1)[:1]]
    baseline = accept([*full, *(one for day in range(1, 6) for one in night(day)[1:])], "nightly", "good")
    found = judged(works(baseline, [*(one.model_copy(update={"attempt": 9}) for one in full), *night(10)[1:]]))
    assert [one.verdict for one in found] == ["not judged", "same"] and check(baseline, found).exit_code == 0


def test_more_energy_is_worse_and_a_lost_sensor_undecided() -> None:
    baseline = accepted(energy=1.0)
    found = check(baseline, judged(works(baseline, night(10, energy=1.2))))
    assert found.exit_code == 4 and "20 % more" in verdict_line(found)
    lost = judged(works(baseline, night(10)))[0]
    assert lost.verdict == "undecided" and "not measured any more: no sensor" in lost.notes[0]


def test_a_worse_point_is_measured_again_and_counts_if_it_is_found_twice() -> None:
    baseline, asked = accepted(), []

    def again(factor: float) -> list[CheckedPoint]:
        def measure(keys: frozenset[str]) -> list[Record]:
            asked.append(keys)
            return [one for one in night(10, {16: factor}) if one.key in keys]

        return list(settle(works(baseline, night(10, {16: 0.93})), judged, measure, retries=3))

    lost = again(0.94)
    assert lost[0].verdict == "worse" and len(asked) == 1 and "found again" in lost[0].notes[-1]
    assert again(1.0)[0].verdict == "same", "a disturbance that passed"
    assert len(asked) == 2 and asked[0] == works(baseline, [])[0].keys, "only the point in doubt"


def test_the_last_nights_are_the_last_also_where_nodes_take_turns() -> None:
    def on(nodes: Sequence[int], first: int, *factors: float) -> list[Record]:
        made = [
            (node, one) for node, day, factor in zip(nodes, range(first, 30), factors, strict=False) for one in night(day, {16: factor})
        ]
        at = (({"hostname": f"node{node}"}, one.point.model_copy(update={"system": "cluster"}), one) for node, one in made)
        return [one.model_copy(update={"system": system, "point": point}) for system, point, one in at]

    rough = (0.9955, 1.004, 1.0, 1.005, 0.996)
    baseline = accept(on([10, 11, 12, 13, 14], 1, *rough), "nightly", "rough")
    before, slow = on([9, 8, 7, 6, 5], 6, *rough), on([4, 3, 2, 1], 11, 0.978, 0.983, 0.979, 0.981)
    last = on([0], 15, 0.985)
    found = judged(works(baseline, last, [*before, *slow]))[0]
    assert (found.verdict, found.metrics[0].nights, found.metrics[0].runs[1]) == ("worse", 5, 5)
    of_one = accept(on([7] * 5, 1, *rough), "nightly", "rough")
    assert judged(works(of_one, last, [*before, *slow]))[0].verdict == "undecided", "its own node may be a fast one"
    two = [*last, *(one.model_copy(update={"attempt": 16, "system": {"hostname": "node5"}}) for one in last)]
    assert judged(works(baseline, two))[0].metrics[0].nights == 1, "two nodes in one night"


def test_nights_before_the_last_ones_tell_how_much_runs_vary() -> None:
    usual = (0.996, 1.004, 1.001)
    baseline = accept([one for day, factor in enumerate(usual, start=1) for one in night(day, {16: factor, 32: factor})], "nightly", "good")
    older = [one for day, factor in enumerate(usual * 5, start=5) for one in night(day, {16: factor, 32: factor})]
    last = night(25, {16: 0.97})
    assert judged(works(baseline, last))[0].verdict == "undecided"
    assert judged(works(baseline, last, older), nights=1)[0].verdict == "worse", "also where they are judged in nothing else"


def test_what_may_be_worse_needs_all_its_runs_to_show_it() -> None:
    baseline = accepted()
    point = judged(works(baseline, night(10, {16: 0.95})))[0]

    def judge(joint: str, heard: list[tuple[float, int]], found: Sequence[WorkRuns], alpha: float) -> list[CheckedPoint]:
        heard.append((alpha, len(found[0].newest)))
        lenient = alpha == SCREEN and len(heard) < 4
        return [replace(point, verdict="worse" if lenient else joint)]  # type: ignore[arg-type]

    for joint in ("worse", "undecided"):
        heard: list[tuple[float, int]] = []
        done = settle(works(baseline, night(10))[:1], partial(judge, joint, heard), lambda keys: night(10)[:1], retries=1)[0]
        assert done.verdict == joint and any("found again" in note for note in done.notes) == (joint == "worse")
        assert heard[:3] == [(SCREEN, 1), (ALPHA, 2), (SCREEN, 1)] and heard[-1][0] == ALPHA


def test_a_point_that_failed_is_tried_once_more_unless_nothing_works() -> None:
    baseline, good = accepted(), night(10)
    failed = [one.model_copy(update={"status": "failed", "reason": "no driver", "metrics": {}}) for one in good]
    asked: list[int] = []

    def again(first: Sequence[Record], then: Sequence[Record]) -> list[CheckedPoint]:
        def measure(keys: frozenset[str]) -> list[Record]:
            asked.append(len(keys))
            return [one for one in then if one.key in keys]

        asked.clear()
        return list(settle(works(baseline, first), judged, measure, retries=2))

    passing = again([failed[0], good[1]], good)
    assert passing[0].verdict == "same" and passing[0].notes == ("1 of 2 runs have no result: failed: no driver",) and asked == [1]
    lasting = again([failed[0], good[1]], failed)
    assert lasting[0].verdict == "worse" and lasting[0].failed and "found again" in lasting[0].notes[-1] and asked == [1]
    assert [one.verdict for one in again(failed, good)] == ["worse", "worse"] and not asked


def test_where_most_runs_of_a_point_are_flagged_the_others_do_not_decide() -> None:
    baseline = accepted()
    flagged, quiet = night(10, {16: 0.93}, flags=["busy_machine"]), night(10, {16: 0.93})
    found = judged(works(baseline, [*flagged, *flagged, *quiet]))[0]
    assert found.verdict == "undecided" and found.notes[0] == "2 of 3 runs flagged busy_machine: left out, and the others with them"
    assert judged(works(baseline, [*flagged, *quiet]))[0].verdict == "worse"


def test_a_flagged_point_is_measured_again_until_the_retries_are_used_up() -> None:
    baseline, asked = accepted(), []

    def measure(keys: frozenset[str]) -> list[Record]:
        asked.append(keys)
        return [one for one in night(10, flags=["throttled"]) if one.key in keys]

    found = settle(works(baseline, night(10, flags=["throttled"])), judged, measure, retries=2)
    assert [one.verdict for one in found] == ["undecided", "undecided"] and len(asked) == 2
    assert "3 of 3 runs flagged throttled: left out" in found[0].notes


def test_another_machine_is_refused_with_what_differs() -> None:
    baseline = accepted()
    here = machine_of_record(night(1)[0])
    refuse_other_machine(baseline, here)
    with pytest.raises(InputError, match="another machine: host: 'node7' then, 'node8' now"):
        refuse_other_machine(baseline, {**here, "host": "node8"})
    with pytest.raises(InputError, match="host: 'not known' then, 'node7' now"):
        refuse_other_machine(baseline.model_copy(update={"machine": {}}), here)
    with pytest.raises(InputError, match="results of 2 machines"):
        accept([*night(1), *night(2, device="Other x1")], "nightly", "good")


def test_points_that_the_baseline_lacks_are_named() -> None:
    planned = [PlannedPoint(record.point) for record in [*night(1), run(1.0, global_batch=64)]]
    with pytest.raises(InputError, match="lacks 1 of 3 points of the suite: gpt-mini b64 fp32"):
        works_of(planned, accepted())
    skipped = [PlannedPoint(planned[0].point), PlannedPoint(planned[2].point, skip="needs 9 devices")]
    found, notes = works_of(skipped, accepted())
    assert len(found) == 1 and "the suite lacks 1 of 2 points of the baseline: gpt-mini b32" in notes[0]


def test_another_version_of_the_software_is_the_same_work_and_is_said() -> None:
    baseline = accepted()
    newest = night(10, software="caraml 0.2.0, torch 3")
    points = judged(works_of([PlannedPoint(one.point) for one in newest], baseline)[0])
    assert len(points) == 2
    assert [(one.name, one.b) for one in changed_since(baseline, newest)] == [("software", "caraml 0.2.0, torch 3")]


def test_what_varied_in_the_accepted_runs_has_not_changed_since() -> None:
    def on(node: str, day: int, driver: str) -> list[Record]:
        state = {"system": {"hostname": node}, "environment": {"versions": {"driver": driver}}}
        return [one.model_copy(update=state) for one in night(day)]

    nights = [on(f"node{day}", day, "1") for day in range(1, 6)]
    baseline = accepted().model_copy(update={"facts": surroundings([one for records in nights for one in records])})
    assert changed_since(baseline, on("node3", 9, "1")) == ()
    (found,) = changed_since(baseline, [*on("node3", 9, "1"), *on("node4", 9, "2")])
    assert (found.name, found.a, found.b) == ("driver", "1", "several values")


def test_history_is_what_was_measured_since_the_baseline(tmp_path: Path) -> None:
    store, baseline = Store(tmp_path), accepted()
    newest = night(10)
    for record in [*night(3), *night(8), *night(9, status="failed"), *newest]:
        folder = store.points / f"gpt-{record.key}" / str(record.attempt)
        folder.mkdir(parents=True)
        write_record(folder, record)
    found = works(baseline, newest)
    damaged = store.points / f"gpt-{newest[0].key}" / "7"
    damaged.mkdir()
    (damaged / "record.json").write_text("{")
    (unread,) = add_history(found, store, accepted_until(baseline))
    assert unread.attempt == 7 and "record.json: not a CARAML record" in str(unread.reason), "a loss that lasts may be in it"
    assert [[record.attempt for record in work.earlier] for work in found] == [[8], [8]], "what is damaged costs itself and no more"
    ahead = baseline.model_copy(update={"newest_run": "2999-10-05T02:00:00+00:00", "accepted_at": "2026-10-08T12:00:00+02:00"})
    assert accepted_until(ahead) == datetime(2026, 10, 8, 10, tzinfo=UTC), "the clock was wrong in an accepted night"
    with pytest.raises(InputError, match="newest_run: found yesterday, expected a time"):
        accepted_until(baseline.model_copy(update={"newest_run": "yesterday"}))


def test_an_attempt_that_somebody_ended_is_no_result(tmp_path: Path) -> None:
    store, (record, _) = Store(tmp_path), night(1)
    for attempt, reason in ((1, None), (2, "no driver"), (3, "the campaign was stopped (KeyboardInterrupt)"), (4, "cancelled")):
        folder = store.points / f"gpt-{record.key}" / str(attempt)
        folder.mkdir(parents=True)
        changes = {} if reason is None else {"status": "failed", "reason": reason, "metrics": {}}
        write_record(folder, record.model_copy(update={"attempt": attempt, **changes}))
    assert [one.attempt for one in store.newest(record.key, 1)] == [2]
    assert [one.attempt for one in store.newest(record.key, 9)] == [2, 1]


def test_a_baseline_is_kept_found_and_refused_where_it_is_wrong(tmp_path: Path) -> None:
    baseline = accepted(energy=1.0)
    path = write_baseline(tmp_path, baseline)
    assert find_baseline(tmp_path, "good") == read_baseline(path) == baseline
    kept = baseline.points[0].metrics["throughput"]
    assert kept.low is not None and kept.mean is not None and kept.low < kept.mean < 1002 and len(kept.runs) == 5
    with pytest.raises(InputError, match="unknown baseline 'god'; known: good"):
        find_baseline(tmp_path, "god")
    place(tmp_path, "copy").write_bytes(path.read_bytes())
    assert find_baseline(tmp_path, "good") == baseline
    with pytest.raises(InputError, match=r"copy\.json: found name 'good', expected 'copy': a copy, or renamed"):
        find_baseline(tmp_path, "copy")
    with pytest.raises(InputError, match=r"unknown baseline .{2,4}/baselines/good.; known: copy, good"):
        find_baseline(tmp_path, "../baselines/good")
    assert who_wrote(tmp_path, "good") == ()
    path.chmod(0o666)
    assert "every user may write to it: the reference may be theirs" in who_wrote(tmp_path, "good")[0]
    content = json.loads(path.read_text())
    for damage, words in (
        ({"schema_version": 2}, "schema version 2, this CARAML reads up to 1\n  next step: read it with the CARAML that wrote it"),
        ({"points": []}, "not a baseline: points"),
        ({"name": "../x"}, "not a baseline: name"),
        ({"machine": "here"}, "not a baseline: machine"),
    ):
        path.write_text(json.dumps({**content, **damage}))
        with pytest.raises(InputError, match=words):
            find_baseline(tmp_path, "good")
    for number in ("1e400", "NaN", "-1", "1e200", '"x"', "null"):
        path.write_text(json.dumps(content).replace(json.dumps(kept.runs[0].value), number))
        with pytest.raises(InputError, match="not a baseline"):
            find_baseline(tmp_path, "good")
    path.write_text("[" * 100_000)
    with pytest.raises(InputError, match="not a baseline"):
        find_baseline(tmp_path, "good")
    path.write_text(json.dumps({**content, "of_a_later_version": 1}))
    assert find_baseline(tmp_path, "good") == baseline


CHILDREN = {
    "testsuites": ["testsuite"],
    "testsuite": ["properties", "testcase", "system-out", "system-err"],
    "properties": ["property"],
    "testcase": ["skipped", "error", "failure", "system-out", "system-err"],
}
"""Of the schema that Jenkins publishes: what may be in what, in this order."""
ATTRIBUTES = {
    "testsuites": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname"},
    "testcase": {"name", "classname", "time"},
    "property": {"name", "value"},
    "failure": {"message", "type"},
    "skipped": {"message"},
}


def test_junit_is_valid_and_escaped() -> None:
    hostile = "<b>&\"'\x00\x1b[31m]]>\ud800\uffff"
    baseline = accepted()
    newest = night(10, {16: 0.9}, benchmark="x")
    failed = newest[1].model_copy(update={"status": "failed", "reason": hostile, "metrics": {}})
    content = check_junit(check(baseline, judged(works(baseline, [newest[0], failed]))), 12.3456, "2026-10-10T02:00:00")
    root = ElementTree.fromstring(content)
    for element in root.iter():
        order = [CHILDREN.get(element.tag, []).index(child.tag) for child in element]
        assert order == sorted(order)
        assert set(element.attrib) <= ATTRIBUTES.get(element.tag, set())
    suite = root[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped"), suite.get("time")) == ("2", "2", "0", "12.346")
    assert len(suite.findall("testcase/failure")) == 2 and "<b>&\"'" in (suite.findall("testcase/failure")[1].get("message") or "")
    open_ = ElementTree.fromstring(check_junit(check(baseline, judged(works(baseline, []))), 1.0, ""))[0]
    assert open_.get("skipped") == "2" and len(open_.findall("testcase/skipped")) == 2


def test_strict_readers_take_the_json_whatever_is_in_it() -> None:
    baseline = accepted()
    wild = baseline.points[0].metrics["throughput"]
    runs = [wild.runs[0].model_copy(update={"value": value, "bound": 100.0}) for value in (1e-99, 1e-99, 1e99)]
    metrics = {"throughput": wild.model_copy(update={"runs": runs})}
    baseline = baseline.model_copy(update={"points": [baseline.points[0].model_copy(update={"metrics": metrics}), *baseline.points[1:]]})
    found = check(baseline, judged(works(baseline, night(10, {16: 1e96}))))
    assert check_sections(found) and verdict_line(found) and json.loads(check_json(found))["points"][0]["metrics"][0]["ratio_high"] is None
    found = replace(found, notes=("\ud800\x1b[31m",))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = check_json(found)
    assert json.loads(text, parse_constant=refuse)["notes"] == ["\ufffd\x1b[31m"] and "\\ud" not in text


def test_json_and_the_table_have_every_point() -> None:
    baseline = accepted(energy=1.0)
    found = check(baseline, judged(works(baseline, night(10, {16: 0.9}, energy=1.0))))
    content = json.loads(check_json(found))
    assert (content["verdict"], content["exit_code"], len(content["points"])) == ("worse", 4, 2)
    assert content["points"][0]["metrics"][0]["loss"] == pytest.approx(0.1, rel=0.01)
    (section,) = check_sections(found)
    assert [row[0] for row in section.rows] == ["gpt-mini b16 fp32", "", "gpt-mini b32 fp32", ""]
    assert section.rows[0][-1] == "worse"


def test_simulated_nights_have_few_alarms_and_losses_are_found() -> None:
    """A short form of ``bench/analysis/nights.py``, with its seeds."""
    quiet = Scenario(points=3, sd=0.003)
    later = simulate(quiet, 0.05, machines=10, nights=1, healthy=5)
    assert later.alarms <= 1 / 50 and later.found[0] >= 0.9
    assert simulate(quiet, 0.05, machines=20, nights=1, seed=1).found[0] >= 0.9
    assert simulate(quiet, 0.02, machines=8, nights=5, seed=2).found[-1] >= 0.85
