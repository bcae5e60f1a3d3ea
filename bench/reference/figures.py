"""Figures of the sources, drawn again from their tables alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from draw import Axis, Look, Panel, bars, dots, lines, matrices
from runs import APPS, DEVICE, WH, Run, look, mean, runs

from caraml.reference import select

# ------------------------------------------------------------------------------------------------------------- CARAML's slides


def ipu_nlp() -> str:
    """Rate and efficiency of GPT training on the IPU."""
    return _ipu("IPU NLP", "sequence", "GPT 117M on four GC200, pipeline of 4")


def ipu_cv() -> str:
    """Rate and efficiency of ResNet-50 on the IPU."""
    return _ipu("IPU CV", "image", "ResNet-50 on one GC200")


def _ipu(table: str, item: str, name: str) -> str:
    found = runs(table, "caraml")
    batches = [float(run.parameters["batch"]) for run in found]
    x = Axis("batch size [samples]", log=2, ticks=batches[::2], domain=(batches[0] / 1.2, batches[-1] * 1.2))
    panels = []
    for metric, unit in (("throughput", f"{item}s/s"), ("items_per_watt_hour", f"{item}s/Wh")):
        values = [run.numbers[metric] for run in found]
        low = 0.0 if min(values) < 0.5 * max(values) else min(values) * 0.99
        rows = [{"series": name, "x": batch, "y": value} for batch, value in zip(batches, values, strict=True)]
        panels.append(Panel(x, Axis(unit, domain=(low, max(values) * 1.02)), rows))
    return lines(panels, {name: look("GC200")}, f"{table}: {name}")


# ------------------------------------------------------------------------------------------------------- MAELSTROM, all applications


def _groups(ap3: Sequence[int]) -> dict[tuple[str, str], dict[int, list[Run]]]:
    """Application and device to its runs by number of devices. ``ap3``: tables of AP3, whose batch is 512 and which use the cache."""
    tables = {"AP1": [7, 8, 9, 10, 11], "AP2": [12, 13, 14, 15, 16], "AP3": ap3, "AP5": [35, 36, 37, 38, 39]}
    found: dict[tuple[str, str], dict[int, list[Run]]] = {}
    for app, numbers in tables.items():
        for run in (run for number in numbers for run in runs(number)):
            if run.parameters.get("batch") in (None, 512) and not run.parameters.get("flags"):
                found.setdefault((app, run.device), {}).setdefault(run.devices, []).append(run)
    for run in runs("text 4.9.8"):
        if "runtime" in run.numbers:
            found.setdefault(("AP6", run.device), {}).setdefault(run.devices, []).append(run)
    return found


SCALED = [27, 30, 20, 19]
"""AP3 ran on several A100 and H100 only without input; the report's Figures 1 to 3 take those runs."""
FULL = [17, 18, 19, 21]
"""Full runs of AP3, on one device but for MI250."""


def _time(of: Sequence[Run]) -> float:
    """Runtime; of AP3 the training time, because two runtimes of its full runs are misprints and the others have none."""
    time = mean(of, "training_time" if of[0].workload == APPS["AP3"] else "runtime")
    assert time is not None, "every run has a time"
    return time


def _energy(of: Sequence[Run]) -> float:
    energy = mean(of, "device_energy")
    assert energy is not None, "every run has an energy"
    return energy


def scaling() -> str:
    """Time and energy at the best number of devices over those at the smallest."""
    panels = []
    for heading, measured in (("time-to-solution", _time), ("energy-to-solution", _energy)):
        cells = []
        for (app, device), by_devices in _groups(SCALED).items():
            if len(by_devices) > 1:
                few = min(by_devices)
                best = min(by_devices, key=lambda n, of=by_devices, what=measured: what(of[n]))  # type: ignore[misc]
                ratio = measured(by_devices[best]) / measured(by_devices[few])
                cells.append({"x": app, "y": device, "text": f"{ratio:.2f}|{few} → {best}", "shade": 1 - ratio})
        panels.append((f"{heading}: best over smallest", cells))
    return matrices(panels, ["AP2", "AP3", "AP5", "AP6"], list(DEVICE)[:5], "Scaling of time and energy with devices")


