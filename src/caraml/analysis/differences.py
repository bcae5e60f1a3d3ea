"""What differs between two sets of runs that may explain a difference of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraml.analysis.grouping import axes
from caraml.analysis.select import unstated
from caraml.results.record import FLAGS, Record
from caraml.suite.model import NOT_STATED

NONE = "–"
_LISTED = 4
"""Values of one side that are listed; of more only the number is."""

WHY = {
    "workload": "other work",
    "params": "other work",
    "mode": "other parts of training are in the window",
    "precision": "other arithmetic: other units of the device, other peak",
    "compile": "other kernels",
    "knobs": "other kernels, or another allocator",
    "deterministic": "other kernels",
    "global_batch": "other work per step; rates and memory change with it",
    "micro_batch": "other size of every kernel",
    "nodes": "other number of devices, other links",
    "devices": "other number of devices, other links",
    "device": "other hardware",
    "device_class": "other hardware",
    "system": "other machine",
    "host": "other machine; nodes of one kind differ by some per cent",
    "cpu": "other host processor",
    "memory": "other machine",
    "software": "other code and other kernels",
    "versions": "other code or other kernels",
    "driver": "other driver: known to change rates by factors",
    "kernel": "other operating system",
    "os": "other operating system",
    "container": "other libraries",
    "git": "other code of CARAML itself",
    "power limit": "other clock under load",
    "max clock": "other clock",
    "ECC": "other memory bandwidth",
    "MIG": "a part of a device is not the device",
    "PCIe link": "other input bandwidth",
    "governor": "other clock of the host",
    "SMT": "other number of threads per core",
    "huge pages": "other cost of memory on the host",
    "variable": "libraries behave differently",
    "measure": "other window: other uncertainty, seldom another value",
    "method": "numbers of different methods are not comparable",
    "energy boundary": "energies of different boundaries are not comparable",
    "flag": "the number may be off",
}
"""What a difference may do to the numbers, by the first part of its name."""


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same on both sides."""

    name: str
    """Such as ``precision``, ``driver``, ``flag busy_machine``."""
    a: str
    b: str
    """What each side has; several values joined by commas, ``–`` for none."""
    why: str
    """What it may do to the numbers."""


def differences(a: Sequence[Record], b: Sequence[Record]) -> list[Difference]:
    """Every fact of which the two sides do not have the same values, and every flag that is not equally frequent on both."""
    return compare_facts([facts(record) for record in a], [facts(record) for record in b]) + _flags(a, b)


def compare_facts(a: Sequence[Mapping[str, str]], b: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Facts of which two sides do not have the same values."""
    names = dict.fromkeys(name for one in (*a, *b) for name in one)
    found = []
    for name in names:
        ours, theirs = ({one.get(name, NONE) for one in side} for side in (a, b))
        if ours != theirs:
            found.append(Difference(name, _listed(ours), _listed(theirs), why(name)))
    return found


def why(name: str) -> str:
    """What a difference in a fact may do to the numbers."""
    for prefix, text in WHY.items():
        if name == prefix or name.startswith((f"{prefix}.", f"{prefix} ")):
            return text
    return "may change the numbers"


def facts(record: Record) -> dict[str, str]:
    """What was run where, as comparable text by name. What is not known is left out."""
    found: dict[str, Any] = {**axes(record.point), **dict(_machine(record.system)), **dict(_state(record.environment))}
    measure = record.point.measure.model_dump(mode="json", exclude={"timeout_seconds", "idle_seconds"})
    found |= dict.fromkeys(unstated(record), NOT_STATED)
    if "published" not in record.environment:
        found |= {f"measure.{name}": value for name, value in measure.items()}
        found["method"] = record.method_version
    energy = record.metrics.get("energy")
    if energy is not None and energy.value is not None:
        found["energy boundary"] = energy.scope
    return {name: str(value) for name, value in found.items() if value is not None and value != ""}


def _machine(system: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    cpu = system.get("cpu")
    yield "host", system.get("hostname") or system.get("host")
    yield "cpu", cpu.get("model") if isinstance(cpu, dict) else None
    yield "os", system.get("os")
    yield "kernel", system.get("kernel")
    yield "driver", system.get("driver")
    memory = system.get("memory_bytes")
    yield "memory", f"{memory / 2**30:.0f} GiB" if isinstance(memory, int | float) else None


def _state(environment: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    versions = _table(environment.get("versions"))
    yield "driver", versions.pop("driver", None)
    for name, version in versions.items():
        yield f"versions.{name}", version
    gpus = [gpu for gpu in environment.get("gpus") or [] if isinstance(gpu, dict)]
    for name, key in (("power limit", "power_limit_w"), ("max clock", "sm_clock_max_mhz"), ("ECC", "ecc"), ("MIG", "mig")):
        yield name, _each(gpu.get(key) for gpu in gpus)
    yield "PCIe link", _each(f"gen {gpu.get('pcie_generation')} x{gpu.get('pcie_width')}" for gpu in gpus)
    cpu = _table(environment.get("cpu"))
    yield "governor", cpu.get("governor")
    yield "SMT", cpu.get("smt")
    yield "huge pages", cpu.get("transparent_hugepages")
    container, git = _table(environment.get("container")), _table(environment.get("git"))
    yield "container", " ".join(str(container[key]) for key in ("runtime", "image", "digest") if container.get(key)) or None
    commit = str(git.get("commit") or "")[:12]
    yield "git", f"{commit}{' with local changes' if git.get('dirty') else ''}" if commit else None
    for name, value in _table(environment.get("variables")).items():
        yield f"variable {name}", value


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _each(values: Iterator[Any]) -> str | None:
    """Values of several devices, each once; ``None`` without devices or if none is known."""
    found = dict.fromkeys(str(value) for value in values if value is not None)
    return ", ".join(found) or None


def _flags(a: Sequence[Record], b: Sequence[Record]) -> list[Difference]:
    sides = [Counter(flag for record in side for flag in set(record.flags)) for side in (a, b)]
    found = []
    for flag in sorted({*sides[0], *sides[1]}):
        shares = [counts[flag] / max(len(side), 1) for counts, side in zip(sides, (a, b), strict=True)]
        if shares[0] != shares[1]:
            ours, theirs = (f"{counts[flag]} of {len(side)}" for counts, side in zip(sides, (a, b), strict=True))
            found.append(Difference(f"flag {flag}", ours, theirs, FLAGS.get(flag, why("flag"))))
    return found


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(values)) if len(values) <= _LISTED else f"{len(values)} values"
