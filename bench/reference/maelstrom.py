"""The tables of the MAELSTROM report: which machine, which application, and what their headings mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import Row, blocks, number

AP = {
    1: "temperature_postprocessing",
    2: "tweet_rain_classification",
    3: "radiation_emulation",
    4: "ensemble_postprocessing",
    5: "downscaling_gan",
    6: "regime_clustering",
}

SYSTEMS = {
    "juwels-booster": "A100",
    "juwels-cluster": "V100",
    "jureca-a100": "A100",
    "jureca-h100": "H100 PCIe",
    "jureca-mi250": "MI250 GCD",
    "jureca-ipu": "GC200",
    "e4-a2": "A2",
    "e4-gh200": "GH200",
    "e4-amd": "",
}

AS_MB = "printed as GB/s; data set size over epoch time gives MB/s, of 2^20 bytes"
OF_2_20 = "MB of 2^20 bytes: 512 samples of five inputs in fp32 are 8.33"
OF_2_30 = "GB of 2^30 bytes: the printed size of the data over the epoch, and that of the data without input is in these"
HALF = "an epoch is 4000 steps of 32 samples, half of the data: rate x epoch is 2080 of 4091 MB"
HALF_RUNS = {(27, 6), (28, 5), (30, 6), (31, 6)}
"""Table and column of what has these epochs: AP3 without input, batch 32 on one device."""
SWAPPED = "batch sizes of columns 5 and 6 are swapped as printed: steps x batch over best epoch, and the other tables, fit the exchange"
COPIED_T18 = "row identical to the integrated energy of Table 18"
COPIED_T19 = "row identical to that of Table 19"
COPIED_T38 = "row identical to that of Table 38; above the aggregate of the only device"
EPOCH_MS = "20 epochs of ms cannot fill the training time; the unit is not ms"
ONE_DEVICE = "of one device, however many #GPUs says: its mean power x runtime"
IDLE_TOO = "of all {} devices of the node, the idle ones too"
OF_A_BATCH = "printed as time of a batch; it is the runtime over the batches of all devices and epochs"
AS_NODE = "printed as GPU energy; it is the mean power of a node x runtime x nodes"


@dataclass(frozen=True)
class Table:
    """What the caption of a table says, and what it should say."""

    number: int
    ap: int
    system: str
    mode: str = "train"
    note: str = ""


TABLES = [
    *(
        Table(n, 1, system)
        for n, system in zip(range(6, 10), ("juwels-booster", "jureca-a100", "jureca-h100", "jureca-mi250"), strict=True)
    ),
    Table(10, 1, "e4-a2"),
    Table(11, 1, "e4-gh200", note="caption names the device H200"),
    *(Table(n, 2, s) for n, s in zip(range(12, 17), ("jureca-a100", "jureca-h100", "jureca-mi250", "e4-gh200", "e4-a2"), strict=True)),
    *(Table(n, 3, s) for n, s in zip(range(17, 22), ("jureca-a100", "jureca-h100", "jureca-mi250", "jureca-mi250", "e4-a2"), strict=True)),
    *(
        Table(n, 3, s, "inference")
        for n, s in zip(range(22, 27), ("jureca-a100", "jureca-h100", "jureca-mi250", "jureca-mi250", "e4-a2"), strict=True)
    ),
    Table(27, 3, "jureca-a100", "compute"),
    Table(28, 3, "e4-gh200", "compute"),
    Table(29, 3, "jureca-mi250", "compute", "caption says 8 GPUs, the table 1"),
    Table(30, 3, "jureca-h100", "compute"),
    Table(31, 3, "jureca-ipu", "compute"),
    Table(32, 4, "juwels-booster"),
    Table(33, 4, "juwels-cluster"),
    Table(34, 4, "e4-a2"),
    Table(35, 5, "jureca-a100", note="caption says AP1; it stands among the tables of AP5 and has their rows"),
    Table(36, 5, "jureca-h100"),
    Table(37, 5, "jureca-mi250", note="caption names the device MI250x"),
    Table(38, 5, "e4-gh200", note="caption names the device H200"),
    Table(39, 5, "e4-a2"),
    Table(40, 5, "e4-a2", "inference"),
    Table(41, 5, "e4-amd", "inference", "the text does not say which device"),
    Table(42, 6, "juwels-booster"),
    Table(43, 6, "juwels-cluster"),
    Table(44, 6, "e4-a2"),
]

FACTS = {
    "jube id": "jube_id",
    "jube wp": "jube_wp",
    "jobid": "job",
    "job id": "job",
    "#job id": "job",
    "nodeid": "node",
    "node id": "node",
    "hardware": "hardware",
    "mpi tasks": "tasks",
    "#mpi tasks": "tasks",
    "cpus/task": "cpus",
    "#cpus per task": "cpus",
    "#cpus": "cpus",
    "#nodes": "nodes",
    "#gpus": "devices",
    "experiment number": "experiment",
    "experiments": "experiment",
    "dataset id": "dataset",
    "data location": "location",
    "experiment flags": "flags",
    "#replicas": "replicas",
    "#steps per execution": "steps_per_execution",
    "dataset size [mb]": "dataset_mb",
    "batch size [mb]": "batch_mb",
    "effective batch size [mb]": "effective_batch_mb",
    "#samples per batch": "batch",
}
"""Headings that describe a run."""

NUMBERS = {
    "total runtime": ("runtime", "s"),
    "training time": ("training_time", "s"),
    "total training time": ("training_time", "s"),
    "avg. epoch time": ("epoch_time_mean", "s"),
    "avg. training time per epoch": ("epoch_time_mean", "s"),
    "training time for epoch": ("epoch_time_mean", "s"),
    "first epoch time": ("epoch_time_first", "s"),
    "first epoch training time": ("epoch_time_first", "s"),
    "min epoch time": ("epoch_time_min", "s"),
    "min. epoch time": ("epoch_time_min", "s"),
    "min. training time per epoch": ("epoch_time_min", "s"),
    "best epoch": ("epoch_time_min", "s"),
    "max epoch time": ("epoch_time_max", "s"),
    "max. epoch time": ("epoch_time_max", "s"),
    "max. training time per epoch": ("epoch_time_max", "s"),
    "avg. batch time": ("step_time_mean", "s"),
    "avg. training time per batch": ("step_time_mean", "s"),
    "avg. training time per iteration": ("step_time_mean", "s"),
    "max. training time per batch": ("step_time_max", "s"),
    "performance": ("input_bandwidth", "GB/s"),
    "(non-first epoch)performance": ("input_bandwidth", "GB/s"),
    "(noon-first epoch)performance": ("input_bandwidth", "GB/s"),
    "effective batch size": ("effective_batch_bytes", "MB"),
    "total io time": ("loading_time", "s"),
    "loading data time": ("loading_time", "s"),
    "data loading": ("loading_time", "s"),
    "data loading overhead": ("loading_time", "s"),
    "model loading": ("model_loading_time", "s"),
    "saving model time": ("saving_time", "s"),
    "evaluation time": ("evaluation_time", "s"),
    "total inference time": ("inference_time", "s"),
    "loss": ("loss_last", ""),
    "final training loss": ("loss_last", ""),
    "val loss": ("loss_validation", ""),
    "last recon. loss val": ("loss_validation", ""),
    "final validation loss": ("loss_validation", ""),
    "max cpu mem": ("peak_host_memory", "GB"),
    "max. cpu mem": ("peak_host_memory", "GB"),
    "max cpu memory": ("peak_host_memory", "GB"),
    "max cpu memory per mpi task": ("peak_host_memory", "GB"),
    "max gpu mem": ("peak_memory", "GB"),
    "max. gpu mem": ("peak_memory", "GB"),
    "max gpu memory": ("peak_memory", "GB"),
    "max gpu memory per mpi task": ("peak_memory", "GB"),
    "total energy": ("device_energy", "Wh"),
    "gpu energy consumption": ("device_energy", "Wh"),
    "integrated total energy": ("device_energy", "Wh"),
    "total energy from counter": ("device_energy", "Wh"),
    "counter total energy": ("device_energy", "Wh"),
    "max power": ("max_device_power", "W"),
    "max. power": ("max_device_power", "W"),
    "max. gpu power": ("max_device_power", "W"),
    "avg. gpu power": ("mean_device_power", "W"),
    "max aggregate power": ("max_aggregate_power", "W"),
    "max. aggregate power": ("max_aggregate_power", "W"),
    "max. aggr. gpu power": ("max_aggregate_power", "W"),
    "avg. aggregate power": ("aggregate_power", "W"),
    "avg aggregate power": ("aggregate_power", "W"),
    "avg. aggr. gpu power": ("aggregate_power", "W"),
    "system avg power": ("node_mean_power", "W"),
    "avg power - full node": ("node_mean_power", "W"),
    "avg. power - full node": ("node_mean_power", "W"),
    "avg. power consumption": ("node_mean_power", "W"),
    "max power - full node": ("node_max_power", "W"),
    "mat power - full node": ("node_max_power", "W"),
    "system avg va": ("node_mean_apparent_power", "VA"),
    "avg. apparent power": ("node_mean_apparent_power", "VA"),
    "max apparent power - full node": ("node_max_apparent_power", "VA"),
    "system total va": ("node_apparent_energy", "Wh"),
    "action": ("action", "MJs"),
}
"""Headings of numbers, without their unit: our name, and the unit where none is printed."""

ON_THE_NODE = {35: 4, 36: 4, 37: 8}
"""Tables of AP5 whose power and energy are of this number of devices, all that the node has, on however many a run is."""
OF_DEVICES = ("device_energy", "aggregate_power", "max_aggregate_power")

MEANT = {"node_mean_apparent_power": "VA", "node_max_apparent_power": "VA", "node_apparent_energy": "VAh"}
"""Units of what is printed in W and Wh but is apparent power."""

CELLS: dict[tuple[int, str, int], str] = {
    (18, "runtime", 4): "misprint: 1199.11 fits the training time",
    (18, "training_time", 3): "longer than the runtime",
    (20, "step_time_mean", 9): "misprint: 0.03 fits the other runs",
    (21, "runtime", 4): "misprint: shorter than the training time; 2260.84 would fit",
    (21, "training_time", 9): "misprint: 1429.56 fits runtime and epochs",
    (28, "epoch_time_min", 2): "printed with a point in front",
    (25, "peak_memory", 2): "printed with a stray 2 behind",
}
"""Notes for single cells: table, metric, column."""


def rows(text: str) -> Iterator[list[str]]:
    """All lines of Tables 1 to 44 but Table 3, which has no numbers."""
    found = blocks(text)
    yield from _actions(found)
    for table in TABLES:
        yield from _table(table, _mended(table.number, found[f"Table {table.number}"]))


def _actions(found: dict[str, list[list[str]]]) -> Iterator[list[str]]:
    for table, ap, mode in ((1, 1, "train"), (2, 2, "train"), (4, 4, "train"), (5, 5, "compute")):
        start = max(i for i, line in enumerate(found[f"Table {table}"]) if line[0] == "Experiment")
        head, *lines = found[f"Table {table}"][start:]
        unit = "MJ/s" if "MJ/s" in head[2] else "MJs"
        for experiment, hardware, printed in lines:
            system = hardware.lower()
            row = Row(
                *("maelstrom", f"Table {table}", int(experiment) + 1, system, SYSTEMS[system], 1, 1, AP[ap], mode),
                parameters={"experiment": int(experiment), "boundary": "node"},
            )
            note = "printed as MJ/s; energy times time is MJ s" if unit == "MJ/s" else ""
            yield row.number("action", printed, unit, note=note)


def _mended(number_of_table: int, lines: list[list[str]]) -> list[list[str]]:
    """Cells that the text rendering of the report tore apart."""
    if number_of_table == 21:  # two rows of the heading are one, and a flag has lost its second word
        first = [["Data location", *lines[0][1:]]]
        flags = [["Experiment flags", *["-nocache"] * 3, *[""] * 3, *["-dl_test -nocache"] * 3]]
        return first + flags + lines[2:]
    return lines


def _table(table: Table, lines: list[list[str]]) -> Iterator[list[str]]:
    width = len(lines[0])
    if any(len(line) != width for line in lines):
        raise ValueError(f"Table {table.number}: rows of different length")
    unknown = [line[0] for line in lines if line[0].lower() not in FACTS and _heading(line[0])[0] not in NUMBERS]
    if unknown:
        raise ValueError(f"Table {table.number}: headings {unknown} are not known")
    facts = {FACTS[line[0].lower()]: line[1:] for line in lines if line[0].lower() in FACTS}
    described = [{name: number(cells[column]) for name, cells in facts.items() if cells[column]} for column in range(width - 1)]
    for column in range(1, width):
        for label, *cells in lines:
            if _heading(label)[0] in NUMBERS and cells[column - 1]:
                yield _number(table, label, column, cells[column - 1], dict(described[column - 1]))


def _number(table: Table, label: str, column: int, cell: str, facts: dict[str, Any]) -> list[str]:
    metric, unit, means, notes = _reading(table, label, column)
    if "Counter" in label or "Integrated" in label:
        facts["method"] = "counter" if "Counter" in label else "integral"
    devices = _devices(table, facts)
    boundary, told = _boundary(table.number, metric, devices)
    facts |= {"boundary": boundary} if boundary else {}
    notes += [told] if told else []
    if table.ap == 6 and facts.get("nodes", 1) > 1 and table.number < 44:
        notes.append("not said whether #GPUs is per node")
    row = Row(
        *("maelstrom", f"Table {table.number}", column, table.system, SYSTEMS[table.system], devices),
        *(facts.pop("nodes", 1), AP[table.ap], "data" if "-dl_test" in str(facts.get("flags")) else table.mode, facts, table.note),
    )
    printed = re.sub(r"^\.(?=\d+\.)|(?<=\d) 2$", "", cell)
    return row.number(metric, printed, unit, means=means, note="; ".join(notes))


def _reading(table: Table, label: str, column: int) -> tuple[str, str, str, list[str]]:
    """Our name of a number, the unit it is printed with, the unit that is meant, and what is to be said of it."""
    name, unit = _heading(label)
    metric, usual = NUMBERS[name]
    unit = unit or usual
    means, notes = MEANT.get(metric, unit), [CELLS[table.number, metric, column]] if (table.number, metric, column) in CELLS else []
    match table.number, metric:
        case ((27 | 28 | 29 | 30 | 31), "input_bandwidth"):
            means, notes = "MiB/s", [*notes, AS_MB]
        case ((27 | 28 | 29 | 30 | 31), "effective_batch_bytes"):
            means, notes = "MiB", [*notes, OF_2_20]
        case ((6 | 7 | 8 | 9 | 10 | 11), "input_bandwidth"):
            means, notes = "GiB/s", [*notes, OF_2_30]
        case ((27 | 28 | 30 | 31), ("training_time" | "epoch_time_min" | "device_energy")) if (table.number, column) in HALF_RUNS:
            notes = [*notes, HALF]
        case ((42 | 43), ("epoch_time_mean" | "epoch_time_first")):
            unit, means, notes = "ms", "ms", [*notes, EPOCH_MS]
        case ((32 | 33 | 34), "training_time") if label.endswith("[s]"):
            metric, notes = "training_time_less_loading", [*notes, "second row of this name in the table"]
        case 44, "device_energy":
            metric, notes = "node_energy", [*notes, AS_NODE]
        case 19, "device_energy" if "Counter" in label:
            notes = [*notes, COPIED_T18]
        case 20, "peak_host_memory":
            notes = [*notes, COPIED_T19]
        case 39, "max_device_power":
            notes = [*notes, COPIED_T38]
    if metric == "step_time_mean" and table.ap in (1, 3):
        metric, notes = "runtime_per_batch", [*notes, OF_A_BATCH]
    return metric, unit, means, notes + ([SWAPPED] if table.number == 28 and column > 4 else [])


def _boundary(table: int, metric: str, devices: int) -> tuple[str, str]:
    """What a power or energy is of, where it is not of the run's devices, and what is to be said of that."""
    if metric == "action":
        return "node", ""
    if table in (42, 43) and metric == "device_energy" and devices > 1:
        return "one device", ONE_DEVICE
    if metric in OF_DEVICES and devices < ON_THE_NODE.get(table, 0):
        return "devices of the node", IDLE_TOO.format(ON_THE_NODE[table])
    return "", ""


def _heading(label: str) -> tuple[str, str]:
    """Name and printed unit of a heading."""
    found = re.fullmatch(r"(.*?)\s*(?:\[(.*?)\])?", label)
    assert found is not None
    return found.group(1).lower(), found.group(2) or ""


def _devices(table: Table, facts: dict[str, Any]) -> int:
    """AP1 and AP5 run one task per device; the others print the number of devices, and Table 29 prints it wrong."""
    devices = facts.pop("devices", None)
    if table.number == 29:
        facts["devices_printed"] = devices
        return 8
    if table.number == 31:
        return int(facts["replicas"])
    return int(facts["tasks"] if devices is None else devices)
