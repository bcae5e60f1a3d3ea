"""The files of one measured command: raw readings as they come, the result before, and again after, the command; power over time as a
picture, an SVG file that any browser shows, and as tables and HDF5 files of the form that jpwr's have."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from caraml.base.chart import Axis, Line, curves, standalone
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import open_new, replacing_by_name, write_file
from caraml.base.format import JOULES_PER_WATT_HOUR
from caraml.power.model import UNITS, Channel, ChannelEnergy, Reading, WindowEnergy
from caraml.power.store import ReadingSeries, ReadingStore

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
FLUSH_S = 1.0
"""Readings younger than this are lost if the process is killed [s]."""

Format = Literal["csv", "json", "parquet"]
READING_COLUMNS = ("channel", "t_before", "t_after", "value", "unit", "error")
"""Of the file of raw readings: times in seconds (monotonic), values in the unit of each."""


@dataclass(slots=True)
class CommandResult:
    """What is known about one measured command; written as ``energy.json``."""

    command: list[str]
    energy: WindowEnergy
    idle: WindowEnergy | None = None
    status: Literal["running", "finished"] = "running"
    """``running`` in a file that is read later means that the measuring process was killed."""
    exit_code: int | None = None
    signal: int | None = None
    """The signal that ended the command."""
    valid: bool = False
    reason: str | None = "the measurement did not come to its end"
    rank: int | None = None
    world_size: int | None = None
    missing_sources: list[str] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    readings: str | None = None
    """Name of the file of raw readings, beside this one."""
    schema: int = SCHEMA


class ResultFolder:
    """Writes the files of one command; finds out before it starts whether that is possible."""

    def __init__(self, folder: Path, fmt: Format, rank: int | None, h5: bool = False) -> None:
        suffix = "" if rank is None else f".{rank}"
        self.folder, self.format, self.h5, self._suffix = folder, fmt, h5, suffix
        self.path = folder / f"energy{suffix}.json"
        self.raw = folder / f"readings{suffix}.csv"
        self.trouble: str | None = None
        """Why readings could no longer be written, for example a full disk."""
        if fmt not in get_args(Format):
            raise InputError(f"unknown format {fmt!r}; known: {', '.join(get_args(Format))}")
        if h5:
            need_tables("pandas", "tables")
        if fmt == "parquet" and importlib.util.find_spec("duckdb") is None:
            raise EnvironmentUnfitError("Parquet files need the package duckdb", "pip install duckdb, or use --csv")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                raise InputError(f"{self.path} exists already, and a result is never overwritten", "choose another folder with --out")
            self._file = io.TextIOWrapper(open_new(self.raw, replace=True), encoding="utf-8", newline="")
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}", "choose another folder with --out") from error
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(READING_COLUMNS)
        self._flushed = time.monotonic()
        self._lock = threading.Lock()

    def add(self, readings: list[Reading], channels: Mapping[str, Channel]) -> None:
        """Append readings of these channels. A disk that is full does not stop the measurement; it is reported in the end."""
        lines = []
        for r in readings:
            unit = UNITS[channels[r.channel].kind] if r.channel in channels else ""
            lines.append((r.channel, r.t_before, r.t_after, r.value, unit, (r.error or "").replace("\n", " ")))
        with self._lock:
            if self.trouble is not None or self._file.closed:
                return
            try:
                self._rows.writerows(lines)
                if time.monotonic() - self._flushed > FLUSH_S:
                    self._file.flush()
                    self._flushed = time.monotonic()
            except OSError as problem:
                self.trouble = f"{self.raw}: {problem.strerror}"

    def write(self, result: CommandResult) -> None:
        """Write the result under a temporary name and rename it: it exists whole or not at all."""
        result.readings = self.raw.name
        write_file(self.path, json.dumps(asdict(result), indent=1, allow_nan=False))

    def discard(self) -> None:
        """Remove what was written, since the command was not started: the folder can be used again."""
        with self._lock:
            self._file.close()
        for path in (self.raw, self.path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others use the folder too
            self.folder.rmdir()

    def finish(self, result: CommandResult) -> list[Path]:
        """Close the readings, bring them into the wanted format, write the result. Returns what was written."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self.trouble = f"{self.raw}: {error.strerror}"
        if self.format != "csv" and self.trouble is None:
            csv_file, self.raw = self.raw, self.raw.with_suffix(f".{self.format}")
            if self.format == "json":
                write_file(self.raw, json.dumps(read_readings(csv_file), allow_nan=False))
            else:
                _write_parquet(csv_file, self.raw)
            csv_file.unlink()
        self.write(result)
        written = [self.path, self.raw]
        if self.format == "csv":
            table = self.folder / f"energy{self._suffix}.csv"
            write_file(table, channel_table(result.energy))
            written.append(table)
        return written


