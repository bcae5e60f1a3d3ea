"""Checkpoints that any placement writes and any placement reads (torch's distributed checkpoint)."""

from __future__ import annotations

import io
import os
import pickle
import re
import secrets
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, EnumMeta
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.utils import _ReaderView

from caraml.base.errors import InputError, in_a_line
from caraml.base.files import flush, held, intruder, make_folder
from caraml.base.limits import CHECKPOINT, LINE, read_bytes, too_large
from caraml.engine.ranks import Ranks

_ROOM = ".{:016x}.tmp"
"""Of a checkpoint that is being written, a folder in its own."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state by the names of parameters, so that stages can be put together and parameters divided anew."""
_SETTINGS = "param_groups."
"""How the names of an optimizer's settings begin, such as its learning rate; all else of its state belongs to parameters."""


def save(stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], folder: Path | None, beside: Path, ranks: Ranks) -> None:
    """Write weights and optimizer state, every rank its part, until they are on the disk. Collective.

    The parts are written into a new folder, and renamed when all are whole: what others put under their names is replaced, not followed.
    Without a folder to keep them in they go to ``beside`` and are removed again: only the time is wanted. Raises ``OSError`` where they
    cannot be written, or the folder belongs to somebody else; on every rank.
    """
    place = folder or beside / "checkpoint"
    with _together(place, ranks):
        place = place.resolve() if intruder(place) is None else place
    room = _new_room(place, ranks)
    try:
        with _plans_between_ranks(), ExitStack() as opened:
            with _together(place, ranks):
                written, state = opened.enter_context(held(room)), _state(stages, optimizers)
            dcp.save(state, checkpoint_id=written, process_group=ranks.hosts)
            with _together(place, ranks):
                if ranks.rank == 0:
                    _put_in_place(place, written)
    except CheckpointException as error:  # a BaseException of torch's, which says on which rank what went wrong
        raise OSError(f"the checkpoint cannot be written to {place}: {error}") from error
    finally:
        if ranks.rank == 0:
            shutil.rmtree(room, ignore_errors=True)
    if folder is None and ranks.rank == 0:
        shutil.rmtree(place)


def _put_in_place(place: Path, written: str) -> None:
    """Rename what was written, the description last."""
    with held(place) as kept:
        for name in sorted(os.listdir(written), key=".metadata".__eq__):  # noqa: PTH208
            os.rename(f"{written}/{name}", f"{kept}/{name}")  # noqa: PTH104
        flush(kept)


def _new_room(place: Path, ranks: Ranks) -> Path:
    """A new folder in a folder, made by the first rank. Collective."""
    room = place / _ROOM.format(ranks.agree(secrets.randbits(62)))
    with _together(place, ranks):
        if ranks.rank == 0:
            make_folder(place)
            with held(place):
                room.mkdir()
    return room


@contextmanager
def _together(place: Path, ranks: Ranks) -> Iterator[None]:
    """What ranks do each by itself, done by all at its end. What fails on one fails on all: those would wait for ever. Collective."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- raised below, on every rank
        own = error
    words = "" if own is None else getattr(own, "strerror", None) or f"{type(own).__name__}: {own}"
    failed = [f"{text} (rank {rank})" if ranks.world > 1 else text for rank, text in enumerate(ranks.gather(words)) if text]
    if failed:
        raise OSError(f"the checkpoint cannot be written to {place}: {'; '.join(failed)}") from own


def load(stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], folder: Path, ranks: Ranks) -> None:
    """Read weights and optimizer state that were saved at this placement or any other of the same model. Collective.

    The optimizers keep their own settings: learning rate, weight decay and the like are those that this run was asked for.

    The checkpoint may be another person's: of its pickled parts only plain data and torch's own descriptions of tensors are read. Raises
    ``InputError`` where there is no checkpoint in the folder, it holds anything else, or it is not one of this model.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"no checkpoint in {folder}", "give the folder that `save_to` named in the run that wrote it")
    state = _state(stages, optimizers)
    state["optimizer"] = {name: value for name, value in state["optimizer"].items() if not name.startswith(_SETTINGS)}
    reader = _Reader(folder)
    try:
        with _plans_between_ranks():
            dcp.load(state, storage_reader=reader, planner=_Planner(), process_group=ranks.hosts)
    except CheckpointException as error:
        cause = reader.refusal or next(iter(error.failures.values()))[0]  # of the first rank that says what went wrong
        found = f"the checkpoint in {folder} cannot be taken up: {in_a_line(cause)}"
        raise InputError(found, "give one of the same model: the workload, backend and sizes of the run that wrote it") from error
    for stage, optimizer in zip(stages, optimizers, strict=True):
        weights, moments = get_state_dict(stage, optimizer, options=_FLAT)
        ours = {name: state["model"][name] for name in weights}, {name: state["optimizer"].get(name, own) for name, own in moments.items()}
        set_state_dict(stage, optimizer, model_state_dict=ours[0], optim_state_dict=ours[1], options=_FLAT)


