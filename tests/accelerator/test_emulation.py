"""The emulated accelerator itself: that it is as a device is, and that it tells what would go wrong on one."""

from __future__ import annotations

import pytest

from tests.accelerator.conftest import Inside


@pytest.mark.parametrize(
    "name",
    [
        "training_gives_the_cpu_s_numbers",
        "random_numbers_are_the_device_s_own",
        "kernels_take_time_behind_the_host_s_back",
        "a_full_queue_holds_the_host_up",
        "memory_of_another_stream_raises_unless_it_was_waited_for",
        "memory_is_not_given_out_while_another_stream_uses_it",
        "memory_is_counted_and_limited",
        "pinned_copies_do_not_wait",
        "a_lost_device_says_so_ever_after",
    ],
)
def test_the_emulation(inside: Inside, name: str) -> None:
    inside(name)


def test_several_devices(inside: Inside) -> None:
    inside("devices_are_several", devices=3)
