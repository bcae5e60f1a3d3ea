"""Values of environment variables: a token in every place where a suite or a machine may have one, and every file and line made of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
import tomli_w
from typer.testing import CliRunner, Result

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.toml import parse_toml
from caraml.cli import app
from caraml.power.source import chosen_sources
from caraml.results.record import Record
from caraml.results.store import Store, read_listing
from caraml.suite.load import suite_of
from caraml.system.environment import variables
from caraml.system.model import Container, Scheduler
from caraml.system.variables import FOLDER, digest, hand_over, shown

TOKENS = {name: f"t0k-{name}-{{}}'\"$x" for name in ("ONE", "SWEPT", "OVER", "OF_CALLER", "IN_SITE")}
"""Each with what templates, shells and TOML would spell in another way."""
PROGRAM = """
for name in ONE SWEPT OVER SET OF_CALLER IN_SITE OMP_NUM_THREADS; do
  [ -z "${!name:-}" ] || printf '%s %s\\n' "$name" "$(printf %s "${!name}" | sha256sum)"
done
stat -c 'right %a %n' "$1"/.private "$1"/.private/* 2>/dev/null
cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' >"$1/processes"
echo begin; echo end
exit "$2"
"""
LIGHT, HEAVY = "energy = false", 'energy = false, marks = { begin = "^begin", end = "^end" }'
SWEEP = """[
  { ONE = "@ONE@", SWEPT = "@SWEPT@", OF_CALLER = "$CALLER", OMP_NUM_THREADS = "{threads}", SIZE = "{threads}:{threads}" },
  { ONE = "@ONE@", SWEPT = "@SWEPT@ of {threads}", OF_CALLER = "$CALLER", OMP_NUM_THREADS = "3" },
]"""
MACHINE = """
name = "virtual"
title = "Virtual node"
devices_per_node = 1
devices = [{ model = "virtual", kind = "cpu" }]
cpu = { model = "virtual", threads = 4 }
sources = { devices_per_node = "this test", devices = "this test", cpu = "this test" }
[site.software]
variables = { IN_SITE = '''@IN_SITE@''', OMP_PROC_BIND = "close" }
setup = ['printf %s "$IN_SITE" | sha256sum']
"""


def told(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def caraml(*words: str) -> Result:
    return CliRunner().invoke(app, [*words], catch_exceptions=True)


def in_template(value: str) -> str:
    return value.replace("{", "{{").replace("}", "}}")


def in_toml(value: str) -> str:
    return in_template(value).replace('"', '\\"')


def filled(text: str) -> str:
    """A text with the tokens, as they have to be written in TOML."""
    for name, token in TOKENS.items():
        text = text.replace(f"'''@{name}@'''", f"'''{token}'''").replace(f"@{name}@", in_toml(token))
    return text


def suite(env: str, kind: str = LIGHT, more: str = "", code: int = 0) -> None:
    """The suite ``s.toml``, with a program that says what it was given."""
    head = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "b"\nworkload = "command"\n{more}\n# {TOKENS["ONE"]}\n[benchmark.params]\n'
    argv = 'argv = ["bash", "{suite_folder}/program.sh", "{folder}", "{code}", "{threads}"]'
    Path("s.toml").write_text(filled(f"{head}{argv}\nenv = {env}\nthreads = 2\ncode = {code}\n") + kind.replace(", marks", "\nmarks"))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program and a machine's description, and a caller with a variable."""
    (tmp_path / "program.sh").write_text(PROGRAM)
    (tmp_path / "virtual.toml").write_text(filled(MACHINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CALLER", TOKENS["OF_CALLER"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CARAML_RESULTS", "out")
    return tmp_path


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file made, archives and tables unpacked."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in ("s.toml", "virtual.toml"):
            continue
        yield str(path), path.read_bytes()
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield f"{path}: {name}", archive.read(name)
        if path.suffix == ".parquet":
            yield f"rows of {path}", repr(duckdb.sql(f"from '{path}'").fetchall()).encode()


def clean(said: Mapping[str, str]) -> None:
    """No file and no line has a token, however it is spelt."""
    found = [*contents(Path()), *((name, text.encode()) for name, text in said.items())]
    for name, content in found:
        assert b"t0k-" not in content, f"{name}: {content[max(content.index(b't0k-') - 100, 0) :][:200]!r}"
    assert len(found) > 20


def whatever_shows_results() -> dict[str, str]:
    """What every verb says that reads results or plans them."""
    key = read_listing(Path("out/suites/s.json")).points[0][0]
    verbs: tuple[tuple[str, ...], ...] = (
        *(("show", key), ("results", "s", "--csv"), ("results", "--sql", "select * from records")),
        *(("status",), ("logs", key), ("report", "s"), ("archive", "s", "s.zip"), ("import", "s.zip", "--out", "again")),
        *(("system", "show", "virtual.toml", "--json"), ("system", "show", "virtual.toml"), ("doctor", "--json")),
        *(("plan", "s.toml", "--scripts", "--again"), ("plan", "s.toml", "--scripts", "--again", "--system", "virtual.toml")),
    )
    done = {" ".join(words): caraml(*words) for words in verbs}
    wrong = {words: (one.output, one.exception) for words, one in done.items() if one.exit_code not in (0, 3)}
    assert not wrong, wrong
    return {words: one.output + repr(one.exception) for words, one in done.items()}


def logs() -> list[tuple[Record, str]]:
    """The records of the suite, each with what its program said."""
    store = Store(Path("out"))
    return [(record, (store.folder(record) / "worker.log").read_text()) for record in store.records("s")]


@pytest.mark.parametrize("kind", [LIGHT, HEAVY], ids=["shell", "worker"])
def test_values_of_env_stand_nowhere(kind: str) -> None:
    suite(SWEEP, kind)
    done = caraml("run", "s.toml", *(("--system", "virtual.toml") if kind == HEAVY else ()))  # variables of the site need a worker
    assert done.exit_code == 0, (done.output, done.exception)
    (first, one), (second, other) = logs()
    assert first.key != second.key, "two values of one variable are two points"
    for text in (one, other):
        assert f"ONE {told(TOKENS['ONE'])}" in text and f"OF_CALLER {told(TOKENS['OF_CALLER'])}" in text
    assert f"SWEPT {told(TOKENS['SWEPT'])}" in one and f"SWEPT {told(TOKENS['SWEPT'] + ' of 2')}" in other
    assert f"OMP_NUM_THREADS {told('2')}" in one and f"OMP_NUM_THREADS {told('3')}" in other
    env = [record.point.params["env"] for record in (first, second)]
    assert isinstance(env[0], dict) and isinstance(env[1], dict)
    assert {name: env[0][name] for name in ("OMP_NUM_THREADS", "OF_CALLER", "SIZE")} == {
        "OMP_NUM_THREADS": "{threads}",
        "OF_CALLER": "$CALLER",
        "SIZE": "{threads}:{threads}",
    }
    assert env[1]["OMP_NUM_THREADS"] == "3" and re.fullmatch(r"hidden:[0-9a-f]{16}\{threads\}", str(env[1]["SWEPT"]))
    rights = re.findall(r"right (\d+) .*/(\S+)\n", one)
    assert rights == ([("700", ".private"), ("600", "program"), ("600", "site")] if kind == HEAVY else [])
    if kind == HEAVY:
        assert f"IN_SITE {told(TOKENS['IN_SITE'])}" in one
        assert told(TOKENS["IN_SITE"]) in next(Path("out").glob("setup-*.log")).read_text()
    assert not list(Path("out").rglob(".private")), "nothing private outlives its attempt"
    processes = [path.read_text() for path in Path("out").rglob("processes")]
    assert len(processes) == 2 and all("program.sh" in text for text in processes)
    clean({"run": done.output, **whatever_shows_results()})


