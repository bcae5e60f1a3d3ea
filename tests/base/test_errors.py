"""What an error says."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError, ExitCode, InputError, is_out_of_memory, nearest, unknown_name
from caraml.base.files import DATA_VARIABLE, cache_home, config_home, data_home


def test_an_unknown_name_gets_the_nearest_spelling() -> None:
    error = unknown_name("suite", "quik", ["quick", "llm"])
    assert str(error) == "unknown suite 'quik'; known: llm, quick\n  next step: did you mean 'quick'?"
    assert error.line == "unknown suite 'quik'; known: llm, quick; next step: did you mean 'quick'?"
    assert error.exit_code == ExitCode.WRONG_INPUT == 2


def test_nothing_near_gives_no_guess() -> None:
    assert nearest("zzz", ["quick"]) is None
    assert nearest("juwles", ["jedi", "juwels-booster", "juwels-cluster"]) == "juwels-booster", "by its beginning"
    assert nearest("4m", ["30M", "4M"]) == "4M" and nearest("Lumi", ["leonardo", "lumi-g"]) == "lumi-g", "capitals aside"
    assert "next step" not in str(InputError("no hint"))


class AcceleratorError(RuntimeError):
    """Of this name and parent in torch since 2.8."""


FULL = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error, NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 GiB."),
        AcceleratorError(FULL),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        RuntimeError("rocBLAS error: rocblas_status_memory_error"),
        torch.distributed.DistBackendError(NCCL),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:76] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_full_memory_is_known_in_all_its_words(error: BaseException) -> None:
    assert is_out_of_memory(error)
    behind = ValueError("the compiler failed")
    behind.__cause__ = error
    assert is_out_of_memory(behind)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        ValueError("a batch of 8 runs out of memory cells"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_failures_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_what_this_machine_says_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("folder", [config_home, cache_home, data_home])
def test_a_user_without_a_home_is_told_so(folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As by number alone in a container, with an empty environment."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", DATA_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(EnvironmentUnfitError, match=r"HOME is not set, and user \d+ is in no list of users(?s:.)*export HOME=FOLDER"):
        folder()


@pytest.mark.parametrize("chosen", ["~/x", "~nobody-has-this-name/x"])
def test_a_folder_of_data_below_a_home_that_there_is_not_is_told_so(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setenv(DATA_VARIABLE, chosen)
    assert chosen != "~/x" or data_home() == Path.home() / "x"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    told = f"CARAML_DATA: found '{chosen}', and nobody knows which folder {chosen[:-2]} is"
    with pytest.raises(EnvironmentUnfitError, match=rf"{told}(?s:.)*export CARAML_DATA=/FOLDER"):
        data_home()


def test_a_name_of_two_lines_is_told_in_one() -> None:
    assert "known: 'a\\nb', c" in str(unknown_name("column", "d", ["a\nb", "c"]))
