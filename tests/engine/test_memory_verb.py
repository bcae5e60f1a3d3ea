"""`caraml memory`: a table for a suite's points, the fewest devices for a model, and errors that help."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from caraml.cli.app import app
from caraml.cli.memory import memory  # noqa: F401  -- registers the verb
from caraml.errors import InputError


def invoke(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["memory", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_the_fewest_devices_that_fit() -> None:
    text = invoke("gpt", "--system", "jedi", "--set", "params.preset=13B")
    assert "1 x 4" in text and "tp4+sp" in text and "89.4 GiB of NVIDIA GH200" in text and "no" not in text.split("GiB of each")[0].split()
    assert "1 x 1" in invoke("gpt", "--system", "jedi", "--set", "params.preset=117M")


def test_the_points_of_a_suite_whatever_the_number_of_nodes() -> None:
    text = invoke("llm-large", "--system", "jureca-a100")
    assert "gpt-13B" in text and "gpt-175B" in text and "16 x 4" in text
    assert " no" in text, "13B on four devices of 40 GB does not fit"


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="planned for workload 'gpt'"):
        invoke("image_classification", "--system", "jedi")
    with pytest.raises(InputError, match="no point of workload 'gpt'"):
        invoke("vision", "--system", "jedi")
