"""What a node reads around its steps: power sensors, idle power, CPU time of others, throttling. Opened here and nowhere else.

One process of a node, its local rank 0, has instruments. They are read at the two ends of the window; what they say of it is a
:class:`NodeSummary` of plain numbers, so that one rank can put those of all nodes together: the sum of their energies, each node by itself,
and in what they differ. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.metrics.model import Metric, Window
from caraml.power import Meter
from caraml.power.energy import around
from caraml.power.merge import of_one_node, over_nodes
from caraml.power.model import WindowEnergy, window_from_dict
from caraml.results.record import Node
from caraml.system import host
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.nvml import Throttled, shares, slowed_down, throttled

if TYPE_CHECKING:
    from caraml.engine.ranks import Ranks

BUSY_SHARE = 0.05
"""Share of a host's CPU time used by others above which a window is flagged `busy_machine`."""
_TICKS = 2
"""Clock ticks of the kernel that this share must be worth before it is told from rounding."""
_SETTLING = 1.0
"""Seconds between the work and the idle baseline after it: boards show power averaged over as long, and clocks fall."""
_AT_REST = 0.5
"""CPU seconds per second below which a node's processes count as at rest: a loader that still reads ahead takes whole cores."""
_PAUSES = 30
"""Of ``_SETTLING`` each, after which the baseline begins in any case."""
NO_BASELINE = "no idle baseline was measured"
NO_PROCESS = "no process of this node reads its sensors"
NO_SHARE = (
    "the kernel does not tell (no /proc/stat), the window had no edges or was shorter than the ticks of the kernel's clock, "
    "or processes of the program may be Slurm's"
)


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds since boot: of everyone, other guests of a virtual machine's host included, and of some processes with their living and
    ended descendants."""

    everyone: float
    ours: float


@dataclass
class NodeSummary:
    """What one node's instruments say of a window. Times are the node's monotonic clock."""

    energy: WindowEnergy
    idle: WindowEnergy | None = None
    """The baseline: the device is open, nothing runs."""
    other_cpu_share: float | None = None
    """Share of the node's CPU time that went to processes which are not the point's; ``None`` where the kernel does not tell."""
    throttled: Throttled = field(default_factory=dict)
    """Shares of the window for which each GPU was held back, by reason."""
    device: str = ""
    """What computes, in a few words."""
    cpu: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, clocks and settings (see ``caraml.system.environment``)."""
    spans: dict[str, WindowEnergy] = field(default_factory=dict)
    """Further windows, by name: ``run`` is all that an application would do, ``epochs`` all its epochs."""

    def to_data(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries, for :meth:`from_data`."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> NodeSummary:
        energy, idle = (None if data[name] is None else window_from_dict(data[name]) for name in ("energy", "idle"))
        spans = {name: window_from_dict(span) for name, span in data["spans"].items()}
        return cls(**{**data, "energy": energy, "idle": idle, "spans": spans})

    @classmethod
    def unread(cls, reason: str) -> NodeSummary:
        """Of a node whose sensors nobody read."""
        return cls(WindowEnergy("measure", 0.0, 1.0, flags=["no_source"], reason=reason))


@dataclass(frozen=True)
class Nodes:
    """What all nodes of a point say together."""

    energy: WindowEnergy
    idle: WindowEnergy | None
    other_cpu: Metric
    """Of the node where others used most."""
    throttled: Throttled
    each: list[Node]
    """Each node by itself, if there are several."""
    spans: dict[str, WindowEnergy]
    """Energies of further stretches, by name."""

    @property
    def flags(self) -> list[str]:
        """What is to be said of the machine while the window was open."""
        raised = {
            "busy_machine": (self.other_cpu.value or 0.0) > BUSY_SHARE,
            "throttled": slowed_down(self.throttled),
            "mixed_nodes": any(node.differs for node in self.each),
        }
        return [flag for flag, is_so in raised.items() if is_so]


class Instruments:
    """The instruments of this node, running. ``devices`` are the accelerators whose sensors count (see ``Meter``); ``[]``: none.

    ``family`` are the processes whose CPU time, with that of their descendants, is not others': this process alone by default, ``[]`` if
    nobody can tell.
    """

    def __init__(self, devices: Sequence[str] | None = None, *, family: Collection[int] | None = None) -> None:
        self.meter = Meter(devices=devices)
        self.meter.start()
        self.idle: WindowEnergy | None = None
        self._gpus = devices
        self._family = [os.getpid()] if family is None else family
        self._edges: list[tuple[float, CpuTime | None, Throttled]] = []

    def measure_idle(self, seconds: float) -> None:
        """Energy of the machine at rest, where it has a sensor: the device is open, nothing runs. Called before the work and after it."""
        if not self.meter.channels or not seconds:
            return
        if self.idle is not None:
            self._settle(min(seconds, _SETTLING))
        begin = self.meter.mark()
        time.sleep(seconds)
        found = self.meter.energy("idle", begin, self.meter.mark())
        self.idle = found if self.idle is None else around(self.idle, found)

    def _settle(self, pause: float) -> None:
        """Wait until the work's processes are at rest: the loader of a loop that goes on fills its queues first."""
        for _ in range(_PAUSES):
            before = cpu_time(self._family)
            time.sleep(pause)
            now = cpu_time(self._family)
            if before is None or now is None or now.ours - before.ours < _AT_REST * pause:
                return

    def edge(self) -> float:
        """At both ends of the window: read every sensor at once, and again where it opens, since the rest takes its time. Returns when."""
        at = self.meter.mark()
        self._edges.append((time.monotonic(), cpu_time(self._family), throttled(self._gpus) if self._gpus else {}))
        if len(self._edges) == 1:
            self.meter.mark()
        return at

    def summary(
        self, begin: float, end: float, spans: Mapping[str, tuple[float, float]] | None = None, *, busy: bool = False
    ) -> NodeSummary:
        """What was read between two instants, which the edges enclose; without edges only the sensors know something.

        ``spans`` are further stretches, by name, of which the energy is wanted. ``busy``: as of ``Meter.energy``.
        """
        opened, closed = self._edges if len(self._edges) == 2 else [(0.0, None, {})] * 2
        apart = closed[0] - opened[0]  # more than the window where a user's loop did something else between its last step and its end
        share = share_of_others(opened[1], closed[1], apart, os.cpu_count() or 1)
        energy = self.meter.energy("measure", begin, end, self.idle, busy=busy)
        held_back, system = shares(opened[2], closed[2], apart), detect()
        further = {name: self.meter.energy(name, *span) for name, span in (spans or {}).items()}
        return NodeSummary(energy, self.idle, share, held_back, system.identity, system.cpu.model, environment(), further)


def why_no_sensor() -> str | None:
    """Why no power sensor can be read on this node; ``None`` if one can."""
    meter = Instruments().meter
    begin = meter.mark()
    found = bool(meter.channels)
    reason = None if found else meter.energy("none", begin, meter.mark()).reason
    meter.stop()
    return None if found else reason or "no power sensor"


def quiet_baseline(ranks: Ranks, instruments: Instruments | None, seconds: float) -> None:
    """Measure the idle power of every node while no rank of any does anything. Collective."""
    ranks.barrier()
    if instruments is not None:
        instruments.measure_idle(seconds)
    ranks.barrier()


def on_clock(energy: WindowEnergy | None, origin: float) -> WindowEnergy | None:
    """The same energy with its edges in seconds after ``origin``."""
    return None if energy is None else replace(energy, start=energy.start - origin, end=energy.end - origin)


def cpu_time(family: Collection[int], root: Path = host.ROOT) -> CpuTime | None:
    """A snapshot with ``family`` and its descendants as ours; ``None`` without a family, or where the kernel does not tell (no /proc)."""
    everyone = host.busy_seconds(root=root) if family else None
    return None if everyone is None else CpuTime(everyone, _family(root / "proc", family) / os.sysconf("SC_CLK_TCK"))


def cpu_time_of_children() -> CpuTime | None:
    """As :func:`cpu_time` for this process and the children that it has waited for, without a look at every process."""
    everyone = host.busy_seconds()
    return None if everyone is None else CpuTime(everyone, sum(os.times()[:4]))


def share_of_others(begin: CpuTime | None, end: CpuTime | None, seconds: float, cpus: int) -> float | None:
    """Share of ``cpus`` that others used in the ``seconds`` between two snapshots; ``None`` if one is missing, or the time is too short."""
    if begin is None or end is None or seconds * cpus * BUSY_SHARE * os.sysconf("SC_CLK_TCK") < _TICKS:
        return None
    others = (end.everyone - begin.everyone) - (end.ours - begin.ours)
    return max(others, 0.0) / (seconds * cpus)


def _family(proc: Path, roots: Collection[int]) -> int:
    """Clock ticks of processes and their descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(value) for value in fields[11:15])  # utime, stime, and those of children that were waited for
    return sum(value for pid, value in ticks.items() if _descends(pid, roots, parents))


def _descends(pid: int, roots: Collection[int], parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return pid in roots


# -- several nodes as one ----------------------------------------------------------------------------------------------


def put_together(nodes: Mapping[str, Sequence[NodeSummary]], ranks: Mapping[str, list[int]], window: Window) -> Nodes:
    """What the instruments of all nodes say of one window, on the record's clock. Nodes go by host and boot id, that of rank 0 first;
    several summaries of one count its sensors once."""
    names = _names(list(nodes))
    merged = {names[key]: _one(summaries) for key, summaries in nodes.items()}
    first = next(iter(merged.values()))
    used = {name: node.other_cpu_share for name, node in merged.items() if node.other_cpu_share is not None}
    held_back = {gpu: reasons for node in merged.values() for gpu, reasons in node.throttled.items()}
    if len(merged) == 1:
        return Nodes(first.energy, first.idle, _others(used, None), held_back, [], first.spans)
    energy = over_nodes({name: node.energy for name, node in merged.items()})
    idle = None
    if any(node.idle is not None for node in merged.values()):
        none = WindowEnergy("idle", 0.0, 1.0, reason=NO_BASELINE)
        known = [node.idle for node in merged.values() if node.idle is not None]
        idle = over_nodes({name: node.idle or none for name, node in merged.items()})
        idle.start, idle.end = (first.idle or known[0]).start, (first.idle or known[0]).end
    each = [
        Node(
            name=name,
            ranks=ranks.get(key, []),
            device=node.device,
            cpu=node.cpu,
            differs=_differs(first, node),
            energy=_alone(node.energy, node.energy.start - window.start),
            idle=_alone(node.idle, node.energy.start - window.start),
            other_cpu_share=node.other_cpu_share,
            throttled=node.throttled,
            versions=node.environment.get("versions", {}),
            state={part: node.environment.get(part) for part in ("cpu", "gpus")},
        )
        for (key, name), node in zip(names.items(), merged.values(), strict=True)
    ]
    spans = {name: over_nodes({node: one.spans.get(name, one.energy) for node, one in merged.items()}) for name in first.spans}
    return Nodes(energy, idle, _others(used, max(used, key=lambda name: used[name], default=None)), held_back, each, spans)


def _names(keys: Sequence[str]) -> dict[str, str]:
    """Host names where they tell nodes apart, else host and boot id."""
    hosts = [key.partition(":")[0] for key in keys]
    return {key: host if hosts.count(host) == 1 else key for key, host in zip(keys, hosts, strict=True)}


def _one(summaries: Sequence[NodeSummary]) -> NodeSummary:
    """The summary of one node by all its processes that read sensors."""
    if not summaries:
        return NodeSummary.unread(NO_PROCESS)
    idle = [summary.idle for summary in summaries if summary.idle is not None]
    spans = {name: of_one_node([each.spans[name] for each in summaries if name in each.spans]) for name in summaries[0].spans}
    energy = of_one_node([each.energy for each in summaries])
    return replace(summaries[0], energy=energy, idle=of_one_node(idle) if idle else None, spans=spans)


def _others(used: Mapping[str, float], scope: str | None) -> Metric:
    return Metric(value=max(used.values(), default=None), unit="1", scope=scope, reason=None if used else NO_SHARE)


def _differs(first: NodeSummary, node: NodeSummary) -> list[str]:
    """In what a node is not as the first; nothing of one that nobody looked at."""
    if not node.device:
        return []
    found = [] if node.device == first.device else [f"device: {node.device}, not {first.device}"]
    found += [] if node.cpu == first.cpu else [f"CPU: {node.cpu}, not {first.cpu}"]
    ours, theirs = first.environment.get("versions", {}), node.environment.get("versions", {})
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            found.append(f"{name} {theirs.get(name) or 'missing'}, not {ours.get(name) or 'missing'}")
    return found


def _alone(energy: WindowEnergy | None, origin: float) -> WindowEnergy | None:
    """A node's window without its channels, which the sum lists, on the record's clock."""
    shifted = on_clock(energy, origin)
    return None if shifted is None else replace(shifted, channels=[])