def channel_table(energy: WindowEnergy) -> str:
    """One line of CSV per domain; the parts of the bound and lists are left to the JSON file."""
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    names = [f.name for f in fields(ChannelEnergy) if f.name not in ("bound_parts", "users")]
    rows.writerow(names)
    for channel in energy.channels:
        known = (getattr(channel, name) for name in names)
        rows.writerow([" ".join(value) if isinstance(value, list) else value for value in known])
    return table.getvalue()


def read_readings(path: Path) -> dict[str, list[Any]]:
    """Raw readings from the CSV file as columns; a last line that was cut off by a kill is left out."""
    columns: dict[str, list[Any]] = {name: [] for name in READING_COLUMNS[:-1]}
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(complete.splitlines()):
        columns["channel"].append(row["channel"])
        columns["t_before"].append(float(row["t_before"]))
        columns["t_after"].append(float(row["t_after"]))
        columns["value"].append(float(row["value"]) if row["value"] else None)
        columns["unit"].append(row.get("unit"))  # which earlier versions did not write
    return columns


def _write_parquet(raw: Path, target: Path) -> None:
    import duckdb

    types = {name: "DOUBLE" if name in ("t_before", "t_after", "value") else "VARCHAR" for name in READING_COLUMNS}
    with replacing_by_name(target) as inside, duckdb.connect() as database:
        database.read_csv(str(raw), header=True, columns=types).write_parquet(str(inside), compression="zstd")


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

    A row is an instant of the channel with most readings, or where that has none for longer than another usually takes, of the other.
    Channels that were read at instants of their own are interpolated between their readings and unknown (NaN) outside them and in their
    gaps (three usual steps); energies are taken from the readings and never from this table. Errors as of :func:`need_tables`.

    Args:
        columns: times [s] and powers [W] by name.
        offset: what makes seconds since 1970 of the times [s].
    """
    need_tables("pandas")
    import numpy as np
    import pandas

    read = {name: (np.asarray(times, float), np.asarray(watts, float)) for name, (times, watts) in columns.items() if len(times)}
    steps = {name: float(np.median(np.diff(times))) if len(times) > 1 else np.inf for name, (times, _) in read.items()}
    at = np.empty(0)
    for name, (times, _) in sorted(read.items(), key=lambda one: -len(one[1][0])):
        rows, after = np.concatenate(([-np.inf], at, [np.inf])), np.searchsorted(at, times)
        far = np.minimum(times - rows[after], rows[after + 1] - times) > steps[name]
        at = np.union1d(at, times if not len(at) else times[far])
    powers = {name: np.interp(at, times, watts, left=np.nan, right=np.nan) for name, (times, watts) in read.items()}
    for name, (times, _) in read.items():
        after = np.searchsorted(times, at).clip(min(1, len(times) - 1), len(times) - 1)
        powers[name][(times[after] - times[after - 1] > 3 * steps[name]) & ~np.isin(at, times)] = np.nan
    return pandas.DataFrame({"timestamps": at + offset, **powers})


def energy_frame(energy: WindowEnergy | None) -> pandas.Series[float]:
    """Energy of every domain of a window [Wh], by name; NaN where it is not known. Raises ``EnvironmentUnfitError`` without pandas."""
    need_tables("pandas")
    import pandas

    known = {} if energy is None else {one.id: one.energy_j for one in energy.channels}
    return pandas.Series({name: None if joules is None else joules / JOULES_PER_WATT_HOUR for name, joules in known.items()}, dtype=float)


def write_hdf5(folder: Path, power: pandas.DataFrame, energy: pandas.Series[float], suffix: str) -> list[Path]:
    """Write ``power.SUFFIX.h5`` and ``energy.SUFFIX.h5`` with the key ``jpwr``, as jpwr's readers expect them. Raises ``InputError`` where
    there is such a file already, ``EnvironmentUnfitError`` without PyTables."""
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
