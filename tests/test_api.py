"""``caraml.load``: typed objects, tables, and the recipes of the documentation."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent / "report"))
from campaign_factory import again, campaign
from record_factory import broken_record, make_point, make_record, save

import caraml
from caraml.api import Result, Results
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.metrics.model import Metric
from caraml.power.model import ChannelEnergy, WindowEnergy
from caraml.power.result import power_frame
from caraml.power.store import ROW
from caraml.report.document import summary
from caraml.report.server import CampaignRecords
from caraml.results.record import Node
from caraml.results.rows import write_table
from caraml.results.store import Store, write_record

RECIPES = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.py"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two results folders below one, and a history."""
    root = tmp_path_factory.mktemp("runs")
    store = campaign(root / "first", points=30)
    again(store, next(record.key for record in store.records() if record.window), times=12, slower_from=7)
    campaign(root / "machines" / "second", points=12, seed=2)
    return root


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    return caraml.load(root / "first")


def test_a_folder_gives_its_records_in_their_order(results: Results, root: Path) -> None:
    assert results.records == Store(root / "first").records()
    assert len(results) == 30
    assert results.points[0] == results[0].point == results.records[0].point
    assert (results[0].folder / "record.json").is_file()
    assert "skipped" in repr(results)


def test_several_folders_and_folders_of_folders(root: Path) -> None:
    assert len(caraml.load(root)) == 42
    assert len(caraml.load(root / "first", root / "machines")) == 42
    assert len(caraml.load(root, suite="campaign")) == 42
    with pytest.raises(InputError, match="no results of 'other'"):
        caraml.load(root, suite="other")


def test_where_selects(results: Results) -> None:
    chosen = results.where(status="ok", devices=[2, 4], global_batch=lambda batch: batch > 16)
    assert 0 < len(chosen) < len(results)
    assert all(one.record.status == "ok" and one.point.devices in (2, 4) and one.point.global_batch > 16 for one in chosen)
    assert len(results.where(status="ok")) + len(results.where(status=lambda status: status != "ok")) == len(results)
    assert isinstance(chosen[:2], Results)
    with pytest.raises(InputError, match="did you mean 'status'"):
        results.where(statsu="ok")


def test_numbers_and_series_of_one_result(results: Results) -> None:
    result = results.where(status="ok")[0]
    assert result.metric("throughput").value == result.value("throughput") == result.record.metrics["throughput"].value
    assert len(result.steps.measured()) == result.record.window.steps  # type: ignore[union-attr]
    assert {trace.channel for trace in result.power} == {"GPU-0", "GPU-1"}
    with pytest.raises(InputError, match="did you mean 'throughput'"):
        result.metric("througput")
    with pytest.raises(InputError, match="did you mean 'throughput'"):
        result.value("througput")
    with pytest.raises(InputError, match="has no steps table"):
        _ = results.where(status="skipped")[0].steps


def test_sql_sees_what_was_loaded_and_no_more(results: Results) -> None:
    ok = results.where(status="ok")
    assert ok.sql("SELECT count(*) AS n FROM records") == [{"n": len(ok)}]
    counted = ok.sql("SELECT key, count(*) AS n FROM steps WHERE phase = 'measure' GROUP BY key")
    assert {row["key"]: row["n"] for row in counted} == {one.record.key: one.record.window.steps for one in ok}  # type: ignore[union-attr]
    assert ok.sql("SELECT max(value) > 0 AS yes FROM power") == [{"yes": True}]
    with pytest.raises(InputError, match="the query is wrong"):
        ok.sql("SELECT nothing FROM nowhere")
    with pytest.raises(InputError, match="the query is empty"):
        ok.sql("-- nothing")


def test_every_attempt_by_time(root: Path) -> None:
    found = caraml.load(root / "first", every_attempt=True)
    times = [one.record.started_at for one in found]
    assert len(found) == 30 + 11
    assert times == sorted(times)


