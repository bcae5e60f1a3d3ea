"""Archives from strangers: no path, link, bomb, or swapped file gets in. And tables of JUBE."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from typer.testing import CliRunner

from caraml.analysis.compare import compare
from caraml.analysis.grouping import same_work
from caraml.analysis.table import query
from caraml.base import limits
from caraml.base.errors import InputError
from caraml.cli import app
from caraml.metrics.model import Metric
from caraml.reference import Side
from caraml.report.grouping import families, repeated
from caraml.results import archive as module
from caraml.results.archive import MANIFEST, pack, unpack
from caraml.results.jube import read_table
from caraml.results.record import Record
from caraml.results.rows import row_of
from caraml.results.selector import select
from caraml.results.store import Listing, Store, write_record
from tests.conftest import MakePoint
from tests.security.taken import taken
from tests.stores import remember_suite

Change = Callable[[dict[str, bytes], dict[str, object]], None]


@pytest.fixture
def archive(tmp_path: Path, make_point: MakePoint) -> Path:
    store, point = Store(tmp_path / "store"), make_point(workload="gpt")
    for attempt in (1, 2):
        folder = store.new_attempt(point)
        (folder / "steps.csv").write_text(f"step,seconds\n0,{attempt}\n")
        (folder / "claim.1").write_text("x")
        (folder / "link").symlink_to("/etc/passwd")
        metrics = {"throughput": Metric(value=float(attempt), unit="token/s")}
        write_record(folder, Record(key=point.key, attempt=attempt, point=point, status="ok", started_at="x", metrics=metrics))
    remember_suite(store, "s", [point.key])
    pack(tmp_path / "store", "s", tmp_path / "s.zip")
    return tmp_path / "s.zip"


def test_one_record_is_no_plural(tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path / "store"), make_point(workload="gpt")
    write_record(store.new_attempt(point), Record(key=point.key, attempt=1, point=point, status="ok", started_at="x"))
    remember_suite(store, "s", [point.key])
    packed = CliRunner().invoke(app, ["archive", "s", str(tmp_path / "s.zip"), "--out", str(store.root)]).stdout
    assert " 1 record, " in packed and " 1 files" not in packed
    taken_in = CliRunner().invoke(app, ["import", str(tmp_path / "s.zip"), "--out", str(tmp_path / "new")]).stdout
    assert " 1 record added, 0 known already" in taken_in


def test_a_record_that_cannot_be_read_is_left_out_and_told(tmp_path: Path, make_point: MakePoint) -> None:
    """Packed, it made the whole archive one that nobody could import."""
    store, point = Store(tmp_path / "store"), make_point(workload="gpt")
    for number in (1, 2, 3):
        write_record(store.new_attempt(point), Record(key=point.key, attempt=number, point=point, status="ok", started_at="x"))
    remember_suite(store, "s", [point.key])
    for number in (1, 3):
        (store.points / point.folder_name / str(number) / "record.json").write_text("{")
    packed = CliRunner().invoke(app, ["archive", "s", str(tmp_path / "s.zip"), "--out", str(store.root)])
    assert packed.exit_code == 1 and " 1 record, " in packed.stdout
    assert (
        packed.stderr.startswith("caraml: 2 records cannot be read, not in the archive:\n")
        and packed.stderr.count("record.json: not a") == 2
    )
    assert [record.attempt for record in unpacked_records(tmp_path / "s.zip", tmp_path / "new")] == [2]
    assert unpack(tmp_path / "s.zip", store.root).known == 1, "what lies there and cannot be read is no reason to refuse it"


def unpacked_records(path: Path, root: Path) -> list[Record]:
    unpack(path, root)
    return Store(root).records()


def rebuilt(path: Path, change: Change) -> Path:
    """The archive with other contents; ``change`` gets the files and the manifest."""
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    manifest = json.loads(files.pop(MANIFEST))
    change(files, manifest)
    made = path.with_name("changed.zip")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for name, content in files.items():
            new.writestr(name, content)
        new.writestr(MANIFEST, json.dumps(manifest))
    return made


def add(name: str, content: bytes) -> Change:
    def change(files: dict[str, bytes], manifest: dict[str, object]) -> None:
        files[name] = content
        listed = manifest["files"]
        assert isinstance(listed, dict)
        listed[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}

    return change


def test_both_attempts_come_back_with_their_files(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        names = [name.rpartition("/")[2] for name in packed.namelist()]
    assert "claim.1" not in names and "link" not in names and names.count("steps.csv") == 2
    done = unpack(archive, tmp_path / "new")
    assert (done.records, done.known) == (2, 0)
    old, new = Store(tmp_path / "store"), Store(tmp_path / "new")
    assert new.records("s") == old.records("s")
    assert (new.folder(new.records()[0]) / "steps.csv").read_text().endswith("0,2\n")


def test_a_record_that_is_new_beside_others_gets_a_number_of_its_own(archive: Path, tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path / "new"), make_point(workload="gpt")
    write_record(store.new_attempt(point), Record(key=point.key, attempt=1, point=point, status="oom", started_at="x"))
    done = unpack(archive, tmp_path / "new")
    assert (done.records, done.known, done.ahead) == (2, 0, 2)
    folders = sorted((tmp_path / "new" / "points").glob("*/*/record.json"))
    found = {folder.parent.name: json.loads(folder.read_text()) for folder in folders}
    assert {name: record["attempt"] for name, record in found.items()} == {"1": 1, "2": 2, "3": 3}
    assert [found[name]["status"] for name in ("1", "2", "3")] == ["oom", "ok", "ok"] and unpack(archive, tmp_path / "new").known == 2


def test_rounds_keep_their_attempts_also_where_these_get_other_numbers(tmp_path: Path, make_point: MakePoint) -> None:
    """Two suites with one point: in a folder that has the one, the rounds of the other."""
    point, mine, theirs = make_point(workload="gpt"), Store(tmp_path / "mine"), Store(tmp_path / "theirs")
    for store, suite, days in ((mine, "quick", ("01", "02", "03")), (theirs, "nightly", ("11", "12"))):
        for day in days:
            store.remember(Listing(name=suite, points=[(point.key, "")]), anew=True)
            folder = store.new_attempt(point)
            write_record(folder, Record(key=point.key, attempt=int(folder.name), point=point, status="ok", started_at=f"2026-10-{day}"))
    pack(theirs.root, "nightly", tmp_path / "theirs.zip")
    done = unpack(tmp_path / "theirs.zip", mine.root)
    assert (done.records, done.known, done.ahead) == (2, 0, 2) and unpack(tmp_path / "theirs.zip", mine.root).known == 2
    names = ("nightly@1", "nightly@2", "quick@1", "quick@2")
    assert [select(name, mine.root).records()[0].started_at[-2:] for name in names] == ["11", "12", "01", "02"]


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x" * 100)


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def elsewhere(path: Path) -> None:
    other = path.parents[3] / "other"
    path.parent.rename(other)
    path.parent.symlink_to(other)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def socketed(path: Path) -> None:
    path.unlink()
    os.chdir(path.parent)  # such names are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.mark.parametrize("swap", [linked, elsewhere, piped, socketed])
def test_what_is_packed_is_a_plain_file_also_when_it_is_swapped_meanwhile(
    swap: Callable[[Path], None], archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to a folder can put a link where a file was when it was looked at."""
    monkeypatch.chdir(tmp_path)
    root, listed = tmp_path / "store", module._files

    def swapped(*known: Any) -> Iterator[Any]:
        for found in listed(*known):
            if "steps.csv" in str(found):
                swap(next(root.glob("points/*/1/steps.csv")))
            yield found

    monkeypatch.setattr(module, "_files", swapped)
    with pytest.raises(InputError, match=r"steps.csv: not packed"):
        pack(root, "s", tmp_path / "again.zip")
    assert not (tmp_path / "again.zip").exists()


