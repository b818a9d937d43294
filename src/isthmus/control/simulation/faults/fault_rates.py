"""`Faults`: what goes wrong in a simulated pool, and how often, all from one seed; counted by kind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

RATES: Mapping[str, float] = {
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
    "lost local job id": 0.03,
    "re-used local job id": 0.2,
    "node failure": 0.4,
    "owner's eviction": 0.1,
    "clock skew": 0.5,
}
"""Every kind of fault, and how often it strikes of the times when it could."""


class Faults:
    """Draws from `seed`; a kind without a rate never strikes, and nothing does while `on` is false.

    `struck` counts how often each kind did, `history` says when, by `clock`.
    """

    def __init__(self, seed: int = 0, rates: Mapping[str, float] | None = None) -> None:
        self.rng = random.Random(seed)
        self.rates = dict(rates or {})
        self.on = True
        self.clock: Callable[[], float] = lambda: 0.0
        self.struck: Counter[str] = Counter()
        self.history: list[tuple[float, str]] = []

    def strikes(self, kind: str) -> bool:
        """Tell whether a fault of this kind happens now, and count it."""
        rate = self.rates.get(kind, 0.0) if self.on else 0.0
        if not rate or self.rng.random() >= rate:
            return False
        self.note(kind)
        return True

    def note(self, kind: str) -> None:
        """Count a fault that somebody else has decided on."""
        self.struck[kind] += 1
        self.history.append((self.clock(), kind))

    def between(self, least: float, most: float) -> float:
        """Return a number between the two."""
        return self.rng.uniform(least, most)
