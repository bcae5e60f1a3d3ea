"""Token streams on disk in Megatron's indexed format, version 1, and the samples that a language model reads from them.

A corpus is two files. ``<prefix>.bin`` holds the token ids of all sequences one after another. ``<prefix>.idx`` is,
little-endian: the magic ``MMIDIDX\\0\\0`` (9 bytes), the version (uint64, 1), the code of the token type (uint8), the number
of sequences n (uint64), the number of document boundaries m (uint64), n lengths in tokens (int32), n positions in the
``.bin`` in bytes (int64) and m document boundaries in sequences (int64; from 0 to n).

Both files may come from anywhere: every figure of the header is checked against the size of the file before it is used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from caraml.base.errors import InputError
from caraml.base.files import replacing
from caraml.base.limits import opened
from caraml.data.store import marks_beside, refuse_unfinished

if TYPE_CHECKING:
    import torch

    from caraml.data.loader import Synthetic

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""Megatron's codes of the token type. Token ids are integers, so the two float types are read but never fed to a model."""
SYNTHETIC_SAMPLES = 1_000_000
"""In an epoch of random tokens."""
_HEADER = struct.Struct("<9sQBQQ")
_LARGEST_UINT16_VOCABULARY = 65_500
"""The vocabulary up to which Megatron stores two bytes per token."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The stored type for ids below ``vocab_size``: uint16 where it fits by Megatron's rule, else int32."""
    return DTYPE_CODES[8] if vocab_size < _LARGEST_UINT16_VOCABULARY else DTYPE_CODES[4]


def corpus_file(prefix: Path, ending: str) -> Path:
    """A file of a corpus. Its prefix may have dots, so nothing of that is taken for a suffix."""
    return prefix.with_name(prefix.name + ending)


