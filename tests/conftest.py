"""Fixtures that several rooms share, and surroundings that are the same on every machine."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from caraml.__main__ import verbs
from caraml.base.files import TRUSTED_FOLDERS, intruder
from caraml.base.format import count
from caraml.suite.model import Point, Policy

MakePoint = Callable[..., Point]

verbs()  # for tests that call ``caraml.cli.app``

STARTS = Path(__file__).parent / "starts"
PINNED = {"COLUMNS": "120", "LINES": "40", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TERM": "dumb", "TZ": "UTC", "CUDA_VISIBLE_DEVICES": ""}
"""What output, sorting and dates depend on. And no GPU that this machine may have: processes that are forked could not use it."""
PROBE_SECONDS = "0"
"""No search for this machine's limits in each worker that a test starts: a third of its time. Those that are about limits set their own,
and ``tests/system`` searches as long as users do."""
SHARING = {"CARAML_BIND": "off", "OMP_WAIT_POLICY": "passive", "FORK_SERVER_THREADS": "1"}
"""Where several tests run at a time: what they start is not all bound to the same cores, threads that wait let others work, and a forked
process has one: two that wait for each other on busy cores take longer."""
WAITING = (
    *("slurm/test_slurm.py", "faults/test_processes.py", "slurm/test_programs.py", "workloads/test_command.py", "slurm/test_verify.py"),
    *("test_campaign_durability.py", "report/test_browser.py", "power/test_power_command.py", "launch/test_plug_in.py", "test_campaign.py"),
    *("power/test_power_docs.py", "report/test_accessible.py"),
)
"""Files whose tests wait for most of their time. One process begins with them, and leaves the cores to the others."""
LONGEST = (
    *("test_docs.py", "engine/parallel/test_parity.py", "engine/test_compiled.py", "accelerator/test_accelerator.py"),
    *("workloads/test_maelstrom_training.py", "security/test_data_bombs.py", "worker/test_measure.py", "faults/test_surroundings.py"),
    *("worker/test_measure_ended.py", "worker/test_measure_killed.py", "worker/test_measure_ranks.py", "worker/test_measure_told.py"),
    *(
        "worker/test_profile.py",
        "worker/test_training.py",
        "bench/test_gpu_bench.py",
        "workloads/test_training.py",
        "security/test_bombs.py",
    ),
    *("test_collection.py", "security/test_ranks.py", "e2e/test_examples.py", "test_needs.py", *WAITING),
)
"""Files that begin first where several run at a time: one of minutes that began last would leave the other cores without work."""
COLLECTED = pytest.StashKey[list[str]]()
"""Ids of all tests that were collected, before any are left out."""
FOREIGN = ("CARAML_", "XDG_", "LC_", "SLURM_", "PMI", "OMPI_", "TORCHELASTIC_")
"""Beginnings of names by which a caller's own settings, or the job around the tests, would reach what is tested."""
FOREIGN_NAMES = "LANGUAGE NO_COLOR FORCE_COLOR PY_COLORS CLICOLOR CLICOLOR_FORCE GITHUB_ACTIONS RANK LOCAL_RANK WORLD_SIZE"
FOREIGN_NAMES += " LOCAL_WORLD_SIZE PYTHONUNBUFFERED PYTHONSAFEPATH PYTHONIOENCODING PYTHONOPTIMIZE PYTHONWARNINGS PIP_USER PIP_TARGET"


def pin_surroundings() -> None:
    """The same surroundings whoever calls, before any test is collected: variables, time zone, rights of new files."""
    for name in list(os.environ):
        if name.startswith(FOREIGN) or name in FOREIGN_NAMES.split():
            del os.environ[name]
    # The cluster that some tests bring up makes this machine a login node for all of them.
    os.environ.update(PINNED, CARAML_PROBE_SECONDS=PROBE_SECONDS, CARAML_HERE="1")
    # Servers, as Slurm's, lie where the path of many users does not look.
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(dict.fromkeys([*path, "/usr/sbin", "/sbin"]))
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.update(SHARING)
    time.tzset()
    os.umask(0o022)


