"""Python runs this at the start of every process below a test: a known program is handed to the fork server, which has torch loaded.

The program then runs in a fresh process of the server's, with this one's words, variables, folder and files. This one waits for it, hands
signals on, and ends as it does. Without ``FORK_SERVER``, or with other places to import from than the server's, everything starts as ever.
"""

import os
import sys

PROGRAMS = ("caraml", "tests", "told", "torch.distributed.run")
"""Modules, or packages of modules. The power meter starts in no time by itself."""


def program() -> "tuple[str, list[str]] | None":
    """The module, or the file of a training loop, that this process is to run, and its arguments."""
    words = sys.orig_argv[1:]
    while words[:1] in (["-u"], ["-P"]):
        words = words[1:]
    module = words[1] if words[:1] == ["-m"] and words[1:2] else ""
    if module in PROGRAMS or (module.split(".")[0] in PROGRAMS and not module.startswith("caraml.power")):
        return module, words[2:]
    if words and os.path.basename(words[0]) == "caraml":  # noqa: PTH119 -- pathlib takes longer to import than all of this
        return "caraml", words[1:]
    if words and words[0].endswith("_loop.py"):
        return words[0], words[1:]
    return None


def hand_over(address: str, module: str, arguments: "list[str]") -> None:
    """Have the server run the module; does not return, unless the server declines."""
    import json
    import signal
    import socket

    umask = os.umask(0)
    os.umask(umask)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 -- as above
        "path": sys.path,
        "safe": sys.flags.safe_path,
        "umask": umask,
        "cpus": sorted(os.sched_getaffinity(0)),
        "ignored": ignored,
        "unbuffered": "-u" in sys.orig_argv[1:3] or bool(os.environ.get("PYTHONUNBUFFERED")),
    }
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
        except OSError:
            return
        # The program may be far by the time that this process goes on: what comes for it meanwhile waits here.
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        answers = server.makefile("r")
        pid = int(answers.readline() or 0)
        for number in numbers if pid else ():
            # Also what is ignored here: the program may handle it, and only it knows.
            signal.signal(number, lambda number, frame: hand_on(pid, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not pid:
            return
        code = int(answers.readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def hand_on(pid: int, number: int) -> None:
    """A program that has just ended needs it no more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if "FORK_SERVER" in os.environ and (_known := program()) is not None:
    hand_over(os.environ["FORK_SERVER"], *_known)
