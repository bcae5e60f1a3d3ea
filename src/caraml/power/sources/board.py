"""Node power from its management controller: IPMI DCMI and Redfish. Slow, averaged, in whole watts: a cross-check.

IPMI: ``ipmitool dcmi power reading`` (DCMI 1.5, section 6.6.1), which knows watts only. Redfish: ``PowerControl[].PowerConsumedWatts`` of
a ``Power`` resource, or ``Reading`` of a power ``Sensor``, or of the ``PowerWatts`` of an ``Outlet`` or ``EnvironmentMetrics``; the latter
two have apparent power beside it where the hardware measures it (``ApparentVA``; DMTF DSP0268).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from caraml.base.limits import RECORD
from caraml.power.model import Channel, Reading
from caraml.power.source import SourceUnavailable, with_apparent

TIMEOUT_S = 5.0
DCMI = ("ipmitool", "dcmi", "power", "reading")
WATTS = re.compile(r"Instantaneous power reading:\s*(\d+)\s*Watts", re.IGNORECASE)
PERIOD = re.compile(r"Sampling period:\s*0*(\d+)\s*(Seconds|Milliseconds)", re.IGNORECASE)
INACTIVE = re.compile(r"Power reading state is:\s*deactivated", re.IGNORECASE)


class BoardReadError(Exception):
    """The management controller answered without a power."""


def _channel(source: str, label: str, window: float) -> Channel:
    """The node's power as its management controller averages it."""
    return Channel(
        id=f"{source}:node",
        source=source,
        kind="power_mean",
        boundary="node_ac",
        label=label,
        domain=f"{source}:node",
        hardware="node",
        resolution=1.0,
        update_period_s=1.0,
        mean_window_s=window,
    )


