"""`FaultInjector`: injects faults into a simulated pool at random from one seed, and counts them by kind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

FAULT_RATES: Mapping[str, float] = {
    "server dies before the append": 0.001,
    "server dies between write and flush": 0.001,
    "server dies between append and handle": 0.001,
    "server dies before it answers": 0.001,
    "agent dies before it saves": 0.006,
    "agent dies between saving and acting": 0.006,
    "partition": 0.006,
    "slow owner": 0.2,
    "lying owner": 0.15,
    "lost report": 0.015,
    "lost reply": 0.02,
    "doubled report": 0.02,
    "late report": 0.02,
    "check without result": 0.05,
    "lost local job id": 0.03,
    "re-used local job id": 0.2,
    "node failure": 0.4,
    "owner's eviction": 0.1,
    "clock skew": 0.5,
}
"""Probability of each kind of fault per opportunity."""


class FaultInjector:
    """Draws faults from `seed`. Kinds without a rate never occur, and none does while `enabled` is false.

    `counts` counts faults by kind; `history` holds the time, by `clock`, and kind of each.
    """

    def __init__(self, seed: int = 0, rates: Mapping[str, float] | None = None) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
        self.rates = dict(rates or {})
        self.enabled = True
        self.clock: Callable[[], float] = lambda: 0.0
        self.counts: Counter[str] = Counter()
        self.history: list[tuple[float, str]] = []

    def should_inject(self, kind: str) -> bool:
        """Decide whether a fault of this kind occurs now, and record it."""
        rate = self.rates.get(kind, 0.0) if self.enabled else 0.0
        if not rate or self.rng.random() >= rate:
            return False
        self.record(kind)
        return True

    def record(self, kind: str) -> None:
        """Record a fault that the caller injects."""
        self.counts[kind] += 1
        self.history.append((self.clock(), kind))

    def draw_uniform(self, least: float, most: float) -> float:
        """Draw a number uniformly from [least, most]."""
        return self.rng.uniform(least, most)
