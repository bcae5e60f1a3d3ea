"""Published figures: their numbers are what the sources' texts say of them, and results of the user stand in the same axes."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from typing import Any

import pytest
from record_factory import broken_record, make_point, make_record

from caraml.base.chart import standalone
from caraml.campaign.machine import machine_of
from caraml.metrics.model import METRICS, Metric
from caraml.reference import SHORT
from caraml.reference.figures import Experiment, PublishedFigure, drawn_names, experiments, published_figures
from caraml.report.published import beside, draw
from caraml.report.section import ReportFigure
from caraml.results.record import Record
from caraml.suite.choice import SuitePart, with_settings
from caraml.suite.expand import expand
from caraml.suite.load import load_suite
from caraml.system.catalogue import load_system
from caraml.workloads import params_of

FIGURES = {f"{figure.source} {figure.name}": figure for figure in published_figures()}


def numbers(name: str, value: str, panel: int = 0) -> list[float | None]:
    figure = FIGURES[name]
    return [one.number(figure.panels[panel].values[value]) for one in experiments(figure)]


def node(name: str) -> list[float]:
    """Energy of whole nodes [Wh]: both parts of a bar."""
    return [(a or 0) + (b or 0) for a, b in zip(numbers(name, "devices"), numbers(name, "rest of the node"), strict=True)]


def own(values: dict[str, tuple[float, str]], **point: Any) -> Record:
    record = make_record(
        make_point(
            **{"suite": "maelstrom", "benchmark": "ap3", "workload": "radiation_emulation", "params": {"lookalike": "small"}} | point
        ),
        "column",
    )
    return record.model_copy(update={"metrics": {name: Metric(value=value, unit=unit) for name, (value, unit) in values.items()}})


EPOCHS = {"epoch_time_first": (30.0, "s"), "epoch_time_mean": (20.0, "s")}


def test_the_thirteen_figures_that_the_tables_of_ap3_allow_are_there() -> None:
    wanted = (27, 29, 31, 33, 36, 37, 40, 41, 43, 45, 51, 52, 53)
    assert {f"maelstrom Figure {number}" for number in wanted} <= FIGURES.keys()
    assert all(draw(figure) is not None for figure in FIGURES.values())


def test_energies_of_nodes_are_those_that_section_4_6_states() -> None:
    devices = numbers("maelstrom Figure 51", "devices")
    assert (min(devices), max(devices)) == (6.91, 30.80)  # type: ignore[type-var]
    assert max(node("maelstrom Figure 51")) == pytest.approx(252.44, abs=0.01)
    assert numbers("maelstrom Figure 52", "devices") == pytest.approx([0.46, 0.46, 0.37], abs=0.0101)
    assert node("maelstrom Figure 52")[2] == pytest.approx(3.96, abs=0.01)
    batches = dict(
        zip([one.fields["batch"] for one in experiments(FIGURES["maelstrom Figure 53"])], node("maelstrom Figure 53"), strict=True)
    )
    assert batches[512] == pytest.approx(4.87, abs=0.01) and batches[32] == pytest.approx(15.14, abs=0.01)


def test_epochs_and_inference_are_those_of_their_tables_and_sections() -> None:
    ratios = numbers("maelstrom Figure 27", "ratio", 1)
    assert len(ratios) == 9 and ratios[0] == pytest.approx(463.0 / 434.6)
    # The cache is filled in the first epoch.
    assert all(ratio and (ratio > 1.6) == (at in (3, 4, 5)) and (ratio > 1.1) == (at in (3, 4, 5)) for at, ratio in enumerate(ratios))
    loading = numbers("maelstrom Figure 29", "loading")
    assert sum(filter(None, loading)) / 3 == pytest.approx(2.75, abs=0.01)  # section 4.4.2: around 2.7 seconds
    for name in ("Figure 29", "Figure 33", "Figure 40", "Figure 41", "Figure 45"):
        parts = zip(*(numbers(f"maelstrom {name}", part, 1) for part in ("inference", "loading", "rest")), strict=True)
        assert all(sum(one) == pytest.approx(100) for one in parts), name  # type: ignore[arg-type]


def test_parts_that_are_more_than_the_whole_leave_no_rest_to_draw() -> None:
    """AP2 on one H100: the printed times of training and loading are 92.30 and 7.99 % of the runtime."""
    figure = FIGURES["maelstrom Figures 19, 20, 22 to 24"]
    parts = {one.fields["system"]: one for one in experiments(figure) if one.fields["devices"] == 1}["jureca-h100"]
    shares = {name: parts.number(formula) or 0 for name, formula in figure.panels[0].values.items()}
    assert shares == {
        "training": pytest.approx(92.30, abs=0.01),
        "loading": pytest.approx(7.99, abs=0.01),
        "rest": pytest.approx(-0.29, abs=0.01),
    }
    drawn = draw(figure)
    assert drawn is not None and "-" not in "".join(
        text for text in re.findall(r"rest: (\S+)", standalone(drawn.drawings, "", [], "block"))
    )
    assert "1 x H100 PCIe, loading: 7.99" in standalone(drawn.drawings, "", [], "block")
    assert "On one H100" in figure.note and "100.3 %" in figure.note
    evaluation = [100 * one.fields["evaluation_time"] / one.fields["runtime"] for one in experiments(figure)]
    assert "evaluation (5 to 10 % of the runtime)" in figure.note and (round(min(evaluation)), round(max(evaluation))) == (5, 10)
    overlap = {
        name
        for name, one in FIGURES.items()
        for panel in one.panels
        for value in panel.values
        if one.form == "bars" and any((number or 0) < 0 for number in numbers(name, value, one.panels.index(panel)))
    }
    assert overlap == {f"maelstrom {name}" for name in ("Figures 19, 20, 22 to 24", "Figure 29", "Figure 41")}
    assert all("overlap" in FIGURES[name].note or "more than the runtime" in FIGURES[name].note for name in overlap)


def test_batches_of_the_vendor_s_program_are_one_line() -> None:
    figure = FIGURES["caraml IPU NLP"]
    drawn = draw(figure, results_of(figure.command))
    assert drawn is not None and [name for name in drawn.legend if name.startswith("yours")] == ["yours: gpt-117M jureca-ipu"]
    assert len([row for row in drawn.rows if row[0].startswith("yours") and row[1] == "rate [sequences/s]"]) == 9


def test_formulas_of_own_results_give_the_published_numbers_from_the_published_inputs() -> None:
    """Four batches on four IPUs, of which each took the printed energy of an epoch."""
    figure = FIGURES["caraml IPU NLP"]
    for one in experiments(figure):
        batch, devices, joules = one.fields["batch"], one.fields["devices"], 4 * one.fields["epoch_energy_per_device"]
        tokens = 4 * batch * 1024
        metrics = {"throughput": one.fields["throughput"] * 1024, "energy_per_item": joules / tokens}
        mine = Experiment(metrics | {"items_per_watt_hour": tokens * 3600 / joules, "global_batch": batch, "devices": devices})
        for panel in figure.panels:
            assert mine.number(panel.own[""]) == pytest.approx(one.number(panel.values[""]), rel=0.002), (batch, panel.axis)


def test_a_figure_of_energies_with_idle_devices_in_them_says_so() -> None:
    found = set()
    for name, figure in FIGURES.items():
        notes = [text for one in experiments(figure) for metric, text in one.notes if metric == "device_energy"]
        if any("the idle ones too" in text for text in notes):
            assert any(words in figure.note for words in ("idle devices", "unused devices", "energy of all four")), name
            found.add(figure.name)
    assert found == {"Figures 1 and 2", "Figure 3", "Figures 4 to 6", "Tables 35 to 39"}


def test_the_middle_of_a_printed_range_is_called_that() -> None:
    """Section 4.7.2 has the ends only: 4220 and 4260 s on GH200, 20807 and 21018 s on A2."""
    figure = FIGURES["maelstrom Figures 4 to 6"]
    times = [one.number(figure.panels[1].values[""]) for one in experiments(figure) if one.fields["app"] == "AP4"]
    assert times == [4240.0, 20912.5]
    assert "of AP4 the middle of the printed range" in figure.note


def test_ipu_tables_are_drawn_with_their_energy() -> None:
    assert numbers("caraml IPU NLP", "", 1)[0] == 15.68 and numbers("caraml IPU CV", "", 1)[0] == 32.09
    figure = draw(FIGURES["caraml IPU NLP"])
    assert figure is not None and len(figure.drawings) == 3 and "energy of 4 batches" in figure.drawings[1].svg


def test_results_of_the_user_stand_in_the_same_axes_and_are_told_apart() -> None:
    figure = only([own(EPOCHS)], "Figure 27")
    told = [row for row in figure.rows if row[0].startswith("yours: ")]
    assert [row[1:] for row in told] == [
        ["first epoch: time of an epoch [s]", "30.0 s"],
        ["mean epoch: time of an epoch [s]", "20.0 s"],
        ["ratio: first / mean epoch", "1.50"],
    ]
    assert len([row for row in figure.rows if row[0].startswith("D3.7: jureca-a100, ")]) == 27
    svg = figure.drawings[0].svg
    assert svg.index("D3.7: jureca-a100, no cache, run 0") < svg.index("yours: ap3") and 'data-of="' in svg
    assert "Systems: jureca-a100." in figure.note


def only(records: list[Record], name: str) -> ReportFigure:
    return next(figure for figure in beside(records)[0] if f" {name}:" in figure.title)


def results_of(command: str) -> list[Record]:
    """A result of each point that a command runs, with all numbers that figures draw; of epochs only where whole ones are trained."""
    options = ArgumentParser()
    options.add_argument("suite")
    options.add_argument("--system")
    for name in ("only", "where", "set"):
        options.add_argument(f"--{name}", action="append", default=[])
    given = options.parse_args(shlex.split(command)[2:])
    file, machine, part = load_suite(given.suite), machine_of(load_system(given.system), "print"), SuitePart(given.only, given.where)
    chosen = part.benchmarks(file)
    file = with_settings(file, given.set, params_of, chosen)
    plan = expand(file, machine, params_of, chosen=chosen)
    keys = part.keys(file, plan, machine, params_of)
    points = [one.point for one in plan.points if one.skip is None and (keys is None or one.key in keys) and one.point.repeat == 0]

    def numbers(by_epochs: bool) -> dict[str, Metric]:
        names = [name for name in drawn_names() & METRICS.keys() if by_epochs or not name.startswith("epoch_time")]
        return {name: Metric(value=1.0, unit="1", scope="device" if "energy" in name else None) for name in names}

    return [make_record(point).model_copy(update={"metrics": numbers(point.measure.epochs is not None)}) for point in points]


@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if figure.own != "1 == 2"])
def test_what_the_command_of_a_figure_measures_is_drawn_in_it_as_published(name: str) -> None:
    """Commands without epochs measured a window, whose time and energy are of as long as it ran."""
    figure = FIGURES[name]
    title = f"{SHORT[figure.source]} {figure.name}: {figure.title}"
    (drawn,) = (one for one in beside(results_of(figure.command))[0] if one.title == title)
    assert any(row[0].startswith("yours") for row in drawn.rows) and "by the clock" not in drawn.note


def test_figures_without_a_number_of_the_user_are_named_and_not_drawn() -> None:
    figures, notes = beside([own(EPOCHS)])
    assert not any("Figure 51" in figure.title for figure in figures) and "D3.7 Figure 51" in notes[0]
    assert not any("Figure 29:" in figure.title for figure in figures) and "Figure 29" not in notes[0]  # inference was not run


def test_other_workloads_and_points_without_a_result_draw_nothing() -> None:
    assert beside([]) == ([], [])
    assert beside([make_record(make_point())]) == ([], [])
    failed = broken_record(make_point(workload="radiation_emulation", params={}), "oom", "out of memory")
    assert beside([failed]) == ([], [])


def test_a_zero_has_no_place_on_a_logarithmic_axis() -> None:
    """It moved the lower end up, and smaller published numbers onto it."""
    rates = {32: 0.0, 64: 100.0 * 2**20}
    records = [own({"input_bandwidth": (rate, "B/s")}, mode="compute", global_batch=b, micro_batch=b) for b, rate in rates.items()]
    figure = only(records, "Figure 46")
    assert [row[2] for row in figure.rows if row[0].startswith("yours")] == ["0", "100"]
    assert figure.drawings[0].svg.count('data-tip="yours') == 1


def test_a_projected_epoch_is_no_epoch() -> None:
    record = own(EPOCHS)
    projected = Metric(value=20.0, unit="s", reason="projected from the window")
    record = record.model_copy(update={"metrics": {**record.metrics, "epoch_time_mean": projected}})
    told = [row[1] for row in only([record], "Figure 27").rows if row[0].startswith("yours")]
    assert told == ["first epoch: time of an epoch [s]"]


def test_parts_of_the_runtime_of_the_user_are_those_of_the_record() -> None:
    metrics = {"runtime": (50.0, "s"), "training_share": (0.7, "1"), "loading_share": (0.2, "1"), "rest_share": (0.1, "1")}
    rows = [row for row in only([own(metrics, mode="inference")], "Figure 45").rows if row[0].startswith("yours")]
    found = {row[1].split(":")[0]: row[2] for row in rows if "runtime [s]" in row[1] and "share" not in row[1]}
    assert found == {"inference": "35.0 s", "loading": "10.0 s", "rest": "5.00 s"}


def test_batches_of_the_user_lie_along_one_line() -> None:
    rate = {"throughput": (1000.0, "image/s"), "energy_per_item": (0.18, "J/image")}
    work = {"benchmark": "resnet", "workload": "image_classification", "params": {"model": "resnet50", "image_size": 224}, "micro_batch": 4}
    records = [own(rate, **work, global_batch=batch) for batch in (16, 32)]
    figure = only(records, "IPU CV")
    assert [name for name in figure.legend if name.startswith("yours")] == ["yours: resnet micro batch 4"] or len(figure.legend) == 2
    energies = [row for row in figure.rows if row[0].startswith("yours") and row[1].startswith("energy")]
    assert [row[2] for row in energies] == ["64.1"] * 2  # 0.18 J x 1,281,167 images
    other = own(rate, benchmark="resnet", workload="image_classification", params={"model": "resnet18"})
    assert not any("IPU CV" in one.title for one in beside([other])[0])


@pytest.mark.parametrize(
    ("name", "workload", "params"),
    [
        ("Table 4", "image_compression", {"width": 64, "bottleneck": 4}),
        ("Figures 1 and 2, IPUs", "image_classification", {"model": "resnet50", "image_size": 224}),
    ],
)
def test_a_line_of_the_user_over_devices_has_one_batch_per_device(name: str, workload: str, params: dict[str, Any]) -> None:
    records = []
    for devices, micro in ((1, 10), (2, 10), (4, 10), (2, 128)):
        point = {"devices": devices, "global_batch": micro * devices, "micro_batch": micro}
        records.append(own({"throughput": (100.0 * devices, "image/s")}, benchmark="mine", workload=workload, params=params, **point))
    figure = only(records, name)
    assert [one for one in figure.legend if one.startswith("yours")] == [
        "yours: mine Test CPU b10 per device",
        "yours: mine Test CPU b256",
    ]


def test_more_devices_of_the_user_are_a_row_of_the_matrix() -> None:
    window = {"training_time": (60.0, "s"), "runtime": (100.0, "s")}  # as long on four devices as on one: it ends by the clock
    cost = [
        window | {"throughput": (rate, "column/s"), "energy_per_item": (energy, "J/column"), "device_energy": (rate * energy * 60, "J")}
        for rate, energy in ((100.0, 0.5), (250.0, 0.6))
    ]
    records = [
        own(one, devices=devices, global_batch=16 * devices, device=f"Test GPU x{devices}")
        for one, devices in zip(cost, (1, 4), strict=True)
    ]
    figure = only(records, "Figures 1 and 2")
    assert ["yours: AP3, Test GPU", "time: best over smallest", "0.4, 1 → 4"] in [list(row) for row in figure.rows]
    assert ["yours: AP3, Test GPU", "energy: best over smallest", "1, 1 → 1"] in [list(row) for row in figure.rows]
    (both,) = [row for row in only(records, "Figure 3").rows if row[0].startswith("yours")]
    assert both[2] == "1.2, 1 → 4"
    others = [
        own(one, devices=4, params={"lookalike": "small", "cache": False}, benchmark="ap3-nocache", device="Test GPU x4")
        for one in cost[1:]
    ]
    rows = [row[0] for row in only([*records, *others], "Figures 1 and 2").rows if row[0].startswith("yours")]
    assert rows == ["yours: AP3, ap3 fp32, Test GPU"] * 2, "other work is no larger number of devices"


@pytest.mark.parametrize("name", FIGURES)
def test_every_published_number_that_a_figure_shows_is_known_and_every_name_in_it_is_one(name: str) -> None:
    figure: PublishedFigure = FIGURES[name]
    found: list[Experiment] = experiments(figure)
    for panel in figure.panels:
        assert set(panel.own) <= set(panel.values)
        for value, formula in panel.values.items():
            assert any(one.number(formula) is not None for one in found), f"{name}: {value}"


@pytest.mark.parametrize(
    ("name", "workload", "params", "another"),
    [
        ("caraml IPU NLP", "gpt", {"preset": "117M", "width": 768, "layers": 12, "sequence_length": 1024}, {"width": 32}),
        ("caraml IPU NLP", "gpt", {"preset": "117M", "width": 768, "layers": 12, "sequence_length": 1024}, {"sequence_length": 64}),
        ("caraml IPU CV", "image_classification", {"model": "resnet50", "image_size": 224}, {"image_size": 32}),
    ],
)
def test_a_model_of_another_size_stands_in_no_figure(name: str, workload: str, params: dict[str, Any], another: dict[str, Any]) -> None:
    """Its preset or its name alone does not make it the published one."""
    rate, devices = {"throughput": (5120.0, "token/s")}, 4 if workload == "gpt" else 1

    def figures(values: dict[str, Any]) -> list[ReportFigure]:
        records = [own(rate, benchmark="b", workload=workload, params=values, devices=devices, global_batch=batch) for batch in (64, 128)]
        return [figure for figure in beside(records)[0] if FIGURES[name].title in figure.title]

    assert figures(params) and not figures({**params, **another})


RESNET = {"benchmark": "rn", "workload": "image_classification", "params": {"model": "resnet50", "image_size": 224}}
IMAGES = {"throughput": (4000.0, "image/s")}


def titles(*records: Record) -> str:
    return " ".join(figure.title for figure in beside(records)[0])


@pytest.mark.parametrize(("name", "devices"), [("IPU CV", 1), ("Table 3", 1)])
def test_results_on_another_number_of_devices_stand_in_no_figure_of_one(name: str, devices: int) -> None:
    fits = own(IMAGES, **RESNET, devices=devices, global_batch=64, micro_batch=64)
    node = own(IMAGES, **RESNET, nodes=8, devices=4, global_batch=2048, micro_batch=64)
    assert f" {name}:" in titles(fits) and f" {name}:" not in titles(node) and " Figures 1 and 2, IPUs:" in titles(node)
    assert name in beside([node])[1][-1] and "another number of devices" in beside([node])[1][-1]
    both = only([fits, node], name)
    assert "Not drawn: 1 result of yours of another size or number of devices." in both.note
    assert len({row[0] for row in both.rows if row[0].startswith("yours")}) == 1


def test_results_stand_beside_the_die_or_the_dies_that_they_ran_on() -> None:
    one, eight = (own(EPOCHS, devices=n, global_batch=512 * n, micro_batch=512) for n in (1, 8))
    assert " Figure 36:" in titles(one) and " Figure 37:" not in titles(one)
    assert " Figure 37:" in titles(eight) and " Figure 36:" not in titles(eight)


@pytest.mark.parametrize(
    ("workload", "published", "another"),
    [
        ("tweet_rain_classification", {"preset": "small", "lookalike": "small"}, {"preset": "tiny"}),
        ("tweet_rain_classification", {"preset": "small", "lookalike": "tiny", "folder": "mine"}, {"folder": None}),
        ("temperature_postprocessing", {"patch": 256, "lookalike": "small"}, {"patch": 32}),
        ("ensemble_postprocessing", {"rows": None, "columns": None, "lookalike": "small"}, {"rows": 16}),
        ("regime_clustering", {"crop": 280, "prototypes": 40, "lookalike": "small"}, {"crop": 32}),
        ("image_compression", {"width": 64, "bottleneck": 4}, {"width": 4}),
    ],
)
def test_an_application_of_another_size_stands_in_no_figure(workload: str, published: dict[str, Any], another: dict[str, Any]) -> None:
    numbers = {"run_energy": (3600.0, "J"), "run_time": (9.0, "s"), "throughput": (10.0, "sample/s")}
    assert beside([own(numbers, workload=workload, params=published)])[0]
    figures, notes = beside([own(numbers, workload=workload, params=published | another)])
    assert not figures and "another size" in notes[-1]
    assert not beside([own(numbers, workload=workload, params={})])[0], "of unknown size"


def test_results_whose_devices_nobody_stated_stand_in_no_figure() -> None:
    record = own(EPOCHS).model_copy(update={"environment": {"missing": {"point.devices": "not in the table"}}})
    assert not beside([record])[0]


def test_two_batches_on_as_many_devices_are_two_lines() -> None:
    records = [own(IMAGES, **RESNET, nodes=8, devices=4, global_batch=batch, micro_batch=64) for batch in (2048, 4096)]
    lines = [name for name in only(records, "Figures 1 and 2, IPUs").legend if name.startswith("yours")]
    assert lines == ["yours: rn Test CPU b2048", "yours: rn Test CPU b4096"]


def lines_over(name: str, points: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Places of the user's lines in a figure over devices or batches, by name; ``b``: micro-batch, ``n``: devices, ``a``: accumulation."""
    records = []
    for one in points:
        point = {"devices": 1, "nodes": 1, "b": 16, "a": 1} | one
        micro, steps = point.pop("b"), point.pop("a")
        point |= {"micro_batch": micro, "global_batch": micro * steps * point["devices"] * point["nodes"]}
        records.append(own(IMAGES, **RESNET, **point))
    found: dict[str, list[str]] = {}
    for row, _, _ in [row for row in only(records, name).rows if row[0].startswith("yours") and row[1] == "images/s"]:
        line, _, place = row.removeprefix("yours: rn Test CPU").rpartition(" devices " if "1 and 2" in name else " batch on one device ")
        found.setdefault(line.strip(), []).append(place)
    return found


