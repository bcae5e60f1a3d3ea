"""Any program as a workload: its argument vector, its environment, and how its numbers are read. Nothing here is run by a shell.

Templates hold names of the point's parameters in braces, ``{n}`` or ``{n:04d}``, and nothing else: no attributes, no indices, no
expressions. Every key that is not one of the workload's own is such a parameter, may be swept like any other, and must be used.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from caraml.base.errors import InputError, nearest
from caraml.base.limits import COUNT, PATTERN
from caraml.base.toml import FrozenModel
from caraml.metrics.model import StatedMetric, check_stated
from caraml.suite.model import Point
from caraml.system.variables import is_reference
from caraml.workloads.base import BuildContext, Workload

Value = bool | int | float | str
Take = Literal["last", "first", "mean", "median", "sum", "min", "max"]

POINT_NAMES = ("nodes", "devices", "world", "mode", "precision", "global_batch", "micro_batch", "accumulation", "seed", "repeat")
"""What a template may name besides the parameters."""
FOLDERS = ("folder", "suite_folder")
"""The attempt's own folder, and the folder of the suite file."""
_LONGEST_FORMAT = 8


def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > PATTERN:
        raise ValueError(f"a regular expression of at most {PATTERN} characters, but found {len(pattern):,}")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"a regular expression, but {error}") from error


class MetricSpec(StatedMetric):
    """Where one number of the program is found, and what it is."""

    pattern: str | None = Field(None, description="regular expression; the number is its group `value`, or its first group")
    key: str | None = Field(
        None, description="key of the JSON objects that the program prints a line each, or of a JSON file; dots go inwards"
    )
    column: str | None = Field(None, description="column of a CSV file")
    file: str | None = Field(None, description="template of the file to read instead of what the program prints")
    take: Take = Field("last", description="which of several values, or what of them")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None and not _compiled(pattern).groups:
            raise ValueError("a regular expression with a group around the number")
        return pattern

    @model_validator(mode="after")
    def _one_way(self) -> MetricSpec:
        if sum(way is not None for way in (self.pattern, self.key, self.column)) != 1:
            raise ValueError("exactly one of pattern, key and column")
        if self.column is not None and self.file is None:
            raise ValueError("a file for the column")
        return self


class Marks(FrozenModel):
    """Regular expressions of the lines between which the window lies; the program must flush them as it prints them."""

    begin: Annotated[str, AfterValidator(lambda pattern: _compiled(pattern).pattern)]
    end: Annotated[str, AfterValidator(lambda pattern: _compiled(pattern).pattern)]


class Params(BaseModel):
    """Parameters of a command. Further keys are parameters of the program."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Value]

    argv: list[str] = Field(min_length=1, description="program and arguments, each a template")
    env: dict[str, str] = Field({}, description="environment variables, each a template")
    cwd: str = Field("{suite_folder}", description="where the program starts, a template")
    item: str = Field("run", min_length=1, description="what is counted")
    items: int | str = Field(
        1, description="how many of them the window does: a whole number, or a template that gives one, or a metric's name"
    )
    metrics: dict[str, MetricSpec] = Field({}, description="the program's numbers, by name")
    marks: Marks | None = Field(None, description="lines between which the window lies; without them it is the whole run")
    energy: bool = Field(True, description="read the power sensors; without, thousands of short runs cost next to nothing")

    @model_validator(mode="after")
    def _whole(self) -> Params:
        _check_templates(tuple(self.templates()), tuple(self.__pydantic_extra__), tuple(type(self).model_fields))
        _check_formats(tuple(self.templates()), self.__pydantic_extra__)
        if isinstance(self.items, int) and not 1 <= self.items <= COUNT:
            raise ValueError(f"items from 1 to {COUNT:.0e}, but found {self.items}")
        check_stated(self.metrics, self.item)
        return self

    def templates(self) -> Iterator[str]:
        """Every template."""
        yield from self.argv
        yield from self.env.values()
        yield self.cwd
        yield from (spec.file for spec in self.metrics.values() if spec.file is not None)
        if isinstance(self.items, str):
            yield self.items


@lru_cache(maxsize=256)
def _check_templates(templates: tuple[str, ...], parameters: tuple[str, ...], own: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for a name that no template may use, and for a parameter that none does."""
    known = (*parameters, *POINT_NAMES, *FOLDERS)
    used = {name for text in templates for _, name, _ in fields(text) if name is not None}
    for name in used.difference(known):
        guess = nearest(name, known)
        raise ValueError(f"templates over {', '.join(known)}, but found {{{name}}}" + (f" (did you mean {{{guess}}}?)" if guess else ""))
    for name in parameters:
        if name not in used:
            guess = nearest(name, own)
            hint = f"did you mean {guess!r}?" if guess else f"put {{{name}}} where it belongs"
            raise ValueError(f"parameters that a template uses, but {name!r} stands in none ({hint})")


def _check_formats(templates: tuple[str, ...], parameters: Mapping[str, Value]) -> None:
    """Raise ``ValueError`` for a format that what is named does not have, such as ``{x:04d}`` of 0.5."""
    values = {**dict.fromkeys(POINT_NAMES, 1), **dict.fromkeys(("mode", "precision", *FOLDERS), ""), **parameters}
    for text in templates:
        for _, name, form in fields(text):
            if form and name is not None:
                try:
                    format(values[name], form)
                except (ValueError, TypeError, OverflowError) as error:
                    raise ValueError(f"a format for {values[name]!r}, but found {{{name}:{form}}}: {error}") from None


@lru_cache(maxsize=1024)
def fields(template: str) -> list[tuple[str, str | None, str]]:
    """The parts of a template: text, the name that follows it (or ``None``) and its format. Raises ``ValueError``."""
    parts = []
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError:
        raise ValueError(f"{{{{ or }}}} for a brace that begins or ends no name, but found {template!r}") from None
    for text, name, form, conversion in parsed:
        if name is not None:
            if not name.isidentifier():
                raise ValueError(f"only plain names in braces, {{{{ and }}}} for braces themselves, but found {{{name}}} in {template!r}")
            if conversion or "{" in (form or "") or len(form or "") > _LONGEST_FORMAT:
                raise ValueError(f"a plain format behind the name, but found {template!r}")
        parts.append((text, name, form or ""))
    return parts


def filled(template: str, names: Mapping[str, Any]) -> str:
    """A template with its names replaced."""
    return "".join(text + (format(names[name], form) if name is not None else "") for text, name, form in fields(template))


def names_of(point: Point, params: Params, folder: Path | str, suite_folder: str) -> dict[str, Any]:
    """What the templates of a point may name."""
    own = {name: getattr(point, name) for name in POINT_NAMES}
    return {**own, **params.__pydantic_extra__, "folder": str(folder), "suite_folder": suite_folder}


def filled_command(params: Params, names: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Arguments, those variables that may be shown, and folder of a program, with the templates filled in."""
    argv = [filled(word, names) for word in params.argv]
    env = {name: filled(text, names) for name, text in params.env.items() if not is_reference(text)}
    return argv, env, filled(params.cwd, names)


def references(params: Params) -> list[str]:
    """Names of a program's variables whose values are elsewhere."""
    return [name for name, text in params.env.items() if is_reference(text)]


def _no_task(context: BuildContext[Params]) -> NoReturn:
    raise InputError("a command is not trained by the engine", "python -m caraml.worker.command FOLDER")


WORKLOAD = Workload(title="any program, measured from outside", params=Params, build=_no_task)
