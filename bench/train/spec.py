"""What a program is to train: as it is told on its command line, and as the point that CARAML would measure."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """What to train and by whom."""

    peer: str
    workload: str
    params: dict[str, Any]
    batch: int
    compile: bool | str = False
    """Also a mode of torch's compiler, of CARAML's."""
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
        compile=spec.compile if isinstance(spec.compile, str) else "default" if spec.compile else "off",
        precision=spec.precision,
        knobs=Knobs(**spec.knobs),
    )


def step_of(point: Any, told: dict[str, Any] | None = None) -> Any:
    """The step that a worker would make of a point of one device; ``told`` gets what its record would say of that."""
    from caraml.engine.device import open_device
    from caraml.engine.matmul import replacements
    from caraml.engine.precision import check_fit, compute_in_fp8, set_kernels
    from caraml.engine.ranks import Ranks
    from caraml.engine.step import make_step
    from caraml.workloads import load_workload
    from caraml.workloads.base import BuildContext

    workload, device = load_workload(point.workload), open_device(point.device_class, 0).torch_device
    check_fit(point, device)
    set_kernels(point)
    context = BuildContext(
        params=workload.params.model_validate(point.params),
        device=device,
        rank=0,
        world=1,
        processes_on_node=1,
        micro_batch=point.micro_batch,
        seed=0,
        phase=lambda name: nullcontext(),
        knobs=point.knobs,
        accumulation=point.accumulation,
    )
    task = workload.build(context)
    if point.precision == "fp8":
        compute_in_fp8(task.model)
    step = make_step(task, point, device, told=told)
    for one in replacements(point, Ranks()) if device.type == "cpu" else ():
        step = one.around(step, lambda name: nullcontext())
    return step
