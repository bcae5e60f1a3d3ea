"""The one interface behind which every vendor's sensors live, the register of those that exist, and what several of them share."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError, unknown_name
from caraml.base.plugins import Plugin, plugins
from caraml.power.model import SOME, Channel, Reading
from caraml.system.files import UNTOLD, Masks, let_through, named
from caraml.system.variables import has_account


class SourceUnavailable(EnvironmentUnfitError):  # noqa: N818 - a state of the machine, not a fault
    """A source cannot be read here. ``kind`` tells an absent sensor from one that is there but closed to this user."""

    def __init__(self, message: str, hint: str | None = None, kind: str = "absent") -> None:
        super().__init__(message, hint)
        self.kind = kind
        """``absent``, ``unreadable`` (no permission), ``masked`` (hidden from this container) or ``unused`` (by what is measured)."""


class UnknownDeviceError(InputError):
    def __init__(self, words: Sequence[str], present: Sequence[str]) -> None:
        super().__init__(f"no accelerator {', '.join(map(repr, words))} here; present: {', '.join(present) or 'none'}")
        self.words, self.present = list(words), list(present)


@runtime_checkable
class Source(Protocol):
    """A family of sensors that is opened, listed, read and closed together, always from one thread."""

    name: str
    min_interval_s: float
    """Reading more often than this costs more than it tells [s]; 0 for cheap sensors."""

    def open(self) -> None:
        """Find the sensors. Raises ``SourceUnavailable`` with the reason and the fix."""

    def channels(self) -> list[Channel]:
        """What was found. While the source is open it may grow, before the first reading of what is new; nothing leaves it."""

    def read(self) -> list[Reading]:
        """Ask every sensor once. A sensor that fails gives a reading without a value; it does not raise."""

    def close(self) -> None:
        """Release the sensors. Safe after a failed ``open``."""


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One line of the register. A plug-in's entry point in the group ``caraml.power_sources`` names one."""

    name: str
    module: str
    """What to import; a plug-in gives ``__name__``."""
    title: str
    """What it sees, in a few words."""
    auto: bool = True
    """Opened by ``sources="auto"``: needs no configuration and is cheap to read."""
    factory: str = "create"
    """Function or class of the module that makes the source from ``(argument, devices, automatic)``: see ``create``."""
    accelerator: bool = False
    """Sees accelerators, of which some can be chosen. The others see what all processes of a node share."""
    argument: str | None = None
    """What comes after a colon in the name, where the source needs something."""


POWER_SOURCES = "CARAML_POWER"
"""Environment variable: names of sources, separated by commas, that are read instead of all that answer."""
_OURS = "caraml.power.sources"
BUILT_IN: dict[str, SourceEntry] = {
    entry.name: entry
    for entry in (
        SourceEntry("nvml", f"{_OURS}.library", "NVIDIA GPUs (NVML)", factory="NvmlSource", accelerator=True),
        SourceEntry("amdsmi", f"{_OURS}.library", "AMD GPUs (AMD SMI)", factory="AmdSmiSource", accelerator=True),
        SourceEntry("amdgpu", f"{_OURS}.files", "AMD GPUs (kernel driver)", factory="AmdGpuSource", accelerator=True),
        SourceEntry("intel", f"{_OURS}.files", "Intel GPUs (kernel drivers xe, i915)", factory="IntelSource", accelerator=True),
        SourceEntry("gaudi", f"{_OURS}.library", "Intel Gaudi (HLML)", factory="GaudiSource", accelerator=True),
        SourceEntry("graphcore", f"{_OURS}.library", "Graphcore IPU (gcipuinfo)", factory="GraphcoreSource", accelerator=True),
        SourceEntry("ascend", f"{_OURS}.library", "Huawei Ascend (npu-smi)", factory="AscendSource", accelerator=True),
        SourceEntry("rapl", f"{_OURS}.rapl", "processors and memory (RAPL)", factory="RaplSource"),
        SourceEntry("grace", f"{_OURS}.files", "NVIDIA Grace and Grace-Hopper rails", factory="GraceSource"),
        SourceEntry("cray", f"{_OURS}.files", "HPE Cray EX node (pm_counters)", factory="CraySource"),
        SourceEntry("ipmi", f"{_OURS}.board", "node (IPMI DCMI)", auto=False, factory="IpmiSource"),
        SourceEntry("redfish", f"{_OURS}.board", "node (Redfish)", auto=False, factory="RedfishSource", argument="address"),
        SourceEntry("slurm", f"{_OURS}.board", "nodes of the job step (Slurm accounting)", auto=False, factory="SlurmSource"),
        SourceEntry("csv", f"{_OURS}.csvfile", "a meter that writes a CSV file", auto=False, factory="CsvSource", argument="path"),
        SourceEntry("fake", "caraml.power.signals", "a made-up signal, for demonstrations", auto=False, accelerator=True),
    )
}


