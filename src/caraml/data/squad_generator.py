"""A small file in SQuAD's form about people who do not exist: the kind of question tells the kind of word that answers it.

So that a small network learns it in a few dozen steps, each text speaks of one person; SQuAD itself needs a trained language model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from caraml.base.files import write_new
from caraml.data.store import prepared_once

_NAMES = ("Ada", "Bela", "Cleo", "Dara", "Emil", "Fenja", "Goran", "Hana", "Ilse", "Jona", "Kemal", "Lene", "Mats", "Nuria", "Otto", "Pia")
_FACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "place": ("Where does {} live?", "{} lives in {}.", ("Oslo", "Porto", "Graz", "Ghent", "Turku", "Lyon", "Brno", "Split")),
    "work": ("What is the work of {}?", "{} works as a {}.", ("baker", "pilot", "nurse", "judge", "tailor", "farmer", "printer", "diver")),
    "year": ("When was {} born?", "{} was born in {}.", ("1961", "1968", "1974", "1979", "1983", "1990", "1995", "1999")),
    "animal": ("Which animal does {} own?", "{} owns a {}.", ("horse", "parrot", "hound", "goat", "ferret", "donkey", "rabbit", "goose")),
}
_IMPOSSIBLE = 0.15
"""Share of questions without an answer, as version 2 has them."""
_VERSION = 1


def generate_squad(texts: int, seed: int) -> dict[str, Any]:
    """A document of ``texts`` texts with two questions each. The same arguments give the same document."""
    rng = random.Random(seed)  # noqa: S311 -- synthetic texts, the same for the same seed
    return {"version": "v2.0", "data": [{"title": "people", "paragraphs": [_paragraph(rng, number) for number in range(texts)]}]}


def default_squad(held_out: bool = False) -> Path:
    """The file that needs no input: 2,000 texts, or 200 others to validate with. Generated on first use, found again later."""
    texts, seed = (200, 1) if held_out else (2000, 0)

    def build(folder: Path) -> None:
        write_new(folder / "squad.json", json.dumps(generate_squad(texts, seed)))

    return prepared_once({"kind": "squad-text", "version": _VERSION, "texts": texts, "seed": seed}, build) / "squad.json"


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
