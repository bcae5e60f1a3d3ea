"""A checkpoint that all ranks write while something fails on one of them: none waits for ever, and each knows why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem

from caraml.base.errors import InputError
from caraml.engine.parallel import checkpoint
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepTable
from caraml.metrics.model import Facts, Peak
from caraml.suite.model import Point, Policy
from caraml.worker import training
from caraml.worker.together import Known

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
Told = dict[str, str | None]


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def _wrong(*_: Any, **__: Any) -> Any:
    raise ValueError("no such image")


def _saved(folder: Path, ranks: Ranks) -> str | None:
    model = nn.Linear(3, 2)
    try:
        checkpoint.save([model], [torch.optim.AdamW(model.parameters())], folder, folder, ranks)
    except OSError as error:
        return str(error)
    return None


def main(folder: Path) -> None:
    """What each of two ranks comes to know, case by case."""
    ranks, told = Ranks.from_environment(CPU), Told()
    for broken in range(2):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == broken:
                patch.setattr(checkpoint, "_state", _full)
            told[f"parts of {broken}"] = _saved(folder / f"parts-{broken}", ranks)
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == broken:
                patch.setattr(filesystem, "_write_item", _full)
            told[f"disk of {broken}"] = _saved(folder / f"disk-{broken}", ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_put_in_place", _full)  # by the first rank alone
        told["place"] = _saved(folder / "place", ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "validation_loss", lambda *_: 1.0)
        patch.setattr(training, "quality", _wrong)  # which the first rank alone asks for
        point = Point(
            **{"suite": "s", "benchmark": "b", "workload": "gpt", "params": {}, "system": "local", "device": "d", "device_class": "cpu"},
            **{"software": "x", "devices": 2, "global_batch": 2, "micro_batch": 1, "measure": Policy()},
        )
        worker = training.Worker(folder, point)
        worker.rank = ranks.rank
        probed = Peak(value=None, dtype="fp32", reason="not probed")
        facts = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="known")
        worker._known = Known(folder, point, facts, 0.0, "", probed)
        model = nn.Linear(3, 2)
        task = SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters()), save_to=str(folder / "kept"), division=None)
        worker._validate_and_save(cast(Any, task), CPU, RankSummary(0.0, 1.0, StepTable(), [], 0.0, 0.0, 0, []), ranks)
        told["quality"] = worker._known.afterwards_failed
    other = nn.Linear(7, 2)
    try:
        checkpoint.load([other], [torch.optim.AdamW(other.parameters())], folder / "kept", ranks)
    except InputError as error:
        told["load"] = str(error)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(told))
    ranks.leave()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Told]]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "caraml.engine.start", "--devices=2", "tests.engine.parallel.test_checkpoint_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=300, check=True)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("broken", [0, 1])
def test_what_one_rank_cannot_prepare_is_written_by_none(told: tuple[Path, list[Told]], broken: int) -> None:
    folder, ranks = told
    texts = [rank[f"parts of {broken}"] or "" for rank in ranks]
    assert texts[0] == texts[1] and texts[0].endswith(f": No space left on device (rank {broken})"), texts
    assert list((folder / f"parts-{broken}").iterdir()) == []


@pytest.mark.parametrize("broken", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_known_to_all(told: tuple[Path, list[Told]], broken: int) -> None:
    folder, ranks = told
    for rank in ranks:
        assert "the checkpoint cannot be written" in (text := rank[f"disk of {broken}"] or "") and "No space left on device" in text, text
    assert not (folder / f"disk-{broken}" / ".metadata").exists()


def test_a_checkpoint_that_cannot_be_put_in_its_place_is_known_to_all(told: tuple[Path, list[Told]]) -> None:
    assert all((rank["place"] or "").endswith(": No space left on device (rank 0)") for rank in told[1]), told[1]


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(told: tuple[Path, list[Told]]) -> None:
    assert all("cannot be taken up" in (rank["load"] or "") for rank in told[1]), told[1]


def test_a_quality_that_cannot_be_measured_keeps_nobody_from_saving(told: tuple[Path, list[Told]]) -> None:
    folder, ranks = told
    assert [rank["quality"] for rank in ranks] == ["ValueError: no such image", None]
    assert {path.name for path in (folder / "kept").iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
