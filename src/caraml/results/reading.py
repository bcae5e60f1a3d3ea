"""Reading of records, also of those that are damaged or newer: each verb goes on with the others, and none takes them for anything else."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import FailFast, TypeAdapter, ValidationError

from caraml.base.errors import NEWER, UNREADABLE, InputError, in_a_line
from caraml.base.limits import NAME, counted, is_measurable, read_json, too_large
from caraml.base.limits import RECORD as RECORD_BYTES

if TYPE_CHECKING:  # as in :mod:`caraml.results.store`
    from caraml.results.record import Record
    from caraml.suite.model import Point

POINT = "point.json"
_MANY = 1000
"""Objects in a record above which it is looked at twice."""


@lru_cache(maxsize=1)
def _channels() -> TypeAdapter[Any]:
    from caraml.power.model import ChannelEnergy

    return TypeAdapter(Annotated[list[ChannelEnergy], FailFast()])


def _look_at_channels(record: dict[str, Any]) -> None:
    """Raise ``ValidationError`` for the first wrong channel of an energy: the model would tell all faults of all, in gigabytes."""
    nodes = record.get("nodes")
    for part in (record, *(nodes if isinstance(nodes, list) else [])):
        for name in ("energy", "idle") if isinstance(part, dict) else ():
            energy = part.get(name)
            if isinstance(energy, dict):
                _channels().validate_python(energy.get("channels", []))


def _number(text: str) -> float:
    """A number of a record. Raises ``ValueError`` for one whose products or inverse are none."""
    value = float(text)
    if not is_measurable(value):
        raise ValueError(f"found {text:.40}, which nobody measured")
    return value


def _refuse_long_names(record: Record, path: Path | str) -> None:
    """Raise ``InputError`` for names that fill tables and pages."""
    units = (word for name, metric in record.metrics.items() for word in (name, metric.unit))
    longest = max(map(len, (*_names_of(record.point), record.item, record.started_at, *units)))
    if longest > NAME:
        raise too_large(path, longest, NAME, "characters of a name")


def read_record(path: Path) -> Record:
    """Read one record. Raises ``InputError`` for a file that is not a record, or one written by a newer CARAML."""
    return _parsed(read_json(path, RECORD_BYTES), path)


def record_of(path: Path) -> Record:
    """The record of an attempt in a store. In the place of one that cannot be read it is one of status ``invalid``, whose reason has the
    file, what is wrong and the next step: no earlier attempt has the result of that point, and no campaign measures it again unasked.
    """
    try:
        return read_record(path)
    except InputError as error:
        what, hint = str(error.args[0]).removeprefix(f"{path}: "), error.hint
    except (PermissionError, IsADirectoryError) as error:
        what, hint = str(error.strerror), "have its owner open it to you"
    from caraml.results.record import Record

    workload, _, key = path.parent.parent.name.rpartition("-")
    changed = datetime.fromtimestamp(path.lstat().st_mtime, UTC).isoformat(timespec="seconds")
    reason = f"{UNREADABLE}{'/'.join(path.parts[-4:])}: {what}; next step: {hint or f'caraml retry {key} measures its point again'}"
    return Record(
        key=key, attempt=int(path.parent.name), point=_point_of(path, workload, key), status="invalid", reason=reason, started_at=changed
    )


def _point_of(path: Path, workload: str, key: str) -> Point:
    """The point of a record that cannot be read, as the file beside it or the rest of it says; else one of which nothing is known."""
    from caraml.suite.model import NOT_STATED, Point

    for file, part in ((path.with_name(POINT), None), (path, "point")):
        with suppress(InputError, OSError, ValueError, TypeError, LookupError, RecursionError):
            found = json.loads(read_json(file))
            point = Point.model_validate(found if part is None else found[part])
            if point.workload == workload and max(map(len, _names_of(point))) <= NAME:
                return point
    unknown = dict.fromkeys(("system", "device", "software", "precision"), NOT_STATED)
    work = {"suite": "", "benchmark": workload, "workload": workload, "variant": f"key={key}", "params": {"key": key}}
    return Point.model_validate({**unknown, **work, "device_class": "cpu", "global_batch": 1, "micro_batch": 1})


def _names_of(point: Point) -> tuple[str, ...]:
    return point.label, point.suite, point.system, point.device, point.software


def see_readable(record: Record, name: str) -> None:
    """Raise ``InputError``, which begins with ``name``, for a record that :func:`read_record` would refuse once it is written."""
    text = record.model_dump_json(indent=1).encode()
    if len(text) > RECORD_BYTES:
        raise too_large(name, len(text), RECORD_BYTES)
    _parsed(counted(text, name), name)


def _parsed(text: bytes, path: Path | str) -> Record:
    from caraml.results.record import SCHEMA_VERSION, Record

    try:
        content = json.loads(text, parse_float=_number)
        found = content.get("schema_version")
        if isinstance(found, int) and found > SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this CARAML reads up to {SCHEMA_VERSION}", NEWER)
        if text.count(b"{") > _MANY:
            _look_at_channels(content)
        del content
        record = Record.model_validate_json(text)
        _refuse_long_names(record, path)
        return record
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a CARAML record: {in_a_line(error)}") from error
