"""A campaign as the command line asks for it, its parts put together. The verbs import it when they run: it needs almost everything."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from caraml.base.errors import InputError, nearest
from caraml.base.files import open_to_append
from caraml.base.format import count, printable
from caraml.base.toml import FaultsError, TomlDocument, parse_toml
from caraml.campaign import Campaign, Options, Watcher, exit_code
from caraml.campaign.machine import DeviceLock, machine_of, refuse_login_node
from caraml.campaign.preview import programs
from caraml.campaign.runner import run_campaign
from caraml.cli import RESULTS, console, say
from caraml.launch import Elsewhere
from caraml.launch.batch import SlurmOptions
from caraml.launch.launchers import LocalLauncher, default_name, launcher, plug_in
from caraml.power.source import check_methods, chosen_sources
from caraml.report.progress import LiveTable, LogLines
from caraml.results.claim import BUILT_IN
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.choice import called, with_settings, words_of
from caraml.suite.expand import ParamsOf, expand
from caraml.suite.load import catalog_suites, load_suite, suite_of
from caraml.suite.placement import Machine
from caraml.system.affinity import switched_off
from caraml.system.catalogue import LOCAL, list_systems, load_system, names_file
from caraml.system.host import memory_asked
from caraml.system.model import System
from caraml.system.variables import PATIENCE, PROBE, seconds_asked
from caraml.workloads import params_of

if TYPE_CHECKING:
    from caraml.verify.proof import Place

RUNNER_LOG = "runner.log"
_DETACHED = "import json, sys; from caraml.__main__ import main; sys.argv[:] = ['caraml', *json.load(sys.stdin)]; main()"
"""What a process that was left alone runs; every user sees command lines, and `--set` may have given it a secret."""
_MEANT = re.compile(r"\(did you mean '(\w+)'\?\)$")
_MANY = 500
"""Above so many points a run ends with counts: a table and a page of them are made when somebody wants to look."""
_SYNTHETIC, _SIZE, _ALIKE = "synthetic", re.compile(r"\d+[MB]", re.IGNORECASE), 0.75
"""Tags: the one for made input, those for sizes of models, and how alike one is to a name that was meant."""


@dataclass(frozen=True)
class Asked:
    """What the options of a verb say."""

    suite: str
    out: Path
    system: str = "local"
    launcher: str | None = None
    again: bool = False
    options: Options = field(default_factory=Options)
    """What the campaign is told as it is; file, launcher and folders elsewhere are found out here."""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    text: str | None = None
    """The suite itself, where its file is not to be read again."""
    trust: bool = False
    """Run what a stranger's suite says without asking."""
    bell: bool = False
    """Ring the terminal's bell at the end."""
    remote: Path | None = None
    """The folder of the results where printed scripts will be started."""

    def machine(self) -> System:
        """The system. Raises ``InputError`` for an unknown one."""
        return load_system(self.system, self.beside)

    @property
    def beside(self) -> Path | None:
        """The suite's file, beside which systems may be."""
        return Path(self.suite) if self.suite.endswith(".toml") else None

    def launcher_name(self, system: System) -> str:
        """The launcher asked for, or the machine's usual one. Raises as :func:`caraml.launch.launchers.plug_in` for an unknown one."""
        name = self.launcher or default_name(system)
        if name not in BUILT_IN:
            plug_in(name)
        return name

    def campaign(self, watcher: Watcher, note: Callable[[str], None]) -> Campaign:
        """The campaign, ready to plan or run."""
        system = self.machine()
        name = self.launcher_name(system)
        check_variables(here=name == "local")
        try:
            file = load_suite(self.suite) if self.text is None else suite_of(parse_toml(self.text, self.suite))
            file = with_settings(file, self.options.settings, params_of, self.options.chosen(file))
        except FaultsError as error:
            refuse_with_all_faults(error, machine_of(system, name), params_of, self.options)
        if self.remote is not None and (name != "print" or not self.remote.is_absolute()):
            raise InputError(
                f"--remote {self.remote}: it is for --launcher print, and a whole path", "--launcher print --remote /scratch/me/results"
            )
        if system.device_class == "cpu" and "devices" in system.missing:
            say(f"{system.missing['devices']}, so its CPUs are measured; see caraml doctor, or export CARAML_DEVICE=cpu", err=True)
        of_jobs = {"--pack": self.slurm.pack > 1, "--throttle": self.slurm.throttle is not None}
        if name != "slurm" and (name != "print" or system.site.scheduler is None):
            for option in (option for option, given in of_jobs.items() if given):
                say(f"{option}: no effect, since launcher {name} makes no jobs of Slurm on {system.name}", err=True)
        elsewhere = Elsewhere(self.out, self.remote) if self.remote is not None else None
        what = f"suite {file.suite.name} into {self.out.absolute()}"
        made = launcher(name, system, self.out, replace(self.slurm, name=f"caraml-{file.suite.name}"), say, elsewhere=elsewhere)
        return Campaign(
            file,
            system,
            Store(self.out),
            made,
            watcher,
            self.again,
            replace(
                self.options,
                file=str(Path(self.suite if self.text is not None else file.document.name.partition(" with --set")[0]).resolve()),
                system_file=str(Path(self.system).resolve()) if names_file(self.system) else "",
                settings=file.settings,
                launcher=name,
                detach=name == "print" or (self.options.detach and made.slots is None),
                elsewhere=elsewhere,
            ),
            DeviceLock(system.identity, what) if made.slots is not None else None,
            note,
        )

    def run(self, report: bool = True) -> int:
        """Run, show what came out if ``report`` says so, and return the exit code."""
        screen, prints = console(), self.launcher_name(self.machine()) == "print"
        # What is printed can be kept as a script: all other words go to standard error.
        watcher = LogLines(sys.stderr) if prints else LiveTable(screen) if screen.is_terminal else LogLines(sys.stdout)
        campaign = self.campaign(watcher, watcher.note)
        if self.options.detach and not campaign.options.detach:
            return self._leave(campaign)
        if self.options.imported:
            self._consent(campaign)
        try:
            with watcher:
                records = run_campaign(campaign)
        finally:
            if self.bell:
                sys.stderr.write("\a")  # most terminals can turn it into a notification of the desktop
                sys.stderr.flush()
        if prints:
            moved = f"copy {self.out} to {self.remote} there first; " if self.remote is not None else ""
            say(f"nothing was started: {moved}{self._status(campaign)} says which points have a result", err=True)
            return 0
        if campaign.options.detach:
            failed = [record for record in records if record.status in ("failed", "lost")]  # just now: none of these is taken as a result
            if failed:
                say(f"{count(len(failed), 'point')} did not get into the queue, for the reasons above")
            if len(records) == len(campaign.chosen(campaign.plan())):
                say(f"no job waits or runs; {self._status(campaign)} says what came of the points")
            else:
                jobs = "jobs that did" if failed else "the jobs"
                say(f"{jobs} are in other hands now; {self._status(campaign)}, or the same command, finds them")
            return exit_code(failed)
        if report:
            show_results(campaign.store, records, campaign.suite.suite.name, campaign.suite.suite.title)
        return exit_code(records)

    def _consent(self, campaign: Campaign) -> None:
        """Say what would run of a suite that somebody else wrote, and ask whether it may. Raises ``InputError`` where it may not."""
        origin = f"suite {campaign.suite.suite.name} comes from {printable(self.options.imported)}"
        lines = "".join(f"  {printable(line)}\n" for line in programs(campaign, self.options.only or ()))
        say(f"{origin}. This would run as you:\n{lines}", nl=False)
        if self.trust:
            return
        if not attended():
            raise InputError(
                f"{origin}: nothing of it runs unseen",
                "read what it would run, then add --trust; a suite of your own is sealed by caraml run",
            )
        if not typer.confirm("Run it?"):
            raise InputError(f"{origin}: nothing of it was run")

    def _leave(self, campaign: Campaign) -> int:
        """Start the same command as a process that outlives this one."""
        campaign.plan()  # faults are told here, where somebody reads them
        name = campaign.suite.suite.name
        if campaign.options.launcher == "local" and not self.options.here:
            refuse_login_node(campaign.command)
        Store(self.out).make()
        log = self.out / f"{name}.{RUNNER_LOG}"
        arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
        with open_to_append(log, mode=0o600) as output:
            child = subprocess.Popen(  # noqa: S603 -- this program, which is told what its user said where nobody else can see it
                [sys.executable, "-P", "-c", _DETACHED],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert child.stdin is not None
        with child.stdin:
            child.stdin.write(json.dumps(arguments).encode())
        say(f"process {child.pid} runs suite {name}; its words go to {log}\n{self._status(campaign)} says how far it is")
        return 0

    def _status(self, campaign: Campaign) -> str:
        """The command that says where the campaign stands."""
        elsewhere = ["--out", str(self.out)] if self.out != RESULTS else []
        return shlex.join(["caraml", "status", campaign.suite.suite.name, *elsewhere])


def by_tags(asked: Asked, tags: Sequence[str] | None, more: Sequence[str] | None) -> Asked:
    """With what tags say, as CARAML's scripts for JUBE have them: a system, benchmarks, `synthetic` input. Others only name the campaign.

    ``more`` are those that follow the suite's name without an option. Raises ``InputError`` for one that is nearly a name, or chooses
    nothing here.
    """
    words = [*(tags or ()), *(more or ())]
    if more and not tags:
        given = " ".join(more)
        raise InputError(f"found {given!r} after the suite, expected options", f"caraml run {asked.suite} --tag {given}")
    if not words:
        return asked
    suites = catalog_suites()
    if asked.suite not in suites and (meant_first := next((word for word in more or () if word in suites), None)):
        order = " ".join(word for word in (*(tags or ()), asked.suite, *(more or ())) if word != meant_first)
        raise InputError(f"found {asked.suite!r} where the suite stands, before its tags", f"caraml run {meant_first} --tag {order}")
    file = load_suite(asked.suite)
    systems = {name.casefold(): (name, one.name) for one in list_systems(asked.beside) for name in (one.name, *one.aliases)}
    known = {word.casefold(): word for word in [*words_of(file.names), _SYNTHETIC]} | {key: name for key, (name, _) in systems.items()}
    chosen: dict[str, list[str]] = {"--system": [], "--only": [], "--set": []}
    for word in words:
        if word.casefold() in systems:
            chosen["--system"].append(word)
        elif word == _SYNTHETIC:
            continue  # of what the other words choose
        elif called(word, file.names):
            chosen["--only"].append(word)
        else:
            _see_tag(word, words, asked.suite, known, apart=not more)
    only = [*asked.options.part.names, *chosen["--only"]]
    meant_here = {name for word in only or [""] for name in (called(word, file.names) if word else file.names)}
    if _SYNTHETIC in words and any(one.workload != "command" and one.name in meant_here for one in file.suite.benchmark):
        chosen["--set"].append(f"params.data={_SYNTHETIC}")
    both = [*([asked.system] if asked.system != LOCAL else []), *chosen["--system"]]
    system = {systems.get(one.casefold(), (one, one))[1]: one for one in both}  # two names of one machine are one
    if len(system) > 1:
        raise InputError(f"a campaign runs on one system: found {' and '.join(system.values())}", "one of them, as --tag or --system")
    if meant := [word for option, values in chosen.items() for value in values for word in (option, value)]:
        say(f"--tag {' '.join(words)}: {shlex.join(meant)}", err=True)
    options, part = asked.options, replace(asked.options.part, names=only)
    options = replace(options, part=part, settings=(*options.settings, *chosen["--set"]), tags=tuple(words))
    return replace(asked, system=next(iter(system.values()), asked.system), options=options)


def _see_tag(word: str, words: list[str], suite: str, known: dict[str, str], *, apart: bool) -> None:
    """Raise ``InputError`` for a tag that chooses nothing and is no name of a campaign; ``known``: what chooses, by it in lower case."""
    parts = re.split(r"[\s,+|]+", word)
    if word == "container":
        hint = "caraml container build containers/cuda.def caraml-cuda.sif (AMD: rocm.def), then its name in the system's file"
        raise InputError(f"--tag {word}: images are not made by `run`", hint)
    if _SIZE.fullmatch(word) and (others := [name for name in catalog_suites() if called(word, load_suite(name).names)]):
        nearby = max(others, key=lambda name: name.startswith(suite.partition("-")[0]))
        hint = f"caraml run {nearby} --tag {' '.join(words)}"
        raise InputError(f"--tag {word}: no benchmark of suite {suite!r} has this size", hint)
    if len(parts) > 1 and all(part.casefold() in known or _SIZE.fullmatch(part) for part in parts):
        raise InputError(f"--tag {word}: found several tags in one word", f"--tag {' '.join(parts)}")
    if (guess := nearest(word.casefold(), known, *[_ALIKE] * apart)) is not None or not apart:  # alone it may name a campaign
        hint = f"did you mean {known[guess]!r}?" if guess else "caraml list systems;"
        if nearest(word.casefold(), known, _ALIKE) is None:
            hint += f" to name the campaign only: --tag {word}, with a --tag of its own"
        else:
            hint += " a word to find the campaign by must be less like a name"
        raise InputError(f"--tag {word}: no system, and no benchmark of suite {suite!r}, is called so", hint)


def check_variables(here: bool) -> None:
    """Raise ``InputError`` for an environment variable of CARAML's that would fail every point; jobs have those of who submits them.
    ``here``: points run on this machine, which has all sources of power."""
    if here:
        check_methods(chosen_sources())
    seconds_asked(PROBE, 0.0)
    seconds_asked(PATIENCE, 0.0)
    memory_asked()
    switched_off()


def attended() -> bool:
    """Whether somebody sits there who can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def place_of(system: str, launcher_name: str | None, nodes: int) -> Place:
    """Where `caraml verify` proves the ruler. Raises ``InputError`` for what cannot be reached."""
    from caraml.verify.proof import Place  # needs torch, which the other verbs do without

    asked = Asked("verify", Path(), system, launcher_name)
    machine = asked.machine()
    name = asked.launcher_name(machine)
    if name not in ("local", "print"):
        if machine.nodes is not None and nodes > machine.nodes:
            raise InputError(f"--nodes: found {nodes}, expected at most {machine.nodes}: so many nodes has {machine.name}")
        options = SlurmOptions(pack=_MANY, name="caraml-verify")
        return Place(machine, lambda root: launcher(name, machine, root, options, say), nodes, name)
    if name == "print":
        raise InputError(f"launcher {name!r} cannot prove anything: it runs nothing", "caraml verify --launcher slurm --system NAME")
    return Place(machine, lambda root: LocalLauncher(), nodes)


def show_results(store: Store, records: list[Record], name: str, title: str) -> None:
    """The end of a run: its table, and the page of the suite with all variants; of very many points only their number."""
    if not records:
        say(f"suite {name} has no point on this system: its `where` leaves out every combination; caraml plan counts them")
        return
    if len(records) > _MANY:
        failed = sum(record.status not in ("ok", "skipped") for record in records)
        say(f"{len(records):,} points, {failed:,} without a result; caraml results {name}, caraml report {name}")
        return
    from caraml.report.page import write_report
    from caraml.report.terminal import results_table

    console().print(results_table(records))
    say(f"report: {write_report(store, store.records(name), store.root / f'{name}.html', title)}")


def refuse_with_all_faults(error: FaultsError, machine: Machine, params_of: ParamsOf, options: Options) -> NoReturn:
    """Raise an error of a suite's form with the faults that its values have besides, in the order of their lines."""
    if error.rest is None:
        raise error
    every, known, new, last = dict[str, None](), list[str](), list(error.faults), error
    while new and last.rest is not None:
        every |= dict.fromkeys(_below_params(fault, last.rest, params_of) for fault in new)
        known += [_place(fault) for fault in new]
        known += [f"{_place(fault).rpartition('.')[0]}.{word}".strip(".") for fault in new for word in _MEANT.findall(fault)]
        try:
            rest = suite_of(last.rest)
            expand(rest, machine, params_of, chosen=options.chosen(rest) if last.rest.settings else None)
            new = []
        except FaultsError as more:
            last, new = more, [fault for fault in more.faults if not _lacks(fault, known)]
    every |= dict.fromkeys(new)
    error.rest.refuse(sorted(every, key=lambda fault: int((re.search(r":(\d+): ", fault) or "00")[1])))


def _lacks(fault: str, known: Sequence[str]) -> bool:
    """Whether a fault is of a place whose fault is ``known``, or misses there what was wrong and is left out."""
    place = _place(fault)
    return place in known or (": found nothing" in fault and any(one.startswith(place) for one in known))


def _below_params(fault: str, document: TomlDocument, params_of: ParamsOf) -> str:
    """A fault of a key that no benchmark has; where it is a parameter of the workload, with its place."""
    key = re.search(r"(: benchmark\[(\d+)\]\.(\w+): found .+, expected )one of the keys params, ", fault, re.DOTALL)
    if key is None:
        return fault
    with suppress(InputError, LookupError, TypeError):
        if key[3] in params_of(document.data["benchmark"][int(key[2])]["workload"]).model_fields:
            return f"{fault[: key.start()]}{key[1]}it below params: params = {{ {key[3]} = ... }}"
    return fault


def _place(fault: str) -> str:
    """Of which key a fault is: ``benchmark[0].params``."""
    return fault.partition(": found ")[0].rpartition(": ")[2]
