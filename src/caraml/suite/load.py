"""Finding and reading suite files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from caraml.errors import unknown_name
from caraml.suite.model import Suite
from caraml.tomlfile import TomlDocument, read_toml

CATALOG = Path(__file__).parent / "catalog"


@dataclass(frozen=True)
class SuiteFile:
    """A suite and the document it was read from, which knows the line of every key."""

    suite: Suite
    document: TomlDocument


def load_suite(name: str) -> SuiteFile:
    """Read a suite by its name in the catalogue or by the path of a file.

    Raises:
        InputError: no such suite or file, or the file is wrong; every fault at once.
    """
    path = Path(name)
    if path.suffix != ".toml" and "/" not in name:
        path = CATALOG / f"{name}.toml"
        if not path.exists():
            raise unknown_name("suite", name, catalog_suites())
    document = read_toml(path)
    return SuiteFile(document.validate(Suite), document)


def catalog_suites() -> list[str]:
    """Names of the suites that come with CARAML."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))
