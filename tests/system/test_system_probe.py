"""The measured peak and bandwidth, against arithmetic of our own on the same machine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from caraml.errors import EnvironmentUnfitError, InputError
from caraml.system.probe import measured_bandwidth, measured_peak

torch = pytest.importorskip("torch")


def best_rate(n: int, repetitions: int) -> float:
    """FLOP/s of the fastest of some n x n products, timed here."""
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    torch.mm(a, b, out=out)
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - begin)
    return float(2 * n**3 / min(seconds))


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Two threads on a machine where others work wait for each other; one is disturbed less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_peak_agrees_with_independent_arithmetic() -> None:
    # Other work on the machine comes and goes: one undisturbed attempt out of five is enough.
    for _ in range(5):
        result = measured_peak("cpu", "fp32", budget_s=1.0)
        ratio = result.flops_per_s / best_rate(1024, 20)
        if 1 / 1.5 < ratio < 1.5:
            break
    assert 1 / 1.5 < ratio < 1.5
    assert result.low <= result.flops_per_s <= result.high
    assert result.flops_per_s == max(trial.flops_per_s or 0 for trial in result.trials)
    assert (result.dtype, result.threads) == ("fp32", 1)


def test_the_random_state_of_the_program_stays() -> None:
    state = torch.random.get_rng_state()
    measured_peak("cpu", "fp32", budget_s=0.05)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
def test_slow_formats_end_in_time(dtype: str) -> None:
    begin = time.monotonic()
    result = measured_peak("cpu", dtype, budget_s=0.5)  # type: ignore[arg-type]
    assert result.flops_per_s > 0
    assert time.monotonic() - begin < 5


def test_formats_that_a_device_lacks() -> None:
    with pytest.raises(EnvironmentUnfitError, match="tf32"):
        measured_peak("cpu", "tf32")
    with pytest.raises(InputError, match="unknown dtype of the matrix probe 'fp8'; known: bf16"):
        measured_peak("cpu", "fp8")


@pytest.mark.usefixtures("_one_thread")
def test_bandwidth_agrees_with_a_copy() -> None:
    for _ in range(3):
        result = measured_bandwidth("cpu", budget_s=0.6)
        a, b = torch.randn(result.array_bytes // 4), torch.randn(result.array_bytes // 4)
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            a.copy_(b)
            seconds.append(time.perf_counter() - begin)
        ratio = result.bytes_per_s / (2 * result.array_bytes / min(seconds))
        if 0.6 < ratio < 2.5:
            break
    # The triad reads two arrays for each one written, so it may count up to 1.5 times as many bytes.
    assert 0.6 < ratio < 2.5
    assert result.low <= result.bytes_per_s <= result.high
