"""What every number means and where it comes from, in words: for hovers in the page and for ``caraml show``."""

from __future__ import annotations

from collections.abc import Callable

from caraml.power.model import HEADLINES, ChannelEnergy
from caraml.report.numbers import count, interval, plain
from caraml.results.record import FLAGS, Metric, Peak, Record
from caraml.units import METRICS, human

ENERGY_FIX = "run caraml doctor: it names the sensors of this machine, what is missing and the command that would fix it"

POWER_FLAGS: dict[str, str] = {
    "no_source": "no sensor could be read; the reason says what would help",
    "unreadable": "a sensor exists but this user may not read it",
    "masked": "a sensor exists but is hidden from this container",
    "partial_coverage": "readings are missing in the window; `partial_j` is the energy of the part that was seen",
    "reset": "the counter started again inside the window",
    "frozen": "the sensor repeated one value for longer than its update period",
    "wrap_ambiguous": "the counter may have wrapped more often than the readings can tell",
    "too_short": "fewer than ten updates of the sensor fit into the window",
    "aliasing_possible": "a load that repeats with the sensor's own instants would not be noticed; repeat with another length of step",
    "mean_sensor": "the sensor shows a running mean, not the power of the instant",
    "module_scope": "the sensor includes more than the accelerator: its host chip or memory",
    "shared_device": "the sensor covers other users as well; `users` names them",
    "mig_parent": "the sensor speaks of the whole GPU, not of the partition that was used",
    "dual_die_parent": "the sensor speaks of both dies of the package",
    "counter_power_mismatch": "the counter and the integral of power differ by more than 10 % and by more than their bounds",
    "clock_step": "the wall clock was set while the window was open; nothing is computed from it",
    "suspended": "the machine was suspended inside the window",
    "estimated": "a model, not a sensor",
    "fake": "made up by a source for demonstrations",
}


def definition(name: str) -> str:
    """What a metric is."""
    known = METRICS.get(name)
    return known.definition if known else "This version of CARAML has no definition of this metric."


def flag_meaning(flag: str) -> str:
    """What a flag of a record or of an energy says."""
    return FLAGS.get(flag) or POWER_FLAGS.get(flag) or "this version of CARAML has no explanation of this flag"


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
    if name in ENERGY:
        return f"{ENERGY[name]}; {sensors(record)}"
    return SOURCES[name](record) if name in SOURCES else "not described"


def energy_reason(record: Record) -> str | None:
    """Why there is no energy, or ``None`` if there is."""
    metric = record.metrics.get("energy_per_item")
    if record.window is None or (metric is not None and metric.value is not None):
        return None
    return (metric.reason if metric is not None else None) or "energy was not measured"


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


def _timer(record: Record) -> str:
    if record.point.device_class == "gpu":
        return "a chain of device events, read after the window"
    return "the monotonic clock around each step"


def _steps(record: Record) -> str:
    return f"{record.files.get('steps', 'step table')}, phase measure, slowest rank of each step; timed by {_timer(record)}"


def _throughput(record: Record) -> str:
    assert record.window is not None
    amount = f"{record.window.items:,} {record.item}s / {record.window.seconds:,.3f} s"
    if record.point.workload == "command":
        return f"{amount}, of one run of the program"
    return f"{amount}; the interval is that of the mean step time ({_estimate(record)})"


def _estimate(record: Record) -> str:
    """Where the interval of the mean step time comes from; records that do not say what they could see are older."""
    older = record.window is None or record.window.longest_seen is None
    return "the wider of batch means and AR(1)" if older else "from the slowest changes of the steps"


def _flops(record: Record) -> str:
    facts = record.facts
    if facts is None or facts.flops_per_item is None:
        return "the workload gives no FLOPs"
    return f"{plain('', facts.flops_per_item, 'FLOP')} per {facts.item} ({facts.flops_formula}) × throughput per device"


def _hardware(record: Record) -> str:
    flops = record.facts.hardware_flops_per_item if record.facts else None
    return f"{plain('', flops, 'FLOP')} per {record.item}" if flops is not None else "not given"


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


def _memory(record: Record) -> str:
    return (
        "device allocator, highest over ranks" if record.point.device_class == "gpu" else "resident set of the process, highest over ranks"
    )


def _bandwidth(record: Record) -> str:
    assert record.window is not None
    each = record.facts.bytes_per_sample if record.facts else None
    return f"{record.window.samples:,} samples × {each} B / {record.window.seconds:,.3f} s"


def _clock(record: Record) -> str:
    return "monotonic clock of the worker, device synchronised"


def _losses(record: Record) -> str:
    return f"training loss of every step in {record.files.get('steps', 'the step table')}, warm-up included"


