"""The engine on the emulated accelerator, by a clock that moves only when somebody waits."""

from __future__ import annotations

import pytest

from tests.accelerator.conftest import Inside


@pytest.mark.parametrize(
    "name",
    [
        "a_window_is_exactly_its_steps",
        "events_are_asked_and_not_waited_for",
        "the_clock_of_its_events_is_held_against_the_host_s",
        "events_without_times_are_replaced_by_waiting",
        "copies_ahead_overlap_and_are_waited_for",
        "micro_batches_together_are_the_whole_batch",
        "each_process_has_its_device",
        "more_processes_than_devices_are_refused",
        "another_device_than_the_one_asked_for_is_refused",
        "a_probe_leaves_the_device_as_it_was",
        "a_full_device_is_called_full",
        "a_precision_that_the_device_lacks_is_refused",
        "the_bench_for_accelerators_finds_this_one_right",
        "a_loop_of_one_s_own_is_measured_on_the_device",
    ],
)
def test_the_engine(inside: Inside, name: str) -> None:
    inside(name)
