"""Many NetCDF-4 files of one layout, read in slices: what is not asked for is never in memory."""

from __future__ import annotations

import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import h5netcdf
import h5py
import numpy as np
import numpy.typing as npt

from caraml.base.errors import InputError, nearest
from caraml.base.files import replacing_by_name
from caraml.base.limits import CHUNK, LINKS, SLICE, opened, too_large
from caraml.data.store import MARKS, refuse_unfinished

Index = int | slice | EllipsisType | tuple[int | slice, ...]
FloatArray = npt.NDArray[np.float32]
_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, AttributeError, TypeError, IndexError)
"""What h5py and h5netcdf raise for files that are cut off, changed, or no NetCDF at all."""
_MOST_OPEN = 16
"""Files that one process holds open; a year of monthly files fits."""


@dataclass(frozen=True)
class Layout:
    """What every file of a set must hold: dimensions of each variable, and the lengths that are fixed."""

    variables: Mapping[str, tuple[str, ...]]
    lengths: Mapping[str, int]


@dataclass(frozen=True)
class _Variable:
    """Where a variable's values lie, and how they are packed (CF conventions, section 8.1)."""

    data: h5py.Dataset
    fill: float | None
    scale: float
    offset: float

    @property
    def packed(self) -> bool:
        return (self.scale, self.offset) != (1.0, 0.0)


class _OpenFile:
    """One open file. Values are sliced by h5py: h5netcdf looks up every dimension anew for each slice, a millisecond each time."""

    def __init__(self, path: Path) -> None:
        with opened(path):
            self._hdf = h5py.File(path, "r")
        try:
            _refuse_links_out(self._hdf, path)
            self.layout = h5netcdf.File(self._hdf, "r")
        except BaseException:
            self._hdf.close()
            raise
        self._variables: dict[str, _Variable] = {}

    def variable(self, name: str) -> _Variable:
        """The variable of this name, which the layout has been checked to have."""
        if name not in self._variables:
            attributes = self.layout.variables[name].attrs
            numbers = {key: float(np.asarray(attributes[key]).reshape(-1)[0]) for key in _PACKING if key in attributes}
            fill = numbers.get("_FillValue", numbers.get("missing_value"))
            values = (fill, numbers.get("scale_factor", 1.0), numbers.get("add_offset", 0.0))
            self._variables[name] = _Variable(_plain(self._hdf[name]), *values)
        return self._variables[name]

    def close(self) -> None:
        self.layout.close()
        self._hdf.close()


def _refuse_links_out(file: h5py.File, path: Path) -> None:
    """Raise ``InputError`` for a name that stands for something in another file, and for more names than are read; none is followed."""
    count = itertools.count(1)

    def outward(name: str, link: object) -> InputError | None:
        if (number := next(count)) > LINKS:
            return too_large(path, number, LINKS, "names")
        if isinstance(link, h5py.ExternalLink):
            return InputError(f"{path}: refused: {name[:200]!r} is a link to another file, {link.filename[:200]!r}")
        return None

    if (error := file.visititems_links(outward)) is not None:
        raise error


def _plain(data: object) -> h5py.Dataset:
    """A variable whose values lie in its own file and take bounded memory to unpack. Raises ``InputError`` where they lie in another file,
    need a program of others to unpack, or come in chunks that are larger than is read."""
    if not isinstance(data, h5py.Dataset):
        raise InputError("refused: it has no values")
    if data.is_virtual or data.external:
        raise InputError("refused: its values lie in another file")
    plan = data.id.get_create_plist()
    foreign = [plan.get_filter(number)[0] for number in range(plan.get_nfilters()) if plan.get_filter(number)[0] not in _FILTERS]
    if foreign:
        raise InputError(f"refused: its values are packed by filter {foreign[0]}, which is no part of HDF5")
    if data.chunks and (size := math.prod(data.chunks) * data.dtype.itemsize) > CHUNK:
        raise too_large("refused", size, CHUNK, "bytes in a chunk")
    return data


def _refuse_large(shape: tuple[int, ...], where: Index) -> None:
    """Raise ``InputError`` for more values at once than are read, as float32."""
    parts = where if isinstance(where, tuple) else () if where is ... else (where,)
    lengths = [1 if isinstance(part, int) else len(range(*part.indices(length))) for part, length in zip(parts, shape, strict=False)]
    size = 4 * math.prod(lengths) * math.prod(shape[len(parts) :])
    if size > SLICE:
        raise too_large("refused", size, SLICE, "bytes to be read at once")


_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SZIP, 5, 6, h5py.h5z.FILTER_LZF}
"""Filters that HDF5 and h5py bring along; 5 packs bits, 6 scales. Any other would be looked for among plugins."""
_PACKING = ("_FillValue", "missing_value", "scale_factor", "add_offset")


