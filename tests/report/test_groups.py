"""Which records belong into one figure, what its lines are called, and what is left out."""

from __future__ import annotations

import re
from pathlib import Path

from record_factory import broken_record, make_point, make_record, save

from caraml.analysis.estimate import values
from caraml.analysis.grouping import varying
from caraml.analysis.run_variation import mean_metric, ratios
from caraml.base.chart import wide_range
from caraml.metrics.model import Metric, OwnMetric
from caraml.report.figures import front, heat_maps, over_batch, time_and_energy
from caraml.report.grouping import ACTION, ENERGY, HOUR, LABEL, RATE, TIME, families, first, repeated
from caraml.report.scaling import histories
from caraml.report.works import item_of, works
from caraml.results.record import Record
from caraml.results.selector import select
from caraml.results.store import Store
from caraml.suite.model import Placement, Policy


def test_works_are_named_by_what_tells_them_apart() -> None:
    small, large = ({"layers": layers, "width": 64} for layers in (4, 8))
    records = [make_record(make_point(params=params, global_batch=batch)) for params in (small, large) for batch in (16, 32)]
    records.append(make_record(make_point(benchmark="other")))
    found = works(records)
    assert {name: len(group) for name, group in found.items()} == {"gpt-mini layers=4": 2, "gpt-mini layers=8": 2, "other": 1}
    assert list(works([make_record(make_point(mode="train")), make_record(make_point(mode="compute"))])) == [
        "gpt-mini train",
        "gpt-mini compute",
    ]


def test_works_whose_names_would_be_equal_are_both_there() -> None:
    records = [make_record(make_point(workload="command", params={"b": value})) for value in (1, "1", "2")]
    assert {name: len(group) for name, group in works(records).items()} == {"gpt-mini b=1": 1, "gpt-mini b=1 (2)": 1, "gpt-mini b=2": 1}


def test_failed_work_stands_beside_the_same_work_that_ran() -> None:
    (group,) = works([broken_record(make_point(global_batch=64), "oom", "too large"), make_record(make_point())]).values()
    assert [record.status for record in group] == ["oom", "ok"]
    assert item_of(group) == "token"


def test_families_are_named_by_their_differences_only() -> None:
    def record(system: str, device: str, devices: int, batch: int, **more: object) -> object:
        return make_record(make_point(system=system, device=device, devices=devices, global_batch=batch, micro_batch=4, **more))

    one = [record("local", "Test CPU x1", 1, batch) for batch in (16, 32)]
    assert list(families(one, ("batch",))) == ["Test CPU"]  # type: ignore[arg-type]
    two = [*one, record("jedi", "NVIDIA GH200 x4", 1, 16), record("jedi", "NVIDIA GH200 x4", 4, 16)]
    assert list(families(two, ("batch",))) == ["Test CPU 1x1", "jedi 1x1", "jedi 1x4"]  # type: ignore[arg-type]
    three = [record("jedi", "NVIDIA GH200 x4", 1, 16, precision=precision) for precision in ("bf16", "fp32")]
    assert list(families(three, ("batch",))) == ["bf16", "fp32"]  # type: ignore[arg-type]
    divided = [
        record("jedi", "NVIDIA GH200 x4", 4, 16, placement=placement) for placement in (Placement(), Placement(tp=2), Placement(pp=4))
    ]
    assert list(families(divided, ())) == ["whole copies", "tp2", "pp4 1f1b"], "no repeats"  # type: ignore[arg-type]


def test_repeats_share_a_place_and_micro_batches_do_not() -> None:
    repeats = [make_record(make_point(repeat=repeat)) for repeat in range(3)]
    assert [len(group) for group in families(repeats, ()).values()] == [3]
    grown = [make_record(make_point(global_batch=batch, micro_batch=batch)) for batch in (4, 8)]
    assert [len(group) for group in families(grown, ("batch",)).values()] == [2], "the micro batch grows with the batch"
    split = [make_record(make_point(global_batch=16, micro_batch=micro)) for micro in (4, 8)]
    assert list(families(split, ("batch",))) == ["micro batch 4", "micro batch 8"]


