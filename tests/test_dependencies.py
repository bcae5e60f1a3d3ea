"""What an installation brings along: licences that allow everything, versions that are pinned, hashes that fit the versions."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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


def test_the_hashes_are_of_the_pinned_versions() -> None:
    lines = [line for line in (ROOT / "release" / "hashes.txt").read_text().splitlines() if not line.startswith("#")]
    hashed = {canonical(line.split("==")[0]): line.split("==")[1].split()[0] for line in lines}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {canonical(name): version for name, version in pinned.items()}
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", line) for line in lines)
    assert {name: version for name, version in hashed.items() if name in pinned and pinned[name] != version} == {}
    left_out = {"torch", "torchvision", "hatchling", "editables", "trove-classifiers", "pluggy"}
    assert pinned.keys() - hashed.keys() <= left_out, "run release/pin.py again"