@pytest.mark.parametrize(
    ("points", "lines"),
    [
        (
            [{"devices": n} for n in (1, 2, 4)] + [{"devices": n, "a": 4 // n} for n in (1, 2)],
            {"b64": ["1", "2", "4"], "b16 per device": ["1", "2", "4"]},
        ),
        ([{"devices": n, "placement": {"fsdp": n}} for n in (1, 2, 4)], {"": ["1", "2", "4"]}),
        ([{}, *({"devices": n, "placement": {"distributed_optimizer": True}} for n in (2, 4))], {"": ["1", "2", "4"]}),
        (
            [{}, *({"devices": n, "placement": {"fsdp": f}} for n in (2, 4) for f in (1, n))],
            {"whole copies": ["1", "2", "4"], "fsdp=all": ["1", "2", "4"]},
        ),
        ([{"devices": n, "b": 64 // n} for n in (1, 2, 4)], {"": ["1", "2", "4"]}),
        ([*({"nodes": n, "devices": 4} for n in (1, 2)), *({"nodes": n} for n in (4, 8))], {"1x4": ["4", "8"], "4x1": ["4", "8"]}),
    ],
)
def test_a_line_over_devices_is_one_way_to_scale(points: list[dict[str, Any]], lines: dict[str, list[str]]) -> None:
    assert lines_over("Figures 1 and 2, IPUs", points) == lines


def test_a_line_over_the_batch_has_one_result_at_each_place() -> None:
    sweep = [{"b": micro, "a": 64 // micro} for micro in (16, 32, 64)]
    assert lines_over("Table 3", sweep) == {"": ["16", "32", "64"]}
    assert lines_over("Table 3", [*sweep, {"b": 16, "a": 1}]) == {"b64": ["16", "32", "64"], "b16": ["16"]}
    weak = [{"b": micro} for micro in (16, 32, 64)]
    assert lines_over("Table 3", [*weak, {"b": 64, "a": 2}]) == {
        "1 micro-batch a step": ["16", "32", "64"],
        "2 micro-batches a step": ["64"],
    }


RUN = {"run_energy": (7200.0, "J"), "run_node_energy": (9000.0, "J"), "run_time": (9.0, "s"), "throughput": (10.0, "column/s"), **EPOCHS}


@pytest.mark.parametrize(("epochs", "start"), [(None, "yours (by the clock): "), (5, "yours: ")])
@pytest.mark.parametrize("name", ["Figures 4 to 6", "Figure 7", "Figure 51"])
def test_numbers_of_a_run_by_the_clock_are_marked(name: str, epochs: int | None, start: str) -> None:
    """A minute of training is no five epochs: its time and energy may be any."""
    record = own(RUN, measure={"epochs": epochs})
    figure = only([record], name)
    assert {row[0][: len(start)] for row in figure.rows if row[0].startswith("yours")} == {start}
    assert (" by the clock: ended with its window" in figure.note) == (epochs is None) and start in figure.drawings[0].svg
    assert "by the clock" not in only([record], "Figure 27").note, "an epoch is an epoch"


def test_energies_of_other_boundaries_than_devices_are_marked() -> None:
    record = own(RUN, measure={"epochs": 5})
    record.metrics["run_energy"] = record.metrics["run_energy"].model_copy(update={"scope": "module"})
    figure = only([record], "Figures 4 to 6")
    assert any(row[0].startswith("yours (module): ") for row in figure.rows)
    assert "module: energy of this boundary, which does not compare with that of devices." in figure.note
    ratio = {"throughput": (10.0, "column/s"), "energy_per_item": (1.0, "J/column")}
    records = [own(ratio, devices=n, global_batch=16 * n, device=f"Test GPU x{n}") for n in (1, 4)]
    for one, scope in zip(records, ("device", "module"), strict=True):
        one.metrics["energy_per_item"] = one.metrics["energy_per_item"].model_copy(update={"scope": scope})
    told = [row[1:] for row in only(records, "Figures 1 and 2").rows if row[0].startswith("yours")]
    assert told[1] == ["energy: best over smallest", "energies of different boundaries: device, module"] and told[0][1] == "1, 1 → 1"


def test_the_best_of_many_results_is_the_best_of_all() -> None:
    """Of more results than a figure draws as rows, a ratio takes all."""
    rates = [own({"throughput": (10.0 + n, "column/s")}, devices=n, global_batch=16 * n) for n in range(1, 41)]
    told = [row for row in only(rates, "Figures 1 and 2").rows if row[0].startswith("yours")]
    assert [row[2] for row in told] == ["0.22, 1 → 40"]


def test_mean_shares_of_the_runtime_are_a_whole() -> None:
    shares = [{"training_share": (one, "1"), "loading_share": (0.1, "1"), "rest_share": (0.9 - one, "1")} for one in (0.8, 0.3)]
    params = {"preset": "small", "lookalike": "small"}
    records = [own(one, workload="tweet_rain_classification", params=params, repeat=run) for run, one in enumerate(shares)]
    figure = only(records, "Figures 19, 20, 22 to 24")
    assert [row[2] for row in figure.rows if row[0].startswith("yours")] == ["55.0 %", "10.0 %", "35.0 %"]
