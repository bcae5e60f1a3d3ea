"""What a sensor is, what it said, and what follows from it: plain data, units in every docstring.

Only the standard library is used, so these types can be embedded in a record or sent as JSON. A number that is not
known is ``None`` beside a ``reason``; it is never zero, NaN or infinite.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from caraml import METHOD_VERSION

Kind = Literal["energy", "power_instant", "power_mean", "apparent_va"]
"""``energy``: a counter [J]; ``power_instant``: power now [W]; ``power_mean``: power averaged by the sensor [W]; ``apparent_va``: product
of effective voltage and current of a supply [VA], beside the domain's power and never in place of it."""

UNITS: dict[Kind, str] = {"energy": "J", "power_instant": "W", "power_mean": "W", "apparent_va": "VA"}

Boundary = Literal["device", "module", "cpu", "node_dc", "node_ac"]
"""What a reading includes: an accelerator card; card plus host chip and memory on one module; processor packages and
their memory; the node behind its power supplies; the node in front of them."""

BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
HEADLINES: tuple[Boundary, ...] = ("device", "module", "cpu")
"""Which boundary the headline energy takes: the first of these that has a sensor."""

SOME = "some"
"""In place of names: what is measured uses some of several accelerators, and nobody tells which."""

Method = Literal["counter", "power_integral"]

ENERGY_FLAGS: dict[str, str] = {
    "no_source": "no sensor could be read; the reason says what would help",
    "unreadable": "a sensor exists but this user may not read it",
    "masked": "a sensor exists but is hidden from this container",
    "partial_coverage": "readings are missing in the window; `partial_j` is the energy of the part that was seen",
    "reset": "the counter started again inside the window",
    "frozen": "the sensor repeated one value for longer than its update period, or than it does elsewhere",
    "one_value": "one power was shown for half of the window or more, by a steady load or by a sensor of coarse steps that hangs",
    "beyond_limit": "the sensor showed more than any plausible power (three times the limit of a GPU, 60 kW of a node) for longer than it "
    "holds a value: it, its unit or the limit is wrong",
    "wrap_ambiguous": "the counter may have wrapped more often than the readings can tell",
    "too_short": "fewer than ten updates of the sensor fit into the window, it is shorter than twice the time by which those may be late, "
    "or has less energy than that may hide",
    "aliasing_possible": "a load that repeats with the sensor's own instants would not be noticed; repeat with another length of step",
    "mean_sensor": "the sensor shows a running mean, not the power of the instant",
    "module_scope": "the sensor includes more than the accelerator: its host chip or memory",
    "shared_device": "the sensor covers other users as well; `users` names them",
    "mig_parent": "the sensor speaks of the whole GPU, not of the partition that was used",
    "dual_die_parent": "the sensor speaks of both dies of the package",
    "counter_power_mismatch": "the counter and the integral of power differ by more than twice the sum of their bounds, and by more than "
    "10 %, or 45 % where the power sensor takes its values at regular instants of its own, with which a load may repeat",
    "clock_step": "the wall clock was set while the window was open; only the times of a CSV file are from it, which has no energy then",
    "suspended": "the machine was suspended inside the window",
    "estimated": "a model, not a sensor",
    "fake": "made up by a source for demonstrations",
}

