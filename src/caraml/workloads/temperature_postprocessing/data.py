"""Patches of forecast fields for temperature post-processing, from NetCDF files of one forecast start each."""

from __future__ import annotations

import bisect
import itertools
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from caraml.base.errors import InputError, in_a_line
from caraml.base.files import write_file
from caraml.base.limits import LINE, read_text
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Sample, Split, WeatherSamples, complete, smooth, split_files, without_gaps

PREDICTORS = (
    "air_temperature_0.1_2m",
    "air_temperature_0.9_2m",
    "air_temperature_2m",
    "bias_yesterday",
    "cloud_area_fraction",
    "precipitation_amount",
    "x_wind_10m",
    "y_wind_10m",
)
STATIC_PREDICTORS = ("altitude", "analysis_std", "bias_recent", "land_area_fraction", "model_altitude", "model_laf")
FORECAST = PREDICTORS.index("air_temperature_2m")
LAYOUT = Layout(
    {
        "predictors": ("leadtime", "y", "x", "predictor"),
        "static_predictors": ("y", "x", "static_predictor"),
        "target_mean": ("leadtime", "y", "x"),
        "predictor": ("predictor",),
        "static_predictor": ("static_predictor",),
    },
    {"predictor": len(PREDICTORS), "static_predictor": len(STATIC_PREDICTORS)},
)
NORMALIZATION = "normalization.yml"
"""Mean and standard deviation of each predictor by name, beside the files."""
_PLACE = ((1000.0, 100.0), (1000.0, 100.0), (30.0, 10.0))
"""Mean and deviation of the row, column and lead time that are added as predictors."""
_SIZES = {"tiny": (3, 4, 70, 100), "small": (3, 16, 530, 530)}
"""Files, lead times, rows, columns."""


