"""A stand-in for NVIDIA's library whose GPUs follow a signal with a known integral.

Configured by environment variables, so that other processes see the same GPUs: ``FAKE_GPUS`` is a JSON list with one
object per GPU (see ``DEFAULTS``), ``FAKE_T0`` the monotonic time at which the signals' clock is 0.
"""
# ruff: noqa: N801, N802, N816, N818 - the names are the library's

import importlib
import json
import os
import time

from caraml.power import signals

DEFAULTS = {
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "name": "NVIDIA Fake GPU",
    "pci": "00000000:01:00.0",
    "signal": ["Constant", {}],
    "update": 0.02,  # counter and power are refreshed this often [s]
    "limit_w": 700.0,
    "energy": True,  # has the counter
    "instant": True,  # has field 186
    "average": True,  # has field 185 and nvmlDeviceGetPowerUsage
    "usage_window": 0.0,  # nvmlDeviceGetPowerUsage averages over this [s]
    "module": False,  # has module scope; the counter then covers the module
    "gpu_scope": True,  # has power at GPU scope
    "mig": [],  # UUIDs of slices
    "frozen": False,  # the counter never moves
    "lost": False,  # fell off the bus before the library was opened
}

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 1, 2, 3, 4
NVML_ERROR_ALREADY_INITIALIZED, NVML_ERROR_NOT_FOUND, NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_INSUFFICIENT_POWER = 5, 6, 7, 8
NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_TIMEOUT, NVML_ERROR_IRQ_ISSUE, NVML_ERROR_LIBRARY_NOT_FOUND = 9, 10, 11, 12
NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_CORRUPTED_INFOROM, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 13, 14, 15, 16
NVML_ERROR_OPERATING_SYSTEM, NVML_ERROR_LIB_RM_VERSION_MISMATCH, NVML_ERROR_MEMORY, NVML_ERROR_UNKNOWN = 17, 18, 20, 999
NVML_FEATURE_DISABLED, NVML_FEATURE_ENABLED = 0, 1
NVML_DEVICE_ARCH_VOLTA = 5
NVML_TEMPERATURE_GPU = 0
NVML_FI_DEV_POWER_AVERAGE, NVML_FI_DEV_POWER_INSTANT = 185, 186
NVML_POWER_SCOPE_GPU, NVML_POWER_SCOPE_MODULE, NVML_POWER_SCOPE_MEMORY = 0, 1, 2
MODULE_EXTRA = 1.25  # a module draws this much more than its GPU


class NVMLError(Exception):
    def __init__(self, value=999):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return {3: "Not Supported", 6: "Not Found", 15: "GPU is lost", 9: "Driver Not Loaded"}.get(self.value, "Unknown Error")


class NVMLError_NotSupported(NVMLError):
    def __init__(self, value=3):
        super().__init__(value)


class NVMLError_GpuIsLost(NVMLError):
    def __init__(self, value=15):
        super().__init__(value)


class NVMLError_NotFound(NVMLError):
    def __init__(self, value=6):
        super().__init__(value)


class NVMLError_LibraryNotFound(NVMLError):
    def __init__(self, value=12):
        super().__init__(value)


for _name in ("InvalidArgument", "NoPermission", "DriverNotLoaded", "Uninitialized", "Unknown", "Timeout", "FunctionNotFound"):
    globals()[f"NVMLError_{_name}"] = type(f"NVMLError_{_name}", (NVMLError,), {})


class Gpu:
    def __init__(self, config):
        self.__dict__.update(DEFAULTS | config)
        shape, parameters = self.signal
        self.load = getattr(importlib.import_module("telegraph") if shape == "Telegraph" else signals, shape)(**parameters)

    def check(self):
        if os.path.exists(os.environ.get("FAKE_LOST", "")):  # noqa: PTH110 - any process can make the GPUs fall off the bus, or hang
            raise NVMLError_GpuIsLost()
        while os.path.exists(os.environ.get("FAKE_HANGS", "")):  # noqa: PTH110
            time.sleep(60)

    def clock(self):
        now = time.monotonic() - _t0()
        return now // self.update * self.update


class Slice:
    def __init__(self, uuid, parent):
        self.uuid, self.parent = uuid, parent


_gpus = []
_started = [0.0]


def _t0():
    return float(os.environ.get("FAKE_T0", _started[0]))


def nvmlInit():
    if os.environ.get("FAKE_NVML_FAILS"):
        raise NVMLError(9)
    if not _gpus:
        _started[0] = time.monotonic()
        _gpus[:] = [Gpu(c) for c in json.loads(os.environ.get("FAKE_GPUS", "[{}]"))]


