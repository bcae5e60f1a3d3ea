"""What a site measures of a node: its management controller by IPMI DCMI and Redfish, and Slurm's accounting. Slow: a cross-check.

IPMI: ``ipmitool dcmi power reading`` (DCMI 1.5, section 6.6.1), which knows watts only. Redfish: ``PowerControl[].PowerConsumedWatts`` of
a ``Power`` resource, or ``Reading`` of a power ``Sensor``, or of the ``PowerWatts`` of an ``Outlet`` or ``EnvironmentMetrics``; the latter
two have apparent power beside it where the hardware measures it (``ApparentVA``; DMTF DSP0268). Both are averaged, in whole watts.

Slurm: ``sstat`` reports ``ConsumedEnergyRaw`` in J, as gathered by the cluster's ``acct_gather_energy`` plugin, by default every 30 s. The
plugin measures whole nodes, so the number is the job's only if it had its nodes to itself.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import shutil
import socket
import urllib.parse
import urllib.request
from functools import cache
from typing import Any

from caraml.base.limits import RECORD
from caraml.power.counter import CONTROLLER_LAG_S
from caraml.power.model import Channel
from caraml.power.source import AskedSensors, SensorError, SensorGroup, SourceUnavailable, output_of, with_apparent

TIMEOUT_S = 5.0
DCMI = ("ipmitool", "dcmi", "power", "reading")
WATTS = re.compile(r"Instantaneous power reading:\s*(\d+)\s*Watts", re.IGNORECASE)
PERIOD = re.compile(r"Sampling period:\s*0*(\d+)\s*(Seconds|Milliseconds)", re.IGNORECASE)
INACTIVE = re.compile(r"Power reading state is:\s*deactivated", re.IGNORECASE)


def _channel(source: str, label: str, window: float, name: str, meter: str = "") -> Channel:
    """The node's power as its management controller averages it."""
    return Channel(
        id=name,
        source=source,
        kind="power_mean",
        boundary="node_ac",
        label=label,
        domain=name,
        hardware="node",
        resolution=1.0,
        update_period_s=1.0,
        period_guessed=True,
        lag_s=CONTROLLER_LAG_S,
        mean_window_s=window,
        meter=meter,
    )


class IpmiSource(AskedSensors):
    """Node power by IPMI DCMI."""

    name = "ipmi"
    min_interval_s = 1.0

    def open(self) -> None:
        if shutil.which(DCMI[0]) is None:
            raise SourceUnavailable("the command ipmitool is missing", "install the package ipmitool")
        try:
            text = output_of(DCMI, TIMEOUT_S)
            _dcmi_watts(text)
        except self.failures as error:
            fix = "sudo chmod a+rw /dev/ipmi0 (holds until the machine restarts)"
            raise SourceUnavailable(f"{' '.join(DCMI)} fails: {error}", fix, kind="unreadable") from error
        match = PERIOD.search(text)
        window = int(match[1]) * (1.0 if match[2].lower() == "seconds" else 1e-3) if match else 1.0
        self.add(_channel(self.name, "node (IPMI DCMI)", window, "ipmi:node"), lambda: _dcmi_watts(output_of(DCMI, TIMEOUT_S)))


