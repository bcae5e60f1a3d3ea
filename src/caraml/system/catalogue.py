"""Systems by name: ``local`` is detected, the others are TOML files, one each, whose every figure has its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from caraml.errors import InputError, nearest, unknown_name
from caraml.system import peaks
from caraml.system.detect import detect
from caraml.system.model import System
from caraml.tomlfile import load_toml

LOCAL = "local"

_NEED_SOURCE = ("nodes", "devices_per_node", "devices", "cpu", "memory_bytes")


def load_system(name_or_path: str | Path) -> System:
    """The system called ``name_or_path``: ``local``, a name or alias of the catalogue (case does not matter), or a TOML file.

    What is taken for a file: a ``Path``, and text that ends in ``.toml`` or has a slash.

    Raises:
        InputError: no such name, or a file with faults (all of them listed).
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text:
        return system_file(Path(text))
    if text == LOCAL:
        return detect()
    known = {name.casefold(): system for system in list_systems() for name in (system.name, *system.aliases)}
    if text.casefold() in known:
        return known[text.casefold()]
    raise unknown_name("system", text, [LOCAL, *(name for system in list_systems() for name in (system.name, *system.aliases))])


@cache
def list_systems() -> tuple[System, ...]:
    """The systems of the catalogue, by name; ``local`` is not among them.

    Raises:
        InputError: a file of the catalogue has faults, or two systems claim a name.
    """
    systems = tuple(system_file(path) for path in sorted(peaks.CATALOG.glob("*.toml")) if path.name != "peaks.toml")
    names = [name for system in systems for name in {word.casefold() for word in (system.name, *system.aliases)}] + [LOCAL]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"several systems of the catalogue are called {', '.join(twice)}")
    return tuple(sorted(systems, key=lambda system: system.name))


def system_file(path: Path) -> System:
    """The system that a TOML file describes.

    One ``[[devices]]`` table stands for all devices of a node. Peak and bandwidth come from the data sheet of the device's model where
    the file gives none.

    Raises:
        InputError: the file's faults, all of them; figures without a source are faults too.
    """
    system = load_toml(path, System)
    faults = [*_without_source(system), *_wrong_source_keys(system)]
    if len(system.devices) not in (1, system.devices_per_node):
        faults.append(f"devices: found {len(system.devices)} tables, expected 1 or devices_per_node = {system.devices_per_node}")
    if faults:
        raise InputError("\n  ".join([f"{len(faults)} fault{'s' * (len(faults) > 1)} in {path}", *faults]))
    return _with_sheet(_with_all_devices(system))


def _without_source(system: System) -> list[str]:
    """Figures that nobody vouches for."""
    given = [key for key in _NEED_SOURCE if getattr(system, key) is not None]
    covered = {key.split(".")[0] for key in system.sources}
    return [f"sources.{key}: found nothing, expected where the figure comes from" for key in given if key not in covered]


def _wrong_source_keys(system: System) -> list[str]:
    known = list(System.model_fields)
    faults = []
    for key in system.sources:
        word = key.split(".")[0]
        if word not in known:
            guess = nearest(word, known)
            faults.append(f"sources.{key}: found no figure of that name" + (f" (did you mean {guess!r}?)" if guess else ""))
    return faults


def _with_all_devices(system: System) -> System:
    if len(system.devices) == system.devices_per_node:
        return system
    devices = tuple(system.devices[0].model_copy(update={"index": i}) for i in range(system.devices_per_node))
    return system.model_copy(update={"devices": devices})


def _with_sheet(system: System) -> System:
    entry = peaks.entry(system.devices[0].model)
    missing = dict(system.missing)
    peak, bandwidth = system.peak, system.memory_bandwidth
    if isinstance(entry, str):
        missing.update({key: entry for key, value in (("peak", peak), ("memory_bandwidth", bandwidth)) if value is None})
    else:
        peak, bandwidth = peak or peaks.figures(entry), bandwidth or peaks.bandwidth(entry)
    return system.model_copy(update={"peak": peak, "memory_bandwidth": bandwidth, "missing": missing})
