"""What reports are made of: numbers with their uncertainty, ``1,234 ± 5 token/s``, what they mean and where they come from; sections with a
table, prose and figures, and how each looks in a terminal and as Markdown.

The templates of the page render the same sections as HTML.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import JsonValue

from caraml.analysis.estimate import is_known_kind
from caraml.base.chart import Drawing, Key
from caraml.base.format import count, human, prefixed, printable, significant
from caraml.metrics.model import METRICS, Metric, Peak, definition_of
from caraml.power.model import ENERGY_FLAGS, HEADLINES, ChannelEnergy
from caraml.results.record import FLAGS, Profile, Record

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class ReportFigure:
    """One or more drawings with a legend in common, and their numbers as a table. Texts are still to be escaped."""

    title: str
    drawings: Sequence[Drawing]
    legend: Sequence[str]
    """Names of the series; the place of each decides its colour, dash and shape."""
    key: Key
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def slug(self) -> str:
        """The title as the beginning of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:80] or "figure"


@dataclass(frozen=True)
class Section:
    """A heading, a table, sentences below it, and figures; any of them may be empty."""

    title: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    figures: Sequence[ReportFigure] = ()
    id: str = ""
    """Its address on the page."""


def terminal(sections: Iterable[Section]) -> RenderableType:
    """Sections for a terminal, without their figures."""
    from rich.console import Group
    from rich.text import Text

    from caraml.report.tables import plain_table

    parts: list[RenderableType] = []
    for section in sections:
        if section.title:
            parts.append(Text(printable(section.title), style="bold"))
        if section.rows:
            parts.append(plain_table(section.columns, section.rows))
        parts += [Text(printable(note)) for note in section.notes]
        parts.append(Text(""))
    return Group(*parts)


def markdown(sections: Iterable[Section]) -> str:
    """Sections as Markdown; of figures, title, numbers and note."""
    parts: list[str] = []
    for section in sections:
        parts += [f"## {escaped_markdown(section.title)}"] if section.title else []
        parts += [_md_table(section.columns, section.rows)] if section.rows else []
        parts += ["\n".join(f"- {escaped_markdown(note)}" for note in section.notes)] if section.notes else []
        for figure in section.figures:
            parts += [
                f"### {escaped_markdown(figure.title)}",
                _md_table(figure.columns, figure.rows),
                *([escaped_markdown(figure.note)] if figure.note else []),
            ]
    return "\n\n".join(parts) + "\n"


def _md_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(row)} |"
        for row in ([*map(escaped_markdown, columns)], ["---"] * len(columns), *(map(escaped_markdown, row) for row in rows))
    )


def escaped_markdown(text: str) -> str:
    """Text that Markdown shows as it is: neither markup nor HTML nor the end of a cell."""
    return re.sub(r"([\\`*_{}\[\]|#!~])", r"\\\1", html.escape(printable(" ".join(text.split())), quote=False))


# -- numbers -----------------------------------------------------------------------------------------------------------


PERCENT_FROM = 100.0
MOST_DECIMALS = 3
"""From this half-width on, or with more decimals than that, a percentage is shorter and clearer than the absolute figure."""

WIDE, LOPSIDED = 0.1, 1.2
"""Half-width over value, and longer over shorter side, from which both ends of an interval are written."""


def counted(value: float, unit: str) -> tuple[float, str]:
    """Like :func:`~caraml.base.format.prefixed`, and for counts a power of ten that leaves at most four digits before the point."""
    factor, written = prefixed(value, unit)
    if factor != 1.0 or value < 1e4:
        return factor, written
    return (1e6, f"10⁶ {written}".rstrip()) if value >= 1e7 else (1e3, f"10³ {written}".rstrip())


def half_width(metric: Metric) -> float | None:
    """The larger distance from the value to an end of its interval, in the metric's unit."""
    if metric.value is None or metric.low is None or metric.high is None:
        return None
    return max(metric.value - metric.low, metric.high - metric.value)


def written(name: str, metric: Metric | None) -> str:
    """A metric as people read it, with its interval and, apart from it, its bound, where it has them; ``–`` if unknown.

    A rate, time or energy of which neither is known has ``± ?``: its digits look better known than they are.
    """
    if metric is None or metric.value is None:
        return "–"
    factor, unit = _scale(name, metric.value, metric.unit)
    if half_width(metric) is None and not metric.bound and is_known_kind(name):
        return f"{_rounded(metric.value / factor, 3)} ± ? {unit}".rstrip()
    return _with_interval(name, metric) + at_most(name, metric)


def at_most(name: str, metric: Metric) -> str:
    """The bound of a metric, to stand behind its number; nothing without one."""
    if metric.value is None or not metric.bound:
        return ""
    factor, unit = _scale(name, metric.value, metric.unit)
    bound = metric.bound / factor
    return f", ± at most {_rounded(bound, _error_digits(bound))} {unit}".rstrip()


