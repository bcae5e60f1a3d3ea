"""The samplers of all sources of one meter, run as threads of this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from caraml.power.model import Channel
from caraml.power.sampler import STALLED_S, Offset, Sampler
from caraml.power.source import Source, UnknownDeviceError, entries
from caraml.power.store import ReadingStore

OPEN_TIMEOUT_S = 10.0
"""A driver without persistence mode may take seconds to wake its devices; longer than this is a fault [s]."""


class Sampling:
    """One sampler thread per source."""

    def __init__(self, sources: list[Source], interval: float, store: ReadingStore, offset: Offset | None = None) -> None:
        self.store = store
        self._base_interval = interval
        self._samplers = [Sampler(source, interval, store, offset) for source in sources]

    @property
    def reasons(self) -> list[str]:
        """Why sources are not read, or no longer read."""
        return [s.failure for s in self._samplers if s.failure is not None]

    @property
    def absent(self) -> list[str]:
        """Names of sources whose sensors do not exist on this machine."""
        return [s.name for s in self._samplers if s.absent]

    @property
    def closed(self) -> set[str]:
        """Flags of sensors that are there but not for this process."""
        return {s.closed for s in self._samplers if s.closed is not None}

    def start(self) -> None:
        """Open all sources at the same time and wait for each one's first reading."""
        for sampler in self._samplers:
            sampler.start()
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        for sampler in self._samplers:
            sampler.wait_open(max(deadline - time.monotonic(), 0.0))

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise an error if no source knows the accelerators that were asked for.

        A source that does not answer cannot judge: then the run goes on, and its reason is in the result.
        """
        known = entries()
        judges = [s for s in self._samplers if s.name in known and known[s.name].accelerator]
        refusals = [s.refused for s in judges if s.refused is not None]
        if not judges or any(s.failure is None for s in judges):
            return
        if refusals or all(s.absent for s in judges):
            # With devices of several makers, a name that one source knows is not unknown, but no source knows all.
            unknown = [word for word in devices if all(word in r.words for r in refusals)] or list(devices)
            present = [device for r in refusals for device in r.present]
            raise UnknownDeviceError(unknown, present)

    def read_now(self) -> None:
        """Read every channel now, all sources at the same time."""
        answered = [sampler.read_now() for sampler in self._samplers]
        self.store.wait_until(lambda: all(done() for done in answered), STALLED_S)

    def request(self, at: float) -> None:
        """Have each source read at ``at``, and once more for each different age of its channels' readings."""
        for sampler in self._samplers:
            for delay in {0.0, *(channel.age_s for channel in sampler.channels)}:
                sampler.request(at + delay)

    def expects(self, channel: Channel) -> bool:
        """Is the channel's source still read, and not hanging?"""
        sampler = self._sampler(channel)
        return sampler is not None and sampler.alive and not sampler.stalled

    def interval(self, channel: Channel) -> float:
        """Sampling interval of the channel's source [s]."""
        sampler = self._sampler(channel)
        return sampler.interval if sampler else self._base_interval

    def stop(self) -> None:
        """End all threads. One that hangs in its sensor is left behind; it cannot keep the process alive."""
        for sampler in self._samplers:
            sampler.stop()
        deadline = time.monotonic() + 1.0
        for sampler in self._samplers:
            sampler.join(max(deadline - time.monotonic(), 0.0))

    def _sampler(self, channel: Channel) -> Sampler | None:
        return next((s for s in self._samplers if s.name == channel.source), None)