def test_quantities_follow_from_the_window() -> None:
    record = make_record(make_point(nodes=1, devices=2, global_batch=16), watts=300.0)
    rate, joules = record.value("throughput"), record.value("energy_per_item")
    assert rate is not None and joules is not None
    time, energy, action, hour = (quantity.of([record]) for quantity in (TIME, ENERGY, ACTION, HOUR))
    assert time is not None and energy is not None and action is not None and hour is not None
    assert time.value == 1e6 / rate
    assert energy.value == 1e6 * joules
    assert action.value == time.value * energy.value
    assert time.low is not None and time.high is not None and time.low < time.value < time.high
    mean_power = record.value("mean_power")
    assert mean_power is not None and hour.value == mean_power / 2


def test_repeats_are_one_number_with_the_interval_of_the_tables_and_of_comparisons() -> None:
    records = [make_record(make_point(repeat=repeat), step=0.1 * (1 + 0.01 * repeat)) for repeat in range(3)]
    found, table = RATE.of(records), mean_metric(records, "throughput_per_device")
    ((mean, _, _),), _ = ratios([(values(records, "throughput_per_device"), [])], "throughput_per_device")
    assert found is not None and table is not None and mean is not None and found.n == 3
    assert (found.value, found.low, found.high) == (table.value, table.low, table.high) == (mean.value, mean.low, mean.high)
    (line,) = repeated(records)
    assert line.count == "3" and line.mean.metrics["throughput_per_device"] == table and line.mean.point.label == records[0].point.label
    lost = broken_record(make_point(repeat=3), "failed", "no room")
    (line,) = repeated([lost, *records])
    assert line.count == "3/4" and line.lost == "1 of 4 runs without a result: failed: no room" and line.mean.status == "ok"
    assert line.mean.metrics["throughput_per_device"] == table
    assert RATE.of([*records, broken_record(make_point(repeat=3), "failed", "x")]) == table, "as in the tables"


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 5.0), (4.0, 1.0), (2.5, 7.0)]
    assert front(points) == {(1.0, 9.0), (2.0, 5.0), (4.0, 1.0)}


def test_what_is_left_out_is_said() -> None:
    assert first([1, 2], 2, "line") == ([1, 2], "")
    shown, more = first([1, 2, 3], 1, "line")
    assert shown == [1]
    assert "2 further lines not drawn" in more


def test_wide_ranges() -> None:
    assert wide_range([1.0, 21.0])
    assert not wide_range([1.0, 19.0])
    assert not wide_range([0.0, 100.0])


def test_a_run_with_a_profile_is_a_repeat_of_its_work() -> None:
    plain, traced = make_record(), make_record(make_point(profile=True))
    assert plain.key != traced.key and [len(line.runs) for line in repeated([plain, traced])] == [2]


def test_quality_is_drawn_over_the_batch_where_it_is_known() -> None:
    records = [make_record(make_point(global_batch=batch)) for batch in (16, 32, 64)]
    assert [figure.title for figure in over_batch(records)[0]] == ["Rate over global batch: gpt-mini"]
    for record, value in zip(records, (31.0, 29.5, 24.0), strict=True):
        record.metrics["psnr"] = Metric(value=value, unit="dB", low=value - 1, high=value + 1, n=100)
        record.metrics["ms_ssim"] = Metric(value=None, unit="1", reason="only mode train validates and saves")
    rate, quality = over_batch(records)[0]
    assert (rate.title, quality.title) == ("Rate over global batch: gpt-mini", "Quality over global batch: gpt-mini")
    assert list(quality.columns) == ["series", "global batch", "runs", "psnr"] and len(quality.drawings) == 1
    assert [(row[1], row[3].split(" ")[0]) for row in quality.rows] == [("16", "31.0"), ("32", "29.5"), ("64", "24.0")]
    assert "PSNR [dB]" in quality.drawings[0].svg and "without energy" not in quality.note