def _with_interval(name: str, metric: Metric) -> str:
    """With ±, or with both ends where ± would mislead: of a wide interval whose ends lie at different distances from the value."""
    assert metric.value is not None
    half = half_width(metric)
    if not half or metric.low is None or metric.high is None:
        return plain(name, metric.value, metric.unit)
    factor, unit = _scale(name, metric.value, metric.unit)
    value, low, high, half = (number / factor for number in (metric.value, metric.low, metric.high, half))
    if half > WIDE * abs(value) and half > LOPSIDED * min(value - low, high - value):
        return f"{_rounded(value, 2)} ({_rounded(low, 2)} to {_rounded(high, 2)}) {unit}".rstrip()
    decimals = max(0, _error_digits(half) - 1 - math.floor(math.log10(half)))
    if (half >= PERCENT_FROM or decimals > MOST_DECIMALS) and value and unit != "%":
        share = 100 * half / abs(value)
        return f"{_rounded(value, 4)} ± {_rounded(share, _error_digits(share))} % {unit}".rstrip()
    return f"{value:,.{decimals}f} ± {half:,.{decimals}f} {unit}".rstrip()


def plain(name: str, value: float | None, unit: str, digits: int | None = None) -> str:
    """A number without uncertainty."""
    if value is None:
        return "–"
    if _shown(name) == "count":
        return f"{value:,.0f}"
    factor, unit = _scale(name, value, unit)
    return f"{_rounded(value / factor, digits or _digits(value / factor))} {unit}".rstrip()


def interval(name: str, metric: Metric) -> str | None:
    """Both ends of a metric's interval, or ``None`` if it has none."""
    if metric.low is None or metric.high is None or metric.value is None:
        return None
    factor, unit = _scale(name, metric.value, metric.unit)
    low, high = metric.low / factor, metric.high / factor
    if high == low:
        return f"{_rounded(low, 4)} {unit}".rstrip()
    decimals = max(0, 1 - math.floor(math.log10(abs(high - low))))  # two digits of the difference
    return f"{low:,.{decimals}f} to {high:,.{decimals}f} {unit}".rstrip()


def _shown(name: str) -> str:
    return METRICS[name].shown if name in METRICS else "plain"


def _scale(name: str, value: float, unit: str) -> tuple[float, str]:
    return (0.01, "%") if _shown(name) == "percent" else prefixed(value, unit)


def _rounded(value: float, digits: int) -> str:
    """Rounded before it is written, so that 99.99 becomes 100 and not 100.0."""
    return significant(float(f"{value:.{digits}g}"), digits)


def _digits(value: float) -> int:
    """Three significant digits, but never a rounded thousand: 1,234 and not 1,230."""
    return 3 if abs(value) < 999.5 else 4


def _error_digits(half: float) -> int:
    """One digit of an uncertainty, two if the first is a 1, as is usual in physics."""
    return 2 if half / 10 ** math.floor(math.log10(half)) < 1.95 else 1


