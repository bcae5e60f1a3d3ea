"""Errors that travel through products and quotients."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraml.analysis.estimate import Estimate

estimates = st.builds(Estimate, st.floats(1e-6, 1e6), st.floats(1e-4, 0.3), st.one_of(st.just(math.inf), st.floats(1, 50)))


@given(estimates, estimates)
def test_a_quotient_undoes_another_but_not_its_errors(a: Estimate, b: Estimate) -> None:
    back = a.over(b).over(b.inverse())
    assert back.value == pytest.approx(a.value)
    assert back.sd is not None and a.sd is not None and back.sd >= a.sd


@settings(deadline=None)  # the first example imports scipy
@given(estimates)
def test_the_interval_holds_the_value_and_turns_over(one: Estimate) -> None:
    assert one.low is not None and one.high is not None and one.low <= one.value <= one.high
    turned = one.inverse()
    assert turned.low == pytest.approx(1 / one.high) and turned.high == pytest.approx(1 / one.low)


def test_known_arithmetic() -> None:
    quotient = Estimate(10, 0.03, 4).over(Estimate(2, 0.04, 9))
    assert (quotient.value, quotient.sd, quotient.dof) == (5, pytest.approx(0.05), 4)
    assert quotient.high == pytest.approx(5 * math.exp(2.7764 * 0.05), rel=1e-4)
    assert Estimate(1, 0.0).low == 1.0 and Estimate(3, None).over(Estimate(2, 0.1)).low is None
