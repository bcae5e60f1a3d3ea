"""What names can stand for, and what is said when they stand for nothing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from run_factory import run

from caraml.analysis.compare import Change, Comparison, compare
from caraml.analysis.grouping import differences
from caraml.base.errors import InputError
from caraml.reference import published, side, sides
from caraml.report.comparison import comparison_sections
from caraml.results.record import Record
from caraml.results.store import Store, write_record
from tests.stores import remember_suite


def keep(store: Store, record: Record) -> Record:
    folder = store.new_attempt(record.point)
    kept = record.model_copy(update={"attempt": int(folder.name)})
    write_record(folder, kept)
    return kept


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "mine")
    records = [keep(store, run(1000)), keep(store, run(1900, global_batch=32))]
    keep(store, run(1100))
    remember_suite(store, "both", [record.key for record in records])
    remember_suite(store, "one", [records[1].key])
    other = Store(tmp_path / "other")
    keep(other, run(500))
    remember_suite(other, "one", [run(500).key])
    return store


def rates(name: str, store: Store) -> list[float | None]:
    return [record.value("throughput") for record in side(name, store.root).records]


def test_folders_suites_points_and_attempts(store: Store, tmp_path: Path) -> None:
    key = run(1000).key
    assert rates("both", store) == [1100, 1900]
    assert rates("one", store) == [1900]
    assert sorted(rates(str(store.root), store)) == [1100, 1900]
    assert rates(f"{tmp_path / 'other'}:one", store) == [500]
    assert rates(f"{tmp_path / 'other'}:{key}", store) == [500]
    assert rates(key[:6], store) == [1100] and rates(f"{key}/1", store) == [1000] and rates(f"{key}/2", store) == [1100]
    assert rates("gpt-mini b32", store) == [1900]


def test_a_wrong_name_says_what_there_is(store: Store) -> None:
    with pytest.raises(InputError, match=r"'bothh' is no folder of results, and no .* \(suites: both, one; (.|\n)*mean 'both'"):
        side("bothh", store.root)
    with pytest.raises(InputError, match="has no attempt 7; it has 1, 2"):
        side(f"{run(1000).key}/7", store.root)
    (store.root / "empty" / "points").mkdir(parents=True)
    with pytest.raises(InputError, match="no results below"):
        side(str(store.root / "empty"), store.root)


def test_published_tables_are_a_side(store: Store) -> None:
    """MAELSTROM tables 12 and 13: AP2 on A100 and H100, three runs each on 4, 2 and 1 devices."""
    found = compare(side("reference:maelstrom/12", store.root), side("reference:maelstrom/13", store.root), ["epoch_time_mean"])
    assert [(pair.name.split()[-1], [len(keys) for keys in pair.keys]) for pair in found.pairs] == [
        ("1x4", [3, 3]), ("1x2", [3, 3]), ("1x1", [3, 3])
    ]  # fmt: skip
    assert {one.name for one in found.differences} == {"system", "device"}
    assert {change.verdict for _, change in found.changes} == {"better"}
    one = published("reference:maelstrom/12/1")
    assert [record.value("runtime") for record in one] == [227.9508] and one[0].environment["published"] == "maelstrom, Table 12, run 1"
    assert {record.key for record in one} <= {record.key for record in published("reference:maelstrom/12")}


def test_the_rounding_of_printed_digits_is_part_of_every_published_number(store: Store) -> None:
    """MAELSTROM tables 17 and 18, AP3 without cache: 0.63 and 0.61 GB three times each. Nobody knows the third digit, nor how it varies."""
    found = compare(
        side("reference:maelstrom/17", store.root), side("reference:maelstrom/18", store.root), ["peak_memory", "epoch_time_mean"]
    )
    pair = next(one for one in found.pairs if one.name.endswith("flags=-nocache without method"))
    memory, epoch = pair.changes
    assert memory.a is not None and memory.ratio is not None and memory.ratio.sd is not None
    assert memory.a.bound == pytest.approx(0.005 / 0.63, rel=0.01)
    assert memory.ratio.bound == pytest.approx(0.005 / 0.63 + 0.005 / 0.61, rel=0.01)
    assert memory.ratio.sd > 0.8 * 0.005 / 0.63 / math.sqrt(3) * math.sqrt(2 / 3)  # a uniform error of each, over three repeats a side
    assert memory.verdict == "indistinguishable" and epoch.verdict == "better"
    told = dict(found.variation)
    assert told["peak_memory"].endswith("at least what their printed digits leave open") and "digits" not in told["epoch_time_mean"]


def test_published_energies_are_compared_within_one_boundary(store: Store) -> None:
    def change(a: str, b: str, metric: str) -> Change:
        found = compare(side(f"reference:maelstrom/{a}", store.root), side(f"reference:maelstrom/{b}", store.root), [metric])
        ((_, only),) = found.changes
        return only

    actions = change("44/1", "text 4.9.8/1", "action")
    assert actions.ratio is not None and actions.ratio.value == pytest.approx(29952.87 / 23391.89)
    used = change("35/1", "35/7", "aggregate_power")
    assert used.ratio is None and used.reason == "of different energy boundaries: devices of the node, not stated"


def test_published_runtimes_are_compared_and_notes_are_told(store: Store) -> None:
    """MAELSTROM tables 42 and 43: AP6, one run on each number of devices; the epochs are printed in ms."""
    found = compare(side("reference:maelstrom/42/3", store.root), side("reference:maelstrom/43/3", store.root))
    changes = {change.metric: change for _, change in found.changes}
    runtime = changes["runtime"].ratio
    assert runtime is not None and runtime.value == pytest.approx(18581.30 / 15031.87) and "training_time" in changes
    notes = {note.metrics: note for note in found.notes}
    assert "the unit is not ms" in notes["epoch_time_mean", "epoch_time_first"].note
    assert notes["device_energy",].note.startswith("of one device") and len(notes["device_energy",].places) == 2
    text = "\n".join(note for section in comparison_sections(found) for note in section.notes)
    assert "Device energy of maelstrom, Table 42, run 3; maelstrom, Table 43, run 3: of one device" in text
    alone = compare(side("reference:maelstrom/42/3", store.root), side("reference:maelstrom/43/3", store.root), ["runtime"])
    assert alone.notes == (), "only of what is compared"


def test_four_printed_digits_leave_nothing_open_that_repeats_would_show() -> None:
    (record,) = published("reference:maelstrom/12/1")
    assert record.metrics["runtime"].bound is None  # 227.9508 s
    (record,) = [one for one in published("reference:maelstrom/17/1") if one.value("peak_memory")]
    assert record.metrics["peak_memory"].bound == pytest.approx(5e6)


def test_what_a_source_does_not_state_is_not_made_up() -> None:
    (record,) = published("reference:maelstrom/12/1")
    assert (
        set(record.unstated) == {"precision", "compile", "knobs", "deterministic", "micro_batch", "global_batch"} and run(1).unstated == ()
    )
    stated = {one.name: one.b for one in differences([run(1)], [record])}
    assert stated["precision"] == "not stated" and stated["global_batch"] == "not stated" and stated["device"] == "A100"


def test_published_names_are_checked() -> None:
    with pytest.raises(InputError, match="unknown source 'maelstorm'"):
        published("reference:maelstorm")
    with pytest.raises(InputError, match="no published experiment"):
        published("reference:maelstrom/12/77")


def test_runs_of_both_sides_are_not_set_against_themselves(tmp_path: Path) -> None:
    """A suite that was run again with another batch and more repeats, or of which one point was measured anew."""
    before, after = Store(tmp_path / "before"), Store(tmp_path / "after")

    def compared() -> Comparison:
        return compare(*sides(str(before.root), str(after.root), tmp_path))

    def pairs() -> list[tuple[str, int, int]]:
        return [(pair.name, *map(len, pair.keys)) for pair in compared().pairs]

    for repeat in range(3):
        keep(before, run(1000 + repeat, global_batch=32, repeat=repeat))
    shutil.copytree(before.root, after.root)
    with pytest.raises(InputError, match=r"are the same runs\n"):
        compared()
    keep(before, run(1000, global_batch=16))
    keep(after, run(1000, global_batch=64))
    with pytest.raises(InputError, match="are the same runs, where they are of the same work"):
        compared()  # one batch each besides is no other side of a comparison: there is a third that both have
    keep(after, run(1100, global_batch=32, repeat=3))
    keep(after, run(1101, global_batch=32, repeat=4))
    assert pairs() == [("gpt-mini b32 fp32", 3, 2)], "new repeats against the old ones"
    keep(after, run(1000, status="failed", global_batch=32, repeat=5))
    assert pairs() == [("gpt-mini b32 fp32", 3, 2)]
    keep(before, run(1000, global_batch=32, repeat=6))
    found = compared()
    assert pairs() == [("gpt-mini b32 fp32", 1, 2)] and found.shared == 3
    assert {(one.name, one.side) for one in found.unmatched} == {("gpt-mini b16 fp32", "B"), ("gpt-mini b64 fp32", "A")}
    assert "not set against themselves: 3 runs that A and B have in common" in [
        note for one in comparison_sections(found) for note in one.notes
    ]


def test_a_run_is_known_by_any_number(tmp_path: Path) -> None:
    """Where the results of two users were put together, the second one's have other numbers."""
    mine, together = Store(tmp_path / "mine"), Store(tmp_path / "together")
    for rate, store in ((1000, mine), (900, together), (1000, together)):
        keep(store, run(rate, started_at=f"2026-10-01T12:00:00.{rate:04}+00:00"))
    with pytest.raises(InputError, match="are the same runs"):
        compare(*sides(str(mine.root), str(together.root), tmp_path))
    (pair,) = compare(*sides(str(mine.root), f"{together.root}:{run(1).key}/1", tmp_path)).pairs
    assert [len(keys) for keys in pair.keys] == [1, 1]
