"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from caraml.suite.model import Measure, Point

MakePoint = Callable[..., Point]


@pytest.fixture(scope="session", autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Campaigns of the tests take turns among themselves, and not with others on this machine."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture
def make_point() -> MakePoint:
    """Makes a point; keyword arguments replace the defaults."""

    def make(**values: Any) -> Point:
        defaults: dict[str, Any] = {
            "suite": "test",
            "benchmark": "fake",
            "workload": "fake",
            "params": {},
            "system": "local",
            "device": "test device",
            "device_class": "cpu",
            "software": "test",
            "global_batch": 4,
            "micro_batch": 4,
            "measure": Measure(min_seconds=1, max_seconds=5, idle_seconds=0),
        }
        return Point(**{**defaults, **values})

    return make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Untested is not tested: say so where nobody can miss it."""
    from tests.debian import not_tested

    for reason in not_tested():
        terminalreporter.write_line(f"NOT TESTED: {reason}", red=True, bold=True)
