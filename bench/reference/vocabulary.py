"""Names and units of published numbers: CARAML's metric where the notion is the same, else one of the plain names below."""

from __future__ import annotations

import re

from caraml.base.errors import unknown_name
from caraml.metrics.model import METRICS

PUBLISHED: dict[str, tuple[str, str]] = {
    "accumulation_steps": ("1", "Micro-batches per replica and weight update."),
    "batch_size": ("1", "Samples per batch: per device where the source says so."),
    "dataset_size": ("B", "Size of the training data."),
    "device_energy_share": ("1", "Share of the devices in the energy of the node."),
    "device_memory": ("B", "Memory of one device."),
    "devices_per_node": ("1", "Accelerators of one node, as software counts them."),
    "effective_batch_bytes": ("B", "Input of one batch over all devices."),
    "epoch_energy": ("J", "Energy of all devices in one epoch."),
    "epoch_energy_per_device": ("J", "Energy of one device in one epoch."),
    "epoch_time_second": ("s", "The second epoch, without the graph's compilation in it."),
    "epochs": ("1", "Passes over the training data."),
    "evaluation_time": ("s", "Predictions for the held-out samples."),
    "fixed_parameters": ("1", "Numbers of a model that are not trained, such as means of batch normalisation."),
    "inference_time": ("s", "Predictions alone."),
    "link_bandwidth": ("B/s", "Both directions of all links of one device together."),
    "mean_device_power": ("W", "Mean power of one device."),
    "model_loading_time": ("s", "Reading the model."),
    "model_parameters": ("1", "Trainable parameters."),
    "network_bandwidth": ("B/s", "Per node and direction."),
    "node_max_power": ("W", "Highest power of the node."),
    "node_mean_power": ("W", "Mean power of the node."),
    "nodes": ("1", "Nodes of a partition or of a run."),
    "ratio": ("1", "One number over another, as a text claims it."),
    "rest_time": ("s", "Runtime without what the run is about."),
    "runtime_per_batch": (
        "s",
        "Runtime over the batches of all epochs and devices: not the time of a step where there are several devices.",
    ),
    "samples_per_epoch": ("1", "Training samples in one epoch."),
    "scaling_efficiency": ("1", "Rate per device over that at the smallest number of nodes."),
    "share": ("1", "A part of a whole, as a text claims it."),
    "sustained_performance": ("FLOP/s", "Sustained performance of a whole machine."),
    "thermal_design_power": ("W", "Thermal design power."),
    "training_time_less_loading": ("s", "Training time without the loading of data."),
    "training_tokens": ("1", "Tokens that a model is trained on."),
    "validation_size": ("B", "Size of the held-out data."),
}
"""Names that are not metrics of CARAML, with their unit and what they mean."""


def unit_fits(metric: str, unit: str) -> bool:
    """Whether ``unit`` is the metric's, for whatever item is counted. Raises ``InputError`` for an unknown metric."""
    if metric in METRICS:
        pattern = re.escape(METRICS[metric].unit).replace(re.escape("{item}"), r"[a-z]+")
        return re.fullmatch(pattern, unit) is not None
    if metric in PUBLISHED:
        return PUBLISHED[metric][0] == unit
    raise unknown_name("metric", metric, [*METRICS, *PUBLISHED])
