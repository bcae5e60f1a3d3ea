"""Settings that change how fast a step is and not what it computes: each has the value that measured best, and each can be changed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from caraml.system.model import DeviceClass

Attention = Literal["auto", "flash", "cudnn", "efficient", "math"]


class Knobs(BaseModel):
    """Settings of a point besides `compile`. `docs/performance.md` has what each is worth."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    channels_last: bool = Field(True, description="memory order of images and convolutions: channels innermost")
    fused_optimizer: bool = Field(True, description="one kernel for the whole update; else what torch chooses by itself")
    keep_freed_memory: bool = Field(True, description="CPUs: the C library keeps freed blocks instead of returning them to the kernel")
    attention: Attention = Field("auto", description="the only kernel that torch may take for attention; `auto`: torch's choice")

    @classmethod
    def of(cls, values: dict[str, Any], device_class: DeviceClass) -> Knobs:
        """From a point's swept values; what has no effect takes its default, so that the same work has the same key."""
        given = {name: values[name] for name in cls.model_fields if values.get(name) is not None}
        if device_class != "cpu":
            given.pop("keep_freed_memory", None)
        return cls(**given)

    @property
    def changed(self) -> dict[str, Any]:
        """Those that are not as they would be by themselves."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def label(self) -> str:
        """The changed ones in words: ``channels_last=false``."""
        return " ".join(f"{name}={str(value).lower()}" for name, value in self.changed.items())
