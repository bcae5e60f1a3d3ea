"""Nothing is started from a folder in which somebody else could put another program in its place."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from caraml.base.errors import InputError
from caraml.base.files import TRUSTED_FOLDERS, intruder, make_folder, write_file
from caraml.cli import app
from caraml.report.server import ResultsTree, results_below
from caraml.results.record import Record
from caraml.results.store import Store, write_record
from caraml.system.catalogue import list_systems, load_system
from caraml.system.variables import digest
from tests.conftest import MakePoint
from tests.security.users import ATTACKER, VICTIM, as_user, needs_two_users, own_folder

pytestmark = [pytest.mark.processes, needs_two_users]

SUITE = """
name = "mine"
title = "Mine"
[[benchmark]]
name = "b"
workload = "command"
params = { argv = ["touch", "{mark}"], energy = false, mark = "MARK" }
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of this user's whose program leaves a mark."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SUITE.replace("MARK", str(tmp_path / "mark")))
    return tmp_path


def run(out: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["run", "mine.toml", "--out", str(out), "--no-report", *words])


def theirs(folder: Path) -> Path:
    return own_folder(folder, "theirs", ATTACKER, 0o755)


def opened(folder: Path, mode: int, group: int = ATTACKER) -> Path:
    made = own_folder(folder, "opened", os.geteuid(), mode)
    os.chown(made, os.geteuid(), group)
    return made


def linked(folder: Path) -> Path:
    """A link of the attacker in a folder like /tmp to a folder of this user's: it may lead elsewhere the next moment."""
    mine = own_folder(folder, "mine", os.geteuid(), 0o755)
    link = folder / "link"
    link.symlink_to(mine)
    os.lchown(link, ATTACKER, ATTACKER)
    return link


def through(folder: Path) -> Path:
    """A link of this user's through a folder of the attacker."""
    (theirs(folder) / "on").symlink_to(own_folder(folder, "mine", os.geteuid(), 0o755))
    link = folder / "link"
    link.symlink_to("theirs/on")
    return link / "results"


def inside(folder: Path, *names: str) -> Path:
    """A folder of this user's with one inside that is the attacker's."""
    mine = own_folder(folder, "mine", os.geteuid(), 0o755)
    made = mine.joinpath(*names)
    made.mkdir(parents=True)
    os.chown(made, ATTACKER, ATTACKER)
    return mine


def listed(folder: Path) -> Path:
    """A folder whose mode names root's group only, and whose access list names the attacker."""
    made = opened(folder, 0o755, os.getegid())
    entries = ((1, 7, -1), (2, 7, ATTACKER), (4, 5, -1), (16, 7, -1), (32, 5, -1))
    try:
        os.setxattr(made, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries))
    except OSError:
        pytest.skip("this file system has no access lists")
    return made


UNSAFE: dict[str, Callable[[Path], Path]] = {
    "another user's": theirs,
    "below another user's": lambda folder: own_folder(theirs(folder), "mine", os.geteuid()),
    "not there yet, below another user's": lambda folder: theirs(folder) / "new" / "results",
    "open to all": lambda folder: opened(folder, 0o777),
    "open to all, sticky": lambda folder: opened(folder, 0o1777),
    "below one open to all": lambda folder: opened(folder, 0o777) / "results",
    "open to a group": lambda folder: opened(folder, 0o2775),
    "below one open to a group": lambda folder: opened(folder, 0o775) / "results",
    "behind another user's link": linked,
    "by way of another user's folder": through,
    "with another user's points": lambda folder: inside(folder, "points"),
    "with another user's point": lambda folder: inside(folder, "points", "command-0123456789abcdef"),
    "with another user's runners": lambda folder: inside(folder, "runners"),
    "with an access list": listed,
}


