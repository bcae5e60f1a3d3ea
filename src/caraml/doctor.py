"""What this machine can measure and reach: the system's checks, its limits, the power sensors, and what other packages add."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.base.errors import CaramlError, EnvironmentUnfitError
from caraml.base.files import home
from caraml.base.format import human, percent
from caraml.base.plugins import Plugin
from caraml.power.sampler import available_sources
from caraml.power.source import POWER_SOURCES, SourceEntry, how_often, source_plugins
from caraml.results.claim import launcher_plugins
from caraml.system import doctor, families
from caraml.system.detect import detect
from caraml.system.doctor import Check
from caraml.system.environment import environment
from caraml.system.model import DType
from caraml.workloads import workload_plugins
from caraml.workloads.base import Workload

if TYPE_CHECKING:
    from caraml.system.limits import Look

REPORT_VERSION = 1
"""Version of the layout of `caraml doctor --json`; docs/reference/doctor.md describes it."""
_OF_ONE_MACHINE = ("hostname", "uuid", "pci_bus_id", "slurm")
"""Keys that tell one machine, or one job, from others of its kind."""


def checks(output: Path) -> list[Check]:
    """Every finding, in the order in which they are worth reading. ``output`` is where results will be written."""
    return [*doctor.checks(output), *limit_checks(), *power_checks(available_sources()), *plugin_checks()]


def limit_checks() -> list[Check]:
    """What one device reaches, by arithmetic and by library: measured now in short, or searched for in seconds where nothing is kept."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError):
        return []  # the system's checks say why
    from caraml.engine.device import accelerator_type
    from caraml.system.limits import looks

    kind = accelerator_type() if families.forced() != "cpu" else None
    on_gpu, device = kind is not None, torch.device(f"{kind}:0" if kind else "cpu")
    known = families.family_of(kind).arithmetic if kind else families.PLAIN
    wanted: tuple[DType, ...] = ("fp32", "tf32", "bf16", "fp16")
    dtypes = [dtype for dtype in wanted if dtype in known]
    found = [_limit(f"limit: {dtype}", looks(["arithmetic"], device, dtype)["arithmetic"], "FLOP/s") for dtype in dtypes]
    streams = looks(["memory"] if on_gpu else ["memory", "cache"], device)
    return found + [_limit(f"limit: {kind}", one, "B/s") for kind, one in streams.items()]


def _limit(name: str, found: Look | str, unit: str) -> Check:
    if isinstance(found, str):
        return Check(name, "warn", found)
    best, now = found.best, found.now
    others = [f"{kernel} {human(rate, unit)}" for kernel, rate in list(best.by_library.items())[1:]]
    near = "" if best.low is None or best.high is None else f" ± {percent((best.high - best.low) / 2 / best.rate, 2)}"
    text = f"{human(best.rate, unit)}{near}, {best.library} {best.kernel}, {best.size}"
    text += "".join(f"; {other}" for other in others)
    if now is not best:
        text += f"; kept since {best.measured_at[:10]}, now {human(now.rate, unit)}"
    if found.disturbed is None:
        return Check(name, "ok", text)
    return Check(name, "warn", f"{text}; disturbed: {found.disturbed}", "wait until the machine is quiet, then `caraml doctor` again")


_METERS = "a node's meter can be read too: `caraml power sources` lists every kind with what it needs"


def power_checks(sources: list[dict[str, Any]]) -> list[Check]:
    """One finding per sensor that exists, readable or not, and one that names the kinds that do not."""
    found = [_sensor(source) for source in sources if source["found"] or source["asked"]]
    absent = [source["name"] for source in sources if not source["found"] and source["auto"] and not source["asked"]]
    if not any(source["readable"] and source["auto"] for source in sources):
        asked, others = [s["name"] for s in sources if s["asked"]], [s["name"] for s in sources if s["readable"]]
        what = f"none that {POWER_SOURCES} names can be read here" if asked else "none that is read by default is here"
        fix = f"to read what answers: {POWER_SOURCES}={','.join(others)}" if others else _METERS
        found.append(Check("power sensor", "warn", f"{what}: energy will be null", fix))
    if absent:
        found.append(Check("other sensors", "ok", f"not on this machine: {', '.join(absent)}"))
    return found


def _sensor(source: dict[str, Any]) -> Check:
    name = f"power: {source['name']}"
    if not source["readable"]:
        return Check(name, "warn", source["reason"], source["fix"])
    shown = [channel for channel in source["channels"] if channel["kind"] != "apparent_va"]  # it has the name of its power
    told = [f"{c['label']} ({c['boundary']}, {how_often(c['measured_period_s'], c['declared_period_s'])})" for c in shown]
    return Check(name, "ok", "; ".join(told))


def plugin_checks() -> list[Check]:
    """One finding per plug-in: that it can be used, or why not."""
    groups: tuple[tuple[Mapping[str, Plugin], type[Any]], ...] = (
        (workload_plugins(), Workload),
        (source_plugins(), SourceEntry),
        (launcher_plugins(), type),
    )
    return [_plugin(plugin, kind) for group, kind in groups for plugin in group.values()]


def _plugin(plugin: Plugin, kind: type[Any]) -> Check:
    name = f"plug-in: {plugin.name} ({plugin.package})"
    try:
        found = plugin.load(kind)
        return Check(name, "ok", "a launcher" if kind is type else found.title)
    except CaramlError as error:
        return Check(name, "warn", error.args[0], error.hint)


def report(found: Sequence[Check], names: bool = False) -> dict[str, Any]:
    """The findings with the machine and the software, for JSON; without ``names``, nothing that tells whose machine it is."""
    machine = {"system": detect().model_dump(mode="json"), "environment": environment()}
    told = {"report_version": REPORT_VERSION, "checks": [asdict(check) for check in found], **machine}
    if names:
        return told
    hidden = dict.fromkeys(_hosts(), "HOST")
    with suppress(EnvironmentUnfitError):
        hidden = {str(home()): "~", **hidden}
    with suppress(OSError, KeyError):  # a user without a name
        hidden[getpass.getuser()] = "USER"
    hidden.pop("root", None)
    return without_names(told, hidden)


def _hosts() -> set[str]:
    """The names that this host goes by."""
    whole = socket.gethostname()
    return {whole, whole.partition(".")[0]} - {"localhost", ""}


def without_names(value: Any, hidden: Mapping[str, str]) -> Any:
    """``value`` without the keys of one machine, and with other words for the ``hidden`` ones."""
    if isinstance(value, dict):
        return {name: without_names(one, hidden) for name, one in value.items() if name not in _OF_ONE_MACHINE}
    if isinstance(value, list):
        return [without_names(one, hidden) for one in value]
    if isinstance(value, str):
        for word in sorted(hidden, key=len, reverse=True):
            value = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", hidden[word], value)
    return value
