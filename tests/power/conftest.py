"""Shared by the tests of the power room: the fakes below tests/fakes/power, and what lies here, can be imported by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_time import use_virtual_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes" / "power"))


@pytest.fixture(autouse=True)
def seen_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices here are fakes, which nothing hides."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meters go by a clock that stands still while anything works: see ``virtual_time.py``."""
    clock = use_virtual_time(monkeypatch)
    yield
    clock.end()
