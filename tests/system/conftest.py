"""Fake machines: trees of /proc and /sys, and NVML."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machine import Tree
from fake_nvml import FakeGpu, FakeNvml


@pytest.fixture(autouse=True)
def _plain_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CARAML_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")  # no systems of whoever runs the tests


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a folder that stands for ``/``."""

    def write(files: dict[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Puts a fake in the place of pynvml; checks at the end that it was closed as often as opened."""
    # Torch, if some other test has loaded it, would be asked about GPUs that do not exist.
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def install(*gpus: FakeGpu, **options: str) -> FakeNvml:
        fake = FakeNvml(list(gpus), **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    return install
