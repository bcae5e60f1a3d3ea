"""What is trained: one file per workload. A new workload is a file here and a line in :data:`WORKLOADS`."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata

from pydantic import BaseModel

from caraml.errors import EnvironmentUnfitError, unknown_name
from caraml.suite.model import WORKLOAD_ALIASES
from caraml.workloads.base import Workload

WORKLOADS: dict[str, str] = {
    "gpt": "decoder-only GPT, next-token prediction on text (CARAML's LLM training)",
    "image_classification": "any timm network, ImageNet-like images (CARAML's ResNet-50)",
    "question_answering": "BERT with a span head on SQuAD (PEARC '22)",
    "image_compression": "residual autoencoder that reconstructs 28 x 28 digits (PEARC '22)",
    "temperature_postprocessing": "ap1: U-Net for quantiles of the temperature forecast's error",
    "tweet_rain_classification": "ap2: DeBERTa-v3-small, does a tweet tell of rain",
    "radiation_emulation": "ap3: 1-D CNN for radiative fluxes of columns, physics head",
    "ensemble_postprocessing": "ap4: U-Net for mean and spread of a corrected ensemble",
    "downscaling_gan": "ap5: Wasserstein GAN that adds detail to temperature fields",
    "regime_clustering": "ap6: DeepCluster v2, ResNet-50 on 25 fields, spherical k-means",
    "atmorep": "transformer over temperature and wind that fills in masked tokens",
    "command": "any program: argument templates, its own metrics, energy over the run or between two marks",
}

_PROOF = {"known": "caraml.verify.workload"}
"""Work of known truth, for `caraml verify`; nobody trains it, so it is not in the catalogue."""


def load_workload(name: str) -> Workload:
    """The workload of this name. Raises ``InputError`` for an unknown one."""
    name = WORKLOAD_ALIASES.get(name, name)
    if name in _PROOF:
        return importlib.import_module(_PROOF[name]).WORKLOAD
    if name not in WORKLOADS:
        raise unknown_name("workload", name, [*WORKLOADS, *WORKLOAD_ALIASES])
    return importlib.import_module(f"caraml.workloads.{name}").WORKLOAD


def params_of(name: str) -> type[BaseModel]:
    """The parameter model of a workload; needs no torch.

    Raises:
        InputError: an unknown workload.
        EnvironmentUnfitError: a package that the workload needs is not installed.
    """
    workload = load_workload(name)
    missing = [package for package in workload.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise EnvironmentUnfitError(f"workload {name!r} needs {' and '.join(missing)}, not installed here", how_to_install(missing))
    return workload.params


def how_to_install(packages: list[str]) -> str:
    """The command, by the smallest extra of ours that brings the packages if there is one."""
    fitting = []
    for extra in metadata.metadata("caraml").get_all("Provides-Extra") or []:
        brought = {word.split(">")[0] for word in metadata.requires("caraml") or [] if f"extra == '{extra}'" in word.replace('"', "'")}
        if extra != "test" and set(packages) <= brought:
            fitting.append((len(brought), extra))
    return f"pip install 'caraml[{min(fitting)[1]}]'" if fitting else f"pip install {' '.join(packages)}"
