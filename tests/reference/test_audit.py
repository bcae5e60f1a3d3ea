"""What the sources say against their own numbers: the disagreements that are known, and no others."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from audit import BATCHES, Check, checks, disagreements, main
from claims import CLAIMS
from spans import exact

from caraml.reference import load

KNOWN = {
    ("caraml", "batch over epoch_energy_per_device"): 2,
    ("caraml", "at most 300 W x time of four batches"): 9,
    ("maelstrom", "329.83 GB over epoch_time_mean"): 2,
    ("maelstrom", "aggregate_power x runtime, within 5 %"): 35,
    ("maelstrom", "at most runtime"): 4,
    ("maelstrom", "runtime over batches of all epochs and devices"): 9,
    ("maelstrom", "at most epoch_time_mean"): 3,
    ("maelstrom", "at most epoch_time_first"): 1,
    ("maelstrom", "training_time / epochs, within 50 %"): 13,
    ("maelstrom", "batch size x #GPUs (IPU: #Replicas)"): 9,
    ("maelstrom", "steps x effective batch over epoch_time_min, within 20 %"): 8,
    ("maelstrom", "data set over rate, within 5 %"): 10,
    ("maelstrom", "epoch_time_mean over batches of a device"): 15,
    ("maelstrom", "training_time / 3 epochs"): 5,
    ("maelstrom", "at most max_device_power x devices"): 14,
    ("maelstrom", "at most max_aggregate_power"): 3,
    ("maelstrom", "mean_device_power x devices x runtime"): 8,
    ("pearc", "one epoch of 1281167 images over throughput"): 12,
    ("pearc", "70000 images over epoch_time_second"): 1,
}
COPIED = {("Table 19", "Table 18"), ("Table 20", "Table 19"), ("Table 39", "Table 38")}
CLAIMED = {
    "caraml": "epoch",
    "maelstrom": """ap2-h100-1 ap1-loading-low ap1-a2-device-energy ap1-a2-node-energy ap2-other-work ap2-energy-four-a100
        ap2-loading-jsc-low ap2-rest-high ap2-gh200-node-energy ap2-a2-node-energy ap3-a100-cache ap3-a100-nocache-energy
        ap3-a100-inference ap3-a100-rest ap3-a2-node-low ap3-gh200-node-high ap3-gh200-node-low ap4-loading-high ap4-a2-runtime-low
        ap5-batch-high ap5-mi250-eight-train ap5-h100-legacy ap5-loading-h100-high ap5-loading-gh200-low ap6-two-a2-performance
        ap6-mi250-power-a100 ap6-gh200-time""",
    "epicure": "karolina-part",
}


@pytest.fixture(scope="module")
def found() -> list[Check]:
    return disagreements()


def test_the_known_disagreements_and_no_others(found: list[Check]) -> None:
    rules = Counter((check.printed.source, check.rule) for check in found if not check.rule.startswith(("claim ", "a row of ")))
    assert rules == KNOWN
    copies = {(check.printed.table, check.rule.split(" of ")[-1]) for check in found if check.relation == "unlike"}
    assert copies == COPIED
    claimed = {(check.printed.source, check.rule.removeprefix("claim ")) for check in found if check.rule.startswith("claim ")}
    assert claimed == {(source, name) for source, names in CLAIMED.items() for name in names.split()}
    assert len(found) == sum(KNOWN.values()) + len(COPIED) + len(claimed) == 195


def test_power_and_energy_of_other_devices_than_the_runs_say_so(found: list[Check]) -> None:
    """Every row that the sources' own numbers show to be of the idle devices too, or of one device, has that boundary and a note."""
    for rule, boundary, count in (
        ("at most max_device_power x devices", "devices of the node", 14),
        ("mean_device_power x devices x runtime", "one device", 8),
    ):
        rows = [check.printed for check in found if check.rule == rule]
        assert [row.parameters.get("boundary") for row in rows] == [boundary] * count
        assert all(boundary.split()[-1] in row.note for row in rows)
    whole = [
        row
        for row in load()
        if (row.table, row.devices, row.metric) in {("Table 35", 4, "device_energy"), ("Table 42", 1, "device_energy")}
    ]
    assert len(whole) == 4 and all("boundary" not in row.parameters for row in whole)


