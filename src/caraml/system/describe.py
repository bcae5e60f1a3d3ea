"""A system for people: every figure with its source, and the file that describes a detected machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from typing import Any, NamedTuple

from caraml import __version__
from caraml.base.format import human
from caraml.system.model import System

_OF_THIS_JOB = {"usable_threads"}
_OF_THIS_DEVICE = {"index", "uuid", "pci_bus_id", "power_limit_w"}
"""True for one node or job only; a description is for all of them."""
_DESCRIBED = ("devices_per_node", "devices", "cpu", "memory_bytes", "affinity")


class Row(NamedTuple):
    """One line of a description: ``value`` is ``None`` for what is missing, and ``source`` then says why."""

    name: str
    value: str | None
    source: str


def rows(system: System) -> list[Row]:
    """Everything known about a system, and what is not known, in an order for reading."""
    found = [*_hardware(system), *_peaks(system), *_links(system), *_site(system)]
    absent = [Row(key, None, why) for key, why in system.missing.items()]
    return [*found, *absent]


def as_toml(system: System) -> str:
    """The file for a machine that was detected: a description that others may read, check and extend.

    Peaks stay out, since they come with the device's name; so does what only holds for this job.
    """
    import tomli_w

    described = system.model_dump(
        mode="json",
        include={"nodes", "devices_per_node", "memory_bytes", "os", "cpu", "affinity"},
        exclude={"cpu": _OF_THIS_JOB},
        exclude_none=True,
        exclude_defaults=True,
    )
    devices = [device.model_dump(mode="json", exclude=_OF_THIS_DEVICE, exclude_none=True) for device in system.devices]
    source = f"detected by caraml {__version__} on {date.today().isoformat()}"
    known = {key: why for key, why in system.missing.items() if key.split(".")[0] in System.model_fields and key not in described}
    data: dict[str, Any] = {
        "name": _slug(system.hostname),
        "title": system.identity,
        **{key: described.pop(key) for key in ("nodes", "devices_per_node", "memory_bytes", "os") if key in described},
        "devices": devices[:1] if all(device == devices[0] for device in devices) else devices,
        **described,
        "sources": {key: source for key in ("nodes", *_DESCRIBED) if getattr(system, key) is not None},
        "missing": {key: why for key, why in known.items() if key not in ("peak", "memory_bandwidth")},
    }
    head = f"# {source}\n# Give it a name and a title. It is found in ~/.config/caraml/systems and in a folder systems beside a suite.\n"
    return head + tomli_w.dumps({key: value for key, value in data.items() if value != {}})


def _slug(hostname: str | None) -> str:
    short = re.sub(r"[^a-z0-9-]+", "-", (hostname or "").split(".")[0].lower()).strip("-")
    return short if short not in ("", "local", "localhost") else "my-machine"


def _source(system: System, key: str) -> str:
    found = system.sources.get(key) or system.sources.get(key.partition(".")[0])
    return found or ("detected" if system.name == "local" else "")


def _hardware(system: System) -> Iterator[Row]:
    cpu, device, models = system.cpu, system.devices[0], [device.model for device in system.devices]
    values = {
        "nodes": system.nodes,
        "devices_per_node": " + ".join(f"{models.count(name)} x {name}" for name in sorted(set(models))),
        "devices.memory_bytes": _bytes(device.memory_bytes),
        "devices.tdp_w": f"{device.tdp_w:g} W" if device.tdp_w else None,
        "devices.compute_capability": device.compute_capability,
        "devices.multiprocessors": device.multiprocessors,
        "cpu": cpu.model,
        "cpu.cores": " on ".join(str(part) for part in (cpu.cores, cpu.sockets and f"{cpu.sockets} sockets") if part),
        "cpu.threads": cpu.threads,
        "cpu.numa_nodes": cpu.numa_nodes,
        "memory_bytes": _bytes(system.memory_bytes),
        "ssd_bytes": "none" if system.ssd_bytes == 0 else _bytes(system.ssd_bytes),
        "affinity": _affinity(system),
    }
    return (Row(key, str(value), _source(system, key)) for key, value in values.items() if value)


def _peaks(system: System) -> Iterator[Row]:
    for dtype, figure in (system.peak or {}).items():
        yield Row(f"peak.{dtype}", human(figure.value, figure.unit), figure.source)
    if system.memory_bandwidth:
        yield Row("memory_bandwidth", human(system.memory_bandwidth.value, system.memory_bandwidth.unit), system.memory_bandwidth.source)


def _links(system: System) -> Iterator[Row]:
    for link in system.links:
        rate = f"{human(link.bandwidth_bytes_per_s, 'B/s')} per direction and {link.per}" if link.bandwidth_bytes_per_s else None
        latency = human(link.latency_s, "s") if link.latency_s else None
        yield Row(f"link {link.scope}", ", ".join(part for part in (link.name, rate, latency, link.topology) if part), link.source)


def _site(system: System) -> Iterator[Row]:
    given = system.site.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for part, fields in given.items():
        for key, value in (fields or {}).items():
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            yield Row(f"site.{part}.{key}", str(shown), _source(system, f"site.{part}"))


def _affinity(system: System) -> str | None:
    affinity = system.affinity
    if affinity is None:
        return None
    if affinity.cpus:
        return "CPUs " + " | ".join(affinity.cpus)
    return f"NUMA nodes {_listed(affinity.numa_nodes)}" if affinity.numa_nodes else f"sockets {_listed(affinity.sockets)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) + " of device 0, 1, ..."


def _bytes(count: int | None) -> str | None:
    """In the unit that the source used: whole gigabytes, else gibibytes."""
    if count is None:
        return None
    return f"{count / 10**9:,.0f} GB" if count % 10**9 == 0 else f"{count / 2**30:,.4g} GiB"
