"""Weather files: what is wrong with one is said, what is missing is counted, and no more is read than asked for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from caraml.base.errors import InputError
from caraml.engine.afterwards import validate
from caraml.engine.ranks import Ranks
from caraml.workloads.weather import prepare_weather
from caraml.workloads.weather import samples as weather_samples
from caraml.workloads.weather.atmorep import FIELDS, AtmoRepConfig, AtmosphereSamples, FieldConfig, cut, masked_tokens
from caraml.workloads.weather.downscaling_gan import DownscalingSamples
from caraml.workloads.weather.ensemble_postprocessing import EnsembleSamples
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, write_netcdf
from caraml.workloads.weather.radiation_emulation import RadiationSamples
from caraml.workloads.weather.regime_clustering import RegimeSamples, random_crop
from caraml.workloads.weather.samples import Cached, read_scales
from caraml.workloads.weather.temperature_postprocessing import FORECAST, TemperatureSamples
from caraml.workloads.weather.tweet_rain_classification import TweetSamples, word_ids
from tests.workloads.weather_training import train

GRID = Layout({"t": ("time", "y", "x")}, {"y": 4})


def grid_file(path: Path, values: np.ndarray, attributes: dict[str, float] | None = None) -> Path:
    lengths = dict(zip(("time", "y", "x"), values.shape, strict=True))
    write_netcdf(path, lengths, {"t": (("time", "y", "x"), values)}, attributes={"t": attributes or {}})
    return path


def test_packed_values_and_fill_values_are_decoded(tmp_path: Path) -> None:
    packed = np.arange(24, dtype=np.int16).reshape(2, 4, 3)
    files = NetcdfFiles([grid_file(tmp_path / "a.nc", packed, {"scale_factor": 0.5, "add_offset": 270.0, "_FillValue": 3})], GRID)
    values = files.read(0, "t", 0)
    assert values[0].tolist() == [270.0, 270.5, 271.0] and np.isnan(values[1, 0]) and files.missing == 1
    assert files.read(0, "t", (1, slice(1, 2))).tolist() == [[277.5, 278.0, 278.5]]


def test_a_run_by_epochs_validates_on_all_that_is_held_out_each_rank_on_its_part(ap3: Path) -> None:
    task, held_out = train("ap3", ap3, {}, steps=0, batch=3).task, RadiationSamples(ap3, "validation")
    assert task.validation is not None
    parts: list[list[Any]] = [list(task.validation().share(rank, 3)) for rank in range(3)]  # type: ignore[attr-defined]
    whole = list(task.validation())
    assert [len(batch[0]) for batch in whole] == [3] * 85 + [1] and len(held_out) == 256
    assert [len(part) for part in parts] == [29, 29, 28]
    assert all(torch.equal(parts[number % 3][number // 3][0], batch[0]) for number, batch in enumerate(whole))
    model = torch.nn.Linear(1, 1)
    task.model, task.loss = model, lambda _, batch: batch[5].mean()
    loss, _ = validate(task, "fp32", torch.device("cpu"), Ranks())
    assert loss == pytest.approx(float(np.mean([sample[5].mean().item() for sample in map(held_out.__getitem__, range(256))])), rel=1e-5)


def test_a_missing_variable_is_named_with_what_is_there(tmp_path: Path) -> None:
    path = grid_file(tmp_path / "a.nc", np.zeros((1, 4, 3)))
    with pytest.raises(InputError, match=r"a\.nc: no variable 'tt'; it has t"):
        NetcdfFiles([path], Layout({"tt": ("time", "y", "x")}, {}))


def test_a_wrong_grid_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.nc: dimension y: found 5; expected 4"):
        NetcdfFiles([grid_file(tmp_path / "a.nc", np.zeros((1, 5, 3)))], GRID)
    with pytest.raises(InputError, match=r"b\.nc: t: found dimensions \(time, y, x\); expected \(y, x\)"):
        NetcdfFiles([grid_file(tmp_path / "b.nc", np.zeros((1, 4, 3)))], Layout({"t": ("y", "x")}, {}))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = grid_file(tmp_path / "a.nc", np.random.default_rng(0).random((50, 4, 30)))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(InputError, match=r"a\.nc: not readable as NetCDF-4: .*truncated"):
        NetcdfFiles([path], GRID)
    with pytest.raises(InputError, match=r"b\.nc: not readable as NetCDF-4: no such file"):
        NetcdfFiles([tmp_path / "b.nc"], GRID)


def test_an_empty_folder_says_what_was_sought(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file \*\.nc; found nothing"):
        RadiationSamples(tmp_path)


@pytest.fixture(scope="module")
def ap3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "ap3"
    prepare_weather("ap3", folder)
    return folder


def spoil(path: Path, variable: str, value: float, count: int = 1) -> None:
    with h5py.File(path, "r+") as file:
        block = file[variable][0]
        block.reshape(-1)[:count] = value
        file[variable][0] = block


def test_missing_inputs_are_counted_and_missing_targets_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ap3"
    prepare_weather("ap3", folder)
    spoil(folder / "radiation_000.nc", "col_inputs", float("nan"), 5)
    samples = RadiationSamples(folder)
    assert samples.describe()["missing_values"] == 5
    assert all(torch.isfinite(part).all() for part in samples[0])
    samples.files.close()
    spoil(folder / "radiation_000.nc", "hr_sw", float("nan"), 2)
    with pytest.raises(InputError, match=r"radiation_000\.nc: hr_sw: found 2 missing values of 137"):
        RadiationSamples(folder)[0]


def test_radiation_look_alikes_close_the_energy_budget(ap3: Path) -> None:
    from caraml.workloads.weather.radiation_emulation import absorbed_flux

    sca, _, _, _, pressure, heating, fluxes = RadiationSamples(ap3)[3]
    top, down, up = fluxes
    assert (top - (down - up + absorbed_flux(heating[None, :, 0], pressure[None, :, 0])[0])).abs() < 1e-2 * top
    assert 0 < down < sca[1] * sca[-1]


def test_the_last_file_is_held_out(ap3: Path) -> None:
    assert len(RadiationSamples(ap3)) == 512 and len(RadiationSamples(ap3, "validation")) == 256


def test_the_cache_reads_each_sample_once(ap3: Path) -> None:
    samples = RadiationSamples(ap3)
    cached, reads = Cached(samples, shared=False), []
    original = samples.files.read
    samples.files.read = lambda *where: (reads.append(where), original(*where))[1]  # type: ignore[method-assign,func-returns-value]
    first = [part.clone() for part in cached[7]]
    once = len(reads)
    assert all(torch.equal(a, b) for a, b in zip(first, cached[7], strict=True)) and len(reads) == once > 0


def test_patches_tile_the_grid_and_drop_its_edges(tmp_path: Path) -> None:
    folder = tmp_path / "ap1"
    prepare_weather("ap1", folder)
    samples = TemperatureSamples(folder, patch=32)
    assert len(samples) == 2 * 4 * (70 // 32) * (100 // 32)
    fields, target = samples[1 * 6 + 4]  # lead time 1, second row of patches, second column
    with h5py.File(folder / "forecast_000.nc") as file:
        forecast = file["predictors"][1, 32:64, 32:64, FORECAST]
        assert np.allclose(target[0], file["target_mean"][1, 32:64, 32:64] - forecast, atol=1e-4)
    correlation = np.corrcoef(fields[FORECAST].numpy().ravel(), forecast.ravel())[0, 1]
    assert correlation == pytest.approx(1), "normalised, not changed"
    with pytest.raises(InputError, match="found a grid of 70 x 100; expected at least the patch, 96 x 96"):
        TemperatureSamples(folder, patch=96)


def test_ensemble_grid_and_level_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "ap4"
    prepare_weather("ap4", folder)
    fields, mean, _, _ = EnsembleSamples(folder)[0]
    assert fields.shape == (14, 37, 72) and 4e4 < mean.mean() < 6e4
    with pytest.raises(InputError, match="found a grid of 37 x 72; expected 361 x 720"):
        EnsembleSamples(folder, grid=(361, 720))
    with pytest.raises(InputError, match="found a grid of 37 x 72; expected 37 x 144"):
        EnsembleSamples(folder, grid=(None, 144))
    with h5py.File(folder / "ERA5_z500.nc", "r+") as file:
        file["plev"][0] = 30000
    with pytest.raises(InputError, match=r"ERA5_z500\.nc: plev: found \[30000\.0, 85000\.0\]; expected 50000"):
        EnsembleSamples(folder)


def test_downscaling_is_normalised_with_the_fine_height_first(tmp_path: Path) -> None:
    folder = tmp_path / "ap5"
    prepare_weather("ap5", folder)
    samples = DownscalingSamples(folder)
    predictors, targets = samples[0]
    assert predictors.shape == (15, 32, 40) and torch.equal(predictors[0], targets[1])
    assert targets[0].mean().abs() < 1.5 and 0.2 < targets[0].std() < 2


def test_crops_are_parts_of_the_field(tmp_path: Path) -> None:
    folder = tmp_path / "ap6"
    prepare_weather("ap6", folder)
    torch.manual_seed(0)
    samples = [RegimeSamples(folder, crop=32)[index] for index in range(50, 58)]
    assert [int(position) for position, _, _ in samples] == list(range(50, 58))
    assert all(first.shape == second.shape == (25, 32, 32) for _, first, second in samples)
    assert any(not torch.equal(first, second) for _, first, second in samples), "two of a few places may be the same by chance"
    ramp = torch.arange(100.0).expand(1, 100, 100)
    for seed in range(5):
        torch.manual_seed(seed)
        crop = random_crop(ramp, 50)
        span = (crop[0, 0, -1] - crop[0, 0, 0]).item()
        assert 0.8**0.5 * 96 <= span <= 100, "from 80 to 100 % of the area"
    crop = random_crop(ramp, 25, (0.25, 0.25))
    assert (crop[0, 0, -1] - crop[0, 0, 0]).item() == pytest.approx(48, abs=0.5), "the first and last of 25 pairs of 50 grid points"
    _, first, second = RegimeSamples(folder, 32, area=1.0)[50]
    assert torch.equal(first, second), "the whole field, both times"


def test_words_become_ids(tmp_path: Path) -> None:
    ids = word_ids("Rain, rain!", 8, 1000)
    assert ids[0] == 1 and ids[1] == ids[3] and ids[5] == 2 and ids[6:].tolist() == [0, 0] and ids.max() < 1000
    folder = tmp_path / "ap2"
    prepare_weather("ap2", folder)
    train, validation = TweetSamples(folder, 16, 1000), TweetSamples(folder, 16, 1000, "validation")
    assert len(train) == 128 and len(validation) == 32
    shares = [np.mean([int(samples[i][1]) for i in range(len(samples))]) for samples in (train, validation)]
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


def test_prepare_refuses_a_full_folder_and_an_unknown_application(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="expected a new or empty folder"):
        prepare_weather("ap3", tmp_path)
    with pytest.raises(InputError, match="ap3"):
        prepare_weather("ap33", tmp_path / "new")


def test_cubes_are_cut_into_tokens_level_by_level() -> None:
    cube = torch.arange(4 * 2 * 6 * 6).view(4, 2, 6, 6)  # T, L, Y, X
    tokens = cut(cube, (2, 3, 3))
    assert tokens.shape == (2 * 2 * 2 * 2, 18)
    assert torch.equal(tokens[0], cube[:2, 0, :3, :3].flatten()) and torch.equal(tokens[8 + 4 + 1], cube[2:, 1, :3, 3:].flatten())


def test_masked_tokens_keep_their_truth_and_the_rest_its_values() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(32, 10)
    sample = masked_tokens(tokens, torch.zeros(32, 8), levels=2)
    assert torch.equal(sample["truth"], tokens[sample["masked"]]) and len(sample["masked"]) == 8
    assert [int((sample["masked"] // 16 == level).sum()) for level in (0, 1)] == [4, 4]
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[sample["masked"]] = False
    assert torch.equal(sample["tokens"][untouched], tokens[untouched]) and not torch.equal(sample["tokens"], tokens)


def test_a_file_smaller_than_a_cube_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "atmorep"
    prepare_weather("atmorep", folder)
    config = AtmoRepConfig(dict.fromkeys(FIELDS, FieldConfig(64, (2, 2, 2), (3, 9, 18))), layers=1, levels=2)
    with pytest.raises(InputError, match="found 12 x 24 x 24 on 2 levels; expected at least 6 x 18 x 36 on 2 levels"):
        AtmosphereSamples(folder, config)


def test_only_scales_in_yaml_need_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"t": [280.0, 10.0]}')
    (tmp_path / "a.yaml").write_text("t: [280.0, 10.0]\n")
    (tmp_path / "b.yaml").write_text("t: [280.0, 10.0\n")
    assert read_scales(tmp_path / "a.yaml", ["t"]) == {"t": (280.0, 10.0)}
    with pytest.raises(InputError, match=r"b\.yaml: not readable: while parsing a flow sequence"):
        read_scales(tmp_path / "b.yaml", ["t"])
    monkeypatch.setitem(sys.modules, "yaml", None)
    without = runpy.run_path(weather_samples.__file__)
    assert without["read_scales"](tmp_path / "a.json", ["t"]) == {"t": (280.0, 10.0)}
