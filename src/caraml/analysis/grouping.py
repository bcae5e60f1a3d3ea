"""Which records did the same work, in what points differ, and what else may explain a difference of their numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from caraml.results.record import FLAGS, Record
from caraml.suite.model import NOT_STATED, OF_EPOCHS, OWN_LOOP, Point

T = TypeVar("T")
Axes: TypeAlias = dict[str, str]
"""What decides a point's result, by name, as text that can be compared."""

_NOT_WORK = {"suite", "benchmark", "variant", "params", "repeat", "seed", "profile", "measure", "knobs"}
"""Fields of a point that are labels, or that do not change what is measured: repeats differ in them; or that stand here in another form.
Of ``measure`` the length of a window does not change it, and how long is trained does."""
_AS_THEY_ARE = "knobs as they are"
WHOLE, NONE = "whole copies", "–"


def axes(point: Point) -> Axes:
    """Everything that makes a point other work than another one; parameters appear as ``params.NAME``."""
    fields = point.model_dump(mode="json", exclude=_NOT_WORK)
    found = {name: _text(value) for name, value in fields.items()}
    found["knobs"] = point.knobs.label or _AS_THEY_ARE
    found["placement"] = point.placement.label(1) or WHOLE  # how many sets there are follows from the devices
    trained = ((f"measure.{name}", getattr(point.measure, name)) for name in OF_EPOCHS)
    found |= {name: _text(value) for name, value in trained if value is not None}
    return found | {f"params.{name}": _text(value) for name, value in point.deciding_params.items()}


def unstated_size(record: Record) -> set[str]:
    """What nobody stated of a record's size: ``devices``, ``global_batch``; its point has some number there."""
    own = record.point.workload == OWN_LOOP  # whose batch is what it counted, also where steps differ
    return {name for name in ("devices", "global_batch") if name in record.unstated and not (own and name == "global_batch")}


def axes_of(record: Record) -> Axes:
    """The axes of a record's point; a size that nobody stated is told as that, and meets no size that somebody did. What else is not
    stated, versions before have told otherwise."""
    return axes(record.point) | dict.fromkeys(unstated_size(record), NOT_STATED)


