"""Systems by name: ``local`` is detected, the others are TOML files, one each, whose every figure has its source.

A name is looked for in the catalogue, in ``~/.config/caraml/systems``, and in the folder ``systems`` beside the suite. A later file of the
same name, or one that ``extends`` a system, overrides it field by field.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from caraml.base.errors import InputError, nearest, unknown_name
from caraml.base.files import config_home, intruder, trusting
from caraml.base.limits import read_json
from caraml.base.toml import Location, TomlDocument, read_toml
from caraml.system.detect import detect
from caraml.system.model import CATALOG, Affinity, Cpu, DeviceModel, System, same_model, with_sheet

LOCAL = "local"
GIVEN = "system.json"
"""File in an attempt's folder: what the description of its machine gives."""
Table = dict[str, Any]

_NEED_SOURCE = ("nodes", "devices_per_node", "devices", "cpu", "memory_bytes", "ssd_bytes", "affinity")
_TABLES: dict[str, type[BaseModel]] = {"devices": DeviceModel, "cpu": Cpu, "affinity": Affinity}
_NAMES = {"model", "kind", "index", "uuid", "pci_bus_id"}
"""Fields that name a device and are no figures."""
_WHOLE = ("affinity", "links")
"""Replaced as one: half of the old beside half of the new describes no machine."""
_GIVEN = {"name", "title", "devices_per_node", "devices", "cpu", "peak", "memory_bandwidth", "affinity", "sources"}


class Described(NamedTuple):
    """A system and the files that describe it, the one that others override first."""

    system: System
    files: tuple[Path, ...]
    data: Table


def load_system(name_or_path: str | Path, beside: Path | None = None) -> System:
    """The system called ``name_or_path``: ``local``, a name or alias (case does not matter), or a TOML file.

    What is taken for a file: a ``Path``, and text that ends in ``.toml`` or has a slash. ``beside`` is the suite's file: a folder
    ``systems`` next to it is searched too. In a file, one ``[[devices]]`` table stands for all devices of a node, and peak and bandwidth
    come from the data sheet of the device's model where the file gives none.

    Raises:
        InputError: no such name, or a file with faults (all of them listed).
    """
    text = str(name_or_path)
    if text == LOCAL:
        return detect()
    return described(name_or_path, beside).system


def names_file(text: str) -> bool:
    """Whether text that stands for a system is a path."""
    return text.endswith(".toml") or "/" in text


