"""Checkpoints that somebody else wrote: weights and numbers are taken from them, and nothing of them runs."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from caraml.base.errors import InputError
from caraml.engine.parallel import checkpoint
from caraml.engine.ranks import Ranks
from caraml.engine.steps import rates
from tests.security.users import ATTACKER, as_user, needs_two_users, own_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Act:
    """What runs when it is unpickled: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._folder,)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def written(tmp_path: Path) -> Path:
    model, optimizer = trained(0)
    checkpoint.save([model], [optimizer], tmp_path / "checkpoint", tmp_path, Ranks())
    return tmp_path / "checkpoint"


def load(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(1)
    checkpoint.load([model], [optimizer], folder, Ranks())
    return model, optimizer


def test_a_checkpoint_gives_weights_and_moments_back(written: Path) -> None:
    """What the optimizer was set to is the business of the run that takes it up: its rate had fallen to a tenth of a tenth."""
    before, updated = trained(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, weight_decay=0.5)
    checkpoint.load([model], [optimizer], written, Ranks())
    assert torch.equal(model.weight, before.weight)  # type: ignore[arg-type]
    for ours, theirs in zip(optimizer.state.values(), updated.state.values(), strict=True):
        assert ours["step"] == 1 and torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])
    schedule = rates([optimizer], lambda step: 1 / (1 + step))[0]
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.15 and optimizer.param_groups[0]["weight_decay"] == 0.5


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    description = pickle.loads((folder / ".metadata").read_bytes())
    change(description)
    (folder / ".metadata").write_bytes(pickle.dumps(description))


def part_of(description: Any, name: str) -> Any:
    return next(part for index, part in description.storage_data.items() if index.fqn == name)


def replaced(folder: Path, name: str, content: bytes) -> None:
    """Let a part of the checkpoint be this file."""
    (folder / "__0_9.distcp").write_bytes(content)

    def point(description: Any) -> None:
        part = part_of(description, name)
        part.relative_path, part.offset, part.length = "__0_9.distcp", 0, len(content)

    changed(folder, point)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def packed(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as plain, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    return file.getvalue()


BIAS = "model.bias"


def as_a_number_of(folder: Path, value: object) -> None:
    """Let the checkpoint say of a tensor that it is a plain value, this one."""
    replaced(folder, BIAS, saved(value))

    def say(description: Any) -> None:
        description.state_dict_metadata[BIAS] = BytesStorageMetadata()
        description.storage_data[MetadataIndex(BIAS)] = part_of(description, BIAS)

    changed(folder, say)


def as_description(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Act(folder / "ran")))


def inside_the_description(folder: Path) -> None:
    changed(folder, lambda description: description.state_dict_metadata.update({"x": Act(folder / "ran")}))


def as_a_number(folder: Path) -> None:
    as_a_number_of(folder, Act(folder / "ran"))


def as_a_tensor(folder: Path) -> None:
    replaced(folder, "model.weight", saved(Act(folder / "ran")))


@pytest.mark.parametrize("plant", [as_description, inside_the_description, as_a_number, as_a_tensor])
def test_nothing_of_a_checkpoint_runs(plant: Callable[[Path], None], written: Path) -> None:
    plant(written)
    with pytest.raises(InputError, match=r"the checkpoint in .*checkpoint cannot be taken up"):
        load(written)
    assert not (written / "ran").exists()


class Asked:
    """Pickled as Python 3.11.2 does a member of an enumeration: by ``getattr``, of whatever it may be."""

    def __init__(self, kind: object, name: str) -> None:
        self._asked = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._asked


def test_members_of_enumerations_may_be_pickled_by_getattr_and_nothing_else() -> None:
    def read(value: object) -> Any:
        return checkpoint._PlanUnpickler(io.BytesIO(pickle.dumps(value))).load()

    assert read(Asked(WriteItemType, "TENSOR")) is WriteItemType.TENSOR
    for kind, name in (
        (WriteItemType, "__init_subclass__"),
        (WriteItemType, "_generate_next_value_"),
        (SavePlan, "__init__"),
        ("", "format"),
    ):
        with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
            read(Asked(kind, name))
    with pytest.raises(pickle.UnpicklingError, match=r"it names builtins\.setattr"):
        read(setattr)


