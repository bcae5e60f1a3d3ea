"""Shared by the tests of the power room: the fakes below tests/fakes/power can be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes" / "power"))
