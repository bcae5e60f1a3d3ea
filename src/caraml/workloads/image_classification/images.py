"""Images from a store to the device: decode, crop and flip in the loader's workers, normalise where the model is; and batch normalisation
over the images of several devices."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from caraml.base.errors import InputError
from caraml.data.loader import Synthetic
from caraml.data.staging import Staged, stage
from caraml.system.families import pins
from caraml.workloads.image_classification.decode import Choose, Damaged, central_crop, decode_crop, random_crop
from caraml.workloads.image_classification.store import FolderStore, ImageStore, described

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images per channel (red, green, blue), levels from 0 to 1; torchvision's reference values."""
IMAGENET_STD = (0.229, 0.224, 0.225)
_MOST_IN_A_ROW = 100
"""Damaged images one after the other beyond which there is no point in looking for a whole one."""

OnDamaged = Literal["fail", "skip"]
Loaded = tuple[torch.Tensor, torch.Tensor, list[tuple[str, str]]]
"""What a worker hands over: uint8 (B, 3, S, S), int64 (B,), and the damaged files met on the way, each with its reason."""


class ImageSamples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The samples of an image store: a random crop of random size and shape, resized, mirrored half of the time.

    Crop and mirror are functions of the seed, the epoch and the position, so that a sample does not depend on the number of workers or
    ranks. A set read ``passes`` times per epoch stands in for a larger one (EPICURE reads TinyImageNet 13 times for ImageNet's epoch).
    """

    counts_epochs = True
    """The loader counts positions on over the epochs (``epoch * len + position``) instead of from 0 in each."""

    def __init__(
        self,
        store: ImageStore,
        size: int = 224,
        *,
        seed: int = 0,
        passes: int = 1,
        on_damaged: OnDamaged = "fail",
        augmented: bool = True,
        reduced_decoding: bool = True,
    ) -> None:
        """Samples of ``size`` x ``size`` pixels. Each image is read ``passes`` times in an epoch, each time with another crop.

        ``on_damaged``: ``fail`` stops at a damaged file and names it; ``skip`` takes the next image instead, and counts and names it.
        Without ``augmented`` the crop is the central one, never mirrored: what validation looks at. Without ``reduced_decoding`` the pixels
        are those of the fully decoded image.
        """
        self.store, self.size, self.seed, self.passes = store, size, seed, passes
        self.on_damaged, self.augmented, self.reduced_decoding = on_damaged, augmented, reduced_decoding
        self.damaged: dict[str, str] = {}
        """Damaged files met so far, and why; kept by the process that reads the batches."""

    def __len__(self) -> int:
        return len(self.store.labels) * self.passes

    def __getitem__(self, draw: int) -> tuple[torch.Tensor, int]:
        """Sample ``draw`` counted over all epochs: uint8 (3, size, size) and its class. Raises ``InputError`` if the file is damaged or
        gone, and damaged files are fatal; or if a hundred in a row are."""
        image, label, _ = self._load(draw)
        return image, label

    def __getitems__(self, draws: Sequence[int]) -> Loaded:
        """A batch, put together where it is decoded."""
        images = torch.empty((len(draws), self.size, self.size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)  # (B, 3, S, S), channels last
        labels = torch.empty(len(draws), dtype=torch.int64)
        damaged: list[tuple[str, str]] = []
        for row, draw in enumerate(draws):
            images[row], labels[row], met = self._load(draw)
            damaged += met
        return images, labels, damaged

    @staticmethod
    def collate(loaded: Any) -> Any:
        return loaded

    def received(self, loaded: Loaded) -> list[torch.Tensor]:
        """The batch proper, once the reading process has noted which files were damaged."""
        images, labels, damaged = loaded
        self.damaged.update(damaged)
        return [images, labels]

    def _load(self, draw: int) -> tuple[torch.Tensor, int, list[tuple[str, str]]]:
        images = len(self.store.labels)
        position = draw % len(self) % images
        choose, mirrored = self._crop(draw)
        damaged: list[tuple[str, str]] = []
        while True:
            try:
                image = decode_crop(self.store.read(position), choose, self.size, reduced=self.reduced_decoding)
            except (Damaged, OSError, InputError) as error:
                name = self.store.name(position)
                if self.on_damaged == "fail":
                    found = f"{name}: not readable as an image: {error}"
                    raise InputError(found, "repair or remove it, or set on_damaged = 'skip'") from error
                damaged.append((name, str(error)))
                if len(damaged) >= min(_MOST_IN_A_ROW, images):
                    raise InputError(f"{name}: not readable as an image, nor the {len(damaged) - 1} before it: {error}") from error
                position = (position + 1) % images
                continue
            return (image.flip(-1) if mirrored else image), int(self.store.labels[position]), damaged

    def _crop(self, draw: int) -> tuple[Choose, bool]:
        if not self.augmented:
            return central_crop, False
        rng = random.Random((self.seed << 48) ^ draw)  # noqa: S311 -- crops and mirrors, the same for the same seed
        mirrored = rng.random() < 0.5
        return random_crop(rng), mirrored

    def describe(self) -> dict[str, Any]:
        return described(self.store, self.size, self.passes, f"simplejpeg {version('simplejpeg')}")


class HeldOut:
    """The held-out images, gone through once, in order, without crops at random: what a validation pass reads.

    Its loader workers stay from one pass to the next. Close it to end them.
    """

    def __init__(self, samples: ImageSamples, batch_size: int, device: torch.device, workers: int) -> None:
        self._samples, self._batch_size, self._device, self._workers = samples, batch_size, device, workers
        self._loaders: dict[tuple[int, int], torch.utils.data.DataLoader[Any]] = {}

    def __len__(self) -> int:
        """Batches of one pass over all of them."""
        return math.ceil(len(self._samples) / self._batch_size)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return self.share(0, 1)

    def share(self, rank: int, world: int) -> Iterator[list[torch.Tensor]]:
        """Every ``world``-th image from ``rank`` on; the last batch may be smaller."""
        own = list(range(rank, len(self._samples), world))
        loader = self._loaders.setdefault((rank, world), self._loader(own))
        for loaded in loader:
            yield [tensor.to(self._device, non_blocking=True) for tensor in self._samples.received(loaded)]

    def _loader(self, own: list[int]) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(
            self._samples,
            batch_sampler=[own[first : first + self._batch_size] for first in range(0, len(own), self._batch_size)],
            num_workers=self._workers,
            collate_fn=ImageSamples.collate,
            persistent_workers=self._workers > 0,
            pin_memory=pins(self._device),
        )

    def close(self) -> None:
        for loader in self._loaders.values():
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()  # type: ignore[attr-defined]  # torch has no public way to say this
        self._loaders.clear()


def normalize_images(batch: torch.Tensor, memory_format: torch.memory_format = torch.channels_last) -> torch.Tensor:
    """``(batch / 255 - mean) / std`` by ImageNet's mean and deviation, float32 (B, 3, H, W), of a batch of uint8, on the device that it
    is on: so it has crossed to that in a quarter of the time."""
    shift, factor = _normalisation(batch.device)
    return batch.to(torch.float32, memory_format=memory_format).sub_(shift).mul_(factor)


@functools.lru_cache(maxsize=16)
def _normalisation(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``255 mean`` and ``1 / (255 std)``, each (1, 3, 1, 1). Kept, because copying them anew would synchronise every step."""
    mean = torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)
    std = torch.tensor(IMAGENET_STD).view(1, 3, 1, 1)
    return (255 * mean).to(device), (1 / (255 * std)).to(device)