class IpmiSource:
    """Node power by IPMI DCMI."""

    name = "ipmi"
    min_interval_s = 1.0

    def __init__(self) -> None:
        self._channels: list[Channel] = []

    def open(self) -> None:
        """Ask once."""
        if shutil.which(DCMI[0]) is None:
            raise SourceUnavailable("the command ipmitool is missing", "install the package ipmitool")
        try:
            text = self._ask()
            self._watts(text)
        except (BoardReadError, OSError, subprocess.SubprocessError) as error:
            fix = "sudo chmod a+rw /dev/ipmi0 (holds until the machine restarts)"
            raise SourceUnavailable(f"{' '.join(DCMI)} fails: {error}", fix, kind="unreadable") from error
        match = PERIOD.search(text)
        window = int(match[1]) * (1.0 if match[2].lower() == "seconds" else 1e-3) if match else 1.0
        self._channels = [_channel(self.name, "node (IPMI DCMI)", window)]

    def _ask(self) -> str:
        done = subprocess.run(DCMI, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 -- ipmitool with constant arguments
        if done.returncode != 0:
            raise BoardReadError((done.stderr or done.stdout).strip() or f"exit code {done.returncode}")
        return done.stdout

    def _watts(self, text: str) -> float:
        match = WATTS.search(text)
        if match is None or INACTIVE.search(text):
            raise BoardReadError("no power reading in the answer")
        return float(match[1])

    def channels(self) -> list[Channel]:
        """The node."""
        return self._channels

    def read(self) -> list[Reading]:
        """Run the command once."""
        return [_asked(f"{self.name}:node", lambda: self._watts(self._ask()))]

    def close(self) -> None:
        """Nothing to release."""


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Goes where the controller sends it only on the controller itself: the password is for nobody else, and for no open connection."""

    def redirect_request(self, req: urllib.request.Request, *more: Any) -> urllib.request.Request | None:
        """The request for the new address. Raises ``BoardReadError`` for one elsewhere."""
        made = super().redirect_request(req, *more)
        if made is not None and (made.host != req.host or made.type not in {req.type, "https"}):
            raise BoardReadError(f"it sends on to {made.type}://{made.host}, which is not asked")
        return made


_OPENER = urllib.request.build_opener(_SameHost)


class RedfishSource:
    """Node power from a Redfish resource; user and password come from ``REDFISH_USER`` and ``REDFISH_PASSWORD``."""

    name = "redfish"
    min_interval_s = 1.0

    def __init__(self, url: str) -> None:
        self._url = url
        self._channels: list[Channel] = []

    def open(self) -> None:
        """Ask once."""
        if not self._url:
            raise SourceUnavailable("no address given", "use redfish:https://<controller>/redfish/v1/Chassis/<id>/Power")
        try:
            document = self._ask()
            self._watts(document)
        except (BoardReadError, OSError, ValueError) as error:
            fix = "set REDFISH_USER and REDFISH_PASSWORD, and SSL_CERT_FILE if the controller has its own certificate"
            raise SourceUnavailable(f"{self._url} does not answer with a power: {error}", fix, kind="unreadable") from error
        channel = _channel(self.name, "node (Redfish)", self._window(document))
        self._channels = [channel] if self._apparent(document) is None else [channel, with_apparent(channel)]

    def _ask(self) -> dict[str, Any]:
        request = urllib.request.Request(self._url, headers={"Accept": "application/json"})  # noqa: S310 -- the address that the user gave for a power sensor
        user, password = os.environ.get("REDFISH_USER"), os.environ.get("REDFISH_PASSWORD")
        if user and password is not None:
            request.add_header("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            content = answer.read(RECORD + 1)
        if len(content) > RECORD:
            raise BoardReadError(f"the answer has more than {RECORD:,} bytes")
        document = json.loads(content)
        if not isinstance(document, dict):
            raise BoardReadError("the answer is not a Redfish resource")
        return document

    def _watts(self, document: dict[str, Any]) -> float:
        sensor = _sensor(document)
        if sensor.get("Reading") is not None:
            return float(sensor["Reading"])
        powers = [c["PowerConsumedWatts"] for c in document.get("PowerControl", []) if c.get("PowerConsumedWatts") is not None]
        if not powers:
            raise BoardReadError("neither PowerControl[].PowerConsumedWatts, PowerWatts.Reading nor a Reading of type Power")
        # The first entry is the whole chassis; further ones are its parts.
        return float(powers[0])

    def _apparent(self, document: dict[str, Any]) -> float | None:
        found = _sensor(document).get("ApparentVA")
        return None if found is None else float(found)

    def _window(self, document: dict[str, Any]) -> float:
        """Averaging time of the reading [s]: 1 s unless the sensor states it (ISO 8601, ``PT<n>S``)."""
        match = re.fullmatch(r"PT(\d+(?:\.\d+)?)S", str(document.get("AveragingInterval", "")))
        return float(match[1]) if match else 1.0

    def channels(self) -> list[Channel]:
        """The node."""
        return self._channels

    def read(self) -> list[Reading]:
        """Ask once; power and apparent power are of one answer."""
        kept: list[dict[str, Any]] = []

        def watts() -> float:
            kept.append(self._ask())
            return self._watts(kept[0])

        first = _asked(f"{self.name}:node", watts)
        if len(self._channels) == 1:
            return [first]
        va = self._apparent(kept[0]) if kept else None
        return [
            first,
            Reading(f"{self.name}:node:va", first.t_before, first.t_after, va, first.error or ("no ApparentVA" if va is None else None)),
        ]

    def close(self) -> None:
        """Nothing to release."""


def _sensor(document: dict[str, Any]) -> dict[str, Any]:
    """The power sensor that a resource is or has; empty if neither."""
    part = document.get("PowerWatts") if document.get("ReadingType") is None else document if document["ReadingType"] == "Power" else {}
    return part if isinstance(part, dict) else {}


def _asked(channel: str, ask: Any) -> Reading:
    """One reading; whatever the network or the command does wrong becomes a reading without a value."""
    before = time.monotonic()
    try:
        value, error = ask(), None
    except (BoardReadError, OSError, ValueError, subprocess.SubprocessError) as cause:
        value, error = None, f"{type(cause).__name__}: {cause}"
    return Reading(channel, before, time.monotonic(), value, error)


def create_ipmi(argument: str, devices: Sequence[str] | None, automatic: bool) -> IpmiSource:
    """``ipmi``."""
    return IpmiSource()


def create_redfish(argument: str, devices: Sequence[str] | None, automatic: bool) -> RedfishSource:
    """``redfish:<address of the Power or Sensor resource>``."""
    return RedfishSource(argument)
