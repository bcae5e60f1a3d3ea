"""What the texts claim about their tables: each claim's name, and how it is computed from the tables.

Where a text leaves open which time or which runs it speaks of, every reading is computed, and a claim that fits one of them stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from spans import Span, exact, mean, span_of

from caraml.reference import Reference

HOUR = 3600.0


class Book:
    """Numbers of one source, looked up by table."""

    def __init__(self, rows: Sequence[Reference], source: str) -> None:
        self._rows = [row for row in rows if row.source == source]

    def spans(self, table: int | str, metric: str, devices: int | None = None, **parameters: str) -> list[Span]:
        """The metric in the table's runs, in their order; integrals rather than counters."""
        name = f"Table {table}" if isinstance(table, int) else table
        found = [
            span_of(row)
            for row in self._rows
            if (row.table, row.metric) == (name, metric)
            and row.parameters.get("method") != "counter"
            and devices in (None, row.devices)
            and all(str(row.parameters.get(key, "")) == value for key, value in parameters.items())
        ]
        if not found:
            raise LookupError(f"{name} has no {metric} on {devices} devices with {parameters}")
        return found

    def mean(self, table: int | str, metric: str, devices: int | None = None, **parameters: str) -> Span:
        """Mean over the runs."""
        return mean(self.spans(table, metric, devices, **parameters))

    def stated(self, name: str, system: str | None = None) -> Span:
        """A number that the text states under this name, of this machine."""
        return next(span_of(row) for row in self._rows if row.parameters.get("name") == name and system in (None, row.system))

    def count(self, name: str, system: str | None = None) -> float:
        """A stated number that was counted and not rounded."""
        return self.stated(name, system).middle


Reading = Span | tuple[Span, ...]
TIMES = ("training_time", "runtime", "epoch_time_mean")
AP2 = {"a100": 12, "h100": 13, "mi250": 14, "gh200": 15, "a2": 16}


def _faster(b: Book, slow: tuple[str, int], fast: tuple[str, int]) -> tuple[Span, ...]:
    """AP2: how many times as fast, by each of the times that 'performance' may mean."""
    return tuple(b.mean(AP2[slow[0]], time, slow[1]) / b.mean(AP2[fast[0]], time, fast[1]) for time in TIMES)


def _energy(b: Book, one: tuple[str, int], other: tuple[str, int]) -> Span:
    return b.mean(AP2[one[0]], "device_energy", one[1]) / b.mean(AP2[other[0]], "device_energy", other[1])


def _node_energy(b: Book, table: int) -> list[Span]:
    """Mean power of the node times runtime."""
    return [p * t for p, t in zip(b.spans(table, "node_mean_power"), b.spans(table, "runtime"), strict=True)]


def _shares(parts: list[Span], wholes: list[Span]) -> Span:
    return mean(part / whole for part, whole in zip(parts, wholes, strict=True))


def _from_action(b: Book, table: int, times: list[Span], start: int) -> list[Span]:
    """Energy of the node from Action and runtime."""
    actions = b.spans(table, "action")[start : start + len(times)]
    return [action / time for action, time in zip(actions, times, strict=True)]


def _ap2_node(b: Book, device: str) -> list[Span]:
    """GH200: experiments 3 to 5 of Table 2 are runs 4 to 6 of Table 15."""
    times = b.spans(AP2[device], "runtime")
    return _from_action(b, 2, times[-3:], 3 if device == "gh200" else 0)


def _outside(b: Book, table: int, devices: int | None = None, less: str | None = None) -> list[Span]:
    """Share of the runtime that is not training, or neither training nor the metric ``less``."""
    runtime, training = b.spans(table, "runtime", devices), b.spans(table, "training_time", devices)
    other = b.spans(table, less, devices) if less else [exact(0.0)] * len(runtime)
    return [(all_ - part - rest) / all_ for all_, part, rest in zip(runtime, training, other, strict=True)]


def _loading(b: Book, table: int, devices: int | None = None) -> list[Span]:
    times = zip(b.spans(table, "loading_time", devices), b.spans(table, "runtime", devices), strict=True)
    return [part / whole for part, whole in times]


def _lowest(spans: list[Span]) -> Span:
    return min(spans, key=lambda span: span.middle)


def _highest(spans: list[Span]) -> Span:
    return max(spans, key=lambda span: span.middle)


def _epoch_share(b: Book) -> Span:
    """AP2: the largest share of the training time outside the epoch."""
    found = []
    for table in AP2.values():
        times = zip(b.spans(table, "training_time"), b.spans(table, "epoch_time_mean"), strict=True)
        found += [(training - epoch) / training for training, epoch in times]
    return _highest(found)


