"""What a program is to train: as it is told on its command line, and as the point that CARAML would measure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """What to train and by whom."""

    peer: str
    workload: str
    params: dict[str, Any]
    batch: int
    compile: bool = False
    channels_last: bool = False
    precision: str = "fp32"
    device: str = "cpu"
    inference: bool = False
    """Forward passes only."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """CARAML's own, where they are not as they would be by themselves."""
    path: str | None = None
    """The peer's checkout, or the file that holds its loop."""
    scratch: str = "."
    environment: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The command line's argument."""
        return json.dumps(asdict(self))


def point_of(spec: Spec) -> Any:
    """The point that CARAML would measure."""
    from caraml.suite.model import Knobs, Point

    return Point(
        suite="bench",
        benchmark=spec.workload,
        workload=spec.workload,
        params=spec.params,
        system="local",
        device=spec.device,
        device_class="cpu" if spec.device == "cpu" else "gpu",
        software="bench",
        global_batch=spec.batch,
        micro_batch=spec.batch,
        mode="inference" if spec.inference else "train",
        compile="default" if spec.compile else "off",
        precision=spec.precision,
        knobs=Knobs(**spec.knobs),
    )
