"""The language of `where`: what it can say, and everything it refuses."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraml.base.errors import InputError
from caraml.suite.expression import Condition

VALUES = {"global_batch": 64, "devices": 4, "precision": "bf16", "width": 768}


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("global_batch >= devices * 16", True),
        ("global_batch % devices == 0 and precision == 'bf16'", True),
        ("precision in ['fp32', 'tf32']", False),
        ("not (devices > 2) or width // 64 == 12", True),
        ("16 < global_batch < 64", False),
        ("-devices < 0", True),
    ],
)
def test_conditions(text: str, truth: bool) -> None:
    assert Condition(text).holds(VALUES) is truth


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "devices.__class__",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "devices ** 999999999",
        "devices if devices else 1",
        "f'{devices}'",
        "devices = 3",
        "1j",
        "b'x'",
        "devices[0]",
        "1 +",
        "x" * 501,
    ],
)
def test_anything_else_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(InputError):
        Condition(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("'a' * 100000000", "arithmetic on 'a', which is no number"),
        ("precision + 1", "arithmetic on '.*', which is no number"),
        ("devices / 0", "division by zero"),
        ("precision < 3", "found '.*' beside 3, expected two that can be compared"),
        ("3 in devices", "found 3 beside .*, expected a list behind `in`"),
        ("'%99999999d' % 1", "arithmetic on"),
    ],
)
def test_impossible_arithmetic_is_an_input_error(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Condition(text).holds(VALUES)


def test_one_sign_of_equality_is_told() -> None:
    with pytest.raises(InputError, match=r"next step: use == to compare, names"):
        Condition("devices = 3")
    with pytest.raises(InputError, match=r"next step: use names"):
        Condition("devices >= 3 and")


def test_an_unknown_name_gets_the_nearest_spelling() -> None:
    with pytest.raises(InputError, match="did you mean 'global_batch'"):
        Condition("global_bach > 1").holds(VALUES)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        Condition(text).holds(VALUES)