def test_a_file_that_grows_is_packed_as_it_was_opened(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = module.zipfile.ZipFile.open

    def growing(self: zipfile.ZipFile, info: Any, mode: Any = "r", *more: Any) -> Any:
        if "steps.csv" in str(info) and mode == "w":
            grown(tmp_path / "store" / info.filename)
        return opened(self, info, mode, *more)

    monkeypatch.setattr(module.zipfile.ZipFile, "open", growing)
    done = pack(tmp_path / "store", "s", tmp_path / "again.zip")
    assert done.records == 2 and unpack(tmp_path / "again.zip", tmp_path / "new").records == 2


@pytest.mark.parametrize("good", [0, 1, 2])
def test_an_import_that_fails_leaves_the_store_as_it_was(
    good: int, archive: Path, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, point, rename = Store(tmp_path / "new"), make_point(workload="gpt"), Path.rename
    write_record(store.new_attempt(point), Record(key=point.key, attempt=1, point=point, status="oom", started_at="x"))
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    left = [good]

    def full(self: Path, target: Path) -> Path:
        if ".tmp/" in str(self):  # of what was unpacked
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        unpack(archive, store.root)
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/evil",
        "points/gpt-0123456789abcdef/1/../../evil",
        "points/gpt-0123456789abcdef/1/sub/file",
        "points/..-0123456789abcdef/1/file",
        "points/gpt-0123456789abcdef/1/.hidden",
        "suites/../../evil.json",
        "runners/x",
        "index.jsonl",
    ],
)
def test_strange_names_are_refused(archive: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"refused entry|not those"):
        unpack(rebuilt(archive, add(name, b"x")), tmp_path / "new")
    assert not (tmp_path / "new").exists() and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFDIR])
