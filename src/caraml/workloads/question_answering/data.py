"""Questions with answers in a text, in SQuAD's JSON (versions 1 and 2), cut into windows of word pieces for a model like BERT.

A text longer than a window is cut into several that overlap by a stride. A question whose answer is not in the window, or that has no
answer at all (version 2), has the span (0, 0): the first token, ``[CLS]``, as BERT's authors do.

Where nobody names a file, a small one in SQuAD's form is made up: the kind of question tells the kind of word that answers it. So that a
small network learns it in a few dozen steps, each text speaks of one person; SQuAD itself needs a trained language model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from caraml.base.errors import InputError, in_a_line
from caraml.base.files import making, write_new
from caraml.base.limits import SQUAD, SQUAD_OBJECTS, SQUAD_TEXT, SQUAD_VALUES, TOKENIZER, counted, read_bytes, read_json, too_large
from caraml.base.packed import unpacking
from caraml.data.loader import Synthetic
from caraml.data.store import prepared_once
from caraml.workloads.pretrained import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import BertWordPieceTokenizer, Encoding, Tokenizer


LONGEST_ANSWER = 30
"""Tokens."""
Scores = Callable[[torch.Tensor], torch.Tensor]
"""Of windows (B, 3, T), the logits of being the answer's first and last token, (B, 2, T)."""
STRIDE = 128
"""Tokens by which neighbouring windows overlap; less in short windows."""
SYNTHETIC_SAMPLES = 88_524
"""Windows of 384 tokens with a stride of 128 in SQuAD 1.1's training file, the length of an epoch of random ones."""
_VERSION = 1
_AT_ONCE = 1000


@dataclass(frozen=True)
class Question:
    """One question; ``start`` is the position of the first answer's first character in the text, ``None`` if there is no answer."""

    text: str
    question: str
    answer: str
    start: int | None
    answers: tuple[str, ...] = ()
    """All that were given, by several people: which of them a model finds does not matter."""