def test_a_description_of_an_older_python_is_read(written: Path) -> None:
    """Which pickles the layout of memory by getattr."""

    def as_then(description: Any) -> None:
        properties = description.state_dict_metadata["model.weight"].properties
        state = properties.__getstate__()
        encoded = next(value for value in state if isinstance(value, Enum))
        properties.__class__.__getstate__ = lambda _: tuple(  # as pickled below
            Asked(type(value), value.name) if value is encoded else value for value in state
        )

    own = TensorProperties.__getstate__
    try:
        changed(written, as_then)
    finally:
        TensorProperties.__getstate__ = own  # type: ignore[method-assign]
    assert b"getattr" in (written / ".metadata").read_bytes()
    assert torch.equal(load(written)[0].weight, trained(0)[0].weight)  # type: ignore[arg-type]


def test_a_checkpoint_reads_from_its_own_folder_only(written: Path) -> None:
    (written.parent / "other").write_bytes(saved(torch.ones(2, 3)))

    def point(description: Any) -> None:
        part = part_of(description, "model.weight")
        part.relative_path, part.offset, part.length = "../other", 0, 10_000

    changed(written, point)
    with pytest.raises(InputError, match="lies elsewhere"):
        load(written)


def test_a_tensor_that_unpacks_to_more_than_its_file_is_refused(written: Path) -> None:
    replaced(written, "model.weight", packed(saved(torch.zeros(1000, 1000))))
    with pytest.raises(InputError, match="packed"):
        load(written)


def test_a_description_without_end_is_refused(written: Path) -> None:
    with (written / ".metadata").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(InputError, match=r"\.metadata: found 104,857,600 bytes, at most"):
        load(written)


def test_a_number_of_a_megabyte_is_refused(written: Path) -> None:
    as_a_number_of(written, "x" * (1 << 20))
    with pytest.raises(InputError, match=f"{BIAS}: found .* bytes, at most"):
        load(written)


@pytest.mark.processes
@needs_two_users
def test_a_checkpoint_is_not_written_through_links(shared: Path) -> None:
    """The names of its parts are known beforehand."""
    folder, home = own_folder(shared, "open to all", os.geteuid()), own_folder(shared, "home", os.geteuid(), 0o755)
    precious = home / ".bashrc"
    precious.write_text("export PATH")

    def plant() -> None:
        for name in ("__0_0.distcp", ".metadata", ".metadata.tmp"):
            (folder / name).symlink_to(precious)

    as_user(ATTACKER, plant)
    model, optimizer = trained(0)
    checkpoint.save([model], [optimizer], folder, shared, Ranks())
    assert precious.read_text() == "export PATH"
    assert torch.equal(load(folder)[0].weight, model.weight)  # type: ignore[arg-type]
    assert {path.name for path in folder.iterdir()} == {"__0_0.distcp", ".metadata", ".metadata.tmp"}


@pytest.mark.processes
@needs_two_users
def test_a_checkpoint_is_not_written_into_what_another_user_leads_to(shared: Path) -> None:
    home = own_folder(shared, "home", os.geteuid(), 0o755)
    theirs = own_folder(shared, "theirs", ATTACKER)
    as_user(ATTACKER, lambda: (shared / "link").symlink_to(home))
    model, optimizer = trained(0)
    for place in (shared / "link", theirs):
        with pytest.raises(OSError, match=r"cannot be written to .*: (somebody else|Not a directory|Too many levels)"):
            checkpoint.save([model], [optimizer], place, shared, Ranks())
    assert list(home.iterdir()) == [] == list(theirs.iterdir())


def test_a_checkpoint_goes_where_its_user_s_own_link_leads(tmp_path: Path, written: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there" / "deep")
    (tmp_path / "there").mkdir()
    for seed in (1, 0):  # the second in place of the first, and beside what else is there
        model, optimizer = trained(seed)
        checkpoint.save([model], [optimizer], tmp_path / "link", tmp_path, Ranks())
        (tmp_path / "there" / "deep" / "notes").write_text("mine")
    assert torch.equal(load(tmp_path / "link")[0].weight, load(written)[0].weight)  # type: ignore[arg-type]
    assert (tmp_path / "there/deep/notes").read_text() == "mine" and len(list((tmp_path / "there/deep").iterdir())) == 3