pin_surroundings()
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]  -- made anew for every command otherwise, in 30 ms


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An empty home: nothing of the caller's is read, and campaigns of the tests take turns among themselves only.

    Data is prepared once for all tests, also where several processes run them.
    """
    base = tmp_path_factory.getbasetemp()
    if folders := open_above(base):
        os.environ[TRUSTED_FOLDERS] = ":".join(folders)
    os.environ["CARAML_DATA"] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prepared")
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


def open_above(folder: Path) -> list[str]:
    """Folders from here upwards that others may write to, as a group's scratch: the caller has chosen them for temporary files."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        while (open_to := intruder(folder)) is not None and open_to[0] not in found:
            found.append(open_to[0])
            patch.setenv(TRUSTED_FOLDERS, ":".join(found))
    return found


@contextmanager
def fork_server(**variables: str) -> Iterator[None]:
    """What is started meanwhile has torch loaded already; see ``tests/starts``. ``variables`` are read where a library is loaded."""
    with tempfile.TemporaryDirectory(prefix="caraml-", dir="/tmp") as folder:  # a socket's path must be short
        path, socket = STARTS / "server.py", f"{folder}/socket"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTS), os.environ.get("PYTHONPATH")]))
        checked, _checked[:] = list(_checked), []  # not the first test starts it, but those that follow need it
        around = os.environ | {"TORCHINDUCTOR_VEC_ISA_OK": "0"} | variables  # to find out about vectors takes longer than to do without
        with subprocess.Popen([sys.executable, "-P", str(path), socket], stdin=subprocess.DEVNULL, env=around) as server:
            _checked[:] = checked
            while not Path(socket).exists() and server.poll() is None:
                time.sleep(0.01)
            os.environ["FORK_SERVER"] = socket
            yield
            server.kill()


@pytest.fixture(scope="session", autouse=True)
def quick_starts(request: pytest.FixtureRequest, own_home: None) -> Iterator[None]:
    """A fork server, where one of the tests starts something; workers of pytest-xdist have that of the process that started them."""
    starts = any(item.get_closest_marker("processes") for item in request.session.items)
    with fork_server() if starts and "FORK_SERVER" not in os.environ else nullcontext():
        yield


HANDLED = [one for one in signal.Signals if one not in (signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP) and one < signal.SIGRTMIN]
"""Not SIGALRM, which times tests."""
OF_LIBRARIES = ("PYTEST_", "TORCH", "KINETO_", "TRITON_", "TOKENIZERS_", "KMP_", "HF_", "MPL")
"""Beginnings of variables that libraries set where they are first loaded or used."""


def surroundings() -> dict[str, object]:
    """What every test finds, and has to leave as it is: variables, the current folder, rights of new files, who handles signals, and
    threads that would keep the process."""
    umask = os.umask(0)
    os.umask(umask)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(OF_LIBRARIES)}
    try:
        folder = str(Path.cwd())
    except OSError as error:
        folder = str(error)
    handlers = {number.name: signal.getsignal(number) for number in HANDLED}
    threads = {thread.name for thread in threading.enumerate() if not thread.daemon}
    return {**variables, **handlers, "folder": folder, "umask": umask, "threads": threads}


@contextmanager
def left_alone(who: str, *, told: Callable[[str], object] = pytest.fail) -> Iterator[None]:
    """Tell, as a failure, where ``who`` leaves the surroundings other than they were: what follows would run in them."""
    before = surroundings()
    yield
    after = surroundings()
    changed = {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}
    if changed:
        told(f"{who} changed what others find: {changed}")


