"""TOML files checked against a pydantic model, with every fault at once and the line it is on.

``read_toml(path).validate(model)`` is what most callers need. Those that check more than one model can say collect ``document.fault(...)``
and ``document.faults(...)`` and end with ``document.refuse(faults)``.

TOML already has types, so values are checked strictly: ``"4"`` is no integer and ``1`` is no boolean. An array may fill a tuple or a
set, a string a path or an enum.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from caraml.base.errors import InputError, nearest
from caraml.base.limits import DEPTH, FAULTS, KEY, LARGEST, TOML, VALUES, is_measurable, read_text, too_large
from caraml.base.toml_lines import Location, key_lines

Model = TypeVar("Model", bound=BaseModel)

_DEEP = re.compile(rf"""^[ \t]*\[{{0,2}}(?:[ \t]*(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.){{{DEPTH}}}""", re.MULTILINE)
"""A dotted key of more parts than are read: found before parsing, which takes as long for each key below it."""
_CONCERNS = "; concerns "
_LONGEST_FOUND = 60
"""Characters of a faulty value that are shown."""


class FrozenModel(BaseModel):
    """What was read or is to be written: no unknown keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FaultsError(InputError):
    """A document has faults; ``rest`` is the document without them, where it may have others that were not looked for yet."""

    faults: list[str]
    rest: TomlDocument | None


@dataclass(frozen=True)
class TomlDocument:
    """A TOML file that parsed: its name as shown in errors, its content, and the line on which each key stands (from 1)."""

    name: str
    data: dict[str, Any]
    lines: dict[Location, int] = field(repr=False)
    text: str = field(default="", repr=False)
    others: dict[Location, str] = field(default_factory=dict, repr=False)
    """Names of the files that parts of the content come from, where that is not this one."""
    settings: dict[str, str] = field(default_factory=dict, repr=False)
    """By the key of a benchmark that was set by hand, what was said: its faults are told of that, once for all benchmarks."""

    def line(self, location: Location) -> int:
        """The line of ``location``; if that is not in the file, the line of the closest table or array around it."""
        return self.lines.get(self._around(location), 1)

    def _around(self, location: Location) -> Location:
        while location and location not in self.lines:
            location = location[:-1]
        return location

    def fault(self, location: Location, found: object, expected: str, guess: str | None = None) -> str:
        """One fault in words: ``file:line: key: found X, expected Y (did you mean Z?)``. A ``found`` of ``None`` is an absent key."""
        suggestion = f" (did you mean {guess!r}?)" if guess else ""
        if (setting := self._set_by_hand(location)) is not None:
            name = self._inside(location[:2]).get("name")
            return f"--set {setting}: found {shown(found)}, expected {expected}{suggestion}{_CONCERNS}{name}"
        return self.told(location, f"found {shown(found)}, expected {expected}{suggestion}")

    def told(self, location: Location, words: str) -> str:
        """What is said of a place: ``file:line: key: words``."""
        line, name = self.line(location), self.others.get(self._around(location), self.name)
        where = f"{name}:{line}" if line else name
        return f"{where}: {key_name(location)}: {words}" if line or location else f"{where}: {words}"

    def _set_by_hand(self, location: Location) -> str | None:
        """What put the value there, if it was said by hand: for a key of a benchmark, or of one of its overrides."""
        keys = location[4:] if location[2:3] == ("on",) else location[2:]
        names = [".".join(map(str, keys[:depth])) for depth in (1, 2)]
        return next((self.settings[name] for name in names if name in self.settings), None)

    def validate(self, model: type[Model]) -> Model:
        """The document as a ``model``.

        Raises:
            InputError: the document breaks the model; the message lists every fault.
        """
        floats = [(location, value) for location, value in _values(self.data) if isinstance(value, float) and math.isfinite(value)]
        expected = f"0 or a size between {1 / LARGEST:g} and {LARGEST:g}"  # what records with it could be read again
        if faults := [self.fault(location, value, expected) for location, value in floats if not is_measurable(value)]:
            self.refuse(faults)
        try:
            return model.model_validate_json(json.dumps(self.data, default=_plain), strict=True)
        except ValidationError as error:
            self.refuse(self.faults(error, model), self._without(error, model))

    def _without(self, error: ValidationError, model: type[BaseModel]) -> TomlDocument:
        """The document without the keys that are wrong, as a whole where they are lists; a text that is missing is its own key."""
        data = copy.deepcopy(self.data)
        for item in error.errors(include_url=False)[:FAULTS]:
            location = Fault.of(item, model, self.data).location
            names = [index for index, step in enumerate(location) if isinstance(step, str)]
            part: Any = data
            with suppress(KeyError, IndexError, TypeError):
                for step in location[: names[-1]]:
                    part = part[step]
                key = str(location[names[-1]])
                if item["type"] != "missing":
                    del part[key]
                elif (owner := owner_of(model, item["loc"][:-1])) is not None and owner.model_fields[key].annotation is str:
                    part[key] = key
        return replace(self, data=data)

    def faults(self, error: ValidationError, model: type[BaseModel], prefix: Location = ()) -> list[str]:
        """Every fault of ``error``, in file order; ``prefix`` is where in the document the part stands that ``model`` validated."""
        raw = [Fault.of(item, model, self._inside(prefix), prefix) for item in error.errors(include_url=False)[: 2 * FAULTS]]
        typos = {(*fault.location[:-1], fault.guess) for fault in raw if fault.kind == "extra_forbidden" and fault.guess}
        around = {fault.location[:depth] for fault in raw for depth in range(len(fault.location))}
        merged: dict[Location, Fault] = {}
        for fault in raw:
            if fault.kind == "missing" and fault.location in typos:
                continue  # the misspelt key is reported already, with this one as the suggestion
            if fault.kind == "too_short" and fault.location in around:
                continue  # pydantic does not count the entries that have faults of their own
            if isinstance(fault.found, list) and fault.kind in (*_EXPECTED, "literal_error") and fault.location in around:
                continue  # it may be no array, and is one with faults in it
            known = merged.get(fault.location)
            merged[fault.location] = known.or_else(fault) if known else fault
        ordered = sorted(merged.values(), key=lambda fault: self.line(fault.location))
        return [self.fault(fault.location, fault.found, fault.expected, fault.guess) for fault in ordered[:FAULTS]]

    def refuse(self, faults: list[str], rest: TomlDocument | None = None) -> NoReturn:
        """Raise the ``InputError`` that lists ``faults``; ``rest`` is the document without what is wrong, in which more may be found."""
        more = ["..."] if len(faults) >= FAULTS else []
        faults = _each_once(faults)
        lines = [f"{len(faults)} faults{' or more' if more else ''} in {self.name}", *faults[:FAULTS], *more]
        error = FaultsError(faults[0] if len(faults) == 1 else "\n  ".join(lines))
        error.faults, error.rest = faults, rest
        raise error

    def _inside(self, location: Location) -> Any:
        part: Any = self.data
        for step in location:
            part = part[step]
        return part


def _each_once(faults: list[str]) -> list[str]:
    """Faults of what was set by hand once, with all benchmarks that they concern."""
    found: dict[str, list[str]] = {}
    for fault in faults:
        words, _, name = fault.partition(_CONCERNS)
        found.setdefault(words, []).extend([name] if name else [])
    return [words + (_CONCERNS + ", ".join(dict.fromkeys(names)) if names else "") for words, names in found.items()]


def checked(name: str, values: dict[str, Any], model: type[Model]) -> Model:
    """Arguments of a call named ``name`` as an instance of ``model``. Raises ``InputError`` with every fault at once, as of a file."""
    try:
        return TomlDocument(name=name, data=values, lines={(): 0}).validate(model)
    except (TypeError, ValueError) as error:  # what no file can have: an object, a loop
        raise InputError(f"{name}: expected text, numbers, lists and tables only: {error}") from error


def read_toml(path: Path | str) -> TomlDocument:
    """The TOML file ``path``, parsed but not yet checked against anything.

    Raises:
        InputError: the file is missing, unreadable, or no TOML.
    """
    path = Path(path)
    try:
        text = read_text(path, TOML)
    except FileNotFoundError:
        guess = nearest(path.name, (other.name for other in path.parent.glob("*.toml")))
        raise InputError(f"{path}: no such file", f"did you mean {str(path.with_name(guess))!r}?" if guess else None) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: found a byte that is not UTF-8 at offset {error.start}, expected UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, name: str) -> TomlDocument:
    """The TOML ``text`` as a document called ``name`` in errors.

    Raises:
        InputError: the text is no TOML; the message has the line and the column.
    """
    if len(text) > TOML:
        raise too_large(name, len(text), TOML, "characters")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")  # some editors begin UTF-8 with a mark
    if (deep := _DEEP.search(text)) is not None:
        raise _too_deep(name, text.count("\n", 0, deep.start()) + 1)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(_syntax_fault(str(error), text, name)) from None
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{name}: not valid TOML: {error}") from None
    _check_shape(data, name)
    document = TomlDocument(name=name, data=data, lines=key_lines(text), text=text)
    places = (location for location, value in _values(data) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63)
    if faults := [document.told(location, "found an integer of more than 64 bits, which TOML does not have") for location in places]:
        document.refuse(faults)
    return document


def _values(part: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Every value that is no table and no array, with its place."""
    if not isinstance(part, dict | list):
        yield location, part
        return
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield from _values(value, (*location, key))


def _check_shape(data: dict[str, Any], name: str) -> None:
    """Raise ``InputError`` for a document that is deeper, has more values, or longer keys, than a person writes."""
    values = 0
    layer: list[Any] = [data]
    for _ in range(DEPTH):
        values += sum(map(len, layer))
        if values > VALUES:
            raise too_large(name, values, VALUES, "values")
        keys = (key for part in layer if isinstance(part, dict) for key in part)
        if (longest := max(keys, key=len, default="")) and len(longest) > KEY:
            raise too_large(name, len(longest), KEY, f"characters in the key {longest[:20]!r}...")
        inside = [value for part in layer for value in (part.values() if isinstance(part, dict) else part)]
        layer = [value for value in inside if isinstance(value, dict | list)]
        if not layer:
            return
    raise _too_deep(name)


def _too_deep(name: str, line: int | None = None) -> InputError:
    return InputError(f"{name}{f':{line}' if line else ''}: found tables and arrays more than {DEPTH} deep, at most {DEPTH} are read")


def key_name(location: Location) -> str:
    """A location as a user writes it: ``("benchmark", 0, "sweep")`` is ``benchmark[0].sweep``; the whole file is ``(file)``."""
    name = ""
    for step in location:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name or "(file)"


def shown(value: object) -> str:
    """A value as an error shows it: TOML spelling, cut to 60 characters; ``nothing`` for ``None``; a table by its keys."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        text = "a table with " + (", ".join(map(str, value)) or "no keys")
    elif isinstance(value, float) and not math.isfinite(value):  # which json spells in another way
        text = str(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_FOUND else text[: _LONGEST_FOUND - 3] + "..."


def _plain(value: object) -> str:
    """TOML's dates and times, which JSON lacks, as text that pydantic reads back."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise TypeError(f"found a {type(value).__name__}")


def _syntax_fault(message: str, text: str, name: str) -> str:
    """tomllib's message with its position moved to the front, where editors look for it."""
    at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if at:
        hint = " (text stands in quotes; true and false are small)" if message.startswith("Invalid value") else ""
        return f"{name}:{at[1]}: not valid TOML at column {at[2]}: {message[: at.start()]}{hint}"
    last_line = max(len(text.splitlines()), 1)
    return f"{name}:{last_line}: not valid TOML: {message}"


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "a string in quotes",
    "list_type": "an array",
    "tuple_type": "an array",
    "set_type": "an array",
    "frozen_set_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "missing": "a value: this key is required",
}
"""What pydantic's most frequent error types say in the words of a TOML file."""


def expected_of(error: Any) -> tuple[str, str | None]:
    """What one of ``ValidationError.errors()`` expected, in words, and what its input is nearest to of several that it may be."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("too_short", "too_long"):
        count = context.get("min_length", context.get("max_length"))
        return f"at {'least' if kind == 'too_short' else 'most'} {count} entr{'y' if count == 1 else 'ies'}", None
    if kind == "string_too_short":
        return "text that is not empty", None
    if kind == "string_pattern_mismatch":
        return f"text of the form {context['pattern']}", None
    if kind == "list_type" and error["loc"] == ("benchmark",):
        return "an array: [[...]] begins each of its tables", None
    guess = nearest(str(error["input"]), re.findall(r"'([^']+)'", str(context.get("expected"))))
    expected = _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be ").removeprefix("Value error, ").removeprefix("expected ")
    return expected, guess


@dataclass(frozen=True)
class Fault:
    """One pydantic error, its location translated to the document."""

    location: Location
    kind: str
    found: object
    expected: str
    guess: str | None

    @staticmethod
    def of(error: Any, model: type[BaseModel], data: Any, prefix: Location = ()) -> Fault:
        """Translate one of ``ValidationError.errors()``; ``data`` is what was validated."""
        kind, found = error["type"], error["input"]
        location = _in_document(error["loc"], data, kind)
        if kind == "extra_forbidden":
            owner = owner_of(model, error["loc"][:-1])
            names = list(owner.model_fields) if owner else []
            expected = f"one of the keys {', '.join(names)}" if names else "no such key"
            guess = nearest(str(error["loc"][-1]).lower(), names)
        else:
            expected, guess = expected_of(error)
        return Fault((*prefix, *location), kind, None if kind == "missing" else found, expected, guess)

    def or_else(self, other: Fault) -> Fault:
        """Two branches of a union failed on the same value: it may be what either expects."""
        if other.expected in self.expected:
            return self
        return Fault(self.location, self.kind, self.found, f"{self.expected} or {other.expected}", self.guess or other.guess)


def _in_document(loc: tuple[int | str, ...], data: Any, kind: str) -> Location:
    """A pydantic location without the steps that are not in the document (types of a union, names of validators)."""
    location: list[int | str] = []
    for position, step in enumerate(loc):
        in_table = isinstance(data, dict) and step in data
        in_array = isinstance(data, list) and isinstance(step, int) and step < len(data)
        if in_table or in_array:
            data = data[step]
        elif not (kind == "missing" and position == len(loc) - 1):
            continue
        location.append(step)
    return tuple(location)


def owner_of(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model that the table at ``loc`` is checked against, or ``None`` where the types do not tell."""
    annotation: Any = model
    for step in loc:
        inner = _model_in(annotation)
        if inner is not None and step in inner.model_fields:
            annotation = inner.model_fields[str(step)].annotation
        elif annotation is inner:
            return None
        # otherwise an index or a key of a mapping: the model behind it stays the same
    return _model_in(annotation)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model that a type annotation names: none of ours names two."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _model_in(argument)) is not None), None)
