"""The slides of CARAML, the PEARC '22 paper and the EPICURE guide: few tables, and numbers in sentences."""

from __future__ import annotations

from collections.abc import Iterator

import stated
from common import Row, below

SEQUENCES = "printed as tokens; an epoch is four batches and the rate counts its sequences"


def caraml(text: str) -> Iterator[list[str]]:
    """The two tables of the IPU, thermal design power, and the ratios in the slides' sentences."""
    for run, (batch, rate, energy, efficiency) in enumerate(below(text, "Batch Size\tTokens/Time")[1:], start=1):
        row = Row("caraml", "IPU NLP", run, "jureca-ipu", "GC200", 4, 1, "gpt", parameters={"model": "117M", "batch": int(batch)})
        yield row.number("throughput", rate, "1/s", note=SEQUENCES)
        yield row.number("epoch_energy_per_device", energy, "Wh")
        yield row.number("items_per_watt_hour", efficiency, "1/Wh", note=SEQUENCES)
    for run, (batch, rate, energy, efficiency) in enumerate(below(text, "Batch Size\tImages/Time")[1:], start=1):
        model = {"model": "resnet50", "batch": int(batch)}
        row = Row("caraml", "IPU CV", run, "jureca-ipu", "GC200", 1, 1, "image_classification", parameters=model)
        yield row.number("throughput", rate, "images/s")
        yield row.number("epoch_energy", energy, "Wh")
        yield row.number("items_per_watt_hour", efficiency, "images/Wh")
    yield from stated.rows("caraml", text, CARAML)


def pearc(text: str) -> Iterator[list[str]]:
    """Tables 1 to 4 and the numbers of the text."""
    for run, (ipus, instances, replicas, first, second) in enumerate(below(text, "**Table 1:")[2:], start=1):
        parameters = {"model": "resnet50", "framework": "pytorch", "instances": int(instances), "replicas": int(replicas)}
        row = Row("pearc", "Table 1", run, "ipu-pod16", "GC200", int(ipus), None, "image_classification", parameters=parameters)
        yield row.number("throughput", first, "images/s", epoch=1)
        yield row.number("throughput", second, "images/s", epoch=2)
    for run, (model, per_replica, replicas, printed) in enumerate(below(text, "**Table 2:")[1:], start=1):
        rate, _, unit = printed.partition(" ")
        bert = "BERT" in model
        parameters = {"model": model, "framework": "pytorch", "per_replica": int(per_replica), "replicas": int(replicas)}
        devices = int(per_replica) * int(replicas)
        workload = "question_answering" if bert else "image_classification"
        row = Row("pearc", "Table 2", run, "ipu-pod16", "GC200", devices, None, workload, parameters=parameters)
        yield row.number("throughput", rate, {"img/sec": "images/s", "items/sec": "items/s"}[unit])
    for run, cells in enumerate(below(text, "Table 3: Performance")[1:], start=1):
        span, batch, instances, replicas, ipus, rate, seconds = cells
        facts = {"batch_norm_span": int(span), "batch": int(batch), "instances": int(instances), "replicas": int(replicas)}
        parameters = {"model": "resnet50", "framework": "tensorflow1", **facts}
        row = Row("pearc", "Table 3", run, "ipu-pod16", "GC200", int(ipus), None, "image_classification", parameters=parameters)
        yield row.number("throughput", rate, "images/s")
        yield row.number("training_time", seconds, "s")
    for run, (platform, devices, batch, seconds, rate) in enumerate(below(text, "**Table 4:")[1:], start=1):
        system, device = ("grace-a100", "A100 PCIe") if "A100" in platform else ("ipu-pod16", "GC200")
        row = Row("pearc", "Table 4", run, system, device, int(devices), None, "image_compression", parameters={"batch": int(batch)})
        yield row.number("epoch_time_second", seconds, "s")
        yield row.number("throughput", rate, "images/s")
    yield from stated.rows("pearc", text, PEARC)


def epicure(text: str) -> Iterator[list[str]]:
    """The guide has curves and no tables of results: what its sentences state, and the machines."""
    yield from stated.rows("epicure", text, EPICURE)


