"""The search for a device's limits, among kernels whose speed is known; and that this machine's real kernels can be searched."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.system import kernels, limits
from caraml.system.kernels import CONVOLUTION, Kernel, Stopwatch, Timing, array_bytes, dense, search, streams
from caraml.system.limits import Limit, measure

torch = pytest.importorskip("torch")
CPU = torch.device("cpu")
GIGA = 1e9
SIZES = (1e7, 1e8, 1e9, 1e10)
"""FLOPs of one call, of four shapes."""


class FakeWatch(Stopwatch):
    """A clock that work moves. ``granted`` is the share of the CPUs that a repetition gets: with half of them it takes twice as long."""

    def __init__(self, granted: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__(CPU)
        self.time, self.granted = 0.0, granted

    def now(self) -> float:
        return self.time

    def _one(self, work: Callable[[], object]) -> float:
        begin = self.time
        work()
        self.time += (self.time - begin) * (1 / self.granted() - 1)
        return self.time - begin


def family(
    watch: FakeWatch,
    library: str,
    rate: float,
    *,
    name: str = "matrix product",
    loading: float = 0.0,
    noise: Callable[[], float] = lambda: 1.0,
    full: float = 1e9,
) -> list[Kernel]:
    """Kernels that reach ``rate`` from ``full`` FLOPs on, and a quarter of it below. The first call loads the library."""
    left = [loading]

    def make(flops: float) -> Callable[[], object]:
        def work() -> None:
            watch.time += left[0] + flops / (rate if flops >= full else rate / 4) * noise()
            left[0] = 0.0

        return work

    return [Kernel(library, name, (int(flops),), flops, lambda flops=flops: make(flops)) for flops in SIZES]


def test_the_limit_is_that_of_the_fastest_library() -> None:
    watch = FakeWatch()
    todo = family(watch, "MKL", 162 * GIGA) + family(watch, "oneDNN", 437 * GIGA, name="linear layer")
    found = search([*todo, *family(watch, "oneDNN", 410 * GIGA, name=CONVOLUTION)], watch, 3.0)
    assert found.kernel.family == "oneDNN linear layer" and found.kernel.amount >= 1e9
    assert found.rate == pytest.approx(437 * GIGA)
    fastest = {one.kernel.family: one.rate for one in found.tried if one.kernel.shape == (int(1e9),)}
    assert sorted(fastest.values()) == pytest.approx([162 * GIGA, 410 * GIGA, 437 * GIGA])


def test_loading_a_library_takes_no_time_from_the_search() -> None:
    watch = FakeWatch()
    todo = [kernel for library in ("a", "b") for kernel in family(watch, library, 400 * GIGA, loading=20.0)]
    found = search(todo, watch, 2.0)
    assert all(one.rate for one in found.tried) and watch.time < 40 + 3


@pytest.mark.parametrize("rate", [0.1 * GIGA, 1 * GIGA, 5 * GIGA])
def test_an_emulated_format_ends_in_time(rate: float) -> None:
    watch = FakeWatch()
    found = search(family(watch, "torch", rate), watch, 2.0)
    assert watch.time < 2.5 * 2.0
    assert "would take" in (found.tried[-1].skipped or "")


@pytest.mark.parametrize("waiting", [0.0, 0.005, 0.02])
def test_calls_that_wait_for_a_busy_core_do_not_end_the_search_at_the_smallest_shape(waiting: float) -> None:
    """With 20 ms for each call, the product of 128 x 128 reaches 0.2 GFLOP/s of 180."""
    watch = FakeWatch()

    def make(flops: float) -> Callable[[], object]:
        def work() -> None:
            watch.time += waiting + flops / (180 * GIGA)

        return work

    todo = [Kernel("MKL", "matrix product", (n,), 2.0 * n**3, lambda n=n: make(2.0 * n**3)) for n in (128, 256, 512, 1024, 2048, 4096)]
    found = search(todo, watch, 3.0)
    assert found.rate > 0.75 * 180 * GIGA and watch.time < 2 * 3.0


def test_the_luck_of_being_chosen_does_not_count() -> None:
    """Twenty kernels of the same speed: the fastest of so many looks is above it, the limit is not."""
    draw = random.Random(1)
    found, seen = [], []
    for _ in range(20):
        watch = FakeWatch()
        todo = [k for i in range(20) for k in family(watch, f"library {i}", 400 * GIGA, noise=lambda: draw.gauss(1, 0.08))[2:]]
        result = search(todo, watch, 3.0)
        found.append(result.rate / (400 * GIGA))
        seen.append(max(one.rate for one in result.tried) / (400 * GIGA))
    assert sum(found) / len(found) == pytest.approx(1, abs=0.012)
    assert sum(seen) / len(seen) > 1.02


def test_a_third_of_disturbed_repetitions_moves_nothing() -> None:
    draw = random.Random(2)
    watch = FakeWatch(granted=lambda: draw.choice((1.0, 1.0, 0.5)))
    assert search(family(watch, "MKL", 400 * GIGA)[2:3], watch, 1.0).rate == pytest.approx(400 * GIGA)


@pytest.mark.parametrize("busy_from", [0.0, 0.6])
def test_a_disturbed_search_gives_the_fastest_repetition_and_says_so(busy_from: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take half of the CPUs in four repetitions of five, or all the time from some moment on."""
    draw = random.Random(3)
    watch = FakeWatch()
    if busy_from:
        watch.granted = lambda: 1.0 if watch.time < busy_from else 0.5
    else:
        watch.granted = lambda: 1.0 if draw.random() < 0.2 else draw.uniform(0.3, 0.6)
    monkeypatch.setattr(limits, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(limits, "CpuLoad", lambda: None)
    monkeypatch.setattr(limits, "dense", lambda device, dtype: family(watch, "MKL", 400 * GIGA))
    found = measure("arithmetic", "cpu", "fp32", budget_s=1.0)
    assert found.rate == pytest.approx(400 * GIGA) and found.low is None and found.high is None
    assert found.disturbed is not None and ("half of its repetitions" if not busy_from else "a moment before") in found.disturbed


def test_a_gpu_that_its_power_limit_slows_down_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet H200 was 1.1 to 1.2 times as fast when kernels were chosen as when the chosen ones ran without a pause."""
    draw, watch = random.Random(5), FakeWatch()
    watch.granted = lambda: draw.gauss(1.0 if watch.time < 0.6 else 0.85, 0.002)
    monkeypatch.setattr(limits, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(limits, "_device_name", lambda device: "GPU of the test")
    monkeypatch.setattr(limits, "dense", lambda device, dtype: family(watch, "cuBLAS", 400 * GIGA))
    found = measure("arithmetic", "cuda", "fp32", budget_s=1.0)
    assert found.disturbed is None and found.low is not None and found.high is not None
    assert found.rate == pytest.approx(400 * GIGA, rel=0.01) and found.sustained == pytest.approx(340 * GIGA, rel=0.01)
    watch.granted = lambda: draw.choice((0.5, 0.5, 0.5, 1.0))
    assert measure("arithmetic", "cuda", "fp32", budget_s=1.0).disturbed is not None, "others that take turns with it do disturb"


def test_three_lucky_repetitions_of_a_gpu_are_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen kernels of the same speed and so slow that three repetitions of each are all: the best median was 2 % above it, without an
    interval."""
    draw, found = random.Random(7), []
    monkeypatch.setattr(limits, "_device_name", lambda device: "GPU of the test")
    for _ in range(20):
        watch = FakeWatch()
        todo = [k for i in range(16) for k in family(watch, f"library {i}", 100 * GIGA, noise=lambda: max(draw.gauss(1, 0.03), 0.5))[3:]]
        monkeypatch.setattr(limits, "Stopwatch", lambda device, watch=watch: watch)
        monkeypatch.setattr(limits, "dense", lambda device, dtype, todo=todo: todo)
        found.append(measure("arithmetic", "cuda", "fp32", budget_s=7.0))
    assert all(one.low is not None and one.high is not None for one in found)
    assert sum(one.rate for one in found) / len(found) == pytest.approx(100 * GIGA, rel=0.01)


def test_a_gpu_that_others_use_in_turns_has_the_limit_of_its_fastest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whose repetitions four in ten took twice as long; a slower one was measured between two turns."""
    draw, watch = random.Random(8), FakeWatch()
    todo = family(watch, "cuBLAS", 400 * GIGA, noise=lambda: 2.0 if draw.random() < 0.4 else 1.0) + family(watch, "cuDNN", 385 * GIGA)
    monkeypatch.setattr(limits, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(limits, "_device_name", lambda device: "GPU of the test")
    monkeypatch.setattr(limits, "dense", lambda device, dtype: todo)
    found = measure("arithmetic", "cuda", "fp32", budget_s=3.0)
    assert next(iter(found.by_library)) == "cuBLAS matrix product" and found.rate == pytest.approx(400 * GIGA)


def test_a_convolution_that_is_kept_as_the_limit_of_a_gpu_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the matrix products that it was held against."""
    watch = FakeWatch()
    monkeypatch.setattr(limits, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(limits, "_device_name", lambda device: "GPU of the test")
    todo = family(watch, "cuBLAS", 60 * GIGA) + family(watch, "cuDNN", 66 * GIGA, name=CONVOLUTION)
    monkeypatch.setattr(limits, "dense", lambda device, dtype: todo)
    kept = measure("arithmetic", "cuda", "bf16", budget_s=2.0)
    assert kept.kernel == CONVOLUTION
    assert measure("arithmetic", "cuda", "bf16", budget_s=0.5, kept=kept).rate == pytest.approx(66 * GIGA)


def test_a_quiet_search_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    watch = FakeWatch()
    monkeypatch.setattr(limits, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(limits, "CpuLoad", lambda: None)
    monkeypatch.setattr(limits, "dense", lambda device, dtype: family(watch, "MKL", 400 * GIGA, noise=lambda: draw.gauss(1, 0.02)))
    found = measure("arithmetic", "cpu", "fp32", budget_s=2.0)
    assert found.disturbed is None and found.low is not None and found.high is not None
    assert found.low <= found.rate <= found.high and found.rate == pytest.approx(400 * GIGA, rel=0.01)


def test_what_does_not_run_is_left_out_with_its_reason() -> None:
    watch = FakeWatch()

    def broken() -> Callable[[], object]:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for Half\n  and a long trace')

    todo = [Kernel("MKL", "matrix product", (1,), 1e7, broken)]
    assert search([*todo, *family(watch, "oneDNN", GIGA)], watch, 1.0).tried[0].skipped == '"addmm_impl_cpu_" not implemented for Half'
    with pytest.raises(EnvironmentUnfitError, match=r"nothing can be measured: .* not implemented for Half"):
        search(todo, watch, 1.0)
    with pytest.raises(EnvironmentUnfitError, match="does not have the kernel"):
        search([], watch, 1.0)


@pytest.mark.parametrize(("library", "winner"), [("cuDNN", "cuBLAS"), ("oneDNN", "oneDNN")])
def test_a_convolution_that_counts_more_than_it_computes_is_no_limit_of_a_gpu(
    library: str, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H200's in fp32 reached 94.5 TFLOP/s, of which its data sheet has 66.9. Nor is it told beside the limit."""
    watch = FakeWatch()
    todo = family(watch, "cuBLAS", 60 * GIGA) + family(watch, library, 120 * GIGA, name=CONVOLUTION)
    assert search(todo, watch, 2.0).kernel.library == winner
    monkeypatch.setattr(limits, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(limits, "CpuLoad", lambda: None)
    monkeypatch.setattr(limits, "dense", lambda device, dtype: todo)
    found = measure("arithmetic", "cpu", "fp32", budget_s=2.0)
    assert max(found.by_library.values()) == found.rate, "nothing that is told is faster than the limit"


def test_few_repetitions_have_no_interval() -> None:
    assert Timing.of([1.0] * 3).relative is None
    steady = Timing.of([1.0 + 0.01 * (i % 2) for i in range(40)])
    assert steady.relative is not None and 0 < steady.relative < 0.01


def names(dtype: str) -> set[str]:
    return {kernel.family for kernel in dense(CPU, dtype)}  # type: ignore[arg-type]


def test_every_library_of_this_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert names("fp32") == {"MKL matrix product", "oneDNN linear layer", "oneDNN 3x3 convolution"}
    assert names("bf16") == {"torch matrix product", "oneDNN linear layer", "oneDNN 3x3 convolution"}
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert names("fp32") == {"MKL matrix product", "torch 3x3 convolution"}


def test_the_kernels_compute_what_they_count() -> None:
    """FLOPs by torch's own formulas; the prepacked layer is a private operator and has none."""
    from caraml.workloads.flops import count_flops

    for kernel in dense(CPU, "fp32"):
        if kernel.amount < 1e9 and kernel.name != "linear layer":
            assert count_flops(kernel.make()) == kernel.amount


def test_prepacked_layers_give_what_products_do() -> None:
    kernel = next((kernel for kernel in dense(CPU, "fp32") if kernel.name == "linear layer"), None)
    if kernel is None:
        pytest.skip("this torch has no oneDNN")
    x = kernels._random((128, 128), torch.float32, CPU)
    assert torch.allclose(kernel.make()(), x @ x.t(), atol=1e-3)  # operands of one shape are the same numbers


def test_streams_count_what_they_read_and_write() -> None:
    assert [(kernel.name, kernel.amount) for kernel in streams(CPU, 2**20)] == [("sum", 2**20), ("copy", 2 * 2**20), ("triad", 3 * 2**20)]
    for kernel in streams(CPU, 2**20):
        kernel.make()()


def test_arrays_are_in_the_memory_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.host, "cache_bytes", lambda: 96 * 2**20)
    monkeypatch.setattr(kernels.host, "memory_bytes", lambda: 2**36)
    memory, cache = (array_bytes(kind, CPU, lambda work: 0.0) for kind in ("memory", "cache"))  # type: ignore[arg-type]
    assert 3 * memory >= 4 * 96 * 2**20 and 3 * cache <= 96 * 2**20 / 2
    monkeypatch.setattr(kernels.host, "memory_bytes", lambda: 2**29)
    assert array_bytes("memory", CPU, lambda work: 0.0) == 2**25
    monkeypatch.setattr(kernels.host, "cache_bytes", lambda: None)
    with pytest.raises(EnvironmentUnfitError, match="cache is not known"):
        array_bytes("cache", CPU, lambda work: 0.0)


@pytest.mark.parametrize(("bandwidth", "size"), [(300e9, 2**27), (5e12, 2**31)])
def test_arrays_on_a_gpu_grow_until_a_pass_is_long(bandwidth: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a millisecond each, whatever the device: small ones do not have gigabytes to spare."""
    sizes = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda count, **named: sizes.append(count) or real(count, **named))
    monkeypatch.setattr(kernels, "_free_bytes", lambda device: 2**40)
    device = torch.device("meta")
    monkeypatch.setattr(kernels, "_MOST_ARRAY", 2**40)
    assert array_bytes("memory", device, lambda work: 2 * sizes[-1] / bandwidth) == size


def test_the_random_state_of_the_program_stays() -> None:
    state = torch.random.get_rng_state()
    kernels._random((3000, 3000), torch.float32, CPU)
    assert torch.equal(state, torch.random.get_rng_state())


def test_formats_that_a_device_lacks() -> None:
    with pytest.raises(EnvironmentUnfitError, match="tf32"):
        measure("arithmetic", "cpu", "tf32", budget_s=0.1)
    with pytest.raises(EnvironmentUnfitError, match="fp8 exists on NVIDIA and AMD GPUs only"):
        measure("arithmetic", "cpu", "fp8", budget_s=0.1)
    with pytest.raises(InputError, match="unknown dtype of the matrix probe 'fp4'; known: bf16"):
        measure("arithmetic", "cpu", "fp4", budget_s=0.1)  # type: ignore[arg-type]


def test_fp8_products_are_those_of_a_gpu_in_that_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch multiplies them on a CPU, too, slowly: the call is right, its speed means nothing."""
    monkeypatch.setitem(kernels._PRODUCTS, "gpu", ((64, 32, 16),))
    (kernel,) = kernels.dense(torch.device("cpu"), "fp8")
    out = kernel.make()()
    assert isinstance(out, torch.Tensor) and (out.shape, out.dtype) == ((64, 16), torch.bfloat16)
    assert kernel.amount == 2.0 * 64 * 32 * 16


def test_this_machine_has_limits_that_can_be_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels._PRODUCTS, "cpu", ((64,) * 3, (128,) * 3))
    monkeypatch.setitem(kernels._CONVOLUTIONS, "cpu", ((1, 32, 14),))
    before = torch.get_float32_matmul_precision()
    found = measure("arithmetic", "cpu", "fp32", budget_s=0.2)
    assert torch.get_float32_matmul_precision() == before
    assert found.rate == found.by_library[f"{found.library} {found.kernel}"] > 0
    assert found.rate >= max(found.by_library.values()) / 1.1, "no kernel that was tried beats the limit by more than luck"
    again = measure("arithmetic", "cpu", "fp32", budget_s=0.05, kept=found)
    assert (again.library, again.kernel, again.shape) == (found.library, found.kernel, found.shape) and len(again.by_library) == 1
    assert Limit.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(EnvironmentUnfitError, match="does not have the kernel"):
        measure("arithmetic", "cpu", "fp32", budget_s=0.05, kept=found.model_copy(update={"kernel": "no such"}))


def test_who_else_used_the_cpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([100.0, 103.0])
    monkeypatch.setattr(limits.host, "busy_seconds", lambda cpus: next(busy))
    monkeypatch.setattr(limits.host, "mask", lambda: frozenset({0, 1}))
    times = iter([10.0, 12.0])
    monkeypatch.setattr(limits.time, "monotonic", lambda: next(times))
    own = iter([1.0, 2.0])
    monkeypatch.setattr(limits.time, "process_time", lambda: next(own))
    load = limits.CpuLoad()
    assert load.others() == pytest.approx((3 - 1) / (2 * 2))