def entries() -> dict[str, SourceEntry]:
    """The register by name, in the order in which sources are tried: CARAML's own, then those of plug-ins."""
    found = dict(BUILT_IN)
    for name, plugin in source_plugins().items():
        try:
            found.setdefault(name, replace(plugin.load(SourceEntry), name=name))
        except CaramlError:  # it is tried as well, and says why when it is opened
            found.setdefault(name, SourceEntry(name, "", f"plug-in {plugin.package}"))
    return found


def source_plugins() -> dict[str, Plugin]:
    """Sources that other packages bring, by name; also those that cannot be used."""
    return plugins("caraml.power_sources", BUILT_IN)


def chosen_sources() -> list[str]:
    """Names that ``CARAML_POWER`` holds; empty where it is not set."""
    return names_in(os.environ.get(POWER_SOURCES, ""))


def names_in(text: str) -> list[str]:
    """Names of sources with commas between. Raises ``InputError`` for an account in an address, which stands in every record."""
    if has_account(text):
        told = "a power source: found an account in its address, which would stand in every record"
        raise InputError(told, "leave NAME:PASSWORD@ out of it, and export REDFISH_USER=NAME REDFISH_PASSWORD=PASSWORD")
    return [word.strip() for word in text.split(",") if word.strip()]


def check_methods(methods: Sequence[str]) -> None:
    """Raise an error for a source that does not exist, naming those that do."""
    known = entries() if methods else {}
    for method in methods:
        if method.partition(":")[0] not in known:
            error = unknown_name("power source", method.partition(":")[0], known)
            variable = f"{POWER_SOURCES}: " if method in chosen_sources() else ""
            raise InputError(f"{variable}{error.args[0]}", error.hint or "`caraml power sources` lists what can be read here")


def source_names(auto_only: bool = False) -> list[str]:
    """Names that ``create`` accepts, in the order in which they are tried."""
    return [entry.name for entry in entries().values() if entry.auto or not auto_only]


def create(name: str, devices: Sequence[str] | None = None, automatic: bool = False) -> Source:
    """The source of this name, not yet opened.

    ``name`` may carry an argument after a colon where the source needs one (``csv:/path/to/file.csv``).
    ``devices`` restricts sources that see accelerators to these ids; ``["all"]`` ignores the environment's mask. ``[]``: what is measured
    uses none; ``["some"]``: it uses some of several, and nobody tells which.
    With ``automatic`` the source first looks for its driver's files, so that a library is not loaded in vain.
    A plug-in that does not work gives a source that fails to open, with the reason.
    """
    base, _, argument = name.partition(":")
    if base in BUILT_IN:
        return _make(BUILT_IN[base], argument, devices, automatic)
    if base not in source_plugins():
        raise unknown_name("power source", base, entries())
    plugin = source_plugins()[base]
    try:
        entry = plugin.load(SourceEntry)
    except CaramlError as error:
        return _Unusable(base, error.args[0], error.hint)
    try:
        source = _make(entry, argument, devices, automatic)
        fault = _fault(source, base)
    except CaramlError:
        raise  # what the user wrote after the colon
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- a foreign module may raise anything; the others are read
        fault = f"{type(error).__name__}: {error}"
    return _Unusable(base, f"plug-in {plugin.package}: {fault}", None) if fault else source


