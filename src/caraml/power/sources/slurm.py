"""Slurm's energy accounting: node energy of the running step.

``sstat`` reports ``ConsumedEnergyRaw`` in J, as gathered by the cluster's ``acct_gather_energy`` plugin, by default every 30 s. The plugin
measures whole nodes, so the number is the job's only if it had its nodes to itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

from caraml.power.model import Channel, Reading
from caraml.power.source import SourceUnavailable

TIMEOUT_S = 10.0
PERIOD_S = 30.0
UNKNOWN = ("", "0", "18446744073709551614")
"""Texts by which Slurm says that it has no energy: empty, zero and its NO_VAL64."""


class SlurmReadError(Exception):
    """Slurm answered without an energy."""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 -- Slurm's programs, for a job's number; no shell
    if done.returncode != 0:
        raise SlurmReadError(done.stderr.strip() or f"{command[0]} ended with code {done.returncode}")
    return done.stdout


class SlurmSource:
    """Counter of the running step, over all its nodes, refreshed as often as the cluster gathers it."""

    name = "slurm"
    min_interval_s = 10.0

    def __init__(self) -> None:
        self._step = ""

    def open(self) -> None:
        """Ask once for the step that this process belongs to."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise SourceUnavailable("not inside a Slurm job: SLURM_JOB_ID is not set")
        if shutil.which("sstat") is None:
            raise SourceUnavailable("the command sstat is missing on this node")
        step = os.environ.get("SLURM_STEP_ID", "batch")
        self._step = f"{job}.{step}"
        try:
            self._energy()
        except (SlurmReadError, OSError, subprocess.SubprocessError) as error:
            raise SourceUnavailable(f"sstat gives no energy for step {self._step}: {error}") from error

    def _energy(self) -> float:
        text = _run(["sstat", "-n", "-P", "-j", self._step, "-o", "ConsumedEnergyRaw"]).strip().splitlines()
        if not text or text[0].strip() in UNKNOWN:
            raise SlurmReadError("the cluster does not gather energy (AcctGatherEnergyType in slurm.conf)")
        return float(text[0])

    def channels(self) -> list[Channel]:
        """The step."""
        return [
            Channel(
                id=f"slurm:{self._step}",
                source=self.name,
                kind="energy",
                boundary="node_dc",
                label=f"nodes of step {self._step}",
                domain=f"slurm:{self._step}",
                hardware="node",
                resolution=1.0,
                update_period_s=PERIOD_S,
                # One number for all nodes of the step: no plausible power is too high for it.
                max_power_w=1e8,
                flags=("shared_device",),
                spans_nodes=True,
            )
        ]

    def read(self) -> list[Reading]:
        """Ask once."""
        before = time.monotonic()
        try:
            value, error = self._energy(), None
        except (SlurmReadError, OSError, ValueError, subprocess.SubprocessError) as cause:
            value, error = None, f"{type(cause).__name__}: {cause}"
        return [Reading(f"slurm:{self._step}", before, time.monotonic(), value, error)]

    def close(self) -> None:
        """Nothing to release."""


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> SlurmSource:
    """``slurm``."""
    return SlurmSource()