MAELSTROM: dict[str, Callable[[Book], Reading]] = {
    "ap2-h100-4": lambda b: (*b.spans(13, "runtime", 4), b.mean(13, "runtime", 4)),
    "ap2-h100-1": lambda b: (*b.spans(13, "runtime", 1), b.mean(13, "runtime", 1)),
    "ap2-h100-ratio": lambda b: b.mean(13, "runtime", 4) / b.mean(13, "runtime", 1),
    "ap1-four-devices": lambda b: exact(1) - b.mean(13, "runtime", 4) / b.mean(13, "runtime", 1),
    "ap3-a2-slower": lambda b: b.mean(21, "runtime", flags="") / b.mean(17, "runtime", flags=""),
    "ap5-a2-slower": lambda b: b.mean(39, "runtime") / b.mean(35, "runtime", 4),
    "ap1-loading-low": lambda b: _lowest([span for table in range(6, 12) for span in _outside(b, table)]),
    "ap1-loading-outlier": lambda b: _highest(_outside(b, 6)),
    "ap1-a2-device-energy": lambda b: b.mean(10, "device_energy"),
    "ap1-gh200-device-energy": lambda b: b.mean(11, "device_energy"),
    "ap1-a2-node-energy": lambda b: mean(_node_energy(b, 10)),
    "ap1-gh200-node-energy": lambda b: mean(_node_energy(b, 11)),
    "ap1-gh200-share": lambda b: _shares(b.spans(11, "device_energy"), _node_energy(b, 11)),
    "ap1-a2-share": lambda b: _shares(b.spans(10, "device_energy"), _node_energy(b, 10)),
    "ap2-other-work": _epoch_share,
    "ap2-mi250-two": lambda b: _faster(b, ("mi250", 2), ("mi250", 4)),
    "ap2-mi250-four": lambda b: _faster(b, ("mi250", 2), ("mi250", 8)),
    "ap2-a100-four": lambda b: _faster(b, ("a100", 1), ("a100", 4)),
    "ap2-h100-four": lambda b: _faster(b, ("h100", 1), ("h100", 4)),
    "ap2-mi250-over-a100": lambda b: _faster(b, ("a100", 4), ("mi250", 8)),
    "ap2-one-mi250-over-a100": lambda b: _faster(b, ("a100", 1), ("mi250", 2)),
    "ap2-h100-over-a100": lambda b: _faster(b, ("a100", 1), ("h100", 1)),
    "ap2-two-h100-over-a100": lambda b: _faster(b, ("a100", 2), ("h100", 2)),
    "ap2-gh200-over-a100": lambda b: _faster(b, ("a100", 1), ("gh200", 1)),
    "ap2-a2-over-a100": lambda b: _faster(b, ("a100", 1), ("a2", 1)),
    "ap2-inference-mi250": lambda b: b.mean(14, "evaluation_time", 2) / b.mean(14, "evaluation_time", 8),
    "ap2-inference-h100": lambda b: b.mean(14, "evaluation_time", 8) / b.mean(13, "evaluation_time", 1),
    "ap2-energy-a100": lambda b: _energy(b, ("a100", 1), ("h100", 1)),
    "ap2-energy-four-h100": lambda b: _energy(b, ("h100", 1), ("h100", 4)),
    "ap2-energy-four-a100": lambda b: _energy(b, ("h100", 1), ("a100", 4)),
    "ap2-energy-four-mi250": lambda b: _energy(b, ("h100", 1), ("mi250", 8)),
    "ap2-energy-two-h100": lambda b: _energy(b, ("h100", 1), ("h100", 2)),
    "ap2-energy-two-a100": lambda b: _energy(b, ("h100", 1), ("a100", 2)),
    "ap2-energy-two-mi250": lambda b: _energy(b, ("h100", 1), ("mi250", 4)),
    "ap2-loading-jsc-low": lambda b: _lowest(_loading(b, 12) + _loading(b, 13) + _loading(b, 14)),
    "ap2-loading-jsc-high": lambda b: _highest(_loading(b, 12) + _loading(b, 13) + _loading(b, 14)),
    "ap2-loading-e4-low": lambda b: _lowest(_loading(b, 15) + _loading(b, 16)),
    "ap2-rest-high": lambda b: _highest(_outside(b, 13, less="loading_time")),
    "ap2-rest-outlier": lambda b: _highest(_outside(b, 14, less="loading_time")),
    "ap2-gh200-device-energy": lambda b: mean(b.spans(15, "device_energy")[-3:]),
    "ap2-gh200-node-energy": lambda b: mean(_ap2_node(b, "gh200")),
    "ap2-gh200-share": lambda b: _shares(b.spans(15, "device_energy")[-3:], _ap2_node(b, "gh200")),
    "ap2-a2-device-energy": lambda b: b.mean(16, "device_energy"),
    "ap2-a2-node-energy": lambda b: mean(_ap2_node(b, "a2")),
    "ap2-a2-share": lambda b: _shares(b.spans(16, "device_energy"), _ap2_node(b, "a2")),
    "ap2-gh200-action": lambda b: mean(b.spans(2, "action")[3:]),
    "ap2-a2-action": lambda b: mean(b.spans(2, "action")[:3]),
    "ap3-a100-cache": lambda b: exact(1) - b.mean(17, "training_time", flags="") / b.mean(17, "training_time", flags="-nocache"),
    "ap3-a100-device-energy": lambda b: b.mean(17, "device_energy", flags=""),
    "ap3-a100-nocache-energy": lambda b: b.mean(17, "device_energy", flags="-nocache") / b.mean(17, "device_energy", flags="") - exact(1),
    "ap3-a100-data-energy": lambda b: b.mean(17, "device_energy", flags="-dl_test -nocache"),
    "ap3-a100-inference": lambda b: b.mean(22, "inference_time"),
    "ap3-a100-loading": lambda b: b.mean(22, "loading_time"),
    "ap3-a100-rest": lambda b: b.mean(22, "runtime") - b.mean(22, "inference_time"),
    "ap3-a2-device-low": lambda b: _lowest(b.spans(21, "device_energy")),
    "ap3-a2-device-high": lambda b: _highest(b.spans(21, "device_energy")),
    "ap3-a2-node-low": lambda b: _lowest(_node_energy(b, 21)),
    "ap3-a2-node-high": lambda b: _highest(_node_energy(b, 21)),
    "ap3-a2-inference-node": lambda b: mean(_node_energy(b, 26)[:2]),
    "ap3-a2-inference-last": lambda b: _node_energy(b, 26)[2],
    "ap3-gh200-node-high": lambda b: _highest([p * t for p, t in _non_io(b)]),
    "ap3-gh200-node-low": lambda b: _lowest([p * t for p, t in _non_io(b)]),
    "ap4-loading-high": lambda b: _highest([span for table in (32, 33, 34) for span in _loading(b, table)]),
    "ap4-a2-runtime-low": lambda b: _lowest(b.spans(34, "runtime")),
    "ap4-gh200-node-energy": lambda b: mean(_ap4_node(b, "gh200", 2)),
    "ap4-a2-node-energy": lambda b: mean(_ap4_node(b, "a2", 0)),
    "ap4-gh200-action": lambda b: mean(b.spans(4, "action")[2:]),
    "ap4-a2-action": lambda b: mean(b.spans(4, "action")[:2]),
    "ap5-a100-epoch": lambda b: b.mean(35, "epoch_time_mean", 1),
    "ap5-a100-first-epoch": lambda b: b.mean(35, "epoch_time_first", 1),
    "ap5-batch-high": lambda b: b.stated("ap5-batch-gh200"),
    "ap5-mi250-eight-ratio": lambda b: b.stated("ap5-mi250-one") / b.stated("ap5-mi250-eight"),
    "ap5-a100-four": lambda b: _scaled(b, 35, 4),
    "ap5-mi250-eight-train": lambda b: _scaled(b, 37, 8),
    "ap5-h100-legacy": lambda b: b.mean(36, "epoch_time_mean", 1),
    "ap5-loading-mi250-low": lambda b: _lowest(_outside(b, 37, 8)),
    "ap5-loading-mi250-high": lambda b: _highest(_outside(b, 37, 8)),
    "ap5-loading-a100-low": lambda b: _lowest(_outside(b, 35, 4)),
    "ap5-loading-a100-high": lambda b: _highest(_outside(b, 35, 4)),
    "ap5-loading-h100-low": lambda b: _lowest(_outside(b, 36, 2)),
    "ap5-loading-h100-high": lambda b: _highest(_outside(b, 36, 2)),
    "ap5-loading-gh200-low": lambda b: _lowest(_outside(b, 38)),
    "ap5-loading-gh200-high": lambda b: _highest(_outside(b, 38)),
    "ap5-loading-a2": lambda b: mean(_outside(b, 39)),
    "ap6-a2-four": lambda b: b.stated("a2-2x2-runtime") / b.stated("a2-1x1-runtime") * _left(b, "ap6-a2-time") * _left(b, "ap6-h100-time"),
    "ap6-mi250-time-a100": lambda b: exact(1) - _left(b, "ap6-mi250-time") * _left(b, "ap6-h100-time"),
    "ap6-mi250-power-a100": lambda b: exact(1) - _left(b, "ap6-mi250-power") * _left(b, "ap6-h100-power"),
    "ap6-a2-time-mi250": lambda b: _left(b, "ap6-a2-time") / _left(b, "ap6-mi250-time") - exact(1),
    "ap6-a2-power-mi250": lambda b: exact(1) - _left(b, "ap6-a2-power") / _left(b, "ap6-mi250-power"),
    "ap6-gh200-time": lambda b: (
        exact(1) - b.stated("gh200-1x1-runtime") / b.stated("a2-1x1-runtime") * (exact(1) + b.stated("ap6-a2-time-mi250"))
    ),
    "ap6-a2-performance": lambda b: b.stated("gh200-1x1-runtime") / b.stated("a2-1x1-runtime"),
    "ap6-a2-energy": lambda b: b.stated("a2-1x1-device") / b.stated("gh200-1x1-device"),
    "ap6-two-a2-performance": lambda b: b.stated("gh200-1x1-runtime") / b.stated("a2-1x2-runtime") - exact(1),
    "ap6-two-a2-energy": lambda b: b.stated("a2-1x2-device") / b.stated("gh200-1x1-device"),
}
"""Claims of the MAELSTROM report that its tables or other claims can answer."""


