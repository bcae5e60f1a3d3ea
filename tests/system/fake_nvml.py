"""A stand-in for the module ``pynvml``: as many GPUs as wanted, with MIG, without rights, or without a library."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Base of the library's errors, as in pynvml."""


@dataclass
class FakeGpu:
    """One GPU, or (inside ``instances``) one MIG instance."""

    name: str
    memory: int = 80 * 10**9
    uuid: str = "GPU-0"
    bus: str = "00000000:01:00.0"
    tdp_mw: int = 400_000
    limit_mw: int = 400_000
    capability: tuple[int, int] = (8, 0)
    throttle: int = 0
    refuses: tuple[str, ...] = ()
    instances: list[FakeGpu] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    affinity: list[int] = field(default_factory=list)


class FakeNvml:
    """The functions of pynvml that are asked for. ``fails`` is what ``nvmlInit`` raises."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus: list[FakeGpu], driver: str = "570.1", fails: str | None = None) -> None:
        self.gpus, self.driver, self.fails = gpus, driver, fails
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self.gpus[index]

    def __getattr__(self, function: str) -> Any:
        answers = {
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.bus),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu.memory),
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: gpu.tdp_mw,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: gpu.limit_mw,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
            "nvmlDeviceGetMigMode": lambda gpu: (int(bool(gpu.instances)), 0),
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._instance,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.throttle,
            "nvmlDeviceGetEccMode": lambda gpu: (1, 1),
            "nvmlDeviceGetPersistenceMode": lambda gpu: 1,
            "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1410, 2: 1215}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1410,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 4,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 31,
            "nvmlDeviceGetCpuAffinity": lambda gpu, words: gpu.affinity,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=pid) for pid in gpu.processes],
        }
        if function not in answers:
            raise AttributeError(function)

        def answer(gpu: FakeGpu, *arguments: Any) -> Any:
            if function in gpu.refuses:
                raise NVMLError("Insufficient Permissions")
            return answers[function](gpu, *arguments)

        return answer

    def _instance(self, gpu: FakeGpu, slot: int) -> FakeGpu:
        if slot >= len(gpu.instances):
            raise NVMLError("Not Found")
        return gpu.instances[slot]


def fake_torch(*names: str, uuids: tuple[str, ...] = (), cuda: str | None = "13.0", hip: str | None = None, xpu: str | None = None) -> Any:
    """As much of torch as detection looks at, with GPUs of these names."""
    properties = [
        SimpleNamespace(
            name=name,
            uuid=(uuids or [str(i) for i in range(len(names))])[i],
            total_memory=10**9,
            major=9,
            minor=0,
            gcnArchName="gfx90a:sramecc+:xnack-",
            multi_processor_count=108 + i,
        )
        for i, name in enumerate(names)
    ]
    off = SimpleNamespace(is_available=lambda: False)
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: bool(properties), device_count=lambda: len(properties), get_device_properties=lambda i: properties[i]
        ),
        __version__="2.13.0",
        __spec__=find_spec("torch"),
        version=SimpleNamespace(cuda=cuda, hip=hip, xpu=xpu),
        backends=SimpleNamespace(mps=off),
        xpu=off,
        accelerator=SimpleNamespace(current_accelerator=lambda check_available=False: SimpleNamespace(type="cuda") if names else None),
    )