def test_values_of_overrides_stand_nowhere() -> None:
    suite('{ ONE = "@ONE@" }', more='on.cpu.params.env = { OVER = "@OVER@" }')
    done = caraml("run", "s.toml")
    assert done.exit_code == 0 and f"OVER {told(TOKENS['OVER'])}" in logs()[0][1], done.output
    clean({"run": done.output, **whatever_shows_results()})


@pytest.mark.parametrize("setting", ['={ ONE = "t0k" }', '=[{ ONE = "t0k" }]', "=ONE=t0k", '="t0k"', ".ONE=t0k", '.NEW="t0k"'])
def test_values_are_not_set_on_a_command_line(setting: str) -> None:
    suite('{ ONE = "1" }')
    said = str(caraml("run", "s.toml", "--set", f"params.env{setting}").exception)
    assert "--set params.env: variables may hold secrets" in said and "t0k" not in said


def test_what_is_typed_before_detaching_stands_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    suite('{ ONE = "1" }')
    words = ["run", "s.toml", "--out", "out", "--comment", TOKENS["ONE"], "--launcher", "local"]
    started = []

    def program(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(argv)
        return subprocess.Popen(["sh", "-c", "cat >told"], stdin=options["stdin"])

    monkeypatch.setattr("caraml.cli.asked.subprocess", SimpleNamespace(Popen=program, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(sys, "argv", ["caraml", *words, "--detach"])
    before = os.umask(0)
    try:
        assert CliRunner().invoke(app, [*words, "--detach"]).exit_code == 0
    finally:
        os.umask(before)
    assert len(started) == 1 and "t0k" not in " ".join(started[0])
    assert next(Path("out").glob("*.runner.log")).stat().st_mode & 0o777 == 0o600
    deadline = time.monotonic() + 300
    while not Path("told").exists() or Path("told").read_text() != json.dumps(words):
        assert time.monotonic() < deadline
        time.sleep(0.02)


BRACES = [
    '{"password": "t0k"}',
    "a{t0k}b",
    "{t0k}",
    "a{t0k.b}",
    "x{code!t}0k",
    "{code:t0k}",
    "{code[t0k]}",
    "{}t0k",
    "{0}t0k",
    "{code:{t0k}}",
]


@pytest.mark.parametrize("value", BRACES)
def test_of_a_value_with_braces_nothing_is_shown(value: str) -> None:
    """Only parameters in braces stand behind a digest."""
    with pytest.raises(InputError) as told:
        suite_of(parse_toml(SUITE_WITH_ENV.format(tomli_w.dumps({"ONE": value}).partition(" = ")[2].strip()), "s.toml"))
    assert "params.env.ONE" in str(told.value) and "{{" in str(told.value) and "t0k" not in str(told.value).partition("next step")[0]
    good = suite_of(parse_toml(SUITE_WITH_ENV.format("'a{code:>4}{devices}{{t0k}}'"), "s.toml"))
    assert "{code:>4}{devices}" in good.document.text and "t0k" not in good.document.text


SUITE_WITH_ENV = """
name = "s"
title = "S"
[[benchmark]]
name = "b"
workload = "command"
params = {{ argv = ["echo", "{{code}}"], code = [1, 2], env = {{ ONE = {} }} }}
"""

SBATCH = """#!/bin/bash
# Runs the script where the variables of who submits it are not known, as on a site with `--export=NONE`.
cat "${@: -1}" >>"$OUT/submitted"
env -i PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" SLURM_JOB_ID=$$ SLURM_CPUS_ON_NODE=1 bash "${@: -1}" >/dev/null 2>&1 </dev/null
echo $$
"""


def test_a_job_of_a_scheduler_gets_the_values_and_nobody_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "bin").mkdir()
    for name, text in (
        ("sbatch", SBATCH),
        ("squeue", "#!/bin/sh\n"),
        ("sacct", "#!/bin/sh\n"),
        ("scontrol", "#!/bin/sh\n"),
        ("sinfo", "#!/bin/sh\n"),
    ):
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("OUT", str(place))
    Path("virtual.toml").write_text(filled(MACHINE.replace("[site.software]", '[site.scheduler]\ngpus = "none"\n[site.software]')))
    suite(SWEEP)
    done = caraml("run", "s.toml", "--system", "virtual.toml", "--one-at-a-time")
    assert done.exit_code == 0, (done.output, done.exception, [text for _, text in logs()])
    for _, text in logs():
        for name in ("ONE", "OF_CALLER", "IN_SITE"):
            assert f"{name} {told(TOKENS[name])}" in text, text
        assert re.findall(r"right (\d+) ", text) == ["700", "600", "600"]
    assert "program.sh" in Path("submitted").read_text() or "caraml.worker.command" in Path("submitted").read_text()
    clean({"run": done.output, **whatever_shows_results()})


def test_a_value_that_is_not_kept_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    suite('{ ONE = "@ONE@", OF_CALLER = "$CALLER" }', code=4)
    assert caraml("run", "s.toml").exit_code == 1
    key = logs()[0][0].key
    monkeypatch.delenv("CALLER")
    lost = caraml("retry", "--failed")
    assert isinstance(lost.exception, InputError) and lost.exception.exit_code == 2
    assert str(lost.exception).splitlines()[0] == (
        "env.ONE: its value was not kept, only its name; env.OF_CALLER: the environment has no variable CALLER"
    )
    assert "s.toml" in str(lost.exception) and len(list(Path("out").glob("points/*/*"))) == 1, "and nothing was started"
    monkeypatch.setenv("ONE", "another")
    monkeypatch.setenv("CALLER", TOKENS["OF_CALLER"])
    said = str(caraml("retry", "--failed").exception)
    assert "env.ONE" in said and "ONE of the environment is another" in said, "another value is another point"
    monkeypatch.setenv("ONE", TOKENS["ONE"])
    assert caraml("retry", "--failed").exit_code == 1
    record, text = logs()[0]
    assert (record.key, record.attempt) == (key, 2) and f"ONE {told(TOKENS['ONE'])}" in text


def test_a_campaign_of_before_is_told_to_be_run_again() -> None:
    suite('{ ONE = "@ONE@" }', code=4)
    assert caraml("run", "s.toml").exit_code == 1
    path, record = Path("out/suites/s.json"), logs()[0][0]
    old = record.point.model_copy(update={"params": record.point.params | {"env": {"ONE": TOKENS["ONE"]}}})
    assert old.key != record.key
    listing = read_listing(path).model_copy(update={"points": [(old.key, old.label)], "text": Path("s.toml").read_text()})
    path.write_text(listing.to_json())
    folder = Path("out/points") / f"command-{old.key}"
    (Path("out/points") / f"command-{record.key}").rename(folder)
    (folder / "1/record.json").write_text(record.model_copy(update={"key": old.key, "point": old}).model_dump_json())
    assert "t0k" in caraml("show", old.key).output, "records of before stay readable"
    said = caraml("retry", "--failed", "--trust").exception
    assert isinstance(said, InputError) and "no point of suite s has a key that was asked for" in str(said) and "s.toml" in str(said)
    assert read_listing(path).points == listing.points, "and nothing is changed"


def test_a_result_needs_no_value_and_a_new_value_is_a_new_point(monkeypatch: pytest.MonkeyPatch) -> None:
    suite('{ ONE = "@ONE@", OF_CALLER = "$CALLER" }')
    assert caraml("run", "s.toml").exit_code == 0
    monkeypatch.delenv("CALLER")
    assert caraml("run", "s.toml").exit_code == 0 and len(list(Path("out").glob("points/*/*"))) == 1
    assert caraml("plan", "s.toml").exit_code == 0
    suite('{ ONE = "@SWEPT@", OF_CALLER = "$CALLER" }')
    planned = caraml("plan", "s.toml")
    assert planned.exit_code == 2 and "no variable CALLER" in planned.output
    monkeypatch.setenv("CALLER", "")
    assert caraml("run", "s.toml").exit_code == 0 and len(list(Path("out").glob("points/*/*"))) == 2


@pytest.mark.parametrize("kind", [LIGHT, HEAVY], ids=["shell", "worker"])
def test_a_script_that_is_started_by_hand_says_what_it_needs(kind: str) -> None:
    suite('{ ONE = "@ONE@" }', kind)
    assert caraml("run", "s.toml").exit_code == 0
    record, _ = logs()[0]
    folder = Store(Path("out")).folder(record).absolute()
    for mine, good in (({}, False), ({"ONE": "by hand"}, True)):
        for name in ("started", "record.json", "worker.log", "failure.json"):
            (folder / name).unlink(missing_ok=True)
        done = subprocess.run(["bash", folder / "run.sh"], env={**os.environ, **mine}, capture_output=True, text=True, check=False)
        said = done.stderr + ((folder / "worker.log").read_text() if (folder / "worker.log").exists() else "")
        assert (done.returncode == 0) is good and ("its value is not kept" in said) is not good, said
        assert f"ONE {told('by hand')}" in said or not good


def test_the_key_of_the_digests_is_the_user_s_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "b"\nworkload = "command"\nparams = { argv = ["true"], env = { A = "x", B = "x" } }'
    )

    def env() -> dict[str, str]:
        return suite_of(parse_toml(text, "s.toml")).document.data["benchmark"][0]["params"]["env"]  # type: ignore[no-any-return]

    first = env()
    assert first["A"] != first["B"], "nobody sees that two variables have one value"
    assert env() == first, "a value keeps its digest"
    assert stat.S_IMODE((place / "config/caraml/digest-key").stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "another"))
    assert env()["A"] != first["A"], "and no other user can try values against it"


