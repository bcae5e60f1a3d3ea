"""All points of a suite: plan, skip what is done, launch, watch, finish, take up again.

A campaign keeps no state of its own: what is done, and who does the rest, stands in the store, so running the same command again fills
the holes and goes on with jobs that still run.
"""

from __future__ import annotations

from collections import deque

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.campaign.attempt import PointTask, lacking
from caraml.campaign.campaign import Campaign, Options, Watcher, exit_code
from caraml.campaign.machine import machine_of, refuse_login_node
from caraml.campaign.runner import CampaignRun
from caraml.launch.queue import no_cluster
from caraml.launch.slurm import SlurmLauncher
from caraml.results.record import Record
from caraml.suite.expand import PlannedPoint

__all__ = ["Campaign", "Options", "Watcher", "exit_code", "machine_of", "run_campaign", "run_point"]


def run_campaign(campaign: Campaign) -> list[Record]:
    """Run what has no result yet; returns the records of the points, in order (of those that have one, when detached).

    Raises:
        InputError: nothing can be run, or others could put their programs in the place of the suite's.
    """
    if campaign.options.launcher == "local" and not campaign.options.here:
        refuse_login_node(campaign.command)
    if isinstance(campaign.launcher, SlurmLauncher) and campaign.options.launcher == "slurm" and (why := no_cluster()) is not None:
        raise EnvironmentUnfitError(why, "run on a login node of the machine, or take `--launcher print` for the scripts alone")
    plan, only = campaign.plan(), campaign.options.only
    chosen = campaign.chosen(plan)
    campaign.store.make()
    work = deque(PointTask.of(campaign, index, planned) for index, planned in chosen)
    points = [(planned.key, planned.point.label) for planned in plan.points]
    whole, total = len(work) == len(points), len(points)
    if only is not None:
        work = deque(one for one in work if one.key in only)
        if not work:
            what = f"no point of suite {campaign.suite.suite.name} has a key that was asked for"
            raise InputError(f"{what}: the suite, the machine or a version is another now", campaign.command)
    if unknown := dict.fromkeys(sentence for one in work for sentence in lacking(campaign, one.planned)):
        raise InputError("; ".join(unknown), f"export what is missing, or {campaign.command}")
    campaign.store.remember(campaign.listing(points), anew=campaign.again and only is None and whole)
    return CampaignRun(campaign, work, total).records()


def run_point(campaign: Campaign, planned: PlannedPoint, index: int, total: int) -> Record:
    """Give one point its record: the one it has, or a new one."""
    campaign.store.make()
    return CampaignRun(campaign, deque([PointTask.of(campaign, index, planned)]), total).records()[0]
