"""Figures of repeats: which runs their numbers are of, which kind of mean they are, and what is said where there is none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from record_factory import broken_record, make_point, make_record, save

from caraml.analysis.advise import advise
from caraml.analysis.bottleneck import Partners, bottleneck
from caraml.analysis.compare import compare
from caraml.analysis.grouping import same_work
from caraml.analysis.history import history
from caraml.analysis.run_variation import mean_metric
from caraml.analysis.table import Steps
from caraml.metrics.model import Metric
from caraml.power.model import HEADLINES
from caraml.reference import Side
from caraml.report.document import figure_sections, findings, result_rows
from caraml.report.figures import QUALITY, action, heat_maps, node_and_devices, over_batch, time_and_energy
from caraml.report.grouping import ACTION, COST, DEVICES, EFFICIENCY, ENERGY, HOUR, MOST_ROWS, MOST_SERIES, TIME, labels, repeated
from caraml.report.section import ReportFigure, plain, written
from caraml.report.times import LOSS, STEP_TIME, epochs, over_steps, phases, runtime_parts, step_distributions
from caraml.results.record import STATUSES, Record
from caraml.results.store import Store


def run(batch: int = 16, repeat: int = 0, slower: float = 1.0, status: str = "ok", **more: object) -> Record:
    """A run with every number that figures draw, of which all are worse by a factor of ``slower``."""
    environment = more.pop("environment", {})
    point = make_point(**{"global_batch": batch, "micro_batch": batch, "repeat": repeat} | more)
    record = make_record(point, step=0.1 * slower, watts=300.0)
    joules = record.metrics["energy"]
    extra = {
        "device_energy": joules,
        "node_energy": joules.model_copy(update={"value": 1.5 * (joules.value or 0.0), "scope": "node_dc"}),
        **{name: Metric(value=10.0 * slower, unit="s") for name in ("runtime", "epoch_time_first", "epoch_time_mean")},
        **{name: Metric(value=share, unit="1") for name, share in zip(SHARES, (0.7, 0.1, 0.2), strict=True)},
    }
    reason = None if status == "ok" else "the loss is not finite"
    return record.model_copy(
        update={"metrics": {**record.metrics, **extra}, "status": status, "reason": reason, "environment": environment}
    )


SHARES = ("training_share", "loading_share", "rest_share")


def energy_figures(records: list[Record]) -> list[ReportFigure]:
    return [figure for draw in (time_and_energy, node_and_devices, action) for figure in draw(records)[0]]


def test_no_figure_takes_numbers_of_a_run_without_a_result() -> None:
    good = [run(batch, repeat) for batch in (16, 32) for repeat in (0, 2)]
    bad = [run(32, 1, 10.0, "invalid"), run(64, 0, 10.0, "invalid")]

    def drawn(records: list[Record]) -> list[list[list[str]]]:
        found = [*over_batch(records)[0], *energy_figures(records), *runtime_parts(records)[0], *epochs(records)[0]]
        steps = {record.key: Steps(np.arange(9), ["measure"], np.zeros(9, int), np.ones(9), np.ones(9)) for record in records}
        found += [*step_distributions(records, steps), *over_steps(STEP_TIME, records, steps)]
        return [[list(row) for row in figure.rows] for figure in found]

    assert len(drawn(good)) >= 8 and drawn([*good, *bad]) == drawn(good)
    bars = over_batch([run(16), run(16, 1, 10.0, "invalid")])[0]
    assert [row[2] for figure in bars for row in figure.rows] == [row[2] for figure in over_batch([run(16)])[0] for row in figure.rows]
    assert over_batch([run(16, 0, 1.0, "invalid")]) == ([], [])


def test_what_failed_is_drawn_as_that() -> None:
    records = [run(batch, system=system) for system in ("a", "b") for batch in (16, 32)] + [run(64, status="invalid", system="a")]
    (throughput, energy), _ = heat_maps(records)
    assert throughput.rows[2][2] == energy.rows[2][2] == "invalid: the loss is not finite"
    bad = records[-1]
    steps = {bad.key: Steps(np.arange(9), ["measure"], np.zeros(9, int), np.ones(9), np.ones(9))}
    (loss,) = over_steps(LOSS, [bad], steps)
    assert loss.legend == [f"{bad.point.label} (invalid)"]
    (parts,) = phases([bad, broken_record(make_point(), "failed", "no room")])
    assert {row[0] for row in parts.rows} == {f"{bad.point.label} (invalid)"}


def test_a_loss_that_is_finite_at_the_first_step_only_is_drawn() -> None:
    record = make_record()
    for later in (math.nan, math.inf):
        losses = np.array([2.5, *[later] * 9])
        steps = Steps(np.arange(10), ["first"] + ["measure"] * 9, np.full(10, 0), np.ones(10), losses)
        (figure,) = over_steps(LOSS, [record], {record.key: steps})
        assert [row[1:] for row in figure.rows] == [["0", "2.50"]] and figure.drawings[0].width


def of_boundary(record: Record, scope: str) -> Record:
    metrics = {name: one.model_copy(update={"scope": scope}) if one.scope in HEADLINES else one for name, one in record.metrics.items()}
    return record.model_copy(update={"metrics": metrics})


def test_energies_of_different_boundaries_have_no_mean() -> None:
    apart = [run(16), of_boundary(run(16, 1), "module")]
    assert all(quantity.of(apart) is None for quantity in (ENERGY, ACTION, HOUR, COST, EFFICIENCY, DEVICES))
    assert ENERGY.of(apart[1:]) is not None and TIME.of(apart) is not None
    words = "not drawn: the runs measured different things: "
    for draw in (time_and_energy, action, node_and_devices):
        (figure,), notes = draw([*apart, run(32), run(64)])
        assert [row[0] for row in figure.rows] == sorted(["b32", "b64"], reverse=draw is action) and notes == []
        assert f" 1 point {words}" in f" {figure.note}" and "(device), " in figure.note and "(module)." in figure.note
    assert time_and_energy(apart)[0] == [] and time_and_energy(apart)[1][0].startswith(
        f"Time and energy, gpt-mini: 1 point {words}J (device)"
    )


def test_energies_of_different_boundaries_are_compared_nowhere(tmp_path: Path) -> None:
    """An accelerator, a module and a processor side by side."""
    scopes = {"a": "device", "b": "module", "c": "cpu"}
    records = [
        of_boundary(run(batch, slower=factor * batch / 16, system=system), scope)
        for factor, (system, scope) in enumerate(scopes.items(), start=1)
        for batch in (16, 32)
    ]
    for draw, title in ((time_and_energy, "Time and energy of 10⁶ tokens"), (action, "Action of 10⁶ tokens")):
        figures, notes = draw(records)
        assert [figure.title for figure in figures] == [f"{title}: gpt-mini, boundary {scope}" for scope in scopes.values()] and notes == []
        assert all(len(figure.rows) == 2 for figure in figures)
        told = "Not comparable, as their energy has another boundary: 2 points (module), 2 points (cpu)."
        assert told in figures[0].note
    throughput, *maps = heat_maps(records)[0]
    assert len(throughput.rows) == 6 and [len(one.rows) for one in maps] == [2, 2, 2] and "boundary cpu" in maps[2].title
    mixed = heat_maps([*records[:3], run(32, system="b")])[0]
    assert [row[2] for row in mixed[1].rows if row[0].startswith("b")] == ["energy of another boundary: module", mixed[1].rows[-1][2]]
    assert "other: another boundary." in mixed[1].note
    (batch,) = over_batch(records)[0]
    assert "not comparable: boundary device (a); boundary module (b); boundary cpu (c)." in batch.note
    alike = [of_boundary(one, "device") for one in records]
    assert len(time_and_energy(alike)[0]) == len(action(alike)[0]) == 1 and len(heat_maps(alike)[0]) == 2
    assert not any("boundar" in figure.note for draw in (time_and_energy, action, heat_maps, over_batch) for figure in draw(alike)[0])
    least = dict(findings(repeated(records)))["Least energy"]
    assert [words.partition(", boundary ")[2].partition(":")[0] for words in least.split("; ")] == [*scopes.values()]
    assert dict(findings(repeated(alike)))["Least energy"].count(";") == 0
    table = result_rows(Store(tmp_path), repeated(records), {})
    assert [row.cells[1].text.rpartition(" (")[2] for row in table] == [f"{scope})" for scope in scopes.values() for _ in range(2)]


def without_energy(record: Record) -> Record:
    unknown = {name: one.model_copy(update={"value": None, "reason": "the sensor went silent"}) for name, one in record.metrics.items()}
    energies = {name: unknown[name] for name in ("energy_per_item", "items_per_watt_hour", "mean_power", "energy")}
    return record.model_copy(update={"metrics": {**record.metrics, **energies}})


def test_energy_that_some_repeats_have_is_their_mean_as_in_the_table() -> None:
    some = [without_energy(run(16)), run(16, 1), run(16, 2, 1.02)]
    told = repeated(some)[0].mean.metrics["energy_per_item"]
    assert COST.of(some) == told and COST.told(some) == f"{COST.text(told)} (2 of 3 runs)"
    none = [without_energy(run(32, repeat)) for repeat in range(2)] + [
        broken_record(make_point(global_batch=32, micro_batch=32, repeat=2), "oom", "no room")
    ]
    records = [*some, *none, run(16, system="b"), run(32, system="b")]
    throughput, energy = heat_maps(records)[0]
    cells = {tuple(row[:2]): row[2] for row in energy.rows}
    assert cells["Test CPU", "16"] == f"{COST.text(told)} (2 of 3 runs)"
    assert cells["Test CPU", "32"] == "not known: the sensor went silent" and throughput.rows[1][2].endswith("token/s (2 of 3 runs)")
    assert energy.note.endswith("–: not known.")
    (batch,) = over_batch(records)[0]
    assert batch.rows[0][5].endswith(" (2 of 3 runs)") and batch.rows[1][5] == "–"
    assert batch.note.endswith(" 1 point without energy: the sensor went silent.")
    for draw in (time_and_energy, action):
        (figure,), _ = draw(records)
        assert sorted(row[0] for row in figure.rows) == ["Test CPU b16 (2 of 3 runs)", "b b16", "b b32"]


def test_other_micro_batches_are_no_repeats_whichever_of_their_runs_failed() -> None:
    """Of two micro-batches one has only its first result and the other only its second: one mean of both was drawn."""
    few, many = (run(16, repeat, slower, micro_batch=micro) for repeat, slower, micro in ((0, 1.0, 4), (1, 2.0, 16)))
    assert len(over_batch([few, many, run(32), run(64)])[0][0].rows) == 4 and len(time_and_energy([few, many])[0][0].rows) == 2


def test_a_row_without_devices_is_no_repeat_of_one_with_one_device() -> None:
    """Of a table: 1,000 token/s on one device, and 4,000 on nobody knows how many."""
    told, untold = run(16), run(16, 1, 0.25, environment={"missing": {"point.devices": "not in the table"}})
    lines = repeated([told, untold])
    assert [len(line.runs) for line in lines] == [1, 1] and len(same_work([told, untold])) == 2
    names = ["gpt-mini b16 fp32 1x1", "gpt-mini b16 fp32 devices not stated"]
    assert [*labels([line.mean for line in lines]).values()] == names
    (figure,), _ = time_and_energy([told, untold])
    assert [row[0] for row in figure.rows] == ["1x1", "devices not stated"]
    assert HOUR.of([told]) is not None and HOUR.told([untold]) == "not known: the number of devices is not stated"
    assert bottleneck(untold, Partners([told, untold])).shares[1].because == "the number of devices is not stated"


def test_a_row_without_a_batch_has_no_place_over_the_batch() -> None:
    """It stood at batch 1, where nobody had measured."""
    untold = [run(1, slower=slower, system=system, environment=NO_BATCH) for slower, system in ((0.1, "a"), (0.2, "b"))]
    records = [run(batch, system=system) for system in ("a", "b") for batch in (16, 32)]
    told = "Left out: 2 results of which the batch is not stated."
    for figure in (*over_batch([*records, *untold])[0], *heat_maps([*records, *untold])[0]):
        assert {row[1] for row in figure.rows} == {"16", "32"} and told in figure.note
    assert [row[1] for figure in over_batch(untold)[0] for row in figure.rows] == ["–", "–"] and heat_maps([records[0], *untold])[0] == []
    assert not any("Left out" in figure.note for figure in (*over_batch(records)[0], *heat_maps(records)[0]))


def test_a_row_without_a_batch_meets_no_batch_of_one() -> None:
    untold, told = run(1, slower=0.5, environment=NO_BATCH), [run(1), run(16)]
    assert len(history([*told, untold])) == 3 and len(repeated([*told, untold])) == 3
    comparison = compare(
        Side("told", tuple(told)), Side("untold", (untold, run(16).model_copy(update={"started_at": "2026-11-01T12:00:00+00:00"})))
    )
    assert [len(pair.keys[0]) for pair in comparison.pairs] == [1] and len(comparison.unmatched) == 2
    assert Partners([*told, untold]).larger_batch(told[0]) == (16, told[1].value("throughput_per_device"))
    assert Partners([*told, run(32, environment=NO_BATCH)]).larger_batch(told[1]) is None and Partners(told).larger_batch(untold) is None


NO_BATCH = {"missing": {"point.global_batch": "not in the table"}}


def test_parts_of_the_runtime_add_up() -> None:
    """Geometric means of 80, 10, 10 % and 60, 10, 30 % are 69.3, 10.0 and 17.3 %."""
    parts = ((0.8, 0.1, 0.1), (0.6, 0.1, 0.3))
    records = [
        one.model_copy(
            update={"metrics": {**one.metrics, **{name: Metric(value=part, unit="1") for name, part in zip(SHARES, own, strict=True)}}}
        )
        for one, own in zip((run(16), run(16, 1)), parts, strict=True)
    ]
    (figure,), _ = runtime_parts(records)
    assert figure.rows[0][2:] == ["70.0 %", "10.0 %", "20.0 %"]
    mean = repeated(records)[0].mean.metrics
    assert [mean[name].value for name in SHARES] == pytest.approx([0.7, 0.1, 0.2]), "in tables and beside published figures, too"
    with_zero = [records[0], records[1].model_copy(update={"metrics": {**records[1].metrics, "rest_share": Metric(value=0.0, unit="1")}})]
    assert repeated(with_zero)[0].mean.value("rest_share") == pytest.approx(0.05)


def test_what_is_next_to_nothing_in_one_run_does_not_hide_what_is_much_in_another() -> None:
    """The geometric mean of 30 % and 0.02 % of waiting is 0.77 %, with an interval to eleven million per cent; and no rank is rank 2."""
    names = ("data_wait_share", "other_cpu_share", "rank_imbalance", "slowest_rank", "rest_share")
    both = [
        one.model_copy(
            update={"metrics": {**one.metrics, **{name: Metric(value=part, unit="1") for name, part in zip(names, own, strict=True)}}}
        )
        for one, own in zip((run(16), run(16, 1)), ((0.3, 0.4, 0.2, 1, 0.3), (0.0002, 0.0, 0.001, 4, 0.0002)), strict=True)
    ]
    mean = repeated(both)[0].mean.metrics
    assert [written(name, mean[name]) for name in names[:4]] == ["15.0 %", "20.0 %", "10.1 %", "–"]
    assert mean["slowest_rank"].reason == "not the same in every run: 1, 4" and mean["rest_share"].high == 1
    assert repeated([both[1], both[1].model_copy(update={"key": "another"})])[0].mean.value("slowest_rank") == 4


def test_quantiles_of_step_times_are_those_of_the_record() -> None:
    """Of an even number of steps the median lies between the two in the middle; of many steps not all are drawn."""
    record = run()
    for seconds in (np.array([0.485, 0.1, 0.262, 0.7]), np.linspace(0.1, 0.9, 1000) ** 2):
        n = len(seconds)
        steps = Steps(np.arange(n), ["measure"], np.zeros(n, int), seconds, np.ones(n))
        (figure,) = step_distributions([record], {record.key: steps})
        assert figure.rows[0][1:6] == [plain("", float(np.quantile(seconds, share)), "s") for share in (0, 0.05, 0.5, 0.95, 1)]
    (even,) = step_distributions(
        [record], {record.key: Steps(np.arange(2), ["measure"], np.zeros(2, int), np.array([0.262, 0.485]), np.ones(2))}
    )
    assert even.rows[0][3] == "374 ms"


def test_energies_without_a_window_are_left_out_with_the_reason() -> None:
    """As of a table that gives energies of devices and nodes and a rate."""
    imported = [run(batch).model_copy(update={"window": None}) for batch in (16, 32)]
    figures, notes = node_and_devices(imported)
    told = "2 points not drawn: the record does not say how many items the energy was for: it has no window."
    assert figures == [] and notes == [f"Energy of node and devices, gpt-mini: {told}"]
    (figure,), _ = node_and_devices([*imported, run(64)])
    assert [row[0] for row in figure.rows] == ["b64"] and figure.note == told


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_every_status_has_a_word_in_a_heat_map(status: str) -> None:
    records = [run(batch, system=system) for system in ("a", "b") for batch in (16, 32)]
    (throughput, _), _ = heat_maps([*records, broken_record(make_point(global_batch=64, micro_batch=64, system="a"), status, "why")])
    assert throughput.rows[2][2] == f"{status}: why"


def test_an_energy_of_zero_is_drawn() -> None:
    """A counter that did not move within the window."""
    records = [run(16), run(32)]
    for name in ("energy_per_item", "device_energy", "node_energy"):
        records[0].metrics[name] = records[0].metrics[name].model_copy(update={"value": 0.0, "low": None, "high": None})
    pareto, both, product = energy_figures(records)
    assert pareto.rows[0][2].startswith("0 J") and both.rows[0][-1] == "–" and product.rows[0][1].startswith("0 ")
    assert [row[3] for row in pareto.rows] == ["no", "yes"] and "it is on no front" in pareto.note, "it is no measured energy"
    assert dict(findings(repeated(records)))["Least energy"].startswith("gpt-mini b32 ")


@pytest.mark.parametrize("value", [0.0, -5.0])
def test_numbers_that_cannot_be_are_drawn_as_they_are_and_never_the_best(value: float) -> None:
    """Of a damaged record: a rate below zero took the least time, and bars of such numbers only ended the report."""
    good, bad = run(16), run(32)
    names = ("throughput", "throughput_per_device", "energy_per_item", "device_energy", "node_energy", "runtime", *EPOCHS)
    bad.metrics.update({name: bad.metrics[name].model_copy(update={"value": value, "low": None, "high": None}) for name in names})
    told = "1 point not drawn: the throughput is not above zero."
    assert [figure.note.endswith(told) for figure in action([good, bad])[0]] == [True]
    assert "b16" in dict(findings(repeated([good, bad])))["Fastest"] and time_and_energy([bad])[1][0].endswith(told)
    for draw in (over_batch, node_and_devices, runtime_parts, epochs):
        assert len(draw([bad])[0]) == 1


EPOCHS = ("epoch_time_first", "epoch_time_mean")


def test_disturbed_repeats_count_nowhere_where_others_are_there(tmp_path: Path) -> None:
    """Tables, figures and comparisons had a mean of all runs with a result, and advice one of those that nothing disturbed."""
    records = [run(batch, repeat, 1 + repeat / 500, system=system) for system in ("a", "b") for batch in (16, 32) for repeat in (0, 1)]
    busy = run(16, 2, 2.0, system="b").model_copy(update={"flags": ["busy_machine", "imprecise"]})
    for draw in (over_batch, heat_maps, time_and_energy, action, node_and_devices, runtime_parts, epochs):
        with_busy, without = (draw(some)[0] for some in ([*records, busy], records))
        for figure, same in zip(with_busy, without, strict=True):
            assert [drawing.title for drawing in figure.drawings] == [drawing.title for drawing in same.drawings]
            assert "disturbed" not in figure.note
            words = [[cell.replace(" (2 of 3 runs)", "") for cell in row] for row in figure.rows]
            assert [row for row in words if "3" not in row] == [list(row) for row in same.rows if list(row) in words], figure.title
            assert any("(2 of 3 runs)" in cell for row in figure.rows for cell in row), figure.title
    alone, line = (repeated(some)[-2] for some in (records, [*records, busy]))
    assert line.mean.metrics == alone.mean.metrics and (line.count, line.mean.flags) == ("2/3", [])
    assert line.lost == "1 of 3 runs left out, as something disturbed them: busy_machine"
    (row,) = result_rows(Store(tmp_path), [line], {one.key: one.point.label for one in line.runs})
    assert (row.count, row.reason, row.flags) == ("2/3", line.lost, ["module_scope"])
    (choice, _), (of_table, *_) = advise([one for one in [*records, busy] if one.point.system == "b"])[0].choices, [line.mean]
    assert choice.rate == of_table.metrics["throughput"]
    assert dict(findings(repeated([*records, busy])))["Quality"].endswith("; nothing disturbed them; 1 disturbed run left out")
    sides = [Side(name, tuple(one for one in [*records, busy] if one.point.system == name)) for name in ("a", "b")]
    comparison = compare(*sides)
    (change,) = [one for pair, one in comparison.changes if one.metric == "throughput" and " b16 " in pair.name]
    assert change.b is not None and change.b.value == of_table.value("throughput") and change.runs == (2, 2) and comparison.left_out == 1


def test_what_rests_on_disturbed_runs_is_said() -> None:
    records = [run(batch, system=system) for system in ("a", "b") for batch in (16, 32)]
    records[2] = records[2].model_copy(update={"flags": ["busy_machine", "imprecise"]})
    for draw in (over_batch, heat_maps, time_and_energy, action, node_and_devices, runtime_parts, epochs):
        for figure in draw(records)[0]:
            assert "Something disturbed every run of b b16 (busy_machine)." in figure.note, figure.title
    assert "; 1 of 4 disturbed" in dict(findings(repeated(records)))["Quality"]
    limit = [one.model_copy(update={"flags": ["disturbed_probe"]}) for one in records[:1]]
    told = dict(findings(repeated([*limit, records[1]])))["Quality"]
    assert told.endswith("; nothing disturbed them; the search for the limit was disturbed in 1 of 2")
    (alone,) = over_batch(records[2:3])[0]
    assert "Something disturbed" in alone.note and "disturbed" not in over_batch(records[:2])[0][0].note
    many = [
        run(16, params={"n": number}).model_copy(update={"flags": ["throttled"] * (number >= MOST_ROWS)}) for number in range(MOST_ROWS + 1)
    ]
    assert "disturbed" not in over_batch(many)[0][0].note, "it is not drawn"


def test_long_names_of_rows_stay_inside_a_heat_map() -> None:
    """They were cut where the drawing ends, so that machines were alike."""
    machines = [f"{'a very long name of a machine ' * 3}{end}" for end in ("one", "two")]
    (throughput, _), _ = heat_maps([run(batch, system=system) for system in machines for batch in (16, 32)])
    assert [f">… {end}<" in throughput.drawings[0].svg for end in ("one", "two")] == [True, True] and machines[0] in throughput.rows[0][0]


def test_points_whose_steps_are_not_read_are_counted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = [save(store, run(1, status="invalid")), *(save(store, run(2 + at)) for at in range(MOST_SERIES + 3))]
    figures = [figure for section in figure_sections(store, records) for figure in section.figures]
    noted = {one.title.split(":")[0]: (len(one.legend), one.note.rpartition("Not drawn: ")[2]) for one in figures}
    assert noted["Step times in the window"] == noted["Step time over steps"] == (MOST_SERIES, "3 further points.")
    assert noted["Training loss over steps"] == (MOST_SERIES, "4 further points.")


def test_quality_has_the_interval_of_the_tables_and_not_that_of_a_rate() -> None:
    """What a rate varies by from run to run says nothing about the quality of a model."""
    records = [run(16, repeat) for repeat in range(2)]
    for record in records:
        record.metrics["psnr"] = Metric(value=31.0, unit="dB", low=30.8, high=31.2, n=100)
    psnr = next(one for one in QUALITY if one.name == "psnr")
    for group in (records[:1], records):
        assert psnr.of(group) == mean_metric(group, "psnr")
