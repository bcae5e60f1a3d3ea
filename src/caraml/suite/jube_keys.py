"""What the parameters and words of JUBE scripts of CARAML's two benchmarks are in suites."""

from __future__ import annotations

from typing import Any, get_args

from caraml.suite.model import Stated

_COMMON = {
    "nodes": "nodes",
    "devices": "gpus_per_node replicas taskspernode",
    "global_batch": "global_batch_size",
    "micro_batch": "micro_batch_size batch_size_per_device batch_size",
    "precision": "precision --fp16 --bf16 --use-fp16",
    "seed": "seed --seed",
    "params.learning_rate": "lr --lr --learning-rate",
    "params.data": "dataset",
}
SIZES = ("params.layers", "params.width", "params.heads", "params.sequence_length", "params.model")
"""Without these a suite would take its own, and another model."""
KEYS = {
    "gpt": {
        **_COMMON,
        "tp": "tp_size",
        "cp": "cp_size --context-parallel-size",
        "pp": "pp_size ipus_per_replica",
        "sp": "--sequence-parallel",
        "distributed_optimizer": "--use-distributed-optimizer",
        "params.width": "nhidden --hidden-size",
        "params.layers": "nlayers --num-layers",
        "params.heads": "nheads --num-attention-heads",
        "params.sequence_length": "sequence_length --seq-length",
        "params.weight_decay": "--weight-decay",
        "params.clip_norm": "--clip-grad",
        "params.recompute": "--recompute-granularity",
        "params.positions": "--position-embedding-type",
    },
    "image_classification": {
        **_COMMON,
        "compiler": "compiler",
        "compile": "compiler_mode",
        "channels_last": "channels_last",
        "params.model": "tf_model model",
        "params.workers": "num_workers",
    },
}
"""Keys of suites, and which parameters of the scripts and options of their programs hold them: the first that is there counts."""
PRECISIONS: dict[str, Stated] = {word: word for word in get_args(Stated)}
PRECISIONS |= {"--fp16": "fp16", "--bf16": "bf16", "True": "fp16", "False": "fp32", "16.16": "fp16", "32.32": "fp32"}
"""What the words of the scripts are as precisions of suites."""
WORDS: dict[str, dict[str, Any]] = {
    "precision": PRECISIONS,
    "sp": {"--sequence-parallel": True},
    "distributed_optimizer": {"--use-distributed-optimizer": True},
    "channels_last": {"True": True, "False": False},
    "compiler": {"trace": "off", "aot_eager": "off", "inductor": "default"},
    "params.recompute": {"selective": "selective", "full": "full"},
    "params.positions": {"rope": "rotary", "rotary": "rotary"},
    "params.data": {"OSCAR": "text", "Synthetic": "synthetic", "ImageNet": "images", "ImageNet(synthetic)": "synthetic"}
    | {"Synthetic(Host)": "synthetic", "Synthetic(Device)": "synthetic-device"},
}
"""What the words of the scripts are in suites."""
NETWORKS = {"resnet50_v2": "resnetv2_50", "resnet50_mlperf_pod4_bs20": "resnet50"}