def best_time_energy() -> str:
    """Energy at the number of devices with the best time, over that at the smallest number."""
    cells = []
    for (app, device), by_devices in _groups(SCALED).items():
        if len(by_devices) > 1:
            few, best = min(by_devices), min(by_devices, key=lambda n, of=by_devices: _time(of[n]))  # type: ignore[misc]
            ratio = _energy(by_devices[best]) / _energy(by_devices[few])
            cells.append({"x": app, "y": device, "text": f"{ratio:.2f}|{few} → {best}", "shade": min(ratio / 3, 1.0)})
    heading = "energy at the best time, over that on the fewest devices"
    return matrices([(heading, cells)], ["AP2", "AP3", "AP5", "AP6"], list(DEVICE)[:5], heading)


def to_solution() -> str:
    """Energy and time of each application on each device, with the number of devices of the best time."""
    energies, times = [], []
    for (app, device), by_devices in _groups(FULL).items():
        best = min(by_devices, key=lambda n, of=by_devices: _time(of[n]))  # type: ignore[misc]
        energies.append({"series": device, "y": app, "x": _energy(by_devices[best]) / WH})
        times.append({"series": device, "y": app, "x": _time(by_devices[best])})
    for name, device in (("ap4-gh200", "GH200"), ("ap4-a2", "A2")):
        stated = {str(row.parameters["name"]): row.value or 0.0 for row in select(source="maelstrom", table="text 4.7.2")}
        energies.append({"series": device, "y": "AP4", "x": stated[f"{name}-device-energy"] / WH})
        times.append({"series": device, "y": "AP4", "x": (stated[f"{name}-runtime-low"] + stated[f"{name}-runtime-high"]) / 2})
    panels = [
        Panel(Axis("energy of the devices [Wh]", log=10, domain=(10, 500)), Axis(""), energies),
        Panel(Axis("time [s]", log=10, domain=(100, 30000)), Axis(""), times),
    ]
    return dots(panels, list(APPS), {device: look(device) for device in list(DEVICE)[:5]}, "Energy and time to solution")


def _stated(table: str) -> dict[str, float]:
    """Numbers of a text by their name."""
    return {str(row.parameters["name"]): row.value or 0.0 for row in select(source="maelstrom", table=table)}


def node_energy() -> str:
    """Energy of devices and of the rest of the node, A2 and GH200."""
    parts: list[tuple[str, float, float]] = []
    for app, table in (("AP1", 10), ("AP1", 11)):
        parts.append(_from_power(app, runs(table)))
    two, four = _stated("text 4.3.2"), _stated("text 4.7.2")
    parts += [("AP2 A2", two["ap2-a2-device-energy"], two["ap2-a2-node-energy"])]
    parts += [("AP2 GH200", two["ap2-gh200-device-energy"], two["ap2-gh200-node-energy"])]
    parts.append(_from_power("AP3", [run for run in runs(21) if not run.parameters.get("flags")]))
    parts += [("AP4 A2", four["ap4-a2-device-energy"], four["ap4-a2-node-energy"])]
    parts += [("AP4 GH200", four["ap4-gh200-device-energy"], four["ap4-gh200-node-energy"])]
    for table in (39, 38):
        parts.append(_from_power("AP5", runs(table)))
    best = {run.device: run for run in runs("text 4.9.8")}
    parts += [(f"AP6 {run.devices} x {name}", run.numbers["device_energy"], run.numbers["node_energy"]) for name, run in best.items()]
    return _node_bars(parts, "Energy of devices and node")


