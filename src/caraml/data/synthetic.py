"""Samples that cost nothing to read: random tokens and random images, made on the host or kept on the device.

On the host they are made one by one in the loader's workers and travel as real ones do, so that everything but reading
and decoding is paid for; this is how CARAML's synthetic runs work. On the device a few batches are made once and used
in turn, so that nothing but the model is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from caraml.data.loader import Batch, MapDataset, stream, to_device

IMAGENET_SAMPLES = 1_281_167
"""Training images of ImageNet, the length of a synthetic epoch of images."""
TOKEN_SAMPLES = 1_000_000
"""Samples in a synthetic epoch of tokens."""


SQUAD_WINDOWS = 88_524
"""Windows of 384 tokens with a stride of 128 in SQuAD 1.1's training file, the length of a synthetic epoch of questions."""


class SyntheticTokens(torch.utils.data.Dataset[torch.Tensor]):
    """Uniformly random token ids; sample i is a function of the seed and i. There is nothing to learn but uniformity."""

    def __init__(self, vocab_size: int, sequence_length: int, samples: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        """The number of samples in an epoch."""
        return self.samples

    def __getitem__(self, position: int) -> torch.Tensor:
        """Sample ``position``: int64 (sequence_length + 1,), ids from 0 to ``vocab_size - 1``."""
        rng = np.random.default_rng([self.seed, position])
        return torch.from_numpy(rng.integers(self.vocab_size, size=self.sequence_length + 1))

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, samples and their shape; no bytes, because none are read."""
        return {
            "kind": "synthetic",
            "of": "tokens",
            "path": None,
            "items": self.samples,
            "bytes": 0,
            "vocab_size": self.vocab_size,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
        }


class SyntheticImages(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images of uniformly random bytes with random classes; sample i is a function of the seed and i."""

    def __init__(self, classes: int, size: int, samples: int, seed: int) -> None:
        self.classes = classes
        self.size = size
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        """The number of images in an epoch."""
        return self.samples

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        """Sample ``position``: uint8 (3, size, size) and its class."""
        rng = np.random.default_rng([self.seed, position])
        levels = rng.integers(256, size=(3, self.size, self.size), dtype=np.uint8)
        return torch.from_numpy(levels), int(rng.integers(self.classes))

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, images and their shape; no bytes, because none are read."""
        return {
            "kind": "synthetic",
            "of": "images",
            "path": None,
            "items": self.samples,
            "bytes": 0,
            "classes": self.classes,
            "size": self.size,
            "seed": self.seed,
        }


class SyntheticWindows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of random tokens with a random span: ids, segments and mask as int64 (3, T), and int64 (2,), as SQuAD's windows are."""

    def __init__(self, vocab_size: int, tokens: int, samples: int, seed: int) -> None:
        self.vocab_size, self.tokens, self.samples, self.seed = vocab_size, tokens, samples, seed

    def __len__(self) -> int:
        """The number of windows in an epoch."""
        return self.samples

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Window ``position``."""
        rng = np.random.default_rng([self.seed, position])
        sample = np.ones((3, self.tokens), dtype=np.int64)
        sample[0] = rng.integers(self.vocab_size, size=self.tokens)
        sample[1, : self.tokens // 8] = 0
        return torch.from_numpy(sample), torch.from_numpy(np.sort(rng.integers(self.tokens, size=2)))

    def describe(self) -> dict[str, Any]:
        """The provenance of a record."""
        found = {"items": self.samples, "bytes": 0, "tokens": self.tokens, "seed": self.seed}
        return {"kind": "synthetic", "of": "windows", "path": None, **found}


def synthetic_windows(vocab_size: int, tokens: int, samples: int = SQUAD_WINDOWS, seed: int = 0) -> SyntheticWindows:
    """Random question-answering samples for :func:`caraml.data.loader.stream`."""
    return SyntheticWindows(vocab_size, tokens, samples, seed)


def synthetic_tokens(vocab_size: int, sequence_length: int, samples: int = TOKEN_SAMPLES, seed: int = 0) -> SyntheticTokens:
    """Random token samples for :func:`caraml.data.loader.stream`: int64 (``sequence_length + 1``,)."""
    return SyntheticTokens(vocab_size, sequence_length, samples, seed)


def synthetic_images(classes: int = 1000, size: int = 224, samples: int = IMAGENET_SAMPLES, seed: int = 0) -> SyntheticImages:
    """Random image samples for :func:`caraml.data.loader.stream`: uint8 (3, ``size``, ``size``) and a class."""
    return SyntheticImages(classes, size, samples, seed)


def device_batches(dataset: MapDataset, batch_size: int, device: torch.device, *, count: int = 4, rank: int = 0) -> Iterator[Batch]:
    """``count`` different batches of ``dataset``, made once, kept on ``device`` and used in turn without end.

    Works for real data sets too. Each rank has batches of its own; a data set shorter than a batch is gone through again.
    """
    with stream(dataset, batch_size, workers=0, seed=rank, drop_last=False) as batches:
        return itertools.cycle(list(to_device(iter(list(itertools.islice(batches, count))), device)))
