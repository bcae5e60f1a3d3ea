"""Fixtures of the attacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.users import Person, alone, apart, persons, shared_folder


@pytest.fixture(scope="session")
def two_users() -> None:
    """Skips where this process cannot act as another user."""
    if (reason := alone()) is not None:
        pytest.skip(reason)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users of the machine may write to."""
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def people() -> Iterator[tuple[Person, Person]]:
    """A victim and a stranger, each with processes of their own."""
    reason = apart()
    if reason is not None:
        pytest.skip(reason)
    with persons() as two:
        yield two
