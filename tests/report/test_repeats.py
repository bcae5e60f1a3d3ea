"""Figures of repeats: which runs their numbers are of, which kind of mean they are, and what is said where there is none."""

from __future__ import annotations

import math

import numpy as np
from record_factory import make_record

from caraml.analysis.table import Steps
from caraml.report.times import LOSS, over_steps


def test_a_loss_that_is_finite_at_the_first_step_only_is_drawn() -> None:
    record = make_record()
    for later in (math.nan, math.inf):
        losses = np.array([2.5, *[later] * 9])
        steps = Steps(np.arange(10), ["first"] + ["measure"] * 9, np.full(10, 0), np.ones(10), losses)
        (figure,) = over_steps(LOSS, [record], {record.key: steps})
        assert [row[1:] for row in figure.rows] == [["0", "2.50"]] and figure.drawings[0].width