def test_times_of_several_zones_are_in_order(tmp_path: Path) -> None:
    """Nodes may have another zone than the host before them, and summer time ends."""
    times = ["2026-10-25T02:50:00+02:00", "2026-10-25T02:10:00+01:00", "2026-10-25T01:20:00+00:00"]
    store = Store(tmp_path)
    for time in times:
        save(store, make_record(make_point()).model_copy(update={"started_at": time}))
    found = caraml.load(tmp_path, every_attempt=True)
    assert [one.record.started_at for one in found] == times
    records = [one.record for one in reversed(found)]
    assert dict(summary(records, []))["Date"] == "2026-10-25 02:50 to 2026-10-25 01:20"
    assert CampaignRecords(".", "quick", store, records).facts[2] == "2026-10-25 01:20"


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist"):
        caraml.load(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"mytab does not exist\n.*caraml.load\(suite='mytab'\) takes the name of a suite"):
        caraml.load("mytab")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"caraml-results does not exist\n.*caraml run quick makes caraml-results"):
        caraml.load()
    with pytest.raises(InputError, match="no results below"):
        caraml.load(tmp_path)
    (tmp_path / "a.zip").write_text("")
    with pytest.raises(InputError, match="caraml import"):
        caraml.load(tmp_path / "a.zip")


