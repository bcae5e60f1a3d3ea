"""Errors that name the cause and the next step, and the exit codes that go with them."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from enum import IntEnum

_LONGEST_LIST = 40
"""Names that an error lists; of more, only their number is of use."""
_LONGEST_LINE = 400
_MOST_FAULTS = 1000
NEWER = "read it with the CARAML that wrote it, or a newer one"
"""Next step of who has a file of a newer version: CARAML is installed from a checkout or a wheel, and no index is to be asked for it."""

UNREADABLE = "cannot be read: "
"""How the reasons begin of records that only stand for one that this CARAML cannot read."""


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
    WORSE = 4
    """`caraml check`: a point is worse than the accepted baseline, or has no result any more."""
    UNDECIDED = 5
    """`caraml check`: no point is worse, and of some the runs do not show whether they are."""


class CaramlError(Exception):
    """Something a user can mend. ``str(error)`` is a full sentence; ``hint`` is the next step, if there is one."""

    exit_code = ExitCode.POINTS_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  next step: {self.hint}" if self.hint else message

    @property
    def line(self) -> str:
        """The same in one line, for records and tables."""
        return " ".join(str(self).replace("\n  next step:", "; next step:").split())


class InputError(CaramlError):
    """A file, key or value that the user wrote is wrong."""

    exit_code = ExitCode.WRONG_INPUT


class EnvironmentUnfitError(CaramlError):
    """The machine or the installation lacks something that the request needs."""

    exit_code = ExitCode.ENVIRONMENT_UNFIT


_FULL = (
    "out of memory",  # torch's allocators, cudaErrorMemoryAllocation, NCCL's and RCCL's reports of it
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, and cuSOLVER's, cuSPARSE's, cuDNN's, hipBLAS's
    "allocation_failed",
    "rocblas_status_memory_error",
    "can't allocate memory",  # torch's DefaultCPUAllocator, on Linux and elsewhere
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that the device's or the host's memory is full, in whichever library's words."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        named = type(seen).__name__ == "OutOfMemoryError"  # torch's own, by its name: errors import no torch
        if named or isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return True
        if isinstance(seen, RuntimeError) and any(words in text for words in _FULL):  # torch's errors are RuntimeErrors, all of them
            return True
        seen = seen.__cause__
    return False


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The spelling among ``known`` that is closest to ``word``, capitals aside, or else whose beginning is; ``None`` if nothing is.
    ``alike`` is 1 for the same letters."""
    names = list(known) if word else []
    for most, cutoff in ((None, alike), (len(word), max(alike, 0.8))):
        spelled = {name[:most].lower(): name for name in reversed(names)}
        if matches := difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=cutoff):
            return spelled[matches[0]]
    return None


class UnknownNameError(InputError):
    """A name that is not in a registry; ``known`` are those that are, ``guess`` is the nearest of them."""

    known: tuple[str, ...] = ()
    guess: str | None = None


def unknown_name(kind: str, word: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not in a registry: says what was found, what exists, and the nearest spelling."""
    names = sorted(known)
    guess = nearest(word, names)
    suggestion = f"did you mean {guess!r}?" if guess else None
    listed = in_words(names) if len(names) <= _LONGEST_LIST else f"{len(names)} names"
    error = UnknownNameError(f"unknown {kind} {word!r}; known: {listed or 'none'}", suggestion)
    error.known, error.guess = tuple(names), guess
    return error


def in_words(names: Iterable[str]) -> str:
    """Names in a row, those with ends of lines or other control characters as Python writes them."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def in_a_line(error: BaseException) -> str:
    """What an error says in one line of at most 400 characters; of a model's faults the first, where it is, and how many more there are."""
    count = error.error_count() if hasattr(error, "error_count") else 0
    if count > _MOST_FAULTS:  # telling each takes more memory than the file
        return f"{count:,} faults"
    if not hasattr(error, "errors"):
        return " ".join(str(error).split())[:_LONGEST_LINE] or type(error).__name__
    faults = error.errors(include_url=False, include_input=False)
    place = ".".join(map(str, faults[0]["loc"]))[: _LONGEST_LINE // 2]
    more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
    return f"{f'{place}: ' if place else ''}{faults[0]['msg']}"[:_LONGEST_LINE] + more
