"""What a device could do at best, by its data sheet: dense FLOP/s by dtype, and bytes/s of its memory.

Dense means: without the 2:4 structured sparsity that doubles the figures on the front page of most data sheets, and that no ordinary
training step can use. A device that is not in ``catalog/peaks.toml`` under exactly its own name has no peak here: a neighbouring
device's figure would make a wrong MFU look right.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from caraml.base.errors import nearest
from caraml.base.toml import FrozenModel, read_toml
from caraml.system.model import DType, Figure, System

CATALOG = Path(__file__).parent / "catalog"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PeakEntry(FrozenModel):
    """One device of ``peaks.toml``."""

    model: str = Field(description="what people call it")
    names: tuple[str, ...] = Field((), description="what NVML, torch or the kernel report")
    per: Literal["gpu", "gcd", "package", "ipu"] = Field("gpu", description="what the figures are for")
    source: str = Field(min_length=1)
    tdp_w: Positive | None = Field(None, description="maximum board power [W]")
    memory_bandwidth_bytes_per_s: Positive
    flops_per_s: dict[DType, Positive] = Field(description="dense FLOP/s; absent: the device has no hardware for that dtype")
    notes: str | None = None


class _Peaks(FrozenModel):
    device: tuple[PeakEntry, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> _Peaks:
        names = [name for entry in self.device for name in {_normal(entry.model), *map(_normal, entry.names)}]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"every name once; twice: {', '.join(twice)}")
        return self


def entry(model: str) -> PeakEntry | str:
    """The data sheet of the device that reports the name ``model``, or a sentence that says why there is none."""
    known = _by_name()
    found = known.get(_normal(model))
    if found:
        return found
    if " MIG " in model:
        return f"{model!r} is a slice of a GPU; data sheets give peaks for whole GPUs only"
    guess = nearest(_normal(model), known)
    closest = f" (the closest known name is {known[guess].model!r}, another device)" if guess else ""
    return f"no data sheet for {model!r} in the catalogue{closest}"


def entries() -> tuple[PeakEntry, ...]:
    """Every device with a data sheet."""
    return read_toml(CATALOG / "peaks.toml").validate(_Peaks).device


def figures(found: PeakEntry) -> dict[DType, Figure]:
    """Every peak of a data sheet [FLOP/s]."""
    return {dtype: _figure(found, value, "FLOP/s") for dtype, value in found.flops_per_s.items()}


def with_sheet(system: System) -> System:
    """The system with the figures of its device's data sheet where it has none of its own, or why there are none."""
    sheet, missing = entry(system.devices[0].model), dict(system.missing)
    peak, memory = system.peak, system.memory_bandwidth
    if isinstance(sheet, str):
        absent = [key for key, value in (("peak", peak), ("memory_bandwidth", memory)) if value is None]
        missing |= {key: sheet for key in absent if key not in missing}
    else:
        peak, memory = peak or figures(sheet), memory or _figure(sheet, sheet.memory_bandwidth_bytes_per_s, "B/s")
    return system.model_copy(update={"peak": peak, "memory_bandwidth": memory, "missing": missing})


def _figure(found: PeakEntry, value: float, unit: str) -> Figure:
    per = found.per if found.per == "package" else found.per.upper()
    return Figure(value=value, unit=unit, source=f"{found.source} (dense, per {per})")


@cache
def _by_name() -> dict[str, PeakEntry]:
    return {_normal(name): found for found in entries() for name in (found.model, *found.names)}


def _normal(name: str) -> str:
    """Names differ between driver versions in the vendor's word and in punctuation, and in nothing else that may be ignored."""
    words = re.sub(r"[\s_-]+", " ", name.casefold()).split()
    return " ".join(word for word in words if word not in ("nvidia", "amd"))
