"""Limits that are kept: searched for once, looked at in short at every run, and searched for again where the kept one cannot be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import cache_home
from caraml.doctor import limit_checks
from caraml.system import host, limits
from caraml.system.limits import Limit, Look, known, look, looks
from caraml.system.variables import PROBE

CPU = torch.device("cpu")
DAYS_AGO = 3


def limit(rate: float, **values: Any) -> Limit:
    """Of a search three days ago, good to a hundredth."""
    fields: dict[str, Any] = {
        "kind": "arithmetic",
        "rate": rate,
        "low": rate * 0.99,
        "high": rate * 1.01,
        "library": "oneDNN",
        "kernel": "linear layer",
        "shape": (2048, 2048, 2048),
        "dtype": "fp32",
        "device": "test",
        "measured_at": (datetime.now(UTC) - timedelta(days=DAYS_AGO)).isoformat(timespec="seconds"),
        "host": "here",
        "by_library": {"oneDNN linear layer": rate},
    }
    return Limit(**{**fields, **values})


class Machine:
    """What searches and looks find, and what was asked of it."""

    def __init__(self) -> None:
        self.searched, self.looked = limit(100.0), limit(100.0)
        self.asked: list[str] = []

    def measure(self, kind: str, device: object, dtype: str, *, budget_s: float, processes: int, kept: Limit | None = None) -> Limit:
        assert budget_s <= (3 if kept is None else 0.6)
        self.asked.append("search" if kept is None else "look")
        return self.searched if kept is None else self.looked


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(PROBE, raising=False)
    found = Machine()
    monkeypatch.setattr(limits, "measure", found.measure)
    yield found


def test_a_search_is_kept_and_later_runs_look_in_short(machine: Machine) -> None:
    assert known("arithmetic", CPU) is None
    assert look("arithmetic", CPU).best == machine.searched == known("arithmetic", CPU)
    machine.looked = limit(99.0, measured_at=datetime.now(UTC).isoformat())
    second = look("arithmetic", CPU)
    assert machine.asked == ["search", "look"]
    assert (second.best, second.now, second.disturbed) == (machine.searched, machine.looked, None)


@pytest.mark.parametrize("asked", ["abc", "-1", "nan", "inf", "3 s"])
def test_a_time_to_look_for_limits_that_is_no_number_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(PROBE, asked)
    for ask in (lambda: look("arithmetic", CPU), lambda: looks(["memory"], CPU)):
        with pytest.raises(InputError, match=f"^{PROBE}: found '{asked}', expected a number of seconds, 0 or more"):
            ask()
    assert machine.asked == []


def test_a_look_far_below_what_is_kept_is_disturbed_and_the_kept_one_counts(machine: Machine) -> None:
    look("arithmetic", CPU)
    machine.looked = limit(60.0)
    found = look("arithmetic", CPU)
    assert found.best.rate == 100 and machine.asked == ["search", "look"]
    assert found.disturbed is not None and "60" in found.disturbed and found.best.measured_at[:10] in found.disturbed


def test_a_look_above_what_is_kept_asks_for_a_new_search_and_the_better_counts(machine: Machine) -> None:
    look("arithmetic", CPU)
    machine.looked, machine.searched = limit(150.0), limit(155.0)
    assert look("arithmetic", CPU).best.rate == 155 and machine.asked == ["search", "look", "search"]
    kept = known("arithmetic", CPU)
    assert kept is not None and kept.rate == 155
    machine.looked, machine.searched = limit(200.0), limit(120.0)
    assert look("arithmetic", CPU).best.rate == 155, "the new search was worse: the kept one is better still"


def test_partitions_of_an_amd_gpu_have_limits_of_their_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition has the name of the whole GPU."""
    units = [228]
    monkeypatch.setattr(limits, "_device_name", lambda device: "AMD Instinct MI300A")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=units[0]))
    gpu = torch.device("cuda")
    look("arithmetic", gpu)
    assert known("arithmetic", gpu) is not None
    units[0] = 38
    assert known("arithmetic", gpu) is None