CARAML = """
@ GH200 (JEDI)	4 x NVIDIA GH200 @ accelerators
tdp | jedi - - - - | thermal_design_power 680 W
tdp | jureca-gh200 - - - - | thermal_design_power 700 W
tdp | jureca-h100 - - - - | thermal_design_power 350 W
tdp | westai-h100 - - - - | thermal_design_power 700 W
links | jedi - - - - | link_bandwidth 900 GB/s
links | westai-h100 - - - - | link_bandwidth 900 GB/s
links | jureca-h100 - - - - | link_bandwidth 600 GB/s | | GPUs in pairs
@ A100 (JURECA)	4 x NVIDIA A100 @ accelerators
tdp | jureca-a100 - - - - | thermal_design_power 400 W
tdp | jureca-mi250 - - - - | thermal_design_power 560 W | | of a module with two GCDs
tdp | jureca-ipu - - - - | thermal_design_power 300 W
links | jureca-a100 - - - - | link_bandwidth 600 GB/s
links | jureca-mi250 - - - - | link_bandwidth 500 GB/s
links | jureca-ipu - - - - | link_bandwidth 256 GB/s
@ NLP Benchmark on GH200 Superchip @ text NLP
jrdc-rate | jureca-gh200 1 1 gpt train | ratio 2.45 - | of=throughput_per_device over=jureca-a100 model=800M
jrdc-over-jedi-rate | jureca-gh200 1 1 gpt train | share 20 % | of=throughput_per_device over=jedi model=800M | more than the other
jrdc-over-jedi-energy | jureca-gh200 1 1 gpt train | share 20 % | of=energy_per_device over=jedi model=800M | more than the other
@ NLP Benchmark on H100 GPU @ text NLP
sxm-rate | westai-h100 4 1 gpt train | ratio 1.3 - | of=throughput_per_device over=jureca-h100 model=800M
sxm-links | westai-h100 - - - - | ratio 1.5 - | of=link_bandwidth over=jureca-h100
sxm-energy | westai-h100 4 1 gpt train | ratio 1.6 - | of=energy_per_device over=jureca-h100 model=800M
sxm-tdp | westai-h100 - - - - | ratio 2 - | of=thermal_design_power over=jureca-h100
pcie-efficiency | jureca-h100 4 1 gpt train | share 25 % | of=items_per_watt_hour model=800M | up to, more than the others
@ NLP Benchmark on A100 & MI250 @ text NLP
a100-rate | jureca-a100 4 1 gpt train | ratio 1.6 - | of=throughput_per_device over=jureca-mi250 model=800M
mi250-energy | jureca-mi250 - 1 gpt train | ratio 1.3 - | of=energy_per_device over=jureca-a100 model=800M
mi250-gpu-energy | jureca-mi250 8 1 gpt train | ratio 1.7 - | of=energy_per_device over=gcd model=800M
mi250-gcd-efficiency | jureca-mi250 4 1 gpt train | ratio 1.7 - | of=items_per_watt_hour over=gpu model=800M
a100-efficiency | jureca-a100 4 1 gpt train | ratio 2 - | of=items_per_watt_hour over=jureca-mi250 model=800M
@ NLP Benchmark on Graphcore IPU M2000 POD4 @ text NLP
ipu-epoch | jureca-ipu 4 1 gpt train | accumulation_steps 4 - | model=117M | batches in what the slides call an epoch
ipu-most-energy | jureca-ipu 4 1 gpt train | epoch_energy_per_device 33 Wh | model=117M
@ Benchmark	NLP Training	CV Training @ text CV
epoch | - - - image_classification train | samples_per_epoch 10⁶ - | | the table and the figure use 1281167
@ ResNet-50 TensorFlow Benchmark on 1 Device @ text CV
epoch-figure | - 1 1 image_classification train | samples_per_epoch 1281167 -
"""

