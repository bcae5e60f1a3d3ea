"""Archives from strangers: no path, link, bomb, or swapped file gets in. And tables of JUBE."""

from __future__ import annotations

import hashlib
import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from caraml.errors import InputError
from caraml.results.archive import MANIFEST, pack, unpack
from caraml.results.jube import read_table
from caraml.results.record import Metric, Record
from caraml.results.store import Store, write_record
from tests.conftest import MakePoint

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
    store.remember_suite("s", [point.key])
    pack(tmp_path / "store", "s", tmp_path / "s.zip")
    return tmp_path / "s.zip"


def rebuilt(path: Path, change: Change) -> Path:
    """The archive with other contents; ``change`` gets the files and the manifest."""
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    manifest = json.loads(files.pop(MANIFEST))
    change(files, manifest)
    made = path.with_name("changed.zip")
    with zipfile.ZipFile(made, "w") as new:
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
    assert (done.records, done.known) == (2, 0)
    folders = sorted((tmp_path / "new" / "points").glob("*/*/record.json"))
    found = {folder.parent.name: json.loads(folder.read_text()) for folder in folders}
    assert {name: record["attempt"] for name, record in found.items()} == {"1": 1, "2": 2, "3": 3}
    assert [found[name]["status"] for name in ("1", "2", "3")] == ["oom", "ok", "ok"] and unpack(archive, tmp_path / "new").known == 2


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


def test_links_are_refused(archive: Path, tmp_path: Path) -> None:
    name = "points/gpt-0123456789abcdef/1/link"
    made = rebuilt(archive, add(name, b"/etc/passwd"))
    with zipfile.ZipFile(made) as old:
        files = {entry: old.read(entry) for entry in old.namelist()}
    with zipfile.ZipFile(made, "w") as new:
        for entry, content in files.items():
            information = zipfile.ZipInfo(entry)
            information.external_attr = (stat.S_IFLNK | 0o777) << 16 if entry == name else 0
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


def test_other_files_are_no_archives(archive: Path, tmp_path: Path) -> None:
    for content in (b"", b"PK", archive.read_bytes()[:200]):
        (tmp_path / "x.zip").write_bytes(content)
        with pytest.raises(InputError, match="not a CARAML archive"):
            unpack(tmp_path / "x.zip", tmp_path / "new")


def test_a_jube_table_becomes_records_with_what_it_knows(tmp_path: Path) -> None:
    table = tmp_path / "llm.csv"
    table.write_text(
        "JobID,System,Nodes,GlobalBatchSize,Time/iteration [s],Tokens/second,Avg_TFLOPs/GPU,Loss\n"
        "123,JEDI,2,64,2.1,31207.2,88.3,1.5\n124,JEDI,2,128,,,,\n"
    )
    store = Store(tmp_path / "out")
    assert read_table(table, tmp_path / "out", None).records == 2
    good, bad = store.records("llm")
    assert good.value("throughput") == 31207.2 and good.metrics["throughput"].unit == "token/s"
    assert good.value("achieved_flops_per_device") == pytest.approx(88.3e12)
    assert (good.metrics["time_per_iteration"].unit, good.metrics["loss"].unit) == ("s", "?") and good.metrics["loss"].reason
    assert (good.point.nodes, good.point.global_batch, good.point.params["System"]) == (2, 64, "JEDI")
    missing = good.environment["missing"]
    assert isinstance(missing, dict) and "point.device" in missing and "point.nodes" not in missing
    assert bad.status == "failed" and bad.metrics["throughput"].value is None and bad.metrics["throughput"].reason
    assert read_table(table, tmp_path / "out", None).known == 2


@pytest.mark.parametrize("text", ["", "a,b\n", "a,a\n1,2\n", "a,b\n1\n", "\x00\xff"])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"t\.csv"):
        read_table(table, tmp_path / "out", None)