SOURCES: dict[str, Callable[[Record], str]] = {
    "throughput": _throughput,
    "throughput_per_device": lambda record: f"throughput / {count(record.point.world, 'device')}",
    "window_time": lambda record: "monotonic clock, device synchronised at both ends",
    "steps": lambda record: "counted",
    **dict.fromkeys(("step_time_median", "step_time_p5", "step_time_p95", "step_time_min", "step_time_max"), _steps),
    "step_time_mean": lambda record: f"window time / steps; interval: {_estimate(record)}",
    "first_step_time": _clock,
    "time_to_first_step": _clock,
    "data_wait_share": lambda record: "host time in the loader's next call / window time, largest over ranks",
    "other_cpu_share": lambda record: "CPU time that the kernel counts for all processes, less that of the worker's own",
    "achieved_flops_per_device": _flops,
    "mfu": lambda record: _peak(record.peak_datasheet),
    "mfu_measured": lambda record: _peak(record.peak_measured),
    "hfu": lambda record: f"FLOP/s per device with what is computed again ({_hardware(record)}); {_peak(record.peak_datasheet)}",
    "memory_traffic": lambda record: f"{_traffic(record)}; times the rates of items and steps per device",
    "arithmetic_intensity": lambda record: f"FLOPs per item / bytes per item; {_traffic(record)}",
    "share_of_limit": lambda record: f"{_peak(record.peak_measured)}; {_stream(record)}; {_traffic(record)}",
    **dict.fromkeys(
        ("slowest_rank", "rank_imbalance"), lambda record: f"{record.files.get('steps', 'step table')}: mean step of each rank"
    ),
    "input_bandwidth": _bandwidth,
    "peak_memory": _memory,
    "loss_first": _losses,
    "loss_last": _losses,
    "runtime": lambda record: (
        "monotonic clock, from the program's start to its end"
        if record.point.workload == "command"
        else "monotonic clock, from the start of the worker's process"
    ),
    "training_time": lambda record: "sum of all step times, the slowest rank of each step",
    "loading_time": lambda record: "phase `data`, plus host time in the loader's next call over all steps, largest over ranks",
    "throughput_without_wait": lambda record: "throughput / (1 - data wait); input-bound if the wait is above 10 % of the window",
    "staging_time": lambda record: "monotonic clock around copying or unpacking, on the process that did it",
    "epoch_time": lambda record: "training part and validation of the counted epoch, ranks synchronised at both ends",
    "epoch_training_time": lambda record: "training part of the counted epoch, ranks synchronised at both ends",
    "epoch_validation_time": lambda record: "epoch − its training part",
    "batch_time_median": lambda record: f"{_steps(record)}, first and last batch of the epoch left out",
    "throughput_first_epoch": lambda record: "items of the epoch / its training part",
    "throughput_later_epochs": lambda record: "items of the epochs / their training parts",
    "accuracy_validation": lambda record: "counted over all held-out samples on all ranks, after the last epoch",
    "time_to_solution": lambda record: "monotonic clock, from before the first step until after the last validation; the slowest rank's",
    "run_time": lambda record: "monotonic clock, from the phase `build` until after `save_model`",
    "saving_time": lambda record: "phase `save_model`: weights written and flushed to the disk, then removed",
    "loading_share": lambda record: "loading time / runtime",
    "training_share": lambda record: "(training time - waits for batches) / runtime",
    "rest_share": lambda record: "1 - loading share - training share",
    **dict.fromkeys(
        ("epoch_time_mean", "epoch_time_min", "epoch_time_max", "epoch_time_first"),
        lambda record: "steps of an epoch, from steps.parquet; projected from the window's mean step where no epoch was whole",
    ),
    "loss_validation": lambda record: "mean over 16 held-out batches at most, after the last step; over all of them in a run by epochs",
    "peak_host_memory": lambda record: "highest resident set (getrusage), largest over ranks",
}

ENERGY: dict[str, str] = {
    "energy_to_solution": "energy between the two time stamps of the time to solution",
    "run_energy": "energy between the two time stamps of the run",
    "run_node_energy": "sensors of whole nodes, between the two time stamps of the run",
    "action": "run energy of the nodes × run time",
    "energy_per_epoch": "energy per item × items of the nominal epoch (epoch_items of the record's facts) / 3600",
    "energy_per_epoch_per_device": "energy per epoch / devices",
    "energy": "energy between the window's two time stamps",
    "energy_net": "energy − idle power × window time",
    "energy_per_item": "energy / items of the window",
    "items_per_watt_hour": "items of the window × 3600 / energy",
    "mean_power": "energy / window time",
    "idle_power": "mean of the powers before the work and after it",
    "energy_time_product": "energy × window time",
    "device_energy": "sum over the devices",
    "node_energy": "sensor of the whole node",
    "max_device_power": "largest peak of any device",
    "max_aggregate_power": "sum of the devices' peaks",
    "aggregate_power": "energy of the devices / window time",
}
