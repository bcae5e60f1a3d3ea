"""The list of faults fits the source, and one of them is planted for real; ``make mutation`` plants all."""

from __future__ import annotations

import pytest

from tests.mutation.faults import FAULTS, Fault
from tests.mutation.run import ROOT, caught, fits, run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_fits_the_source_and_names_real_tests(fault: Fault) -> None:
    assert fits(fault), f"{fault.file} must hold exactly once: {fault.old}"
    assert fault.new != fault.old
    for test in fault.tests:
        path, _, name = test.partition("::")
        name, _, parameters = name.partition("[")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}" in text and parameters.removesuffix("]") in text


def test_there_are_many_faults_of_different_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.processes
def test_a_planted_fault_is_noticed() -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "ends of the rate's interval swapped")
    assert caught(fault)


@pytest.mark.processes
def test_a_harmless_edit_is_a_survivor_and_a_stranger_is_told() -> None:
    harmless = Fault(
        "harmless", "metrics/window.py", '"""All metrics of one measured window."""', '"""All."""', ("tests/metrics/test_window.py",)
    )
    stranger = Fault("stranger", "metrics/window.py", "text that is not there", "", ())
    said: list[str] = []
    assert run([harmless, stranger], said.append) == 1
    assert said[0].startswith("does not fit") and said[1].startswith("SURVIVED")
    assert "".join(said[2:]) == "0 of 1 faults caught; 1 do not fit; 0 of 1 sets of tests fail without a fault\n"


@pytest.mark.processes
def test_tests_that_fail_anyway_prove_nothing() -> None:
    failing = Fault("failing", "metrics/window.py", '"""All metrics of one measured window."""', "", ("tests/mutation/run.py::main",))
    with pytest.raises(RuntimeError, match="failing: "):
        caught(failing)
