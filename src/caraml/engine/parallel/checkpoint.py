"""Checkpoints that any placement writes and any placement reads (torch's distributed checkpoint)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from caraml.errors import InputError

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state by the names of parameters, so that stages can be put together and parameters divided anew."""


def save(stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], folder: Path | None, beside: Path) -> None:
    """Write weights and optimizer state, every process its part, until they are on the disk. Collective.

    Without a folder to keep them in they go to ``beside`` and are removed again: only the time is wanted.
    """
    place = folder or beside / "checkpoint"
    try:
        dcp.save(_state(stages, optimizers), checkpoint_id=place)
    except CheckpointException as error:  # a BaseException of torch's, which says on which rank what went wrong
        raise OSError(f"the checkpoint cannot be written to {place}: {error}") from error
    if folder is None and (not dist.is_initialized() or dist.get_rank() == 0):
        shutil.rmtree(place)


def load(stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], folder: Path) -> None:
    """Read weights and optimizer state that were saved at this placement or any other of the same model. Collective.

    Raises:
        InputError: there is no checkpoint in the folder.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"no checkpoint in {folder}", "give the folder that `save_to` named in the run that wrote it")
    state = _state(stages, optimizers)
    dcp.load(state, checkpoint_id=folder)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        weights, moments = get_state_dict(stage, optimizer, options=_FLAT)
        ours = {name: state["model"][name] for name in weights}, {name: state["optimizer"][name] for name in moments}
        set_state_dict(stage, optimizer, model_state_dict=ours[0], optim_state_dict=ours[1], options=_FLAT)


def _state(stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for stage, optimizer in zip(stages, optimizers, strict=True):
        weights, moments = get_state_dict(stage, optimizer, options=_FLAT)
        state["model"] |= weights
        state["optimizer"] |= moments
    return state
