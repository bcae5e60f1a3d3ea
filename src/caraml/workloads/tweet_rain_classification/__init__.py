"""Does a tweet tell of rain? MAELSTROM's second application: DeBERTa-v3-small on short texts, from random weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams


class Params(WeatherParams):
    """Parameters of the `tweet_rain_classification` workload (`ap2`)."""

    preset: Literal["small", "tiny"] = Field("small", description="DeBERTa-v3-small, or a tiny network of its kind")
    weights: str | None = Field(
        None,
        description="folder of a trained DeBERTa-v3 of the preset's size, with tokenizer.json; random weights and hashed words if absent",
    )
    tokens: int = Field(64, ge=4, le=512, description="tokens per text; the report does not say how many")
    learning_rate: float = Field(3e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.01, ge=0, description="of the optimizer")


WORKLOAD = Workload(
    title="tweet rain classification, DeBERTa-v3-small",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py", "transformers"),
    check=later(f"{__name__}.training", "check"),
)