BLOCKING = frozenset(
    ("no_source", "partial_coverage", "reset", "frozen", "wrap_ambiguous", "too_short", "counter_power_mismatch", "suspended", "estimated")
) | {"beyond_limit"}
"""Flags that make a number invalid. The others tell what the number means, not that it is wrong."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One stream of readings from one sensor, and all that is known about the sensor."""

    id: str
    """Stable across runs: made of a UUID, a PCI address or a path, never of an enumeration order alone."""
    source: str
    """Name of the source that reads it."""
    kind: Kind
    boundary: Boundary
    label: str
    """For people: model name or rail name."""
    domain: str
    """The thing whose energy this is. A counter and a power channel with the same domain are two views of one quantity."""
    hardware: str
    """Class of hardware (``nvidia``, ``amd``, ``cpu``, ``node`` ...). Two sources that see the same hardware at the same
    boundary are alternatives and are never added."""
    resolution: float = 0.0
    """Smallest step of the value [J or W]."""
    update_period_s: float = 0.0
    """Longest time that the sensor repeats itself before it shows a new value [s]. Readings are up to this old."""
    period_guessed: bool = False
    """Nobody publishes the update period of a power: where readings show that it is longer, that counts."""
    lag_s: float = 0.0
    """By how much more than its age a reading may be late where nobody publishes it [s]."""
    mean_window_s: float = 0.0
    """Time over which a ``power_mean`` averages [s]."""
    spacing_s: float = 0.0
    """Readings come by themselves, so far apart [s]; 0 where they come when the sensor is asked."""
    wrap_j: float | None = None
    """The counter returns to 0 here [J]; ``None`` if it is too wide to wrap."""
    max_power_w: float | None = None
    """No plausible power is higher [W]: tells a wrapped counter from a restarted one."""
    duty: float = 1.0
    """Share of time that the sensor observes; below 1 it is blind in between."""
    parent: str | None = None
    """Domain that already includes this one."""
    accuracy: float = 0.05
    """Systematic relative error of the sensor, from its data sheet or a study; 0.05 where nothing is published."""
    flags: tuple[str, ...] = ()
    """Flags that hold whenever this channel is used."""
    users: tuple[str, ...] = ()
    """Devices that share this sensor (two dies of a card, slices of a partitioned GPU, GPUs of a module); ``some`` where nobody tells
    which of those that the source shows are used."""
    spans_nodes: bool = False
    """Whether one number is that of all nodes of the job: it is then counted once."""
    meter: str = ""
    """By what the meter is known to every node that can read it; empty where only its own node can."""

    @property
    def age_s(self) -> float:
        """Expected age of a reading [s]: half an update period, plus half the averaging window."""
        return (self.update_period_s + self.mean_window_s) / 2

    @property
    def tail_s(self) -> float:
        """For how long after an instant readings may still tell of it [s]."""
        return self.age_s + self.lag_s


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of one sensor. A read that failed keeps its time, has no value and says why."""

    channel: str
    t_before: float
    """``time.monotonic()`` just before the sensor was asked [s]."""
    t_after: float
    """``time.monotonic()`` just after it answered [s]."""
    value: float | None
    """[J] for a counter, [W] for power, [VA] for apparent power; ``None`` if the read failed."""
    error: str | None = None


@dataclass(slots=True)
class ChannelEnergy:
    """Energy of one domain over one window, with what it is worth."""

    id: str
    """The domain, for example ``GPU-5a…`` or ``cpu:package-0``."""
    label: str
    source: str
    boundary: Boundary
    hardware: str
    parent: str | None = None
    method: Method | None = None
    energy_j: float | None = None
    """Gross energy [J]."""
    bound_j: float | None = None
    """Half-width [J]: the truth lies in ``energy_j ± bound_j`` in at least 95 % of windows, apart from ``accuracy``."""
    bound_parts: dict[str, float] = field(default_factory=dict)
    """What the bound consists of [J]; its sum is ``bound_j``."""
    accuracy: float | None = None
    """Systematic relative error of the sensor, the same in every window; not part of ``bound_j``."""
    mean_w: float | None = None
    peak_w: float | None = None
    """Highest power that was read, or that a counter showed between two readings [W]."""
    mean_va: float | None = None
    """Mean apparent power [VA], where the sensor has it."""
    bound_va: float | None = None
    """Half-width of ``mean_va`` [VA], as ``bound_j`` is of the energy."""
    peak_va: float | None = None
    va_reason: str | None = None
    """Why a sensor of apparent power gave none."""
    idle_w: float | None = None
    """Mean power of the same domain in the idle window [W]."""
    idle_j: float | None = None
    """``idle_w`` times the duration [J]."""
    net_j: float | None = None
    """``energy_j - idle_j`` [J]."""
    net_bound_j: float | None = None
    """Half-width of ``net_j`` [J]: the bound plus the idle window's, scaled to this duration."""
    crosscheck_ratio: float | None = None
    """Integral of power over counter difference, where the sensor offers both."""
    partial_j: float | None = None
    """Energy of the part that was covered [J], where ``energy_j`` is ``None`` because the sensor went silent."""
    readings: int = 0
    """Readings inside the window."""
    missed: int = 0
    """Reads that failed, ticks that were skipped, and readings that are none, as beyond any plausible power, inside the window."""
    coverage: float = 0.0
    """Share of the window that the readings cover (0 to 1)."""
    users: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    reason: str | None = None
    spans_nodes: bool = False
    """Whether this is the energy of all nodes of the job."""
    meter: str = ""
    """By what the meter is known to every node that can read it; empty where only its own node can."""


@dataclass(slots=True)
class BoundaryEnergy:
    """Sum over the domains of one boundary that do not contain each other."""

    energy_j: float | None = None
    bound_j: float | None = None
    idle_j: float | None = None
    net_j: float | None = None
    net_bound_j: float | None = None
    mean_w: float | None = None
    peak_w: float | None = None
    """Sum of the domains' peaks [W]; they need not have come at the same time, so this is an upper value."""
    mean_va: float | None = None
    """Sum of the domains' mean apparent powers [VA]: what the supplies must be laid out for."""
    bound_va: float | None = None
    peak_va: float | None = None
    va_reason: str | None = None
    """Why it is not known, where a domain's sensor has it."""
    partial_j: float | None = None
    channels: list[str] = field(default_factory=list)
    """Domains that were added."""
    accuracy: float | None = None
    valid: bool = False
    reason: str | None = None


@dataclass(slots=True)
class WindowEnergy:
    """All that is known about the energy between two instants."""

    name: str
    start: float
    """``time.monotonic()`` [s]."""
    end: float
    channels: list[ChannelEnergy] = field(default_factory=list)
    boundaries: dict[str, BoundaryEnergy] = field(default_factory=dict)
    valid: bool = False
    """True if at least one boundary has a number and none of its channels has a blocking flag."""
    flags: list[str] = field(default_factory=list)
    reason: str | None = None
    interval_s: float | None = None
    """Sampling interval [s]."""
    start_unix: float | None = None
    """Wall time of ``start`` [s since 1970], for people and for merging; no energy is computed from it."""
    node: str | None = None
    """Host and boot id: readings of one node have one clock and are counted once."""
    method_version: str = str(METHOD_VERSION)

    @property
    def duration_s(self) -> float:
        return self.end - self.start

    def sensed(self, *boundaries: str) -> tuple[str, BoundaryEnergy] | None:
        """The first of these boundaries that has a sensor, with its name; ``None`` where none has.

        It has no number where one of its sensors went silent: the energy of another boundary would be that of something else.
        """
        return next(((name, self.boundaries[name]) for name in boundaries if name in self.boundaries), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def window_from_dict(data: dict[str, Any]) -> WindowEnergy:
    """The inverse of ``WindowEnergy.to_dict``."""
    fields = dict(data)
    fields["channels"] = [ChannelEnergy(**channel) for channel in data.get("channels", [])]
    fields["boundaries"] = {name: BoundaryEnergy(**boundary) for name, boundary in data.get("boundaries", {}).items()}
    return WindowEnergy(**fields)