class TemperatureSamples(WeatherSamples):
    """A sample is ``(fields (17, P, P), target (1, P, P))``: normalised predictors; analysis minus forecast [K].

    Patches do not overlap; what is left at the lower and right edges is not used.
    """

    application = "ap1"

    def __init__(self, folder: Path, patch: int = 256, split: Split = "train") -> None:
        """Open ``folder/*.nc``; of several files the last is for validation.

        Raises:
            InputError: as :class:`NetcdfFiles`; a field is smaller than a patch; a predictor has another name or no normalisation.
        """
        self.patch = patch
        self.files = NetcdfFiles(split_files(find_files(folder, "*.nc"), split), LAYOUT)
        self._mean, self._std = _normalization(folder / NORMALIZATION)
        counts = []
        for number, lengths in enumerate(self.files.lengths):
            self._check_names(number)
            if min(lengths["y"], lengths["x"]) < patch:
                raise InputError(
                    f"{self.files.paths[number]}: found a grid of {lengths['y']} x {lengths['x']}; "
                    f"expected at least the patch, {patch} x {patch}",
                    "use a smaller patch",
                )
            counts.append(lengths["leadtime"] * (lengths["y"] // patch) * (lengths["x"] // patch))
        self._ends = list(itertools.accumulate(counts))
        self.files.close()

    def __len__(self) -> int:
        """Patches x lead times, over all files."""
        return self._ends[-1]

    def __getitem__(self, position: int) -> Sample:
        """Sample ``position``: one patch of one lead time."""
        number = bisect.bisect_right(self._ends, position)
        index = position - (self._ends[number - 1] if number else 0)
        lengths, patch = self.files.lengths[number], self.patch
        index, column = divmod(index, lengths["x"] // patch)
        leadtime, row = divmod(index, lengths["y"] // patch)
        y, x = slice(row * patch, (row + 1) * patch), slice(column * patch, (column + 1) * patch)
        predictors = self.files.read(number, "predictors", (leadtime, y, x))  # (P, P, 8)
        static = self.files.read(number, "static_predictors", (y, x))  # (P, P, 6)
        target = self.files.read(number, "target_mean", (leadtime, y, x)) - predictors[..., FORECAST]  # (P, P)
        fields = without_gaps((np.concatenate([predictors, static], 2) - self._mean) / self._std).transpose(2, 0, 1)
        places = (np.arange(y.start, y.stop)[:, None], np.arange(x.start, x.stop)[None, :], np.array([[leadtime]]))
        place = [np.broadcast_to((values - mean) / std, (patch, patch)) for values, (mean, std) in zip(places, _PLACE, strict=True)]
        complete(target, self.files.paths[number], "target_mean - air_temperature_2m")
        return torch.from_numpy(np.concatenate([fields, np.stack(place)]).astype(np.float32)), torch.from_numpy(target[None])

    def _check_names(self, number: int) -> None:
        for variable, expected in (("predictor", PREDICTORS), ("static_predictor", STATIC_PREDICTORS)):
            found = tuple(self.files.texts(number, variable))
            if found != expected:
                raise InputError(f"{self.files.paths[number]}: {variable}: found {', '.join(found)}; expected {', '.join(expected)}")


def synthetic_patch(rng: np.random.Generator, patch: int) -> tuple[Any, ...]:
    """A patch of uniform noise and a target of noise."""
    return rng.random((17, patch, patch), dtype=np.float32), rng.random((1, patch, patch), dtype=np.float32)


def write_lookalike(folder: Path, size: str, seed: int, only: int | None = None) -> None:
    """Write forecasts whose error follows yesterday's bias, the altitude error of the model and the clouds, plus noise.

    ``only``: the number of the one file to write; it may be any.
    """
    files, leadtimes, rows, columns = _SIZES[size]
    rng = np.random.default_rng(seed)
    altitude = np.abs(400 * smooth(rng, (rows, columns), 12))
    model_altitude = altitude + 80 * smooth(rng, (rows, columns), 5)
    land = (smooth(rng, (rows, columns), 10) > 0).astype(np.float32)
    spread, recent = 0.5 + 0.2 * np.abs(smooth(rng, (rows, columns))), smooth(rng, (rows, columns))
    static = np.stack([altitude, spread, recent, land, model_altitude, land], 2).astype(np.float32)
    chunk = (min(rows, 256), min(columns, 256))
    for number in range(files) if only is None else (only,):
        rng = np.random.default_rng([seed, 1, number])
        forecast = 278 - 0.0065 * model_altitude + 5 * smooth(rng, (leadtimes, rows, columns), 12)
        bias, wind = recent + 0.5 * smooth(rng, (leadtimes, rows, columns)), 4 * smooth(rng, (2, leadtimes, rows, columns))
        cloud = np.clip(0.5 + 0.4 * smooth(rng, (leadtimes, rows, columns)), 0, 1)
        rain = np.maximum(smooth(rng, (leadtimes, rows, columns)), 0)
        error = 0.8 * bias + 0.0065 * (model_altitude - altitude) + 2 * (cloud - 0.5)
        noise = (0.2 + 0.6 * cloud) * rng.standard_normal((leadtimes, rows, columns))
        predictors = np.stack([forecast - 1, forecast + 1, forecast, bias, cloud, rain, *wind], 3)
        variables: dict[str, tuple[tuple[str, ...], Any]] = {
            "predictors": (("leadtime", "y", "x", "predictor"), predictors.astype(np.float32)),
            "static_predictors": (("y", "x", "static_predictor"), static),
            "target_mean": (("leadtime", "y", "x"), (forecast + error + noise).astype(np.float32)),
            "target_std": (("leadtime", "y", "x"), np.broadcast_to(spread, forecast.shape).astype(np.float32)),
            "predictor": (("predictor",), np.array(PREDICTORS)),
            "static_predictor": (("static_predictor",), np.array(STATIC_PREDICTORS)),
            "leadtime": (("leadtime",), 3600.0 * np.arange(leadtimes)),
            "y": (("y",), 1000 * np.arange(rows, dtype=np.float32)),
            "x": (("x",), 1000 * np.arange(columns, dtype=np.float32)),
        }
        lengths = {"leadtime": leadtimes, "y": rows, "x": columns, "predictor": len(PREDICTORS), "static_predictor": len(STATIC_PREDICTORS)}
        chunks = {"predictors": (1, *chunk, len(PREDICTORS)), "target_mean": (1, *chunk)}
        write_netcdf(folder / f"forecast_{number:03d}.nc", lengths, variables, chunks=chunks)
        if number == 0:
            _write_normalization(folder / NORMALIZATION, predictors, static)


def _write_normalization(path: Path, predictors: Any, static: Any) -> None:
    table = {
        name: [float(values[..., index].mean()), float(values[..., index].std())]
        for names, values in ((PREDICTORS, predictors), (STATIC_PREDICTORS, static))
        for index, name in enumerate(names)
    }
    write_file(path, yaml.safe_dump(table))


def _normalization(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Means and standard deviations (14,) in the order of the predictors."""
    try:
        table = yaml.safe_load(read_text(path, LINE))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(
            f"{path}: not readable: {in_a_line(error)}", "it holds `name: [mean, standard deviation]` for each predictor"
        ) from error
    pairs = []
    for name in (*PREDICTORS, *STATIC_PREDICTORS):
        pair = table.get(name) if isinstance(table, dict) else None
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, int | float) for value in pair) and pair[1] > 0):
            raise InputError(f"{path}: {name}: found {reprlib.repr(pair):.100}; expected [mean, standard deviation above 0]")
        pairs.append(pair)
    return np.array([mean for mean, _ in pairs], np.float32), np.array([std for _, std in pairs], np.float32)