def _dcmi_watts(text: str) -> float:
    match = WATTS.search(text)
    if match is None or INACTIVE.search(text):
        raise SensorError("no power reading in the answer")
    if int(match[1]) == 0:  # as controllers without a meter answer
        raise SensorError("the controller tells 0 W of a node that runs")
    return float(match[1])


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Goes where the controller sends it only on the controller itself: the password is for nobody else, and for no open connection."""

    def redirect_request(self, req: urllib.request.Request, *more: Any) -> urllib.request.Request | None:
        made = super().redirect_request(req, *more)
        if made is not None and (made.host != req.host or made.type not in {req.type, "https"}):
            raise SensorError(f"it sends on to {made.type}://{made.host}, which is not asked")
        return made


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Asks the controller itself: a proxy for the web, which may be set for the whole job, does not know it and would see its password."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameHost)


class RedfishSource(SensorGroup):
    """Node power from a Redfish resource; user and password come from ``REDFISH_USER`` and ``REDFISH_PASSWORD``."""

    name = "redfish"
    min_interval_s = 1.0
    failures = (*SensorGroup.failures, TypeError, AttributeError, RecursionError)
    """An answer may be any JSON."""

    def open(self) -> None:
        if not self.argument.startswith(("http://", "https://")):
            raise SourceUnavailable(f"{self.argument!r} is no address", "use redfish:https://<controller>/redfish/v1/Chassis/<id>/Power")
        if "#" in self.argument:
            told = f"{self.argument} names a part of a resource, which is not asked"
            raise SourceUnavailable(told, "use the address of a sensor or an outlet")
        try:
            document = self._ask()
            _watts(document)
        except self.failures as error:
            fix = "set REDFISH_USER and REDFISH_PASSWORD, and SSL_CERT_FILE if the controller has its own certificate"
            raise SourceUnavailable(f"{self.argument} does not answer with a power: {error}", fix, kind="unreadable") from error
        # A reading is averaged over 1 s unless the sensor states its time (ISO 8601, ``PT<n>S``).
        stated = re.fullmatch(r"PT(\d+(?:\.\d+)?)S", str(document.get("AveragingInterval", "")))
        place = urllib.parse.urlsplit(self.argument)
        name = f"redfish:{place.netloc}{place.path}"
        channel = _channel(self.name, "node (Redfish)", float(stated[1]) if stated else 1.0, name, self._known_by(place))
        self.listed = [channel] if _sensor(document).get("ApparentVA") is None else [channel, with_apparent(channel)]

    def answers(self) -> dict[str, float | str]:
        document = self._ask()
        va = _sensor(document).get("ApparentVA")
        name = self.listed[0].id
        return {name: _watts(document), f"{name}:va": "no ApparentVA" if va is None else float(va)}

    def _known_by(self, place: urllib.parse.SplitResult) -> str:
        """By what the service names itself (``UUID`` of its root), else by its address where that leads every node to one controller."""
        resource = place.path.rstrip("/")
        try:
            own = str(self._ask(f"{place.scheme}://{place.netloc}/redfish/v1/").get("UUID") or "")
            if len(set(own) - {"-"}) > 1:  # one of zeros is that of every controller to which nobody gave any
                return f"{own}{resource}"
        except self.failures:
            pass
        try:
            address = ipaddress.ip_address(socket.getaddrinfo(place.hostname, None)[0][4][0])
        except OSError:  # its name is unknown by now
            return f"{place.netloc}{resource}"
        return "" if address.is_link_local or address.is_loopback else f"{address}{resource}"

    def _ask(self, address: str | None = None) -> dict[str, Any]:
        request = urllib.request.Request(address or self.argument, headers={"Accept": "application/json"})  # noqa: S310 -- the address that the user gave for a power sensor
        user, password = os.environ.get("REDFISH_USER"), os.environ.get("REDFISH_PASSWORD")
        if user and password is not None:
            request.add_header("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())
        with _opener().open(request, timeout=TIMEOUT_S) as answer:
            content = answer.read(RECORD + 1)
        if len(content) > RECORD:
            raise SensorError(f"the answer has more than {RECORD:,} bytes")
        document = json.loads(content)
        if not isinstance(document, dict):
            raise SensorError("the answer is not a Redfish resource")
        return document


def _watts(document: dict[str, Any]) -> float:
    sensor = _sensor(document)
    if sensor.get("Reading") is not None:
        return float(sensor["Reading"])
    # The first entry is the whole chassis; further ones are its parts. Controllers without a meter tell 0; an outlet may have none.
    chassis = next(iter(document.get("PowerControl") or ()), None)
    watts = chassis.get("PowerConsumedWatts") if isinstance(chassis, dict) else None
    if not watts:
        raise SensorError("neither PowerControl[0].PowerConsumedWatts above 0, PowerWatts.Reading nor a Reading of type Power")
    return float(watts)


def _sensor(document: dict[str, Any]) -> dict[str, Any]:
    """The power sensor that a resource is or has; empty if neither."""
    part = document.get("PowerWatts") if document.get("ReadingType") is None else document if document["ReadingType"] == "Power" else {}
    return part if isinstance(part, dict) else {}


SLURM_TIMEOUT_S, SLURM_PERIOD_S = 10.0, 30.0
UNKNOWN = ("", "0", "18446744073709551614")
"""Texts by which Slurm says that it has no energy: empty, zero and its NO_VAL64."""


class SlurmSource(AskedSensors):
    """Counter of the running step, over all its nodes, refreshed as often as the cluster gathers it."""

    name = "slurm"
    min_interval_s = 10.0

    def open(self) -> None:
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise SourceUnavailable("not inside a Slurm job: SLURM_JOB_ID is not set")
        if shutil.which("sstat") is None:
            raise SourceUnavailable("the command sstat is missing on this node")
        step = f"{job}.{os.environ.get('SLURM_STEP_ID', 'batch')}"
        try:
            _step_energy(step)
        except self.failures as error:
            raise SourceUnavailable(f"sstat gives no energy for step {step}: {error}") from error
        channel = Channel(
            id=f"slurm:{step}",
            source=self.name,
            kind="energy",
            boundary="node_dc",
            label=f"nodes of step {step}",
            domain=f"slurm:{step}",
            hardware="node",
            resolution=1.0,
            update_period_s=SLURM_PERIOD_S,
            # One number for all nodes of the step: no plausible power is too high for it.
            max_power_w=1e8,
            flags=("shared_device", "aliasing_possible"),  # some of its plug-ins add up readings of a controller
            spans_nodes=True,
        )
        self.add(channel, lambda: _step_energy(step))


def _step_energy(step: str) -> float:
    text = output_of(["sstat", "-n", "-P", "-j", step, "-o", "ConsumedEnergyRaw"], SLURM_TIMEOUT_S).strip().splitlines()
    if not text or text[0].strip() in UNKNOWN:
        raise SensorError("the cluster does not gather energy (AcctGatherEnergyType in slurm.conf)")
    return float(text[0])
