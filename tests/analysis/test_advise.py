"""Advice on campaigns whose best choice is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from record_factory import broken_record, make_point
from run_factory import metric, repeats, run

from caraml.analysis import scaling
from caraml.analysis.advise import advise, pareto
from caraml.analysis.bottleneck import Partners, bottleneck
from caraml.analysis.estimate import Estimate, differs
from caraml.analysis.run_variation import mean_metric
from caraml.metrics.model import Metric
from caraml.power.model import BoundaryEnergy, WindowEnergy
from caraml.report.comparison import advice_sections
from caraml.results.record import Record
from caraml.suite.model import Knobs


def sweep(rates: dict[int, float], joules: dict[int, float] | None = None, **changes: object) -> list[Record]:
    """Three repeats of each batch, 0.1 % apart."""
    found = []
    for batch, rate in rates.items():
        energy = (joules or {}).get(batch)
        found += repeats([rate * factor for factor in (0.999, 1.0, 1.001)], global_batch=batch, energy=energy, **changes)
    return found


RATES = {8: 500.0, 16: 900.0, 32: 1300.0, 64: 1498.0, 128: 1500.0}
JOULES = {8: 2.0, 16: 1.2, 32: 0.9, 64: 1.0, 128: 1.3}


def test_each_goal_has_its_own_best() -> None:
    (advice,) = advise(sweep(RATES, JOULES))
    best = {one.goal: one for one in advice.best}
    assert best["energy"].choice.point.global_batch == 32 and best["Action"].choice.point.global_batch in (32, 64)
    assert best["time"].choice.point.global_batch == 128
    assert [tie.point.global_batch for tie in best["time"].ties] == [64], "0.1 % apart is not distinguishable; 15 % is"
    assert best["time"].lead is not None and best["time"].lead.value == pytest.approx(1500 / 1300, rel=1e-3)
    assert advice.no_energy is None


def test_the_lead_is_that_of_two_that_were_picked() -> None:
    """Its interval was that of a pair named beforehand: where it was shown it held the truth in 86 to 89 % of published variations."""
    (advice,) = advise(sweep({8: 500.0, 16: 900.0, 32: 1000.0}))
    costs = {choice.point.global_batch: choice.time for choice in advice.choices}
    lead, ratio = advice.best[0].lead, costs[16].over(costs[32])
    assert lead is not None and lead.value == ratio.value and lead.reach == pytest.approx(ratio.reach_of(0.05 / 3))


def test_knobs_are_choices_and_never_mixed_in_a_sweep_of_batches() -> None:
    rates = {8: 100.0, 16: 110.0, 32: 111.0}
    slower = sweep({batch: rate / 2 for batch, rate in rates.items()}, knobs=Knobs(channels_last=False))
    (advice,) = advise(sweep(rates) + slower)
    assert [choice.name for choice in advice.choices] == [f"b{batch}{knobs}" for knobs in ("", " channels_last=false") for batch in rates]
    assert [one.name for one in advice.saturation] == ["fp32", "fp32 channels_last=false"]
    (alone,) = advise([*sweep({8: 100.0}), *slower[:3]])
    assert [choice.name for choice in alone.choices] == ["knobs as they are", "channels_last=false"]


def test_action_is_energy_times_time_of_the_same_work() -> None:
    (advice,) = advise(sweep(RATES, JOULES))
    for choice in advice.choices:
        assert choice.action is not None
        assert choice.action.value == pytest.approx(JOULES[choice.point.global_batch] / RATES[choice.point.global_batch], rel=1e-5)


def test_single_runs_close_to_each_other_are_not_told_apart() -> None:
    (advice,) = advise([run(1000), run(1030, global_batch=32)])
    assert [tie.point.global_batch for tie in advice.best[0].ties] == [16] and advice.best[0].lead is None


def test_what_a_day_does_to_all_choices_does_not_hide_their_difference() -> None:
    """The second day was 1 % faster for all: choices of which one is twice as fast were not told apart, by one degree of freedom."""
    records = [
        run(rate * (1 + 0.01 * day), repeat=day, global_batch=batch, started_at=f"2026-10-0{1 + day}T12:00:00+00:00")
        for batch, rate in ((8, 9_700.0), (16, 35_000.0), (32, 65_000.0), (64, 109_000.0), (128, 220_000.0))
        for day in (0, 1)
    ]
    (advice,) = advise(records)
    assert advice.best[0].choice.point.global_batch == 128 and not advice.best[0].ties
    assert "4 degrees of freedom; what a session did to all of them cancels" in advice.variation
    text = advice_sections([advice])[1].notes[0]
    assert "picked as the best of 5: 221,100 ± 3 % token/s by its own runs" in text
    single = mean_metric(records[:2], "throughput")
    assert advice.choices[0].rate == single, "what a table shows of one choice has what its days did"


def test_without_a_sensor_there_is_advice_for_time_only_and_it_says_why() -> None:
    (advice,) = advise(sweep(RATES))
    assert [one.goal for one in advice.best] == ["time"] and advice.front == ()
    assert advice.no_energy == "no choice has energy: no sensor"


def test_energies_are_ranked_within_one_boundary_only() -> None:
    """A node takes more than its devices: the choices of which the devices were measured were the best, whatever they were."""

    def of_nodes(joules: float) -> dict[str, Metric]:
        return {"energy_per_item": metric(joules, "J/token", 0.01, scope="node_dc")}

    nodes = [*sweep({32: 1300.0}, more=of_nodes(3.0)), *sweep({64: 1498.0}, more=of_nodes(5.0))]
    (advice,) = advise([*sweep({8: 500.0, 16: 900.0}, JOULES), *nodes])
    found = [(one.goal, one.choice.boundary, one.choice.point.global_batch) for one in advice.best[1:]]
    assert found == [(goal, *best) for goal in ("energy", "Action") for best in (("device", 16), ("node_dc", 32))]
    assert [choice.point.global_batch for choice in advice.front] == [16, 64, 32] and advice.no_energy is None
    choices, text = advice_sections([advice])
    assert choices.rows[0][3].endswith(" J/token (node_dc)") and "best for Action (device): b16;" in "\n".join(text.notes)
    assert "energies of different boundaries are not compared: device: b8, b16; node_dc: b32, b64" in text.notes
    both = [run(1000, energy=1.0), run(1000, repeat=1, more=of_nodes(3.0)), run(500, energy=2.0, global_batch=32)]
    (mixed,) = advise(both)
    assert [one.goal for one in mixed.best] == ["time"] and mixed.no_energy is not None
    assert mixed.no_energy.startswith("without energy: b16: the runs measured different things: J/token (device)")
    (still,) = advise([run(1000, energy=1.0), run(500, global_batch=32, more=of_nodes(0.0))])
    assert still.no_energy == "without energy: b32: none above zero was measured"
    others = advise([*sweep({8: 500.0, 16: 900.0}, JOULES), *sweep({32: 1300.0})])
    told = [note for section in advice_sections([still, *others]) for note in section.notes if "without energy" in note]
    assert told == [f"no advice for energy: {still.no_energy}", "without energy: b32: no sensor"], "the two others have one"
    (step,) = advise([run(1000, energy=1.0, global_batch=64), run(1900, devices=2, global_batch=64, more=of_nodes(3.0))])[0].steps
    assert step.energy is None and step.time.value == pytest.approx(1000 / 1900)


def test_a_result_of_unknown_batch_is_no_choice_of_a_batch() -> None:
    """It was the choice `b1`, and the best."""
    unknown = run(9000, global_batch=1, environment={"missing": {"point.global_batch": "not in the table"}})
    (advice,) = advise([*sweep(RATES), unknown])
    assert advice.best[0].choice.point.global_batch == 128 and len(advice.choices) == len(RATES)
    assert "left out: 1 result of which the batch is not stated" in advice_sections([advice])[1].notes
    alike = [unknown, run(100, global_batch=1, precision="bf16", environment=unknown.environment)]
    assert advise(alike)[0].unstated == "", "where no batch is stated, none is chosen"


def test_what_limits_a_choice_is_told_of_all_its_repeats() -> None:
    """It was told of the first one, against the luckiest of the next larger batch."""

    def batch(size: int, rates: list[float], waits: list[float]) -> list[Record]:
        made = repeats(rates, global_batch=size)
        more = [{"data_wait_share": Metric(value=wait, unit="1"), "mfu": Metric(value=0.2, unit="1")} for wait in waits]
        return [one.model_copy(update={"metrics": one.metrics | own}) for one, own in zip(made, more, strict=True)]

    records = [*batch(16, [100.0, 100.0, 100.0], [0.7, 0.2, 0.2]), *batch(32, [100.0, 115.0, 90.0], [0.01] * 3)]
    (advice,) = advise(records)
    (small,) = (choice for choice in advice.choices if choice.point.global_batch == 16)
    assert small.bottleneck.by == "memory and overhead" and "waited for batches in 36.7% of the window" in small.bottleneck.sentence
    assert "with batch 32 the rate changes by +2%: traffic" in small.bottleneck.sentence


def test_choices_hours_apart_had_not_one_state_of_the_machine() -> None:
    """Of 20 equal choices in one campaign of 10 hours, whose state varies by 1 %, one was called worse in eight of ten advices."""

    def campaign(minutes: int) -> list[Record]:
        rates = [rate * (1.0 if batch < 16 else 0.98) for batch in range(8, 24) for rate in (1000.0, 1000.5, 999.5)]
        runs = [one for batch in range(8, 24) for one in repeats(rates[3 * (batch - 8) : 3 * (batch - 7)], global_batch=batch)]
        begun = datetime(2026, 1, 1, tzinfo=UTC)
        times = [(begun + timedelta(minutes=minutes * number)).isoformat() for number in range(len(runs))]
        return [one.model_copy(update={"started_at": at}) for one, at in zip(runs, times, strict=True)]

    (short,), (long,) = advise(campaign(2)), advise(campaign(15))
    assert short.best[0].lead is not None and "session" not in short.variation
    assert long.best[0].lead is None and "1.0% from session to session is assumed" in long.variation


def test_choices_on_other_devices_differ_by_more_than_their_sensors_may_be_off() -> None:
    """Their own sensors were taken for those of all: of equal energies by sensors of 5 % one was called worse in two of three advices."""

    def sensed(devices: int, joules: float, channels: list[str], batch: int = 16) -> list[Record]:
        boundary = BoundaryEnergy(energy_j=joules, bound_j=0.0, accuracy=0.05, channels=channels, valid=True)
        window = WindowEnergy(name="w", start=0.0, end=1.0, boundaries={"device": boundary})
        records = repeats([100.0 * devices] * 3, devices=devices, global_batch=batch, energy=joules, system={"hostname": "node"})
        return [record.model_copy(update={"energy": window}) for record in records]

    one, pair = sensed(1, 1.0, ["a"]), sensed(2, 1.06, ["a", "b"])
    (advice,) = advise([*one, *pair])
    by_goal = {best.goal: best for best in advice.best}
    assert not by_goal["energy"].lead and len(by_goal["energy"].ties) == 1 and by_goal["time"].lead and by_goal["Action"].lead
    assert advice.steps[0].energy is not None and advice.steps[0].energy.bound == pytest.approx(0.1)
    told = "\n".join(advice_sections([advice])[1].notes)
    assert "best for energy: indistinguishable: b16 1x1, b16 1x2; each may be off by as much as they differ" in told
    (far,) = advise([*one, *sensed(2, 1.2, ["a", "b"])])
    assert (lead := {best.goal: best for best in far.best}["energy"].lead) is not None and lead.value == pytest.approx(1.2)
    (same,) = advise([*sensed(1, 1.0, ["a"]), *sensed(1, 1.06, ["a"], batch=32)])
    assert {best.goal: best for best in same.best}["energy"].lead is not None, "by the same sensor"


def test_equal_choices_that_no_sensor_measured_may_be_told_apart_by_repeats() -> None:
    """As rates of a table with few digits: it was said that their sensors may be off."""
    (advice,) = advise([*repeats([100.0], global_batch=16), *repeats([100.0], global_batch=32)])
    told = "\n".join(advice_sections([advice])[1].notes)
    assert "best for time: indistinguishable: b16, b32; more repeats may tell them apart" in told


def test_the_front_holds_what_nothing_beats() -> None:
    (advice,) = advise(sweep(RATES, JOULES))
    assert [choice.point.global_batch for choice in advice.front] == [128, 64, 32]


def test_a_point_is_beaten_only_beyond_chance() -> None:
    (advice,) = advise([run(1000, energy=1.0), run(1001, energy=0.999, global_batch=32), run(400, energy=3.0, global_batch=64)])
    assert {choice.point.global_batch for choice in pareto(advice.choices)} == {16, 32}


def test_saturation_is_where_the_rate_stops_growing() -> None:
    (advice,) = advise(sweep(RATES), within=0.05)
    (found,) = advice.saturation
    assert (found.batch, found.low, found.high, found.best_batch, found.largest) == (64, 64, 64, 128, 128)
    (vague,) = advise([run(rate, global_batch=batch) for batch, rate in RATES.items()])[0].saturation
    assert vague.low <= vague.batch <= vague.high and vague.low < vague.high, "single runs leave it open"


def test_a_dip_on_the_way_to_the_best_batch_is_not_within_a_few_per_cent_of_it() -> None:
    (advice,) = advise(sweep({8: 500.0, 16: 970.0, 32: 900.0, 64: 1000.0, 128: 960.0, 256: 800.0}))
    (found,) = advice.saturation
    assert (found.low, found.batch, found.high, found.best_batch, found.falls) == (64, 64, 64, 64, 256)
    (section,) = [one for one in advice_sections([advice]) if any("within 5 %" in note for note in one.notes)]
    assert "fp32: the rate is within 5 % of the best (batch 64) from batch 64 on; with batch 256 it is below that again" in section.notes


def test_more_devices_are_priced() -> None:
    records = [run(rate, devices=n, global_batch=64, energy=joules) for n, rate, joules in ((1, 1000, 1.0), (2, 1900, 1.1), (4, 2000, 2.2))]
    (advice,) = advise(records)
    first, second = advice.steps
    assert (first.before, first.after, second.after) == (1, 2, 4)
    assert first.time.value == pytest.approx(1000 / 1900) and first.energy is not None and first.energy.value == pytest.approx(1.1)
    assert second.device_time.value == pytest.approx(2 * 1900 / 2000) and differs(second.energy) and not differs(second.time)


def test_failures_are_part_of_the_advice() -> None:
    gone = broken_record(make_point(global_batch=4096, micro_batch=4096), "oom", "96 GiB asked for")
    (advice,) = advise([*sweep(RATES), gone])
    assert advice.failed == (("b4096 fp32 eager 1x1", "oom: 96 GiB asked for"),)


def test_other_work_gets_its_own_advice_and_a_single_choice_none() -> None:
    found = advise(
        [*sweep(RATES), *sweep(RATES, mode="compute"), *sweep(RATES, params={"layers": 8}), run(1, workload="image_classification")]
    )
    assert len(found) == 3 and found[1].name == "gpt-mini compute"
    assert found[0].name != found[2].name and "layers=8" in found[2].name


class TestBottleneck:
    @staticmethod
    def of(record: Record, *others: Record) -> dict[str, float | None]:
        found = bottleneck(record, Partners([record, *others]))
        return {"by": found.by, **{share.part: share.share for share in found.shares}}  # type: ignore[dict-item]

    def test_input_by_the_host_s_wait(self) -> None:
        more = {"data_wait_share": metric(0.6, "1", None), "mfu_measured": metric(0.2, "1")}
        assert self.of(run(100, more=more)) == pytest.approx(
            {"by": "input", "input": 0.6, "communication": 0.0, "compute": 0.2, "memory and overhead": 0.2}
        )

    def test_input_by_its_absence_where_that_was_run(self) -> None:
        more = {"data_wait_share": metric(0.01, "1", None), "mfu_measured": metric(0.2, "1")}
        assert self.of(run(100, more=more), run(400, mode="compute"))["input"] == pytest.approx(0.75)

    def test_communication_by_the_rate_on_one_device(self) -> None:
        more = {"data_wait_share": metric(0.01, "1", None), "mfu_measured": metric(0.2, "1")}
        found = self.of(run(160, devices=4, global_batch=64, micro_batch=16, more=more), run(100, micro_batch=16))
        assert found["communication"] == pytest.approx(0.6) and found["by"] == "communication"
        assert self.of(run(160, devices=4, global_batch=64, micro_batch=16, more=more))["communication"] is None

    def test_compute_by_the_measured_peak(self) -> None:
        more = {"data_wait_share": metric(0.01, "1", None), "mfu": metric(0.4, "1"), "mfu_measured": metric(0.8, "1")}
        assert self.of(run(100, more=more))["by"] == "compute"

    def test_the_rest_is_what_is_left(self) -> None:
        more = {"data_wait_share": metric(0.01, "1", None), "mfu_measured": metric(0.1, "1")}
        here, larger = run(100, more=more), run(180, global_batch=32)
        assert self.of(here)["by"] == "memory and overhead"
        assert "with batch 32 the rate changes by +80%: overhead" in bottleneck(here, Partners([here, larger])).sentence

    @pytest.mark.parametrize(("scope", "told"), [("arithmetic", "less of it than arithmetic"), ("memory", "30% of it")])
    def test_the_roofline_says_what_of_the_rest_is_memory(self, scope: str, told: str) -> None:
        more = {"data_wait_share": metric(0.0, "1", None), "mfu_measured": metric(0.1, "1")}
        more |= {"share_of_limit": metric(0.3, "1", scope=scope)}
        assert f"by the roofline memory traffic needs {told}" in bottleneck(run(100, more=more), Partners([])).sentence

    def test_nothing_is_claimed_without_numbers(self) -> None:
        found = bottleneck(run(100), Partners([]))
        assert found.by is None and found.word == "not known" and found.sentence.startswith("what limits it is not known (")

    def test_a_rate_far_above_its_limit_is_no_limit(self) -> None:
        """A loop that told three times its FLOPs was advised that only lower precision or faster devices help."""
        more = {"data_wait_share": metric(0.01, "1", None), "mfu_measured": metric(2.4, "1"), "mfu": metric(1.7, "1")}
        found = bottleneck(run(100, more=more), Partners([]))
        assert found.by is None and "MFU 240.0% of the fastest kernel measured on this device: the peak, or the FLOPs" in found.sentence
        found = bottleneck(run(100, more=more | {"mfu": metric(0.8, "1")}), Partners([]))
        assert found.by == "compute" and "MFU 80.0% of the data sheet's peak, as MFU 240.0% of" in found.sentence
        assert self.of(run(100, more=more | {"mfu_measured": metric(1.02, "1")}))["compute"] == 1.0

    def test_close_shares_are_not_told_apart(self) -> None:
        more = {"data_wait_share": metric(0.48, "1", None), "mfu_measured": metric(0.5, "1")}
        assert self.of(run(100, more=more))["by"] is None
        assert bottleneck(run(100, more=more), Partners([])).word == "nothing that stands out"


def test_differs_needs_an_error() -> None:
    assert not differs(Estimate(5.0, None)) and differs(Estimate(5.0, 0.1)) and not differs(None) and not differs(Estimate(1.05, 0.1))


class TestFlags:
    """No advice is built on runs that something disturbed, or it says so."""

    def test_disturbed_choices_are_left_out(self) -> None:
        disturbed = repeats([3000.0, 3000.0, 3000.0], global_batch=256, flags=["busy_machine", "imprecise"])
        (advice,) = advise([*sweep(RATES), *disturbed])
        assert advice.best[0].choice.point.global_batch == 128 and 256 not in {choice.point.global_batch for choice in advice.choices}
        assert advice.left_out == (("b256", ("busy_machine",)),) and advice.rests_on == ()
        (section, notes) = advice_sections([advice])
        assert any("left out" in note and "b256: busy_machine" in note for note in notes.notes) and len(section.rows) == len(RATES)

    def test_a_disturbed_run_among_others_does_not_count(self) -> None:
        (advice,) = advise([*sweep({8: 500.0, 16: 900.0}), run(100.0, global_batch=16, repeat=9, flags=["throttled"])])
        assert advice.best[0].choice.rate is not None and advice.best[0].choice.rate.n == 3
        assert advice.best[0].choice.rate.value == pytest.approx(900, rel=1e-3) and not advice.left_out

    def test_where_nothing_else_is_known_the_advice_says_what_it_rests_on(self) -> None:
        flagged = [run(rate, global_batch=batch, flags=["busy_machine"]) for batch, rate in {8: 500.0, 16: 900.0}.items()]
        (advice,) = advise([*flagged, *sweep({32: 1300.0})])
        assert len(advice.choices) == 3 and advice.rests_on == (("b8", ("busy_machine",)), ("b16", ("busy_machine",)))
        assert "rests on flagged runs" in advice_sections([advice])[1].notes[0]

    def test_what_limits_the_work_is_no_disturbance(self) -> None:
        flagged = [run(rate, global_batch=batch, flags=["input_bound", "disturbed_probe"]) for batch, rate in {8: 500.0, 16: 900.0}.items()]
        assert advise(flagged)[0].rests_on == ()


def test_a_choice_has_the_interval_of_every_table() -> None:
    records = sweep(RATES)
    (advice,) = advise(records)
    alone = mean_metric([record for record in records if record.point.global_batch == 32], "throughput")
    assert next(choice.rate for choice in advice.choices if choice.point.global_batch == 32) == alone


def test_steps_to_more_devices_fit_no_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need the rates alone. With two laws of each curve, drawn a thousand times, advice on 832 points took 2.5 times as long."""
    monkeypatch.setattr(scaling, "fit", None)
    (advice,) = advise([run(1000.0 * world, devices=world, global_batch=64, micro_batch=64 // world) for world in (1, 2, 4)])
    assert [(step.before, step.after) for step in advice.steps] == [(1, 2), (2, 4)]
