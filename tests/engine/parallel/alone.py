"""Trains a tiny GPT as one rank of many does, alone: what others would send is whatever lies in the memory.

``python -m tests.engine.parallel.alone JOBS.json``

A job is one of :mod:`tests.engine.parallel.training`, with ``"world"`` and ``"rank"``; beside JOBS.json it leaves ``peaks.json``, the most
bytes of a step by the job's name. No thread of gloo holds a buffer for longer here, so that numbers are the same each time.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from caraml.engine import ranks as several
from caraml.engine import step
from caraml.engine.parallel import divide as division
from caraml.engine.precision import set_attention
from caraml.engine.ranks import Ranks
from caraml.workloads.gpt import tokens
from tests.engine.parallel.training import measured_peak, train


class Alone(Ranks):
    """A rank that hears nothing from the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def copies(*arguments: Any) -> torch.nn.Module:
    """DDP whose exchange ends at once: the group's own has no result that it could read."""
    model = several.copies(*arguments)
    model.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))
    return model


def peak_of(job: dict[str, Any]) -> int:
    world, rank = job["world"], job["rank"]
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    set_attention(job.get("point", {}).get("knobs", {}).get("attention", "auto"))
    with measured_peak() as peak:
        train({"steps": 2, **job}, Alone(rank, world))
    return peak()


def main(path: Path) -> None:
    tokens.synthetic_tokens = functools.partial(tokens.synthetic_tokens, samples=64)
    for module in (division, step):
        module.copies = copies  # type: ignore[attr-defined]
    for name in ("_warmup_forward_vote", "_warmup_backward_result"):  # stages ask each other whether they all know their shapes
        setattr(PipelineStage, name, lambda *_, **__: torch.ones(1, dtype=torch.int32))
    peaks = {}
    for job in json.loads(path.read_text()):
        reading, writing = os.pipe()
        if os.fork() == 0:  # torch keeps groups by their names, which a second world would have again
            try:
                os.write(writing, str(peak_of(job)).encode())
            except Exception:  # noqa: BLE001 -- the other process reads nothing then, and says so
                traceback.print_exc()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            peaks[job["name"]] = int(answer.read())
        os.wait()
    (path.parent / "peaks.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
