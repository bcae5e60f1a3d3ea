"""Tails, quantiles and the correction for many tests, against printed tables."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraml.base.stats import holm, t_critical, t_tail


@pytest.mark.parametrize(
    ("t", "dof", "p"),
    [
        (12.7062, 1, 0.05),
        (4.3027, 2, 0.05),
        (2.7764, 4, 0.05),
        (2.2281, 10, 0.05),
        (63.6567, 1, 0.01),
        (4.0321, 5, 0.01),
        (1.95996, math.inf, 0.05),
        (0.0, 3, 1.0),
    ],
)
def test_student_s_t_is_that_of_the_tables(t: float, dof: float, p: float) -> None:
    assert t_tail(t, dof) == pytest.approx(p, rel=1e-4)
    assert t_tail(-t, dof) == t_tail(t, dof)
    if t:
        assert t_critical(1 - p / 2, dof) == pytest.approx(t, rel=1e-4)


def test_one_and_two_degrees_have_closed_forms() -> None:
    for t in (0.1, 1.0, 5.0, 1e4):
        assert t_tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-6)
        assert t_tail(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6, abs=1e-12)


@given(st.floats(0.55, 1 - 1e-9), st.floats(1, 200))
def test_the_quantile_is_the_inverse_of_the_tail(probability: float, dof: float) -> None:
    assert t_tail(t_critical(probability, dof), dof) == pytest.approx(2 * (1 - probability), rel=1e-4)


def test_holm_s_own_arithmetic() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.7, 0.9]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=30))
def test_holm_lies_between_no_correction_and_bonferroni_s(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= one <= min(len(p_values) * p, 1.0) + 1e-12 for p, one in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert all(adjusted[a] <= adjusted[b] for a, b in pairwise(order))
