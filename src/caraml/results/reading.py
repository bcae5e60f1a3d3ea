"""Reading of records, also of those that are damaged or newer: each verb goes on with the others, and none takes them for anything else."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import FailFast, TypeAdapter, ValidationError

from caraml import __version__
from caraml.base.errors import NEWER, UNREADABLE, InputError, in_a_line
from caraml.base.files import AWAY
from caraml.base.format import printable
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
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in AWAY:
            raise
        what, hint = str(error.strerror), "have its owner open it to you" if isinstance(error, PermissionError) else None
    from caraml.results.record import Record
    from caraml.suite.model import OWN_LOOP

    workload, _, key = path.parent.parent.name.rpartition("-")
    point = _point_of(path, workload, key)
    again = f"caraml retry {key} measures its point again"
    again = "import its table again" if point.imported else "run its loop again" if workload == OWN_LOOP else again
    reason = f"{UNREADABLE}{'/'.join(path.parts[-4:])}: {what}; next step: {hint or again}"
    return Record(
        key=key, attempt=int(path.parent.name), point=point, status="invalid", reason=printable(reason), started_at=_changed(path)
    )


def _changed(path: Path) -> str:
    """When a file last changed, or its folder where that is closed: not before 1970, nor after now."""
    for place in (path, *path.parents[:2]):
        with suppress(PermissionError):
            when = min(max(place.lstat().st_mtime, 0), time.time())
            return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")
    return datetime.fromtimestamp(0, UTC).isoformat(timespec="seconds")


def _point_of(path: Path, workload: str, key: str) -> Point:
    """The point of a record that cannot be read, as the file beside it or the rest of it says; else one of which nothing is known."""
    from caraml.suite.model import NOT_STATED, Point

    for file, part in ((path.with_name(POINT), None), (path, "point")):
        with suppress(InputError, OSError, ValueError, TypeError, LookupError, RecursionError):
            found = json.loads(read_json(file), parse_float=_number)
            point = Point.model_validate_json(json.dumps(found if part is None else found[part]))
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

    written: str | None = None
    try:
        content = json.loads(text, parse_float=_number)
        found = content.get("schema_version")
        if isinstance(found, int) and found > SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this CARAML reads up to {SCHEMA_VERSION}", NEWER)
        written = _newer(content)
        if text.count(b"{") > _MANY:
            _look_at_channels(content)
        del content
        record = Record.model_validate_json(text)
        _refuse_long_names(record, path)
        return record
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        what = f"of CARAML {written}, and this is {__version__}" if written else "not a CARAML record"
        raise InputError(f"{path}: {what}: {in_a_line(error)}", NEWER if written else None) from error


def _newer(record: dict[str, Any]) -> str | None:
    """The version of CARAML that wrote a record, if it is newer than this one: it may have fields that this one does not know."""
    with suppress(LookupError, TypeError):
        written = record["environment"]["versions"]["caraml"]
        numbers = [[int(number) for number in re.findall(r"\d{1,9}", text)[:3]] for text in (written, __version__)]
        return f"{written:.40}" if numbers[0] > numbers[1] else None
    return None
