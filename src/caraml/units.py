"""The vocabulary of numbers: every metric's name, unit, meaning, and which direction is better.

Tables, the HTML page and ``caraml show`` all take titles and definitions from here, so that a number reads the same everywhere.
``{item}`` in a unit stands for what the workload counts: ``token``, ``image``, ``sample``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Direction = Literal["higher", "lower", "neither"]

JOULES_PER_WATT_HOUR = 3600.0
GIB = 1024.0**3


@dataclass(frozen=True)
class MetricDefinition:
    """What a metric's name means."""

    title: str
    unit: str
    better: Direction
    definition: str


METRICS: dict[str, MetricDefinition] = {
    "throughput": MetricDefinition(
        "Throughput", "{item}/s", "higher", "Items trained in the window, over all devices, divided by the window's wall time."
    ),
    "throughput_per_device": MetricDefinition(
        "Throughput per device", "{item}/s", "higher", "Throughput divided by the number of devices."
    ),
    "window_time": MetricDefinition(
        "Window",
        "s",
        "neither",
        "Wall time of the measured window, from one device synchronisation to the next; steps inside are not synchronised.",
    ),
    "steps": MetricDefinition("Steps", "1", "neither", "Optimizer steps inside the window."),
    "step_time_mean": MetricDefinition("Mean step", "s", "lower", "Window time divided by steps, with its 95 % confidence interval."),
    "step_time_median": MetricDefinition("Median step", "s", "lower", "Median over the window's steps of the slowest rank's step time."),
    "step_time_p5": MetricDefinition("5 % step", "s", "lower", "5th percentile of the step times in the window."),
    "step_time_p95": MetricDefinition("95 % step", "s", "lower", "95th percentile of the step times in the window."),
    "step_time_min": MetricDefinition("Shortest step", "s", "lower", "Shortest step in the window."),
    "step_time_max": MetricDefinition("Longest step", "s", "lower", "Longest step in the window."),
    "first_step_time": MetricDefinition(
        "First step", "s", "lower", "Wall time of the first step: lazy initialisation and compilation, outside the window."
    ),
    "data_wait_share": MetricDefinition(
        "Data wait", "1", "lower", "Share of the window that the host spent waiting for the next batch; the largest over ranks."
    ),
    "other_cpu_share": MetricDefinition(
        "CPU of others", "1", "lower", "Share of the host's CPU time in the window that went to processes outside this point."
    ),
    "achieved_flops_per_device": MetricDefinition(
        "FLOP/s per device", "FLOP/s", "higher", "Analytic FLOPs per item times throughput per device; recomputation is not counted."
    ),
    "mfu": MetricDefinition(
        "MFU, data sheet", "1", "higher", "Model FLOPs utilisation: FLOP/s per device over the vendor's dense peak for the arithmetic used."
    ),
    "mfu_measured": MetricDefinition(
        "MFU, measured peak", "1", "higher", "FLOP/s per device over the fastest kernel measured on this device, of any library."
    ),
    "hfu": MetricDefinition(
        "HFU, data sheet",
        "1",
        "higher",
        "Hardware FLOPs utilisation: as MFU, with the forward passes that are computed again to save memory counted as work.",
    ),
    "memory_traffic": MetricDefinition(
        "Memory traffic",
        "B/s",
        "neither",
        "Estimated bytes that one device moves between memory and arithmetic per second; no sensor reads this.",
    ),
    "arithmetic_intensity": MetricDefinition(
        "Intensity", "FLOP/B", "neither", "FLOPs of a step over the estimated bytes that it moves between memory and arithmetic."
    ),
    "share_of_limit": MetricDefinition(
        "Share of the limit",
        "1",
        "higher",
        "FLOP/s per device over the lower of two limits measured on this device: its fastest kernel, and the bandwidth of memory and cache "
        "times the estimated intensity (roofline). The scope names the limit that binds.",
    ),
    "slowest_rank": MetricDefinition("Slowest rank", "1", "neither", "The rank with the longest mean step in the window."),
    "rank_imbalance": MetricDefinition(
        "Rank imbalance",
        "1",
        "lower",
        "By how much the slowest rank's mean step in the window is longer than that of the median rank. Ranks that wait for each other in "
        "every step differ little.",
    ),
    "input_bandwidth": MetricDefinition("Input", "B/s", "neither", "Bytes of input batches consumed per second, over all devices."),
    "peak_memory": MetricDefinition(
        "Peak memory", "B", "lower", "GPU: highest number of bytes that tensors held on one device. CPU: highest resident set of one rank."
    ),
    "energy": MetricDefinition("Energy", "J", "lower", "Energy in exactly the window of the throughput, within the stated boundary."),
    "energy_net": MetricDefinition("Net energy", "J", "lower", "Energy less idle power times window time."),
    "energy_per_item": MetricDefinition(
        "Energy per {item}", "J/{item}", "lower", "Energy of the window divided by the items of the window."
    ),
    "items_per_watt_hour": MetricDefinition(
        "{item}s per Wh", "{item}/Wh", "higher", "Items of the window divided by its energy in watt-hours."
    ),
    "mean_power": MetricDefinition("Mean power", "W", "lower", "Energy of the window divided by its wall time."),
    "idle_power": MetricDefinition("Idle power", "W", "lower", "Mean power of the same channels before the work and after it."),
    "energy_time_product": MetricDefinition(
        "Energy-delay product", "J s", "lower", "Energy of the window times its wall time; of published rows, MAELSTROM's Action."
    ),
    "run_time": MetricDefinition(
        "Run", "s", "lower", "From the first data until the model is saved, without the interpreter's start, idle baseline and probes."
    ),
    "run_energy": MetricDefinition("Run energy", "J", "lower", "Energy within the time of the run, of all nodes."),
    "run_node_energy": MetricDefinition("Run energy, nodes", "J", "lower", "Energy of whole nodes within the time of the run."),
    "action": MetricDefinition("Action", "J s", "lower", "Energy of whole nodes within the time of the run, times that time (D3.7)."),
    "loss_first": MetricDefinition("First loss", "1", "neither", "Training loss of the first step."),
    "loss_last": MetricDefinition("Last loss", "1", "lower", "Mean training loss over the last tenth of the steps (at least three)."),
    "time_to_first_step": MetricDefinition(
        "Time to first step", "s", "lower", "From the start of the worker to the end of the first step."
    ),
    "runtime": MetricDefinition(
        "Total runtime", "s", "neither", "From the start of the worker until its model is saved; of a command, the program's run."
    ),
    "training_time": MetricDefinition("Training", "s", "neither", "All steps: the first one, warm-up and window."),
    "loading_time": MetricDefinition(
        "Loading", "s", "lower", "Preparing the input, and waiting for batches in all steps; the longest wait over ranks."
    ),
    "saving_time": MetricDefinition("Saving", "s", "lower", "Writing the model's weights until they are on the disk."),
    "loading_share": MetricDefinition("Runtime loading", "1", "lower", "Loading time over total runtime."),
    "training_share": MetricDefinition("Runtime training", "1", "higher", "Training time less waits for batches, over total runtime."),
    "rest_share": MetricDefinition("Runtime rest", "1", "lower", "What is neither loading nor training, over total runtime."),
    "epoch_time_mean": MetricDefinition(
        "Mean epoch", "s", "lower", "Mean over the run's whole epochs; projected from the window if there was none, then said so."
    ),
    "epoch_time_min": MetricDefinition("Shortest epoch", "s", "lower", "Shortest of the run's whole epochs."),
    "epoch_time_max": MetricDefinition("Longest epoch", "s", "lower", "Longest of the run's whole epochs."),
    "epoch_time_first": MetricDefinition("First epoch", "s", "lower", "First epoch, with the first step and warm-up in it."),
    "throughput_without_wait": MetricDefinition(
        "Without input wait",
        "{item}/s",
        "higher",
        "What the throughput would have been without waiting for batches; the run is input-bound where the wait is above 10 %.",
    ),
    "staging_time": MetricDefinition("Staging", "s", "lower", "Bringing the data to storage of the node, before anything was timed."),
    "epoch_time": MetricDefinition("Epoch", "s", "lower", "The epoch that counts: training part and validation, the slowest rank's."),
    "epoch_training_time": MetricDefinition("Epoch, training", "s", "lower", "Training part of the epoch that counts, the slowest rank's."),
    "epoch_validation_time": MetricDefinition("Epoch, validation", "s", "lower", "Validation pass of the epoch that counts."),
    "batch_time_median": MetricDefinition(
        "Median batch", "s", "lower", "Median batch of the epoch that counts, without its first and its last batch."
    ),
    "throughput_first_epoch": MetricDefinition(
        "Rate of first epoch", "{item}/s", "higher", "Items over time of the first epoch's training part, with compilation and start-up."
    ),
    "throughput_later_epochs": MetricDefinition(
        "Rate of later epochs", "{item}/s", "higher", "Items over time of the training parts of all epochs after the first."
    ),
    "accuracy_validation": MetricDefinition("Accuracy", "1", "higher", "Share of held-out samples answered right after the last epoch."),
    "time_to_solution": MetricDefinition(
        "Time to solution",
        "s",
        "lower",
        "From the first step to the end of the last validation: of the epochs asked for, or until the quality asked for was reached.",
    ),
    "energy_to_solution": MetricDefinition("Energy to solution", "J", "lower", "Energy within the time to solution."),
    "energy_per_epoch": MetricDefinition(
        "Energy per epoch", "Wh", "lower", "Energy per item times the items of a nominal epoch, such as ImageNet's 1,281,167 images."
    ),
    "energy_per_epoch_per_device": MetricDefinition(
        "Epoch energy, per device", "Wh", "lower", "Energy of a nominal epoch divided by the number of devices that share it."
    ),
    "loss_validation": MetricDefinition("Validation loss", "1", "lower", "Mean loss over held-out batches, after the last step."),
    "peak_host_memory": MetricDefinition("Peak host memory", "B", "lower", "Highest resident set of one rank's process."),
    "max_device_power": MetricDefinition("Max device power", "W", "lower", "Highest power of any one device in the window."),
    "max_aggregate_power": MetricDefinition(
        "Max aggregate power", "W", "lower", "Sum of the devices' highest powers in the window; they need not have come together."
    ),
    "aggregate_power": MetricDefinition("Aggregate power", "W", "lower", "Mean power of all devices together in the window."),
    "device_energy": MetricDefinition("Device energy", "J", "lower", "Energy of all devices in the window."),
    "node_energy": MetricDefinition("Node energy", "J", "lower", "Energy of the whole node in the window, where a sensor measures it."),
}

