"""Verb that plans memory: memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from caraml.cli.app import app, console
from caraml.cli.run import Settings, SystemName
from caraml.errors import InputError

if TYPE_CHECKING:
    from caraml.engine.fitting import Planned
    from caraml.system.model import System


@app.command()
def memory(
    name: Annotated[str, typer.Argument(help="Suite whose points are planned, or workload whose placements are tried: gpt.")],
    system: SystemName = "local",
    settings: Settings = None,
) -> None:
    """Say what each device's memory will hold before anything runs, and which placements fit."""
    from caraml.report.memory import memory_table
    from caraml.system.catalogue import load_system
    from caraml.workloads import WORKLOADS

    machine = load_system(system)
    planned = _fitting(name, machine, settings or []) if name in WORKLOADS else _suite(name, machine, settings or [])
    console().print(memory_table(planned, machine))


def _suite(name: str, machine: System, settings: list[str]) -> list[Planned]:
    """The points of a suite whose memory can be planned, those included that the machine has too few nodes for."""
    from caraml.campaign.runner import machine_of
    from caraml.campaign.settings import with_settings
    from caraml.engine.fitting import planned_of
    from caraml.suite.expand import expand
    from caraml.suite.load import load_suite
    from caraml.workloads import params_of

    file = with_settings(load_suite(name), settings, params_of)
    found = planned_of(planned.point for planned in expand(file, machine_of(machine), params_of).points)
    if not found:
        raise InputError(f"suite {name!r} has no point of workload 'gpt' that can be placed", "caraml memory gpt --system SYSTEM")
    return found


def _fitting(name: str, machine: System, settings: list[str]) -> list[Planned]:
    """The placements of a workload on the fewest devices of a machine."""
    from caraml.campaign.runner import machine_of
    from caraml.campaign.settings import with_settings
    from caraml.engine.fitting import MOST_DEVICES, smallest_that_fit
    from caraml.suite.expand import expand
    from caraml.suite.load import suite_of
    from caraml.tomlfile import parse_toml
    from caraml.workloads import params_of

    if name != "gpt":
        raise InputError(f"memory is planned for workload 'gpt', not for {name!r}", f"caraml memory gpt --system {machine.name}")
    room = machine.devices[0].memory_bytes
    if room is None:
        raise InputError(f"{machine.name} does not say how much memory a device has", "add devices.memory_bytes to its file")
    document = parse_toml(f'name = "memory"\ntitle = "-"\n[[benchmark]]\nname = "{name}"\nworkload = "{name}"\n{_DEFAULTS}', "memory")
    file = with_settings(suite_of(document), settings, params_of)
    point = expand(file, machine_of(machine), params_of).points[0].point.model_copy(update={"suite": ""})
    shape = params_of(name).model_validate(point.params).model_shape()  # type: ignore[attr-defined]
    found = smallest_that_fit(point, shape, room, machine.devices_per_node)
    if not found:
        raise InputError(f"no placement on up to {MOST_DEVICES} devices of {machine.name} fits", "--set params.recompute=full")
    return found


_DEFAULTS = 'accumulation = 1\nmicro_batch = 1\nprecision = "bf16"\nparams = { data = "synthetic-device" }\n'
