"""Tables in the terminal, as text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from record_factory import HOSTILE, NO_SENSOR, broken_record, make_point, make_record
from rich.cells import cell_len
from rich.console import Console, RenderableType

from caraml.analysis.run_variation import INTERVAL
from caraml.metrics.model import METRICS, Metric, OwnMetric
from caraml.report.document import HEADLINE, result_rows
from caraml.report.grouping import repeated
from caraml.report.section import written
from caraml.report.terminal import record_view, repeats_view, results_table
from caraml.results.record import FLAGS, Costly, Profile, Record
from caraml.results.store import Store


def text_of(renderable: RenderableType, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False).print(renderable)
    return file.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def records() -> list[Record]:
    gpu = make_record(make_point(benchmark="resnet50", global_batch=64, precision="bf16"), "image", watts=250.0)
    sheet = {"mfu": Metric(value=0.41, unit="1", low=0.405, high=0.415, n=60)}
    return [
        make_record(flags=["imprecise"]),
        gpu.model_copy(update={"metrics": {**gpu.metrics, **sheet}}),
        broken_record(make_point(global_batch=4096), "oom", "out of memory: asked for 96 GiB"),
        broken_record(make_point(benchmark="[bold]\x1b[31mred"), "failed", HOSTILE),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_results_table_fits_and_says_everything(records: list[Record], width: int) -> None:
    text = text_of(results_table(records), width)
    assert max(map(cell_len, text.splitlines())) <= width
    words = flat(text)
    for expected in ("no sensor [", "40.8 % m", "41.0 % s", "100 ms", "4.0 %", "3.00", "± 5 %", "image/s", "mJ/image", "oom [", "failed"):
        assert expected in words, expected
    assert f"no energy: {NO_SENSOR}" in words
    assert f"imprecise: {FLAGS['imprecise']}" in words
    assert "out of memory: asked for 96 GiB" in words
    assert HOSTILE in words
    assert words.count(NO_SENSOR) == 1
    assert "\x1b" not in text
    assert "[bold]" in words


def test_a_row_at_80_columns() -> None:
    lines = text_of(results_table([make_record(flags=["imprecise"])]), 80).splitlines()
    assert lines[0].split() == ["Point", "Status", "Throughput", "Energy", "MFU", "Step", "Wait", "GiB"]
    assert lines[1] == "gpt-mini b16 ok [1]     40,790 ± 5 %  no sensor [2] 40.8 % m  100 ms 4.0 %  3.00"
    assert lines[2].split() == ["fp32", "token/s"]


def test_a_small_mfu_is_in_one_line_with_its_mark() -> None:
    record = make_record()
    for share, text in ((0.000928, "0.09 % s"), (0.00928, "0.93 % s"), (0.0128, "1.28 % s")):
        small = record.model_copy(update={"metrics": {**record.metrics, "mfu": Metric(value=share, unit="1")}})
        assert text in text_of(results_table([small]), 80).splitlines()[1]


def test_a_narrow_terminal_has_fewer_columns_and_no_number_in_two_lines(records: list[Record]) -> None:
    lines = text_of(results_table([make_record(flags=["imprecise"])]), 60).splitlines()
    assert lines[:2] == [
        "Point        Status       Throughput         Energy      MFU",
        "gpt-mini b16 ok [1]     40,790 ± 5 %  no sensor [2] 40.8 % m",
    ]
    assert lines[3] == "no room for Step, Wait, GiB: they need 80 columns"
    for width in (40, 60, 79):
        text = text_of(results_table(records), width)
        assert max(map(cell_len, text.splitlines())) <= width
        assert "40,790 ± 5 %" in text


def test_a_meter_of_the_whole_node_alone_is_shown_and_said_to_be_that() -> None:
    record = make_record()
    assert record.window is not None
    record.metrics["node_energy"] = Metric(value=record.window.items * 0.02, unit="J", bound=record.window.items * 0.001, scope="node_dc")
    text = flat(text_of(results_table([record]), 80))
    assert f"[1] energy of the whole node; of its devices or processors none: {NO_SENSOR}" in text
    (row,) = result_rows(Store(Path("results")), repeated([record]), {record.key: "gpt"})
    cell = row.cells[HEADLINE.index("energy_per_item")]
    assert cell.text == "20.0 mJ/token, ± at most 1.0 mJ/token (node)" and cell.value is None
    assert all(word in text for word in cell.text.replace(",", "").split())


def test_a_reason_with_a_path_longer_than_a_line_is_whole() -> None:
    """The end of the path was cut off, and with it which file it was."""
    path = f"/p/scratch/{'x' * 90}/file-7"
    text = text_of(results_table([broken_record(make_point(), "failed", f"not found: {path}")]), 80)
    assert path in "".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize(("skipped", "rows"), [(3, 4), (12, 1)])
def test_many_skipped_points_do_not_hide_those_that_ran(skipped: int, rows: int) -> None:
    left_out = [broken_record(make_point(nodes=2, global_batch=2**k), "skipped", f"needs {2**k} nodes") for k in range(skipped)]
    said = text_of(results_table([make_record(), *left_out]), 120)
    assert len([line for line in said.splitlines() if line.startswith("gpt-mini")]) == rows
    assert ("12 points skipped, the first gpt-mini b1 2x1 fp32: needs 1 nodes;" in flat(said)) == (skipped == 12)


def test_flags_are_named_in_a_wide_table() -> None:
    assert "imprecise [1]" in text_of(results_table([make_record(flags=["imprecise"])]), 120)


def test_repeats_are_shown_by_their_means_with_each_run_below() -> None:
    runs = [make_record(make_point(repeat=repeat), step=0.1 + 0.001 * repeat, flags=["imprecise"] * (repeat == 1)) for repeat in range(3)]
    words = flat(text_of(repeats_view([*runs, broken_record(make_point(repeat=3), "failed", "no room")]), 140))
    mean = repeated(runs)[0].mean.metrics["throughput"]
    assert f"Throughput {written('throughput', mean)} n = 3" in words and "3/4 runs" in words and "imprecise (1 of 3 runs)" in words
    assert all(f"{run.key} {run.point.label} ok {written('throughput', run.metrics['throughput'])}" in words for run in runs)


def test_a_table_of_repeats_has_a_row_for_each_work_and_says_what_was_lost() -> None:
    runs = [make_record(make_point(repeat=repeat), step=0.1 + 0.001 * repeat) for repeat in range(3)]
    records = [*runs, broken_record(make_point(repeat=3), "failed", "no room"), make_record(make_point(global_batch=8))]
    text = text_of(results_table(records), 80)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "3/4" in text and "1 of 4 runs without a result: failed: no room" in flat(text) and INTERVAL in flat(text)
    assert len([line for line in text.splitlines() if "token/s" in line]) == 2
    each = flat(text_of(results_table(records, runs=True), 80))
    assert each.count("token/s") == 4 and "of the run's own window" in each


def test_quality_holds_for_held_out_data_and_not_for_the_window() -> None:
    record = make_record()
    record.metrics["psnr"] = Metric(value=30.0, unit="dB", low=29.0, high=31.0, n=100)
    words = flat(text_of(record_view(record), 200))
    assert "PSNR 30.0 ± 1.0 dB" in words.replace("  ", " ") and "over the held-out data, after the last step" in words


def test_a_profile_is_a_table_of_what_cost_most() -> None:
    costly = Costly(name="aten::mm <script>", calls=1234, seconds=0.25, share=0.5)
    profile = Profile(steps=3, micro_batches=12, seconds=0.6, costliest=[costly], reason="memory.pickle.gz: too large")
    words = flat(text_of(record_view(make_record(profile=profile)), 140))
    assert "Costliest operators" in words and "50.0 % 250 ms 1,234 aten::mm <script>" in words
    assert "rank 0, 3 steps after the window, 12 micro-batches in 600 ms" in words and "memory.pickle.gz: too large" in words
    assert "Profile no room" in flat(text_of(record_view(make_record(profile=Profile(reason="no room"))), 140)).replace("─", "").replace(
        "  ", " "
    )


def test_an_empty_table() -> None:
    assert "Throughput" in text_of(results_table([]), 80)


def test_record_view_explains_every_number() -> None:
    record = make_record(watts=250.0, files={"steps": "steps.parquet", "power": "power.parquet"}, flags=["not_steady"])
    words = flat(text_of(record_view(record, "results/points/x/1"), 800))  # no cell takes two lines
    for name, metric in record.metrics.items():
        assert METRICS[name].definition in words, name
        if metric.value is not None:
            assert repr(metric.value) in words, name
    for expected in (
        "95 % confidence interval",
        "bound",
        "n = 60",
        "energy counter",
        "GPU-5a",
        "bound from update period 1.12 J, resolution 375 mJ",
        "the sensor includes more than the accelerator",
        FLAGS["not_steady"],
        "6 P + 12 L H T",
        "best of 5 matrix products",
        "no data sheet figure for Test CPU",
        "60 steps (5 to 64)",
        "standard library",
        "torch 2.13.0",
        "results/points/x/1/steps.parquet",
        "first step",
    ):
        assert expected in words, expected


@pytest.mark.parametrize(("workload", "where"), [("command", "over the whole run"), ("curves", "over the held-out data")])
def test_record_view_says_what_a_metric_of_somebody_else_is(workload: str, where: str) -> None:
    said = {"<b>x": OwnMetric(unit="[red]dB", better="lower", definition="How [bold]far[/] off", source="caraml-mine 1.0")}
    record = make_record(make_point(workload=workload), metrics={"<b>x": Metric(value=3.5, unit="[red]dB")}, definitions=said)
    words = flat(text_of(record_view(record), 200))
    for expected in ("<b>x", "3.50 [red]dB", "How [bold]far[/] off. Lower is better.", "source: caraml-mine 1.0", where):
        assert expected in words, words


def test_record_view_says_over_what_a_share_of_the_runtime_is() -> None:
    shares = {name: Metric(value=0.1, unit="1") for name in ("loading_share", "training_share", "rest_share")}
    words = flat(text_of(record_view(make_record(metrics=shares)), 200))
    assert words.count("over the whole run") == 3 and "over the window (" not in words


def test_record_view_without_energy_says_why_and_what_to_do() -> None:
    words = flat(text_of(record_view(make_record()), 100))
    assert f"no energy: {NO_SENSOR}" in words
    assert "run caraml doctor" in words
    assert "no window: nothing was measured" in flat(text_of(record_view(broken_record(make_point(), "failed", HOSTILE)), 100))