@pytest.mark.parametrize("env", ['["TOKEN=hunter2"]', '"TOKEN=hunter2"', '{ TOKEN = ["hunter2"] }', '{ TOKEN = [{ A = "hunter2" }] }'])
def test_a_value_in_the_wrong_place_is_told_without_it(env: str) -> None:
    head = 'name = "s"\ntitle = "-"\n[[benchmark]]\nname = "b"\nworkload = "command"\n'
    text = f'{head}params = {{ argv = ["true"], item = "x", env = {env} }}\n'
    with pytest.raises(InputError) as told:
        suite_of(parse_toml(text, "suite.toml"))
    assert "hunter2" not in str(told.value) and "env" in str(told.value)


def test_no_value_brings_another_variable_with_it(tmp_path: Path) -> None:
    """Whoever is asked for consent sees one harmless name."""
    with pytest.raises(InputError, match=r"env\.GREETING: found a NUL"):
        hand_over(tmp_path, {"program": {"GREETING": "x\0BASH_ENV=/tmp/payload"}})
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("name", ["CARAML_DB_PASS", "CARAML_PAT", "TORCH_PASSPHRASE", "NCCL_PWD", "UCX_APIKEY"])
def test_a_known_prefix_makes_no_secret_a_setting(name: str) -> None:
    assert not shown(name) and shown("OMP_WAIT_POLICY") and shown("NCCL_ALGO")