def grouped(things: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Records, or what else there is, with equal ``key``, in the order of first appearance."""
    groups: dict[object, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())


def without(found: Axes, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """A hashable key of all axes but ``names``."""
    left_out = set(names)
    return tuple(sorted((name, value) for name, value in found.items() if name not in left_out))


def same_work(records: Iterable[Record]) -> list[list[Record]]:
    """Repeats together."""
    return grouped(records, work_of)


def run_of(record: Record) -> object:
    """What a run has alone, and its copies with it: not its number, which is another one where folders were put together. Rows of a table
    have the time of its file, and published runs none."""
    where = record.system.get("hostname"), *map(record.environment.get, ("row", "published"))
    return record.key, record.started_at, record.value("throughput"), *map(str, where)


def work_of(record: Record) -> object:
    """What repeats agree in: every axis."""
    return without(axes_of(record), ())


DISTURBED = frozenset({"busy_machine", "throttled", "not_steady", "truncated", "mixed_nodes", "nan_loss", "short_window"})
"""Flags of a run whose numbers may be those of something else than the work."""


def valid(records: Iterable[Record]) -> list[Record]:
    """The runs with a result, whose numbers hold. One that is invalid has numbers as well: of work that went wrong."""
    return [record for record in records if record.status == "ok"]


def why_not(record: Record) -> str:
    """Why a record has no result."""
    return f"{record.status}: {record.reason or 'no reason given'}"


def counting(repeats: Iterable[Record]) -> list[Record]:
    """The repeats of one work of which every mean is: those with a result that nothing disturbed; all with one if something disturbed
    each."""
    good = valid(repeats)
    return [record for record in good if DISTURBED.isdisjoint(record.flags)] or good


def disturbances(repeats: Sequence[Record]) -> tuple[str, ...]:
    """Flags of ``DISTURBED`` among the repeats."""
    return tuple(sorted({flag for record in repeats for flag in record.flags} & DISTURBED))


def varying(records: Sequence[Record]) -> list[str]:
    """Names of the axes in which the records are not all alike."""
    found = [axes_of(record) for record in records]
    names = dict.fromkeys(name for one in found for name in one)
    return [name for name in names if len({one.get(name) for one in found}) > 1]


def names(groups: Sequence[Sequence[Record]], but: Iterable[str] = ()) -> list[str]:
    """A name for each group of repeats: the label of its points, with the axes (``but`` some) in which groups of one label differ."""
    return told_apart([_label(group[0]) for group in groups], [dict(without(axes_of(group[0]), but)) for group in groups])


def _label(record: Record) -> str:
    """The label of a record's point without its repeat; of a published one without what its source does not state."""
    point = record.point
    if "published" not in record.environment:
        return point.model_copy(update={"repeat": 0}).label
    batch = f" b{point.global_batch}" if "batch" in point.params else ""
    return f"{point.benchmark}{batch} {point.nodes}x{point.devices}{'' if point.mode == 'train' else ' ' + point.mode}"


def short(point: Point, asked: Collection[str]) -> str:
    """The values of the ``asked`` axes that a user chooses for given work, in a few words, such as ``b64 bf16 1x4``."""
    words = []
    if "global_batch" in asked or "micro_batch" in asked:
        words.append(f"b{point.global_batch}" + (f"/{point.micro_batch}" if "micro_batch" in asked and point.accumulation > 1 else ""))
    if "precision" in asked:
        words.append(point.arithmetic)
    if "compile" in asked:
        words.append({"off": "eager", "default": "compiled"}.get(point.compile, point.compile))
    if "nodes" in asked or "devices" in asked:
        words.append(f"{point.nodes}x{point.devices}")
    if "knobs" in asked and (point.knobs.changed or not words):
        words.append(point.knobs.label or _AS_THEY_ARE)
    return " ".join(words)


_PLAIN = {"workload", "mode", "system", "device", "device_class", "placement", "precision", "knobs", "software", "batch"}
"""Axes, and other details, whose value says what it is of."""


def told_apart(bases: Sequence[str], details: Sequence[Mapping[str, str]], plain: Collection[str] = _PLAIN) -> list[str]:
    """Each base with the details in which it differs from equal ones, of the machine alone where that is enough; what is equal even so is
    counted. The values of ``plain`` details say what they are of.

    Things are alike only if base and all details are.
    """
    sharing: dict[str, list[Mapping[str, str]]] = {}
    for base, own in zip(bases, details, strict=True):
        sharing.setdefault(base, []).append(own)
    differing: dict[str, list[str]] = {}
    for base, same in sharing.items():
        found_in = dict.fromkeys(name for one in same for name in one)
        differing[base] = [name for name in found_in if len({one.get(name) for one in same}) > 1]
        if len({one.get("machine") for one in same}) == len({tuple(sorted(one.items())) for one in same}):
            differing[base] = [name for name in differing[base] if name == "machine"]
    named = []
    for base, own in zip(bases, details, strict=True):
        words = [(name.removeprefix("params."), own.get(name, NONE), name in plain) for name in differing[base]]
        named.append(" ".join([base, *(_detail(*one) for one in words)]))
    seen: Counter[str] = Counter()
    found: dict[object, str] = {}
    for name, own in zip(named, details, strict=True):
        thing = name, tuple(sorted(own.items()))
        if thing not in found:
            seen[name] += 1
            found[thing] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return [found[name, tuple(sorted(own.items()))] for name, own in zip(named, details, strict=True)]


def _detail(name: str, value: str, plain: bool) -> str:
    if value == NONE:
        return f"without {name}"
    return value if plain else f"{name}={value}"


def ways(point: Point) -> list[str]:
    """How a point's model is divided, in each of the ways of which it is one size: by its own placement first.

    Full sharding is one way whatever the number of devices. Where nobody else has the same parameters, whole copies, full sharding and a
    shared optimizer are the same.
    """
    placement = point.placement
    holders = point.world // (placement.tp * placement.pp)
    found = [placement]
    if holders == 1 and not placement.distributed_optimizer:
        found.append(placement.model_copy(update={"distributed_optimizer": True}))
    names = [one.label(1) or WHOLE for one in found]
    if placement.fsdp == holders:
        rest = placement.model_copy(update={"fsdp": 1}).label(1)
        names.append(f"fsdp=all {rest}".strip())
    return names


def by_way(records: Iterable[Record], key: Callable[[Record], object]) -> list[tuple[str, list[Record]]]:
    """Records with equal ``key`` that are divided in one of the :func:`ways`, with that way, in the order of first appearance."""
    groups: dict[tuple[object, str], list[Record]] = {}
    own: set[tuple[object, str]] = set()
    for record in records:
        here, point = key(record), record.point
        found = ways(point)
        for way in found:
            groups.setdefault((here, way), []).append(record)
        alone = point.world == point.placement.tp * point.placement.pp
        own |= {(here, found[0])} if alone else {(here, way) for way in found}
    return [(way, group) for (here, way), group in groups.items() if (here, way) in own]


_ENCODE = json.JSONEncoder(sort_keys=True).encode  # ``json.dumps`` makes an encoder for each value, which takes as long again


def _text(value: object) -> str:
    return value if isinstance(value, str) else _ENCODE(value)


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
    **dict.fromkeys((f"measure.{name}" for name in OF_EPOCHS), "other training: quality, time and energy of all of it are others"),
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


def contrasts(a: Iterable[Record], b: Iterable[Record]) -> tuple[set[str], set[str]]:
    """Axes that have one value in all of A and another one in all of B: what the comparison is about, not what pairs are made by.

    Second, those of epochs, which only some work has, where *all* is what has them: in A some work trains 3 epochs, in B 4. Such work has
    no partner among the rest.
    """
    sides = [[axes_of(record) for record in side] for side in (a, b)]
    found, optional = set(), set()
    for name in {name for side in sides for one in side for name in one}:
        values = [{one.get(name) for one in side} for side in sides]
        given = [one - {None} for one in values]
        partly = name.removeprefix("measure.") in OF_EPOCHS and all(given) and given != values
        ours, theirs = given if partly else values
        if len(ours) == len(theirs) == 1 and ours != theirs:
            found.add(name)
            optional |= {name} if partly else set()
    return found, optional


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
    found |= dict.fromkeys(record.unstated, NOT_STATED)
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