def test_metrics_of_others_have_figures_in_each_of_their_units() -> None:
    """Over the batch where it was swept, else as bars, which say of how many runs they are; where one is below zero as markers."""

    def record(batch: int, value: float, unit: str = "GB/s", name: str = "triad", **point: object) -> Record:
        made = make_record(make_point(global_batch=batch, **point))
        said = {name: OwnMetric(unit=unit, source="the suite"), "shift": OwnMetric(unit="{x}", source="the suite")}
        own = {name: Metric(value=value, unit=unit), "shift": Metric(value=-value, unit="{x}"), "undefined": Metric(value=1.0, unit="1")}
        return made.model_copy(update={"metrics": made.metrics | own, "definitions": said})

    _, own = over_batch([record(16, 10.0), record(32, 20.0), record(64, 3e4, "MB/s")])[0]
    assert own.title == "Own metrics over global batch: gpt-mini" and list(own.columns)[3:] == ["triad", "shift", "triad"]
    assert "triad [GB/s]" in own.drawings[0].svg and "10³ MB/s" in own.drawings[2].svg and "triad" not in own.drawings[1].svg
    assert [[row[3], row[5]] for row in own.rows] == [["10.0 GB/s", "–"], ["20.0 GB/s", "–"], ["–", "30,000 MB/s"]]
    silent = record(16, 10.0, repeat=1)
    silent.metrics["triad"] = Metric(value=None, unit="GB/s")
    single = [record(16, 10.0), silent, record(16, 5.0, "MB/s", params={"layers": 8}), record(16, 20.0, params={})]
    rate, bars, shift, others = over_batch(single)[0]
    assert (bars.title, shift.title, others.title) == ("triad, GB/s", "shift, {x}", "triad, MB/s") and rate.title == "Throughput, token/s"
    assert [row[2] for row in bars.rows] == ["10.0 GB/s (1 of 2 runs)", "20.0 GB/s"] and [row[2] for row in others.rows] == ["5.00 MB/s"]
    for batches in ((16, 32), (16,)):  # long names and units were drawn over the next panel, and beyond the edge
        own = over_batch([record(batch, 2e4, "u" * 40, "n" * 60) for batch in batches])[0][1]
        assert max(len(text) for text in re.findall("<text[^>]*>([^<]*)<", own.drawings[0].svg)) <= LABEL
    assert "triad [10³]" in over_batch([record(batch, 2e4, "1") for batch in (16, 32)])[0][1].drawings[0].svg


