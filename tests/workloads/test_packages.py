"""What a workload needs and this installation lacks is said before anything starts."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

import pytest

from caraml.base.errors import EnvironmentUnfitError
from caraml.workloads import params_of, see_packages


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name in ("h5netcdf", "transformers") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(EnvironmentUnfitError, match=r"'ap2' needs h5netcdf and transformers[^\n]*\n[^\n]*caraml\[maelstrom\]"):
        see_packages("ap2")
    see_packages("gpt")

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", not_installed)  # a checkout on PYTHONPATH
    with pytest.raises(
        EnvironmentUnfitError, match=r"'ap2' needs h5netcdf and transformers[^\n]*\n[^\n]*pip install h5netcdf transformers"
    ):
        see_packages("ap2")
    assert "weights" in params_of("ap2").model_fields, "its parameters need none of them"
