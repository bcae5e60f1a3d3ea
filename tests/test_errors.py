"""What an error says."""

from __future__ import annotations

from caraml.errors import ExitCode, InputError, nearest, unknown_name


def test_an_unknown_name_gets_the_nearest_spelling() -> None:
    error = unknown_name("suite", "quik", ["quick", "llm"])
    assert str(error) == "unknown suite 'quik'; known: llm, quick\n  next step: did you mean 'quick'?"
    assert error.exit_code == ExitCode.WRONG_INPUT == 2


def test_nothing_near_gives_no_guess() -> None:
    assert nearest("zzz", ["quick"]) is None
    assert "next step" not in str(InputError("no hint"))
