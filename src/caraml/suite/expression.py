"""The small language of `where` conditions: arithmetic, comparisons, and/or/not, over the names of a point.

Parsed with :mod:`ast` and walked over an allow-list of nodes, so that a suite file from elsewhere is data and never code.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin

from caraml.base.errors import InputError, nearest
from caraml.suite.model import Knobs, Placement, Point

if TYPE_CHECKING:
    from pydantic import BaseModel

    from caraml.suite.placement import Machine

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}
_ALLOWED = "names, numbers, text in quotes, lists, + - * / // %, comparisons (==, !=, <, ...), in, and, or, not"
_MEANT = dict.fromkeys(("batch", "batchsize", "bs"), "global_batch") | {"gpus": "devices", "ranks": "world", "dtype": "precision"}
"""What other programs call the names of a point, where another of ours is spelt alike."""
_OF_POINT = ("nodes", "devices", "world", "dp", "mode", "precision", "compile", "global_batch", "micro_batch", "accumulation")
_UNLESS_PARAMETERS = ("seed", "deterministic", "profile")
"""Names of a point that a parameter may have as well, which then is meant."""
NAMES = (*_OF_POINT, *_UNLESS_PARAMETERS, "device_class", "device_memory_gib")
"""What a `where` condition may speak of besides parameters, placement and knobs."""


def condition_names(point: Point, model: type[BaseModel], machine: Machine) -> dict[str, Any]:
    """What a `where` condition may speak of; ``model`` has the parameters, of which a point may lack those with their default."""
    own = {name: getattr(point, name) for name in _OF_POINT}
    defaults = {name: getattr(point, name) for name in _UNLESS_PARAMETERS} | _defaults(model)
    machine_s = {"device_class": machine.device_class, "device_memory_gib": machine.device_memory_gib or 0.0}
    return {**defaults, **point.params, **dict(point.placement), **dict(point.knobs), **own, **machine_s}


@cache
def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    return {name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items() if not field.is_required()}


def known_texts(models: Iterable[type[BaseModel]], own: Iterable[str] = ()) -> dict[str, frozenset[str]]:
    """The texts that a condition can find under each name that has only some, as ``mode``, or none, as ``nodes``; ``own``: parameters of
    programs, of any text."""
    found: dict[str, frozenset[str] | None] = {}
    for model in (*models, Placement, Knobs):
        for name, texts in _texts_of_fields(model).items():
            before = found.get(name, frozenset())
            found[name] = None if before is None or texts is None else before | texts
    found |= dict.fromkeys(own)
    found |= {name: _texts_of_fields(Point)[name] for name in ("mode", "precision", "compile", "device_class")}
    found |= dict.fromkeys(set(NAMES).difference(found), frozenset())  # the others of a point are numbers
    return {name: texts for name, texts in found.items() if texts is not None}


@cache
def _texts_of_fields(model: type[BaseModel]) -> dict[str, frozenset[str] | None]:
    return {name: _texts_of(field.annotation) for name, field in model.model_fields.items()}


def _texts_of(kind: Any) -> frozenset[str] | None:
    """The texts that values of a type can be; ``None`` for any."""
    if get_origin(kind) is Literal:
        return frozenset(value for value in get_args(kind) if isinstance(value, str))
    if get_origin(kind) in (Union, UnionType):
        parts = [_texts_of(part) for part in get_args(kind)]
        return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    return frozenset() if kind in (bool, int, float, NoneType) else None


class Condition:
    """A parsed condition. Raises ``InputError`` when the text is not in the language."""

    longest = 500
    allowed: tuple[type[ast.AST], ...] = (
        ast.BoolOp, ast.And, ast.Or, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple
    )  # fmt: skip

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > self.longest:
            raise InputError(f"condition of {len(text)} characters; the longest allowed is {self.longest}")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last of thousands of signs before a number
            why = error.msg if isinstance(error, SyntaxError) else str(error) or "too much within each other"  # a condition has one line
            one_sign = "== to compare, " if re.search(r"(?<![=!<>])=(?!=)", text) else ""
            raise InputError(f"condition {text!r} cannot be read: {why}", f"use {one_sign}{_ALLOWED}") from error
        self._check(self._tree)

    @property
    def names(self) -> set[str]:
        return {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}

    def know(self, known: Iterable[str]) -> None:
        """Raise ``InputError`` where it mentions a name that is none of these."""
        for name in sorted(self.names):
            self._lookup(name, dict.fromkeys(known))

    def see_texts(self, known: Mapping[str, Collection[str]]) -> None:
        """Raise ``InputError`` where a name is compared with a text that it never is; ``known``: all texts of names that have only some."""
        for node in (node for node in ast.walk(self._tree) if isinstance(node, ast.Compare)):
            operands = [node.left, *node.comparators]
            for op, pair in zip(node.ops, pairwise(operands), strict=True):
                if isinstance(op, ast.In | ast.NotIn) and not isinstance(pair[1], ast.List | ast.Tuple):
                    continue  # a part of a text
                names = [one.id for one in pair if isinstance(one, ast.Name) and one.id in known]
                parts = [part for one in pair for part in (one.elts if isinstance(one, ast.List | ast.Tuple) else [one])]
                found = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                for name, text in ((name, text) for name in names for text in found if text not in known[name]):
                    guess, texts = nearest(text, sorted(known[name])), ", ".join(sorted(known[name]))
                    no_text = "numbers, True and False stand without quotes"
                    hint = f"did you mean {guess!r}?" if guess else f"it is one of {texts}" if texts else no_text
                    raise InputError(f"condition {self.text!r}: {name} is never {text!r}", hint)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition is true for these values. Raises ``InputError`` for an unknown name or impossible operation."""
        try:
            return bool(self._evaluate(self._tree, values))
        except (TypeError, ZeroDivisionError, OverflowError, MemoryError) as error:
            raise InputError(f"condition {self.text!r} cannot be evaluated: {error}") from error

    def _check(self, node: ast.AST) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute):
                raise InputError(f"condition {self.text!r}: found {ast.unparse(child)!r}, and names have no dots", f"write {child.attr!r}")
            if not isinstance(child, self.allowed) and type(child) not in _OPERATORS:
                raise InputError(f"condition {self.text!r} uses {type(child).__name__}, which is not allowed", f"use {_ALLOWED}")
            if isinstance(child, ast.Constant) and not isinstance(child.value, str | int | float | bool):
                raise InputError(f"condition {self.text!r} uses the constant {child.value!r}, which is not allowed", f"use {_ALLOWED}")

    def _evaluate(self, node: ast.AST, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant():
                value: Any = node.value
            case ast.Name():
                value = self._lookup(node.id, values)
            case ast.List() | ast.Tuple():
                value = [self._evaluate(element, values) for element in node.elts]
            case ast.BoolOp():
                combine = all if isinstance(node.op, ast.And) else any
                value = combine(self._evaluate(part, values) for part in node.values)
            case ast.UnaryOp():
                value = _OPERATORS[type(node.op)](self._evaluate(node.operand, values))
            case ast.BinOp():
                value = _arithmetic(node.op, self._evaluate(node.left, values), self._evaluate(node.right, values))
            case ast.Compare():
                operands = [self._evaluate(part, values) for part in (node.left, *node.comparators)]
                value = all(_compared(op, a, b) for op, a, b in zip(node.ops, operands[:-1], operands[1:], strict=True))
            case _:  # _check let nothing else through
                raise TypeError(type(node).__name__)
        return value

    def _lookup(self, name: str, values: Mapping[str, Any]) -> Any:
        if name not in values:
            guess = _MEANT.get(name.lower().replace("_", "")) or nearest(name, values)
            if name in ("benchmark", "workload"):
                raise InputError(f"condition {self.text!r}: unknown name {name!r}", "--only chooses benchmarks, by their names")
            if name in ("true", "false"):  # as TOML spells them
                raise InputError(f"condition {self.text!r}: unknown name {name!r}", f"write {name.capitalize()}")
            hint = f"did you mean {guess!r}?" if guess else f"text stands in quotes; known names: {', '.join(sorted(values))}"
            raise InputError(f"condition {self.text!r}: unknown name {name!r}", hint)
        return values[name]


class Formula(Condition):
    """A value in the same language, with tables, positions, ``a if b else c`` and conversions besides, as JUBE's Python parameters have."""

    longest = 20_000
    allowed = (*Condition.allowed, ast.Dict, ast.Subscript, ast.IfExp, ast.Call)
    _FUNCTIONS: ClassVar = {"int": int, "float": float, "str": str, "round": round, "min": min, "max": max}

    def value(self, values: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What it is worth. Raises ``InputError`` for an unknown name or function, and for an impossible operation."""
        try:
            return self._evaluate(self._tree, values)
        except (TypeError, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
            raise InputError(f"{self.text[:60]!r} cannot be evaluated: {type(error).__name__} {error}") from error

    def _evaluate(self, node: ast.AST, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {self._evaluate(key or node, values): self._evaluate(value, values) for key, value in pairs if key is not None}
            case ast.Subscript():
                return self._evaluate(node.value, values)[self._evaluate(node.slice, values)]
            case ast.IfExp():
                return self._evaluate(node.body if self._evaluate(node.test, values) else node.orelse, values)
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                return self._lookup(name, self._FUNCTIONS)(*(self._evaluate(one, values) for one in node.args))
        return super()._evaluate(node, values)


def _compared(op: ast.cmpop, left: Any, right: Any) -> bool:
    try:
        return bool(_OPERATORS[type(op)](left, right))
    except TypeError:
        expected = "a list behind `in`" if isinstance(op, ast.In | ast.NotIn) else "two that can be compared"
        raise TypeError(f"found {left!r} beside {right!r}, expected {expected}") from None


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """Arithmetic on numbers only: ``'a' * 10**9`` or ``'%9999999d' % 1`` would take memory without bound."""
    for operand in (left, right):
        if isinstance(operand, str | list):
            raise TypeError(f"arithmetic on {operand!r}, which is no number")
    return _OPERATORS[type(op)](left, right)
