"""The one interface behind which every vendor's sensors live, and the register of those that exist."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError, unknown_name
from caraml.base.plugins import Plugin, plugins
from caraml.power.model import Channel, Reading


class SourceUnavailable(EnvironmentUnfitError):  # noqa: N818 - a state of the machine, not a fault
    """A source cannot be read here. ``kind`` tells an absent sensor from one that is there but closed to this user."""

    def __init__(self, message: str, hint: str | None = None, kind: str = "absent") -> None:
        super().__init__(message, hint)
        self.message = message
        self.kind = kind
        """``absent``, ``unreadable`` (exists, no permission) or ``masked`` (hidden from this container)."""


class UnknownDeviceError(InputError):
    """Accelerators were asked for that do not exist."""

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
        """What was found; constant between ``open`` and ``close``."""

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
    """Function of the module that makes the source from ``(argument, devices, automatic)``: see ``create``."""
    accelerator: bool = False
    """Sees accelerators, of which some can be chosen. The others see what all processes of a node share."""
    argument: str | None = None
    """What comes after a colon in the name, where the source needs something."""


_OURS = "caraml.power.sources"
BUILT_IN: dict[str, SourceEntry] = {
    entry.name: entry
    for entry in (
        SourceEntry("nvml", f"{_OURS}.nvml", "NVIDIA GPUs (NVML)", accelerator=True),
        SourceEntry("amdsmi", f"{_OURS}.amdsmi", "AMD GPUs (AMD SMI)", accelerator=True),
        SourceEntry("amdgpu", f"{_OURS}.drm", "AMD GPUs (kernel driver)", factory="create_amd", accelerator=True),
        SourceEntry("intel", f"{_OURS}.drm", "Intel GPUs (kernel drivers xe, i915)", factory="create_intel", accelerator=True),
        SourceEntry("gaudi", f"{_OURS}.library", "Intel Gaudi (HLML)", factory="create_gaudi", accelerator=True),
        SourceEntry("graphcore", f"{_OURS}.library", "Graphcore IPU (gcipuinfo)", factory="create_graphcore", accelerator=True),
        SourceEntry("ascend", f"{_OURS}.library", "Huawei Ascend (npu-smi)", factory="create_ascend", accelerator=True),
        SourceEntry("rapl", f"{_OURS}.rapl", "processors and memory (RAPL)"),
        SourceEntry("grace", f"{_OURS}.grace", "NVIDIA Grace and Grace-Hopper rails"),
        SourceEntry("cray", f"{_OURS}.cray", "HPE Cray EX node (pm_counters)"),
        SourceEntry("ipmi", f"{_OURS}.board", "node (IPMI DCMI)", auto=False, factory="create_ipmi"),
        SourceEntry("redfish", f"{_OURS}.board", "node (Redfish)", auto=False, factory="create_redfish", argument="address"),
        SourceEntry("slurm", f"{_OURS}.slurm", "nodes of the job step (Slurm accounting)", auto=False),
        SourceEntry("csv", f"{_OURS}.csvfile", "a meter that writes a CSV file", auto=False, argument="path"),
        SourceEntry("fake", f"{_OURS}.fake", "a made-up signal, for demonstrations", auto=False, accelerator=True),
    )
}


def entries() -> dict[str, SourceEntry]:
    """The register by name, in the order in which sources are tried: CARAML's own, then those of plug-ins."""
    others = [plugin for name, plugin in source_plugins().items() if name not in BUILT_IN]
    return BUILT_IN | {plugin.name: _entry(plugin) for plugin in others}


def source_plugins() -> dict[str, Plugin]:
    """Sources that other packages bring, by name; also those that cannot be used."""
    return plugins("caraml.power_sources", BUILT_IN)


def _entry(plugin: Plugin) -> SourceEntry:
    """The line of a plug-in; one that cannot be loaded is tried as well, and says why when it is opened."""
    try:
        return replace(plugin.load(SourceEntry), name=plugin.name)
    except CaramlError:
        return SourceEntry(plugin.name, "", f"plug-in {plugin.package}")


def source_names(auto_only: bool = False) -> list[str]:
    """Names that ``create`` accepts, in the order in which they are tried."""
    return [entry.name for entry in entries().values() if entry.auto or not auto_only]


def create(name: str, devices: Sequence[str] | None = None, automatic: bool = False) -> Source:
    """The source of this name, not yet opened.

    ``name`` may carry an argument after a colon where the source needs one (``csv:/path/to/file.csv``).
    ``devices`` restricts sources that see accelerators to these ids; ``["all"]`` ignores the environment's mask.
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
    except CaramlError:
        raise  # what the user wrote after the colon
    except Exception as error:  # noqa: BLE001 -- a foreign module may raise anything; the other sources are read all the same
        return _Unusable(base, f"plug-in {plugin.package}: {type(error).__name__}: {error}", None)
    if source.name != base:
        return _Unusable(base, f"plug-in {plugin.package}: the source's name is {source.name!r}, expected {base!r}", None)
    return source


def _make(entry: SourceEntry, argument: str, devices: Sequence[str] | None, automatic: bool) -> Source:
    factory: Callable[[str, Sequence[str] | None, bool], Source] = getattr(importlib.import_module(entry.module), entry.factory)
    return factory(argument, devices, automatic)


class _Unusable:
    """Stands for a plug-in that does not work, so that its reason is told where reasons are told."""

    min_interval_s = 0.0

    def __init__(self, name: str, reason: str, hint: str | None) -> None:
        self.name, self._reason, self._hint = name, reason, hint or "repair or uninstall the plug-in"

    def open(self) -> None:
        raise SourceUnavailable(self._reason, self._hint)

    def channels(self) -> list[Channel]:
        return []

    def read(self) -> list[Reading]:
        return []

    def close(self) -> None:
        pass


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
