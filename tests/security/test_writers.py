"""Nothing writes a file but ``caraml.base.files``, and nothing takes a lock but ``caraml.base.processes``: held by reading the source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caraml.launch.script import Recipe
from caraml.system.model import Site
from tests.conftest import MakePoint

SOURCE = Path(__file__).parents[2] / "src" / "caraml"
HELPERS = {"base/files.py", "base/processes.py"}

EXCEPTIONS = {
    ("data/staging.py", "copy2"): "into a folder of 0700 below one that only this user can enter",
    ("data/staging.py", "extractall"): "as above",
    ("engine/parallel/checkpoint.py", "save"): "torch writes a checkpoint's many files by name, into a new folder that is held open",
    ("results/rows.py", "NamedTemporaryFile"): "made exclusively, with a random name, and readable for this user only",
    ("results/rows.py", "write_parquet"): "into a temporary folder, 0700, or what `replacing_by_name` gave",
    ("cli/check.py", "os.open"): "the null device, where the rest of the output goes when its reader has left",
    ("system/host.py", "write_text"): "a switch of the kernel for this process, below /proc",
    ("results/archive.py", "open"): "a member of an archive, whose file `replacing` opened",
}
"""File and call, and why it may."""

_METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "extractall", "unpack_archive"}
_ALWAYS = {
    *("mkstemp", "mkdtemp", "NamedTemporaryFile", "copy2", "copyfile", "copytree", "flock", "lockf", "mkfifo", "mknod"),
    *("tofile", "savetxt", "FileHandler"),
}
_GIVEN_A_FILE = {
    "save",
    "savez",
    "savez_compressed",
    "write_parquet",
    "write_csv",
    "to_parquet",
    "to_csv",
    "to_netcdf",
    "dump",
    "save_model",
}
"""Writers of libraries: what they are given must come from a helper."""
_MODED = {"open", "File", "ZipFile", "TarFile", "fdopen", "Dataset", "memmap"}
_MODE = re.compile(r"[rwaxbt+:|*gz]{1,5}")
_WRITING = re.compile(r"[wax+]")
_SOURCES = {"replacing", "replacing_by_name", "making", "open_new", "open_to_append"}
_NO_WRITERS = {"self.index.save", "self.store.index.save", "checkpoint.save"}


def _safe_names(tree: ast.AST) -> set[str]:
    """Variables that hold what a helper opened."""
    items = [item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    return {
        item.optional_vars.id
        for item in items
        if isinstance(item.context_expr, ast.Call)
        and ast.unparse(item.context_expr.func).rpartition(".")[2] in _SOURCES
        and isinstance(item.optional_vars, ast.Name)
    }


def _writing(call: ast.Call) -> bool:
    """Whether the mode of a call of an opening function is one for writing; one that is no constant counts as such."""
    named = [word.value for word in call.keywords if word.arg == "mode"]
    given = named or [a for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str) and _MODE.fullmatch(a.value)]
    modes = [mode.value if isinstance(mode, ast.Constant) else "w" for mode in given]
    return any(_WRITING.search(str(mode)) for mode in modes)


def writes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls that write a file or take a lock by a name: function and line."""
    safe = _safe_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        given = [*node.args, *(word.value for word in node.keywords)]
        from_helper = any(part.id in safe for value in given for part in ast.walk(value) if isinstance(part, ast.Name))
        if called in {"shutil.copy", "shutil.move"} or name in _ALWAYS or (name in _METHODS and owner):
            yield name, node.lineno
        elif called == "os.open":
            if "O_RDONLY" not in ast.unparse(node):
                yield called, node.lineno
        elif name in _MODED:
            if _writing(node) and not from_helper:
                yield name, node.lineno
        elif name in _GIVEN_A_FILE and owner and not from_helper and called not in _NO_WRITERS:
            yield name, node.lineno