def described(name_or_path: str | Path, beside: Path | None = None) -> Described:
    """Like :func:`load_system`, with the files that the description comes from; ``local`` has none.

    Raises:
        InputError: no such name, or a file with faults.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or names_file(text):
        return _described(Path(text), _known(beside, before=Path(text)))
    known = _known(beside)
    found = _by_name(text, known)
    if found is None:
        error = unknown_name("system", text, [LOCAL, *_names(known)])
        error.hint = error.hint or "caraml list systems"
        raise error
    return found


def given(system: System) -> str:
    """What a description gives that a machine cannot tell of itself, for :data:`GIVEN`: affinity, and the peaks and bandwidth that are not
    those of the data sheet."""
    sheet = with_sheet(system.model_copy(update={"peak": None, "memory_bandwidth": None}))
    peak = {dtype: figure for dtype, figure in (system.peak or {}).items() if figure != (sheet.peak or {}).get(dtype)}
    bandwidth = None if system.memory_bandwidth == sheet.memory_bandwidth else system.memory_bandwidth
    own = system.model_copy(update={"peak": peak or None, "memory_bandwidth": bandwidth})
    return own.model_dump_json(indent=1, include=_GIVEN, exclude_none=True)


def with_given(found: System, folder: Path) -> System:
    """A machine as detected, with what :data:`GIVEN` in an attempt's ``folder`` gives, if it is there.

    Peaks and bandwidth count for devices of the model that is described; the affinity only if every device of the node is visible: in a
    part of a node, its numbering would name the wrong devices. Raises ``InputError`` for a file beyond the limits.
    """
    if not (folder / GIVEN).exists():
        return found
    told = System.model_validate_json(read_json(folder / GIVEN))
    new: Table = {key: figure for key in ("peak", "memory_bandwidth") if (figure := getattr(told, key)) is not None}
    model, missing = told.devices[0].model, found.missing
    if new and not same_model(model, found.devices[0].model):
        missing = missing | {key: f"{missing[key]}; {told.name} gives it for {model!r}" for key in new if key in missing}
        new = {}
    missing = {key: why for key, why in missing.items() if key not in new}
    if "peak" in new:
        new["peak"] = (found.peak or {}) | new["peak"]
    if told.affinity is not None and len(told.devices) == len(found.devices) and told.device_class == found.device_class:
        new |= {"affinity": told.affinity, "sources": found.sources | {"affinity": told.sources["affinity"]}}
    return found.model_copy(update={**new, "missing": missing})


def list_systems(beside: Path | None = None) -> tuple[System, ...]:
    """Every system that has a description, by name; ``local`` is not among them.

    Raises:
        InputError: a file has faults, or two systems claim a name.
    """
    return tuple(found.system for _, found in sorted(_known(beside).items()))


def user_folders(beside: Path | None = None) -> list[Path]:
    """Where a user's systems are looked for: the configuration folder, then the folder ``systems`` beside the suite's file.

    Raises:
        InputError: others could write into the second, whose setup lines would run as this user, but not into the suite.
    """
    if beside is None:
        return [config_home() / "systems"]
    folder = beside.resolve().parent / "systems"
    found = intruder(folder)
    if found is not None and intruder(beside) is None:
        raise _not_read(folder, found, "move your suite to a folder of your own")
    return [config_home() / "systems", folder]


def _not_read(folder: Path, found: tuple[str, str], way: str) -> InputError:
    """The error for systems that others than this user could have written: ``found`` is where and who, ``way`` what to do about it."""
    what = f"{folder}: not read, because its systems may have lines that run as you, and others could write them: {': '.join(found)}"
    return InputError(what, f"{way} or, if you trust them, {trusting(found[0])}")


@cache
def _catalogue() -> dict[str, Described]:
    """The systems that come with CARAML. Parsed once; nobody may change them."""
    known: dict[str, Described] = {}
    for path in sorted(CATALOG.glob("*.toml")):
        if path.name != "peaks.toml":
            found = _described(path, {})
            known[found.system.name] = found
    _refuse_twice(known)
    return known


def _known(beside: Path | None, before: Path | None = None) -> dict[str, Described]:
    """All systems by name; with ``before``, those that this file may build on: it does not override itself."""
    if before is not None and before.resolve().parent == CATALOG.resolve():
        return {}
    known = dict(_catalogue())
    for folder in user_folders(beside):
        paths, own = sorted(folder.glob("*.toml")), folder == config_home() / "systems"
        if paths and own and (found := intruder(folder)) is not None:
            raise _not_read(folder, found, f"look through them and chmod go-w {shlex.quote(found[0])}")
        for path in paths:
            if before is not None and path.resolve() == before.resolve():
                return known
            system = _described(path, known)
            known[system.system.name] = system
    _refuse_twice(known)
    return known


def _described(path: Path, known: dict[str, Described]) -> Described:
    """One file as a system, laid over the one that it extends or whose name it has."""
    document = read_toml(path)
    base = _base(document, known)
    if base is None:
        return Described(with_sheet(_validated(document, document.data)), (path,), document.data)
    data = _laid_over(base.data, document.data)
    return Described(with_sheet(_validated(document, data)), (*base.files, path), data)


def _base(document: TomlDocument, known: dict[str, Described]) -> Described | None:
    extends, name = document.data.get("extends"), document.data.get("name")
    if extends is None:
        return known.get(name) if isinstance(name, str) else None
    found = _by_name(extends, known) if isinstance(extends, str) else None
    if found is None:
        names = _names(known)
        expected = "the name of a system in the catalogue or in a file before this one"
        document.refuse([document.fault(("extends",), extends, expected, nearest(str(extends), names))])
    return found


def _by_name(text: str, known: dict[str, Described]) -> Described | None:
    by_word = {word.casefold(): found for found in known.values() for word in (found.system.name, *found.system.aliases)}
    return by_word.get(text.casefold())


def _names(known: dict[str, Described]) -> Iterator[str]:
    return (word for found in known.values() for word in (found.system.name, *found.system.aliases))


def _refuse_twice(known: dict[str, Described]) -> None:
    owners: dict[str, set[str]] = {LOCAL: {"what is detected"}}
    for found in known.values():
        for word in {name.casefold() for name in (found.system.name, *found.system.aliases)}:
            owners.setdefault(word, set()).add(str(found.files[-1]))
    twice = [f"{word!r} in {' and '.join(sorted(files))}" for word, files in sorted(owners.items()) if len(files) > 1]
    if twice:
        raise InputError(f"several systems have the same name or alias: {'; '.join(twice)}")


# -- one file laid over another, so that no figure keeps a source that was another figure's -------------------------------------------


def _laid_over(base: Table, over: Table) -> Table:
    """``base`` with every field that ``over`` gives; tables are merged, arrays and figures replaced.

    One ``[[devices]]`` table of ``over`` changes all devices. A new name leaves the old one its aliases.
    """
    result = _merged(base, {key: value for key, value in over.items() if key not in ("extends", "devices", *_WHOLE)})
    result |= {key: deepcopy(over[key]) for key in _WHOLE if key in over}
    if "devices" in over:
        result["devices"] = _devices(base.get("devices"), over["devices"])
    if result.get("name") != base.get("name") and "aliases" not in over:
        result.pop("aliases", None)
    given, missing = _paths(over), over.get("missing", {})
    kept = {key: why for key, why in base.get("missing", {}).items() if key not in given}
    result["missing"] = kept | missing if isinstance(missing, dict) else missing  # the model says what is wrong
    return result


def _validated(document: TomlDocument, data: Table) -> System:
    """The system that ``data`` (the document's own, or that laid over another) describes, with all devices of a node.

    Raises:
        InputError: every fault of the document, each with its line.
    """
    whole = TomlDocument(document.name, {key: value for key, value in data.items() if key != "extends"}, document.lines)
    system = whole.validate(System)
    faults = [*_without_source(document), *_wrong_source_keys(document), *_wrong_counts(document, system), *_wrong_units(document, system)]
    if system.name.casefold() == LOCAL:
        faults.append(document.fault(("name",), system.name, "another name: local is the machine that is detected"))
    if faults:
        document.refuse(faults)
    if len(system.devices) == system.devices_per_node:
        return system
    devices = tuple(system.devices[0].model_copy(update={"index": i}) for i in range(system.devices_per_node))
    return system.model_copy(update={"devices": devices})


def _merged(base: Table, over: Table) -> Table:
    result = deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        # A figure brings its own unit and source.
        result[key] = _merged(result[key], value) if both and "value" not in value else deepcopy(value)
    return result


def _devices(base: Any, over: Any) -> Any:
    if not (isinstance(base, list) and isinstance(over, list) and base and over and all(isinstance(d, dict) for d in over)):
        return deepcopy(over)  # the model says what is wrong
    count = max(len(base), len(over))
    old, new = (part * count if len(part) == 1 else part for part in (base, over))
    return [_merged(a, b) for a, b in zip(old, new, strict=True)] if len(old) == len(new) else deepcopy(over)


def _paths(over: Table) -> set[str]:
    """Keys that ``over`` gives, as ``missing`` spells them: ``nodes``, ``devices.tdp_w``, ``site.scheduler.partition``."""
    found: set[str] = set()
    for key, value in over.items():
        found.add(key)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                found |= {f"{key}.{inner}" for inner in _paths(part)}
    return found


def _without_source(document: TomlDocument) -> list[str]:
    """Figures of this file that nobody vouches for; the source of an overridden figure is not the new one's."""
    sources = document.data.get("sources", {})
    faults = []
    for key in (key for key in _NEED_SOURCE if key in document.data and key not in sources):
        given = document.data[key]
        tables = given if isinstance(given, list) else [given]
        fields = sorted({field for table in tables if isinstance(table, dict) for field in table} - _NAMES)
        vouched = [name for name in sources if name.startswith(f"{key}.")]
        absent = [f"{key}.{field}" for field in fields if f"{key}.{field}" not in sources] if vouched else [key]
        for name in absent:
            place = (key, *((0,) if isinstance(given, list) else ()), *name.split(".")[1:])
            faults.append(_fault_at(document, place, f"sources.{name}: found nothing, expected where the figure comes from"))
    return faults


def _wrong_source_keys(document: TomlDocument) -> list[str]:
    faults = []
    for key in document.data.get("sources", {}):
        word, _, field = key.partition(".")
        known, unknown = list(System.model_fields), word
        if word in known:
            known, unknown = (list(_TABLES[word].model_fields), field) if field and word in _TABLES else (known, word)
        if unknown not in known:
            guess = nearest(unknown, known)
            hint = f" (did you mean {guess!r}?)" if guess else ""
            faults.append(_fault_at(document, ("sources", key), f"sources.{key}: found no figure of that name{hint}"))
    return faults


def _wrong_counts(document: TomlDocument, system: System) -> list[str]:
    count, faults = system.devices_per_node, []
    if len(system.devices) not in (1, count):
        faults.append(document.fault(("devices",), f"{len(system.devices)} tables", f"1 or devices_per_node = {count}"))
    for field, values in system.affinity or ():
        if values and len(values) != count:
            faults.append(document.fault(("affinity", field), f"{len(values)} entries", f"one for each of {count} devices"))
    return faults


def _wrong_units(document: TomlDocument, system: System) -> Iterator[str]:
    """Figures in other units than rates are compared in."""
    for dtype, figure in (system.peak or {}).items():
        if figure.unit != "FLOP/s":
            yield document.fault(("peak", dtype, "unit"), figure.unit, '"FLOP/s", and the value in FLOP/s')
    if system.memory_bandwidth is not None and system.memory_bandwidth.unit != "B/s":
        yield document.fault(("memory_bandwidth", "unit"), system.memory_bandwidth.unit, '"B/s", and the value in B/s')


def _fault_at(document: TomlDocument, place: Location, text: str) -> str:
    return f"{document.name}:{document.line(place)}: {text}"
