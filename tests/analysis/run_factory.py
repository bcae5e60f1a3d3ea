"""Records with chosen numbers and nothing else."""

from __future__ import annotations

from typing import Any

from record_factory import make_point

from caraml.metrics.model import Facts, Metric
from caraml.results.record import Record


def metric(value: float, unit: str, half: float | None = 0.005, **more: Any) -> Metric:
    """A number with a relative half-width."""
    ends = {} if half is None else {"low": value * (1 - half), "high": value * (1 + half)}
    return Metric(value=value, unit=unit, **ends, **more)


def run(rate: float, half: float | None = 0.005, energy: float | None = None, **changes: Any) -> Record:
    """A record of ``rate`` tokens per second over all devices and ``energy`` joules per token. Other keywords: of the point, or of the
    record where it has a field of that name; ``more`` are further metrics."""
    of_record = {
        name: changes.pop(name) for name in list(changes) if name in Record.model_fields and (name, type(changes[name])) != ("system", str)
    }
    more = changes.pop("more", {})
    point = make_point(
        **{"micro_batch": changes.get("global_batch", 16) // (changes.get("nodes", 1) * changes.get("devices", 1)), **changes}
    )
    metrics = {
        "throughput": metric(rate, "token/s", half),
        "throughput_per_device": metric(rate / point.world, "token/s", half),
        "step_time_median": Metric(value=point.global_batch / rate, unit="s"),
        "energy_per_item": metric(energy, "J/token", 0.01, scope="device")
        if energy
        else Metric(value=None, unit="J/token", reason="no sensor"),
        "energy": metric(energy, "J", 0.01, scope="device") if energy else Metric(value=None, unit="J", reason="no sensor"),
        **more,
    }
    facts = Facts(item="token", items_per_sample=1, parameters=1, flops_per_item=1.0, flops_formula="1")
    values: dict[str, Any] = {"status": "ok", "started_at": "2026-10-01T12:00:00+00:00", "metrics": metrics, "facts": facts, **of_record}
    return Record(key=point.key, attempt=values.pop("attempt", 1), point=point, **values)


def repeats(rates: list[float], **changes: Any) -> list[Record]:
    """One record for each rate, as repeats of one piece of work."""
    return [run(rate, repeat=index, **changes) for index, rate in enumerate(rates)]
