"""What this machine can measure: the system's checks, and the power sensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from caraml.power.doctor import available_sources
from caraml.system import doctor
from caraml.system.doctor import Check


def checks(output: Path) -> list[Check]:
    """Every finding, in the order in which they are worth reading. ``output`` is where results will be written."""
    return [*doctor.checks(output), *power_checks(available_sources())]


def power_checks(sources: list[dict[str, Any]]) -> list[Check]:
    """One finding per sensor that exists, readable or not, and one that names the kinds that do not."""
    found = [_sensor(source) for source in sources if source["found"]]
    absent = [source["name"] for source in sources if not source["found"] and source["auto"]]
    if not any(source["readable"] for source in sources):
        fix = "a node's meter can be read too: `caraml power sources` lists every kind with what it needs"
        found.append(Check("power sensor", "warn", "none can be read here: energy will be null", fix))
    if absent:
        found.append(Check("other sensors", "ok", f"not on this machine: {', '.join(absent)}"))
    return found


def _sensor(source: dict[str, Any]) -> Check:
    name = f"power: {source['name']}"
    if not source["readable"]:
        return Check(name, "warn", source["reason"], source["fix"])
    channels = [f"{channel['label']} ({channel['boundary']}, {_period(channel['measured_period_s'])})" for channel in source["channels"]]
    return Check(name, "ok", "; ".join(channels))


def _period(seconds: float | None) -> str:
    return "update period not seen" if seconds is None else f"new value every {1000 * seconds:.0f} ms"