def read_squad(path: Path) -> list[Question]:
    """All questions of a file, which may be compressed (.gz); trained on is the first of several answers. Raises ``InputError`` if the file
    is not in SQuAD's form, or an answer does not stand where the file says."""
    try:
        with unpacking(path) as file:
            content = file.read(SQUAD + 1)
        if len(content) > SQUAD:
            raise too_large(path, len(content), SQUAD)
        articles = json.loads(counted(content, path, SQUAD_VALUES, SQUAD_OBJECTS).decode())["data"]
        questions = [_question(text["context"], asked) for article in articles for text in article["paragraphs"] for asked in text["qas"]]
        if (size := sum(len(question.text) for question in questions)) > SQUAD_TEXT:
            raise too_large(path, size, SQUAD_TEXT, "characters of text, each as often as it is asked about")
    except (ValueError, RecursionError, OverflowError) as error:
        raise InputError(f"{path}: not readable as JSON: {in_a_line(error)}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        form = "data / paragraphs / context, qas / question, answers"
        raise InputError(f"{path}: found no {in_a_line(error)}; expected SQuAD's form: {form}") from error
    for number, question in enumerate(questions):
        if question.start is not None and not question.text.startswith(question.answer, question.start):
            found = question.text[question.start : question.start + len(question.answer)]
            place = f"{path}: question {number + 1} {question.question!r}"
            raise InputError(f"{place}: found {found!r} at answer_start; expected {question.answer!r}")
    if not questions:
        raise InputError(f"{path}: no question in it")
    return questions


def _question(text: str, asked: dict[str, Any]) -> Question:
    answers = [] if asked.get("is_impossible") else asked["answers"]
    if not answers:
        return Question(text, asked["question"], "", None)
    given = tuple(_text(answer["text"]) for answer in answers)
    return Question(text, asked["question"], given[0], int(answers[0]["answer_start"]), given)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError("text")
    return found


def train_word_pieces(path: Path, vocabulary: int) -> Path:
    """The vocabulary file of WordPiece trained on a file's texts and questions; trained once."""
    from tokenizers import BertWordPieceTokenizer

    def build(folder: Path) -> None:
        questions = read_squad(path)
        words = BertWordPieceTokenizer(lowercase=True)
        texts = dict.fromkeys(question.text for question in questions)
        words.train_from_iterator([*texts, *(question.question for question in questions)], vocab_size=vocabulary, show_progress=False)
        vocabulary_of = words.get_vocab()
        write_new(folder / "vocab.txt", "".join(f"{word}\n" for word in sorted(vocabulary_of, key=vocabulary_of.__getitem__)))

    key = {"kind": "word-pieces", "version": _VERSION, "file": _digest(path, SQUAD), "vocabulary": vocabulary}
    return prepared_once(key, build) / "vocab.txt"


def _words(vocabulary: Path) -> BertWordPieceTokenizer | Tokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a ``vocab.txt`` in lower case, unless ``tokenizer_config.json`` says otherwise."""
    if vocabulary.suffix == ".json":
        return load_tokenizer(vocabulary)
    from tokenizers import BertWordPieceTokenizer

    lower = _in_lower_case(vocabulary)
    try:
        words = BertWordPieceTokenizer(str(vocabulary), lowercase=lower)
        if words.token_to_id("[UNK]") is None:
            raise ValueError("unk_token not found in the vocabulary")
    except Exception as error:  # the library raises nothing narrower
        expected = "expected one word on each line in UTF-8, [UNK], [CLS] and [SEP] among them"
        found = f"{vocabulary}: not a vocabulary of WordPiece: {in_a_line(error)}; {expected}"
        raise InputError(found, "give the vocab.txt or tokenizer.json of a BERT") from error
    return words


def _in_lower_case(vocabulary: Path) -> bool:
    settings = vocabulary.with_name("tokenizer_config.json")
    if vocabulary.suffix == ".json" or not settings.is_file():
        return True
    try:
        return json.loads(read_json(settings)).get("do_lower_case", True) is not False
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{settings}: not readable as a JSON object: {in_a_line(error)}") from error


class SquadWindows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The windows of a file: ids, segments and mask as int64 (3, T), and the answer's first and last token as int64 (2,)."""

    def __init__(self, path: Path, vocabulary: Path, tokens: int) -> None:
        """Read and tokenise, or find what was made of the same file before. Raises ``InputError`` for a bad file."""
        self.path, self.vocabulary, self.tokens = path, vocabulary, tokens
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        key = {
            "kind": "squad",
            "version": _VERSION,
            "file": _digest(path, SQUAD),
            "vocabulary": _digest(vocabulary, TOKENIZER),
            "tokens": tokens,
            **({} if _in_lower_case(vocabulary) else {"lower_case": False}),
        }
        with np.load(prepared_once(key, lambda folder: _prepare(path, vocabulary, tokens, folder)) / "windows.npz") as prepared:
            self._ids, self._lengths, self._spans = prepared["ids"], prepared["lengths"], prepared["spans"]
            self.questions = int(prepared["questions"])
        self.vocabulary_size = 1 + max(_words(vocabulary).get_vocab().values())  # lines that occur twice count

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _sample(self._ids[position], *self._lengths[position].tolist()), torch.from_numpy(self._spans[position].astype(np.int64))

    def answers(self, scores: Scores, batch: int, most: int | None) -> Iterator[tuple[str, tuple[str, ...]]]:
        """A model's answer to each question, with the given ones; in ``most`` batches of windows, to the questions that are whole in them.

        As BERT's authors choose it: the best span of at most 30 tokens in any window of the text. In a file that has questions without an
        answer it is none, the empty text, if the first token, ``[CLS]``, scores better as a span in each window than any other span.
        """
        questions = read_squad(self.path)
        may_be_none = any(question.start is None for question in questions)
        encodings = _encoded(_tokenizer(self.path, questions, self.vocabulary, self.tokens), questions)
        windows = itertools.islice(encodings, None if most is None else most * batch)
        asked: Question | None = None
        best, nothing = (-math.inf, ""), math.inf
        while part := list(itertools.islice(windows, batch)):
            logits = scores(torch.stack([_sample(*_window(encoding)) for _, encoding in part])).float().cpu().numpy()
            for (question, encoding), (start, end) in zip(part, logits, strict=True):
                if question is not asked:
                    if asked is not None:
                        yield "" if may_be_none and nothing > best[0] else best[1], asked.answers
                    asked, best, nothing = question, (-math.inf, ""), math.inf
                nothing = min(nothing, float(start[0] + end[0]))
                best = max(best, _best_span(start, end, question.text, encoding), key=lambda span: span[0])
        if asked is not None and next(encodings, None) is None:  # else its other windows are in no batch
            yield "" if may_be_none and nothing > best[0] else best[1], asked.answers

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "squad",
            "path": str(self.path),
            "items": len(self),
            "questions": self.questions,
            "bytes": self.path.stat().st_size,
            "tokens": self.tokens,
            "vocabulary": self.vocabulary_size,
            "answered": int((self._spans[:, 0] > 0).sum()),
        }