def test_only_the_helpers_write_files_and_take_locks() -> None:
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place in HELPERS:
            continue
        for name, line in writes(ast.parse(path.read_text(encoding="utf-8"))):
            found.add((place, name))
            assert (place, name) in EXCEPTIONS, f"{path}:{line}: {name} writes by a name; use caraml.base.files or caraml.base.processes"
    assert found == set(EXCEPTIONS), "an exception that nothing needs any more"


def test_the_search_finds_every_way_to_write() -> None:
    ways = """
open("data.bin", "w")
open("x", mode="ab")
path.open("x")
path.open("r+")
path.write_text("")
path.write_bytes(b"")
path.touch()
os.open("x", os.O_WRONLY | os.O_CREAT)
os.open("x", os.O_RDWR)
tempfile.mkstemp()
tempfile.NamedTemporaryFile("w")
tarfile.open("x", "w:gz")
zipfile.ZipFile(path, "w")
h5py.File(path, "w")
h5netcdf.File(path, "a")
gzip.open("x", "wb")
np.save(path, array)
np.savez(folder / "x", array)
torch.save(state, path)
image.save(path, "JPEG")
relation.write_parquet(str(path))
json.dump(value, open("x", chosen))
shutil.copyfile(a, b)
shutil.copy(a, b)
fcntl.flock(fd, 2)
np.memmap(path, mode="w+")
archive.extractall(folder)
"""
    lines = {line for _, line in writes(ast.parse(ways))}
    assert lines == set(range(2, len(ways.splitlines()) + 1))
    others = """
open("data.bin")
path.open("rb")
tarfile.open(path, "r:")
os.open("x", os.O_RDONLY)
np.memmap(path, mode="r")
with replacing(path) as file:
    np.save(file, array)
    tarfile.open(fileobj=file, mode="w")
"""
    assert not list(writes(ast.parse(others)))


def test_modules_are_started_without_what_lies_in_the_current_folder(tmp_path: Path) -> None:
    """Somebody may have left a ``json`` or a ``caraml`` there."""
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    before = [*re.findall(r'(.{6})"-m"', text), *re.findall(r"(?:executable|python)\)} (.*)-m caraml", text)]
    assert len(before) > 6 and {found.strip(' ",') for found in before} == {"-P"}
    for name in ("json", "caraml"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-P", "-m", "caraml.engine.start", "json.tool", "--help"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    assert not (tmp_path / "ran").exists() and done.returncode == 0, done.stderr


GROWS = """
import functools, pathlib, sys
from caraml.data.store import grow

if __name__ == "__main__":
    print(grow(pathlib.Path(sys.argv[1]), 12e-9, functools.partial(max, 4), print))
"""


def test_processes_that_write_data_import_nothing_of_the_current_folder(tmp_path: Path, real_start: None) -> None:
    """Python starts them so that they would, before what starts them can tell them where else to look."""
    program, here, marks = tmp_path / "bin" / "program.py", tmp_path / "here", tmp_path / "marks"
    for folder in (program.parent, here, marks):
        folder.mkdir()
    program.write_text(GROWS)
    for name in ("multiprocessing", "signal", "json"):
        (here / f"{name}.py").write_text("open('ran', 'w')")
    done = subprocess.run([sys.executable, str(program), str(marks)], cwd=here, check=False, capture_output=True, text=True)
    assert not (here / "ran").exists() and done.stdout.endswith("[4, 4, 4]\n"), done.stderr
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize(("given", "kept"), [("", None), (":", None), ("/a::b:", "/a:{here}/b"), ("/a", "/a")])
def test_a_blank_place_for_modules_is_not_the_current_folder(
    given: str, kept: str | None, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``export PYTHONPATH=$MINE:$PYTHONPATH`` leaves one; somebody may have left a ``torch.py`` where `caraml run` was called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", given)
    text = Recipe(make_point(), tmp_path / "points" / "x-1" / "1", 1, Site()).text()
    exported = re.findall("^export PYTHONPATH=(.*)$", text, re.MULTILINE)
    assert exported == ([] if kept is None else [kept.format(here=tmp_path)])
