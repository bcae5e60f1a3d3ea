"""How much memory a piece of torch work needs, found without doing it: on tensors that have shapes and types but no content."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, from their making until nobody holds them any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def forget_peak(self) -> None:
        """Begin anew with ``peak``."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(_storage(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and id(_storage(leaf)) not in given:
                self._add(_storage(leaf))
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def kept_and_peaks(build: Callable[[], tuple[Callable[[], torch.Tensor], Any]], dtype: torch.dtype | None) -> tuple[int, int, int]:
    """What forward and backward passes need beside what ``build`` made. Nothing is computed and next to no memory used.

    Args:
        build: makes the modules and inputs; returns the forward pass and whatever must stay alive.
        dtype: type of autocast around the forward pass; ``None`` for none.

    Returns:
        Bytes kept between the passes (result included), the forward pass's peak, and the backward pass's peak, which counts what was
        kept and the gradients of parameters made so far.
    """
    with FakeTensorMode():
        forward, alive = build()
        with LiveBytes() as live:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                result = forward()
            kept, forward_peak = live.now, live.peak
            live.forget_peak()
            gradient = torch.empty_like(result)
            result.backward(gradient)
            backward_peak = live.peak
    del alive
    return kept, forward_peak, backward_peak