@pytest.mark.parametrize(
    ("table", "run", "metric", "difference"),
    [
        ("Table 21", 9, "training_time", 10.47),
        ("Table 18", 3, "training_time", 0.0305),
        ("Table 29", 1, "effective_batch_bytes", 3.0),
        ("Table 4", 10, "throughput", 0.508),
        ("IPU NLP", 1, "epoch_energy_per_device", 46.8),
        ("Table 44", 1, "epoch_time_mean", 18.7),
    ],
)
def test_how_far_they_are(found: list[Check], table: str, run: int, metric: str, difference: float) -> None:
    check = next(c for c in found if (c.printed.table, c.printed.run, c.printed.metric) == (table, run, metric))
    assert check.difference == pytest.approx(difference, rel=0.01)
    assert not check.holds


def test_action_is_energy_times_time_everywhere() -> None:
    actions = [check for check in checks() if check.printed.metric == "action"]
    assert len(actions) == 17
    assert [check.rule for check in actions if not check.holds] == []


def test_every_claim_is_found_in_the_data() -> None:
    names = [check.rule.removeprefix("claim ") for check in checks() if check.rule.startswith("claim ")]
    assert sorted(names) == sorted(name for claims in CLAIMS.values() for name in claims)


def test_a_changed_digit_would_be_found() -> None:
    row = next(row for row in load() if (row.table, row.run, row.metric) == ("Table 44", 1, "action"))
    assert row.value is not None
    wrong = replace(row, value=row.value + 20_000, printed="23,391.91")
    assert Check(row, "as printed", exact(row.value)).holds
    assert not Check(wrong, "as printed", exact(row.value)).holds
    assert Check(wrong, "as printed", exact(row.value), tolerance=1e-5).holds
    assert not Check(row, "bound", exact(row.value * 0.99), "at most").holds
    assert Check(row, "bound", exact(row.value * 0.99), "at least").holds


def test_recomputed_numbers_are_in_the_printed_unit(found: list[Check]) -> None:
    check = next(c for c in found if (c.printed.table, c.printed.run) == ("Table 12", 1))
    assert check.printed.printed_unit == "Wh"
    assert check.recomputed == pytest.approx(349.67 * 227.9508 / 3600)


def test_batches_follow_from_the_applications_details() -> None:
    def detail(workload: str, metric: str) -> float:
        rows = [
            row for row in load() if row.table.startswith("details") and (row.workload, row.metric, row.mode) == (workload, metric, "train")
        ]
        assert len(rows) == 1 and rows[0].value is not None
        return rows[0].value

    for workload, (epochs, batches) in BATCHES.items():
        assert batches == detail(workload, "samples_per_epoch") // detail(workload, "batch_size"), workload
        if workload != "ensemble_postprocessing":  # whose three epochs stand in a sentence as a word
            assert epochs == detail(workload, "epochs"), workload


@pytest.mark.parametrize(
    ("source", "name", "system", "value"),
    [
        ("maelstrom", "training-data", "", 329.83 * 2**30),
        ("caraml", "tdp", "jureca-ipu", 300),
        ("caraml", "epoch-figure", "", 1281167),
        ("caraml", "ipu-epoch", "jureca-ipu", 4),
        ("pearc", "images", "", 70000),
        ("maelstrom", "epochs-jsc", "", 20),
        ("maelstrom", "epochs-e4", "", 50),
    ],
)
def test_numbers_in_the_rules_stand_in_the_data(source: str, name: str, system: str, value: float) -> None:
    rows = [row for row in load() if (row.source, row.parameters.get("name"), row.system) == (source, name, system)]
    assert rows and rows[0].value == pytest.approx(value)


def test_the_page_states_the_counts(found: list[Check]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "published.md").read_text(encoding="utf-8")
    assert f"Of {len(list(checks()))} comparisons {len(found)} disagree" in text
    assert f"{len(load()):,} numbers" in text


def test_the_script_lists_every_disagreement_and_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["audit.py"])
    main()
    text = capsys.readouterr().out
    assert "1656 comparisons of printed with recomputed numbers; 195 disagree" in text
    assert sum(line.lstrip().startswith(("run", "printed")) for line in text.splitlines()) == 195
    assert "printed 21,547 images/s    recomputed 14,287       +51 %" in text
    monkeypatch.setattr(sys, "argv", ["audit.py", "pearc"])
    main()
    pearc = capsys.readouterr().out
    assert "28 comparisons of printed with recomputed numbers; 13 disagree" in pearc
    assert "maelstrom" not in pearc
