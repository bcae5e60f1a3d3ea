"""Variables whose values no file of a campaign has: whether they are known here, and how they get to a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from caraml.campaign.flight import Work, accepted
from caraml.campaign.light import references
from caraml.results.store import folder_name, latest_in
from caraml.suite.expand import PlannedPoint
from caraml.system.variables import PROGRAM, SITE, behind, concealed, hand_over, is_reference, missing, of_caller
from caraml.worker.command_record import names_of
from caraml.workloads.command import Params, filled

if TYPE_CHECKING:
    from caraml.campaign.runner import Campaign


def lacking(campaign: Campaign, planned: PlannedPoint) -> list[str]:
    """A sentence for each variable of a point that is to run whose value is not known here."""
    if planned.skip is not None:
        return []
    site = {name: text for name, text in concealed(campaign.system.site.software.variables).items() if is_reference(text)}
    env = planned.point.params.get("env") if planned.point.workload == "command" else None
    found = [*missing(site, {}), *missing(cast(dict[str, str], env or {}), campaign.suite.values)]
    if not found or campaign.again or campaign.options.only is not None:
        return found
    known = latest_in(campaign.store.points / folder_name(planned.point))
    return [] if known is not None and accepted(known, planned) else found


def hand_to(work: Work, folder: Path, campaign: Campaign) -> None:
    """Leave what a point's scripts do not say where only the job's user can read it."""
    if work.light is not None and not references(work.light):
        return  # ten thousand times in a row
    point, program = work.planned.point, {}
    if point.workload == "command":
        params = work.light or Params.model_validate(point.params)
        names = names_of(point, params, folder.absolute(), campaign.suite_folder)
        templates = {name: behind(name, params.env[name], campaign.suite.values) for name in references(params)}
        program = {name: filled(template, names) for name, template in templates.items() if template is not None}
    site = {} if work.light else of_caller(concealed(campaign.system.site.software.variables))
    hand_over(folder, {SITE: site, PROGRAM: program})
