"""SQuAD's two versions are read, answers land on the right word pieces, long texts are cut into windows, bad files are named."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caraml.base.errors import InputError
from caraml.workloads.question_answering import answer_quality
from caraml.workloads.question_answering.data import (
    LONGEST_ANSWER,
    Question,
    Scores,
    SquadWindows,
    default_squad,
    generate_squad,
    read_squad,
    train_word_pieces,
)

TEXT = "The river Ill rises in Austria and ends in the Rhine near the town of Feldkirch."


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path / "data-home"))


def write(path: Path, asked: list[dict[str, Any]], text: str = TEXT) -> Path:
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": text, "qas": asked}]}]}))
    return path


def question(answer: str, text: str = TEXT, **more: Any) -> dict[str, Any]:
    return {"id": "1", "question": "Where does it rise?", "answers": [{"text": answer, "answer_start": text.index(answer)}], **more}


def test_both_versions_are_read(tmp_path: Path) -> None:
    first = read_squad(write(tmp_path / "v1.json", [question("Austria")]))
    assert first == [Question(TEXT, "Where does it rise?", "Austria", 23, ("Austria",))]
    second = read_squad(
        write(tmp_path / "v2.json", [question("Rhine"), question("Rhine", is_impossible=True), {**question("Ill"), "answers": []}])
    )
    assert [found.start for found in second] == [TEXT.index("Rhine"), None, None]
    (tmp_path / "v1.json.gz").write_bytes(gzip.compress((tmp_path / "v1.json").read_bytes()))
    assert read_squad(tmp_path / "v1.json.gz") == first


@pytest.mark.parametrize("answer", ["Austria", "the town of Feldkirch", "The", "Ill rises"])
def test_a_span_decodes_to_its_answer(answer: str, tmp_path: Path) -> None:
    from tokenizers import BertWordPieceTokenizer

    path = write(tmp_path / "v1.json", [question(answer)])
    vocabulary = train_word_pieces(path, 200)
    windows = SquadWindows(path, vocabulary, 96)
    assert len(windows) == 1
    (ids, segments, mask), (first, last) = windows[0]
    words = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    assert words.decode(ids[first : last + 1].tolist()) == answer.lower()
    assert ids[0] == words.token_to_id("[CLS]") and words.decode(ids[mask.bool() & ~segments.bool()].tolist()) == "where does it rise?"
    assert segments[first] == 1 and int(mask.sum()) < 96 and not ids[~mask.bool()].any()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04cos\nsystem\n", "not a vocabulary of WordPiece: .*UTF-8"),
        (b"", "sep_token not found"),
        (b"[UNK]\n[SEP]\nriver\n", "cls_token not found"),
        (b"[CLS]\n[SEP]\nriver\n", "unk_token not found"),
    ],
)
def test_what_is_no_vocabulary_of_word_pieces_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    path, vocabulary = write(tmp_path / "v1.json", [question("Rhine")]), tmp_path / "vocab.txt"
    vocabulary.write_bytes(content)
    with pytest.raises(InputError, match=f"vocab.txt: .*{words}.*expected one word on each line"):
        SquadWindows(path, vocabulary, 96)


def test_a_tokenizer_without_marks_of_a_question_is_refused(tmp_path: Path) -> None:
    """GPT's, for example: without them the first token, which stands for "no answer", is one of the question."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "v1.json", [question("Rhine")])
    with pytest.raises(InputError, match=r"tokenizer.json: marks neither begin nor end of a question; expected"):
        SquadWindows(path, tmp_path / "tokenizer.json", 96)


def test_a_word_that_stands_twice_in_a_vocabulary_has_the_number_of_its_last_line(tmp_path: Path) -> None:
    path, vocabulary = write(tmp_path / "v1.json", [question("Rhine")]), tmp_path / "vocab.txt"
    vocabulary.write_text("[UNK]\n[CLS]\n[SEP]\n" + "river\n" * 5)
    assert SquadWindows(path, vocabulary, 96).vocabulary_size == 8, "the network needs a place for number 7"


def test_a_long_text_is_cut_and_only_windows_with_the_whole_answer_have_a_span(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(200)) + " the Danube"
    path = write(tmp_path / "long.json", [question("Danube", text)], text)
    windows = SquadWindows(path, train_word_pieces(path, 300), 64)
    spans = [windows[position][1].tolist() for position in range(len(windows))]
    assert len(spans) > 3 and spans[-1][0] > 0 and all(span == [0, 0] for span in spans[:-1])
    assert windows.describe()["answered"] == 1 and windows.describe()["questions"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("{}", "found no 'data'"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "found no 'qas'"),
        ('{"data": []}', "no question in it"),
    ],
)
def test_a_file_of_another_form_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_squad(tmp_path / "bad.json")


def test_an_answer_in_the_wrong_place_is_shown(tmp_path: Path) -> None:
    wrong = question("Austria")
    wrong["answers"][0]["answer_start"] += 1
    with pytest.raises(InputError, match="found 'ustria ' at answer_start; expected 'Austria'"):
        read_squad(write(tmp_path / "off.json", [wrong]))