def _state(stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for stage, optimizer in zip(stages, optimizers, strict=True):
        weights, moments = get_state_dict(stage, optimizer, options=_FLAT)
        state["model"] |= weights
        state["optimizer"] |= moments
    return state


_DESCRIPTIONS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""What the description of a checkpoint is made of, by module and name; types of numbers (``torch.float32``) besides."""
_PART = re.compile(r"__\d+_\d+\.distcp")


def _member(kind: object, name: str) -> Enum:
    """In place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enumeration: that and nothing else."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return cast(Enum, kind[name])
    raise pickle.UnpicklingError(f"it asks for something of a {type(kind).__name__}, which no checkpoint needs")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _DESCRIPTIONS or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


_PLANS = (
    *(("torch.distributed.checkpoint.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(("torch.distributed.checkpoint.planner", name) for name in ("BytesIOWriteData", "LoadPlan", "ReadItem", "LoadItemType")),
    *(("torch.distributed.checkpoint.filesystem", "_StoragePrefix"), ("torch.distributed.checkpoint.storage", "WriteResult")),
    *(("traceback", "StackSummary"), ("traceback", "FrameSummary"), ("torch.distributed.checkpoint.api", "CheckpointException")),
)
"""What ranks tell each other about a checkpoint, besides its description: who writes and reads what, and what went wrong."""
_ERRORS = ("builtins", "_pickle", "zipfile", "torch", "caraml.base.errors")


class _PlanUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        error = getattr(sys.modules.get(module), name, None) if module in _ERRORS else None
        if (module, name) in _PLANS or (isinstance(error, type) and issubclass(error, Exception)):
            return pickle.Unpickler.find_class(self, module, name)
        return super().find_class(module, name)


@contextmanager
def _plans_between_ranks() -> Iterator[None]:
    """Torch pickles the plans of a checkpoint from rank to rank: nothing else is taken. One process alone need not be told that it is."""
    torch_s = dist.distributed_c10d
    before, torch_s._unpickler = torch_s._unpickler, _PlanUnpickler
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    finally:
        torch_s._unpickler = before


class _Part(_ReaderView):
    """A part of a file as a file. Unlike torch's own it can be entered from its end, where the contents of an archive stand."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(self.len + offset if whence == os.SEEK_END else offset, os.SEEK_SET if whence == os.SEEK_END else whence)


class _Reader(FileSystemReader):
    """Reads a checkpoint's description as data only, and its tensors from its own folder only."""

    refusal: Exception | None = None
    """Why the description was refused: torch 2.11 says only that there is none."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return self._described(*args, **kwargs)
        except Exception as error:
            self.refusal = self.refusal or error
            raise

    def _described(self, *args: Any, **kwargs: Any) -> Metadata:
        del args
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        metadata = _Unpickler(io.BytesIO(read_bytes(path, CHECKPOINT))).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it does not describe a checkpoint")
        for part in metadata.storage_data.values():
            own = isinstance(part, _StorageInfo) and isinstance(part.relative_path, str) and _PART.fullmatch(part.relative_path)
            if not own or part.transform_descriptors:
                raise pickle.UnpicklingError("a part of it lies elsewhere, or is packed")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        part = cast(IO[bytes], _Part(file, sinfo.offset, sinfo.length))
        with zipfile.ZipFile(part) as archive:  # torch keeps tensors in archives, and never shrinks them
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise pickle.UnpicklingError("a part of it is packed")
        part.seek(0)
        return part


class _Planner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor, or is said to be none, as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if value.getbuffer().nbytes > LINE:
            raise too_large(read_item.storage_index.fqn, value.getbuffer().nbytes, LINE)
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
