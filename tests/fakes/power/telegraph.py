"""A load that jumps at random between two powers, with a known integral: for tests, and for the fake GPUs of bench/power."""

from __future__ import annotations

import random
from bisect import bisect_right


class Telegraph:
    """Random jumps between two powers, at times drawn once from an exponential distribution with mean ``dwell`` [s]."""

    def __init__(self, low: float = 100.0, high: float = 500.0, dwell: float = 0.3, seed: int = 0, length: float = 120.0) -> None:
        self.low, self.high = low, high
        draw = random.Random(seed)
        self.times, self.energies = [0.0], [0.0]
        while self.times[-1] < length:
            step = draw.expovariate(1 / dwell)
            level = high if len(self.times) % 2 else low
            self.energies.append(self.energies[-1] + level * step)
            self.times.append(self.times[-1] + step)

    def power(self, t: float) -> float:
        return self.high if bisect_right(self.times, max(t, 0.0)) % 2 else self.low

    def energy(self, t: float) -> float:
        last = bisect_right(self.times, max(t, 0.0)) - 1
        return self.energies[last] + self.power(t) * (t - self.times[last])