@pytest.fixture(scope="module", autouse=True)
def same_starts(quick_starts: None) -> Iterator[None]:
    """No file's tests change how those of the next start: the fork server would decline, and everything take seconds longer."""
    names = ("PYTHONPATH", "FORK_SERVER", "HOME", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    yield
    after = {name: os.environ.get(name) for name in names}
    assert after == before, "variables that the tests of this file have left changed"


@pytest.fixture(autouse=True)
def same_for_the_next_test(same_starts: None) -> Iterator[None]:
    """A test of ``make check`` fails where it changes what the next one finds; any other one has a warning."""
    with left_alone("this test", told=pytest.fail if _checked else warnings.warn):
        yield


@pytest.fixture
def handlers_back() -> Iterator[None]:
    """For tests that call ``caraml.__main__.main``, which takes both signals for the rest of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts begins with a fresh interpreter, as it does for users."""
    monkeypatch.delenv("FORK_SERVER", raising=False)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes never enter an id: packed ones hold the time of day or the version of a library. pytest numbers equal names."""
    return argname if isinstance(val, bytes) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of tests that are few, the files of others are not read: it takes longer than a test."""
    if config.getoption("markexpr") != "exclusive" or not collection_path.name.startswith("test_") or not collection_path.is_file():
        return None
    return b"mark.exclusive" not in collection_path.read_bytes() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test whose file, or whose fixture's file, imports what starts processes is one that starts processes."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    if "PYTEST_XDIST_WORKER" in os.environ:
        turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONGEST)}
        items.sort(key=lambda item: turns.get(item.path, len(turns)))  # all workers alike, and in the order of collection otherwise
    starting: dict[int, bool] = {}
    for item in items:
        fixtures = [fixture.func for known in item._fixtureinfo.name2fixturedefs.values() for fixture in known]  # type: ignore[attr-defined]
        files = [vars(item.module), *(inspect.unwrap(f).__globals__ for f in fixtures if hasattr(f, "__globals__"))]  # type: ignore[attr-defined]
        for file in files:
            if id(file) not in starting:  # of thousands of tests, hundreds of files
                starting[id(file)] = file is not globals() and _starts_processes(file)
        if any(starting[id(file)] for file in files):
            item.add_marker("processes")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files in turn, one at a time to each process; see :data:`WAITING`."""
    from xdist.scheduler import LoadFileScheduling

    alone = config.getoption("markexpr") == "exclusive"

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            """Of the tests that run by themselves, that of a page takes most of a minute, and all others together less."""
            file = super()._split_scope(nodeid)
            return "others" if alone and not file.endswith("test_docs.py") else file

        def _assign_work_unit(self, node: Any) -> None:
            waits = node is self.nodes[0]
            chosen = (file for file in self.workqueue if (file.removeprefix("tests/") in WAITING) is waits)
            self.workqueue.move_to_end(next(chosen, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _starts_processes(file: dict[str, Any]) -> bool:
    """Whether a file has a module that starts processes, or anything that is from one."""
    names = {str(getattr(value, name, "")) for value in file.values() for name in ("__name__", "__module__")}
    return bool(names & {"subprocess", "multiprocessing", "torch.multiprocessing", "tests.security.taken"})


def pytest_configure(config: pytest.Config) -> None:
    """Several workers have one fork server; a test without the mark ``processes`` that starts something fails."""
    _need_programs_in(tempfile.gettempdir())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background: what tests start would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    marks, shared = config.getoption("markexpr"), SHARING
    if marks == "exclusive":  # what these start is bound, and waits, as it does for users
        shared = {}
        for name in SHARING:
            os.environ.pop(name, None)
    if "not processes" not in marks:
        server = ExitStack()
        if config.getoption("numprocesses", None):
            server.enter_context(fork_server(**shared))
        config.add_cleanup(server.close)
    _ = platform.uname().processor  # asks a program, once: otherwise in the first test that imports what wants to know
    sys.addaudithook(_refuse_processes)
    spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]  -- goes past the audit

    def audited(*words: Any) -> Any:
        _refuse_processes("os.fork", words)
        return spawn(*words)

    multiprocessing.util.spawnv_passfds = audited  # type: ignore[attr-defined]


def _need_programs_in(folder: str) -> None:
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise pytest.UsageError(f"{folder} is mounted noexec, and the tests start programs there: set TMPDIR to another folder")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Know whether a test of ``make check`` runs, whichever command runs it."""
    if not any(item.get_closest_marker(name) for name in ("processes", "exclusive", "slow")):
        _checked.append(item.nodeid)
    try:
        return (yield)
    finally:
        _checked.clear()


_checked: list[str] = []
_STARTING = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event in _STARTING and _checked:
        pytest.fail(f"a test of `make check` starts a process: mark it `processes`, or its file: {event} {arguments[:2]}", pytrace=False)


@pytest.fixture(scope="session")
def make_point() -> MakePoint:
    """Makes a point; keyword arguments replace the defaults."""

    def make(**values: Any) -> Point:
        defaults: dict[str, Any] = {
            "suite": "test",
            "benchmark": "fake",
            "workload": "fake",
            "params": {},
            "system": "local",
            "device": "test device",
            "device_class": "cpu",
            "software": "test",
            "global_batch": 4,
            "micro_batch": 4,
            "measure": Policy(min_seconds=1, max_seconds=5, idle_seconds=0),
        }
        return Point(**{**defaults, **values})

    return make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Untested is not tested: say so where nobody can miss it."""
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    for reason, tests in skipped.items():
        terminalreporter.write_line(f"NOT TESTED: {reason} ({count(tests, 'test')})", yellow=True, bold=True)