@dataclass(frozen=True)
class TokenIndex:
    """What an ``.idx`` file says: ``lengths`` (n, tokens), ``pointers`` (n, bytes), ``documents`` (m = documents + 1)."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def document_count(self) -> int:
        """The number of documents, which may hold several sequences each."""
        return len(self.documents) - 1


def read_index(path: Path) -> TokenIndex:
    """Read and check an index file; its arrays stay on the disk and are paged in as they are used. Raises ``InputError`` if the file is
    missing, no index of this format, or contradicts itself or its size."""
    try:
        with opened(path) as (file, size):
            header = file.read(_HEADER.size)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", "a corpus is the pair PREFIX.bin and PREFIX.idx") from error
    if len(header) < _HEADER.size:
        raise InputError(f"{path}: found {len(header)} bytes; expected a header of {_HEADER.size}")
    magic, version, code, sequences, boundaries = _HEADER.unpack(header)
    _expect(path, "magic", magic, magic == MAGIC, repr(MAGIC))
    _expect(path, "version", version, version == VERSION, str(VERSION))
    _expect(path, "token type code", code, code in DTYPE_CODES, f"one of {', '.join(map(str, DTYPE_CODES))}")
    _expect(path, "number of document boundaries", boundaries, boundaries >= 1, "at least 1")
    # Python integers: a header that claims 2**64 sequences overflows nothing and asks for no memory.
    expected_size = _HEADER.size + sequences * (4 + 8) + boundaries * 8
    _expect(path, "file size", size, size == expected_size, f"{expected_size} bytes for {sequences} sequences, {boundaries} boundaries")
    after_lengths = _HEADER.size + 4 * sequences
    index = TokenIndex(
        dtype=DTYPE_CODES[code],
        lengths=_map_array(path, np.dtype("<i4"), _HEADER.size, sequences),
        pointers=_map_array(path, np.dtype("<i8"), after_lengths, sequences),
        documents=_map_array(path, np.dtype("<i8"), after_lengths + 8 * sequences, boundaries),
    )
    _check_arrays(path, index)
    return index


def _check_arrays(path: Path, index: TokenIndex) -> None:
    """Lengths are not negative, the sequences lie in the ``.bin`` without gaps, documents divide all sequences in order."""
    sequences = len(index.lengths)
    shortest = int(index.lengths.min(initial=0))
    _expect(path, "sequence length", shortest, shortest >= 0, "none below 0")
    ends = np.cumsum(index.lengths, dtype=np.int64) * index.dtype.itemsize
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[:sequences]
    wrong = np.flatnonzero(index.pointers != starts)
    if wrong.size:
        at = int(wrong[0])
        _expect(path, f"pointer of sequence {at}", int(index.pointers[at]), False, f"{int(starts[at])}, the end of the one before")
    first, last = int(index.documents[0]), int(index.documents[-1])
    _expect(path, "first document boundary", first, first == 0, "0")
    _expect(path, "last document boundary", last, last == sequences, f"{sequences}, the number of sequences")
    _expect(path, "document boundaries", "a falling pair", bool(np.all(np.diff(index.documents) >= 0)), "none before its predecessor")


def _expect(path: Path, field: str, found: object, good: bool, expected: str) -> None:
    if not good:
        raise InputError(f"{path}: {field}: found {found}; expected {expected}", "prepare it again with `caraml data prepare text`")


def _map_array(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    """``count`` values of the file at ``offset`` bytes, read-only. Nothing can be mapped where there is nothing."""
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def write_index(file: BinaryIO, lengths: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> None:
    """Write the index of documents of so many tokens each, one after the other in the ``.bin``."""
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
    file.write(lengths.astype("<i4").tobytes())
    file.write(((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


class IndexedTokens:
    """A corpus in the indexed format, read through the page cache; ``corpus[i]`` is sequence i as a read-only array, and ``stream`` all
    ids, shape (tokens,), in the stored integer type."""

    def __init__(self, prefix: Path) -> None:
        """Open ``prefix.idx`` and ``prefix.bin``. Raises ``InputError`` if one of them is missing, damaged, still written, or does not fit
        the other."""
        self.prefix = Path(prefix)
        refuse_unfinished(marks_beside(self.prefix), self.prefix)
        path = corpus_file(self.prefix, ".bin")
        self.index = read_index(corpus_file(self.prefix, ".idx"))
        if self.index.dtype.kind == "f":
            _expect(corpus_file(self.prefix, ".idx"), "token type", self.index.dtype, False, "an integer type")
        try:
            size = path.stat().st_size
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})", "a corpus is the pair PREFIX.bin and PREFIX.idx") from error
        expected = self.index.token_count * self.index.dtype.itemsize
        _expect(path, "file size", size, size == expected, f"{expected} bytes for the {self.index.token_count} tokens of the index")
        self.stream: npt.NDArray[Any] = _map_array(path, self.index.dtype, 0, self.index.token_count)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.index.lengths)

    def __getitem__(self, position: int) -> npt.NDArray[Any]:
        start = int(self.index.pointers[position]) // self.index.dtype.itemsize
        return self.stream[start : start + int(self.index.lengths[position])]

    def __reduce__(self) -> tuple[type[IndexedTokens], tuple[Path]]:
        """Travel to a loader's worker as a path: a pickled memory map would carry the whole corpus."""
        return IndexedTokens, (self.prefix,)

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, path, documents, tokens, bytes and stored type."""
        return {
            "kind": "text",
            "path": str(self.prefix),
            "items": self.index.document_count,
            "tokens": self.index.token_count,
            "bytes": self.stream.nbytes,
            "dtype": self.index.dtype.name,
        }


class IndexedTokensWriter:
    """Writes the tokens of a corpus, document by document."""

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        """Write ids from 0 to ``vocab_size - 1`` into ``file``; the stored type follows from :func:`token_dtype`."""
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.lengths: list[int] = []
        """Tokens of each document."""
        self.token_count = 0
        self._file, self._sha256 = file, hashlib.sha256()

    @classmethod
    @contextmanager
    def at(cls, prefix: Path, vocab_size: int) -> Iterator[IndexedTokensWriter]:
        """A writer of the corpus ``prefix``. Its index appears under its name last, when everything else is on the disk; leaving by an
        exception removes what was written."""
        with replacing(corpus_file(prefix, ".idx")) as idx, replacing(corpus_file(prefix, ".bin")) as tokens:  # the tokens are left first
            writer = cls(tokens, vocab_size)
            yield writer
            write_index(idx, np.asarray(writer.lengths, dtype=np.int64), writer.dtype)
            corpus_file(prefix, ".idx").unlink(missing_ok=True)  # an old index must never stand beside new tokens

    def add(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append one document, ids of shape (tokens,). Raises ``ValueError`` if an id is outside the vocabulary."""
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size and (int(wide.min()) < 0 or int(wide.max()) >= self.vocab_size):
            raise ValueError(f"token ids run from {wide.min()} to {wide.max()}; expected 0 to {self.vocab_size - 1}")
        data = wide.astype(self.dtype).tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self.lengths.append(wide.size)
        self.token_count += wide.size

    @property
    def document_count(self) -> int:
        return len(self.lengths)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the bytes of the ``.bin`` so far, in hexadecimal: two corpora are the same if it is."""
        return self._sha256.hexdigest()


class TokenSamples:
    """A corpus cut into the samples of a language model: a map-style data set for ``caraml.data.loader.stream``.

    Sample i is the ``sequence_length + 1`` tokens from position ``i * sequence_length`` of the concatenated stream; the
    first ``sequence_length`` are the input, the last as many the targets. Neighbours share one token, so that every
    token but the first is predicted exactly once. What does not fill a sample at the end is left out.
    Order and division among ranks are the loader's business.
    """

    def __init__(self, corpus: IndexedTokens, sequence_length: int, vocab_size: int | None = None) -> None:
        """Cut ``corpus``; with ``vocab_size``, an id outside it is an error of the sample instead of a fault on the device. Raises
        ``InputError`` if the corpus is shorter than one sample."""
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self._count = max(0, (len(corpus.stream) - 1) // sequence_length)
        if self._count == 0:
            found = f"{corpus.prefix}: found {len(corpus.stream)} tokens; expected at least {sequence_length + 1} for one sample"
            raise InputError(found, "prepare more text or shorten the sequence")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> torch.Tensor:
        """Sample ``position``: int64, shape (sequence_length + 1,)."""
        import torch

        if not 0 <= position < self._count:
            raise IndexError(f"sample {position} of {self._count}")
        ids = self._ids(position)
        if self.vocab_size is not None and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            found = f"{self.corpus.prefix}: sample {position} has token {int(ids.max())}; expected ids from 0 to {self.vocab_size - 1}"
            raise InputError(found, "the model's vocabulary must hold the one that the corpus was prepared with")
        return torch.from_numpy(ids)

    def _ids(self, position: int) -> npt.NDArray[np.int64]:
        start = position * self.sequence_length
        return self.corpus.stream[start : start + self.sequence_length + 1].astype(np.int64)

    def describe(self) -> dict[str, Any]:
        return {**self.corpus.describe(), "samples": self._count, "sequence_length": self.sequence_length}


def synthetic_tokens(vocab_size: int, sequence_length: int, samples: int = SYNTHETIC_SAMPLES, seed: int = 0) -> Synthetic:
    """Uniformly random token ids: int64 (``sequence_length + 1``,), from 0 to ``vocab_size - 1``."""
    from caraml.data.loader import Synthetic

    draw = partial(_random_tokens, vocab_size, sequence_length)
    return Synthetic("tokens", draw, samples, seed, vocab_size=vocab_size, sequence_length=sequence_length)


def _random_tokens(vocab_size: int, sequence_length: int, rng: np.random.Generator) -> torch.Tensor:
    import torch

    return torch.from_numpy(rng.integers(vocab_size, size=sequence_length + 1))
