"""Damaged NetCDF files: the reader says which file, whatever HDF5 makes of it.

HDF5 is a C library that may crash on a made-up file, so every trial runs in a process of its own that is forked for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caraml.base.errors import CaramlError
from caraml.workloads.weather import prepare_weather
from tests.hostile.damage import NASTY, Edit, damaged, verdict_of

TRIALS = 60


def open_radiation(folder: Path) -> Any:
    from caraml.workloads.weather.radiation_emulation import RadiationSamples

    return RadiationSamples(folder)


def open_tweets(folder: Path) -> Any:
    from caraml.workloads.weather.tweet_rain_classification import TweetSamples

    return TweetSamples(folder, 16, 100)


OPEN: dict[str, Callable[[Path], Any]] = {"ap3": open_radiation, "ap2": open_tweets}


def trial(application: str, folder: Path, verdict: Any) -> None:
    try:
        samples = OPEN[application](folder)
        for position in (0, len(samples) - 1):
            samples[position]
        verdict.send("read")
    except CaramlError as error:
        verdict.send("told" if str(folder) in str(error) else f"error without its file: {error}")
    except Exception as error:  # noqa: BLE001  -- whatever escapes is what this test looks for
        verdict.send(f"{type(error).__name__}: {error}")


@pytest.mark.processes
@pytest.mark.parametrize("application", OPEN)
def test_damaged_netcdf(tmp_path: Path, application: str) -> None:
    prepare_weather(application, tmp_path / "data", "tiny")
    path = sorted((tmp_path / "data").glob("*.nc"))[0]
    content = path.read_bytes()
    rng = random.Random(0)
    verdicts: list[str] = []
    for _ in range(TRIALS):
        kind = rng.choice(["cut", "remove", "insert", "replace", "replace", "replace"])
        # Most of such a file is numbers, for which anything goes; what can be wrong stands in its first and last kilobytes.
        place = rng.choice([rng.random(), rng.random() * 8192 / len(content), 1 - rng.random() * 8192 / len(content)])
        edit = Edit(kind, place, rng.randrange(1, 64), rng.choice([*NASTY, rng.randbytes(4)]))
        path.write_bytes(damaged(content, [edit]))
        verdicts.append(verdict_of(trial, application, tmp_path / "data"))
    unexpected = [verdict for verdict in verdicts if verdict not in ("read", "told", "crashed")]
    assert not unexpected
    assert verdicts.count("told") > 3 and verdicts.count("crashed") <= TRIALS // 10
