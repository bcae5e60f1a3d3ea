"""Power over time: as a picture, an SVG file that any browser shows, and as tables and HDF5 files of the form that jpwr's have."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from caraml.base.chart import Axis, Line, curves, standalone
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.format import JOULES_PER_WATT_HOUR
from caraml.power.model import Channel, WindowEnergy
from caraml.power.store import ReadingSeries, ReadingStore

if TYPE_CHECKING:
    import pandas

SIZE = (820, 300)
"""Of the plotting area [px]."""
MAX_POINTS = 1500


def power_points(channel: Channel, series: ReadingSeries) -> list[tuple[float, float]]:
    """Power over time [s, W]: the readings, or the slope of a counter over at least five of its updates; none of apparent power."""
    if channel.kind == "apparent_va":
        return []
    if channel.kind != "energy":
        return list(zip(series.t, series.value, strict=True))
    points, first = [], 0
    span = max(5 * channel.update_period_s, 0.1)
    for i in range(1, len(series)):
        length = series.t[i] - series.t[first]
        if length >= span:
            rise = series.value[i] - series.value[first]
            if rise >= 0:
                points.append(((series.t[i] + series.t[first]) / 2, rise / length))
            first = i
    return points


def downsampled(points: list[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``limit`` points: of every stretch the lowest and the highest, so that no peak is lost."""
    if len(points) <= limit:
        return points
    size = -(-2 * len(points) // limit)
    kept = []
    for begin in range(0, len(points), size):
        block = points[begin : begin + size]
        kept += sorted({min(block, key=lambda p: p[1]), max(block, key=lambda p: p[1])})
    return kept


def domains(store: ReadingStore, start: float = float("-inf"), end: float = float("inf")) -> dict[Channel, list[tuple[float, float]]]:
    """Power over time [s, W] of every domain, by the channel that shows it best: power itself, else the slope of a counter."""
    found: dict[str, tuple[Channel, list[tuple[float, float]]]] = {}
    for channel in sorted(store.channels.values(), key=lambda c: (c.kind == "energy", c.id)):
        points = power_points(channel, store.series(channel.id, start, end))
        if len(points) > 1:
            found.setdefault(channel.domain, (channel, points))
    return dict(found.values())


def need_tables(*packages: str) -> None:
    """Raise ``EnvironmentUnfitError`` where a package that makes tables is not installed, with the command that installs it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentUnfitError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed", "pip install 'caraml[pandas]'"
        )


def power_frame(columns: Mapping[str, tuple[Sequence[float], Sequence[float]]], offset: float) -> pandas.DataFrame:
    """Power of every channel side by side: ``timestamps`` (seconds since 1970), and watts in a column of each channel's name.

    A row is an instant of the channel with most readings. The others, which were read at instants of their own, are interpolated between
    their readings and unknown (NaN) outside them; energies are taken from the readings and never from this table.

    Args:
        columns: times [s] and powers [W] by name.
        offset: what makes seconds since 1970 of the times [s].

    Raises:
        EnvironmentUnfitError: pandas is not installed.
    """
    need_tables("pandas")
    import numpy as np
    import pandas

    at = np.asarray(max((times for times, _ in columns.values()), key=len, default=()), dtype=float)
    powers = {name: np.interp(at, times, watts, left=np.nan, right=np.nan) for name, (times, watts) in columns.items() if len(times)}
    return pandas.DataFrame({"timestamps": at + offset, **powers})


def energy_frame(energy: WindowEnergy | None) -> pandas.Series[float]:
    """Energy of every domain of a window [Wh], by name; NaN where it is not known. Raises ``EnvironmentUnfitError`` without pandas."""
    need_tables("pandas")
    import pandas

    known = {} if energy is None else {one.id: one.energy_j for one in energy.channels}
    return pandas.Series({name: None if joules is None else joules / JOULES_PER_WATT_HOUR for name, joules in known.items()}, dtype=float)


def write_hdf5(folder: Path, power: pandas.DataFrame, energy: pandas.Series[float], suffix: str) -> list[Path]:
    """Write ``power.SUFFIX.h5`` and ``energy.SUFFIX.h5`` with the key ``jpwr``, as jpwr's readers expect them.

    Raises:
        InputError: there is such a file already.
        EnvironmentUnfitError: PyTables is not installed.
    """
    need_tables("tables")
    files = {folder / f"power.{suffix}.h5": power, folder / f"energy.{suffix}.h5": energy}
    for file in files:
        if file.exists():
            raise InputError(f"{file} exists already, and a result is never overwritten", "choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, table in files.items():
        table.to_hdf(file, key="jpwr", mode="w", complib="blosc:zstd", complevel=5)
    return list(files)


def svg(store: ReadingStore, start: float, end: float, title: str) -> str:
    """The picture of the window ``start`` to ``end`` (monotonic seconds), one line per domain."""
    lines = []
    for channel, whole in domains(store, start, end).items():
        points = [(t - start, w) for t, w in whole if start <= t <= end]
        if len(points) > 1:
            lines.append(Line(f"{channel.label} ({channel.domain})", downsampled(points), "", len(points)))
    x = Axis("time [s]" if lines else "no power reading in this window", domain=(0, max(end - start, 1e-3)))
    y = Axis(f"power [W]: {title}", zero=True, domain=None if lines else (0, 1))
    drawing = curves(lines or [Line("", [(0, 0)], "")], x, y, title, size=SIZE)
    return standalone([drawing], title, [line.name for line in lines])