@pytest.mark.parametrize(("content", "mode"), [(b"", 0o600), (b"k" * 32, 0o666)], ids=["empty", "readable"])
def test_a_key_that_others_could_know_is_refused(content: bytes, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "caraml").mkdir()
    key = tmp_path / "caraml" / "digest-key"
    key.write_bytes(content)
    key.chmod(mode)
    with pytest.raises(EnvironmentUnfitError, match="only you can read"):
        digest("NAME", "value")


def test_a_suite_with_nothing_to_hide_is_kept_as_it_was_written() -> None:
    text = (
        '# c\nname = "s"\ntitle = "S"\n[[benchmark]]\nname="b"\nworkload="command"\nparams={argv=["true"],env={OMP_NUM_THREADS="4",A="$B"}}'
    )
    assert suite_of(parse_toml(text, "s.toml")).document.text == text


def test_a_single_brace_is_told_without_the_value() -> None:
    suite('{ ONE = "t0k-a{b" }')
    said = str(caraml("run", "s.toml").exception)
    assert "s.toml:" in said and "params.env.ONE" in said and "{{" in said and "t0k" not in said


@pytest.mark.parametrize(
    "extra",
    [
        ("--export=ALL,HF_TOKEN=t0k",),
        ("--export ALL,A=1,HF_TOKEN=t0k",),
        ("--env=HF_TOKEN=t0k",),
        ("--env", "HF_TOKEN=t0k"),
        ("-e", "HF_TOKEN=t0k"),
        ("-eHF_TOKEN=t0k",),
        ("--set-env=HF_TOKEN=t0k",),
        ("--setenv", "HF_TOKEN", "t0k"),
    ],
)
def test_options_that_everybody_sees_give_no_values(extra: tuple[str, ...]) -> None:
    expected = "HF_TOKEN" if "A=1" not in extra[0] else "the value of A"
    for make in (lambda: Scheduler(extra=extra), lambda: Scheduler(srun_extra=extra), lambda: Container(extra=extra)):
        with pytest.raises(ValueError, match=expected):
            make()
    Path("virtual.toml").write_text(filled(MACHINE) + f"[site.scheduler]\nextra = {list(extra)!r}\n")
    said = caraml("system", "validate", "virtual.toml")
    assert isinstance(said.exception, InputError) and "t0k" not in str(said.exception), str(said.exception)