def _left(b: Book, name: str) -> Span:
    """What is left where a text says by how much something is less."""
    return exact(1) - b.stated(name)


def _non_io(b: Book) -> Iterator[tuple[Span, Span]]:
    yield from zip(b.spans(28, "node_mean_power"), b.spans(28, "training_time"), strict=True)


def _ap4_node(b: Book, device: str, start: int) -> list[Span]:
    return _from_action(b, 4, [b.stated(f"ap4-{device}-runtime-{end}") for end in ("low", "high")], start)


def _scaled(b: Book, table: int, devices: int) -> tuple[Span, ...]:
    """AP5: times on one device over times on several."""
    return tuple(b.mean(table, time, 1) / b.mean(table, time, devices) for time in TIMES)


EPICURE: dict[str, Callable[[Book], Reading]] = {
    "karolina-part": lambda b: exact(64 / b.count("nodes", "karolina")),
    "smaller": lambda b: b.stated("full-model") / b.stated("small-model"),
    "tiny-repeats": lambda b: exact(1281167 / 100000),
    "middle-devices": lambda b: exact(b.count("strong-batch") / b.count("weak-accumulation") * b.count("full-devices")),
    "small-equal-devices": lambda b: exact(b.count("small-strong-batch") / b.count("small-weak-accumulation")),
    "fewer-nodes": lambda b: exact(b.count("full-devices") / b.count("lumi-devices")),
}
CARAML: dict[str, Callable[[Book], Reading]] = {
    "sxm-links": lambda b: exact(b.count("links", "westai-h100") / b.count("links", "jureca-h100")),
    "sxm-tdp": lambda b: exact(b.count("tdp", "westai-h100") / b.count("tdp", "jureca-h100")),
    "pcie-efficiency": lambda b: b.stated("sxm-energy") / b.stated("sxm-rate") - exact(1),
    "a100-efficiency": lambda b: b.stated("a100-rate") * b.stated("mi250-energy"),
    "ipu-most-energy": lambda b: _highest(b.spans("IPU NLP", "epoch_energy_per_device")),
    "epoch": lambda b: b.stated("epoch-figure"),
}
PEARC: dict[str, Callable[[Book], Reading]] = {
    "ipu-rate": lambda b: b.spans("Table 4", "throughput", 1, batch="10")[1],
    "gpu-rate": lambda b: b.spans("Table 4", "throughput", 1, batch="10")[0],
    "gpu-best": lambda b: _highest(b.spans("Table 4", "throughput", 2, batch="512")),
    "ipu-before": lambda b: exact(70000) / b.mean("Table 4", "epoch_time_second", 16),
    "ipu-after": lambda b: b.mean("Table 4", "throughput", 16),
    "effective-batch": lambda b: b.stated("batch") * b.stated("accumulation"),
}
CLAIMS = {"caraml": CARAML, "maelstrom": MAELSTROM, "pearc": PEARC, "epicure": EPICURE}

ABOUT = {
    "ap5-a100-epoch": 0.01,
    "ap5-a2-slower": 0.05,
    "smaller": 0.05,
    "ipu-rate": 0.02,
    "ipu-before": 0.03,
    "ipu-after": 0.01,
    "tiny-repeats": 0.02,
}
"""Claims that the text itself calls approximate."""


def claims(rows: Sequence[Reference]) -> Iterator[tuple[Reference, str, tuple[Span, ...], float]]:
    """Each claim that the tables can answer: the printed number, its name, its readings, the relative tolerance."""
    for source, computed in CLAIMS.items():
        book = Book(rows, source)
        for row in rows:
            name = str(row.parameters.get("name"))
            if row.source == source and name in computed and row.table.startswith("text"):
                reading = computed[name](book)
                yield row, f"claim {name}", reading if isinstance(reading, tuple) else (reading,), ABOUT.get(name, 0.0)
