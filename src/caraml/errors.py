"""Errors that name the cause and the next step, and the exit codes that go with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum

_LONGEST_LIST = 40
"""Names that an error lists; of more, only their number is of use."""


class ExitCode(IntEnum):
    """What the process's exit status says."""

    OK = 0
    """Every point has a result."""
    POINTS_FAILED = 1
    """Some points failed; the table says which and why."""
    WRONG_INPUT = 2
    """The user's file, option or value is wrong."""
    ENVIRONMENT_UNFIT = 3
    """The machine or installation cannot do what was asked."""


class CaramlError(Exception):
    """Something a user can mend. ``str(error)`` is a full sentence; ``hint`` is the next step, if there is one."""

    exit_code = ExitCode.POINTS_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  next step: {self.hint}" if self.hint else message


class InputError(CaramlError):
    """A file, key or value that the user wrote is wrong."""

    exit_code = ExitCode.WRONG_INPUT


class EnvironmentUnfitError(CaramlError):
    """The machine or the installation lacks something that the request needs."""

    exit_code = ExitCode.ENVIRONMENT_UNFIT


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The spelling among ``known`` that is closest to ``word``, or ``None`` if nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name(kind: str, word: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a registry: says what was found, what exists, and the nearest spelling."""
    names = sorted(known)
    guess = nearest(word, names)
    suggestion = f"did you mean {guess!r}?" if guess else None
    listed = ", ".join(names) if len(names) <= _LONGEST_LIST else f"{len(names)} names"
    return InputError(f"unknown {kind} {word!r}; known: {listed or 'none'}", suggestion)