class NetcdfFiles:
    """The files of a set. A file is opened when it is first read, by the process that reads it."""

    def __init__(self, paths: Sequence[Path], layout: Layout) -> None:
        """Look into the header of every file. Raises ``InputError`` where a file is damaged, lacks a variable, or has other dimensions than
        the layout; the message names all three."""
        self.paths = list(paths)
        self.layout = layout
        self.missing = 0
        """Values read so far in this process that were NaN or the file's fill value."""
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._owner = os.getpid()
        self.lengths = []
        """Per file, the length of each dimension that the layout names."""
        for number in range(len(self.paths)):
            self.lengths.append(self._checked(number))
        self.close()  # loader workers are forked from here, and must not share a file position with this process

    def read(self, number: int, variable: str, where: Index = ...) -> FloatArray:
        """A slice of a variable of file ``number`` as float32, unpacked as CF conventions have it; missing values are NaN. Raises
        ``InputError`` where the file ends before the slice does, is damaged, or has no numbers there."""
        stored, values = self._stored(number, variable, where)
        result = np.asarray(values, dtype=np.float32)
        if stored.packed:
            result = result * np.float32(stored.scale) + np.float32(stored.offset)
        if stored.fill is not None:
            result = np.where(values == stored.fill, np.float32(np.nan), result)
        self.missing += int(np.isnan(result).sum())
        return result

    def texts(self, number: int, variable: str) -> list[str]:
        """A variable of strings. Errors as :meth:`read`."""
        _, values = self._stored(number, variable, ..., texts=True)
        return [str(value) for value in np.atleast_1d(values)]

    def _stored(self, number: int, variable: str, where: Index, *, texts: bool = False) -> tuple[_Variable, npt.NDArray[Any]]:
        """A variable, and a slice of it as it is stored: numbers, or ``texts``."""
        file = self._file(number)
        try:
            stored = file.variable(variable)
            if not texts and stored.data.dtype.kind not in "iufb":
                raise InputError(f"refused: found values of type {str(stored.data.dtype)[:100]}, expected numbers")
            _refuse_large(stored.data.shape, where)
            return stored, np.asarray((stored.data.asstr() if texts else stored.data)[where])
        except InputError as error:
            raise InputError(f"{self.paths[number]}: variable {variable!r}: {error}") from error
        except _DAMAGE as error:
            raise self._damaged(number, f"variable {variable!r}: {error}") from error

    def attribute(self, number: int, variable: str, name: str) -> npt.NDArray[np.float32] | None:
        """An attribute of a variable as an array, or ``None`` if the variable has none of this name."""
        file = self._file(number)
        try:
            value = file.layout.variables[variable].attrs.get(name)
            return None if value is None else np.atleast_1d(np.asarray(value, dtype=np.float32))
        except _DAMAGE as error:
            raise self._damaged(number, f"attribute {name!r} of {variable!r}: {error}") from error

    def close(self) -> None:
        """Close every open file; the next read opens its file again."""
        opened, self._open = self._open, OrderedDict()
        if self._owner == os.getpid():
            for file in opened.values():
                file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _file(self, number: int) -> _OpenFile:
        if self._owner != os.getpid():  # a forked loader worker: the parent's handles are not ours to use or to close
            self._open, self._owner = OrderedDict(), os.getpid()
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        try:
            self._open[number] = _OpenFile(self.paths[number])
        except _DAMAGE as error:
            raise self._damaged(number, str(error)) from error
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return self._open[number]

    def _checked(self, number: int) -> dict[str, int]:
        file, path = self._file(number).layout, self.paths[number]
        try:
            present = {name: (tuple(variable.dimensions), variable.shape) for name, variable in file.variables.items()}
        except _DAMAGE as error:
            raise self._damaged(number, str(error)) from error
        lengths: dict[str, int] = {}
        for name, expected in self.layout.variables.items():
            if name not in present:
                guess = nearest(name, present)
                raise InputError(f"{path}: no variable {name!r}; it has {', '.join(present)}", f"is it {guess!r}?" if guess else None)
            found, shape = present[name]
            if found != expected:
                raise InputError(f"{path}: {name}: found dimensions ({', '.join(map(str, found))}); expected ({', '.join(expected)})")
            lengths |= dict(zip(expected, shape, strict=True))
        for dimension, length in self.layout.lengths.items():
            if lengths[dimension] != length:
                raise InputError(f"{path}: dimension {dimension}: found {lengths[dimension]}; expected {length}")
        return lengths

    def _damaged(self, number: int, what: str) -> InputError:
        path = self.paths[number]
        what = what if path.exists() else "no such file"
        return InputError(f"{path}: not readable as NetCDF-4: {' '.join(what.split())}", "copy or write the file again")


def find_files(folder: Path, pattern: str) -> list[Path]:
    """The files of ``folder`` whose names match, sorted by name.

    Raises ``InputError`` if there is none, saying what is there, and for look-alikes that are not all written.
    """
    refuse_unfinished(folder / MARKS, folder)
    found = sorted(folder.glob(pattern))
    if not found:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: no file {pattern}; found {names or 'nothing'}", "write look-alikes with `caraml data prepare weather`")
    return found


def write_netcdf(
    path: Path,
    lengths: Mapping[str, int],
    variables: Mapping[str, tuple[tuple[str, ...], Any]],
    *,
    chunks: Mapping[str, tuple[int, ...]] | None = None,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Write one file and give its bytes: dimensions, and variables as ``name: (dimensions, values)``; strings become NetCDF strings.

    Of values that are ``None``, room for as many float32 in one piece.
    """
    with replacing_by_name(path, sync="none") as inside, h5netcdf.File(inside, "w") as file:
        file.dimensions = dict(lengths)
        for name, (dimensions, values) in variables.items():
            if values is None:
                shape = tuple(lengths[one] for one in dimensions)
                stored = file.create_variable(name, dimensions, np.dtype("<f4"))
                stored[tuple(length - 1 for length in shape)] = 0.0  # the file is as large as all of it from now on
                continue
            array = np.asarray(values)
            if array.dtype.kind == "U":
                array = array.astype(object)
                stored = file.create_variable(name, dimensions, h5py.string_dtype())
                stored[...] = array
            else:
                stored = file.create_variable(name, dimensions, array.dtype, data=array, chunks=(chunks or {}).get(name))
            for key, value in ((attributes or {}).get(name) or {}).items():
                stored.attrs[key] = value
    return path.stat().st_size