def test_links_and_devices_are_refused(archive: Path, tmp_path: Path, kind: int) -> None:
    name = "points/gpt-0123456789abcdef/1/link"
    made = rebuilt(archive, add(name, b"/etc/passwd"))
    with zipfile.ZipFile(made) as old:
        files = {entry: old.read(entry) for entry in old.namelist()}
    with zipfile.ZipFile(made, "w") as new:
        for entry, content in files.items():
            information = zipfile.ZipInfo(entry)
            information.external_attr = (kind | 0o777) << 16 if entry == name else 0
            new.writestr(information, content)
    with pytest.raises(InputError, match="a link"):
        unpack(made, tmp_path / "new")


def damage(files: dict[str, bytes], manifest: dict[str, object]) -> None:
    name = next(name for name in files if name.endswith("steps.csv"))
    files[name] = files[name][::-1]


def bomb(files: dict[str, bytes], manifest: dict[str, object]) -> None:
    listed = manifest["files"]
    assert isinstance(listed, dict)
    next(iter(listed.values()))["bytes"] = 2**40


def foreign(files: dict[str, bytes], manifest: dict[str, object]) -> None:
    name = next(name for name in files if name.endswith("record.json"))
    record = json.loads(files.pop(name))
    listed = manifest["files"]
    assert isinstance(listed, dict)
    del listed[name]
    record["key"] = "f" * 16
    add(name, json.dumps(record).encode())(files, manifest)


@pytest.mark.parametrize(
    ("change", "words"), [(damage, "hash"), (bomb, "bytes"), (foreign, "is one of"), (lambda f, m: f.popitem(), "not those")]
)
def test_damaged_and_false_archives_are_refused(archive: Path, tmp_path: Path, change: Change, words: str) -> None:
    with pytest.raises(InputError, match=words):
        unpack(rebuilt(archive, change), tmp_path / "new")
    assert not list((tmp_path / "new").glob("points/*/*/record.json"))


def test_a_wrong_record_is_told_of_the_archive_and_not_of_where_it_was_unpacked(archive: Path, tmp_path: Path) -> None:
    made = rebuilt(archive, changed_record(facts=3))
    with pytest.raises(InputError, match=rf"^{made}: record\.json of \S+: not a CARAML record: facts: [^/\n]*$"):
        unpack(made, tmp_path / "new")


