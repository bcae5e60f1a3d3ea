"""What is kept of every step: all of it, and in few bytes."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest
import torch

from caraml.engine.device import StepTimer
from caraml.engine.steps import Outcomes, StepOutcome, StepRow, StepTable
from caraml.verify import KnownDevice, VirtualClock

ROWS = [StepRow("first", 0.0, 9.0, 0.5), StepRow("warm_up", 9.0, 2.0, 0.0), StepRow("measure", 11.0, 1.0, 0.25)]


def test_a_table_gives_back_the_rows_it_was_given() -> None:
    table = StepTable(ROWS)
    assert list(table) == ROWS and table[1] == ROWS[1] and table[-1] == ROWS[2]
    assert list(pickle.loads(pickle.dumps(table))) == ROWS
    assert list(table.of_phase("measure")) == [ROWS[2]]
    table.put(0, "measure")
    assert [row.start for row in table.of_phase("measure")] == [0.0, 11.0]
    with pytest.raises(IndexError):
        table[3]


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_losses_come_back_in_order_whatever_their_number(count: int) -> None:
    outcomes = Outcomes()
    for index in range(count):
        outcomes.append(StepOutcome(torch.tensor(float(index)), index / 2, torch.tensor(float(-index))))
    assert outcomes.losses.tolist() == [float(index) for index in range(count)]
    assert outcomes.scales.tolist() == [-loss for loss in outcomes.losses.tolist()]
    assert len(outcomes) == count


def test_a_step_without_a_loss_leaves_none() -> None:
    outcomes = Outcomes()
    outcomes.append(StepOutcome(None, 0.125))
    assert outcomes.losses.tolist() == [] and outcomes.scales.tolist() == [] and len(outcomes) == 1


def test_a_timer_that_is_read_keeps_no_old_marks() -> None:
    device = KnownDevice(VirtualClock(0.0), queue=0.0)
    timer = StepTimer(device)
    tracemalloc.start()
    for index in range(20_000):
        device.launch(0.05)
        timer.step_ended()
        if index % 100 == 0:
            timer.finished()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert timer.launched == 20_000 and len(timer.finished()) == len(timer.lost) == 20_000
    assert timer.finished()[-1] == pytest.approx(0.05)
    assert held / 20_000 < 24, "bytes per step: eight for its time, eight for its wait, and what the arrays have in reserve"


def test_a_million_steps_need_few_bytes_each() -> None:
    table, outcomes, count = StepTable(), Outcomes(), 20_000
    loss = torch.tensor(1.0)
    tracemalloc.start()
    for index in range(count):
        table.append(StepRow("measure", index * 0.05, 0.05, 0.0))
        outcomes.append(StepOutcome(loss, 0.0))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / count < 48
