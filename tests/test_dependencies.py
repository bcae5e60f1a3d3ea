"""What an installation brings along: licences that allow everything, versions that are pinned, hashes that fit the versions, and no
package that is declared and not imported, or imported and not declared."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]

FREE = re.compile(
    r"MIT|BSD|Apache|PSF|Python Software|Mozilla|MPL|ISC|HPND|CNRI|Zlib|0BSD|CC0|Unlicense|OLDAP|LLVM|BSL-1\.0|LicenseRef-NVIDIA|Boost",
    re.IGNORECASE,
)
"""Words of licences that let anyone use, change and pass on."""
NOT_FREE = re.compile(r"\bA?GPL|Proprietary|Commercial", re.IGNORECASE)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, found: dict[str, metadata.Distribution]) -> None:
    """Everything that a package needs at run time, extras left out, into ``found``."""
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return  # a condition on another platform
    if canonical(name) in found:
        return
    found[canonical(name)] = package
    for line in package.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed(requirement.name, found)


def closure() -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    needed("caraml", found)
    return found


def licence(package: metadata.Distribution) -> str:
    words = package.metadata.get_all("Classifier") or []
    stated = [package.metadata.get("License-Expression") or "", (package.metadata.get("License") or "")[:200]]
    return " | ".join([*stated, *(word for word in words if word.startswith("License"))])


def test_everything_may_be_used_changed_and_passed_on() -> None:
    packages = closure()
    assert {"torch", "pydantic", "numpy", "duckdb"} <= packages.keys()
    stated = {name: licence(package) for name, package in packages.items()}
    odd = {name: text for name, text in stated.items() if not FREE.search(text) or (NOT_FREE.search(text) and " OR " not in text)}
    assert not odd


def test_everything_is_pinned() -> None:
    pinned = {canonical(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    build = {"setuptools", "triton", "cuda-bindings", "cuda-toolkit", "cuda-pathfinder"}  # torch's own choice, by build
    loose = {name for name in closure() if name not in pinned | build | {"caraml"} and not name.startswith("nvidia-")}
    assert not loose


def test_what_is_pinned_installs_on_the_oldest_python_that_is_promised() -> None:
    """Debian 12 has Python 3.11.2: a package that wants a later one of 3.11 leaves its users without any installation."""
    oldest = f"{PROJECT['requires-python'].removeprefix('>=')}.0"
    pinned = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    installed = {canonical(package.metadata["Name"]): package for package in metadata.distributions()}
    wants = {name: installed[canonical(name)].metadata.get("Requires-Python") or "" for name in pinned if canonical(name) in installed}
    assert {"torch", "mkdocs-material"} <= wants.keys()
    assert {name: text for name, text in wants.items() if not SpecifierSet(text).contains(oldest)} == {}


def test_the_hashes_are_of_the_pinned_versions() -> None:
    lines = [line for line in (ROOT / "release" / "hashes.txt").read_text().splitlines() if not line.startswith("#")]
    hashed = {canonical(line.split("==")[0]): line.split("==")[1].split()[0] for line in lines}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {canonical(name): version for name, version in pinned.items()}
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", line) for line in lines)
    assert {name: version for name, version in hashed.items() if name in pinned and pinned[name] != version} == {}
    assert pinned.keys() - hashed.keys() == {"torch", "torchvision"}, "run release/pin.py again"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN_EXTRAS = {"docs", "test"}
"""For those who work on CARAML: the package itself imports nothing of them."""
OPTIONAL = {"amdsmi", "nvidia", "pandas", "polars", "tables", "torchao"}
"""Imported by the package if the machine has them: AMD's and NVIDIA's own libraries (DALI) come with their drivers and containers; tables
of pandas and polars are for those who use these anyway. Pandas with PyTables, and torchao for certain GPUs,
have extras, and no test needs them."""
PEERS = {"accelerate", "codecarbon", "horovod", "jpwr", "optimum_benchmark", "tensorflow", "zeus"}
"""Programs that bench/ runs CARAML beside, and what those of examples/ need; they live in environments of their own."""
TOOLS = {"hatchling": "pyproject.toml", "mkdocs-material": "mkdocs.yml", "mypy": "Makefile", "ruff": "Makefile"}
"""Packages that are run and not imported, each with the file that names it."""
PLUGINS = {"pytest-timeout": "timeout =", "pytest-xdist": "--numprocesses"}
"""Plug-ins of pytest, each with the option of theirs that is used."""


def declared(extra: str | None = None) -> set[str]:
    """Distributions that pyproject.toml names, for an extra with the extras that it includes."""
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    inner = [declared(name) for requirement in requirements if requirement.name == "caraml" for name in requirement.extras]
    return {canonical(requirement.name) for requirement in requirements if requirement.name != "caraml"}.union(*inner)


def _names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return [str(node.args[0].value)] if called in ("import_module", "importorskip", "find_spec") else []
    return []


@cache
def _names_in(path: Path) -> set[str]:
    return {name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in _names(node)}


def imported(*folders: str) -> set[str]:
    """Top-level modules that the files of these folders import, wherever in a file, less Python's own and the folders' own."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    own = {path.parent.name if path.name == "__init__.py" else path.stem for path in files} | {*folders, "caraml"}
    names = {name.split(".")[0] for path in files for name in _names_in(path)}
    return names - own - sys.stdlib_module_names


def distributions(modules: Iterable[str]) -> set[str]:
    """The distributions that bring these modules."""
    known = metadata.packages_distributions()
    missing = sorted(module for module in modules if module not in known)
    assert not missing, f"imported and not installed: {', '.join(missing)}; install the extra `test`"
    return {canonical(known[module][0]) for module in modules}


@pytest.mark.slow
def test_every_package_that_is_imported_is_declared() -> None:
    ours = declared().union(*(declared(extra) for extra in PROJECT["optional-dependencies"] if extra not in OWN_EXTRAS))
    assert distributions(imported("src") - OPTIONAL) - ours == set()
    assert distributions(imported("tests", "bench", "examples", "release") - OPTIONAL - PEERS) - ours - declared("test") == set()


@pytest.mark.slow
def test_every_package_that_is_declared_is_imported() -> None:
    used = distributions(imported("src") - OPTIONAL)
    for extra in [None, *PROJECT["optional-dependencies"]]:
        if extra not in OWN_EXTRAS:
            assert declared(extra) - OPTIONAL <= used, extra
    used |= distributions(imported("tests", "bench") - OPTIONAL - PEERS)
    assert declared("test") - used <= TOOLS.keys() | PLUGINS.keys()


def test_every_tool_that_is_declared_is_run() -> None:
    assert declared("test") >= TOOLS.keys() | PLUGINS.keys()
    for tool, file in TOOLS.items():
        assert tool.removeprefix("mkdocs-") in (ROOT / file).read_text(encoding="utf-8"), tool
    options = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(option in options for option in PLUGINS.values())


def test_the_doctor_looks_for_packages_that_are_declared() -> None:
    from caraml.doctor import LIBRARIES

    assert LIBRARIES.keys() <= declared()
