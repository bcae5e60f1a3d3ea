"""A corpus of any size that is like a text: its documents drawn anew, as often as it takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from caraml.base.files import replacing, write_at, write_file
from caraml.data.store import Tell, begin, finish, grow, marks_beside
from caraml.workloads.gpt.text import META_SCHEMA, PreparedText, default_text_corpus, meta_path, prepare_text, tokenizer_path
from caraml.workloads.gpt.tokens import IndexedTokens, bin_path, idx_path, write_index

_PART = 2**21
"""Tokens that one process writes before it notes that they are done: 4 MB, or 8 MB of a large vocabulary."""
_LOOKALIKE_VERSION = 1
"""Raised when the same arguments would give other tokens."""


def grow_text(  # noqa: PLR0917 -- as prepare_text, with a size and somebody to tell
    inputs: Sequence[Path],
    out: Path,
    gigabytes: float,
    tokenizer: Path | None,
    vocab_size: int,
    text_key: str,
    tell: Tell = lambda done, of: None,
) -> PreparedText:
    """Write the corpus ``out`` of ``gigabytes`` (1e9 bytes) of tokens, several parts at a time; the same call goes on after an end.

    Its documents are those of ``inputs``, without any of the standard library's sources, drawn with replacement. The last of each part
    is cut off, so that all parts have the same number of tokens.

    Raises:
        InputError: as :func:`~caraml.workloads.gpt.text.prepare_text` and :func:`~caraml.data.store.begin`.
        EnvironmentUnfitError: the disk has no room for all of it.
    """
    marks, tokens = marks_beside(out), bin_path(out)
    plan = {
        **{"kind": "text", "inputs": [str(path) for path in inputs], "gigabytes": gigabytes, "version": _LOOKALIKE_VERSION},
        **{"tokenizer": str(tokenizer) if tokenizer else None, "vocab_size": vocab_size, "text_key": text_key},
    }
    begin(tokens, marks, plan)
    if not inputs:
        base = default_text_corpus(vocab_size)
    elif idx_path(marks / "base").exists():
        base = PreparedText.read(marks / "base")
    else:
        base = prepare_text(inputs, marks / "base", tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key)
    sizes = grow(marks, gigabytes, partial(_write_part, base.prefix, tokens, base.end_of_text), tell)
    corpus = IndexedTokens(base.prefix)
    lengths = np.concatenate([_drawn(corpus, number)[1] for number in range(len(sizes))])
    write_file(tokenizer_path(out), base.tokenizer.read_text(encoding="utf-8"))
    provenance = {**base.provenance, "lookalike": plan, "bytes": sum(sizes)}
    counts = {"documents": len(lengths), "tokens": int(lengths.sum()), "vocab_size": base.vocab_size, "end_of_text": base.end_of_text}
    write_file(meta_path(out), json.dumps({"schema": META_SCHEMA, **counts, "provenance": provenance}, indent=2) + "\n")
    with replacing(idx_path(out)) as file:
        write_index(file, lengths, corpus.index.dtype)
    finish(marks)
    return PreparedText.read(out)


def _drawn(corpus: IndexedTokens, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which documents of ``corpus`` are in a part, and how many tokens of each, together :data:`_PART`."""
    rng, lengths = np.random.default_rng([0, number]), np.asarray(corpus.index.lengths, dtype=np.int64)
    chosen = np.empty(0, np.int64)
    while lengths[chosen].sum() < _PART:
        chosen = np.concatenate([chosen, rng.integers(len(lengths), size=_PART // max(int(lengths.mean()), 1) + 1)])
    ends = np.cumsum(lengths[chosen])
    last = int(np.searchsorted(ends, _PART))
    taken = lengths[chosen[: last + 1]]
    taken[-1] -= ends[last] - _PART
    return chosen[: last + 1], taken


def _write_part(base: Path, out: Path, end_of_text: int, number: int) -> int:
    corpus = IndexedTokens(base)
    part = np.concatenate([corpus[int(document)][:length] for document, length in zip(*_drawn(corpus, number), strict=True)])
    part[-1] = end_of_text
    write_at(out, number * part.nbytes, part.tobytes())
    return part.nbytes
