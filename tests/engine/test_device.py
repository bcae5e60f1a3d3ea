"""Units and patience of the devices, where no GPU is needed to see them."""

from __future__ import annotations

import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.engine.device import CudaDevice, open_device
from caraml.system import families
from caraml.system.families.family import TorchBuild


class Event:
    """What torch's event answers: milliseconds, and whether the device has come to it."""

    def __init__(self, at_ms: float, reached: bool = True) -> None:
        self.at_ms, self.reached = at_ms, reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, other: Event) -> float:
        assert other.reached, "torch raises here"
        return other.at_ms - self.at_ms


def test_events_are_read_in_seconds_and_only_when_they_happened() -> None:
    device = object.__new__(CudaDevice)  # its constructor wants a GPU; its arithmetic does not
    assert device.between(Event(100.0), Event(350.0)) == pytest.approx(0.25)  # type: ignore[arg-type]
    assert device.between(Event(100.0), Event(350.0, reached=False)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        (TorchBuild("2.11.0", cuda="13.0"), "check CUDA_VISIBLE_DEVICES, and "),
        (TorchBuild("2.11.0", hip="7.0"), "check ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES, and "),
    ],
    ids=["cuda", "rocm"],
)
def test_a_process_without_a_gpu_is_told_which_variable_hides_it(monkeypatch: pytest.MonkeyPatch, build: TorchBuild, hint: str) -> None:
    monkeypatch.setenv("CARAML_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(families, "installed_torch", lambda: build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EnvironmentUnfitError, match="torch sees 1, with CUDA_VISIBLE_DEVICES=0") as refused:
        open_device("gpu", 1)
    assert (refused.value.hint or "").startswith(hint)