def nvmlInitWithFlags(flags):
    nvmlInit()


def _nvmlGetFunctionPointer(name):
    """Its presence is how zeus recognises the official library."""
    return globals()[name]


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_gpus)


def nvmlDeviceGetHandleByIndex(index):
    if _gpus[index].lost:
        raise NVMLError_GpuIsLost()
    return _gpus[index]


def nvmlDeviceGetHandleByUUID(uuid):
    text = uuid.decode() if isinstance(uuid, bytes) else uuid
    for gpu in _gpus:
        if gpu.uuid == text:
            return gpu
    raise NVMLError_NotFound()


def nvmlDeviceGetIndex(handle):
    return _gpus.index(handle)


def nvmlDeviceGetUUID(handle):
    return handle.uuid


def nvmlDeviceGetName(handle):
    return handle.name


class _Pci:
    def __init__(self, bus):
        self.busId = bus
        self.bus, self.device, self.domain = 1, 0, 0


def nvmlDeviceGetPciInfo(handle):
    return _Pci(handle.pci)


def nvmlDeviceGetMigMode(handle):
    if not handle.mig:
        raise NVMLError_NotSupported()
    return 1, 1


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if index >= len(handle.mig):
        raise NVMLError_NotFound()
    return Slice(handle.mig[index], handle)


def nvmlDeviceIsMigDeviceHandle(handle):
    return isinstance(handle, Slice)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return handle.parent


def nvmlDeviceGetTotalEnergyConsumption(handle):
    handle.check()
    if not handle.energy:
        raise NVMLError_NotSupported()
    energy = 0.0 if handle.frozen else handle.load.energy(handle.clock())
    return int(energy * (MODULE_EXTRA if handle.module else 1) * 1000) + 5_000_000


def _power(handle, window=0.0):
    now = handle.clock()
    if window:
        return (handle.load.energy(now) - handle.load.energy(now - window)) / window
    return handle.load.power(now)


def nvmlDeviceGetPowerUsage(handle):
    handle.check()
    if not handle.average:
        raise NVMLError_NotSupported()
    return int(_power(handle, handle.usage_window) * 1000)


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return int(handle.limit_w * 1000)


nvmlDeviceGetPowerManagementLimit = nvmlDeviceGetPowerManagementDefaultLimit = nvmlDeviceGetEnforcedPowerLimit


def nvmlDeviceGetPowerManagementLimitConstraints(handle):
    return 100_000, int(handle.limit_w * 1000)


def nvmlDeviceGetCudaComputeCapability(handle):
    return 9, 0


def nvmlDeviceGetTemperature(handle, sensor):
    return 40


def nvmlDeviceGetArchitecture(handle):
    return 9


def nvmlDeviceGetPersistenceMode(handle):
    return NVML_FEATURE_ENABLED


def nvmlDeviceGetC2cModeInfoV(handle):
    raise NVMLError_NotSupported()


def nvmlDeviceGetComputeMode(handle):
    return 0


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []


nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses


class c_nvmlMemory_t:
    total, free, used = 80 << 30, 70 << 30, 10 << 30


def nvmlDeviceGetMemoryInfo(handle):
    return c_nvmlMemory_t()


class _Utilization:
    gpu = memory = 50


def nvmlDeviceGetUtilizationRates(handle):
    return _Utilization()


def nvmlSystemGetDriverVersion():
    return "999.99"


class _Value:
    def __init__(self, number):
        self.uiVal = self.ullVal = self.siVal = number


class _Item:
    def __init__(self, field, scope, code, number):
        self.fieldId, self.scopeId, self.nvmlReturn = field, scope, code
        self.value = _Value(number)
        self.timestamp, self.latencyUsec, self.valueType = int(time.time() * 1e6), 0, 1


def nvmlDeviceGetFieldValues(handle, wanted):
    handle.check()
    items = []
    for entry in wanted:
        field, scope = entry if isinstance(entry, tuple) else (entry, 0)
        known = (field == 186 and handle.instant) or (field == 185 and handle.average)
        reachable = (scope == 0 and handle.gpu_scope) or (scope == 1 and handle.module)
        if not (known and reachable):
            items.append(_Item(field, scope, NVML_ERROR_NOT_SUPPORTED, 0))
            continue
        power = _power(handle, 0.0 if field == 186 else 1.0) * (MODULE_EXTRA if scope == 1 else 1)
        items.append(_Item(field, scope, NVML_SUCCESS, int(power * 1000)))
    return items
