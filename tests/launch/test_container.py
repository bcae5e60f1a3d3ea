"""Containers: Bubblewrap, Charliecloud and Podman run for real. Apptainer and Singularity are not to be had where these tests run: for them
the command line is compared with a golden one, and a stand-in for the program shows that it is called as the script says. What they
make of it is not tested here, and neither is a GPU in a container."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.launch.container import PROGRAMS, build_command, check, digest, image_of, pull_command, runtime_called, wrap
from caraml.launch.script import Recipe, Shell, join
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Policy
from caraml.system.environment import container as container_seen
from caraml.system.model import Container, ContainerRuntime, Site
from caraml.workloads.gpt.text import prepare_text
from tests.conftest import MakePoint
from tests.debian import install
from tests.stores import write_script
from tests.waiting import until

ROOT = Path(__file__).parents[2]
IMAGE = f"localhost/caraml-test-{os.getpid()}"  # of one run of the tests: others take theirs away
PACKAGES = {"bubblewrap": ("bubblewrap",), "charliecloud": ("charliecloud",), "podman": ("podman", "runc")}

# -- command lines -----------------------------------------------------------------------------------------------------


def wrapped(runtime: ContainerRuntime, **values: object) -> list[str]:
    given: dict[str, object] = {"binds": ["/data:/in:ro", "/out"], "workdir": "/out", "extra": ["--extra"]}
    return wrap(["python3", "-m", "x"], runtime, "image.sif", **{**given, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_an_image_is_made_of_one_version_with_a_torch_that_is_new_enough(name: str) -> None:
    """Of `latest` the same file makes another image every month."""
    text = (ROOT / "containers" / f"{name}.def").read_text()
    found = re.search(r"^From: (\S+):(\S+)$", text, re.MULTILINE)
    assert found is not None and re.search(r"\d\.\d", found[2])
    assert name == "cpu" or "PIP_BREAK_SYSTEM_PACKAGES=1" in text.partition("pip install")[0], "Ubuntu's pip refuses otherwise"
    needed = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert needed is not None
    torch = re.search(r"(?:^|_release_)(\d+)\.(\d+)\.\d", found[2])
    assert name == "cpu" or (torch is not None and tuple(map(int, torch.groups())) >= tuple(map(int, needed.groups())))


def test_apptainer_s_command_line() -> None:
    assert wrapped("apptainer", gpus="cuda") == [
        *("apptainer", "exec", "--nv", "--bind=/data:/in:ro", "--bind=/out:/out"),
        *("--pwd=/out", "--extra", "image.sif", "python3", "-m", "x"),
    ]
    assert wrapped("singularity", gpus="rocm")[:3] == ["singularity", "exec", "--rocm"]


def test_podman_s_command_line() -> None:
    argv = wrapped("podman", gpus="cuda")
    assert argv[:3] == ["podman", "run", "--rm"] and argv[-5:] == ["--extra", "image.sif", "python3", "-m", "x"]
    assert {"--env=CARAML_*", "--env=SLURM_*", "--env=CUDA_VISIBLE_DEVICES", "--pid=host"} <= set(argv)
    assert {"--device=nvidia.com/gpu=all", "--volume=/data:/in:ro", "--volume=/out:/out", "--workdir=/out"} <= set(argv)
    assert {"--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"} <= set(wrapped("podman", gpus="rocm"))


def test_what_a_runtime_cannot_do_is_refused() -> None:
    with pytest.raises(InputError, match="read-only"):
        wrapped("charliecloud")
    with pytest.raises(InputError, match="image"):
        image_of(Container(runtime="apptainer"), away=True)
    with pytest.raises(InputError, match="apptainer"):
        runtime_called("aptainer")


@pytest.mark.parametrize("runtime", ["apptainer", "podman"])
def test_a_script_calls_the_runtime_as_the_site_says(
    runtime: ContainerRuntime, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in writes down its arguments."""
    tools, image = tmp_path / "bin", tmp_path / "my image.sif"
    tools.mkdir()
    image.write_text("bytes")
    stand_in = tools / PROGRAMS[runtime]
    words = 'printf "%s\\n" "$@" >"${@: -1}/called"\nprintf "%s" "${CARAML_CONTAINER_DIGEST:-}" >"${@: -1}/digest"\n'
    stand_in.write_text(f"#!/usr/bin/env bash\n{words}")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    site = Site(container=Container(runtime=runtime, image=str(image), binds=("/data",), extra=("--quick",)))
    folder = Store(tmp_path / "out").new_attempt(make_point())
    done = subprocess.run([str(write_script(make_point(), folder, 1, site, "cuda"))], cwd=folder, check=False)
    assert done.returncode == 0
    called = (folder / "called").read_text().splitlines()
    assert called[-5:] == ["python3", "-P", "-m", "caraml.worker", str(folder)] and "--quick" in called
    assert (str(image) if runtime == "apptainer" else image.name) in " ".join(called)
    if runtime == "apptainer":
        assert (folder / "digest").read_text() == f"sha256:{hashlib.sha256(b'bytes').hexdigest()}"


