"""Tasks of workloads as a worker builds them: alone, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from caraml.suite.model import Knobs
from caraml.workloads import load_workload
from caraml.workloads.base import BuildContext, Task

CPU = torch.device("cpu")


def built(workload: str, params: Mapping[str, Any], micro_batch: int = 4, *, accumulation: int = 1, knobs: Knobs | None = None) -> Task:
    """The task of a workload with these parameters."""
    own = load_workload(workload)
    given = own.params.model_validate(dict(params))
    context = BuildContext(given, CPU, 0, 1, 1, micro_batch, 0, lambda _: nullcontext(), accumulation=accumulation, knobs=knobs or Knobs())
    return own.build(context)
