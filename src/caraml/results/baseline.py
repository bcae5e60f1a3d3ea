"""What a user accepted as reference: the runs of a campaign by number, in one small file, ``ROOT/baselines/NAME.json``.

Points are known by their work and not by their key, which changes with every version of the software. The file is text that anybody may
have written: its size, its counts and its numbers are limited, and nothing in it is ever run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from caraml.base.errors import InputError, in_a_line, unknown_name
from caraml.base.files import make_folder, who_else, write_file
from caraml.base.limits import FLAGS, LARGEST, LISTING, METRICS, NAME, POINTS, counted, read_json

SCHEMA_VERSION = 1
FOLDER = "baselines"
NAMES = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What a baseline may be called."""

Text = Annotated[str, Field(max_length=NAME)]
Positive = Annotated[float, Field(gt=1 / LARGEST, lt=LARGEST)]
Share = Annotated[float, Field(ge=0, le=100)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class AcceptedRun(_Part):
    """One number of one accepted run."""

    value: Positive
    error: Share | None = Field(None, description="relative standard error by the record's own interval")
    bound: Share = Field(0.0, description="how far the logarithm may be off because of the sensor")
    accuracy: Share = Field(0.0, description="systematic relative error of the sensor")
    sensors: Text | None = None
    host: Text = ""
    time: Text | None = Field(None, description="when the run started, ISO 8601 with offset")


class AcceptedMetric(_Part):
    """One number of one point."""

    unit: Text
    scope: Text | None = Field(None, description="energy boundary")
    mean: Positive | None = Field(None, description="geometric mean of the runs")
    low: Positive | None = Field(None, description="lower end of the mean's 95 % interval by what the runs vary")
    high: Positive | None = Field(None, description="upper end")
    runs: list[AcceptedRun] = Field(max_length=POINTS, fail_fast=True)


class AcceptedPoint(_Part):
    """All repeats of one piece of work."""

    work: str = Field(pattern=r"^[0-9a-f]{16}$", description="hash of everything that decides the work; neither machine nor software")
    label: Text
    reason: Text | None = Field(None, description="why there was no result, where there was none")
    flags: list[Text] = Field([], max_length=FLAGS, fail_fast=True, description="flags that accepted runs have")
    metrics: dict[Text, AcceptedMetric] = Field({}, max_length=METRICS)


class Baseline(_Part):
    """An accepted campaign."""

    schema_version: int = SCHEMA_VERSION
    method_version: int = Field(description="of the measurement: numbers of different methods do not compare")
    name: str = Field(pattern=f"^{NAMES}$")
    suite: Text
    accepted_at: Text
    newest_run: Text = Field(description="when the newest accepted run started")
    machine: dict[Text, Text] = Field(max_length=METRICS, description="what makes a machine another one")
    facts: dict[Text, Text] = Field({}, max_length=METRICS, description="versions, driver, settings: what may have changed since")
    points: list[AcceptedPoint] = Field(min_length=1, max_length=POINTS, fail_fast=True)


def place(root: Path, name: str) -> Path:
    """The file of a baseline."""
    return root / FOLDER / f"{name}.json"


def write_baseline(root: Path, baseline: Baseline) -> Path:
    """Keep a baseline, whole or not at all. Raises ``InputError`` where it is too large to be read again."""
    path = place(root, baseline.name)
    content = baseline.model_dump_json(indent=1, exclude_none=True)
    counted(content.encode(), path)
    make_folder(path.parent)
    write_file(path, content)
    return path


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises ``InputError`` for a file that is none, or one written by a newer CARAML."""
    content = read_json(path, LISTING)
    try:
        found = _Version.model_validate_json(content).schema_version
        if found > SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this CARAML reads up to {SCHEMA_VERSION}", "pip install --upgrade caraml")
        return Baseline.model_validate_json(content)
    except (ValidationError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a baseline: {in_a_line(error)}", "caraml accept CAMPAIGN --as NAME --replace") from error


def who_wrote(root: Path, name: str) -> tuple[str, ...]:
    """What to know about who may have written a baseline; nothing where only this user can have."""
    path = place(root, name)
    who = who_else(str(path), path.stat()) or who_else(str(path.parent), path.parent.stat())
    return (f"{path}: {who}: the reference may be theirs",) if who else ()


class _Version(_Part):
    schema_version: int = SCHEMA_VERSION


def find_baseline(root: Path, name: str) -> Baseline:
    """The baseline of a name, which its file has: a copy under another name is none.

    Raises:
        InputError: there is none of that name, or its file is wrong or says that it is another.
    """
    path = place(root, name)
    if not re.fullmatch(NAMES, name) or not path.exists():
        raise unknown_name("baseline", name, (one.stem for one in path.parent.glob("*.json")))
    baseline = read_baseline(path)
    if baseline.name != name:
        raise InputError(f"{path}: found name {baseline.name!r}, expected {name!r}: a copy, or renamed", f"--baseline {baseline.name}")
    return baseline
