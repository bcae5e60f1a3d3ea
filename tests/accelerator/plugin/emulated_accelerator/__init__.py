"""The Python side of the accelerator for tests: ``torch.emulated``, loaded by torch itself as any plug-in of a vendor.

``EMULATED_LIBRARY`` names the built library; ``EMULATED_<SETTING>`` sets what ``device.h`` has under ``Settings``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

NAME = "emulated"
GROUP = "emccl"
_library = ctypes.CDLL(os.environ["EMULATED_LIBRARY"])

Stream, Event = torch.Stream, torch.Event
current_stream, set_stream, synchronize = (getattr(torch.accelerator, f) for f in ("current_stream", "set_stream", "synchronize"))
current_device, set_device = torch.accelerator.current_device_index, torch.accelerator.set_device_index
empty_cache, memory_allocated = torch.accelerator.empty_cache, torch.accelerator.memory_allocated


def register() -> None:
    """What torch calls on import (entry point group ``torch.backends``)."""
    _library.emulated_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    _library.emulated_seed.argtypes = [ctypes.c_uint64]
    _library.emulated_now.restype = ctypes.c_double
    _library.emulated_kernels.restype = _library.emulated_waits.restype = ctypes.c_uint64
    _library.emulated_open()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    if torch.distributed.is_available():
        from emulated_accelerator.group import Staged

        torch.distributed.Backend.register_backend(GROUP, Staged, devices=[NAME])


def configure(**settings: float) -> None:
    """Change settings of the device, or with ``now`` its manual clock."""
    for name, value in settings.items():
        if not _library.emulated_set(name.encode(), value):
            raise ValueError(f"no setting {name!r}")


def now() -> float:
    """The clock that streams live by [s]."""
    return float(_library.emulated_now())


def launched() -> int:
    """Kernels since the start, of all streams."""
    return int(_library.emulated_kernels())


def waited() -> int:
    """How often the host has waited for a stream or an event."""
    return int(_library.emulated_waits())


@contextmanager
def stream(wanted: torch.Stream | None) -> Iterator[None]:
    """Launch on a stream."""
    if wanted is None:
        yield
    else:
        with wanted:
            yield


device = torch.accelerator.device_index


def device_count() -> int:
    return int(_library.emulated_count())


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """It always is."""


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    _library.emulated_seed(seed & (2**64 - 1))


def manual_seed(seed: int) -> None:
    manual_seed_all(seed)


def _index(device: Any) -> int:
    given = torch.device(device) if isinstance(device, str) else device
    index = given.index if isinstance(given, torch.device) else given
    return current_device() if index is None else int(index)


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return torch.ops.emulated.random_state(_index(device))


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    torch.ops.emulated.set_random_state(_index(device), state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_device_properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    return SimpleNamespace(name="Emulated Accelerator", total_memory=torch.accelerator.get_memory_info(index)[1])


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name
