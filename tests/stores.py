"""What tests put into stores: scripts of points, and suites of bare keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from caraml.base.files import write_file
from caraml.launch.script import SCRIPT, Recipe
from caraml.results.store import Listing, Store
from caraml.suite.model import Point
from caraml.system.model import DeviceKind, Site


def write_script(point: Point, folder: Path, threads: int, site: Site | None = None, kind: DeviceKind = "cpu") -> Path:
    """Write ``run.sh`` into an attempt's folder on this machine and return its path; see :class:`Recipe`."""
    folder = folder.resolve()
    write_file(folder / SCRIPT, Recipe(point, folder, threads, site or Site(), kind).text(), mode=0o755)
    return folder / SCRIPT


def remember_suite(store: Store, name: str, keys: Iterable[str]) -> None:
    """Note which points a suite consists of, by their keys alone."""
    store.remember(Listing(name=name, points=[(key, "") for key in keys]))