def _tokenizer(path: Path, questions: list[Question], vocabulary: Path, tokens: int) -> BertWordPieceTokenizer | Tokenizer:
    """What cuts questions with their texts into windows."""
    words = _words(vocabulary)
    if [kind for kind, _ in itertools.groupby(words.encode("a", "a").sequence_ids)][:4] != [None, 0, None, 1]:
        found = f"{vocabulary}: marks neither begin nor end of a question; expected a tokenizer that makes [CLS] question [SEP] text [SEP]"
        raise InputError(found, "give the tokenizer of a BERT")
    stride = min(STRIDE, tokens // 4)
    longest = max(words.encode_batch([question.question for question in questions]), key=len)
    if tokens - len(longest) - 1 <= stride:  # a window holds the question, the text, a [SEP], and more of the text than it repeats
        found = f"{path}: a question of {len(longest)} tokens does not fit into a window of {tokens} with {stride} of overlap"
        raise InputError(found, "use more tokens")
    words.enable_truncation(tokens, stride=stride, strategy="only_second")
    words.enable_padding(length=tokens)
    return words


def _prepare(path: Path, vocabulary: Path, tokens: int, folder: Path) -> None:
    questions = read_squad(path)
    words = _tokenizer(path, questions, vocabulary, tokens)
    windows = [(*_window(encoding), _span(question, encoding)) for question, encoding in _encoded(words, questions)]
    ids, asked, used, spans = zip(*windows, strict=True)
    with making(folder / "windows.npz") as file:
        np.savez(
            file,
            ids=np.array(ids, dtype=np.int32),
            lengths=np.array([asked, used], dtype=np.int32).T,
            spans=np.array(spans, dtype=np.int32),
            questions=np.array(len(questions)),
        )


def _encoded(words: BertWordPieceTokenizer | Tokenizer, questions: list[Question]) -> Iterator[tuple[Question, Encoding]]:
    """Each question with the encoding of each of its windows."""
    for first in range(0, len(questions), _AT_ONCE):
        part = questions[first : first + _AT_ONCE]
        encodings = words.encode_batch([(question.question, question.text) for question in part])
        for question, encoding in zip(part, encodings, strict=True):
            yield from ((question, window) for window in (encoding, *encoding.overflowing))


def _text_tokens(encoding: Encoding) -> list[int]:
    """Places of the text's tokens in a window, one after the other."""
    return [index for index, segment in enumerate(encoding.sequence_ids) if segment == 1]


def _window(encoding: Encoding) -> tuple[npt.NDArray[np.int32], int, int]:
    """Ids (T,) of a window, and the tokens of the question and in all."""
    text, used = _text_tokens(encoding), int(sum(encoding.attention_mask))
    return np.array(encoding.ids, dtype=np.int32), text[0] if text else used, used


def _sample(ids: npt.NDArray[np.int32], asked: int, used: int) -> torch.Tensor:
    """Ids, segments and mask of a window, int64 (3, T)."""
    sample = np.zeros((3, len(ids)), dtype=np.int64)
    sample[0] = ids
    sample[1, asked:used] = 1
    sample[2, :used] = 1
    return torch.from_numpy(sample)


def _best_span(start: npt.NDArray[np.float32], end: npt.NDArray[np.float32], text: str, encoding: Encoding) -> tuple[float, str]:
    """Score and text of the best span that begins and ends in the window's part of the text."""
    places = _text_tokens(encoding)
    first, last = start[places], end[places]
    sums = [first[: len(places) - more] + last[more:] for more in range(min(LONGEST_ANSWER, len(places)))]
    if not sums:
        return -math.inf, ""
    more = int(np.argmax([each.max() for each in sums]))
    begin = int(sums[more].argmax())
    return float(sums[more][begin]), text[encoding.offsets[places[begin]][0] : encoding.offsets[places[begin + more]][1]]


def _span(question: Question, encoding: Encoding) -> tuple[int, int]:
    offsets, text = encoding.offsets, _text_tokens(encoding)
    if question.start is None:
        return 0, 0
    end = question.start + len(question.answer)
    inside = [index for index in text if offsets[index][0] < end and offsets[index][1] > question.start]
    whole = inside and offsets[inside[0]][0] <= question.start and offsets[inside[-1]][1] >= end
    return (inside[0], inside[-1]) if whole else (0, 0)


def _digest(path: Path, most: int) -> str:
    try:
        return hashlib.sha256(read_bytes(path, most)).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: not readable: {error.strerror or error}") from error


_NAMES = ("Ada", "Bela", "Cleo", "Dara", "Emil", "Fenja", "Goran", "Hana", "Ilse", "Jona", "Kemal", "Lene", "Mats", "Nuria", "Otto", "Pia")
_FACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "place": ("Where does {} live?", "{} lives in {}.", ("Oslo", "Porto", "Graz", "Ghent", "Turku", "Lyon", "Brno", "Split")),
    "work": ("What is the work of {}?", "{} works as a {}.", ("baker", "pilot", "nurse", "judge", "tailor", "farmer", "printer", "diver")),
    "year": ("When was {} born?", "{} was born in {}.", ("1961", "1968", "1974", "1979", "1983", "1990", "1995", "1999")),
    "animal": ("Which animal does {} own?", "{} owns a {}.", ("horse", "parrot", "hound", "goat", "ferret", "donkey", "rabbit", "goose")),
}
_IMPOSSIBLE = 0.15
"""Share of questions without an answer, as version 2 has them."""
_LOOKALIKE_VERSION = 1


