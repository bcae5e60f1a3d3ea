"""Samples that cost nothing to read: random tokens and random images, made on the host or kept on the device.

On the host they are made one by one in the loader's workers and travel as real ones do, so that everything but reading
and decoding is paid for; this is how CARAML's synthetic runs work. On the device a few batches are made once and used
in turn, so that nothing but the model is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
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


class Synthetic(torch.utils.data.Dataset[Any]):
    """Samples that are a function of the seed and their position: there is nothing to learn but how they are drawn."""

    def __init__(self, of: str, draw: Callable[[np.random.Generator], Any], samples: int, seed: int, **facts: int) -> None:
        """``draw`` makes a sample; ``facts`` tell its shape."""
        self.samples, self.seed = samples, seed
        self._draw, self._facts = draw, {"kind": "synthetic", "of": of, "path": None, "items": samples, "bytes": 0, **facts, "seed": seed}

    def __len__(self) -> int:
        """The number of samples in an epoch."""
        return self.samples

    def __getitem__(self, position: int) -> Any:
        """Sample ``position``."""
        return self._draw(np.random.default_rng([self.seed, position]))

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, samples and their shape; no bytes, because none are read."""
        return dict(self._facts)


def synthetic_tokens(vocab_size: int, sequence_length: int, samples: int = TOKEN_SAMPLES, seed: int = 0) -> Synthetic:
    """Uniformly random token ids for :func:`caraml.data.loader.stream`: int64 (``sequence_length + 1``,), from 0 to ``vocab_size - 1``."""
    draw = partial(_tokens, vocab_size, sequence_length)
    return Synthetic("tokens", draw, samples, seed, vocab_size=vocab_size, sequence_length=sequence_length)


def _tokens(vocab_size: int, sequence_length: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(vocab_size, size=sequence_length + 1))


def synthetic_images(classes: int = 1000, size: int = 224, samples: int = IMAGENET_SAMPLES, seed: int = 0) -> Synthetic:
    """Images of uniformly random bytes for :func:`caraml.data.loader.stream`: uint8 (3, ``size``, ``size``) and a random class."""
    return Synthetic("images", partial(_image, classes, size), samples, seed, classes=classes, size=size)


def _image(classes: int, size: int, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    levels = rng.integers(256, size=(3, size, size), dtype=np.uint8)
    return torch.from_numpy(levels), int(rng.integers(classes))


def synthetic_windows(vocab_size: int, tokens: int, samples: int = SQUAD_WINDOWS, seed: int = 0) -> Synthetic:
    """Windows of random tokens with a random span: ids, segments and mask as int64 (3, T), and int64 (2,), as SQuAD's windows are."""
    return Synthetic("windows", partial(_window, vocab_size, tokens), samples, seed, tokens=tokens)


def _window(vocab_size: int, tokens: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    sample = np.ones((3, tokens), dtype=np.int64)
    sample[0] = rng.integers(vocab_size, size=tokens)
    sample[1, : tokens // 8] = 0
    return torch.from_numpy(sample), torch.from_numpy(np.sort(rng.integers(tokens, size=2)))


def device_batches(dataset: MapDataset, batch_size: int, device: torch.device, *, count: int = 4, rank: int = 0) -> Iterator[Batch]:
    """``count`` different batches of ``dataset``, made once, kept on ``device`` and used in turn without end.

    Works for real data sets too. Each rank has batches of its own; a data set shorter than a batch is gone through again.
    """
    with stream(dataset, batch_size, workers=0, seed=rank, drop_last=False) as batches:
        return itertools.cycle(list(to_device(iter(list(itertools.islice(batches, count))), device)))
