"""Nodes without a cluster: processes of this machine that play them, each with LOCAL_RANK 0, a node's name and sensors of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

from caraml.base.files import open_new
from caraml.engine.start import LOOPBACK, MEET, PEER, own_folder
from caraml.power.clock import NODE
from caraml.results.finish import LOG, finish
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Point

_LOOK_SECONDS = 0.05


def play(point: Point, store: Store, delays: tuple[float, ...] = ()) -> Record:
    """Measure a point of several nodes here and return its record; node ``i`` comes ``delays[i]`` seconds late."""
    folder, meet = store.new_attempt(point), own_folder()
    children = []
    try:
        with open_new(folder / LOG) as log:
            for number in range(point.nodes):
                place = {MEET: str(meet), PEER: "localhost", "SLURM_PROCID": str(number), NODE: f"node-{number + 1}"}
                network = {"GLOO_SOCKET_IFNAME": LOOPBACK, "CARAML_BIND": "off"}
                command = ["caraml.engine.start", f"--nodes={point.nodes}", f"--devices={point.devices}", "caraml.worker", str(folder)]
                late = ["sh", "-c", f'sleep {delays[number]}; exec "$0" "$@"'] if number < len(delays) else []
                argv = [*late, sys.executable, "-P", "-m", *command]
                children.append(subprocess.Popen(argv, env={**os.environ, **network, **place}, stdout=log, stderr=log))  # noqa: S603 -- this interpreter with a module of ours
            _wait(children, point.measure.timeout_seconds)
    finally:
        for child in children:
            child.kill()
        shutil.rmtree(meet, ignore_errors=True)
    if not (folder / RECORD).exists():
        codes = [child.wait() for child in children]
        finish(folder, next((code for code in codes if code), 1))
    return read_record(folder / RECORD)


def _wait(children: list[subprocess.Popen[bytes]], longest: float) -> None:
    """Until all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes) or any(codes):
            return
        time.sleep(_LOOK_SECONDS)
