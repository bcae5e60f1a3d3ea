"""What is trained: a folder per workload, one for those of weather, and those of other packages (entry points ``caraml.workloads``)."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from caraml import __version__
from caraml.base.errors import CaramlError, EnvironmentUnfitError, unknown_name
from caraml.base.plugins import Plugin, plugins
from caraml.suite.model import WORKLOAD_ALIASES
from caraml.workloads.base import Workload

if TYPE_CHECKING:
    import torch

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

_WEATHER = (*WORKLOAD_ALIASES.values(), "atmorep")
_PROOF = {"known": "caraml.verify"}
"""Work of known truth, for `caraml verify`; nobody trains it, so it is not in the catalogue."""
_RESERVED = ("own_loop",)
"""Names under which records of other work stand."""


def workload_plugins() -> dict[str, Plugin]:
    """Workloads that other packages bring, by name; also those that cannot be used."""
    return plugins("caraml.workloads", (*WORKLOADS, *WORKLOAD_ALIASES, *_PROOF, *_RESERVED))


def load_workload(name: str) -> Workload:
    """The workload of this name, CARAML's own or a plug-in's. Raises ``InputError`` for an unknown workload, or a plug-in that was refused,
    and ``EnvironmentUnfitError`` for a plug-in that cannot be imported."""
    name = WORKLOAD_ALIASES.get(name, name)
    if name in _PROOF:
        return importlib.import_module(_PROOF[name]).WORKLOAD
    if name in WORKLOADS:
        if name in _WEATHER:
            return importlib.import_module("caraml.workloads.weather").WORKLOADS[name]
        return importlib.import_module(f"caraml.workloads.{name}").WORKLOAD
    others = workload_plugins()
    if name not in others:
        raise unknown_name("workload", name, [*WORKLOADS, *WORKLOAD_ALIASES, *others])
    return workload_of(others[name])


def workload_of(plugin: Plugin) -> Workload:
    """The workload of a plug-in. Raises as :func:`load_workload`."""
    found = plugin.load(Workload)
    if not (isinstance(found.params, type) and issubclass(found.params, BaseModel)):
        raise plugin.wrong(f"params: found {found.params}, expected a model of pydantic")
    if not callable(found.build):
        raise plugin.wrong(f"build: found {found.build!r}, expected a function of a BuildContext")
    return found


def software_of(name: str) -> str | None:
    """Distribution and version of the plug-in that a workload comes from; ``None`` for one of CARAML's own."""
    name = WORKLOAD_ALIASES.get(name, name)
    return None if name in WORKLOADS or name in _PROOF else workload_plugins()[name].package


def computes_with(torch: str | None) -> str:
    """What computes, with its version, as points say it. ``torch``: its version, if that is known."""
    return f"caraml {__version__}, torch {torch or 'of unknown version'}"


def titles() -> dict[str, str]:
    """Every workload by name with its title, or with the reason why it cannot be used."""
    found = dict(WORKLOADS)
    for plugin in workload_plugins().values():
        try:
            found.setdefault(plugin.name, f"{workload_of(plugin).title} ({plugin.package})")
        except CaramlError as error:
            found[f"{plugin.name} (plug-in)"] = error.args[0]
    return found


def params_of(name: str) -> type[BaseModel]:
    """The parameter model of a workload; needs no torch. Raises ``InputError`` for an unknown workload."""
    return load_workload(name).params


def see_packages(name: str) -> None:
    """Raise ``EnvironmentUnfitError`` where a package that a workload needs is not installed."""
    needed = [*(["torch"] if name != "command" else []), *load_workload(name).packages]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        where = (
            "; if only jobs have it: software.modules, venv or python in the system's file says from where" if "torch" in missing else ""
        )
        raise EnvironmentUnfitError(f"workload {name!r} needs {' and '.join(missing)}, not installed here", how_to_install(missing) + where)


def how_to_install(packages: list[str]) -> str:
    """The command, by the smallest extra of ours that brings the packages if there is one."""
    fitting = []
    with suppress(metadata.PackageNotFoundError):  # of a checkout that is not installed nobody knows any
        for extra in metadata.metadata("caraml").get_all("Provides-Extra") or []:
            brought = {word.split(">")[0] for word in metadata.requires("caraml") or [] if f"extra == '{extra}'" in word.replace('"', "'")}
            if extra != "test" and set(packages) <= brought:
                fitting.append((len(brought), extra))
    return f"pip install 'caraml[{min(fitting)[1]}]'" if fitting else f"pip install {' '.join(packages)}"


_declared: list[torch.library.Library] = []
"""The library that holds our schemas. Torch withdraws them when the object dies, so it lives as long as the process."""


def make_torchvision_importable() -> None:
    """Let ``import torchvision`` succeed where its compiled operators cannot be loaded.

    The torchvision wheel of the public index is built for CUDA. Beside a torch built for the CPU its shared library
    does not load, and ``import torchvision`` then fails on the two operators that it describes to the compiler by
    name, ``nms`` and ``qnms``: "operator torchvision::nms does not exist". A torchvision that is installed but broken
    takes ``timm`` and the models of ``transformers`` down with it. Declaring the two schemas, without kernels, is
    enough for models, transforms and datasets; the box operators themselves still raise when they are called.

    Does nothing where torch has a GPU build, where torchvision is not installed, where torchvision's own library loads,
    or when called again. Call it before the first import of torchvision, timm or transformers.
    """
    import torch

    has_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    if has_gpu_build or _declared or not _torchvision_operators_missing():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _torchvision_operators_missing() -> bool:
    """Whether torchvision is installed and its operators exist neither now nor after loading its own library."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    # Declaring a schema that the library brings itself would make the later import fail: try the library first.
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
    return not hasattr(torch.ops.torchvision, "nms")
