"""A headless Chromium, driven over a pipe in its own protocol: loads pages, presses keys, takes pictures, and notes what goes wrong."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _in_a_snap(program: str) -> bool:
    """Whether it is a snap's, or Ubuntu's script that starts one: such a browser cannot see ``/tmp``."""
    with Path(program).open("rb") as file:
        return "/snap/" in program or b"/snap/" in file.read(4096)


_FOUND = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
CHROMIUM = next((program for program in _FOUND if not _in_a_snap(program)), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH, or only a snap, which cannot see /tmp")

KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page of a browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._rest, self._number, self._session = b"", 0, ""
        self.faults: list[str] = []
        """Errors on the console, uncaught ones, and requests that the page's policy refused."""
        self.requests: list[str] = []
        """Addresses that were asked for."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def size(self, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Window, colour scheme and medium of the page."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, url: str) -> float:
        """Load a page; returns the seconds until its own scripts had run and it answered a question."""
        self.faults, self.requests = [], []
        start = time.perf_counter()
        self._call("Page.navigate", url=url)
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            time.sleep(0.02)
        return time.perf_counter() - start

    def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait for an expression to become true, whatever the page has to do first; its value."""
        deadline = time.monotonic() + 300
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)
        return value

    def press(self, key: str, shift: bool = False, times: int = 1) -> None:
        """Press a key as a user does."""
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        for _ in range(times):
            self._call("Input.dispatchKeyEvent", type="rawKeyDown", **facts, **({"text": "\r"} if key == "Enter" else {}))
            if key == "Enter":
                self._call("Input.dispatchKeyEvent", type="char", text="\r", **facts)
            self._call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **({"clip": self._whole()} if whole else {}))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _whole(self) -> dict[str, float]:
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps({"id": self._number, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], 300)[0], "the browser does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        facts = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(facts["exceptionDetails"])[:500])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.faults.append(json.dumps(facts["args"])[:500])
        elif message.get("method") == "Log.entryAdded":
            self.faults.append(facts["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # The protocol's pipes are descriptors 3 and 4 of the child.
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
    command.append("--disable-dev-shm-usage")  # of which containers have 64 MiB
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(300)
        os.close(ours_out)
        os.close(ours_in)