def test_options_with_names_and_known_settings_are_taken() -> None:
    for extra in (
        ("--export=ALL,NCCL_DEBUG=INFO",),
        ("--export=NONE",),
        ("--env=HF_TOKEN",),
        ("--setenv", "OMP_NUM_THREADS", "4"),
        ("--exclude=a",),
    ):
        assert Scheduler(extra=extra).extra == Container(extra=extra).extra == extra


@pytest.mark.parametrize("scheme", ["https://", ""])
@pytest.mark.parametrize("words", [("run", "s.toml"), ("power", "--", "true"), ("doctor", "--json")])
def test_an_account_in_the_address_of_a_sensor_is_refused_and_stands_nowhere(
    words: tuple[str, ...], scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for curl; it would be in every record, and in what `caraml doctor` says for others to read."""
    suite("{}")
    address = f"redfish:{scheme}admin:t0k-en@192.0.2.1/redfish/v1/Chassis/1/Power"
    monkeypatch.setenv("CARAML_POWER", f"csv:/data/a@b.csv,{address}")
    done = caraml(*words)
    assert done.exit_code and "REDFISH_PASSWORD" in f"{done.exception}{done.output}" and "t0k" not in f"{done.exception}{done.output}"
    assert not any(b"t0k-en" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "CARAML_POWER" not in variables(os.environ), "in a job, which has the variables of who submitted it"
    monkeypatch.setenv("CARAML_POWER", "csv:/data//a@b.csv,redfish:https://192.0.2.1/redfish/v1/Chassis/1/Power")
    assert chosen_sources() == variables(os.environ)["CARAML_POWER"].split(",")
