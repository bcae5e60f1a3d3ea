"""Numbers that stand in sentences or in tables without rows to parse: typed by hand here, each looked up in the source's text.

A line is ``name | system devices nodes workload mode | metric printed unit | key=value ... | note``; ``@ anchor @ table`` says where
the lines below it stand. ``-`` stands for nothing, ``_`` in a number for a space.
"""

from __future__ import annotations

from collections.abc import Iterator

from common import Row, check_stated, number
from maelstrom import AP, SYSTEMS

DEVICES = SYSTEMS | {
    "jureca-gh200": "GH200",
    "jureca-jedi": "GH200",
    "jedi": "GH200",
    "westai-h100": "H100 SXM5",
    "lumi": "MI250X GCD",
    "leonardo": "A100 custom",
    "marenostrum5": "H100",
    "meluxina": "A100",
    "karolina": "A100",
    "discoverer-plus": "H200",
    "vega": "A100",
    "deucalion": "A100",
    "jupiter": "GH200",
    "hipergator-dgxa100": "A100",
    "ipu-pod16": "GC200",
    "grace-a100": "A100 PCIe",
}


def rows(source: str, text: str, lines: str) -> Iterator[list[str]]:
    """Rows of a source's stated numbers. Raises ``ValueError`` for a number that does not stand behind its anchor.

    Among the keys, ``run`` is the run, and ``means`` the unit that is meant where another is printed.
    """
    anchor = table = ""
    for line in filter(str.strip, lines.splitlines()):
        if line.startswith("@"):
            _, anchor, table = (part.strip() for part in line.split("@"))
            continue
        name, where, what, more, note = ([part.strip() for part in line.split("|")] + [""] * 2)[:5]
        system, devices, nodes, workload, mode = ("" if part == "-" else part for part in where.split())
        metric, printed, unit = ("" if part == "-" else part for part in what.split())
        printed = printed.replace("_", " ")
        check_stated(text, anchor, printed)
        parameters = {key: number(value) for key, value in (pair.split("=") for pair in more.split())}
        run, means = int(parameters.pop("run", 0)), parameters.pop("means", None)
        row = Row(
            *(source, table, run, system, DEVICES.get(system, "")),
            *(int(devices) if devices else None, int(nodes) if nodes else None),
            *(AP[int(workload[2:])] if workload.startswith("ap") else workload, mode, {"name": name, **parameters}, note),
        )
        yield row.number(metric, printed, unit, means=None if means is None else str(means))