def _fault(source: Source, name: str) -> str | None:
    """What of a plug-in's source is not as it has to be, in words."""
    lacks = [member for member in ("open", "channels", "read", "close") if not callable(getattr(source, member, None))]
    if lacks:
        return f"found {type(source).__name__} without {', '.join(lacks)}; expected a source with open, channels, read and close"
    if source.name != name:
        return f"the source's name is {source.name!r}, expected {name!r}"
    if not (isinstance(source.min_interval_s, Real) and 0 <= source.min_interval_s < math.inf):
        return f"min_interval_s: found {source.min_interval_s!r}, expected seconds, 0 or more"
    return None


def create_all(sources: Sequence[str | Source], devices: Sequence[str] | None = None, automatic: bool = False) -> list[Source]:
    """As ``create``, for names and sources that are there already. Raises ``InputError`` where two names are of one meter."""
    made: list[Source] = []
    names: dict[str, str] = {}
    for one in sources:
        made.append(create(one, devices, automatic) if isinstance(one, str) else one)
        if isinstance(one, str):
            identity = getattr(made[-1], "identity", one)
            if identity in names:
                other = f"{names[identity]} and {one} are one meter" if names[identity] != one else f"{one} is named twice"
                raise InputError(f"power sources: {other}", "name each once: its energy would be added to itself")
            names[identity] = one
    return made


def _make(entry: SourceEntry, argument: str, devices: Sequence[str] | None, automatic: bool) -> Source:
    factory: Callable[[str, Sequence[str] | None, bool], Source] = getattr(importlib.import_module(entry.module), entry.factory)
    return factory(argument, devices, automatic)


# -- what several sources share --------------------------------------------------------------------------------------------------------


class SensorError(Exception):
    """A sensor, or the program that reads it, answered without a number."""


