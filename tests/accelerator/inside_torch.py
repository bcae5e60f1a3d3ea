"""What the emulated accelerator does: run in processes of their own by ``test_accelerator.py``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

DEVICE = "emulated"
emulated = torch.get_device_module(DEVICE)
"""The plug-in's module."""


def manual(kernel_seconds: float = 1.0) -> None:
    """Every kernel takes so long, by a clock that only waiting moves."""
    emulated.configure(manual=1, kernel_seconds=kernel_seconds, queue=0)


def training_gives_the_cpu_s_numbers() -> None:
    """Convolution, normalisation, attention, a fused optimizer, in fp32 and under autocast."""

    def losses(device: str, half: bool) -> list[float]:
        torch.manual_seed(0)
        image = torch.randn(4, 3, 8, 8).to(device)
        convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).to(device)
        projection, head = torch.nn.Linear(8, 24).to(device), torch.nn.Linear(8, 5).to(device)
        optimizer = torch.optim.AdamW([*convolution.parameters(), *projection.parameters(), *head.parameters()], lr=1e-2, fused=True)
        found = []
        for _ in range(4):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=half):
                q, k, v = projection(convolution(image).flatten(2).transpose(1, 2)).chunk(3, -1)
                hidden = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0].mean(1)
                loss = F.cross_entropy(head(hidden).float(), torch.arange(4, device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    for half, near in ((False, 1e-5), (True, 2e-2)):
        assert losses(DEVICE, half) == pytest.approx(losses("cpu", half), rel=near)
    with torch.autocast(DEVICE, torch.bfloat16):
        x = torch.ones(4, 4, device=DEVICE)
        assert (x @ x).dtype == torch.bfloat16 and (x @ x).exp().dtype == torch.float32


def random_numbers_are_the_device_s_own() -> None:
    torch.manual_seed(3)
    first, state = torch.randn(5, device=DEVICE), emulated.get_rng_state()
    second = torch.rand(5, device=DEVICE)
    emulated.set_rng_state(state)
    assert torch.equal(second, torch.rand(5, device=DEVICE))
    mine, host = torch.Generator(DEVICE).manual_seed(3), torch.Generator().manual_seed(3)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=mine), first)
    assert torch.equal(first.cpu(), torch.randn(5, generator=host))


def kernels_take_time_behind_the_host_s_back() -> None:
    manual(0.5)
    x = torch.ones(8, device=DEVICE)
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    begin = emulated.now()
    start.record()
    for _ in range(4):
        x = x + 1
    end.record()
    assert emulated.now() == begin and not end.query()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    assert x.sum().item() == 8 * 5.0
    assert end.query() and start.elapsed_time(end) == pytest.approx(2000.0)
    assert emulated.now() >= begin + 2.0 and emulated.waited() > 0


def a_full_queue_holds_the_host_up() -> None:
    emulated.configure(manual=1, kernel_seconds=1.0, queue=3)
    x, begin = torch.zeros(1, device=DEVICE), emulated.now()
    for _ in range(10):
        x.add_(1)
    assert emulated.now() - begin == pytest.approx(10 + 1 - 3)


def memory_of_another_stream_raises_unless_it_was_waited_for() -> None:
    side = torch.Stream(DEVICE)
    with side:
        x = torch.ones(100, device=DEVICE) * 2
    with pytest.raises(RuntimeError, match="race: aten::add on stream"):
        _ = x + 1
    torch.accelerator.current_stream().wait_stream(side)
    y = (x + 1).sum()
    with side, pytest.raises(RuntimeError, match="reads"):
        x.zero_()
    assert y.item() == 300
    with side:
        x.zero_()  # the host has waited, and what it launches from now on comes after


def memory_is_not_given_out_while_another_stream_uses_it() -> None:
    manual()
    side = torch.Stream(DEVICE)

    def used_on_the_side(lent: bool) -> int:
        x = torch.ones(1000, device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            _ = x.sum()
        if lent:
            x.record_stream(side)
        return x.data_ptr()

    first = used_on_the_side(lent=True)
    assert torch.zeros(1000, device=DEVICE).data_ptr() != first, "still in use"
    torch.accelerator.synchronize()
    del first
    used_on_the_side(lent=False)
    with pytest.raises(RuntimeError, match="race: memory given out again"):
        for _ in range(4):
            torch.zeros(1000, device=DEVICE)


def memory_is_counted_and_limited() -> None:
    accelerator = torch.accelerator
    emulated.configure(memory=1e6)
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    x = torch.zeros(100_000, device=DEVICE)
    assert accelerator.memory_allocated() - before == 400_384, "in blocks of 512 bytes"
    del x
    assert accelerator.memory_allocated() == before and accelerator.max_memory_allocated() == before + 400_384
    assert accelerator.memory_reserved() >= 400_384
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == before and accelerator.get_memory_info() == (1_000_000 - before, 1_000_000)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(300_000, device=DEVICE)
    x = torch.arange(10, device=DEVICE)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(80)
    assert x.numel() == 10


def pinned_copies_do_not_wait() -> None:
    manual()
    for pinned in (False, True):
        host = torch.ones(10).pin_memory() if pinned else torch.ones(10)
        waits = emulated.waited()
        host.to(DEVICE, non_blocking=True)
        assert host.is_pinned() == pinned and emulated.waited() - waits == (not pinned)


def devices_are_several() -> None:
    assert torch.accelerator.device_count() == 3
    x = torch.ones(4, device="emulated:2")
    y = x.to("emulated:1") + 1
    assert (x.device.index, y.device.index, y.sum().item()) == (2, 1, 8.0)
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device=DEVICE).device.index == 1
    with pytest.raises(RuntimeError, match="no device 7, there are 3"):
        torch.zeros(1, device="emulated:7")


def a_lost_device_says_so_ever_after() -> None:
    x = torch.ones(4, device=DEVICE)
    emulated.configure(lost_after=emulated.launched() + 2)
    with pytest.raises(torch.AcceleratorError, match="device lost"):
        for _ in range(5):
            x = x + 1
    with pytest.raises(torch.AcceleratorError, match="device lost"):
        torch.accelerator.synchronize()