PEARC = """
@ For energy consumption, one notes @ text 3.1
tdp | ipu-pod16 1 - - - | thermal_design_power 300 W
tdp-dgx | hipergator-dgxa100 8 - - - | thermal_design_power 6500 W
tdp-pod | ipu-pod16 16 - - - | thermal_design_power 6000 W | | without the host
@ Efficient Net B0 on A100 @ text 3.2
efficientnet-a100 | - 2 - image_classification train | throughput 3749.09 images/s | device=A100 model=efficientnet_b0
efficientnet-v100 | - 4 - image_classification train | throughput 5745 images/s | device=V100 model=efficientnet_b0
@ 3.3.1 TensorFlow ResNet50 on IPUs @ text 3.3.1
batch | ipu-pod16 1 - image_classification train | batch_size 20 - | model=resnet50
accumulation | ipu-pod16 1 - image_classification train | accumulation_steps 24 - | model=resnet50
effective-batch | ipu-pod16 1 - image_classification train | batch_size 480 - | model=resnet50
@ To keep all values consistent @ text 3.4
images | - - - image_compression train | samples_per_epoch 70,000 -
@ We find that when using the same small batch size @ text 3.4
ipu-rate | ipu-pod16 1 - image_compression train | throughput 3000 images/s | batch=10 | about
gpu-rate | grace-a100 1 - image_compression train | throughput 270 images/s | batch=10
gpu-best | grace-a100 2 - image_compression train | throughput 8,642 images/s | batch=512
@ In the case of the 16-IPU model @ text 3.4
ipu-before | ipu-pod16 16 - image_compression train | throughput 14,000 images/s | batch=10 | before gradient accumulation
ipu-after | ipu-pod16 16 - image_compression train | throughput 21,500 images/s | batch=10 | about
"""

