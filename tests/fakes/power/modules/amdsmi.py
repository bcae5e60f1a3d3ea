"""A stand-in for AMD's library. ``FAKE_AMD`` is a JSON list with one object per device (see ``DEFAULTS``)."""
# ruff: noqa: N818 - the names are the library's

import json
import os
import time

print("a library that talks on import")

DEFAULTS = {
    "bdf": "0000:01:00.0",
    "uuid": None,
    "name": "AMD Instinct MI300X",
    "watts": 300,
    "power": "current_socket_power",  # which key has the number; the others say N/A
    "energy": True,
    "frozen": False,
    "hip_id": None,
    "resolution": 15.3,
}


class AmdSmiException(Exception):
    pass


class Device:
    def __init__(self, config):
        self.__dict__.update(DEFAULTS | config)


_devices = []
_start = [0.0]


def amdsmi_init():
    _start[0] = time.monotonic()
    _devices[:] = [Device(c) for c in json.loads(os.environ.get("FAKE_AMD", "[{}]"))]


def amdsmi_shut_down():
    pass


def amdsmi_get_processor_handles():
    return _devices


def amdsmi_get_gpu_device_bdf(handle):
    return handle.bdf


def amdsmi_get_gpu_device_uuid(handle):
    return handle.uuid or f"uuid-{handle.bdf}"


def amdsmi_get_gpu_asic_info(handle):
    return {"market_name": handle.name}


def amdsmi_get_gpu_enumeration_info(handle):
    if handle.hip_id is None:
        raise AmdSmiException("not supported")
    return {"hip_id": handle.hip_id, "hip_uuid": f"GPU-{handle.hip_id:x}", "drm_card": 0, "drm_render": 128, "hsa_id": 1}


def amdsmi_get_energy_count(handle):
    if not handle.energy:
        return {"energy_accumulator": 0, "counter_resolution": 0.0, "timestamp": 0}
    now = 1.0 if handle.frozen else 1.0 + time.monotonic() - _start[0]
    return {
        "energy_accumulator": int(handle.watts * now * 1e6 / handle.resolution),
        "counter_resolution": handle.resolution,
        "timestamp": time.monotonic_ns(),
    }


def amdsmi_get_power_info(handle):
    answer = dict.fromkeys(("current_socket_power", "average_socket_power", "socket_power", "gfx_voltage"), "N/A")
    if handle.watts is not None:
        answer[handle.power] = handle.watts
    return answer | {"power_limit": 750_000_000}