def test_a_look_at_a_gpu_counts_where_the_search_comes_too_late(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock has come down when the search gets to that kernel: there was one at every run, and the limit stayed too low. One that is
    warm is not disturbed."""
    monkeypatch.setattr(limits, "_device_name", lambda device: "GPU of the test")
    gpu, others = torch.device("cuda"), {"cuBLAS": 98.0, "cuDNN": 90.0}
    machine.searched = limit(98.0, sustained=80.0, library="cuBLAS", by_library=others)
    look("arithmetic", gpu)
    machine.looked = limit(102.0, low=101.0, library="cuBLAS", by_library={"cuBLAS": 102.0})
    assert look("arithmetic", gpu).best.rate == look("arithmetic", gpu).best.rate == 102.0
    assert machine.asked == ["search", "look", "search", "look"]
    kept = known("arithmetic", gpu)
    assert kept is not None and (kept.rate, kept.sustained, list(kept.by_library.items())) == (102, 80, [("cuBLAS", 102), ("cuDNN", 90)])
    machine.looked = limit(82.0)
    assert look("arithmetic", gpu).disturbed is None
    machine.looked = limit(71.0)
    assert "70% of it" in (look("arithmetic", gpu).disturbed or "")


def test_a_lucky_look_changes_nothing(machine: Machine) -> None:
    """Three per cent above, within its own interval; or of too few repetitions for one."""
    look("arithmetic", CPU)
    for lucky in (limit(103.0, low=98.0, high=108.0), limit(300.0, low=None, high=None)):
        machine.looked = lucky
        assert look("arithmetic", CPU).best.rate == 100
    assert machine.asked == ["search", "look", "look"]


BUSY = {"disturbed": "others used 50% of the CPUs meanwhile", "low": None, "high": None}


def test_a_search_beside_others_is_repeated_until_it_has_the_machine(machine: Machine) -> None:
    machine.searched = limit(130.0, **BUSY)
    first = look("arithmetic", CPU)
    assert first.best.rate == 130 and first.disturbed is not None and "others used" in first.disturbed
    machine.searched = limit(140.0, **BUSY)
    assert look("arithmetic", CPU).best.rate == 140
    machine.searched = limit(100.0)
    found = look("arithmetic", CPU)
    assert found.disturbed is None and found.best.rate == 100, "the luck of one repetition is forgotten"
    assert machine.asked == ["search", "search", "search"]


def test_a_disturbed_search_never_replaces_a_quiet_one(machine: Machine) -> None:
    look("arithmetic", CPU)
    machine.looked, machine.searched = limit(150.0), limit(200.0, **BUSY)
    found = look("arithmetic", CPU)
    assert machine.asked == ["search", "look", "search"] and found.best.rate == 100 and found.disturbed == BUSY["disturbed"]


def test_an_old_limit_is_searched_for_again(machine: Machine) -> None:
    machine.searched = limit(500.0, measured_at=(datetime.now(UTC) - timedelta(days=31)).isoformat())
    look("arithmetic", CPU)
    machine.searched = limit(90.0)
    assert look("arithmetic", CPU).best.rate == 90, "what the machine could do a month ago, with other clocks, is not its limit now"


def test_limits_are_kept_apart_by_what_changes_them(machine: Machine) -> None:
    look("arithmetic", CPU)
    assert known("memory", CPU) is None and known("arithmetic", CPU, "bf16") is None and known("arithmetic", CPU, processes=2) is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert known("arithmetic", CPU) is None
    finally:
        torch.set_num_threads(threads)
    assert known("arithmetic", CPU) is not None


def test_only_one_process_of_a_node_keeps_what_it_found(machine: Machine) -> None:
    look("arithmetic", CPU, keep=False)
    assert known("arithmetic", CPU) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rate": 1e99}'])
def test_a_damaged_file_is_no_limit(machine: Machine, text: str) -> None:
    look("arithmetic", CPU)
    (file,) = (cache_home() / "limits").iterdir()
    file.write_text(text)
    assert known("arithmetic", CPU) is None and look("arithmetic", CPU).best.rate == 100


def test_a_cache_folder_that_cannot_be_written_costs_a_search_each_time(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert look("arithmetic", CPU).best.rate == look("arithmetic", CPU).best.rate == 100
    assert machine.asked == ["search", "search"]


def test_what_cannot_be_measured_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str, *_: object, **__: object) -> Limit:
        if kind == "cache":
            raise EnvironmentUnfitError("the size of the last-level cache is not known")
        return limit(100.0)

    monkeypatch.setattr(limits, "measure", refuse)
    found = looks(["arithmetic", "cache"], CPU)
    assert found["cache"] == "the size of the last-level cache is not known" and not isinstance(found["arithmetic"], str)


def test_a_search_is_announced(machine: Machine) -> None:
    assert limits.must_search("arithmetic", CPU)
    look("arithmetic", CPU)
    assert not limits.must_search("arithmetic", CPU)


def test_limits_are_listed_by_arithmetic_and_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of kernel, an emulated format, one that is refused, and a look that others disturbed."""
    fast = limit(437e9, by_library={"oneDNN linear layer": 437e9, "MKL matrix product": 162e9})
    answers: dict[str, Any] = {"fp32": Look(fast, limit(430e9)), "bf16": Look(fast, limit(100e9)), "fp16": "no such format"}
    stream = Look(limit(15e9, kind="memory", library="torch", kernel="triad", shape=(2**26,)), limit(15e9))

    def looks(kinds: list[str], device: object, dtype: str = "fp32") -> dict[str, Any]:
        return {kind: answers[dtype] if kind == "arithmetic" else stream for kind in kinds}

    monkeypatch.setattr("caraml.system.limits.looks", looks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {check.name: check for check in limit_checks()}
    assert list(found) == ["limit: fp32", "limit: bf16", "limit: fp16", "limit: memory", "limit: cache"]
    text = found["limit: fp32"].found
    assert text.startswith("437 GFLOP/s ± 1.0 %, oneDNN linear layer, 2048 x 2048 x 2048; MKL matrix product 162 GFLOP/s")
    assert found["limit: fp32"].status == "ok" and fast.measured_at[:10] in text
    assert found["limit: bf16"].status == "warn" and "disturbed" in found["limit: bf16"].found and found["limit: bf16"].fix
    assert (found["limit: fp16"].status, found["limit: fp16"].found) == ("warn", "no such format")
    assert "15.0 GB/s" in found["limit: memory"].found and "triad, 64 MiB arrays" in found["limit: memory"].found


@pytest.mark.parametrize(("major", "listed"), [(7, ["fp32", "bf16", "fp16", "memory"]), (8, ["fp32", "tf32", "bf16", "fp16", "memory"])])
def test_fp32_is_not_listed_as_tf32_where_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch, major: int, listed: list[str]) -> None:
    monkeypatch.setattr("caraml.system.limits.looks", lambda kinds, device, dtype="fp32": dict.fromkeys(kinds, "not measured"))
    monkeypatch.setattr("caraml.engine.device.accelerator_type", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(name="Test GPU", major=major, minor=0))
    monkeypatch.setattr("torch.version.hip", None)
    assert [check.name for check in limit_checks()] == [f"limit: {name}" for name in listed]


def test_cpus_of_one_model_in_other_places_have_limits_of_their_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a home: as many threads, but two of each core, or on two sockets, or with a quota."""
    core = host.Core((0,), node=0, socket=0)
    places = [([core] * 2, None), ([core], None), ([core, dataclasses.replace(core, socket=1)], None), ([core] * 2, 1.5)]
    for found, quota in places:
        limits._share_of_host.cache_clear()
        monkeypatch.setattr(host, "cores", lambda *_, found=found: found)
        monkeypatch.setattr(host, "cgroup_cpus", lambda *_, quota=quota: quota)
        look("arithmetic", CPU)
    limits._share_of_host.cache_clear()
    assert machine.asked == ["search"] * len(places)


def test_a_limit_of_another_machine_is_told_where_this_one_does_not_reach_it(machine: Machine) -> None:
    machine.searched = limit(100.0, host="other")
    look("arithmetic", CPU)
    machine.looked = limit(60.0, host="this")
    assert (look("arithmetic", CPU).disturbed or "").endswith(" on other")