def generate_squad(texts: int, seed: int) -> dict[str, Any]:
    """A document of ``texts`` texts with two questions each. The same arguments give the same document."""
    rng = random.Random(seed)  # noqa: S311 -- synthetic texts, the same for the same seed
    return {"version": "v2.0", "data": [{"title": "people", "paragraphs": [_paragraph(rng, number) for number in range(texts)]}]}


def default_squad(held_out: bool = False) -> Path:
    """The file that needs no input: 2,000 texts, or 200 others to validate with. Generated on first use, found again later."""
    texts, seed = (200, 1) if held_out else (2000, 0)

    def build(folder: Path) -> None:
        write_new(folder / "squad.json", json.dumps(generate_squad(texts, seed)))

    return prepared_once({"kind": "squad-text", "version": _LOOKALIKE_VERSION, "texts": texts, "seed": seed}, build) / "squad.json"


def _paragraph(rng: random.Random, number: int) -> dict[str, Any]:
    name = rng.choice(_NAMES)
    chosen = rng.sample(sorted(_FACTS), 3)
    answers = {kind: rng.choice(_FACTS[kind][2]) for kind in chosen}
    text = " ".join(_FACTS[kind][1].format(name if not index else "This person", answers[kind]) for index, kind in enumerate(chosen))
    asked = []
    for index in range(2):
        missing = next(kind for kind in _FACTS if kind not in chosen)
        kind = missing if rng.random() < _IMPOSSIBLE else chosen[index]
        found = kind in answers
        asked.append(
            {
                "id": f"{number}-{index}",
                "question": _FACTS[kind][0].format(name),
                "is_impossible": not found,
                "answers": [{"text": answers[kind], "answer_start": text.index(answers[kind])}] if found else [],
            }
        )
    return {"context": text, "qas": asked}


def synthetic_windows(vocab_size: int, tokens: int, samples: int = SYNTHETIC_SAMPLES, seed: int = 0) -> Synthetic:
    """Windows of random tokens with a random span: ids, segments and mask as int64 (3, T), and int64 (2,), as SQuAD's windows are."""
    return Synthetic("windows", partial(_random_window, vocab_size, tokens), samples, seed, tokens=tokens)


def _random_window(vocab_size: int, tokens: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    sample = np.ones((3, tokens), dtype=np.int64)
    sample[0] = rng.integers(vocab_size, size=tokens)
    sample[1, : tokens // 8] = 0
    return torch.from_numpy(sample), torch.from_numpy(np.sort(rng.integers(tokens, size=2)))