class SensorGroup:
    """Base of sources: ``open`` lists the channels, and ``answers`` tells what all of them show, at once."""

    name = ""
    min_interval_s = 0.0
    failures: tuple[type[Exception], ...] = (SensorError, OSError, ValueError, subprocess.SubprocessError)
    """What is raised where sensors do not answer."""

    def __init__(self, argument: str | Path = "", devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        self.argument, self.devices, self.automatic = str(argument), devices, automatic
        self.listed: list[Channel] = []
        self.left_out: list[str] = []
        """Why devices are not measured that are there beside those that are."""

    def channels(self) -> list[Channel]:
        return self.listed

    @property
    def uses_no_accelerator(self) -> bool:
        """Whether what is measured uses none: the power of idle ones is not its own, though the sensors of its processors count."""
        return self.devices is not None and not self.devices

    def answers(self) -> Mapping[str, float | str]:
        """By channel its value [J, W or VA], or in words why there is none."""
        return {}

    def read(self) -> list[Reading]:
        before = time.monotonic()
        try:
            told = self.answers()
        except self.failures as error:
            told = dict.fromkeys((channel.id for channel in self.listed), f"{type(error).__name__}: {error}")
        after, readings = time.monotonic(), []
        for name in (channel.id for channel in self.listed):
            value = told.get(name, "the answer has nothing of it any more")
            readings.append(Reading(name, before, after, None, value) if isinstance(value, str) else Reading(name, before, after, value))
        return readings

    def close(self) -> None:
        """Nothing to release."""

    def expect_driver(self, vendor: str, *files: Path) -> None:
        """Where nobody asked for this source, do not load a library in vain. Raises ``SourceUnavailable`` if none of the files exists."""
        if self.automatic and not any(file.exists() for file in files):
            raise SourceUnavailable(f"no {vendor} driver: there is no {' and no '.join(map(str, files))}")


class AskedSensors(SensorGroup):
    """Base of sources of which each sensor is asked by itself."""

    def __init__(self, argument: str | Path = "", devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        super().__init__(argument, devices, automatic)
        self.questions: dict[str, Callable[[], float]] = {}
        """By channel what gives its value [J or W]."""

    def add(self, channel: Channel, question: Callable[[], float]) -> None:
        self.listed.append(channel)
        self.questions[channel.id] = question

    def try_to_add(self, channel: Channel, question: Callable[[], float]) -> bool:
        """List a channel if it answers; whether it did."""
        if self.or_none(question) is None:
            return False
        self.add(channel, question)
        return True

    def or_none(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self.failures:
            return None

    def choose(
        self, present: Sequence[str], aliases: Mapping[str, Sequence[str]], masks: Masks = (), family: str = "", closed: Sequence[str] = ()
    ) -> list[str]:
        """As ``select``; why devices are ``closed`` is told where no other is present, or one was asked for that is not."""
        try:
            chosen = select(present, aliases, self.devices, masks, family)
        except UnknownDeviceError as error:
            if not closed:
                raise
            raise SourceUnavailable(f"{error.args[0]}; {'; '.join(closed)}", kind="unreadable") from error
        if closed and not present:
            raise SourceUnavailable("; ".join(closed), kind="unreadable")
        return chosen

    def read(self) -> list[Reading]:
        return [timed(name, question, self.failures) for name, question in self.questions.items()]


class _Unusable(SensorGroup):
    """Stands for a plug-in that does not work, so that its reason is told where reasons are told."""

    def __init__(self, name: str, reason: str, hint: str | None) -> None:
        super().__init__()
        self.name, self._reason, self._hint = name, reason, hint or "repair or uninstall the plug-in"

    def open(self) -> None:
        raise SourceUnavailable(self._reason, self._hint)


def with_apparent(channel: Channel) -> Channel:
    """The channel of apparent power [VA] beside a channel of power, from the same sensor."""
    return replace(channel, id=f"{channel.id}:va", kind="apparent_va", flags=())


def timed(channel: str, ask: Callable[[], float], failures: tuple[type[Exception], ...]) -> Reading:
    """One reading with its times. An exception of a type in ``failures`` becomes a reading without a value."""
    before = time.monotonic()
    try:
        value = ask()
    except failures as error:
        return Reading(channel, before, time.monotonic(), None, f"{type(error).__name__}: {error}")
    return Reading(channel, before, time.monotonic(), value)


def how_often(measured: float | None, declared: float) -> str:
    """How often a sensor has a new value [s], by what was seen, else by what its source says of it."""
    if measured is not None:
        return f"new value every {1000 * measured:.0f} ms"
    return f"taken to have a new value every {1000 * declared:.0f} ms" if declared else "update period not seen"


def output_of(command: Sequence[str], seconds: float) -> str:
    """What a program prints that is given so long. Raises ``SensorError`` where it fails, else what ``subprocess.run`` does."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 -- vendors' programs, with arguments of ours; no shell
    if done.returncode != 0:
        raise SensorError((done.stderr or done.stdout).strip() or f"{command[0]} ended with code {done.returncode}")
    return done.stdout


def select(
    present: Sequence[str], aliases: Mapping[str, Sequence[str]], wanted: Sequence[str] | None, masks: Masks = (), family: str = ""
) -> list[str]:
    """Ids out of ``present`` (in the library's order) that are ``wanted`` (see ``create``), or that the environment leaves visible.

    ``aliases`` are other spellings of each id besides its number: PCI address, ids of slices. Where nothing is asked for, the variables
    ``masks`` narrow the devices; further ones of a ``family`` hide them in a way that sensors cannot follow (see ``UNTOLD``).

    Raises:
        SourceUnavailable: none was asked for, or nobody can tell which are used or hidden.
        UnknownDeviceError: one was asked for that does not exist.
    """
    if wanted is not None and not wanted:
        raise SourceUnavailable("none was asked for: what is measured uses none", kind="unused")
    if wanted is not None and list(wanted) == [SOME]:
        raise SourceUnavailable("some of several devices are used, and torch does not tell which", kind="unused")
    if wanted is not None and list(wanted) == ["all"]:
        return list(present)
    names = [(device, *aliases.get(device, ())) for device in present]
    if wanted is None:
        hiding = [name for name in UNTOLD.get(family, ()) if re.search(r"(^|[:,.])\s*\d", os.environ.get(name, ""))]
        if hiding and len(present) > 1:
            raise SourceUnavailable(f"{hiding[0]} hides some of {len(present)} devices, by numbers that their sensors do not have")
        return [present[place] for place in let_through(names, masks)]
    numbered = {place: (str(place), *some) for place, some in enumerate(names)}
    places = {word: named(word, numbered) for word in wanted}
    unknown = [word for word, place in places.items() if place is None]
    if unknown:
        raise UnknownDeviceError(unknown, [f"{i}: {device}" for i, device in enumerate(present)])
    return list(dict.fromkeys(present[place] for place in places.values() if place is not None))
