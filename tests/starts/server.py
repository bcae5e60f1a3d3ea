"""Forks processes that have torch loaded already: a worker starts in a tenth of a second instead of three.

``sitecustomize`` beside this file asks for them. What runs is the real program, in a process of its own; only its imports are done.
Ends with the process that started it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from caraml.workloads import make_torchvision_importable

PRELOADED = (
    *("caraml.engine.start", "torch.distributed.run", "timm", "duckdb", "typer", "rich.live", "jinja2"),
    *("torch._dynamo", "torch._inductor"),  # every optimizer of torch loads its compiler
    *("torch._inductor.compile_fx", "torch.distributed.pipelining"),
    *("caraml.cli.run", "caraml.cli.results", "caraml.cli.check", "caraml.cli.setup"),
    *("caraml.worker.training", "caraml.engine.parallel.divide", "caraml.engine.parallel.checkpoint"),
    *("caraml.engine.memory", "caraml.workloads.gpt", "caraml.workloads.image_classification"),
    *("caraml.campaign.preview", "caraml.campaign.runner", "caraml.cli.asked", "caraml.report.page", "tokenizers"),
)
"""What takes long to import. Nothing of it may start a thread, or look for a device."""


class Server:
    """One fork for every request, and its exit code for whoever asked."""

    def __init__(self, listening: socket.socket) -> None:
        self._path = list(sys.path)
        self._listening, self._selector = listening, selectors.DefaultSelector()
        self._asking: dict[int, socket.socket] = {}
        """Who waits for which process."""
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._pair = (woken, wake)
        self._selector.register(woken, selectors.EVENT_READ, self._reap)
        self._selector.register(listening, selectors.EVENT_READ, self._accept)

    def serve(self) -> dict[str, Any]:
        """Serve until the end. Returns in the forked processes only: what each has to run."""
        while True:
            for key, _ in self._selector.select():
                request = key.data(key.fileobj)
                if request is not None:
                    return dict(request)

    def _accept(self, listening: socket.socket) -> dict[str, Any] | None:
        asking, _ = listening.accept()
        text, files = b"", list[int]()
        while not text.endswith(b"\n"):
            more, received, _, _ = socket.recv_fds(asking, 1 << 20, 3)
            if not more:
                break
            text, files = text + more, files + received
        request = json.loads(text) if text.endswith(b"\n") else None
        pid = 0
        if request is not None and self._knows(request["path"]):
            pid = os.fork()
            if pid == 0:
                self._forget(asking)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                return dict(request)
        for file in files:
            os.close(file)
        with suppress(OSError):
            asking.sendall(b"%d\n" % pid)
        if pid:
            self._asking[pid] = asking
            self._selector.register(asking, selectors.EVENT_READ, self._gone)
        else:
            asking.close()
        return None

    def _knows(self, path: list[str]) -> bool:
        """Whether what is loaded is what a program with these places to import from would load: the same ones in the same order, and others
        that hold nothing of the kind."""
        loaded = {name.partition(".")[0] for name in sys.modules}
        others = [Path(place) for place in path if place not in self._path]
        return [place for place in path if place in self._path] == self._path and not any(
            entry.name.partition(".")[0] in loaded for place in others if place.is_dir() for entry in place.iterdir()
        )

    def _gone(self, asking: socket.socket) -> None:
        """Who asked has ended without waiting: killed, and its program with it, unless that has just ended as well."""
        for pid, known in self._asking.items():
            if known is asking:
                os.kill(pid, signal.SIGKILL)
                self._selector.unregister(asking)

    def _reap(self, woken: socket.socket) -> None:
        with suppress(BlockingIOError):
            while woken.recv(4096):
                pass
        while self._asking:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            asking = self._asking.pop(pid)
            with suppress(KeyError):
                self._selector.unregister(asking)
            with suppress(OSError):
                asking.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            asking.close()

    def _forget(self, asking: socket.socket) -> None:
        """In the forked process: nothing of the server is left open."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for end in (*self._pair, self._listening, asking, *self._asking.values()):
            end.close()


def become(request: dict[str, Any]) -> NoReturn:
    """Make this process what a fresh interpreter would be, and run the module."""
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    os.chdir(request["folder"])
    program = request["module"]
    is_file = program.endswith(".py")
    first = str(Path(program).resolve().parent) if is_file else request["folder"]
    sys.path[:] = [*([] if request["safe"] else [first]), *request["path"]]
    sys.argv[:] = [program, *request["arguments"]]
    sys.orig_argv[:] = [sys.executable, *([] if is_file else ["-m"]), *sys.argv]
    now = request["unbuffered"]
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            open(number, "wb", 0 if now else -1, closefd=False),  # noqa: SIM115
            *("utf-8", errors),
            line_buffering=number == 2 or os.isatty(1),
            write_through=now,
        )
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    if threads := os.environ.get("FORK_SERVER_THREADS") or os.environ.get("OMP_NUM_THREADS"):  # read once, when torch was loaded
        import torch

        torch.set_num_threads(int(threads))
    sys.modules.pop(program, None)  # to be run anew, as the main module
    code = 0
    try:
        if is_file:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 -- as an interpreter ends: the trace is printed
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End as an interpreter does, but do not take down what was loaded before the fork."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def collapse() -> None:
    """Put what is loaded into pages of 2 MiB, where the kernel can: small ones are 80,000 for every fork to copy and every end to free."""
    libc, size = ctypes.CDLL(None), 1 << 21
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, rights, _, _, inode, *name = line.split()
        first, last = (int(place, 16) for place in places.split("-"))
        first, last = -(-first // size) * size, last // size * size
        if rights.startswith("rw") and inode == "0" and name in ([], ["[heap]"]) and first < last:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 25)  # MADV_COLLAPSE


def main(address: str) -> None:
    """Listen, load, serve."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with who started us
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    Path(f"{address}.new").rename(address)  # who finds it can ask at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is for pytest to handle
    make_torchvision_importable()
    for name in PRELOADED:
        importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of what was loaded: it takes down 40 MB, page by page, at the end of every process
    gc.collect()
    gc.freeze()
    collapse()
    become(Server(listening).serve())


if __name__ == "__main__":
    main(sys.argv[1])
