"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from caraml.suite.model import Measure, Point

MakePoint = Callable[..., Point]


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
