"""Verb that plans memory: memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

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
    from caraml.engine.fitting import USABLE
    from caraml.report.tables import query_table
    from caraml.system.catalogue import load_system
    from caraml.units import GIB
    from caraml.workloads import WORKLOADS

    machine = load_system(system)
    room = machine.devices[0].memory_bytes
    planned = _fitting(name, machine, settings or []) if name in WORKLOADS else _suite(name, machine, settings or [])
    columns = ["point", "devices", "parameters", "gradients", "optimizer", "activations", "logits", "communication", "peak", "fits"]
    rows = [_row(one, room) for one in planned]
    console().print(query_table(columns, rows))
    if room is not None:
        typer.echo(f"GiB of each device; fits: peak up to {100 * USABLE:g} % of the {room / GIB:,.1f} GiB of {machine.devices[0].model}")
    else:
        typer.echo(f"GiB of each device; {machine.name} does not say how much memory a device has")


def _row(one: Planned, room: int | None) -> list[Any]:
    point = one.point
    label = f"{point.label}" if point.suite else point.placement.label(point.dp) or f"dp{point.dp}"
    fits = "–" if room is None else "yes" if one.fits(room) else "no"
    return [label, f"{point.nodes} x {point.devices}", *(f"{value:,.2f}" for value in one.plan.gib().values()), fits]


def _suite(name: str, machine: System, settings: list[str]) -> list[Planned]:
    """The points of a suite whose memory can be planned, those included that the machine has too few nodes for."""
    from caraml.campaign.runner import machine_of
    from caraml.campaign.settings import with_settings
    from caraml.engine.fitting import Planned
    from caraml.engine.memory import memory_plan
    from caraml.suite.expand import expand
    from caraml.suite.load import load_suite
    from caraml.suite.placement import impossible
    from caraml.workloads import params_of

    file = with_settings(load_suite(name), settings, params_of)
    points = [planned.point for planned in expand(file, machine_of(machine), params_of).points if planned.point.workload == "gpt"]
    found = []
    for point in points:
        shape = params_of(point.workload).model_validate(point.params).model_shape()  # type: ignore[attr-defined]
        if shape is not None and impossible(point, shape) is None:
            found.append(Planned(point, memory_plan(point)))
    if not found:
        raise InputError(f"suite {name!r} has no point of workload 'gpt' that can be placed", "caraml memory gpt --system SYSTEM")
    return found


def _fitting(name: str, machine: System, settings: list[str]) -> list[Planned]:
    """The placements of a workload on the fewest devices of a machine."""
    from caraml.campaign.runner import machine_of
    from caraml.campaign.settings import with_settings
    from caraml.engine.fitting import MOST_DEVICES, smallest_that_fit
    from caraml.suite.expand import expand
    from caraml.suite.load import SuiteFile
    from caraml.suite.model import Suite
    from caraml.tomlfile import parse_toml
    from caraml.workloads import params_of

    if name != "gpt":
        raise InputError(f"memory is planned for workload 'gpt', not for {name!r}", f"caraml memory gpt --system {machine.name}")
    room = machine.devices[0].memory_bytes
    if room is None:
        raise InputError(f"{machine.name} does not say how much memory a device has", "add devices.memory_bytes to its file")
    document = parse_toml(f'name = "memory"\ntitle = "-"\n[[benchmark]]\nname = "{name}"\nworkload = "{name}"\n{_DEFAULTS}', "memory")
    file = with_settings(SuiteFile(document.validate(Suite), document), settings, params_of)
    point = expand(file, machine_of(machine), params_of).points[0].point.model_copy(update={"suite": ""})
    shape = params_of(name).model_validate(point.params).model_shape()  # type: ignore[attr-defined]
    found = smallest_that_fit(point, shape, room, machine.devices_per_node)
    if not found:
        raise InputError(f"no placement on up to {MOST_DEVICES} devices of {machine.name} fits", "--set params.recompute=full")
    return found


_DEFAULTS = 'accumulation = 1\nmicro_batch = 1\nprecision = "bf16"\nparams = { data = "synthetic-device" }\n'
