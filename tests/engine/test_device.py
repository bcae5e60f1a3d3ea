"""Units and patience of the devices, where no GPU is needed to see them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.engine.device import CudaDevice, CudaGraph, open_device
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


@pytest.mark.parametrize("ends_itself", [False, True], ids=["torch 2.11", "torch 2.13"])
def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, ends_itself: bool) -> None:
    """As torch's own has it: its end fails too, and neither leaves the stream, nor the pool, nor the generator's state of the capture."""
    current, pools, generator = ["usual"], {(0, 7)}, SimpleNamespace(capturing=False)
    generator.clone_state = lambda: generator.capturing
    generator.graphsafe_set_state = lambda state: setattr(generator, "capturing", state)

    class Stream:
        """A context as torch has it, which an error does not stop."""

        def __init__(self, wanted: str) -> None:
            self.wanted, self.before = wanted, ""

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.wanted

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    class Graph:
        def __init__(self, graph: object, *, pool: tuple[int, int], stream: str, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local" and pool in pools
            self.stream = stream

        def __enter__(self) -> None:
            current[0], generator.capturing = self.stream, True

        def __exit__(self, *error: object) -> None:
            if ends_itself:
                pools.clear()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def end(index: int, pool: tuple[int, int]) -> None:
        if pool not in pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        pools.remove(pool)

    fakes = {"CUDAGraph": object, "Stream": lambda device: "side", "graph": Graph, "stream": Stream, "graph_pool_handle": lambda: (0, 7)}
    fakes |= {"current_stream": lambda device: current[0], "default_generators": (generator,)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)

    def work() -> torch.Tensor:
        assert current == ["side"]
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        CudaGraph(torch.device("cuda", 0)).capture(work)
    assert (current, pools, generator.capturing) == (["usual"], set(), False)
