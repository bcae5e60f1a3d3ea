"""The one interface behind which every vendor's sensors live, and the register of those that exist."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from caraml.errors import EnvironmentUnfitError, InputError, unknown_name
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
class Entry:
    """One line of the register."""

    name: str
    module: str
    title: str
    auto: bool = True
    """Opened by ``sources="auto"``: needs no configuration and is cheap to read."""
    factory: str = "create"
    accelerator: bool = False
    """Sees accelerators, of which some can be chosen."""
    argument: str | None = None
    """What comes after a colon in the name, where the source needs something."""


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("nvml", "nvml", "NVIDIA GPUs (NVML)", accelerator=True),
        Entry("amdsmi", "amdsmi", "AMD GPUs (AMD SMI)", accelerator=True),
        Entry("amdgpu", "drm", "AMD GPUs (kernel driver)", factory="create_amd", accelerator=True),
        Entry("intel", "drm", "Intel GPUs (kernel drivers xe, i915)", factory="create_intel", accelerator=True),
        Entry("gaudi", "library", "Intel Gaudi (HLML)", factory="create_gaudi", accelerator=True),
        Entry("graphcore", "library", "Graphcore IPU (gcipuinfo)", factory="create_graphcore", accelerator=True),
        Entry("rapl", "rapl", "processors and memory (RAPL)"),
        Entry("grace", "grace", "NVIDIA Grace and Grace-Hopper rails"),
        Entry("cray", "cray", "HPE Cray EX node (pm_counters)"),
        Entry("ipmi", "board", "node (IPMI DCMI)", auto=False, factory="create_ipmi"),
        Entry("redfish", "board", "node (Redfish)", auto=False, factory="create_redfish", argument="address"),
        Entry("slurm", "slurm", "nodes of the job step (Slurm accounting)", auto=False),
        Entry("csv", "csvfile", "a meter that writes a CSV file", auto=False, argument="path"),
        Entry("fake", "fake", "a made-up signal, for demonstrations", auto=False, accelerator=True),
    )
}


def source_names(auto_only: bool = False) -> list[str]:
    """Names that ``create`` accepts, in the order in which they are tried."""
    return [entry.name for entry in ENTRIES.values() if entry.auto or not auto_only]


def create(name: str, devices: Sequence[str] | None = None, automatic: bool = False) -> Source:
    """The source of this name, not yet opened.

    ``name`` may carry an argument after a colon where the source needs one (``csv:/path/to/file.csv``).
    ``devices`` restricts sources that see accelerators to these ids; ``["all"]`` ignores the environment's mask.
    With ``automatic`` the source first looks for its driver's files, so that a library is not loaded in vain.
    """
    base, _, argument = name.partition(":")
    if base not in ENTRIES:
        raise unknown_name("power source", base, ENTRIES)
    module = importlib.import_module(f"caraml.power.sources.{ENTRIES[base].module}")
    factory: Callable[[str, Sequence[str] | None, bool], Source] = getattr(module, ENTRIES[base].factory)
    return factory(argument, devices, automatic)


def timed(channel: str, ask: Callable[[], float], failures: tuple[type[Exception], ...]) -> Reading:
    """One reading with its times. An exception of a type in ``failures`` becomes a reading without a value."""
    before = time.monotonic()
    try:
        value = ask()
    except failures as error:
        return Reading(channel, before, time.monotonic(), None, f"{type(error).__name__}: {error}")
    return Reading(channel, before, time.monotonic(), value)
