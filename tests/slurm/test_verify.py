"""The ruler proved through Slurm: work of known truth on two nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caraml.launch.batch import SlurmOptions
from caraml.launch.slurm import SlurmLauncher
from caraml.results.store import Store
from caraml.system.detect import OVERRIDE, detect
from caraml.system.site import Network, Scheduler, Site
from caraml.verify.energy import SOURCE
from caraml.verify.proof import NODES, Place, measure
from caraml.worker import POWER_SOURCES
from tests.slurm.cluster import Cluster
from tests.test_campaign import Watcher


def test_known_work_on_two_nodes(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del cluster
    monkeypatch.setenv(POWER_SOURCES, SOURCE)
    monkeypatch.setenv(OVERRIDE, "cpu")
    scheduler = Scheduler(exclusive=False, gpus="none", cpus_per_device=1)
    site = Site(scheduler=scheduler, network=Network(interface="lo", address_suffix="i"))
    system = detect().model_copy(update={"name": "virtual", "nodes": 3, "site": site})
    place = Place(system, lambda root: SlurmLauncher(scheduler, root / "slurm", SlurmOptions(pack=10)), 2, "slurm")
    findings = measure(NODES, place.cpus, place, Store(tmp_path), Watcher())
    verdicts = {finding.claim: finding.verdict for finding in findings}
    assert verdicts["nodes: raw steps of"] == "right", [str(finding) for finding in findings]
    # Times are those of a machine whose cores the nodes share with everything else, so a crowded one may only widen them.
    assert {"nodes: throughput", "nodes: mean step", "nodes: median step"} <= verdicts.keys()
    wrong = [finding for finding in findings if finding.verdict == "wrong"]
    assert not wrong or os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1), wrong
