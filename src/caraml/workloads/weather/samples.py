"""What the data sets of all weather applications share: provenance, missing values, scales, and a cache."""

from __future__ import annotations

import bisect
import json
import reprlib
import shutil
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from caraml.base.errors import EnvironmentUnfitError, InputError, in_a_line
from caraml.base.format import count
from caraml.base.limits import LINE, read_text
from caraml.workloads.weather.netcdf import FloatArray, NetcdfFiles

Split = Literal["train", "validation"]
Sample = tuple[torch.Tensor, ...]
_CHECKED_SAMPLES = 4
"""Samples that are read to count missing values before a run; reading all would be an epoch."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- asked how much room it has; nothing is made there


class WeatherSamples(torch.utils.data.Dataset[Sample]):
    """Samples of an application by position, read from NetCDF files when they are asked for.

    A missing value in an input becomes the field's mean, 0 after normalisation, and is counted; in a target it is an error.
    """

    application: str
    files: NetcdfFiles
    ends: list[int]
    """Samples up to the end of each file."""

    def __len__(self) -> int:
        return self.ends[-1]

    @abstractmethod
    def __getitem__(self, position: int) -> Sample:
        """Sample ``position``: tensors whose shapes the data set's class states."""

    def place(self, position: int) -> tuple[int, int]:
        """Of sample ``position``, the number of its file and its own number there."""
        number = bisect.bisect_right(self.ends, position)
        return number, position - (self.ends[number - 1] if number else 0)

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, folder, files, samples, bytes, and missing values among a few samples."""
        checked = [len(self) * index // _CHECKED_SAMPLES for index in range(min(_CHECKED_SAMPLES, len(self)))]
        before = self.files.missing
        for position in checked:
            self[position]
        missing = self.files.missing - before
        self.files.close()
        return {
            "kind": "weather",
            "application": self.application,
            "path": str(self.files.paths[0].parent),
            "files": len(self.files.paths),
            "items": len(self),
            "bytes": sum(path.stat().st_size for path in self.files.paths),
            "missing_values": missing,
            "missing_values_from": f"{len(checked)} samples",
        }


def without_gaps(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normalised input with 0, the mean, where a value is missing."""
    return np.nan_to_num(values, nan=0.0)


def complete(values: np.ndarray[Any, np.dtype[np.float32]], path: Path, variable: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A target as it is. Raises ``InputError`` if a value is missing: no loss can be made of it."""
    gaps = int(np.isnan(values).sum())
    if gaps:
        raise InputError(f"{path}: {variable}: found {count(gaps, 'missing value')} of {values.size} in a target; expected none")
    return values


def split_files(paths: list[Path], split: Split) -> list[Path]:
    """The last file is for validation, the others are for training; a single file serves both."""
    if len(paths) == 1:
        return paths
    return paths[-1:] if split == "validation" else paths[:-1]


class Cached(torch.utils.data.Dataset[Sample]):
    """Another data set whose samples stay in memory after they are first read; loader workers share them."""

    def __init__(self, samples: Any, *, shared: bool) -> None:
        """Reserve memory for every sample of ``samples``, whose tensors all have the shapes of the first. Raises ``EnvironmentUnfitError``
        where the machine's shared memory is too small for the set."""
        self._samples = samples
        first: Sample = samples[0]
        need = len(samples) * sum(tensor.nbytes for tensor in first)
        if shared and _SHARED_MEMORY.is_dir() and need > shutil.disk_usage(_SHARED_MEMORY).free:
            free = shutil.disk_usage(_SHARED_MEMORY).free
            found = f"the cache needs {need / 2**30:.1f} GiB of shared memory; {_SHARED_MEMORY} has {free / 2**30:.1f} GiB free"
            raise EnvironmentUnfitError(found, "set cache = false, or workers = 0")
        self._store = [torch.empty(len(samples), *tensor.shape, dtype=tensor.dtype) for tensor in first]
        self._known = torch.zeros(len(samples), dtype=torch.bool)
        if shared:
            for tensor in (*self._store, self._known):
                tensor.share_memory_()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, position: int) -> Sample:
        if not self._known[position]:
            for place, tensor in zip(self._store, self._samples[position], strict=True):
                place[position] = tensor
            self._known[position] = True
        return tuple(place[position] for place in self._store)

    def describe(self) -> dict[str, Any]:
        return {**self._samples.describe(), "cached": True}


def read_scales(path: Path, names: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each variable, from a JSON or YAML file that has ``[mean, standard deviation]`` of each by name."""
    try:
        text = read_text(path, LINE)
        table = json.loads(text) if path.suffix == ".json" else _from_yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable: {in_a_line(error)}", "it holds [mean, standard deviation] of each variable") from error
    scales = {}
    for name in names:
        pair = table.get(name) if isinstance(table, dict) else None
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, int | float) for value in pair) and pair[1] > 0):
            raise InputError(f"{path}: {name}: found {reprlib.repr(pair):.100}; expected [mean, standard deviation above 0]")
        scales[name] = (pair[0], pair[1])
    return scales


def _from_yaml(text: str) -> Any:
    """What a YAML text says. Raises ``ValueError`` for anything else."""
    import yaml  # only the files of one application are YAML: the others do without

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def smooth(rng: np.random.Generator, shape: tuple[int, ...], length: float = 8.0, axes: int = 2) -> FloatArray:
    """Gaussian noise of mean 0 and deviation 1, float32, smooth and periodic along its last ``axes`` axes with a correlation ``length``
    in grid points; along the others it is independent."""
    over = tuple(range(len(shape) - axes, len(shape)))
    spectrum = np.fft.rfftn(rng.standard_normal(shape), axes=over)
    squared = np.zeros(())
    for axis in over:
        frequency = np.fft.rfftfreq(shape[axis]) if axis == over[-1] else np.fft.fftfreq(shape[axis])
        squared = np.add.outer(squared, frequency**2)
    spectrum *= np.exp(-2 * (np.pi * length) ** 2 * squared)
    field = np.fft.irfftn(spectrum, s=[shape[axis] for axis in over], axes=over)
    field -= field.mean(axis=over, keepdims=True)
    return (field / np.maximum(field.std(), 1e-12)).astype(np.float32)
