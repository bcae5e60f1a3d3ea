"""Several nodes as one: the sum of their energies, each node by itself, and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from caraml.engine.instruments import BUSY_SHARE, NodeSummary, on_clock
from caraml.metrics.model import Metric, Window
from caraml.power.merge import of_one_node, over_nodes
from caraml.power.model import WindowEnergy
from caraml.results.record import Node
from caraml.system.nvml import Throttled, slowed_down

NO_BASELINE = "no idle baseline was measured"
NO_PROCESS = "no process of this node reads its sensors"
NO_SHARE = (
    "the kernel does not tell (no /proc/stat), the window had no edges or was shorter than the ticks of the kernel's clock, "
    "or processes of the program may be Slurm's"
)


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


def put_together(nodes: Mapping[str, Sequence[NodeSummary]], ranks: Mapping[str, list[int]], window: Window) -> Nodes:
    """What the instruments of all nodes say of one window.

    Args:
        nodes: summaries by node (host and boot id), the node of rank 0 first; several of one node count its sensors once.
        ranks: numbers of the ranks on each node.
        window: the window on the record's clock.
    """
    names = _names(list(nodes))
    merged = {names[key]: _one(summaries) for key, summaries in nodes.items()}
    first = next(iter(merged.values()))
    shares = {name: node.other_cpu_share for name, node in merged.items() if node.other_cpu_share is not None}
    throttled = {gpu: reasons for node in merged.values() for gpu, reasons in node.throttled.items()}
    if len(merged) == 1:
        return Nodes(first.energy, first.idle, _others(shares, None), throttled, [], first.spans)
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
    return Nodes(energy, idle, _others(shares, max(shares, key=lambda name: shares[name], default=None)), throttled, each, spans)


def _names(keys: Sequence[str]) -> dict[str, str]:
    """Host names where they tell nodes apart, else host and boot id."""
    hosts = [key.partition(":")[0] for key in keys]
    return {key: host if hosts.count(host) == 1 else key for key, host in zip(keys, hosts, strict=True)}


def _one(summaries: Sequence[NodeSummary]) -> NodeSummary:
    """The summary of one node by all its processes that read sensors."""
    if not summaries:
        return NodeSummary(WindowEnergy("measure", 0.0, 1.0, flags=["no_source"], reason=NO_PROCESS))
    idle = [summary.idle for summary in summaries if summary.idle is not None]
    spans = {name: of_one_node([each.spans[name] for each in summaries if name in each.spans]) for name in summaries[0].spans}
    energy = of_one_node([each.energy for each in summaries])
    return replace(summaries[0], energy=energy, idle=of_one_node(idle) if idle else None, spans=spans)


def _others(shares: Mapping[str, float], scope: str | None) -> Metric:
    return Metric(value=max(shares.values(), default=None), unit="1", scope=scope, reason=None if shares else NO_SHARE)


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
