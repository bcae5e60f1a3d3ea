"""A system's file checked, and laid over another: field by field, and no figure keeps a source that was another figure's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from caraml.base.errors import nearest
from caraml.base.toml import Location, TomlDocument
from caraml.system.model import Affinity, Cpu, DeviceModel, System

Table = dict[str, Any]

_NEED_SOURCE = ("nodes", "devices_per_node", "devices", "cpu", "memory_bytes", "ssd_bytes", "affinity")
_TABLES: dict[str, type[BaseModel]] = {"devices": DeviceModel, "cpu": Cpu, "affinity": Affinity}
_NAMES = {"model", "kind", "index", "uuid", "pci_bus_id"}
"""Fields that name a device and are no figures."""
_WHOLE = ("affinity", "links")
"""Replaced as one: half of the old beside half of the new describes no machine."""


def merged(base: Table, over: Table) -> Table:
    """``base`` with every field that ``over`` gives; tables are merged, arrays and figures replaced.

    One ``[[devices]]`` table of ``over`` changes all devices. A new name leaves the old one its aliases.
    """
    result = _merged(base, {key: value for key, value in over.items() if key not in ("extends", "devices", *_WHOLE)})
    result |= {key: deepcopy(over[key]) for key in _WHOLE if key in over}
    if "devices" in over:
        result["devices"] = _devices(base.get("devices"), over["devices"])
    if result.get("name") != base.get("name") and "aliases" not in over:
        result.pop("aliases", None)
    given = _paths(over)
    kept = {key: why for key, why in base.get("missing", {}).items() if key not in given}
    result["missing"] = kept | over.get("missing", {})
    return result


def validated(document: TomlDocument, data: Table) -> System:
    """The system that ``data`` (the document's own, or that laid over another) describes, with all devices of a node.

    Raises:
        InputError: every fault of the document, each with its line.
    """
    whole = TomlDocument(document.name, {key: value for key, value in data.items() if key != "extends"}, document.lines)
    system = whole.validate(System)
    faults = [*_without_source(document), *_wrong_source_keys(document), *_wrong_counts(document, system)]
    if system.name.casefold() == "local":
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


def _fault_at(document: TomlDocument, place: Location, text: str) -> str:
    return f"{document.name}:{document.line(place)}: {text}"
