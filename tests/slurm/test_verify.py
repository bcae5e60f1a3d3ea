"""The ruler proved through Slurm: work of known truth on three nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from caraml.launch.batch import SlurmOptions
from caraml.launch.slurm import SlurmLauncher
from caraml.results.store import Store
from caraml.system.detect import detect
from caraml.system.families import OVERRIDE
from caraml.system.model import Network, Scheduler, Site
from caraml.verify.proof import Place, over_nodes
from tests.slurm.cluster import Cluster
from tests.test_campaign import Watcher

pytestmark = pytest.mark.processes


def test_known_work_on_three_nodes(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del cluster
    monkeypatch.setenv(OVERRIDE, "cpu")
    scheduler = Scheduler(exclusive=False, gpus="none", cpus_per_device=1)
    site = Site(scheduler=scheduler, network=Network(interface="lo", address_suffix="i"))
    system = detect().model_copy(update={"name": "virtual", "nodes": 3, "site": site})
    place = Place(system, lambda root: SlurmLauncher(scheduler, root / "slurm", SlurmOptions(pack=10)), 3, "slurm")
    findings = over_nodes(place, Store(tmp_path), Watcher())
    verdicts = {finding.claim: finding.verdict for finding in findings}
    assert verdicts["nodes: raw steps of"] == "right", [str(finding) for finding in findings]
    energies = ("energy", "idle power", "energy net")
    known = {*(f"nodes: {name}" for name in energies), "nodes with a dead sensor: energy", "nodes with a dead sensor: energy known in part"}
    assert known | {"nodes: throughput", "nodes: mean step", "nodes: median step"} <= verdicts.keys()
    assert "wrong" not in verdicts.values(), [str(finding) for finding in findings]
