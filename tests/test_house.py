"""The house: a room imports only rooms above it, and nothing heavy at the top of what must stay light."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "caraml"

# From the ground floor upwards; a room may import what stands before it. docs/architecture.md shows the same order.
ORDER = [
    "base",
    "system",
    "power",
    "suite",
    "metrics",
    "results",
    "data",
    "workloads",
    "engine",
    "worker",
    "launch",
    "campaign",
    "doctor",
    "reference",
    "analysis",
    "report",
    "api",
    "verify",
    "cli",
    "__main__",
]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Names of rooms that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" if node.module == "caraml" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (parts[1] for name in names if (parts := name.split("."))[0] == "caraml" and len(parts) > 1)


def test_rooms_import_only_what_stands_above_them() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE]
    assert {room(path) for path in files} <= set(ORDER), "a new room needs its place in the order"
    for path in files:
        for imported in imports(path):
            if imported in ORDER:
                assert ORDER.index(imported) <= ORDER.index(room(path)), f"{path.relative_to(PACKAGE)} imports {imported}"


def test_few_rooms_on_few_floors() -> None:
    """A room stands one floor above the highest that it imports."""
    rooms = [name for name in ORDER if (PACKAGE / name).is_dir()]
    floors: dict[str, int] = {}
    for name in rooms:  # in their order, so that what a room imports has its floor already
        below = {imported for path in (PACKAGE / name).rglob("*.py") for imported in imports(path)} & floors.keys()
        floors[name] = 1 + max((floors[other] for other in below), default=0)
    assert len(rooms) <= 18 and max(floors.values()) <= 10, floors


def test_files_of_a_room_do_not_import_each_other_in_a_circle() -> None:
    """Nor where only a function imports, or a type checker."""
    parts = {path: ("caraml", *path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    names = {path: ".".join(part for part in found if part != "__init__") for path, found in parts.items()}
    graph: dict[str, set[str]] = {name: set() for name in names.values()}
    for path, name in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = (f"{node.module}.{alias.name}" for alias in node.names)
                found = {one if one in graph else node.module for one in inside} & graph.keys() - {name}
                graph[name] |= {other for other in found if other.split(".")[1:2] == name.split(".")[1:2]}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_the_order_is_the_one_that_the_docs_show() -> None:
    text = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = text[text.index("## Packages") : text.index("A package imports only")]
    positions = {name: shown.find(f" {name}{'.py' if (PACKAGE / f'{name}.py').exists() else '/'}") for name in ORDER}
    assert all(position >= 0 for position in positions.values()), positions
    rooms = [name for name in ORDER if (PACKAGE / name).is_dir()]
    assert [positions[name] for name in rooms] == sorted(positions[name] for name in rooms)


def test_power_is_usable_alone() -> None:
    for path in (PACKAGE / "power").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not {name.split(".")[0] for name in modules} & {"torch", "pydantic", "numpy"}, path


def test_only_the_device_s_own_files_name_a_vendor_s_part_of_torch() -> None:
    vendors = re.compile(r"\btorch\.(cuda|xpu|mps|mtia|hpu|npu)\b")
    for name in ("workloads", "data", "engine"):
        for path in (PACKAGE / name).rglob("*.py"):
            if path != PACKAGE / "engine" / "device.py":
                code = ast.unparse(ast.parse(path.read_text(encoding="utf-8")))  # without comments
                assert not vendors.search(code), f"{path}: other accelerators are left out; see caraml.engine.device"


def test_an_exception_from_the_security_rules_says_why() -> None:
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert "noqa: S" not in line.replace("noqa: SIM", "") or " -- " in line.partition("noqa: S")[2], f"{path}: {line.strip()}"


def test_a_class_name_means_one_thing() -> None:
    """Workloads name their parameters alike: each is the ``Params`` of its own folder."""
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Params":
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Who needs more lines first looks for what can go: in this room, then in others.
LINES = {
    "analysis": 4_080,
    "base": 3_160,
    "campaign": 1_734,
    "cli": 1_714,
    "data": 781,
    "engine": 5_230,
    "launch": 1_874,
    "metrics": 1_015,
    "power": 5_202,
    "reference": 515,
    "report": 4_927,
    "results": 3_595,
    "suite": 2_722,
    "system": 3_588,
    "verify": 1_066,
    "worker": 2_955,
    "workloads": 8_262,
}
FILES = 205


def test_no_room_outgrows_its_lines() -> None:
    files = list(PACKAGE.rglob("*.py"))
    lines = dict.fromkeys(LINES, 0)
    for path in files:
        if path.parent != PACKAGE:
            lines[room(path)] += path.read_text(encoding="utf-8").count("\n")
    assert {name: count for name, count in lines.items() if count > LINES[name]} == {}
    assert len(files) <= FILES
