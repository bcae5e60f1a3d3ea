"""A corpus's samples as Megatron-LM's run takes them, by the data set of Megatron-Core itself.

Megatron shuffles the documents of all epochs that a run needs, cuts what they are together into samples, and shuffles those. So the order
depends on the seed, the sequence length, the part of the corpus that is trained on, and how often the run goes through that.
"""

from __future__ import annotations

import logging
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.workloads.gpt.tokens import IndexedTokens, TokenSamples

_NO_CACHE = ""
"""As the folder of the library's caches: every rank builds its index itself, and nothing is written; ``None`` is one beside the corpus."""


class MegatronSamples(TokenSamples):
    """A map-style data set whose sample i is Megatron's i-th; the loader must not shuffle it again.

    Attributes:
        samples_per_epoch: of one pass over the part of the corpus that is trained on. There are more samples if a run needs several passes.
    """

    in_order = True

    def __init__(
        self, corpus: IndexedTokens, sequence_length: int, vocab_size: int, *, seed: int, split: str, run_samples: int | None = None
    ) -> None:
        """Build the index, the same on every rank.

        Args:
            corpus: whose sequences are documents to Megatron.
            sequence_length: tokens of a sample.
            vocab_size: an id outside it is an error of the sample.
            seed: Megatron-LM's ``--seed``.
            split: Megatron-LM's ``--split``, of whose parts the first is taken.
            run_samples: training samples that the other run asks for; ``None`` for at most one epoch.

        Raises:
            InputError: if the part of the corpus is shorter than one sample.
            EnvironmentUnfitError: without Megatron-Core.
        """
        super().__init__(corpus, sequence_length, vocab_size)
        try:
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split
        except ModuleNotFoundError as error:
            raise EnvironmentUnfitError(
                f"params.order = 'megatron' needs Megatron-Core, and {error.name} is missing", "pip install 'caraml[megatron]'"
            ) from error
        logging.getLogger(GPTDataset.__module__).setLevel(logging.ERROR)  # it warns that it writes no cache
        path = str(corpus.prefix)
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            blend=([path], None),
            split=split,
            path_to_cache=_NO_CACHE,
            tokenizer=SimpleNamespace(eod=None, vocab_size=None, unique_identifiers={}),  # only masks, which we have none of, ask it
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        first, last = (round(share * float(len(corpus))) for share in config.split_matrix[0])
        tokens = int(corpus.index.lengths[first:last].sum(dtype=np.int64))
        if tokens <= sequence_length:
            raise InputError(
                f"{path}: found {tokens} tokens in the first part of order_split {split!r}; expected at least {sequence_length + 1}",
                "prepare more text, shorten the sequence, or use params.order_split = '100,0,0'",
            )
        self.samples_per_epoch = (tokens - 1) // sequence_length
        self._dataset = GPTDataset(IndexedDataset(path), path, np.arange(first, last, dtype=np.int32), run_samples, Split.train, config)
        self._count = len(self._dataset)
        own = {"split": split, "split_documents": last - first, "split_tokens": tokens}
        self._facts = own | {"order": f"megatron-core {metadata.version('megatron-core')}"}

    def _ids(self, position: int) -> npt.NDArray[np.int64]:
        sample = self._dataset[position]
        return np.append(sample["tokens"].numpy(), sample["labels"][-1].numpy())

    def describe(self) -> dict[str, Any]:
        """The provenance of the corpus, how it was cut, and whose order that is."""
        return {**super().describe(), **self._facts}