EPICURE = """
@ The image classification problem @ text 2.1
images | - - - image_classification train | samples_per_epoch 1.28 million | | more than
images-size | - - - image_classification train | dataset_size 140 GB | | around
@ The full training state of the model @ text 2.2
full-model | - - - gpt train | model_parameters 175 billion | | around
small-model | - - - gpt train | model_parameters 857 million
@ The second benchmark considers pretraining @ text 2.2
subset | - - - gpt train | training_tokens 700 million | | around; the part of FineWeb that is used
snapshot | - - - gpt train | training_tokens 23.5 million | model=175B | before the snapshot from which large runs start
@ LUMI is a pre-exascale @ text 3.1
sustained | lumi - - - - | sustained_performance 386 PFLOP/s
nodes | lumi - - - - | nodes 2978 -
memory | lumi - - - - | device_memory 128 GiB | | of a module with two GCDs
network | lumi - - - - | network_bandwidth 200 Gbps | | of each of four links
@ Leonardo is a next-generation @ text 3.2
sustained | leonardo - - - - | sustained_performance 249 PFLOP/s
nodes | leonardo - - - - | nodes 3456 -
devices | leonardo - - - - | devices_per_node 4 -
memory | leonardo - - - - | device_memory 64 GiB
@ MareNostrum 5 is a pre-exascale @ text 3.3
sustained | marenostrum5 - - - - | sustained_performance 215 PFLOP/s
nodes | marenostrum5 - - - - | nodes 1120 -
devices | marenostrum5 - - - - | devices_per_node 4 -
memory | marenostrum5 - - - - | device_memory 64 GiB
@ MeluXina is a petascale @ text 3.4
sustained | meluxina - - - - | sustained_performance 12.8 PFLOP/s
nodes | meluxina - - - - | nodes 200 -
devices | meluxina - - - - | devices_per_node 4 -
memory | meluxina - - - - | device_memory 40 GiB
@ Karolina is a petascale @ text 3.5
sustained | karolina - - - - | sustained_performance 9.6 PFLOP/s
nodes | karolina - - - - | nodes 72 -
devices | karolina - - - - | devices_per_node 8 -
memory | karolina - - - - | device_memory 40 GiB
@ This petascale supercomputer is hosted @ text 3.6
sustained | discoverer-plus - - - - | sustained_performance 4.5 PFLOP/s | | of all of Discoverer, most of which has no GPUs
nodes | discoverer-plus - - - - | nodes 4 -
devices | discoverer-plus - - - - | devices_per_node 8 -
memory | discoverer-plus - - - - | device_memory 141 GiB
@ This system is in production since April 2021 @ text 3.7
sustained | vega - - - - | sustained_performance 6.9 PFLOP/s
nodes | vega - - - - | nodes 60 -
devices | vega - - - - | devices_per_node 4 -
memory | vega - - - - | device_memory 40 GiB
@ Deucalion is a petascale @ text 3.8
sustained | deucalion - - - - | sustained_performance 7.5 PFLOP/s | | of all of Deucalion, most of which has no GPUs
nodes | deucalion - - - - | nodes 33 -
devices | deucalion - - - - | devices_per_node 4 -
@ JUPITER, the “Joint @ text 3.9
nodes | jupiter - - - - | nodes 5884 -
devices | jupiter - - - - | devices_per_node 4 -
memory | jupiter - - - - | device_memory 96 GiB
@ This dataset uses only 20% @ text 4.3
tiny-classes | - - - image_classification train | share 20 %
tiny-images | - - - image_classification train | share 40 %
tiny-repeats | - - - image_classification train | ratio 13 - | | readings of each image in an epoch
@ For the vision benchmark, we scale up @ text 5.2
lumi-devices | lumi - - - - | devices_per_node 8 - | | GCDs
batch-40 | - 1 - image_classification train | batch_size 128 - | device_memory_gib=40
batch-64 | - 1 - image_classification train | batch_size 256 - | device_memory_gib=64
batch-80 | - 1 - image_classification train | batch_size 512 - | device_memory_gib=80
@ Even when considering per-epoch scaling @ text 5.2 Leonardo
leonardo-16 | leonardo 64 16 image_classification train | scaling_efficiency 90 % | precision=fp32 measure=epoch
leonardo-64 | leonardo 256 64 image_classification train | scaling_efficiency 77 % | precision=fp32 measure=epoch
@ MareNostrum 5 scales very well @ text 5.2 MareNostrum 5
marenostrum-lowest | marenostrum5 - - image_classification train | scaling_efficiency 89 % | measure=median_batch | never below
@ makes sense as the largest run @ text 5.2 Karolina
karolina-part | karolina 512 64 image_classification train | share 90 % | | more than; of all GPU nodes
@ The language benchmark starts at @ text 5.3
full-devices | - 128 - gpt train | ratio 128 - | model=175B | devices of one copy of the model
strong-batch | - - - gpt train | batch_size 1536 - | model=175B scaling=strong
weak-accumulation | - - - gpt train | accumulation_steps 192 - | model=175B scaling=weak
middle-devices | - 1024 - gpt train | ratio 1024 - | model=175B | devices at which weak and strong scaling have the same batch
@ As not all machines offer the hundreds @ text 5.3
smaller | - - - gpt train | ratio 200 - | | around; full over small model
small-strong-batch | - - - gpt train | batch_size 512 - | model=857M scaling=strong
small-weak-accumulation | - - - gpt train | accumulation_steps 16 - | model=857M scaling=weak
@ When considering the full model with weak @ text 5.3 LUMI
lumi-full-weak | lumi 4096 512 gpt train | scaling_efficiency 80 % | model=175B scaling=weak times=32 | above
lumi-full-strong | lumi 4096 512 gpt train | scaling_efficiency 45 % | model=175B scaling=strong
lumi-small-weak | lumi 256 32 gpt train | scaling_efficiency 97 % | model=857M scaling=weak times=32
lumi-small-strong | lumi 256 32 gpt train | scaling_efficiency 83 % | model=857M scaling=strong times=32
small-equal-devices | lumi 32 4 gpt train | ratio 32 - | model=857M | devices at which weak and strong scaling have the same batch
fewer-nodes | lumi - - gpt train | ratio 16 - | | nodes of the full over those of the small model
@ With MareNostrum 5, we were able @ text 5.3 MareNostrum 5
marenostrum-full-low | marenostrum5 512 128 gpt train | scaling_efficiency 75 % | model=175B
marenostrum-full-high | marenostrum5 512 128 gpt train | scaling_efficiency 80 % | model=175B
marenostrum-small | marenostrum5 128 32 gpt train | scaling_efficiency 90 % | model=857M times=32 | above
marenostrum-rate | marenostrum5 - - gpt train | achieved_flops_per_device 384 TFLOP/s | model=175B | up to, as Megatron reports it
marenostrum-loss | marenostrum5 - - gpt train | share 77 % | | up to; rate lost with the small model
"""
