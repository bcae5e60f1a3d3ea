"""The limits of this machine: searched for once, kept with their date in the user's cache folder, and looked at in short at every run.

One process can be disturbed while it measures; what was measured before then stands in. A limit is kept per device model, release of torch,
number of threads and of processes, and on CPUs per number of cores and sockets and time quota: what changes it otherwise, such as another
clock or power limit, is seen by the look in short. Machines that share a home share it, so that one that is slower than its like is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import ValidationError

from caraml.base.errors import CaramlError, EnvironmentUnfitError
from caraml.base.files import cache_home, write_file
from caraml.system import host
from caraml.system.kernels import Kind, device_name
from caraml.system.model import DType
from caraml.system.probe import METHOD_VERSION, Limit, measure, measure_again
from caraml.system.variables import PROBE, seconds_asked

SEARCH_SECONDS: dict[Kind, float] = {"arithmetic": 3.0, "memory": 0.6, "cache": 0.3}
LOOK_SECONDS: dict[Kind, float] = {"arithmetic": 0.6, "memory": 0.3, "cache": 0.15}
_KEPT_DAYS = 30
"""After that a limit is searched for again: firmware, kernels of the system and the machine's settings change."""
_TOO_LOW = 0.9
"""Share of the kept limit below which a look in short says that the machine was disturbed."""


@dataclass(frozen=True)
class Look:
    """A limit as a run knows it."""

    best: Limit
    """The better of what is kept and what was measured now."""
    now: Limit

    @property
    def disturbed(self) -> str | None:
        """Why what was measured now is in doubt, or ``None``."""
        if self.now.rate < _TOO_LOW * self.best.rate:
            where = "" if self.best.host == self.now.host else f" on {self.best.host or 'another machine'}"
            return f"in this process {self.now.rate / self.best.rate:.0%} of it; the limit is that of {self.best.measured_at[:16]}{where}"
        return self.now.disturbed


def look(kind: Kind, device: torch.device, dtype: DType = "fp32", *, processes: int = 1, keep: bool = True) -> Look:
    """The limit of ``device``: searched for where none is kept, else its kernel measured again.

    So many ``processes`` measure at the same time on this node, each its own part of it; one that keeps what is found is enough.

    Raises:
        EnvironmentUnfitError: the device cannot do that at all, or nothing is to be looked for.
        InputError: how long is to be looked for is no number.
    """
    if _share() <= 0:
        raise EnvironmentUnfitError(f"{PROBE} is 0: no limit is looked for")
    kept = known(kind, device, dtype, processes=processes)
    if kept is not None and kept.disturbed is None:
        now = measure_again(kept, device, budget_s=_share() * LOOK_SECONDS[kind])
        if now.low is None or now.low <= kept.rate:
            return Look(kept, now)
    found = measure(kind, device, dtype, budget_s=_share() * SEARCH_SECONDS[kind], processes=processes)
    best = found if kept is None or (found.disturbed is None, found.rate) >= (kept.disturbed is None, kept.rate) else kept
    if keep and best is found:
        path = _path(kind, device, dtype, processes)
        with suppress(OSError):  # a search at every run, then; `caraml doctor` says that the folder cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, found.model_dump_json(indent=1), sync="none")
    return Look(best, found)


def looks(
    kinds: Sequence[Kind], device: torch.device, dtype: DType = "fp32", *, processes: int = 1, keep: bool = True
) -> dict[Kind, Look | str]:
    """The limits of several kinds; in words why there is none. Raises ``InputError`` where how long is to be looked for is no number."""
    found: dict[Kind, Look | str] = {}
    _share()
    for kind in kinds:
        try:
            found[kind] = look(kind, device, dtype if kind == "arithmetic" else "fp32", processes=processes, keep=keep)
        except CaramlError as error:
            found[kind] = error.line
    return found


def known(kind: Kind, device: torch.device, dtype: DType = "fp32", *, processes: int = 1) -> Limit | None:
    """The limit that is kept, unless it is too old."""
    try:
        limit = Limit.model_validate_json(_path(kind, device, dtype, processes).read_text(encoding="utf-8"))
        recent = datetime.now(UTC) - datetime.fromisoformat(limit.measured_at) < timedelta(days=_KEPT_DAYS)
    except (OSError, ValidationError, ValueError, TypeError):
        return None
    return limit if recent else None


def must_search(kind: Kind, device: torch.device, dtype: DType = "fp32", *, processes: int = 1) -> bool:
    """Whether a limit is worth the time of a search: none is kept, or it was measured beside others."""
    kept = known(kind, device, dtype, processes=processes)
    return kept is None or kept.disturbed is not None


def _share() -> float:
    """How long searches and looks take, as a share of what is usual. Raises ``InputError`` where the variable has no such number."""
    usual = SEARCH_SECONDS["arithmetic"]
    return seconds_asked(PROBE, usual) / usual


def _path(kind: Kind, device: torch.device, dtype: DType, processes: int) -> Path:
    on_cpus = (torch.get_num_threads(), processes, *_share_of_host(host.mask())) if device.type == "cpu" else ()
    decisive = (METHOD_VERSION, kind, dtype, device_name(device), torch.__version__, *on_cpus)
    return cache_home() / "limits" / f"{kind}-{dtype}-{hashlib.sha256(repr(decisive).encode()).hexdigest()[:16]}.json"


@lru_cache
def _share_of_host(cpus: frozenset[int]) -> tuple[float | None, ...]:
    """Cores and sockets behind some logical CPUs, and their time quota: a home of many machines has CPUs of one model in several places."""
    found = host.cores(cpus)
    return len(found), len({core.socket for core in found}), host.cgroup_cpus()