@pytest.mark.parametrize(
    ("runtime", "option"),
    [
        ("apptainer", "--bind={0}:{0}:ro"),
        ("podman", "--volume={0}:{0}:ro"),
        ("charliecloud", "--bind={0}:{0}"),
        ("bubblewrap", "--ro-bind {0} {0}"),
    ],
)
def test_what_parameters_name_by_relative_paths_is_there_in_the_image(
    runtime: ContainerRuntime, option: str, tmp_path: Path, make_point: MakePoint
) -> None:
    suite, beside = tmp_path / "suite", tmp_path / "beside"
    (suite / "set").mkdir(parents=True)
    (beside / "corpora").mkdir(parents=True)
    (beside / "corpora" / "notes.idx").touch()
    site = Site(container=Container(runtime=runtime, image=str(tmp_path)))

    def text(**params: object) -> str:
        script = Recipe(make_point(params=params), tmp_path / "attempt", 1, site, suite_folder=str(suite)).text()
        return " ".join(script.replace("\\\n", " ").split())

    inside = option.format(suite)
    assert inside in text(folder="set") and option.format(suite / "set") not in text(folder="set")
    both = text(folder="../beside/corpora/notes", of=3)
    assert inside in both and option.format(beside / "corpora") in both
    assert both.index(inside) < both.index(f"{tmp_path / 'attempt'}", both.index(inside)), "what is written is bound last"
    for without in ({"folder": "elsewhere"}, {"folder": str(suite / "set")}, {"folder": None}, {"text": "x" * 9000}, {"text": "a\0b"}, {}):
        assert inside not in text(**without), without
    assert str(suite) not in Recipe(make_point(params={"folder": "set"}), tmp_path / "attempt", 1, site).text(), (
        "another machine has none of it"
    )


# -- images ------------------------------------------------------------------------------------------------------------


def test_a_missing_image_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-such\.sif"):
        check(Container(runtime="apptainer", image=str(tmp_path / "no-such.sif")))
    with pytest.raises(InputError, match="image is not given"):
        check(Container(runtime="podman"))
    check(Container(runtime="apptainer", image="docker://python:3.12"))
    check(Container())


def test_files_are_named_by_their_full_path_and_others_are_left_alone() -> None:
    assert image_of(Container(runtime="apptainer", image="a.sif")) == str(Path.cwd() / "a.sif")
    assert image_of(Container(runtime="podman", image="localhost/caraml")) == "localhost/caraml"
    assert image_of(Container(runtime="apptainer", image="a.sif"), away=True) == "a.sif"
    assert image_of(Container(image="a.sif")) is None, "without a runtime there is none"


def test_the_digest_is_the_file_s_and_a_folder_has_none(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"x" * 100_000)
    assert digest("apptainer", str(tmp_path / "image")) == "sha256:" + hashlib.sha256(b"x" * 100_000).hexdigest()
    assert digest("charliecloud", str(tmp_path)) is None


def test_the_record_names_the_image_that_the_script_used() -> None:
    told = {"CARAML_CONTAINER_RUNTIME": "apptainer", "CARAML_CONTAINER_IMAGE": "/a.sif", "CARAML_CONTAINER_DIGEST": "sha256:1"}
    assert container_seen(Path("/"), told) == {"runtime": "apptainer", "image": "/a.sif", "digest": "sha256:1"}