def flat(values: Mapping[str, JsonValue], prefix: str = "") -> list[tuple[str, str]]:
    """``{"cpu": {"cores": 8}}`` as ``("cpu.cores", "8")``.

    What is null or empty is left out; the elements of a list of tables are numbered.
    """
    lines: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
            lines += flat({str(index): element for index, element in enumerate(value)}, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            lines.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return lines


def costliest(profile: Profile) -> Section:
    """What a trace shows: a row for each of the kernels or operators that took longest."""
    notes = [profile.reason] if profile.reason else []
    if profile.seconds is None:
        return Section("Profile", notes=notes or ["no trace"])
    work = f"{count(profile.steps, 'step')} after the window, {count(profile.micro_batches, 'micro-batch')}"
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
    seen = f"changes that take {human(window.shortest_seen, 's')} to {human(window.longest_seen, 's')}"
    return f"{text}; its intervals speak of {seen}: slower ones, and what changes from run to run, are not in them"


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
        return f"the table {table}" if (table := record.environment.get("imported_from")) else "not measured"
    known = definition_of(name, [record])
    metric = record.metrics.get(name)
    boundaries = [metric.scope] if metric is not None and metric.scope else HEADLINES
    told = _SOURCES[name](record) if name in _SOURCES else known.source
    return "; ".join(filter(None, (told, sensors(record, *boundaries) if known.sensor else ""))) or known.definition


def _rate(record: Record) -> str:
    assert record.window is not None
    amount = f"{record.window.items:,} {record.item}s / {record.window.seconds:,.3f} s"
    if record.point.workload == "command":
        return f"{amount}, of one run of the program"
    return f"{amount}; the interval is that of the mean step time ({_step_interval(record)})"


def _step_interval(record: Record) -> str:
    """Where the interval of the mean step time comes from; records that do not say what they could see are older."""
    older = record.window is None or record.window.longest_seen is None
    return "the wider of batch means and AR(1)" if older else "from the slowest changes of the steps"


def _step_table(record: Record) -> str:
    """The source of metrics that are made of the window's single steps."""
    gpu = record.point.device_class == "gpu"
    timer = "a chain of device events, read after the window" if gpu else "the monotonic clock around each step"
    whose = "slowest rank of each step" if record.point.in_step else "the slowest rank"
    return f"{record.files.get('steps', 'step table')}, phase measure, {whose}; timed by {timer}"


def _flops(record: Record) -> str:
    facts = record.facts
    if facts is None or facts.flops_per_item is None:
        return "the workload gives no FLOPs"
    return f"{human(facts.flops_per_item, 'FLOP', 4)} per {facts.item} ({facts.flops_formula}) × throughput per device"


def _hardware(record: Record) -> str:
    flops = record.facts.hardware_flops_per_item if record.facts else None
    return f"{human(flops, 'FLOP', 4)} per {record.item}" if flops is not None else "not given"


def _peak(peak: Peak | None) -> str:
    if peak is None or peak.value is None:
        return f"no peak: {peak.reason if peak and peak.reason else 'unknown'}"
    kinds = "".join(f"; {kernel} {human(rate, 'FLOP/s')}" for kernel, rate in list(peak.by_kernel.items())[1:])
    return f"FLOP/s per device / {human(peak.value, 'FLOP/s')} for {peak.dtype} ({peak.source or 'source not recorded'}{kinds})"


def _stream(record: Record) -> str:
    found = record.bandwidth_measured
    if found is None or found.value is None:
        return f"no bandwidth: {found.reason if found and found.reason else 'not measured'}"
    text = f"bandwidth {human(found.value, 'B/s')} ({found.source or 'source not recorded'})"
    cache, share = record.cache_measured, record.facts.cached_traffic_share if record.facts else None
    if cache is None or cache.value is None or not share:
        return text
    return f"{text}; {human(cache.value, 'B/s')} for the {share:.0%} of it that the cache can hold ({cache.source})"


def _traffic(record: Record) -> str:
    facts = record.facts
    if facts is None or facts.traffic_per_item is None:
        return "the workload does not estimate its bytes"
    rest = f" and {human(facts.traffic_per_step, 'B')} per step" if facts.traffic_per_step else ""
    return f"estimated {facts.traffic_per_item:,.0f} B per {facts.item}{rest}: each kernel reads and writes once, 4 bytes a number"


_HELD_OUT = "held-out data after the last step: 16 batches at most, all of it in a run by epochs; the interval is that of the sample"
_SOURCES: dict[str, Callable[[Record], str]] = {
    "throughput": _rate,
    "step_time_mean": lambda record: f"window time / steps; interval: {_step_interval(record)}",
    **dict.fromkeys(("step_time_median", "step_time_p5", "step_time_p95", "step_time_min", "step_time_max"), _step_table),
    "batch_time_median": _step_table,
    "achieved_flops_per_device": _flops,
    "mfu": lambda record: _peak(record.peak_datasheet),
    "mfu_measured": lambda record: _peak(record.peak_measured),
    "hfu": lambda record: f"FLOP/s per device with what is computed again ({_hardware(record)}); {_peak(record.peak_datasheet)}",
    "memory_traffic": lambda record: f"{_traffic(record)}; times the rates of items and steps per device",
    "arithmetic_intensity": lambda record: f"FLOPs per item / bytes per item; {_traffic(record)}",
    "share_of_limit": lambda record: f"{_peak(record.peak_measured)}; {_stream(record)}; {_traffic(record)}",
    **dict.fromkeys(("psnr", "ssim", "ms_ssim", "exact_match", "f1"), lambda _: _HELD_OUT),
}
"""What is behind the numbers of a run, where figures of the run belong into it; of any other metric, its definition says it."""


def energy_reason(record: Record) -> str | None:
    """Why there is no energy, or ``None`` if there is."""
    metric = record.metrics.get("energy_per_item")
    if record.window is None or (metric is not None and metric.value is not None):
        return None
    return (metric.reason if metric is not None else None) or "energy was not measured"


def sensors(record: Record, *boundaries: str) -> str:
    """Which channels the energy of the first of these boundaries adds, read by what, with which method."""
    sensed = record.energy.sensed(*boundaries) if record.energy is not None else None
    if record.energy is None or sensed is None:
        return "no sensor"
    name, boundary = sensed
    used = [channel for channel in record.energy.channels if channel.id in boundary.channels and channel.boundary == name]
    return f"boundary {name}: " + (" + ".join(map(channel_text, used)) or "channels not recorded")


def channel_text(channel: ChannelEnergy) -> str:
    """A channel's sensor and method."""
    method = {"counter": "energy counter", "power_integral": "integral of power"}.get(channel.method or "", "no method")
    accuracy = f", systematic error up to {100 * channel.accuracy:g} %" if channel.accuracy is not None else ""
    return f"{channel.label} ({channel.id}) by {channel.source}, {method}{accuracy}"
