"""Workloads, power sources and launchers of other packages. A package names them in its ``pyproject.toml``, and installing it is all there
is to do::

    [project.entry-points."caraml.workloads"]
    lstm = "my_package:WORKLOAD"

Nothing is looked for before a name is asked for that CARAML does not have itself, or all names are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeVar

from caraml.base.errors import EnvironmentUnfitError, InputError

Group = Literal["caraml.workloads", "caraml.power_sources", "caraml.launchers"]
_WORDS: dict[Group, str] = {"caraml.workloads": "workload", "caraml.power_sources": "power source", "caraml.launchers": "launcher"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")

T = TypeVar("T")


@dataclass(frozen=True)
class Plugin:
    """Something that another package adds to CARAML under ``name``, or why it cannot be used."""

    group: Group
    name: str
    distribution: str
    version: str
    point: EntryPoint
    refusal: str | None = None

    @property
    def package(self) -> str:
        """The distribution with its version, such as ``caraml-lstm 0.1.0``."""
        return f"{self.distribution} {self.version}"

    @property
    def what(self) -> str:
        """What it is, in words: ``workload 'lstm' of plug-in caraml-lstm 0.1.0``."""
        return f"{_WORDS[self.group]} {self.name!r} of plug-in {self.package}"

    def load(self, kind: type[T]) -> T:
        """The object that the entry point names.

        Raises:
            InputError: the plug-in was refused, or the object is not of this ``kind``, or a text of it is none.
            EnvironmentUnfitError: the plug-in cannot be imported.
        """
        if self.refusal is not None:
            raise InputError(f"{self.what} is refused: {self.refusal}", f"pip uninstall {self.distribution}, or rename its entry point")
        try:
            found = self.point.load()
        except (Exception, SystemExit) as error:  # a foreign module may raise anything; it must not take the others down
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise EnvironmentUnfitError(
                f"{self.what} cannot be imported ({self.point.value}): {reason}",
                f"repair the package, or pip uninstall {self.distribution}",
            ) from error
        if not isinstance(found, kind):
            expected = "class" if kind is type else f"{kind.__module__}.{kind.__name__}"
            raise self.wrong(f"found {self.point.value}, a {type(found).__name__}; expected a {expected}")
        for field in fields(found) if is_dataclass(found) and not isinstance(found, type) else ():
            if field.type == "str" and not isinstance(value := getattr(found, field.name), str):
                raise self.wrong(f"{field.name}: found {value!r}, expected text")
        return found

    def wrong(self, fault: str) -> InputError:
        """The error for something that the plug-in gives, with its name and the next step."""
        return InputError(f"{self.what}: {fault}", f"repair the package, or pip uninstall {self.distribution}")


def plugins(group: Group, built_in: Iterable[str]) -> dict[str, Plugin]:
    """What other packages add to ``group``, by name. Those with a name that is taken, or no good, are there with their refusal."""
    return _plugins(group, frozenset(built_in))


@cache
def _plugins(group: Group, built_in: frozenset[str]) -> dict[str, Plugin]:
    claims: dict[str, list[Plugin]] = {}
    for point in entry_points(group=group):
        distribution, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
        claims.setdefault(point.name, []).append(Plugin(group, point.name, distribution, version, point))
    return {name: replace(claims[name][0], refusal=_refusal(claims[name], built_in)) for name in sorted(claims)}


def _refusal(claims: list[Plugin], built_in: frozenset[str]) -> str | None:
    """Why a name that these plug-ins claim cannot be used, or ``None``."""
    name, what = claims[0].name, _WORDS[claims[0].group]
    if name in built_in:
        return f"CARAML itself has a {what} of that name"
    if len(claims) > 1:
        return f"each of {' and '.join(sorted(plugin.package for plugin in claims))} has a {what} of that name"
    if not _NAME.fullmatch(name):
        return "a name has small letters, digits and _ only, and begins with a letter"
    return None


def installed() -> dict[str, str]:
    """Version of every distribution that adds something to CARAML, by its name."""
    points = entry_points()  # of all groups at once: every package's list is read
    return {point.dist.name: point.dist.version for group in _WORDS for point in points.select(group=group) if point.dist}