def _from_power(app: str, of: Sequence[Run]) -> tuple[str, float, float]:
    """Energy of the node as its mean power times the runtime."""
    node = statistics.fmean(run.numbers["node_mean_power"] * run.numbers["runtime"] for run in of)
    return f"{app} {of[0].device}", _energy(of), node


def _node_bars(parts: Sequence[tuple[str, float, float]], title: str) -> str:
    rows: list[dict[str, object]] = []
    for name, device, node in parts:
        text = f"{node / WH:,.0f} Wh, {100 * device / node:.0f} % in devices"
        rows.append({"y": name, "part": "devices", "a": 0.0, "b": device / WH})
        rows.append({"y": name, "part": "rest of the node", "a": device / WH, "b": node / WH, "text": text})
    far = max(node for _, _, node in parts) / WH
    return bars(rows, ["devices", "rest of the node"], Axis("energy [Wh]", zero=True, domain=(0, far * 1.45)), title)


# ------------------------------------------------------------------------------------------- MAELSTROM, AP2 and AP3 in full


def ap2_split() -> str:
    """Where the runtime of AP2 goes."""
    rows: list[dict[str, object]] = []
    for table in (12, 13, 14, 15, 16):
        by_devices: dict[int, list[Run]] = {}
        for run in runs(table):
            by_devices.setdefault(run.devices, []).append(run)
        for count, of in sorted(by_devices.items()):
            loading = statistics.fmean(run.numbers["loading_time"] / run.numbers["runtime"] for run in of)
            training = statistics.fmean(run.numbers["training_time"] / run.numbers["runtime"] for run in of)
            ends = {"training": (0.0, training), "loading": (training, training + loading), "rest": (training + loading, 1.0)}
            for part, (a, b) in ends.items():
                rows.append({"y": f"{count} x {of[0].device}", "part": part, "a": 100 * a, "b": 100 * b})
            seconds = statistics.fmean(run.numbers["runtime"] for run in of)
            rows[-1]["text"] = f"{seconds:,.0f} s, loading {100 * loading:.1f} %"
    x = Axis("share of the runtime [%]", zero=True, ticks=[0, 20, 40, 60, 80, 100], domain=(0, 140))
    return bars(rows, ["training", "loading", "rest"], x, "AP2: runtime by training, loading and rest")


def ap3_flags() -> str:
    """Training time and energy of AP3 with and without cache, and of loading alone."""
    names = {"-nocache": "without cache", "": "with cache", "-dl_test -nocache": "loading alone"}
    times, energies = [], []
    for table in (17, 18, 19, 20, 21):
        for flags, name in names.items():
            of = [run for run in runs(table) if run.parameters.get("flags", "") == flags]
            # Of three repeats the median, because one time of Table 21 is a misprint of ten times the others.
            row = {"series": name, "y": f"{of[0].devices} x {of[0].device}"}
            times.append(row | {"x": statistics.median(run.numbers["training_time"] for run in of)})
            energies.append(row | {"x": statistics.median(run.numbers["device_energy"] for run in of) / WH})
    panels = [
        Panel(Axis("training time [s]", zero=True, domain=(0, 2700)), Axis(""), times),
        Panel(Axis("energy of the devices [Wh]", zero=True, domain=(0, 180)), Axis(""), energies),
    ]
    looks = {"without cache": Look(1, 1), "with cache": Look(0, 0), "loading alone": Look(2, 2, hollow=True)}
    return dots(panels, list(dict.fromkeys(str(row["y"]) for row in times)), looks, "AP3: training time and energy by flags")


# ------------------------------------------------------------------------------------------------ MAELSTROM, AP3 without input

NON_IO = {27: "A100", 28: "GH200", 29: "MI250 GCD", 30: "H100 PCIe", 31: "GC200"}


