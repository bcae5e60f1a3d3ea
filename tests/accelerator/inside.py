"""What runs in a process that has the emulated accelerator: one function of the modules below, by name."""

from __future__ import annotations

import importlib
import sys

MODULES = ("tests.accelerator.inside_torch", "tests.accelerator.inside_engine")


def main(name: str) -> None:
    """Run it."""
    for module in MODULES:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            found()
            return
    raise SystemExit(f"no function {name!r} in {', '.join(MODULES)}")


if __name__ == "__main__":
    main(sys.argv[1])