MAELSTROM = """
@ batch normalization was added in each level @ details AP1
@ Firstly we tested the performance @ details AP1
training-data | - - - ap1 train | dataset_size 329.83 GB | means=GiB | GB of 2^30 bytes, as those without input
validation-data | - - - ap1 train | validation_size 13.74 GB | means=GiB | GB of 2^30 bytes, as the training data
samples | - - - ap1 train | samples_per_epoch 89208 -
batch | - - - ap1 train | batch_size 32 -
parameters | - - - ap1 train | model_parameters 1314019 -
fixed-parameters | - - - ap1 train | fixed_parameters 6016 -
epochs | - - - ap1 train | epochs 3 -
@ Secondly we tested the performance @ details AP1
non-io-data | - - - ap1 compute | dataset_size 34.00 GB | means=GiB | GB of 2^30 bytes: 8,192 samples of 256 x 256 x 17 in fp32
non-io-samples | - - - ap1 compute | samples_per_epoch 8,192 -
non-io-epochs | - - - ap1 compute | epochs 10 -
@ ## 4.3 AP 2 @ details AP2
training-data | - - - ap2 train | dataset_size 12 MB
validation-data | - - - ap2 train | validation_size 3.8 MB
samples | - - - ap2 train | samples_per_epoch 148 thousand
parameters | - - - ap2 train | model_parameters 141_896_450 -
batch | - - - ap2 train | batch_size 32 -
@ ## 4.4 AP 3 @ details AP3
training-data | - - - ap3 train | dataset_size 60 GB
validation-data | - - - ap3 train | validation_size 4.2 GB
samples | - - - ap3 train | samples_per_epoch 2_984_960 -
parameters | - - - ap3 train | model_parameters 261_515 -
batch | - - - ap3 train | batch_size 512 -
epochs | - - - ap3 train | epochs 5 -
@ ## 4.7 AP 4 @ details AP4
training-data | - - - ap4 train | dataset_size 64 GB
validation-data | - - - ap4 train | validation_size 2.5 GB
samples | - - - ap4 train | samples_per_epoch 1889 -
batch | - - - ap4 train | batch_size 1 -
parameters | - - - ap4 train | model_parameters 633698 -
@ The real-case experiments (full data pipeline) @ details AP5
training-data | - - - ap5 train | dataset_size 69.43 GB
validation-data | - - - ap5 train | validation_size 6.31 GB
samples | - - - ap5 train | samples_per_epoch 96_296 -
parameters | - - - ap5 train | model_parameters 9_332_299 -
fixed-parameters | - - - ap5 train | fixed_parameters 5280 -
batch | - - - ap5 train | batch_size 32 - | | per device; the critic's five batches and the generator's one make 192
epochs | - - - ap5 train | epochs 4 -
non-io-data | - - - ap5 compute | dataset_size 62.21 GB
non-io-epochs | - - - ap5 compute | epochs 3 -
@ ## 4.9 AP 6 @ details AP6
training-data | - - - ap6 train | dataset_size 32.43 GB
samples | - - - ap6 train | samples_per_epoch 35_064 -
batch | - - - ap6 train | batch_size 750 -
epochs-jsc | - - - ap6 train | epochs 20 -
epochs-e4 | - - - ap6 train | epochs 50 -
@ To visualize the scaling behaviour @ text 4.1.2
ap2-h100-4 | jureca-h100 4 1 ap2 train | runtime 206 s
ap2-h100-1 | jureca-h100 1 1 ap2 train | runtime 230 s | | on one device
ap2-h100-ratio | jureca-h100 4 1 ap2 train | ratio 0.9 -
ap1-four-devices | - 4 1 ap2 train | share 10 % | | said of AP1, which has no run on one device; the numbers are AP2's
@ The low-powered A2 GPU is in general @ text 4.1.4
ap5-a2-slower | e4-a2 1 1 ap5 train | ratio 12 -
ap3-a2-slower | e4-a2 1 1 ap3 train | ratio 1.3 -
ap6-a2-four | e4-a2 4 2 ap6 train | ratio 0.23 -
@ ### 4.2.2 Runtime split @ text 4.2.2
ap1-loading-low | - - 1 ap1 train | share 1 % | | smallest part of the runtime that is loading, here what is not training
ap1-loading-outlier | juwels-booster 4 1 ap1 train | share 5.8 %
@ ### 4.2.3.3 Node Energy @ text 4.2.3
ap1-a2-device-energy | e4-a2 1 1 ap1 train | device_energy 50.09 Wh | | mean of the runs
ap1-gh200-device-energy | e4-gh200 1 1 ap1 train | device_energy 32.16 Wh
ap1-a2-node-energy | e4-a2 1 1 ap1 train | node_energy 373.09 Wh | | mean of the runs
ap1-gh200-node-energy | e4-gh200 1 1 ap1 train | node_energy 64.72 Wh
ap1-gh200-share | e4-gh200 1 1 ap1 train | device_energy_share 49.70 %
ap1-a2-share | e4-a2 1 1 ap1 train | device_energy_share 13.59 %
@ Overall, training time is dominated @ text 4.3.1
ap2-other-work | - - 1 ap2 train | share 10 % | | upper limit of what is not the epoch
ap2-mi250-two | jureca-mi250 4 1 ap2 train | ratio 1.4 -
ap2-mi250-four | jureca-mi250 8 1 ap2 train | ratio 1.6 -
ap2-a100-four | jureca-a100 4 1 ap2 train | ratio 1.1 -
ap2-h100-four | jureca-h100 4 1 ap2 train | ratio 1.1 -
@ To compare performance differences @ text 4.3.1
ap2-mi250-over-a100 | jureca-mi250 - 1 ap2 train | ratio 1.2 -
ap2-one-mi250-over-a100 | jureca-mi250 2 1 ap2 train | ratio 0.9 -
ap2-h100-over-a100 | jureca-h100 1 1 ap2 train | ratio 1.1 -
ap2-two-h100-over-a100 | jureca-h100 2 1 ap2 train | ratio 1.2 -
ap2-gh200-over-a100 | e4-gh200 1 1 ap2 train | ratio 0.8 -
ap2-a2-over-a100 | e4-a2 1 1 ap2 train | ratio 0.2 -
@ For inference time, we note @ text 4.3.1
ap2-inference-mi250 | jureca-mi250 8 1 ap2 inference | ratio 1.3 -
ap2-inference-h100 | jureca-h100 1 1 ap2 inference | ratio 1.1 -
@ Based on total energy consumed @ text 4.3.1
ap2-energy-a100 | jureca-a100 1 1 ap2 train | ratio 1.1 -
ap2-energy-four-h100 | jureca-h100 1 1 ap2 train | ratio 0.4 -
ap2-energy-four-a100 | jureca-a100 1 1 ap2 train | ratio 0.4 - | | energy of one H100 over that of four A100
ap2-energy-four-mi250 | jureca-mi250 1 1 ap2 train | ratio 0.3 -
ap2-energy-two-h100 | jureca-h100 1 1 ap2 train | ratio 0.6 -
ap2-energy-two-a100 | jureca-a100 1 1 ap2 train | ratio 0.5 -
ap2-energy-two-mi250 | jureca-mi250 1 1 ap2 train | ratio 0.3 -
@ ### 4.3.2 Runtime split @ text 4.3.2
ap2-loading-jsc-low | - - 1 ap2 train | share 6 % | | smallest part of the runtime that is loading, JSC
ap2-loading-jsc-high | - - 1 ap2 train | share 8 %
ap2-loading-e4-low | - - 1 ap2 train | share 1.7 %
ap2-rest-high | jureca-h100 2 1 ap2 train | share 3 % | | largest rest of the runtime, but for MI250 and JUWELS
ap2-rest-outlier | jureca-mi250 8 1 ap2 train | share 12 %
@ #### 4.3.2.1 Node Energy @ text 4.3.2
ap2-gh200-device-energy | e4-gh200 1 1 ap2 train | device_energy 15.51 Wh
ap2-gh200-node-energy | e4-gh200 1 1 ap2 train | node_energy 33.39 Wh | | mean of experiments 3 to 5
ap2-gh200-share | e4-gh200 1 1 ap2 train | device_energy_share 46.92 %
ap2-a2-device-energy | e4-a2 1 1 ap2 train | device_energy 17.70 Wh
ap2-a2-node-energy | e4-a2 1 1 ap2 train | node_energy 133.57 Wh | | mean of experiments 0 to 2
ap2-a2-share | e4-a2 1 1 ap2 train | device_energy_share 13.29 %
@ energy comparison findings are reinforced @ text 4.3.2
ap2-gh200-action | e4-gh200 1 1 ap2 train | action 40.95 MJs | boundary=node
ap2-a2-action | e4-a2 1 1 ap2 train | action 592.64 MJs | boundary=node
@ ### 4.4.2.1 Training @ text 4.4.2
ap3-a100-cache | jureca-a100 1 1 ap3 train | share 25.5 % | | training time saved by the cache
@ GPU Energy Consumption has been measured @ text 4.4.2
ap3-a100-device-energy | jureca-a100 1 1 ap3 train | device_energy 124.44 Wh
ap3-a100-nocache-energy | jureca-a100 1 1 ap3 train | share 26 % | | energy added without the cache
ap3-a100-data-energy | jureca-a100 1 1 ap3 data | device_energy 88.76 Wh
@ #### 4.4.2.2 Inference @ text 4.4.2
ap3-a100-inference | jureca-a100 1 1 ap3 inference | inference_time 46 s | | mean of the runs
ap3-a100-loading | jureca-a100 1 1 ap3 inference | loading_time 2.7 s
ap3-a100-rest | jureca-a100 1 1 ap3 inference | rest_time 4.5 s | | runtime less inference
@ ### 4.6.0.1 Training @ text 4.6.0
ap3-a2-device-low | e4-a2 1 1 ap3 data | device_energy 6.91 Wh
ap3-a2-device-high | e4-a2 1 1 ap3 train | device_energy 30.80 Wh
ap3-a2-node-low | e4-a2 1 1 ap3 data | node_energy 127.32 Wh | | smallest of the runs
ap3-a2-node-high | e4-a2 1 1 ap3 train | node_energy 252.44 Wh
ap3-a2-inference-node | e4-a2 1 1 ap3 inference | node_energy 5.33 Wh
ap3-a2-inference-last | e4-a2 1 1 ap3 inference | node_energy 3.96 Wh
@ ### 4.6.0.3 Non-IO @ text 4.6.0
ap3-gh200-node-high | e4-gh200 1 1 ap3 compute | node_energy 15.14 Wh | batch_mb=0.52 | said to be the highest of all batch sizes
ap3-gh200-node-low | e4-gh200 1 1 ap3 compute | node_energy 4.87 Wh | batch_mb=8.33 | said to be the lowest of all batch sizes
@ ### 4.7.2 Runtime split @ text 4.7.2
ap4-loading-high | - - 1 ap4 train | share 2.5 % | | largest part of the runtime that is loading; the tables hold other runs
@ #### 4.7.2.1 Node Energy @ text 4.7.2
ap4-gh200-runtime-low | e4-gh200 1 1 ap4 train | runtime 4220.0 s
ap4-gh200-runtime-high | e4-gh200 1 1 ap4 train | runtime 4260.0 s
ap4-a2-runtime-low | e4-a2 1 1 ap4 train | runtime 20807.0 s | | shortest run; the table holds other runs
ap4-a2-runtime-high | e4-a2 1 1 ap4 train | runtime 21018.0 s
ap4-gh200-device-energy | e4-gh200 1 1 ap4 train | device_energy 122.345 Wh | | called a power
ap4-a2-device-energy | e4-a2 1 1 ap4 train | device_energy 120.05 Wh | | called a power
ap4-gh200-node-energy | e4-gh200 1 1 ap4 train | node_energy 286.958 Wh | | called a power
ap4-a2-node-energy | e4-a2 1 1 ap4 train | node_energy 1676.182 Wh | | called a power
@ Examining the Action metric shown @ text 4.7.2
ap4-gh200-action | e4-gh200 1 1 ap4 train | action 4380.11 MJ/s | boundary=node | printed as MJ/s
ap4-a2-action | e4-a2 1 1 ap4 train | action 126193.56 MJ/s | boundary=node | printed as MJ/s
@ #### 4.8.1.1 Changes @ text 4.8.1
ap5-a100-epoch | jureca-a100 1 1 ap5 train | epoch_time_mean 865 s
@ #### 4.8.1.3 Results @ text 4.8.1
ap5-batch-low | - - 1 ap5 compute | share 25 % | batch=256
ap5-batch-high | - - 1 ap5 compute | share 40 % | batch=256 | end of a range of gains that names a larger one
ap5-batch-a100 | jureca-a100 - 1 ap5 compute | share 25 % | batch=256
ap5-batch-mi250 | jureca-mi250 - 1 ap5 compute | share 31 % | batch=256
ap5-batch-gh200 | e4-gh200 - 1 ap5 compute | share 42.5 % | batch=256
ap5-mi250-best | jureca-mi250 1 1 ap5 compute | runtime 4295 s | batch=32
ap5-mi250-largest | jureca-mi250 1 1 ap5 compute | runtime 4421 s | batch=256
ap5-mi250-one | jureca-mi250 1 1 ap5 compute | runtime 4277 s
ap5-mi250-eight | jureca-mi250 8 1 ap5 compute | runtime 581 s
ap5-a100-first-epoch | jureca-a100 1 1 ap5 train | epoch_time_first 930 s
@ For data-distributed training @ text 4.8.1
ap5-mi250-eight-ratio | jureca-mi250 8 1 ap5 compute | ratio 7.4 -
ap5-a100-four | jureca-a100 4 1 ap5 train | ratio 2.6 -
ap5-mi250-eight-train | jureca-mi250 8 1 ap5 train | ratio 3.42 - | | how many times as fast as one device
@ #### **4.8.1.4 Other notes @ text 4.8.1
ap5-h100-before | jureca-h100 1 1 ap5 train | epoch_time_mean 580 s | driver=before
ap5-h100-after | jureca-h100 1 1 ap5 train | epoch_time_mean 1500 s | driver=after
@ Furthermore, an update of @ text 4.8.1
ap5-h100-legacy | jureca-h100 1 1 ap5 train | epoch_time_mean 700 s | driver=after optimizer=legacy | the table's runs are slower
@ ### 4.8.2.2 Time-to-Solution @ text 4.8.2
ap5-mi250-fastest | jureca-mi250 8 1 ap5 compute | runtime 580.5 s | batch=256
@ ### 4.8.2.3 Node Energy @ text 4.8.2
ap5-gh200-time-low | e4-gh200 1 1 ap5 compute | training_time 1806.25 s
ap5-gh200-time-high | e4-gh200 1 1 ap5 compute | training_time 3023.54 s
ap5-gh200-device-low | e4-gh200 1 1 ap5 compute | device_energy 161.94 Wh
ap5-gh200-device-high | e4-gh200 1 1 ap5 compute | device_energy 200.80 Wh
ap5-gh200-node-low | e4-gh200 1 1 ap5 compute | node_energy 274.89 Wh
ap5-gh200-node-high | e4-gh200 1 1 ap5 compute | node_energy 384.86 Wh
@ The percentage of energy utilized by the GPU ranges @ text 4.8.2
ap5-gh200-share-low | e4-gh200 1 1 ap5 compute | device_energy_share 52.17 %
ap5-gh200-share-high | e4-gh200 1 1 ap5 compute | device_energy_share 59.78 %
@ In contrast, experiments conducted on the E4-A2 @ text 4.8.2
ap5-a2-time-low | e4-a2 1 1 ap5 compute | training_time 18830.54 s
ap5-a2-time-high | e4-a2 1 1 ap5 compute | training_time 25256.40 s
ap5-a2-device-low | e4-a2 1 1 ap5 compute | device_energy 293.67 Wh
ap5-a2-device-high | e4-a2 1 1 ap5 compute | device_energy 375.77 Wh
ap5-a2-node-low | e4-a2 1 1 ap5 compute | node_energy 2240.37 Wh
ap5-a2-node-high | e4-a2 1 1 ap5 compute | node_energy 2664.37 Wh
ap5-a2-share-low | e4-a2 1 1 ap5 compute | device_energy_share 11.38 %
ap5-a2-share-high | e4-a2 1 1 ap5 compute | device_energy_share 14.93 %
@ ### 4.8.3 Runtime split @ text 4.8.3
ap5-loading-mi250-low | jureca-mi250 8 1 ap5 train | share 3.3 %
ap5-loading-mi250-high | jureca-mi250 8 1 ap5 train | share 6.9 %
ap5-loading-a100-low | jureca-a100 4 1 ap5 train | share 3.3 %
ap5-loading-a100-high | jureca-a100 4 1 ap5 train | share 3.7 %
ap5-loading-h100-low | jureca-h100 2 1 ap5 train | share 2.4 %
ap5-loading-h100-high | jureca-h100 2 1 ap5 train | share 2.6 % | | largest part of the runtime that is not training
ap5-loading-gh200-low | e4-gh200 1 1 ap5 train | share 1.0 % | | smallest part of the runtime that is not training
ap5-loading-gh200-high | e4-gh200 1 1 ap5 train | share 1.7 %
ap5-loading-a2 | e4-a2 1 1 ap5 train | share 0.2 %
@ #### **4.9.3 JURECA @ text 4.9.3
ap6-h100-time | jureca-h100 1 1 ap6 train | share 11 % | over=jureca-a100 | less time
ap6-h100-power | jureca-h100 1 1 ap6 train | share 55 % | over=jureca-a100 | less peak power
@ #### 4.9.4 JURECA @ text 4.9.4
ap6-mi250-time | jureca-mi250 1 1 ap6 train | share 28 % | over=jureca-h100 | less time
ap6-mi250-time-a100 | jureca-mi250 1 1 ap6 train | share 36 % | over=jureca-a100 | less time
ap6-mi250-power | jureca-mi250 1 1 ap6 train | share 10 % | over=jureca-h100 | less power
ap6-mi250-power-a100 | jureca-mi250 1 1 ap6 train | share 56 % | over=jureca-a100 | less power
@ #### 4.9.5 E4 @ text 4.9.5
ap6-a2-time | e4-a2 1 1 ap6 train | share 8 % | over=jureca-h100 | less time
ap6-a2-time-mi250 | e4-a2 1 1 ap6 train | share 27 % | over=jureca-mi250 | more time
ap6-a2-power | e4-a2 1 1 ap6 train | share 54 % | over=jureca-h100 | less peak power
ap6-a2-power-mi250 | e4-a2 1 1 ap6 train | share 49 % | over=jureca-mi250 | less peak power
@ #### 4.9.6 E4 @ text 4.9.6
ap6-gh200-time | e4-gh200 1 1 ap6 train | share 8 % | over=jureca-mi250 | less time
ap6-gh200-power | e4-gh200 1 1 ap6 train | share 94 % | over=jureca-mi250 | more peak power
@ ### 4.9.7 Runtime @ text 4.9.7
ap6-loading-jsc-low | - - 1 ap6 train | share 6 %
ap6-loading-jsc-high | - - 1 ap6 train | share 7 % | | largest part of the runtime that is loading, JSC
ap6-loading-e4 | - - - ap6 train | share 12.2 % | | about
@ ### 4.9.8 Node Energy @ text 4.9.8
a2-1x1-runtime | e4-a2 1 1 ap6 train | runtime 8959.40 s | run=1 experiment=0
a2-1x1-device | e4-a2 1 1 ap6 train | device_energy 75.55 Wh | run=1 experiment=0
a2-1x1-node | e4-a2 1 1 ap6 train | node_energy 928.66 Wh | run=1 experiment=0
a2-1x1-action | e4-a2 1 1 ap6 train | action 29952.87 MJ/s | run=1 experiment=0 boundary=node | printed as MJ/s
a2-1x2-runtime | e4-a2 2 1 ap6 train | runtime 4711.49 s | run=2 experiment=1
a2-1x2-device | e4-a2 2 1 ap6 train | device_energy 84.43 Wh | run=2 experiment=1
a2-1x2-node | e4-a2 2 1 ap6 train | node_energy 588.65 Wh | run=2 experiment=1
a2-1x2-action | e4-a2 2 1 ap6 train | action 9984.34 MJ/s | run=2 experiment=1 boundary=node | printed as MJ/s
@ 2 Nodes, 2 GPUs (Experiment 2) @ text 4.9.8
a2-2x1-device | e4-a2 2 2 ap6 train | device_energy 83.20 Wh | run=3 experiment=2
a2-2x1-node | e4-a2 2 2 ap6 train | node_energy 1055.62 Wh | run=3 experiment=2
a2-2x1-action | e4-a2 2 2 ap6 train | action 19079.84 MJ/s | run=3 experiment=2 boundary=node | printed as MJ/s
@ 2 Nodes, 4 GPUs (Experiment 3) @ text 4.9.8
a2-2x2-runtime | e4-a2 4 2 ap6 train | runtime 2533.19 s | run=4 experiment=3
a2-2x2-device | e4-a2 4 2 ap6 train | device_energy 86.42 Wh | run=4 experiment=3
a2-2x2-node | e4-a2 4 2 ap6 train | node_energy 636.29 Wh | run=4 experiment=3
a2-2x2-action | e4-a2 4 2 ap6 train | action 5802.69 MJ/s | run=4 experiment=3 boundary=node | printed as MJ/s
@ ### **GH200 Hardware Configurations @ text 4.9.8
gh200-1x1-runtime | e4-gh200 1 1 ap6 train | runtime 6682.52 s | run=5 experiment=0
gh200-1x1-device | e4-gh200 1 1 ap6 train | device_energy 202.85 Wh | run=5 experiment=0
gh200-1x1-node | e4-gh200 1 1 ap6 train | node_energy 590.41 Wh | run=5 experiment=0
gh200-1x1-action | e4-gh200 1 1 ap6 train | action 14203.63 MJs | run=5 experiment=0 boundary=node
gh200-2x1-runtime | e4-gh200 2 2 ap6 train | runtime 3629.93 s | run=6 experiment=1
gh200-2x1-device | e4-gh200 2 2 ap6 train | device_energy 214.86 Wh | run=6 experiment=1
gh200-2x1-node | e4-gh200 2 2 ap6 train | node_energy 636.73 Wh | run=6 experiment=1
gh200-2x1-action | e4-gh200 2 2 ap6 train | action 8320.57 MJs | run=6 experiment=1 boundary=node
@ ### **4.9.9 Conclusion @ text 4.9.9
ap6-a2-performance | e4-a2 1 1 ap6 train | ratio 75 %
ap6-a2-energy | e4-a2 1 1 ap6 train | ratio 37.2 %
ap6-two-a2-performance | e4-a2 2 1 ap6 train | share 41 % | | faster than one GH200
ap6-two-a2-energy | e4-a2 2 1 ap6 train | ratio 42 %
"""
