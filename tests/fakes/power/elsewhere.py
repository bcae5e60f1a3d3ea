"""The wrapper as if it ran on another node: ``elsewhere.py HOST SHIFT RATE WORDS...``.

The host has its own name, and its monotonic clock is ahead of this machine's by SHIFT seconds and gains RATE seconds per
second. What must not be patched has its own reference to the true clock before this begins.
"""

from __future__ import annotations

import socket
import subprocess  # noqa: F401 - keeps the true clock for its time limits
import sys
import threading  # noqa: F401 - likewise
import time


def main() -> int:
    """Patch the host and run."""
    host, shift, rate = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    true = time.monotonic
    begin = true()
    time.monotonic = lambda: true() + shift + rate * (true() - begin)
    socket.gethostname = lambda: host
    from caraml.power.__main__ import main as power

    return power(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
