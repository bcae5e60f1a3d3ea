"""What benchmarks need first: the order that follows from it, circles, and what a point takes from the points before it."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from caraml.suite.model import Point

NEEDED = "needed/"
"""How a path begins that is below the folder of the point that goes first."""
_TAKES = re.compile(rf"(?<![\w.-]){NEEDED}")


def needed_first(needs: Sequence[tuple[str, str | None]]) -> tuple[list[int], dict[int, list[str]]]:
    """Positions of benchmarks by their names and what each needs: each after what it needs; and those that wait for themselves, each with
    the names of its circle."""
    order, waiting, before = list[int](), list(range(len(needs))), list[int]()
    while waiting != before:
        before, names = waiting, {needs[index][0] for index in waiting}
        order += [index for index in waiting if needs[index][1] not in names]
        waiting = [index for index in waiting if needs[index][1] in names]
    ahead, behind = dict[str, set[str]](), dict[str, set[str]]()
    for name, other in ((needs[index][0], needs[index][1] or "") for index in waiting):
        ahead.setdefault(name, set()).add(other)
        behind.setdefault(other, set()).add(name)
    circles: dict[str, list[str]] = {}
    for name in ahead.keys() & behind.keys():
        if name not in circles:
            both = reached([name], ahead) & reached([name], behind)
            circles |= dict.fromkeys(both, sorted(both))
    return order, {index: circle for index in waiting if needs[index][1] in (circle := circles.get(needs[index][0], []))}


def reached(names: Iterable[str], edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Where edges lead from some names, over any number of them."""
    found, left = set[str](), list(names)
    while left:
        new = set(edges.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def waited_for(point: Point, repeat: int, values: Mapping[str, Any], every: Sequence[tuple[Point, Mapping[str, Any]]]) -> list[Point] | str:
    """The points that a point, without its ``repeat``, waits for: all of the benchmark that it needs or, where it takes files of several,
    the one that agrees with it in all that is swept there. In words what was expected where that is not one.

    ``values`` are those of the point, by the names that a sweep has for them; ``every``: the points of the needed benchmark, each with what
    is swept there.
    """
    if len(every) < 2 or not _TAKES.search(json.dumps(point.params)):
        return [one for one, _ in every]
    again = any(one.repeat for one, _ in every)
    found = [one for one, swept in every if all(values.get(name) == value for name, value in swept.items())]
    found = [one for one in found if one.repeat == repeat or not again]
    if len(found) == 1:
        return found
    axes = [*dict.fromkeys(name for _, swept in every for name in swept), *(["repeats"] if again else [])]
    alike = ", ".join(f"{name} = {json.dumps(repeat if name == 'repeats' else values.get(name))}" for name in axes)
    expected = f"a benchmark of one point, or with one for each of these: needed/ names its files, and {len(found)} of its "
    return f"{expected}{len(every)} points have {alike}"


def not_kept(point: Point, params: BaseModel, first: Sequence[Point] | None) -> str | None:
    """What was expected where the checkpoint that a point starts from will not be among the files of the points that go ``first``, or not
    be one of its model; ``None`` where it will, or nobody can say: a program may leave any file. Without ``first`` it needs no benchmark.

    ``params`` are those of the point, with whose ``checkpoint_facts`` a checkpoint must agree.
    """
    path = posixpath.normpath(str(point.params.get("start_from") or ""))
    if not path.startswith(NEEDED) or path.startswith(2 * NEEDED):  # what goes before that is looked at there
        return None
    if first is None:
        return f"a path of its own, or `needs` beside it: {NEEDED} is the folder of the point that goes first"
    return next((expected for one in first if "save_to" in one.params and (expected := _unlike(path, point, params, one))), None)


def _unlike(path: str, point: Point, params: BaseModel, one: Point) -> str | None:
    """Why a path is not that of a checkpoint of the point's model which another point saves; ``None`` if it is."""
    kept, name = one.params["save_to"], one.benchmark
    if kept is None:
        return f"what benchmark {name!r} keeps, and it has no params.save_to"
    if (there := posixpath.normpath(posixpath.join(NEEDED, str(kept)))) != path:
        return f"{json.dumps(there)}, which benchmark {name!r} saves to"
    if one.mode != "train":
        return f"a checkpoint of mode 'train': benchmark {name!r} has {one.mode!r}, which keeps none"
    ours = getattr(params, "checkpoint_facts", None)
    if ours is None or one.workload != point.workload:
        return None
    theirs = type(params).model_validate(one.params).checkpoint_facts  # type: ignore[attr-defined]  # as ours has
    told = ", ".join(f"{key} {json.dumps(theirs.get(key))}, not {json.dumps(ours[key])}" for key in ours if theirs.get(key) != ours[key])
    return f"a checkpoint of the same model: that of benchmark {name!r} has {told}" if told else None