@pytest.mark.parametrize("name", UNSAFE)
def test_nothing_is_started_from_a_folder_that_others_can_change(name: str, here: Path, shared: Path) -> None:
    out = UNSAFE[name](shared)
    before = set(shared.rglob("*"))
    for words in ((), ("--detach",)):
        done = run(out, *words)
        assert isinstance(done.exception, InputError) and "nothing is started from here" in str(done.exception), (
            done.output,
            done.exception,
        )
        assert "--out" in str(done.exception) and not (here / "mark").exists()
    assert not [path for path in shared.rglob("*") if path not in before and path.is_file()], "nothing was written there either"


@pytest.mark.parametrize("name", ["another user's", "open to a group", "below one open to a group", "open to all"])
def test_who_trusts_a_folder_says_so(name: str, here: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = UNSAFE[name](shared)
    monkeypatch.setenv(TRUSTED_FOLDERS, f"/nowhere:{out if out.exists() else out.parent}")
    assert run(out).exit_code == 0 and (here / "mark").exists()


def test_a_second_folder_to_trust_goes_beside_the_first(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = UNSAFE["open to a group"](shared)
    monkeypatch.setenv(TRUSTED_FOLDERS, "/nowhere")
    with pytest.raises(InputError, match=rf"export {TRUSTED_FOLDERS}=\${TRUSTED_FOLDERS}:{out}$"):
        Store(out).make()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError) as told:
        Store(out).make()
    assert TRUSTED_FOLDERS not in str(told.value) and "--out with a folder of your own" in str(told.value)


def test_a_folder_of_one_s_own_stays_so_whatever_the_umask(here: Path, shared: Path) -> None:
    os.chown(shared, -1, ATTACKER)
    shared.chmod(0o3777)  # new folders have its group, as in a project's folder
    before = os.umask(0o002)
    try:
        for _ in range(2):
            done = run(shared / "results" / "today", "--again")
            assert done.exit_code == 0, (done.output, done.exception)
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("name", "members", "safe"), [("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("all", [], False)]
)
def test_the_group_of_a_user_alone_is_nobody_else(
    name: str, members: list[str], safe: bool, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(shared, 0o775)
    monkeypatch.setattr("caraml.base.files.pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr("caraml.base.files.grp.getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert (intruder(folder) is None) is safe


def test_in_a_container_the_owner_of_what_stands_above_may_be_root(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = own_folder(shared, "above", 65534, 0o755)
    mine = own_folder(above, "mine", os.geteuid(), 0o755)
    assert intruder(mine) == (str(above), "belongs to user 65534")
    monkeypatch.setattr("caraml.base.files._in_namespace", lambda: True)
    assert intruder(mine) is None and intruder(above) == (str(above), "belongs to user 65534")


@pytest.mark.parametrize("target", ["nowhere", "link"])
def test_a_link_to_nothing_or_to_itself_is_no_folder(target: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(InputError, match=f"^{tmp_path}/link: found a link to nothing, expected a folder"):
        make_folder(tmp_path / "link" / "points")


def test_a_place_where_nothing_can_be_made_says_so() -> None:
    """The kernel says there that the new name does not exist, which is a fault of the program elsewhere."""
    for make, place in ((make_folder, "/proc/x/points"), (lambda path: write_file(path, ""), "/proc/x")):
        with pytest.raises(PermissionError, match=r"nothing can be made in this place: '/proc/x'$"):
            make(place)
    with pytest.raises(FileNotFoundError):
        write_file("/no/such/folder/x", "")


def test_a_user_without_a_name_has_folders_of_its_own(shared: Path) -> None:
    """As in a container, and on nodes that ask nobody for names."""
    home, beside = own_folder(shared, "home", VICTIM, 0o755), theirs(shared)

    def look() -> list[object]:
        make_folder(home / "a" / "b")
        return [intruder(home / "a" / "b"), (home / "a").stat().st_mode & 0o777, intruder(beside)]

    assert as_user(VICTIM, look) == [None, 0o755, (str(beside), f"belongs to user {ATTACKER}")]


@needs_two_users
def test_systems_of_another_user_beside_a_suite_of_one_s_own_are_not_read(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their setup lines would run; who may write the suite itself needs none."""
    suite, lines = shared / "suite.toml", 'extends = "jedi"\nname = "jedi"\n[site.software]\nsetup = ["theirs"]\n'
    suite.write_text("")
    (own_folder(shared, "systems", ATTACKER) / "jedi.toml").write_text(lines)
    with pytest.raises(InputError, match=f"systems: not read, because .* belongs to user {ATTACKER}"):
        list_systems(suite)
    monkeypatch.chdir(shared)
    for words in (["list", "systems"], ["system", "show", "jedi"]):
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0 and "jedi" in shown.stdout and "theirs" not in shown.stdout, "the catalogue's"
        (line,) = shown.stderr.splitlines()
        assert line.startswith(f"caraml: left out: {shared}/systems: not read, because ") and f"belongs to user {ATTACKER}" in line
    monkeypatch.setenv(TRUSTED_FOLDERS, "/nowhere")
    with pytest.raises(InputError, match=rf"export {TRUSTED_FOLDERS}=\${TRUSTED_FOLDERS}:{shared / 'systems'}$"):
        list_systems(suite)
    monkeypatch.setenv(TRUSTED_FOLDERS, str(shared / "systems"))
    assert any("theirs" in system.site.software.setup for system in list_systems(suite))
    monkeypatch.delenv(TRUSTED_FOLDERS)
    os.chown(suite, ATTACKER, ATTACKER)
    assert any("theirs" in system.site.software.setup for system in list_systems(suite))


@needs_two_users
def test_systems_that_others_could_have_put_among_one_s_own_are_not_read(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A umask that lets a group write is one thing; their setup lines would run."""
    home = own_folder(shared, "home", VICTIM, 0o755)
    os.chown(home, VICTIM, ATTACKER)  # a group that the two have in common
    home.chmod(0o2755)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))

    def key() -> list[int]:
        before = os.umask(0o002)
        digest("NAME", "value")
        os.umask(before)
        return [(home / folder).stat().st_mode & 0o777 for folder in (".config", ".config/caraml")]

    assert as_user(VICTIM, key) == [0o755, 0o755]
    folder = home / ".config" / "caraml" / "systems"
    lines = 'extends = "jedi"\nname = "jedi"\n[site.software]\nsetup = ["theirs"]\n'

    def plant() -> None:
        folder.mkdir()
        (folder / "jedi.toml").write_text(lines)

    with pytest.raises(PermissionError):
        as_user(ATTACKER, plant)
    folder.parent.chmod(0o2775)  # as an earlier version left it
    as_user(ATTACKER, plant)
    with pytest.raises(InputError, match=r"systems: not read, because .* members of group"):
        as_user(VICTIM, lambda: load_system("jedi"))
    monkeypatch.setenv(TRUSTED_FOLDERS, f"{folder.parent}:{folder}")
    assert as_user(VICTIM, lambda: load_system("jedi")).site.software.setup == ("theirs",)


def test_a_folder_that_another_user_has_closed_hides_no_results(shared: Path, make_point: MakePoint) -> None:
    """One such folder in a tree of all users, and nothing of it was shown."""
    store = Store(shared / "mine")
    point = make_point()
    write_record(store.new_attempt(point), Record(key=point.key, attempt=1, point=point, status="ok", started_at="x"))
    own_folder(shared, "closed", ATTACKER, 0o700)
    for path in (own_folder(shared, "theirs", ATTACKER, 0o755), shared / "theirs" / "points" / "x-1"):
        path.mkdir(parents=True, exist_ok=True)
    (shared / "theirs" / "points" / "x-1").chmod(0o700)
    tree = ResultsTree(shared)

    def look() -> tuple[int, list[tuple[str, list[str | None]]], list[str]]:
        found = [(one.folder, [record.reason for record in one.records]) for one in tree.campaigns()]
        return len(list(results_below(shared))), found, tree.faults

    told = "cannot be read: points/x-1/1/record.json: Permission denied; next step: have its owner open it to you"
    assert as_user(VICTIM, look) == (2, [("mine", [None]), ("theirs", [told])], [])