def _non_io(metric: str, factor: float) -> list[dict[str, object]]:
    """A metric over the batch of one device. Table 28 has the batches of its last two runs exchanged, and they are exchanged back."""
    rows: list[dict[str, object]] = []
    for table, device in NON_IO.items():
        found = runs(table)
        batches = [float(run.parameters["batch"]) for run in found]
        if table == 28:
            batches[4:] = [batches[5], batches[4]]
        for run, batch in zip(found, batches, strict=True):
            rows.append({"series": f"{run.devices} x {device}", "x": batch, "y": run.numbers[metric] / factor})
    return rows


def _non_io_looks() -> dict[str, Look]:
    counts = [(1, "A100"), (4, "A100"), (1, "H100 PCIe"), (4, "H100 PCIe"), (1, "GH200"), (8, "MI250 GCD"), (1, "GC200"), (4, "GC200")]
    return {f"{count} x {device}": look(device, hollow=count == 1) for count, device in counts}


def _batch_axis() -> Axis:
    return Axis("batch per device [samples]", log=2, ticks=[32, 64, 128, 256, 512], domain=(28, 590))


def ap3_rate() -> str:
    """Input per second of AP3 without input from disk."""
    panel = Panel(_batch_axis(), Axis("MB/s", log=10, domain=(25, 2500)), _non_io("input_bandwidth", 1e6))
    return lines([panel], _non_io_looks(), "AP3 without input: data per second over batch", columns=3)


def ap3_energy_time() -> str:
    """Energy and training time of AP3 without input."""
    panels = [
        Panel(_batch_axis(), Axis("energy of the devices [Wh]", log=10, domain=(1.7, 25)), _non_io("device_energy", WH)),
        Panel(_batch_axis(), Axis("training time [s]", log=10, domain=(15, 400)), _non_io("training_time", 1.0)),
    ]
    return lines(panels, _non_io_looks(), "AP3 without input: energy and time over batch")


def ap3_heat() -> str:
    """The same numbers as shaded tables."""
    panels = []
    for heading, metric, factor, digits in (("energy [Wh]", "device_energy", WH, 2), ("time [s]", "training_time", 1.0, 1)):
        found = _non_io(metric, factor)
        high = max(float(str(row["y"])) for row in found)
        cells = [
            {"x": f"{row['x']:.0f}", "y": row["series"], "text": f"{row['y']:.{digits}f}", "shade": float(str(row["y"])) / high}
            for row in found
        ]
        panels.append((f"{heading} by batch per device", cells))
    return matrices(panels, ["32", "64", "128", "256", "384", "512"], list(_non_io_looks()), "AP3 without input: energy and time")


# ------------------------------------------------------------------------------------------------------------ MAELSTROM, AP5, AP6


def ap5_scaling() -> str:
    """Mean epoch and energy of AP5 over devices, full pipeline."""
    rows: dict[str, list[dict[str, object]]] = {"epoch_time_mean": [], "device_energy": []}
    for table in (35, 36, 37, 38, 39):
        by_devices: dict[int, list[Run]] = {}
        for run in runs(table):
            by_devices.setdefault(run.devices, []).append(run)
        for count, of in by_devices.items():
            for metric, factor in (("epoch_time_mean", 1.0), ("device_energy", WH)):
                value = mean(of, metric)
                assert value is not None, "every run of AP5 has both"
                rows[metric].append({"series": of[0].device, "x": count, "y": value / factor})
    x = Axis("devices", log=2, ticks=[1, 2, 4, 8], domain=(0.85, 9.4))
    panels = [
        Panel(x, Axis("mean epoch [s]", log=10, domain=(250, 6000)), rows["epoch_time_mean"]),
        Panel(x, Axis("energy of 4 epochs [Wh]", zero=True, domain=(0, 700)), rows["device_energy"]),
    ]
    looks = {device: look(device) for device in ("A2", "A100", "H100 PCIe", "MI250 GCD", "GH200")}
    return lines(panels, looks, "AP5: epoch and energy over devices", columns=5)