def test_building_and_pulling_are_one_command_or_a_clear_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfitError, match="apptainer is not installed"):
        build_command("apptainer", ROOT / "containers" / "cpu.def", tmp_path / "a.sif")
    for name in ("apptainer", "podman", "ch-image"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    definition = ROOT / "containers" / "cuda.def"
    assert build_command("apptainer", definition, Path("a.sif")) == ["apptainer", "build", "a.sif", str(definition)]
    assert pull_command("apptainer", "docker://x", Path("a.sif")) == ["apptainer", "pull", "a.sif", "docker://x"]
    assert pull_command("podman", "docker.io/x", None) == ["podman", "pull", "docker.io/x"]
    assert pull_command("charliecloud", "x", None) == ["ch-image", "pull", "x"]
    with pytest.raises(InputError, match="into a file"):
        pull_command("apptainer", "docker://x", None)
    with pytest.raises(InputError, match="definition files"):
        build_command("podman", definition, Path("a"))
    with pytest.raises(InputError, match="no definition file"):
        build_command("apptainer", Path("b.def"), Path("a.sif"))


def test_the_verbs_print_the_command_and_run_it(tmp_path: Path) -> None:
    stand_in = tmp_path / "apptainer"
    stand_in.write_text('#!/usr/bin/env bash\n[ "$1" = build ] && touch "$2"\n')
    stand_in.chmod(0o755)

    def caraml(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "caraml", "container", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    definition, image = str(ROOT / "containers" / "cpu.def"), str(tmp_path / "a.sif")
    built = caraml("build", definition, image)
    assert built.returncode == 0 and built.stdout == f"$ apptainer build {image} {definition}\n" and Path(image).exists()
    failed = caraml("pull", "docker://x", image)
    assert failed.returncode == 3 and "exit status 1" in failed.stderr


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_definition_files_install_this_repository(name: str) -> None:
    """Apptainer is not here to build them; what they copy must at least exist, and what they call must be the package's."""
    text = (ROOT / "containers" / f"{name}.def").read_text(encoding="utf-8")
    assert text.startswith("Bootstrap: docker\nFrom: ")
    copied = [line.split() for line in text[text.index("%files") : text.index("%post")].splitlines()[1:] if line.strip()]
    assert {source for source, _ in copied} >= {"pyproject.toml", "src"} and all((ROOT / source).exists() for source, _ in copied)
    assert "/opt/caraml\n" in text and "import caraml" in text


# -- for real ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root_file_system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with nothing in it but places to mount things, and one file of its own."""
    root = tmp_path_factory.mktemp("image")
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "root", "home", "opt", "work", "run", "var"):
        (root / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "opt" / "of-the-image").touch()
    for place in host_folders():
        (root / place.relative_to("/")).mkdir(parents=True, exist_ok=True)
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        (root / "etc" / name).touch()
    return root


def host_folders() -> list[Path]:
    """What this interpreter needs of the host."""
    needed = [Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), ROOT]
    return [place for place in needed if not any(other in place.parents for other in needed)]


def skip_unless_it_works(runtime: str, bare: list[str], given: bytes | None = None) -> None:
    """A machine may refuse namespaces to a runtime that it has, as other containers and AppArmor do."""
    done = subprocess.run(bare, input=given, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"{runtime} runs nothing here: {done.stderr.decode(errors='replace').strip()}")


