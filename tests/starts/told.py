"""Says how it was started; ends with the code it is told, or by the signal that it waits for."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

umask = os.umask(0o22)
print("forked:", "torch" in sys.modules)
print(sys.argv[1:], sys.stdin.read().split(), os.environ.get("TOLD"), Path.cwd(), umask, sorted(os.sched_getaffinity(0)))
print(__name__, __spec__.name if __spec__ else None, Path(sys.path[0]) == Path.cwd(), sys.stdout.encoding, sys.stdout.isatty())
print([name for name in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGCHLD") if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN])
print("words", file=sys.stderr)
sys.exit(int(sys.argv[2]))