def test_a_failed_point_has_no_numbers_and_a_row(tmp_path: Path) -> None:
    save(Store(tmp_path), broken_record(make_point(), "oom", "out of memory"))
    (result,) = caraml.load(tmp_path)
    assert result.value("throughput") is None
    assert caraml.load(tmp_path).rows[0]["throughput"] is None
    assert caraml.load(tmp_path).rows[0]["reason"] == "out of memory"
    known, other = make_record(make_point(seed=7)), tmp_path.with_name("other")
    save(Store(other), known.model_copy(update={"metrics": {**known.metrics, "frames": Metric(value=3.0, unit="1")}}))
    failed, good = sorted(caraml.load(tmp_path, other), key=lambda one: one.record.status == "ok")
    assert (failed.value("frames"), good.value("frames")) == (None, 3.0), "a number that another program has"


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_tables_of_other_packages(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Store(tmp_path), make_record())
    found = caraml.load(tmp_path)
    if importlib.util.find_spec(package) is not None:
        table = getattr(found, f"to_{package}")()
        assert table["throughput"][0] == found[0].value("throughput")
        assert found[0].value("energy_per_item") is None and "float64" in str(table["energy_per_item"].dtype).lower()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfitError, match=rf"pip install '?(caraml\[)?{package}"):
        getattr(found, f"to_{package}")()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of pandas as the frames take, where it is not installed: tables as dictionaries."""
    if importlib.util.find_spec("pandas") is None:
        module = ModuleType("pandas")
        module.__spec__ = ModuleSpec("pandas", None)
        vars(module).update(DataFrame=dict, Series=lambda values, dtype: values)
        monkeypatch.setitem(sys.modules, "pandas", module)


@pytest.mark.usefixtures("tables")
def test_power_of_several_nodes_is_that_of_all_of_them(tmp_path: Path) -> None:
    """Their devices have equal names, and each has its node's before it, as in the record's energies."""
    store = Store(tmp_path)
    record = save(store, make_record(), watts=300)
    folder = store.folder(record)
    rows = [("nvml:GPU-5a:power", float(at), float(at), 100.0 + at, "power_instant") for at in range(5)]
    files = {f"power{end}": write_table(folder, f"power{end}", tuple(ROW), rows) for end in ("", "-1")}
    channels = [
        ChannelEnergy(id=f"{node}/GPU-5a", label="", source="nvml", boundary="device", hardware="nvidia", energy_j=3600.0)
        for node in ("n1", "n2")
    ]
    energy = WindowEnergy("measure", 0.0, 4.0, channels=channels, start_unix=1e9)
    nodes = [Node(name=name, ranks=[], device="d", cpu="c") for name in ("n1", "n2")]
    changed = {"files": {**record.files, **files}, "nodes": nodes, "energy": energy}
    result = Result(record.model_copy(update=changed), store)
    assert [trace.channel for trace in result.power] == ["n1/nvml:GPU-5a:power", "n2/nvml:GPU-5a:power"]
    frame = result.power_frame()
    assert list(frame) == ["timestamps", "n1/GPU-5a", "n2/GPU-5a"] and list(frame["n2/GPU-5a"]) == [100, 101, 102, 103, 104]
    assert list(result.energy_frame().keys()) == ["n1/GPU-5a", "n2/GPU-5a"]
    assert Results([result]).sql("SELECT channel, count(*) AS n FROM power GROUP BY channel ORDER BY channel") == [
        {"channel": f"{node}/nvml:GPU-5a:power", "n": 5} for node in ("n1", "n2")
    ]


@pytest.mark.usefixtures("tables")
def test_power_and_energy_have_jpwr_s_form(tmp_path: Path) -> None:
    save(Store(tmp_path), make_record(), watts=300)
    (result,) = caraml.load(tmp_path)
    window, domain = result.record.window, "GPU-5a"
    assert window is not None
    channel = ChannelEnergy(id=domain, label="", source="nvml", boundary="device", hardware="nvidia", energy_j=7200.0)
    energy = WindowEnergy("measure", window.start, window.end, channels=[channel], start_unix=1e9 + window.start)
    result = Result(result.record.model_copy(update={"energy": energy}), result.store)
    power, wh = result.power_frame(), result.energy_frame()
    (trace,) = [one for one in result.power if not one.counter]
    assert list(power) == ["timestamps", domain], "the counter is the same domain, and counts once"
    assert list(power[domain]) == list(trace.watts) and list(power["timestamps"]) == pytest.approx([1e9 + t for t in trace.seconds])
    assert wh[domain] == 2.0


@pytest.mark.usefixtures("tables")
def test_channels_that_were_read_at_other_instants_are_interpolated() -> None:
    frame = power_frame({"a": ([0.0, 1.0, 2.0, 3.0], [10.0, 20.0, 30.0, 40.0]), "b": ([0.5, 2.5], [100.0, 300.0])}, 50.0)
    assert list(frame["timestamps"]) == [50, 51, 52, 53] and list(frame["a"]) == [10, 20, 30, 40]
    assert list(frame["b"])[1:3] == [150, 250] and math.isnan(frame["b"][0]) and math.isnan(frame["b"][3])
    assert list(power_frame({}, 0.0)) == ["timestamps"]


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("read", [(0, 30), (70, 100), (0, 30, 70, 100)], ids=["dies", "comes late", "gap"])
def test_what_no_channel_saw_is_unknown_and_what_one_saw_is_kept(read: tuple[int, ...]) -> None:
    """A power that rises by 1 W/s, read once per second all the time, and ten times as often in parts of it: the other seconds were
    dropped, and gaps were bridged."""
    slow = [float(second) for second in range(101)]
    fast = [tenth / 10 for tenth in range(1001) if any(a <= tenth / 10 <= b for a, b in zip(read[::2], read[1::2], strict=True))]
    frame = power_frame({"slow": (slow, slow), "fast": (fast, fast)}, 0.0)
    at = list(frame["timestamps"])
    assert at == sorted(at) and (at[0], at[-1]) == (0, 100) and max(b - a for a, b in pairwise(at)) <= 2
    assert list(frame["slow"]) == pytest.approx(at)
    for time, watts in zip(at, frame["fast"], strict=True):
        assert watts == pytest.approx(time) if time in fast else math.isnan(watts)


def test_loading_is_light(root: Path) -> None:
    code = f"import sys, caraml; caraml.load({str(root)!r}); print([name for name in ('torch', 'duckdb', 'pandas') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


EXPECTED = {
    "best_batch": "gpt-800m on 1 of NVIDIA GH200 x4, bf16: fastest with batch 64, least energy with batch",
    "cost_of_training": "kWh (device)",
    "slow_steps": "1 of 60 steps are 10 % above the median",
    "table_of_machines": "workload,AMD MI250X x8,NVIDIA A100 x4,NVIDIA GH200 x4",
    "what_changed": ": -29.6 %",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_run(recipe: Path, root: Path) -> None:
    done = subprocess.run([sys.executable, recipe, root / "first"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[recipe.stem] in done.stdout


@pytest.mark.parametrize("script", [*RECIPES, RECIPES[0].parents[1] / "metric.py"], ids=lambda path: path.stem)
def test_scripts_take_programs_and_loops_of_one_s_own(script: Path, tmp_path: Path) -> None:
    """A program has no table of steps; a loop of one's own may not state its precision; an imported row may have no rate."""
    store = Store(tmp_path)
    own = make_record(make_point(workload="own_loop", precision="not stated", params={"name": "mine"}))
    save(store, own.model_copy(update={"environment": {"missing": {"point.precision": "nobody said it"}}}))
    program = make_record(make_point(workload="command", params={"argv": ["true"]}))
    write_record(store.new_attempt(program.point), program)
    for batch in (8, 16):
        row = make_record(make_point(global_batch=batch))
        save(store, row.model_copy(update={"metrics": {"peak_memory": row.metrics["peak_memory"]}, "window": None, "files": {}}))
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_recipe_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    assert RECIPES
    assert all(recipe.name in text for recipe in RECIPES)