def share_batch_norm(model: nn.Module, span: int, device: torch.device) -> nn.Module:
    """``model`` with every batch normalisation taken over ``span`` neighbouring ranks, a divisor of all. Collective: every rank calls it.

    This is PEARC '22's "BN span", or synchronised batch normalisation. On GPUs torch's own layer does it with fused kernels; that one
    refuses CPUs, so there a layer of plain torch operations takes its place, which gives the same numbers and lets the arithmetic be tested
    without a GPU.
    """
    if span == 1:
        return model
    groups = [dist.new_group(list(range(first, first + span))) for first in range(0, dist.get_world_size(), span)]
    group = groups[dist.get_rank() // span]
    if device.type == "cuda":
        from timm.layers import convert_sync_batchnorm  # knows timm's layers with an activation inside, which torch's own does not

        return convert_sync_batchnorm(model, group)
    return _replaced(model, group)


def _replaced(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, group))
    return SpanBatchNorm(module, group) if isinstance(module, nn.BatchNorm2d) else module


class SpanBatchNorm(nn.Module):
    """A batch normalisation over all ranks of a group, with the parameters, statistics and activation of the layer that it replaces."""

    def __init__(self, layer: nn.BatchNorm2d, group: dist.ProcessGroup | None) -> None:
        from torch.distributed.nn.functional import all_reduce  # the one whose backward pass adds up gradients

        super().__init__()
        self._all_reduce = all_reduce
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, layer.momentum or 0.1
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.drop, self.act = getattr(layer, "drop", nn.Identity()), getattr(layer, "act", nn.Identity())  # timm's BatchNormAct2d
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x``, (B, C, H, W), with the mean and variance over B, H, W and the group's ranks."""
        assert isinstance(self.running_mean, torch.Tensor) and isinstance(self.running_var, torch.Tensor)
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean, variance, count = self._moments(x)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return self.act(self.drop(x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)))

    def _moments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean and variance (C,) over the group, and the number of values that each was taken from."""
        members = dist.get_world_size(self._group)
        mean = self._all_reduce(x.mean((0, 2, 3)), group=self._group) / members
        deviation = x - mean.view(1, -1, 1, 1)
        variance = self._all_reduce((deviation * deviation).mean((0, 2, 3)), group=self._group) / members
        return mean, variance, float(x.numel() // x.shape[1] * members)


Form = Literal["images", "lmdb", "webdataset", "archive"]
"""``images``: ROOT/CLASS/IMAGE. ``lmdb``: one database. ``webdataset``: tar files read in place. ``archive``: unpacked before use."""


def open_store(
    form: Form, path: Path | None, stage_to: Path | None, staging: AbstractContextManager[None]
) -> tuple[ImageStore, Staged | None]:
    """Open the images at ``path``, on storage of this node if ``stage_to`` names a folder there; how they were brought there, if they were.

    ``staging`` surrounds the copying, so that it can be timed. Raises ``InputError`` for anything that is wrong with the data as a whole.
    """
    if path is None:
        raise InputError(f"path: found none; data = {form!r} needs one", "caraml data pack writes one from an image folder")
    if form == "archive" and stage_to is None:
        raise InputError("stage: found none; data = 'archive' needs a folder to unpack to", "for example stage = '/dev/shm'")
    staged = None
    if stage_to is not None:
        with staging:
            staged = stage(path, stage_to, unpack=form == "archive")
        path = staged.path
    return _store(form, path), staged


def _store(form: Form, path: Path) -> ImageStore:
    if form == "lmdb":
        from caraml.workloads.image_classification.packed import LmdbStore

        return LmdbStore(path)
    if form == "webdataset":
        from caraml.workloads.image_classification.packed import TarStore

        return TarStore(path)
    return FolderStore(_below_wrappers(path) if form == "archive" else path)


def _below_wrappers(folder: Path) -> Path:
    """An archive often holds one folder that holds everything: go down as long as there is one folder with nothing but folders in it."""
    while len(inside := list(folder.iterdir())) == 1 and inside[0].is_dir() and all(path.is_dir() for path in inside[0].iterdir()):
        folder = inside[0]
    return folder


def synthetic_images(classes: int, size: int, samples: int, seed: int = 0) -> Synthetic:
    """Images of uniformly random bytes: uint8 (3, ``size``, ``size``) and a random class."""
    return Synthetic("images", functools.partial(_random_image, classes, size), samples, seed, classes=classes, size=size)


def _random_image(classes: int, size: int, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    levels = rng.integers(256, size=(3, size, size), dtype=np.uint8)
    return torch.from_numpy(levels), int(rng.integers(classes))
