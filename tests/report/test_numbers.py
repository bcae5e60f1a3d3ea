"""How numbers are written."""

from __future__ import annotations

from typing import Any

import pytest
from record_factory import make_point, make_record

from caraml.base.format import printable
from caraml.metrics.model import Metric
from caraml.report.grouping import labels
from caraml.report.section import flat, interval, plain, written
from caraml.report.series import LIMIT, clipped, distribution, downsampled


@pytest.mark.parametrize(
    ("name", "value", "half", "unit", "text"),
    [
        ("throughput", 1234.0, 5.2, "token/s", "1,234 ± 5 token/s"),
        ("throughput", 40789.0, 343.0, "token/s", "40,790 ± 0.8 % token/s"),
        ("throughput", 12.3456, 0.012, "image/s", "12.346 ± 0.012 image/s"),
        ("energy_per_item", 0.0123, 0.0002, "J/token", "12.3 ± 0.2 mJ/token"),
        ("energy_per_item", 0.002056879, 0.0000011, "J/image", "2.057 ± 0.05 % mJ/image"),
        ("mfu", 0.456, 0.004, "1", "45.6 ± 0.4 %"),
        ("step_time_mean", 0.1, 0.03, "s", "100 ± 30 ms"),
        ("throughput", 12.0, 25.0, "token/s", "12 ± 25 token/s"),
    ],
)
def test_value_with_its_uncertainty(name: str, value: float, half: float, unit: str, text: str) -> None:
    assert written(name, Metric(value=value, unit=unit, low=value - half, high=value + half)) == text


@pytest.mark.parametrize(
    ("name", "value", "unit", "text"),
    [
        ("throughput", 1234.5, "token/s", "1,234 token/s"),
        ("step_time_median", 0.09999, "s", "100 ms"),
        ("peak_memory", 3.5 * 2**30, "B", "3.50 GiB"),
        ("data_wait_share", 0.0123, "1", "1.23 %"),
        ("data_wait_share", 0.0, "1", "0 %"),
        ("steps", 120.0, "1", "120"),
        ("loss_last", 2.3456, "1", "2.35"),
        ("energy", None, "J", "–"),
        ("energy_net", -12.0, "J", "-12.0 J"),
    ],
)
def test_value_alone(name: str, value: float | None, unit: str, text: str) -> None:
    assert plain(name, value, unit) == text


def test_a_lopsided_interval_is_written_with_its_ends() -> None:
    assert written("throughput", Metric(value=4244.0, unit="token/s", low=2930.0, high=7650.0)) == "4,200 (2,900 to 7,600) token/s"
    assert written("mfu", Metric(value=0.61, unit="1", low=0.42, high=1.1)) == "61 (42 to 110) %"


def test_nested_settings_as_lines() -> None:
    settings = {"cpu": {"cores": 8, "uuid": None}, "gpus": [{"name": "a"}, {"name": "b"}], "isa": ["x", "y"], "notes": []}
    assert flat(settings) == [("cpu.cores", "8"), ("gpus.0.name", "a"), ("gpus.1.name", "b"), ("isa", "x, y")]


def test_interval_has_enough_digits_to_differ() -> None:
    assert interval("throughput", Metric(value=1e6, unit="token/s", low=999_990, high=1_000_010)) == "999,990 to 1,000,010 token/s"
    assert interval("throughput", Metric(value=1e6, unit="token/s")) is None


def test_labels_tell_points_apart() -> None:
    a, b, c = (
        make_record(make_point(params={"layers": 4})),
        make_record(make_point(params={"layers": 8})),
        make_record(make_point(global_batch=32, params={"layers": 4})),
    )
    assert list(labels([a, b, c]).values()) == ["gpt-mini b16 fp32 layers=4", "gpt-mini b16 fp32 layers=8", "gpt-mini b32 fp32"]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"params": {"b": 1}}, {"params": {"b": 1}, "precision": "bf16"}, ["fp32", "bf16"]),
        ({"params": {"b": 1}}, {"params": {"b": 1}, "mode": "inference"}, ["train", "inference"]),
        ({"params": {"b": 1}}, {"params": {"b": 1}, "compile": "default"}, ["compile off", "compile default"]),
        ({"workload": "gpt", "params": {"layers": 4}}, {"workload": "gpt", "params": {}}, ["layers=4", "without layers"]),
        (
            {"workload": "gpt", "params": {"weights": "a"}},
            {"workload": "gpt", "params": {"weights": None}},
            ["weights=a", "without weights"],
        ),
        ({"workload": "imported", "params": {"batch": "8"}}, {"workload": "imported", "params": {"batch": "16"}}, ["batch=8", "batch=16"]),
        ({"workload": "gpt"}, {"workload": "gpt", "measure": {"epochs": 3}}, ["a window", "epochs=3"]),
        ({"workload": "gpt"}, {"workload": "gpt", "measure": {"max_seconds": 90.0}}, ["max_seconds=60.0", "max_seconds=90.0"]),
    ],
)
def test_labels_tell_points_apart_by_whatever_differs(one: dict[str, Any], other: dict[str, Any], words: list[str]) -> None:
    """The label of a program says nothing of precision and mode, and a policy of measuring makes another run of the same work."""
    named = [*labels([make_record(make_point(**{"workload": "command"} | point)) for point in (one, other)]).values()]
    assert [name.removeprefix("gpt-mini ").partition("b16 fp32 ")[2] or name.partition("b16 ")[2] for name in named] == words


def test_control_characters_are_taken_out() -> None:
    assert printable("a\x1b[31mb\u202e\nü😀") == "a\ufffd[31mb\ufffd\ufffdü😀"


def test_downsampling_keeps_the_extremes() -> None:
    xs, ys = [float(i) for i in range(100_000)], [float(i % 100) for i in range(100_000)]
    ys[54_321], ys[777] = 1e6, -1e6
    short = downsampled(xs, ys)
    assert len(short) <= LIMIT
    assert {(54_321.0, 1e6), (777.0, -1e6)} <= set(short)
    assert short == sorted(short)
    assert downsampled(xs[:LIMIT], ys[:LIMIT]) == list(zip(xs[:LIMIT], ys[:LIMIT], strict=True))


def test_distribution_is_the_share_at_or_below() -> None:
    assert distribution([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    many = distribution([float(i) for i in range(100_000)])
    assert len(many) <= 201
    assert (many[0], many[-1]) == ((0.0, 1e-5), (99_999.0, 1.0))


def test_long_names_lose_what_all_have_in_common() -> None:
    names = ["net b8 fp32", "net b8 fp32 channels_last=false", "net b8 fp32 channels_last=false attention=math"]
    assert clipped(names, 24) == ["net b8 fp32", "… channels_last=false", "… channels_last=false a…"]
    assert clipped(names, 80) == names
    weak, strong = "gpt-857M weak b64 1x4 fp16 compiled", "gpt-857M strong b512 2x4 fp16 compiled"
    assert clipped([weak, strong], 24) == ["… weak b64 1x4", "… strong b512 2x4"], "also what all have behind it"
    assert clipped(["a name that is much too long"], 10) == ["a name th…"]
    assert clipped(["x" * 12, "x" * 12], 10) == ["x" * 9 + "…"] * 2
    assert clipped(["x" * 12 + end for end in "ab"], 10) == ["xxxxx…xxxa", "xxxxx…xxxb"], "they differ behind the end"