def _ap6() -> list[tuple[str, Run]]:
    nodes = {row.run: row.nodes for row in select(source="maelstrom", table="text 4.9.8")}
    numbered = zip(sorted(nodes), runs("text 4.9.8"), strict=True)
    return [(f"{run.devices} x {run.device}, {nodes[of]} node{'s' if nodes[of] != 1 else ''}", run) for of, run in numbered]


def ap6_energy() -> str:
    """Energy of devices and node in AP6."""
    parts = [(name, run.numbers["device_energy"], run.numbers["node_energy"]) for name, run in _ap6()]
    return _node_bars(parts, "AP6: energy of devices and node")


def ap6_action() -> str:
    """Action of AP6."""
    rows = []
    for name, run in _ap6():
        action = run.numbers["energy_time_product"] / 1e6
        rows.append({"y": name, "part": "Action", "a": 0.0, "b": action, "text": f"{action:,.0f} MJ s"})
    return bars(rows, ["Action"], Axis("energy of the node x time [MJ s]", zero=True, domain=(0, 36000)), "AP6: Action")


# -------------------------------------------------------------------------------------------------------------------------- PEARC


def pearc_scaling() -> str:
    """ResNet-50 on IPUs, PyTorch and TensorFlow, against one IPU times their number."""
    second = [run for run in _epochs(2) if run.parameters["instances"] != 16]
    rows = [{"series": "PyTorch, 2nd epoch", "x": run.devices, "y": run.numbers["throughput"]} for run in second]
    tensorflow = [run for run in runs(3, "pearc") if run.parameters["batch"] == 20]
    rows += [{"series": "TensorFlow 1", "x": run.devices, "y": run.numbers["throughput"]} for run in tensorflow]
    one = tensorflow[0].numbers["throughput"]
    rows += [{"series": "TensorFlow 1, one IPU x number", "x": n, "y": one * n} for n in (1, 2, 4, 8, 16, 64)]
    small = [run for run in runs(3, "pearc") if run.devices == 1]
    batch = [{"series": "TensorFlow 1", "x": run.parameters["batch"], "y": run.numbers["throughput"]} for run in small]
    panels = [
        Panel(Axis("IPUs", log=2, ticks=[1, 2, 4, 8, 16, 64], domain=(0.85, 75)), Axis("images/s", log=10, domain=(1500, 160000)), rows),
        Panel(Axis("batch on one IPU [images]", domain=(0, 21), zero=True), Axis("images/s", zero=True, domain=(0, 2300)), batch),
    ]
    looks = {"PyTorch, 2nd epoch": Look(0, 0), "TensorFlow 1": Look(1, 1), "TensorFlow 1, one IPU x number": Look(6, 3, hollow=True)}
    return lines(panels, looks, "ResNet-50 on IPUs", columns=3)


def _epochs(epoch: int) -> list[Run]:
    """Table 1: the first and the second epoch are two numbers of one run."""
    found = [row for row in select(source="pearc", table="1") if row.parameters["epoch"] == epoch]
    return [Run(r.system, r.device, r.devices or 1, r.workload, r.parameters, {r.metric: r.value or 0.0}) for r in found]


def pearc_compression() -> str:
    """The image compression model on IPUs and GPUs."""
    rows = []
    for run in runs(4, "pearc"):
        gpu = run.device != "GC200"
        rows.append(
            {
                "series": f"A100, batch {run.parameters['batch']}" if gpu else "IPU, batch 10",
                "x": run.devices,
                "y": run.numbers["throughput"],
            }
        )
    panel = Panel(Axis("devices", log=2, ticks=[1, 2, 4, 8, 16], domain=(0.85, 19)), Axis("images/s", log=10, domain=(200, 30000)), rows)
    looks = {"IPU, batch 10": Look(5, 0)}
    looks |= {f"A100, batch {batch}": Look(1, shape, hollow=True) for batch, shape in ((10, 1), (128, 2), (256, 3), (512, 4))}
    return lines([panel], looks, "Image compression on IPUs and A100", columns=3)
