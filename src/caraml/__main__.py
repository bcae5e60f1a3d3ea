"""Entry point of ``caraml`` and ``python -m caraml``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. ``caraml power`` goes straight to the meter: a wrapper around a command must start in no time."""
    if sys.argv[1:2] == ["power"]:
        from caraml.power.__main__ import main as measure

        sys.exit(measure(sys.argv[2:]))
    from caraml.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