ENERGY_METRICS = ("energy", "energy_net", "energy_per_item", "items_per_watt_hour", "mean_power", "idle_power", "energy_time_product")
"""Numbers that need a sensor; without one each is null with the same reason."""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_PREFIXED_UNITS = ("s", "J", "W", "FLOP/s", "B/s", "J s", "Wh")


def unit_of(metric: str, item: str = "item") -> str:
    """Unit of a metric for a workload that counts ``item``."""
    return METRICS[metric].unit.format(item=item)


def title_of(metric: str, item: str = "item") -> str:
    """Heading of a metric for a workload that counts ``item``."""
    return METRICS[metric].title.format(item=item)


def significant(value: float, digits: int = 3) -> str:
    """``value`` rounded to ``digits`` significant digits, thousands separated, never in exponent form for everyday sizes."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -5 <= magnitude < 15:
        return f"{value:.{digits - 1}e}"
    rounded = round(value, digits - 1 - magnitude)
    magnitude = math.floor(math.log10(abs(rounded)))  # 99.97 becomes 100 and has one digit less to show
    return f"{rounded:,.{max(digits - 1 - magnitude, 0)}f}"


def human(value: float | None, unit: str, digits: int = 3) -> str:
    """A number with its unit as a person would write it: ``12.3 ms``, ``4.56 GiB``, ``45.6 %``, ``1,234 token/s``; ``–`` if unknown."""
    if value is None:
        return "–"
    if unit == "1":
        return significant(value, digits)
    if unit == "B":
        return f"{significant(value / GIB, digits)} GiB"
    if unit in _PREFIXED_UNITS or unit.startswith("J/"):
        for factor, prefix in _PREFIXES:
            if abs(value) >= factor:
                return f"{significant(value / factor, digits)} {prefix}{unit}"
        return f"{significant(value, digits)} {unit}"
    return f"{significant(value, digits)} {unit}"


def percent(value: float | None, digits: int = 3) -> str:
    """A share as a percentage; ``–`` if unknown."""
    return "–" if value is None else f"{significant(100 * value, digits)} %"