def test_a_question_longer_than_the_window_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "wide.json", [{**question("Austria"), "question": "where " * 50}])
    with pytest.raises(InputError, match="does not fit into a window"):
        SquadWindows(path, train_word_pieces(path, 200), 32)


def test_the_invented_people_are_a_valid_file_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "people.json").write_text(json.dumps(generate_squad(100, 3)))
    questions = read_squad(tmp_path / "people.json")
    unanswered = sum(found.start is None for found in questions)
    assert len(questions) == 200 and 10 < unanswered < 60
    assert generate_squad(100, 3) == generate_squad(100, 3) != generate_squad(100, 4)
    assert default_squad().read_text() != default_squad(held_out=True).read_text()


def scored(windows: SquadWindows, spans: dict[str, float], nothing: float = 0.0) -> Scores:
    """A model that gives the words of each text a score as a span, ``nothing`` to the first token as one, and little to anything else."""
    from tokenizers import BertWordPieceTokenizer

    words = BertWordPieceTokenizer(str(windows.vocabulary), lowercase=True)

    def scores(samples: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(samples), 2, samples.shape[2]), -50.0)
        logits[:, :, 0] = nothing / 2
        for index, (ids, _, _) in enumerate(samples):
            for text, score in spans.items():
                pieces = words.encode(text, add_special_tokens=False).ids
                for place in range(len(ids) - len(pieces) + 1):
                    if ids[place : place + len(pieces)].tolist() == pieces:
                        logits[index, 0, place] = logits[index, 1, place + len(pieces) - 1] = score / 2
        return logits

    return scores


def test_the_best_span_of_any_window_is_the_answer_as_it_stands_in_the_text(tmp_path: Path) -> None:
    text = "In the beginning Oslo was small. " + " ".join(f"word{number}" for number in range(200)) + " and then the River-Danube, Graz."
    asked = {
        "id": "1",
        "question": "Where?",
        "answers": [{"text": "Oslo", "answer_start": text.index("Oslo")}, {"text": "Graz", "answer_start": 0}],
    }
    path = write(tmp_path / "long.json", [asked, {**asked, "id": "2", "question": "Where does it end?"}], text)
    windows = SquadWindows(path, train_word_pieces(path, 400), 64)
    for batch in (1, 3, 64):
        found = list(windows.answers(scored(windows, {"Oslo": 3.0, "River-Danube": 4.0, "Where": 9.0}, nothing=99.0), batch, None))
        assert found == [("River-Danube", ("Oslo", "Graz"))] * 2, "not the question's words, and an answer always, where all have one"
    few = len(windows) // 2
    assert len(list(windows.answers(scored(windows, {"Oslo": 3.0}), few + 1, 1))) == 1, "the second question is not whole"
    assert not list(windows.answers(scored(windows, {"Oslo": 3.0}), few - 1, 1))
    assert len(list(windows.answers(scored(windows, {"Oslo": 3.0}), few * 2, 1))) == 2


@pytest.mark.parametrize(("nothing", "answer"), [(2.0, "Rhine"), (4.0, "")])
def test_no_answer_is_one_where_the_first_token_scores_best(tmp_path: Path, nothing: float, answer: str) -> None:
    path = write(tmp_path / "v2.json", [question("Rhine"), question("Rhine", is_impossible=True)])
    windows = SquadWindows(path, train_word_pieces(path, 200), 96)
    found = list(windows.answers(scored(windows, {"Rhine": 3.0}, nothing), 2, None))
    assert found == [(answer, ("Rhine",)), (answer, ())]
    metrics = answer_quality(found)
    assert metrics["exact_match"].value == metrics["f1"].value == 0.5


def test_an_answer_has_at_most_thirty_tokens_and_ends_after_it_begins(tmp_path: Path) -> None:
    text = " ".join("abcdefghij"[index % 10] for index in range(60))
    path = write(tmp_path / "v1.json", [question("a b", text)], text)
    windows = SquadWindows(path, train_word_pieces(path, 200), 96)
    logits = torch.full((1, 2, 96), -10.0)
    start = int(windows[0][0][1].argmax())  # of the text
    logits[0, 0, start + 5], logits[0, 1, start + 5 + LONGEST_ANSWER - 1] = 5.0, 1.0  # 30 tokens
    logits[0, 1, start + 5 + LONGEST_ANSWER], logits[0, 1, start + 4] = 9.0, 9.0  # 31 tokens, and an end before the beginning
    ((found, _),) = windows.answers(lambda samples: logits, 1, None)
    assert len(found.split()) == LONGEST_ANSWER and text.index(found) == 10


def test_answers_that_are_no_text_are_refused(tmp_path: Path) -> None:
    asked = question("Austria")
    asked["answers"].append({"text": 7, "answer_start": 0})
    with pytest.raises(InputError, match="found no text; expected SQuAD's form"):
        read_squad(write(tmp_path / "bad.json", [asked]))


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_another_text(place: int, value: int) -> None:
    data = bytearray(json.dumps(generate_squad(5, 0)).encode())
    data[place % len(data)] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "squad.json"
        path.write_bytes(data)
        try:
            assert read_squad(path)
        except InputError as error:
            assert "squad.json" in str(error)
