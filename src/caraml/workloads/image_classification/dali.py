"""Batches by NVIDIA DALI: JPEGs decoded, cropped and flipped on the GPU. An optional extra; the package is large and of one vendor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.workloads.image_classification.decode import AREA, ASPECT
from caraml.workloads.image_classification.store import FolderStore

_AHEAD = 2


class DaliBatches(Iterator[list[torch.Tensor]]):
    """Endless batches ``[uint8 (B, 3, S, S), int64 (B,)]`` of one rank, made on its device."""

    def __init__(
        self, root: Path, size: int, batch_size: int, device: torch.device, *, threads: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        """Build the pipeline over ``root/CLASS/IMAGE``; on a CPU device it decodes there, which is for tests.

        Every epoch is shuffled anew by DALI's reader; each rank reads its own shard, and an incomplete batch is left out.

        Raises:
            EnvironmentUnfitError: if DALI is not installed.
            InputError: if ``root`` is no image folder.
        """
        self.store = FolderStore(root)
        self._size, self._batch_size, self._device = size, batch_size, device
        try:
            from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
        except ImportError as error:
            raise EnvironmentUnfitError(
                "data = 'dali' needs NVIDIA DALI, which is not installed",
                "pip install nvidia-dali-cuda120 (or -cuda130), or use data = 'images'",
            ) from error
        pipeline = self._pipeline(threads, seed, rank, world)
        self._source = DALIGenericIterator(
            [pipeline], ["images", "labels"], reader_name="files", auto_reset=True, last_batch_policy=LastBatchPolicy.DROP
        )
        self._epoch = iter(self._source)

    def _pipeline(self, threads: int, seed: int, rank: int, world: int) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        on_gpu = self._device.type == "cuda"
        files = [self.store.name(position) for position in range(len(self.store.labels))]

        @pipeline_def(
            batch_size=self._batch_size,
            num_threads=max(1, threads),
            device_id=self._device.index if on_gpu else None,
            seed=seed,
            prefetch_queue_depth=_AHEAD,
        )
        def pipeline() -> tuple[Any, Any]:
            encoded, labels = fn.readers.file(
                name="files",
                files=files,
                labels=self.store.labels.tolist(),
                shard_id=rank,
                num_shards=world,
                random_shuffle=True,
                shuffle_after_epoch=False,
                initial_fill=min(len(files), 10_000),
                stick_to_shard=False,
            )
            images = fn.decoders.image_random_crop(
                encoded,
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB,
                random_area=list(AREA),
                random_aspect_ratio=list(ASPECT),
            )
            images = fn.resize(images, size=(self._size, self._size), interp_type=types.INTERP_TRIANGULAR)
            mirrored = fn.random.coin_flip(probability=0.5)
            images = fn.crop_mirror_normalize(images, dtype=types.UINT8, output_layout="CHW", mirror=mirrored, mean=[0.0], std=[1.0])
            return images, labels.gpu() if on_gpu else labels

        return pipeline()

    def __len__(self) -> int:
        """Samples in an epoch, over all ranks."""
        return len(self.store.labels)

    def __next__(self) -> list[torch.Tensor]:
        try:
            (batch,) = next(self._epoch)
        except StopIteration:
            self._epoch = iter(self._source)
            (batch,) = next(self._epoch)
        return [batch["images"], batch["labels"].squeeze(-1).long()]

    def describe(self) -> dict[str, Any]:
        """The provenance of a record."""
        from importlib.metadata import version

        name = next(name for name in ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "nvidia-dali-cuda110") if _installed(name))
        return {
            **self.store.describe(),
            "items": len(self),
            "classes": len(self.store.classes),
            "size": self._size,
            "decoder": f"{name} {version(name)}",
        }


def _installed(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
