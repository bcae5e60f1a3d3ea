"""`caraml memory`: a table for a suite's points, the fewest devices for a model, and errors that help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.base.errors import InputError
from caraml.campaign.machine import machine_of
from caraml.cli import app
from caraml.cli.run import (
    memory,  # noqa: F401  -- registers the verb
    plan,  # noqa: F401
)
from caraml.engine.memory import MemoryPlan, Planned
from caraml.system.model import CATALOG


def invoke(*arguments: str, verb: str = "memory") -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [verb, *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.mark.slow
def test_the_fewest_devices_that_fit() -> None:
    text = invoke("gpt", "--system", "jedi", "--set", "params.preset=13B")
    assert "1x4 tp4+sp" in text and "96.0 GiB of NVIDIA GH200" in text and "no" not in text.split()
    assert "1x1" in invoke("gpt", "--system", "jedi", "--set", "params.preset=117M")


@pytest.mark.slow
def test_the_points_of_a_suite_whatever_the_number_of_nodes() -> None:
    text = invoke("llm-large", "--system", "jureca-a100")
    assert "gpt-13B" in text and "gpt-175B" in text and "16x4" in text
    assert " no" in text, "13B on four devices of 40 GB does not fit"
    hint = "do not fit; the smallest placements that do: caraml memory gpt --system jureca-a100 --set precision=fp16"
    assert hint in " ".join(text.split())
    assert "--set params.preset=13B" in " ".join(text.split()), "the point's model, not the one that `caraml memory` takes by itself"


@pytest.mark.slow
def test_a_plan_says_what_its_points_need(tmp_path: Path) -> None:
    options = ("--launcher", "print", "--out", str(tmp_path))
    assert "7 to run, 5 skipped" in invoke("llm-strong", "--system", "jedi", *options, verb="plan")
    uncounted = tmp_path / "mine.toml"
    uncounted.write_text(re.sub(r"(?m)^(nodes|aliases) = .*\n", "", (CATALOG / "jedi.toml").read_text()).replace('"jedi"', '"mine"'))
    strong = invoke("llm-strong", "--system", str(uncounted), *options, verb="plan")
    assert "12 to run" in strong, "how many nodes there are is not known, which is no reason to leave a point out"
    assert "comm" in strong and "fits: peak up to 90 % of the 96.0 GiB" in strong and "do not fit" not in strong
    here = invoke("llm-strong", "--system", "jedi", "--launcher", "local", "--out", str(tmp_path), verb="plan")
    assert "1 to run, 11 skipped" in here and "needs 2 nodes, 1 of jedi in reach" in here
    assert "GiB" not in invoke("vision", "--system", "jedi", *options, verb="plan"), "the memory of this workload cannot be planned"


@pytest.mark.parametrize(
    ("system", "precision"), [("lumi-c", "fp32"), ("deucalion-arm", "fp32"), ("leonardo-dcgp", "bf16"), ("jedi", "bf16")]
)
def test_what_is_counted_is_said_and_what_the_machine_computes_in(monkeypatch: pytest.MonkeyPatch, system: str, precision: str) -> None:
    monkeypatch.setattr("caraml.engine.memory.smallest_that_fit", lambda point, *_: [Planned(point, MemoryPlan(*[2**30] * 7))])
    assert f"GiB of each device, {precision} " in invoke("gpt", "--system", system)
    assert "GiB of each device, fp16 " in invoke("gpt", "--system", system, "--set", "precision=fp16")


def test_only_the_benchmarks_that_are_chosen_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those must fit what is set by hand, as in `caraml plan`: the 175B of this suite is given by its devices."""
    monkeypatch.setattr("caraml.engine.memory.planned_of", lambda points: [Planned(point, MemoryPlan(*[2**30] * 7)) for point in points])
    text = invoke("llm-weak", "--system", "jedi", "--only", "857m", "--set", "nodes=[1,2]")
    assert "gpt-857M" in text and "1x4" in text and "2x4" in text and "175B" not in text
    assert "gpt-175B" in invoke("llm-weak", "--system", "jedi")
    with pytest.raises(InputError, match="--only 858M: no benchmark of suite 'llm-weak'"):
        invoke("llm-weak", "--system", "jedi", "--only", "858M")
    with pytest.raises(InputError, match="--only 800M: gpt is a workload; expected a suite"):
        invoke("gpt", "--system", "jedi", "--only", "800M")


@pytest.mark.parametrize(("options", "name"), [((), "slurm"), (("--launcher", "print"), "print"), (("--launcher", "local"), "local")])
def test_points_are_those_of_the_launcher_that_would_run_them(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], name: str) -> None:
    """Which packages they find depends on it."""
    asked = list[str]()
    monkeypatch.setattr("caraml.engine.memory.planned_of", lambda points: [Planned(point, MemoryPlan(*[2**30] * 7)) for point in points])
    monkeypatch.setattr("caraml.campaign.machine.machine_of", lambda system, name: asked.append(name) or machine_of(system, name))
    invoke("llm", "--system", "jedi", "--only", "117M", *options)
    assert asked == [name]


@pytest.mark.parametrize(("system", "reason"), [("meluxina-fpga", "torch drives no FPGA"), ("bow-pod16", "torch drives no IPU")])
def test_nothing_is_planned_where_plan_refuses_all_training(system: str, reason: str) -> None:
    for name in ("gpt", "llm"):
        with pytest.raises(InputError, match=f"nothing to plan on {system}: {reason}"):
            invoke(name, "--system", system, "--set", "params.preset=800M")


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="unknown suite 'gtp'") as unknown:
        invoke("gtp", "--system", "jedi")
    assert unknown.value.hint == "did you mean 'gpt'?"
    with pytest.raises(InputError, match="planned for workload 'gpt'"):
        invoke("image_classification", "--system", "jedi")
    with pytest.raises(InputError, match="no point of workload 'gpt'"):
        invoke("vision", "--system", "jedi")
    with pytest.raises(InputError, match="suite 'maelstrom' --only AP1 has no point of workload 'gpt'"):
        invoke("maelstrom", "--system", "jedi", "--only", "AP1")
