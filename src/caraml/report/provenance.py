"""What every number means and where it comes from, in words: for hovers in the page and for ``caraml show``."""

from __future__ import annotations

from caraml.base.format import count, human
from caraml.metrics.definitions import METRICS
from caraml.metrics.model import Metric
from caraml.power.model import ENERGY_FLAGS, HEADLINES, ChannelEnergy
from caraml.report.numbers import interval, plain
from caraml.report.section import Section
from caraml.results.record import FLAGS, Profile, Record
from caraml.worker.command_record import NO_ENERGY

ENERGY_FIX = "run caraml doctor: it names the sensors of this machine, what is missing and the command that would fix it"


def definition(name: str) -> str:
    """What a metric is."""
    known = METRICS.get(name)
    return known.definition if known else "This version of CARAML has no definition of this metric."


def costliest(profile: Profile) -> Section:
    """What a trace shows: a row for each of the kernels or operators that took longest."""
    notes = [profile.reason] if profile.reason else []
    if profile.seconds is None:
        return Section("Profile", notes=notes or ["no trace"])
    work = f"{count(profile.steps, 'step')} after the window, {profile.micro_batches:,} micro-batches"
    notes.insert(0, f"rank 0, {work} in {human(profile.seconds, 's')}; being traced, they take longer than steps of the window")
    rows = [(f"{100 * one.share:.1f} %", human(one.seconds, "s"), f"{one.calls:,}", one.name) for one in profile.costliest]
    return Section(f"Costliest {profile.of}", ("share", "time", "calls", profile.of[:-1]), rows, notes)


def flag_meaning(flag: str) -> str:
    """What a flag of a record or of an energy says."""
    return FLAGS.get(flag) or ENERGY_FLAGS.get(flag) or "this version of CARAML has no explanation of this flag"


def flag_text(record: Record, flag: str) -> str:
    """What a flag says of this record, with the numbers behind it where there are any."""
    bound = record.metrics.get("throughput_without_wait")
    if flag != "input_bound" or bound is None or bound.value is None:
        return flag_meaning(flag)
    return f"{flag_meaning(flag)} ({bound.reason}; without the wait {human(bound.value, bound.unit)})"


def window_text(record: Record) -> str:
    """The window of a record: when, how long, how many steps."""
    window = record.window
    if window is None:
        return "no window: nothing was measured"
    last = window.first_step + window.steps - 1
    steps = f"{count(window.steps, 'step')} ({window.first_step} to {last})"
    text = f"window from {window.start:,.2f} s to {window.end:,.2f} s after the start, {window.seconds:,.3f} s long, {steps}"
    if window.shortest_seen is None or window.longest_seen is None:
        return text
    return f"{text}; its intervals speak of changes that take {human(window.shortest_seen, 's')} to {human(window.longest_seen, 's')}"


def uncertainty(name: str, metric: Metric) -> str:
    """The interval of a metric, and its bound."""
    ends = interval(name, metric)
    text = "no interval" if ends is None else f"95 % confidence interval {ends}"
    text += f", n = {metric.n}" if metric.n else ""
    if metric.bound is None:
        return text
    return f"{text}; off by at most {plain(name, metric.bound, metric.unit, 2)} besides (sensor's systematic error not included)"


def source(record: Record, name: str) -> str:
    """The formula or sensor behind a metric, with the figures that went in."""
    if record.window is None:
        return "not measured"
    known = METRICS.get(name)
    if known is None:
        return "not described"
    return f"{known.of(record)}; {sensors(record)}" if known.sensor else known.of(record)


def energy_reason(record: Record) -> str | None:
    """Why there is no energy, or ``None`` if there is."""
    metric = record.metrics.get("energy_per_item")
    if record.window is None or (metric is not None and metric.value is not None):
        return None
    return (metric.reason if metric is not None else None) or "energy was not measured"


def no_energy(reason: str) -> tuple[str, str]:
    """What a table says of an energy that is missing for this reason, in two words, and in full with what would help."""
    return ("not asked", reason) if reason == NO_ENERGY else ("no sensor", f"{reason}; {ENERGY_FIX}")


def sensors(record: Record) -> str:
    """Which channels the headline energy adds, read by what, with which method."""
    headline = record.energy.sensed(*HEADLINES) if record.energy is not None else None
    if record.energy is None or headline is None:
        return "no sensor"
    name, boundary = headline
    used = [channel for channel in record.energy.channels if channel.id in boundary.channels and channel.boundary == name]
    return f"boundary {name}: " + (" + ".join(map(channel_text, used)) or "channels not recorded")


def channel_text(channel: ChannelEnergy) -> str:
    """A channel's sensor and method."""
    method = {"counter": "energy counter", "power_integral": "integral of power"}.get(channel.method or "", "no method")
    accuracy = f", systematic error up to {100 * channel.accuracy:g} %" if channel.accuracy is not None else ""
    return f"{channel.label} ({channel.id}) by {channel.source}, {method}{accuracy}"
