"""The house: a room imports only rooms above it, and nothing heavy at the top of what must stay light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "caraml"

# From the ground floor upwards; a room may import what stands before it. docs/architecture.md shows the same order.
ORDER = [
    "errors",
    "base",
    "plugins",
    "units",
    "stats",
    "tomllines",
    "tomlfile",
    "compat",
    "system",
    "power",
    "suite",
    "results",
    "models",
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


def test_an_exception_from_the_security_rules_says_why() -> None:
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert "noqa: S" not in line.replace("noqa: SIM", "") or " -- " in line.partition("noqa: S")[2], f"{path}: {line.strip()}"