@pytest.fixture(scope="module")
def podman_image(root_file_system: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same root in Podman's store. Its settings are those with which it runs on machines of few rights."""
    settings = tmp_path_factory.mktemp("podman") / "containers.conf"
    limits = 'default_ulimits = ["nofile=20000:20000", "nproc=10000:10000"]'
    settings.write_text(f'[containers]\n{limits}\n[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(settings))
        tar = subprocess.run(["tar", "-C", str(root_file_system), "-c", "."], capture_output=True, check=True)
        skip_unless_it_works("podman", ["podman", "import", "-", IMAGE], tar.stdout)
        skip_unless_it_works("podman", ["podman", "run", "--rm", "--network=host", "--volume=/usr:/usr", IMAGE, "/usr/bin/true"])
        yield IMAGE
        subprocess.run(["podman", "rmi", "--force", IMAGE], capture_output=True, check=False)  # with containers whose runtime was killed


@pytest.fixture(params=["bubblewrap", "charliecloud", "podman"])
def real(request: pytest.FixtureRequest, root_file_system: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ContainerRuntime, str]:
    """A runtime that is installed and may run, and an image for it."""
    runtime: ContainerRuntime = request.param
    reason = install(PACKAGES[runtime], (PROGRAMS[runtime],))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("USER", "somebody")  # Charliecloud insists
    if runtime == "podman":
        return runtime, request.getfixturevalue("podman_image")
    if runtime == "bubblewrap":
        skip_unless_it_works(runtime, ["bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "true"])
    else:
        skip_unless_it_works(runtime, ["ch-run", "--bind=/usr:/usr", str(root_file_system), "--", "/usr/bin/true"])
    return runtime, str(root_file_system)


def test_a_point_trains_in_a_container(real: tuple[ContainerRuntime, str], tmp_path: Path, make_point: MakePoint) -> None:
    runtime, image = real
    params = {"preset": "4M", "width": 16, "layers": 1, "heads": 1, "sequence_length": 8, "vocab_size": 300, "corpus": "corpora/notes"}
    prepare_text([Path(__file__)], tmp_path / "suite" / "corpora" / "notes", vocab_size=300)
    policy = Policy(target=0.5, min_seconds=0, min_steps=4, max_steps=8, max_seconds=2, warm_up_max_seconds=0.1, idle_seconds=0)
    point = make_point(workload="gpt", params=params, measure=policy)
    binds = tuple(map(str, host_folders()))
    chosen = Container(runtime=runtime, image=image, binds=binds, python=sys.executable)
    folder = Store(tmp_path).new_attempt(point)
    probe = wrap(["ls", "."], runtime, image, binds=binds, workdir="/opt")
    assert "of-the-image" in subprocess.run(probe, capture_output=True, text=True, check=False).stdout.splitlines()
    script = write_script(point, folder, 1, Site(container=chosen))
    script.write_text(Recipe(point, folder, 1, Site(container=chosen), suite_folder=str(tmp_path / "suite")).text())
    done = subprocess.run([str(script)], timeout=300, check=False)
    assert done.returncode == 0, (folder / "worker.log").read_text()
    record = read_record(folder / RECORD)
    assert record.status == "ok"
    seen = record.environment["container"]
    assert isinstance(seen, dict) and (seen["runtime"], seen["image"]) == (runtime, image)
    assert (seen["digest"] is not None) == (runtime == "podman"), "a folder has no digest"


def test_what_is_told_to_end_leaves_nothing_in_its_container(real: tuple[ContainerRuntime, str], tmp_path: Path) -> None:
    """As the local launcher and Slurm tell it: every process of the script. What they do not reach is the runtime's to end."""
    runtime, image = real
    began, heard, last = (tmp_path / name for name in ("began", "heard", "last"))
    program = f"trap 'echo >{heard}' USR1; trap 'echo >{last}' USR2; echo >{began}; until [ -e {last} ]; do sleep 0.02; done; "
    program += f"exec -a {began} /usr/bin/sleep 900"  # found by this name
    binds = [*map(str, host_folders()), str(tmp_path)]
    process = subprocess.Popen(wrap(["/usr/bin/bash", "-c", program], runtime, image, binds=binds, workdir="/"), start_new_session=True)
    until(began.exists)
    before = group(process.pid)
    if runtime == "podman":  # which hands signals on, in their order, a moment after the container has begun
        until(lambda: heard.exists() or process.send_signal(signal.SIGUSR1) is not None)
        process.send_signal(signal.SIGUSR2)
        until(last.exists)
        until(lambda: group(process.pid) <= before)  # one that is ended while it hands a signal on would end Podman's handing on
    last.touch()
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(300)
    until(lambda: not running(str(began)))


def test_what_is_in_a_container_ends_after_a_runtime_that_was_killed(
    real: tuple[ContainerRuntime, str], tmp_path: Path, make_point: MakePoint
) -> None:
    """By what the script tells Podman, whose containers are no children of it; elsewhere they are killed with it."""
    runtime, image = real
    site = Site(container=Container(runtime=runtime, image=image, binds=tuple(map(str, host_folders()))))
    told = re.findall(r"--env=CARAML_CALLER=\S+ \$\(.+?\)\S*", Recipe(make_point(), tmp_path, 1, site).text())
    assert len(told) == (runtime == "podman")
    began = tmp_path / "began"
    program = f"import pathlib, time; from caraml.base import signals; signals.end_with_caller(); pathlib.Path({str(began)!r}).touch(); "
    program += "time.sleep(900)"
    binds = [*map(str, host_folders()), str(tmp_path)]
    extra = [f"--env=PYTHONPATH={ROOT / 'src'}"] if runtime == "podman" else []
    argv = wrap([sys.executable, "-c", program], runtime, image, binds=binds, workdir=str(tmp_path), extra=[*map(Shell, told), *extra])
    process = subprocess.Popen(["bash", "-c", f"exec {join(argv)}"], start_new_session=True)
    until(began.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(300)
    until(lambda: not running(str(began)))


def group(number: int) -> set[Path]:
    """Folders in /proc of the processes of a group."""
    return {path.parent for path in Path("/proc").glob("[0-9]*/stat") if words_of(path).rpartition(")")[2].split()[2:3] == [str(number)]}


def running(word: str) -> list[str]:
    """The command lines of this machine with ``word`` in them."""
    return [line for path in Path("/proc").glob("[0-9]*/cmdline") if word in (line := words_of(path))]


def words_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