def changed_record(**changes: object) -> Change:
    """The newest record with other values, under a sound hash."""

    def change(files: dict[str, bytes], manifest: dict[str, object]) -> None:
        name = max(name for name in files if name.endswith("record.json"))
        add(name, json.dumps({**json.loads(files[name]), **changes}).encode())(files, manifest)

    return change


@pytest.mark.parametrize(("number", "words"), [(10**300, "999999999"), (-1, "greater than or equal to 0")], ids=["large", "negative"])
def test_attempts_without_end_are_refused_and_leave_nothing(archive: Path, tmp_path: Path, number: int, words: str) -> None:
    made = rebuilt(archive, changed_record(attempt=number))
    taken(lambda: unpack(made, tmp_path / "new")).refused("record.json", words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("number", [0, limits.NUMBER])
def test_numbers_of_attempts_do_not_run_out(archive: Path, tmp_path: Path, make_point: MakePoint, number: int) -> None:
    unpack(rebuilt(archive, changed_record(attempt=number)), tmp_path / "new")
    store = Store(tmp_path / "new")
    assert store.new_attempt(make_point(workload="gpt")).name == "3" and len(store.records("s")) == 1


LISTINGS = [b"[" * 100_000, b'{"name": "s", "points": 1}', b'["../../x"]', b"[" + b" " * limits.LISTING + b"]"]


@pytest.mark.parametrize("listing", LISTINGS, ids=["deep", "no points", "a way out", "large"])
def test_a_broken_listing_leaves_nothing_behind(archive: Path, tmp_path: Path, listing: bytes) -> None:
    made = rebuilt(archive, add("suites/t.json", listing))
    unpack(archive, tmp_path / "out")
    before = sorted((tmp_path / "out").rglob("*"))
    for store in ("out", "new"):
        taken(lambda: unpack(made, tmp_path / store)).refused("t.json", r"not a list|at most 16,777,216")  # noqa: B023
    assert sorted((tmp_path / "out").rglob("*")) == before and not (tmp_path / "new").exists()
    assert CliRunner().invoke(app, ["status", "--out", str(tmp_path / "out")]).exit_code == 0


def test_what_unpacks_to_far_more_than_its_size_is_refused(archive: Path, tmp_path: Path) -> None:
    made = rebuilt(archive, add("points/gpt-0123456789abcdef/1/worker.log", bytes(limits.UNPACKED)))
    assert made.stat().st_size < 1 << 20
    taken(lambda: unpack(made, tmp_path / "new")).refused("changed.zip", "unpacks to more than 67,108,864 bytes")


def test_a_manifest_without_end_is_refused(archive: Path, tmp_path: Path) -> None:
    made = rebuilt(archive, lambda _, manifest: manifest.update(x=[[]] * 10_000_000))
    taken(lambda: unpack(made, tmp_path / "new")).refused("manifest.json", "found .* bytes, at most 33,554,432 are read")
    taken(lambda: query(Store(made), "select 1")).refused("manifest.json", "found .* bytes, at most 33,554,432 are read")
    made = rebuilt(archive, lambda _, manifest: manifest.update(x=[[]] * 5_000_000))
    taken(lambda: unpack(made, tmp_path / "new")).refused("manifest.json", "values, at most 600,000 are read")


@pytest.mark.parametrize(("entries", "words"), [(2_000_000, "bytes in its list of files"), (600_000, "found 600,000 files")])
def test_a_list_of_files_without_end_is_refused(tmp_path: Path, entries: int, words: str) -> None:
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<H", 1) + bytes(16) + b"a"
    end = b"PK\x05\x06" + bytes(4) + struct.pack("<HHIIH", 1, 1, entries * len(entry), 0, 0)
    (tmp_path / "s.zip").write_bytes(entry * entries + end)
    taken(lambda: unpack(tmp_path / "s.zip", tmp_path / "new")).refused("s.zip", words)


def test_two_files_of_one_name_are_refused(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive, "a") as packed, pytest.warns(UserWarning, match="Duplicate"):
        packed.writestr(MANIFEST, "{}")
    taken(lambda: unpack(archive, tmp_path / "new")).refused("s.zip", "two files of the same name")


def test_a_table_of_records_without_end_is_refused(archive: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    duckdb.sql(f"COPY (SELECT 'k' AS key FROM range({limits.MEMBERS + 1})) TO '{table}' (FORMAT parquet, COMPRESSION zstd)")
    made = rebuilt(archive, add("records.parquet", table.read_bytes()))
    taken(lambda: query(Store(made), "select * from records")).refused("records.parquet", "found 200,001 rows, at most 200,000 are read")


def test_other_files_are_no_archives(archive: Path, tmp_path: Path) -> None:
    for content in (b"", b"PK", archive.read_bytes()[:200]):
        (tmp_path / "x.zip").write_bytes(content)
        with pytest.raises(InputError, match="not a CARAML archive"):
            unpack(tmp_path / "x.zip", tmp_path / "new")


def test_a_jube_table_becomes_records_with_what_it_knows(tmp_path: Path) -> None:
    table = tmp_path / "llm.csv"
    table.write_text(
        "JobID,System,Nodes,Devices,GlobalBatchSize,Time/iteration(s),Tokens/second,Avg_TFLOPs/GPU,Loss\n"
        "123,JEDI,2,8,64,2.1,31207.2,88.3,1.5\n124,JEDI,2,8,128,,,,\n"
    )
    store = Store(tmp_path / "out")
    assert read_table(table, tmp_path / "out", None).records == 2
    good, bad = store.records("llm")
    assert good.value("throughput") == 31207.2 and good.metrics["throughput"].unit == "token/s"
    assert good.value("achieved_flops_per_device") == pytest.approx(88.3e12)
    assert (good.metrics["time_per_iteration"].unit, good.metrics["loss"].unit) == ("s", "?") and good.metrics["loss"].reason
    assert (good.point.nodes, good.point.devices, good.point.global_batch) == (2, 4, 64)
    assert (good.point.system, good.point.device) == ("jedi", "NVIDIA GH200 120GB x4")
    missing = good.environment["missing"]
    assert (
        isinstance(missing, dict) and "point.precision" in missing and not {"point.nodes", "point.system", "point.devices"} & set(missing)
    )
    assert bad.status == "failed" and bad.metrics["throughput"].value is None and bad.metrics["throughput"].reason
    assert read_table(table, tmp_path / "out", None).known == 2


@pytest.mark.parametrize("title", ["Runtime(min)", "exit_duration"])
def test_a_limit_in_a_jube_table_is_no_measurement(tmp_path: Path, title: str) -> None:
    """`Runtime(min)` of CARAML's tables is what was asked for: a crashed run had it, and was taken for one that ended well."""
    table, store = tmp_path / "t.csv", Store(tmp_path / "out")
    table.write_text(f"System,{title},GlobalBatchSize,Tokens/second\nJEDI,30,64,31207.2\nJEDI,30,128,\n")
    read_table(table, store.root, None)
    good, bad = store.records("t")
    assert (good.status, set(good.metrics), good.point.params) == ("ok", {"throughput"}, {title: "30"})
    assert (bad.status, bad.reason, bad.point.params) == ("failed", "imported from t.csv: no number in its row", {title: "30"})


def test_a_precision_column_of_a_jube_table_is_the_precision(tmp_path: Path) -> None:
    table, store = tmp_path / "t.csv", Store(tmp_path / "out")
    table.write_text("Precision,Images/second\nfp16,1\n32.32,2\nint4,3\n")
    read_table(table, store.root, None)
    half, single, other = store.records("t")
    assert [record.point.precision for record in (half, single)] == ["fp16", "fp32"] and "fp16" in half.point.label
    assert "precision" not in half.unstated and row_of(half)["precision"] == "fp16" and half.point.params == {}
    assert other.point.params == {"Precision": "int4"} and "precision" in other.unstated and row_of(other)["precision"] is None


def test_a_precision_that_a_jube_table_does_not_say_is_nobody_s(tmp_path: Path) -> None:
    """It was fp32: in labels, names and keys, so that comparisons took the row for one that says fp32."""
    table, store = tmp_path / "t.csv", Store(tmp_path / "out")
    table.write_text("System,Precision,GlobalBatchSize,Images/second\nmine,fp32,64,1\nmine,bf16,64,2\n")
    read_table(table, store.root, None)
    table.write_text("System,GlobalBatchSize,Images/second\nmine,64,1\n")
    read_table(table, store.root, "u")
    single, half, other = records = [*store.records("t"), *store.records("u")]
    assert (other.point.precision, other.point.label, row_of(other)["precision"]) == ("not stated", "u b64", None)
    assert single.point.label == "t b64 fp32" and len(same_work(records)) == len(repeated(records)) == 3
    assert list(families(records, ("batch",))) == ["fp32", "bf16", "precision not stated"]
    (pair,) = compare(Side("a", (single,)), Side("b", (other,))).differences
    assert (pair.name, pair.a, pair.b) == ("precision", "fp32", "not stated")
    with pytest.raises(InputError, match="no work in common"):
        compare(Side("a", (single, half)), Side("b", (other,)))


def test_rows_that_an_earlier_version_called_fp32_are_known(tmp_path: Path) -> None:
    table, store = tmp_path / "t.csv", Store(tmp_path / "out")
    table.write_text("GlobalBatchSize,Images/second\n64,1\n")
    read_table(table, tmp_path / "new", None)
    (record,) = Store(tmp_path / "new").records("t")
    point = record.point.model_copy(update={"precision": "fp32"})
    write_record(store.new_attempt(point), record.model_copy(update={"key": point.key, "point": point}))
    assert read_table(table, store.root, None).known == 1
    assert [one.key for one in store.records("t")] == [point.key], "shown as before"
    table.write_text("GlobalBatchSize,Images/second\n64,1\n128,2\n")
    assert read_table(table, store.root, None).known == 1 and len(store.records("t")) == 2
    table.write_text("GlobalBatchSize,Precision,Images/second\n64,fp32,1\n")
    assert read_table(table, store.root, None).records == 1, "this one says it"


def test_energy_of_a_jube_table_is_that_of_all_devices_once(tmp_path: Path) -> None:
    """Every rank of CARAML's scripts writes the energy of all devices of its node: the ranks of a node are one measurement, not four."""
    (tmp_path / "combined.csv").write_text(
        ",nodename,rank,pynvml:0,pynvml:1,gh:Module Power Socket 0\n"
        "0,n1,0,10.0,20.0,99\n1,n1,1,12.0,20.0,99\n2,n2,2,1.0,2.0,99\n3,n2,3,1.0,2.0,99\n"
    )
    table = tmp_path / "t.csv"
    table.write_text(
        "JobID,System,Nodes,Devices,Images/second,Energy/Device(Wh),EnergyFile\n"
        '1,mine,2,4,10,,/elsewhere/combined.csv\n2,mine,2,4,11,2.5,\n3,mine,2,4,12,"[1.0, 2.0, 3.0, 4.5]",\n4,mine,2,4,13,,lost.csv\n'
        "5,mine,2,,14,2.5,\n6,mine,2,3,15,2.5,\n"
    )
    store = Store(tmp_path / "out")
    assert read_table(table, store.root, None).records == 6
    found = {record.value("throughput"): record for record in store.records("t")}
    energies = {rate: record.value("run_energy") for rate, record in found.items()}
    assert energies == {10: 3600 * (31 + 3), 11: 3600 * 2.5 * 4, 12: 3600 * 10.5, 13: None, 14: None, 15: 3600 * 2.5 * 3}
    assert "lost.csv" in str(found[13].metrics["run_energy"].reason) and "how many" in str(found[14].metrics["run_energy"].reason)
    assert (found[10].point.system, found[10].point.device, found[15].point.devices, found[15].point.params["Devices"]) == (
        "mine",
        "unknown",
        1,
        3,
    )
    missing = found[15].environment["missing"]
    assert isinstance(missing, dict) and {"point.devices", "point.device"} < set(missing)


COLUMNS = "System,Nodes,Devices,GlobalBatchSize,PipelineParallel,Runtime(min),Tokens/second"
ROWS = ["JEDI,1,4,64,1,30,31207.2", "JEDI,1,4,64,2,31,30000.1"]


def pretty(*lines: str, form: str) -> str:
    """As JUBE prints a table for people, of its newer versions with a frame and the table's name; or as Markdown has it."""
    first, *others = [[f"{cell:>16}" for cell in line.split(",")] for line in lines]
    if form != "plain":
        rule = ["-" * 16 if form == "frame" else f":{'-' * 14}:"] * len(first)
        return ("result:\n" if form == "frame" else "") + "".join(
            f"|{part}|\n" for part in ("|".join(row) for row in (first, rule, *others))
        )
    return f" {' | '.join(first)}\n{'-+-'.join(['-' * 17] * len(first))}\n" + "\n".join(f" {' | '.join(row)}" for row in others)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", [",", ";", "\t", "|", " , ", '" , "', "frame", "plain", "markdown"])
def test_a_jube_table_of_every_style_is_the_same(tmp_path: Path, form: str, turned: bool) -> None:
    """Result tables of CARAML's scripts are printed for people, with a name and a frame; separators are anybody's choice, and so is JUBE's
    `transpose`, under which the titles are the first column and people see no rule."""
    lines = [COLUMNS, *ROWS]
    if turned:
        lines = [",".join(row) for row in zip(*(line.split(",") for line in lines), strict=True)]
    quote = form.strip(" ,;|\t")
    text = pretty(*lines, form=form) if form.isalpha() else "\n".join(f"{quote[:1]}{line.replace(',', form)}{quote[:1]}" for line in lines)
    text = "\n".join(line for line in text.splitlines() if not turned or "--" not in line)
    table = tmp_path / "t.dat"
    table.write_text(text)
    store = Store(tmp_path / "out")
    assert read_table(table, store.root, None).records == 2
    found = sorted(store.records("t"), key=lambda record: str(record.point.params))
    setup = [("1", "30"), ("2", "31")]
    assert [record.point.params for record in found] == [{"PipelineParallel": stages, "Runtime(min)": limit} for stages, limit in setup]
    assert [(record.value("throughput"), record.value("runtime")) for record in found] == [(31207.2, None), (30000.1, None)]
    assert all((record.point.system, record.point.devices, record.point.global_batch) == ("jedi", 4, 64) for record in found)


def test_a_turned_jube_table_keeps_lists_and_names_the_line_that_is_too_short(tmp_path: Path) -> None:
    table, store = tmp_path / "t.csv", Store(tmp_path / "out")
    table.write_text("Tokens/second,10,20\nDevices,2,2\nEnergy/Device(Wh),[1, 2],[3, 4]\nLog,batch_1.log,batch_2.log\n")
    assert read_table(table, store.root, None).records == 2
    assert {record.value("throughput"): record.value("run_energy") for record in store.records("t")} == {10: 3 * 3600, 20: 7 * 3600}
    table.write_text("Log,Size of it\nbatch_1.log,3\nbatch_2.log,4\n")  # titles of which none is known, above names that look like some
    assert read_table(table, store.root, "upright").records == 2
    table.write_text("Tokens/second,10,20\nDevices,2,2,2\n")
    with pytest.raises(InputError, match=r"t.csv:2: found 4 cells, expected 3"):
        read_table(table, store.root, None)


def test_numbers_of_a_jube_table_that_carry_caraml_s_names_are_in_its_units(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(
        "Energy(Wh),Mean Power(kW),Peak_Memory(GiB),MFU(%),Step_Time_Mean(ms),Idle Power,Energy_net(BTU),"
        "Throughput(images/s),Loss,loss\n"
        "500,1.2,3,41,20,7,9,100,1.5,2.5\n"
    )
    store = Store(tmp_path / "out")
    read_table(table, store.root, None)
    (record,) = store.records("t")
    known = {name: (metric.value, metric.unit) for name, metric in record.metrics.items()}
    assert known == {
        "energy": (500 * 3600, "J"),
        "energy_per_item": (None, "J/image"),
        "mean_power": (1200, "W"),
        "peak_memory": (3 * 2**30, "B"),
        "mfu": (pytest.approx(0.41), "1"),
        "step_time_mean": (pytest.approx(0.02), "s"),
        "idle_power_in_table": (7, "?"),
        "energy_net_in_table": (9, "BTU"),
        "throughput": (100, "image/s"),
        "loss": (1.5, "?"),
        "loss_2": (2.5, "?"),
    }
    assert "'Energy(Wh)'" in str(record.metrics["energy"].reason)


def test_rows_of_the_same_work_are_repeats_of_which_none_hides_another(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("System,Tokens/second\nJEDI,10\nJEDI,11\nJEDI,10\nJURECA,12\n")
    store = Store(tmp_path / "out")
    assert read_table(table, store.root, None).records == 4
    found = store.records("t")
    assert sorted((record.point.repeat, record.value("throughput")) for record in found) == [(0, 10), (0, 12), (1, 11), (2, 10)]
    assert {record.attempt for record in found} == {1} and read_table(table, store.root, None).known == 4


@pytest.mark.parametrize(
    ("devices", "energy", "value", "reason"),
    [
        (4, "[1.0, 2.0, 3.0, 4.5]", 3600 * 10.5, "jpwr"),  # not quoted: JUBE never quotes
        (8, "[1.0, 2.0, 3.0, 4.5]", None, "4 devices' and says that there were 8"),  # of one of two nodes
        (4, "[1.0, 2.0, 3.0]", None, "3 devices'"),
        (4, "[1.0, x]", None, "the table has"),
        (4, "2.5", 3600 * 10.0, "jpwr"),
    ],
)
def test_energy_in_a_jube_table_that_cannot_be_all_devices_is_unknown(
    tmp_path: Path, devices: int, energy: str, value: float | None, reason: str
) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"Devices,Energy/Device(Wh),Images/second\n{devices},{energy},10\n")
    store = Store(tmp_path / "out")
    read_table(table, store.root, None)
    (record,) = store.records("t")
    assert record.value("run_energy") == value and reason in str(record.metrics["run_energy"].reason)
    table.write_text(f"Devices,Energy_counter/Device(kWh),Images/second\n{devices},{energy},11\n")
    read_table(table, store.root, None)
    again = next(record for record in store.records("t") if record.value("throughput") == 11)
    assert again.value("run_energy") == (None if value is None else 1000 * value)


def test_a_file_of_energies_that_lacks_a_node_has_no_sum(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(",rank,pynvml:0\n0,0,10.0\n1,1,12.0\n")
    table = tmp_path / "t.csv"
    table.write_text("Nodes,Images/second,EnergyFile\n2,10,e.csv\n1,11,e.csv\n")
    store = Store(tmp_path / "out")
    read_table(table, store.root, None)
    energies = {record.value("throughput"): record.metrics["run_energy"] for record in store.records("t")}
    assert energies[10].value is None and "1 of the 2 nodes" in str(energies[10].reason) and energies[11].value == 3600 * 11


@pytest.mark.parametrize("rate", ["0", "nan", "1e999", "1,5"])
def test_what_is_no_rate_is_unknown(tmp_path: Path, rate: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"Avg_TFLOPs/GPU;Tokens/second\n{rate};{rate}\n")
    store = Store(tmp_path / "out")
    read_table(table, store.root, None)
    (record,) = store.records("t")
    for name in ("throughput", "achieved_flops_per_device"):
        assert record.value(name) is None and f"'{rate}'" in str(record.metrics[name].reason)
    assert record.status == "failed"


@pytest.mark.parametrize("text", ["", "a,b\n", "a,a\n1,2\n", "a,b\n1\n", "\x00\xff"])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"t\.csv"):
        read_table(table, tmp_path / "out", None)
