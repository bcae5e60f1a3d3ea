"""AMD GPUs through the amdsmi library: energy counter and socket power.

Units as in the AMD SMI reference: ``energy_accumulator x counter_resolution`` µJ; power in whole W, ``N/A`` where a die
does not know. An MI250(X) is two devices of which the first knows the package's power; the partitions of an MI300 all
repeat their socket's. Either way one package is one channel here and its devices are the channel's users. The socket of an MI300A has
processor cores.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caraml.power.model import Channel
from caraml.power.source import AskedSensors, SensorError, SourceUnavailable, select
from caraml.power.sources.files import DUAL_DIE, MICRO
from caraml.system.files import APUS
from caraml.system.visible import ROCM

DRIVER = Path("/dev/kfd")
UPDATE_PERIOD_S = 0.01
MEAN_WINDOW_S = 1.0
"""Averaging time of ``average_socket_power``; not published, so this is the cautious value [s]."""
INVALID = (0xFFFF, 0xFFFFFFFF)
IMPORT_FAILURES = (ImportError, OSError, KeyError, AttributeError)
"""The library raises any of these where ROCm is missing or does not fit."""


@dataclass(slots=True)
class _Die:
    """One device of the library."""

    handle: Any
    id: str
    pci: str
    name: str
    number: int
    """In the runtime's order, in which masks count."""
    aliases: list[str]
    partners: list[str] = field(default_factory=list)


class AmdSmiSource(AskedSensors):
    """AMD accelerators, one channel pair per package."""

    name = "amdsmi"
    _smi: Any = None

    def open(self) -> None:
        """Load the library, find the packages and probe once what each can tell."""
        self.expect_driver("AMD compute", DRIVER)
        try:
            # The library prints advice on import, which would land in the middle of a user's output.
            with contextlib.redirect_stdout(io.StringIO()):
                smi = importlib.import_module("amdsmi")
        except IMPORT_FAILURES as error:
            fix = "install the amdsmi package of this machine's ROCm (in /opt/rocm/share/amd_smi)"
            raise SourceUnavailable(f"the library amdsmi cannot be loaded ({type(error).__name__}: {error})", fix) from error
        try:
            smi.amdsmi_init()
            self._smi, self.failures = smi, (smi.AmdSmiException, SensorError, KeyError, AttributeError, ValueError, TypeError)
            dies = [self._die(i, handle) for i, handle in enumerate(smi.amdsmi_get_processor_handles())]
        except smi.AmdSmiException as error:
            raise SourceUnavailable(f"amdsmi does not start: {error}", "check that amd-smi list works on this node") from error
        for die in self._packages(dies):
            self._probe(die)
        if not self.listed:
            raise SourceUnavailable("no AMD accelerator that is visible to this process offers energy or power")

    def _die(self, position: int, handle: Any) -> _Die:
        smi = self._smi
        pci = str(smi.amdsmi_get_gpu_device_bdf(handle))
        uuid = self.or_none(lambda: str(smi.amdsmi_get_gpu_device_uuid(handle))) or pci
        name = self.or_none(lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])) or "AMD GPU"
        info = self.or_none(lambda: smi.amdsmi_get_gpu_enumeration_info(handle)) or {}
        number = info.get("hip_id")
        aliases = [pci, uuid, str(info.get("hip_uuid", uuid))]
        return _Die(handle, uuid, pci, name, number if isinstance(number, int) else position, aliases)

    def _packages(self, dies: list[_Die]) -> list[_Die]:
        """One die for every package of which a visible device is part."""
        ordered = sorted(dies, key=lambda d: d.number)
        chosen = set(select([d.id for d in ordered], {d.id: d.aliases for d in ordered}, self.devices, ROCM))
        heads: list[_Die] = []
        members: dict[str, list[str]] = {}
        for die in sorted(dies, key=lambda d: d.pci):
            head = self._head(die, heads)
            if head is die:
                heads.append(die)
            members.setdefault(head.id, []).append(die.id)
        for head in heads:
            head.partners = [m for m in members[head.id] if m != head.id]
        return [head for head in heads if chosen & set(members[head.id])]

    def _head(self, die: _Die, heads: list[_Die]) -> _Die:
        """The device that speaks for the package of ``die``: itself, unless it is a second die or a partition."""
        slot = die.pci.rpartition(".")[0]
        for head in heads:
            if slot and head.pci.rpartition(".")[0] == slot:
                return head
        second = any(model in die.name for model in DUAL_DIE.values()) and self.or_none(lambda: self._power(die.handle)) in (None, 0.0)
        return heads[-1] if second and heads and heads[-1].name == die.name else die

    def _probe(self, die: _Die) -> None:
        """Add counter and power of one package, as far as they answer."""
        dual = any(model in die.name for model in DUAL_DIE.values()) and bool(die.partners)
        limit = self.or_none(lambda: float(self._smi.amdsmi_get_power_info(die.handle)["power_limit"]) * MICRO)
        apu = any(name in die.name for name in APUS.values())
        flags = ("dual_die_parent",) if dual else ("shared_device",) if die.partners else ()
        common: dict[str, Any] = {
            "source": self.name,
            "boundary": "module" if apu else "device",
            "label": die.name,
            "domain": die.id,
            "hardware": "amd",
            "update_period_s": UPDATE_PERIOD_S,
            "max_power_w": 2 * limit if limit and limit > 1 else None,
            "flags": (*flags, "module_scope") if apu else flags,
            "users": (die.id, *die.partners) if die.partners else (),
        }
        energy = Channel(id=f"amdsmi:{die.id}:energy", kind="energy", resolution=16 * MICRO, **common)
        self.try_to_add(energy, lambda: self._energy(die.handle))
        if self.or_none(lambda: self._power(die.handle)) is not None:
            instant = _number(self._smi.amdsmi_get_power_info(die.handle).get("current_socket_power")) is not None
            power = Channel(
                id=f"amdsmi:{die.id}:power",
                kind="power_instant" if instant else "power_mean",
                mean_window_s=0.0 if instant else MEAN_WINDOW_S,
                resolution=1.0,
                **common,
            )
            self.add(power, lambda: self._power(die.handle))

    def _energy(self, handle: Any) -> float:
        """Counter [J]."""
        answer = self._smi.amdsmi_get_energy_count(handle)
        count = _number(answer.get("energy_accumulator", answer.get("power")))
        if count is None or count == 0:
            raise SensorError(f"energy counter says {count}")
        return count * float(answer["counter_resolution"]) * MICRO

    def _power(self, handle: Any) -> float:
        """Socket power [W]: current where it is known, else averaged."""
        answer = self._smi.amdsmi_get_power_info(handle)
        for key in ("current_socket_power", "average_socket_power", "socket_power"):
            power = _number(answer.get(key))
            if power is not None:
                return power
        raise SensorError("socket power is N/A")

    def close(self) -> None:
        if self._smi is not None:
            self._smi.amdsmi_shut_down()
            self._smi = None


def _number(value: Any) -> float | None:
    """A number out of an answer in which ``"N/A"`` and all-ones mean that there is none."""
    return float(value) if isinstance(value, int | float) and value not in INVALID else None
