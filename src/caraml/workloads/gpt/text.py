"""From text to a tokenised corpus: read documents, tokenise them by byte-level BPE, write the indexed format; of any size where they are
drawn anew as often as it takes.

Nothing is downloaded. A tokenizer is a folder that the user has, or is trained on the text itself; the default text is
the source code of the Python standard library, which every machine that runs CARAML has.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from caraml.base.errors import EnvironmentUnfitError, InputError, in_a_line
from caraml.base.files import replacing, write_at, write_file
from caraml.base.format import count
from caraml.data.store import Tell, begin, finish, grow, make_parent, marks_beside, prepared_once
from caraml.workloads.gpt.documents import read_documents, text_files
from caraml.workloads.gpt.tokens import IndexedTokens, IndexedTokensWriter, corpus_file, write_index
from caraml.workloads.pretrained import load_tokenizer, read_table

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 8192
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
META_SCHEMA = 1
_SMALLEST_VOCAB_SIZE = 257
"""256 bytes and the end of text: byte-level BPE cannot do with less."""
_TRAINING_BYTES = 64 * 2**20
"""Text that a tokenizer is trained on, at most: merges of a larger sample are nearly the same, time and memory are not."""
_BATCH_BYTES = 2**20
"""Text handed to the tokenizer at once: enough for all cores, little enough for any memory."""
_DEFAULT_CORPUS_BYTES = 4_000_000
_LISTED_INPUTS = 5
"""Inputs named one by one in the provenance; the rest is counted."""


@dataclass(frozen=True)
class PreparedText:
    """A corpus that :func:`prepare_text` wrote."""

    prefix: Path
    """Path of ``.bin``, ``.idx``, ``.json`` (these facts) and ``.tokenizer.json`` without those endings."""
    documents: int
    tokens: int
    """End-of-text tokens included."""
    vocab_size: int
    """Every token id is below it."""
    tokenizer: Path
    """One file, readable by ``tokenizers``."""
    end_of_text: int
    """The id that ends each document."""
    provenance: dict[str, Any]
    """What it was made from and by."""

    @classmethod
    def read(cls, prefix: Path) -> PreparedText:
        """The corpus at ``prefix``, from its ``.json``. Raises ``InputError`` if there is none, or it is not what
        :func:`prepare_text` writes."""
        path = corpus_file(prefix, ".json")
        hint = "prepare the text with `caraml data prepare text`"
        meta = read_table(path)
        if meta.get("schema") != META_SCHEMA:
            raise InputError(f"{path}: schema: found {meta.get('schema')!r}; expected {META_SCHEMA}", hint)
        counts: dict[str, Any] = {field: meta.get(field) for field in ("documents", "tokens", "vocab_size", "end_of_text")}
        for field, found in counts.items():
            if not isinstance(found, int):
                raise InputError(f"{path}: {field}: found {found!r}; expected a number", hint)
        if not isinstance(meta.get("provenance"), dict):
            raise InputError(f"{path}: provenance: found {meta.get('provenance')!r}; expected a table", hint)
        return cls(prefix=prefix, tokenizer=corpus_file(prefix, ".tokenizer.json"), provenance=meta["provenance"], **counts)


def prepare_text(
    inputs: Sequence[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    text_key: str = "text",
    most_documents: int | None = None,
    most_tokens: int | None = None,
) -> PreparedText:
    """Tokenise the documents of ``inputs`` into the corpus ``out``, each ended by the end-of-text token.

    Args:
        inputs: files or folders: JSON Lines (``.xz``, ``.gz``, ``.bz2``, ``.zst`` too), Parquet, plain text, source files.
        out: the prefix; ``out.bin``, ``out.idx``, ``out.json`` and ``out.tokenizer.json`` are written, whole or not at all.
        tokenizer: a ``tokenizer.json``, or a folder with one or with ``vocab.json`` and ``merges.txt`` (GPT-2's form);
            without it, a byte-level BPE is trained on the first 64 MiB of the text.
        vocab_size: the vocabulary to train; a given tokenizer has its own. A short text may yield a smaller one.
        text_key: the field or column that holds the text.
        most_documents: only the first of them; a tokenizer that is trained sees no others either.
        most_tokens: end before the document that would bring the corpus above it.

    Raises:
        InputError: for inputs, tokenizers and vocabularies that are missing, damaged or empty.
        EnvironmentUnfitError: nothing can be written there.
    """
    # Loader workers are forked later; without a word from us the library warns about its own threads in each of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    files = text_files(inputs)
    make_parent(out)
    encoder, origin = _encoder(tokenizer, itertools.islice(_all_documents(files, text_key), most_documents), vocab_size)
    end_of_text = _end_of_text(encoder, origin)
    encoder.encode_special_tokens = True  # a document that spells the end-of-text token does not end there
    # Ids may have holes, so the vocabulary ends after the largest.
    size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
    serialised = encoder.to_str()
    documents = itertools.islice(_all_documents(files, text_key), most_documents)
    with IndexedTokensWriter.at(out, size) as writer:
        text_bytes, full = _write_documents(writer, encoder, documents, origin, end_of_text, most_tokens)
        if writer.document_count == 0:
            if full:
                raise InputError(f"--tokens: found {most_tokens}, the first document has more", "a higher number")
            raise InputError(f"{', '.join(map(str, inputs))}: found no text in {count(len(files), 'file')}")
        corpus_file(out, ".idx").unlink(missing_ok=True)  # from here on, an older corpus of this name is no longer whole
        write_file(corpus_file(out, ".tokenizer.json"), serialised)
        most = {"most_documents": most_documents, "most_tokens": most_tokens}
        provenance = {
            "inputs": [str(path) for path in inputs[:_LISTED_INPUTS]],
            "files": len(files),
            "file_bytes": sum(path.stat().st_size for path in files),
            "text_bytes": text_bytes,
            **{name: value for name, value in most.items() if value is not None},
            "bytes": writer.token_count * writer.dtype.itemsize,
            "sha256": writer.sha256,
            "tokenizer_origin": origin,
            "tokenizer_sha256": hashlib.sha256(serialised.encode()).hexdigest(),
        }
        counts = {"documents": writer.document_count, "tokens": writer.token_count, "vocab_size": size, "end_of_text": end_of_text}
        write_file(corpus_file(out, ".json"), json.dumps({"schema": META_SCHEMA, **counts, "provenance": provenance}, indent=2) + "\n")
    return PreparedText.read(out)


def _encoder(tokenizer: Path | None, documents: Iterator[str], vocab_size: int) -> tuple[Tokenizer, str]:
    if tokenizer is not None:
        return load_tokenizer(tokenizer), str(tokenizer)
    return _train_tokenizer(documents, vocab_size), f"byte-level BPE trained on the text, tokenizers {version('tokenizers')}"


def _write_documents(  # noqa: PLR0917
    writer: IndexedTokensWriter, encoder: Tokenizer, documents: Iterator[str], origin: str, end_of_text: int, most: int | None
) -> tuple[int, bool]:
    """Tokenise documents until the next would bring the corpus above ``most`` tokens; bytes of their text, and whether one did."""
    text_bytes = 0
    for texts in _batches(documents):
        for text, encoding in zip(texts, _encoded(encoder, texts, origin), strict=True):
            if most is not None and writer.token_count + len(encoding.ids) + 1 > most:
                return text_bytes, True
            if encoding.ids:
                writer.add([*encoding.ids, end_of_text])
            text_bytes += len(text.encode())
    return text_bytes, False


def _encoded(encoder: Tokenizer, texts: list[str], origin: str) -> list[Encoding]:
    try:
        return encoder.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's own, which is no Exception: an expression that needs too many tries
            raise
        raise InputError(f"{origin}: this tokenizer cannot divide the text: {in_a_line(Exception(error))}") from error


def standard_library_sources(max_bytes: int) -> list[Path]:
    """The ``.py`` files of this Python's standard library, sorted by path, without its tests and installed packages, of ``max_bytes``
    together at most. Raises ``EnvironmentUnfitError`` if this Python comes without its sources."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        # _sysconfigdata tells of the machine, not of the library
        found += [Path(parent, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    sources = sorted(found)
    if not sources:
        what = f"{root}: this Python has no sources of its standard library, the default text"
        raise EnvironmentUnfitError(what, "prepare a text of your own with `caraml data prepare text INPUT --out PREFIX`")
    totals = itertools.accumulate(path.stat().st_size for path in sources)
    return [path for path, total in zip(sources, totals, strict=True) if total <= max_bytes]


def default_text_corpus(vocab_size: int = DEFAULT_VOCAB_SIZE) -> PreparedText:
    """The corpus that needs no input: 4 MB of the standard library's sources, tokenised by a BPE of ``vocab_size``.

    Prepared on first use, found again later. It is the same on all machines with the same Python version; the version is
    in the provenance, because texts of two versions differ.
    """
    sources = standard_library_sources(_DEFAULT_CORPUS_BYTES)
    root = Path(sysconfig.get_path("stdlib"))
    listing = "\n".join(f"{path.relative_to(root)} {path.stat().st_size}" for path in sources)
    key = {
        "kind": "text",
        "source": "Python standard library",
        "python": platform.python_version(),
        "files_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "vocab_size": vocab_size,
        "tokenizers": version("tokenizers"),
        "schema": META_SCHEMA,
    }
    return PreparedText.read(prepared_once(key, lambda folder: prepare_text(sources, folder / "corpus", vocab_size=vocab_size)) / "corpus")


def _train_tokenizer(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE as GPT-2's, with the end-of-text token as id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST_VOCAB_SIZE:
        raise InputError(f"vocabulary size: found {vocab_size}; expected at least {_SMALLEST_VOCAB_SIZE}: 256 bytes and the end of text")
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(_batches(_first_bytes(documents, _TRAINING_BYTES)), trainer)
    return encoder


def _end_of_text(encoder: Tokenizer, origin: str) -> int:
    for name in _END_OF_TEXT_NAMES:
        token = encoder.token_to_id(name)
        if token is not None:
            return int(token)
    raise InputError(f"{origin}: found no end-of-text token; expected one of {', '.join(_END_OF_TEXT_NAMES)}")


def _all_documents(files: Sequence[Path], text_key: str) -> Iterator[str]:
    return itertools.chain.from_iterable(read_documents(path, text_key) for path in files)


def _first_bytes(documents: Iterator[str], limit: int) -> Iterator[str]:
    taken = 0
    for text in documents:
        if taken >= limit:
            return
        yield text[: limit - taken]
        taken += len(text)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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

    Its documents are those of ``inputs``, without any of the standard library's sources, drawn with replacement. The last of each part is
    cut off, so that all parts have the same number of tokens. Raises ``InputError`` as :func:`prepare_text` and
    :func:`~caraml.data.store.begin`, and ``EnvironmentUnfitError`` where the disk has no room for all of it.
    """
    marks, tokens = marks_beside(out), corpus_file(out, ".bin")
    plan = {
        **{"kind": "text", "inputs": [str(path) for path in inputs], "gigabytes": gigabytes, "version": _LOOKALIKE_VERSION},
        **{"tokenizer": str(tokenizer) if tokenizer else None, "vocab_size": vocab_size, "text_key": text_key},
    }
    begin(tokens, marks, plan)
    if not inputs:
        base = default_text_corpus(vocab_size)
    elif corpus_file(marks / "base", ".idx").exists():
        base = PreparedText.read(marks / "base")
    else:
        base = prepare_text(inputs, marks / "base", tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key)
    sizes = grow(marks, gigabytes, partial(_write_part, base.prefix, tokens, base.end_of_text), tell)
    corpus = IndexedTokens(base.prefix)
    lengths = np.concatenate([_drawn(corpus, number)[1] for number in range(len(sizes))])
    write_file(corpus_file(out, ".tokenizer.json"), base.tokenizer.read_text(encoding="utf-8"))
    provenance = {**base.provenance, "lookalike": plan, "bytes": sum(sizes)}
    counts = {"documents": len(lengths), "tokens": int(lengths.sum()), "vocab_size": base.vocab_size, "end_of_text": base.end_of_text}
    write_file(corpus_file(out, ".json"), json.dumps({"schema": META_SCHEMA, **counts, "provenance": provenance}, indent=2) + "\n")
    with replacing(corpus_file(out, ".idx")) as file:
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