def test_a_result_over_time_is_named_after_the_work_and_not_after_a_repeat(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = [save(store, make_record(make_point(repeat=repeat), step=0.1 + 0.001 * repeat)) for repeat in range(3)]
    (figure,), _ = histories(store, records)
    assert figure.title.endswith(f": {records[0].point.label}") and "#" not in figure.title


def test_a_damaged_attempt_costs_a_result_over_time_itself_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = [save(store, make_record(make_point(repeat=repeat), step=0.1 + 0.001 * repeat)) for repeat in range(4)]
    (store.folder(records[1]) / "record.json").write_text("{")
    (figure,), _ = histories(store, records)
    assert len(figure.rows) == 3


def test_a_copy_of_a_record_in_no_results_folder_has_no_result_over_time(tmp_path: Path) -> None:
    made = Store(tmp_path)
    path = made.folder(save(made, make_record(make_point()))) / "record.json"
    copied = tmp_path / "elsewhere" / "record.json"
    copied.parent.mkdir()
    copied.write_bytes(path.read_bytes())
    found = select(str(copied), tmp_path)
    assert len(found.records()) == 1 and histories(found.store, found.records()) == ([], [])


def test_a_point_at_which_weak_and_strong_scaling_meet_stands_in_both() -> None:
    """Measured once, it has the name of the benchmark that asks for it first; the other's time and energy had no such point."""

    def record(benchmark: str, devices: int, batch: int, **more: object) -> Record:
        return make_record(make_point(benchmark=benchmark, devices=devices, global_batch=batch, **more), watts=300.0)

    weak, strong = [record("weak", n, 16 * n) for n in (1, 2, 4)], [record("strong", n, 64) for n in (1, 2)]
    other = record("strong", 1, 64, precision="bf16")  # 4 devices of another arithmetic are not on its line
    found = works([*weak, *strong, other, record("once", 8, 128), record("grid", 1, 8)])
    places = {name: [(one.point.benchmark, one.point.devices) for one in group] for name, group in found.items()}
    assert places == {
        "weak": [("weak", 1), ("weak", 2), ("weak", 4), ("once", 8)],
        "strong": [("weak", 4), ("strong", 1), ("strong", 2), ("strong", 1)],
        "once": [("once", 8)],
        "grid": [("grid", 1)],
    }
    first_figure, second = time_and_energy([*weak, *strong])[0]
    assert [len(figure.rows) for figure in (first_figure, second)] == [3, 3] and second.title.endswith(": strong")
    assert sum(len(figure.rows) for figure in over_batch([*weak, *strong])[0]) == 5, "a bar for each, once"
    two = works([record("weak", 1, 64), record("weak", 2, 128), record("strong", 2, 64)])
    assert {name: len(group) for name, group in two.items()} == {"weak": 2, "strong": 2}, "on a machine of two devices"
    repeats = [record("weak", 4, 64, repeat=number) for number in (1, 2)]
    assert {name: len(group) for name, group in works([*weak, *repeats, *strong]).items()} == {"weak": 5, "strong": 5}, "every repeat"
    long = Policy(min_seconds=60, max_seconds=90)
    for more in ({"measure": long}, {"seed": 7}):
        other_way = [record("long", n, 16 * n, **more) for n in (1, 2, 4)]
        apart = works([*(record("short", n, 16 * n) for n in (1, 2)), *other_way])
        assert {name: len(group) for name, group in apart.items()} == {"short": 2, "long": 3}
        anew = works([*(record("short", n, 16 * n) for n in (1, 2)), record("short", 4, 64, **more), *weak[2:], record("weak", 8, 128)])
        assert [(one.point.benchmark, one.point.devices) for one in anew["short"]] == [
            ("short", 1),
            ("short", 2),
            ("short", 4),
            ("weak", 8),
        ]


def test_runs_of_other_lengths_are_no_repeats() -> None:
    """Time, energy and quality of one epoch and of four are not of one work; windows of other lengths have the same rate."""
    policies = (Policy(), Policy(min_seconds=10), Policy(epochs=1), Policy(epochs=4), Policy(epochs=4, until_loss=0.1))
    records = [make_record(make_point(measure=measure), watts=300.0) for measure in policies]
    assert [len(one.runs) for one in repeated(records)] == [2, 1, 1, 1]
    found = families(records, ("batch",))
    assert [len(group) for group in found.values()] == [2, 1, 1, 1] and list(found)[2].endswith("epochs=4"), list(found)
    (figure,), _ = time_and_energy(records)
    assert len(figure.rows) == 4
    assert set(varying(records)) == {"measure.epochs", "measure.until_loss"}


def test_batches_of_a_program_are_one_work_whatever_number_of_items_goes_with_each() -> None:
    """ResNet-50 on IPUs, whose epochs leave out what is no whole batch: it had a figure for each number of images, and no heat map."""
    argv = ["train", "--batch={global_batch}", "--layers={layers}", "--log={out}"]

    def record(devices: int, batch: int, layers: int = 50, **more: object) -> Record:
        params = {"argv": argv, "items": "{images}", "images": 1000 // batch * batch, "layers": layers, "out": batch, **more}
        point = make_point(benchmark="several", workload="command", params=params, devices=devices, global_batch=batch, micro_batch=4)
        return make_record(point, item="image")

    records = [record(devices, batch, out=1) for devices in (2, 4) for batch in (16, 32, 64)]
    (figure,), _ = heat_maps(records)
    assert figure.title == "Throughput by machine and batch: several"
    assert [row[:2] for row in figure.rows] == [[line, str(batch)] for line in ("1x2", "1x4") for batch in (16, 32, 64)]
    once = [record(1, batch, out=1) for batch in (32, 64)]
    once = [one.model_copy(update={"point": one.point.model_copy(update={"benchmark": "once"})}) for one in once]
    assert {name: len(group) for name, group in works([*records, *once]).items()} == {"several": 6, "once": 2}, "no line of scaling"
    assert list(works([record(2, 16, out=1), record(2, 16, 101, out=1)])) == ["several layers=50", "several layers=101"]
    swept = [record(2, 16, out=1, images=images) for images in (1000, 2000)]
    assert list(works(swept)) == ["several images=1000", "several images=2000"], "two runs, no repeats"
    argv.append("--n={größe}")
    sized = [record(2, batch, out=1, items="{größe}", größe=batch) for batch in (16, 32)]
    assert len(works(sized)) == 2, "another command line"
    assert len(works([record(2, batch) for batch in (16, 32)])) == 2, "what the program is told makes it other work"
