"""`Faults`: what goes wrong in a simulated pool, and how often, all from one seed; counted by kind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

RATES: Mapping[str, float] = {
    "server dies before the append": 0.004,
    "server dies between write and flush": 0.004,
    "server dies between append and handle": 0.004,
    "server dies before it answers": 0.004,
    "agent dies before it saves": 0.006,
    "agent dies between saving and acting": 0.006,
    "partition": 0.006,
    "slow owner": 0.04,
    "lying owner": 0.15,
    "lost report": 0.015,
    "lost reply": 0.02,
    "doubled report": 0.02,
    "late report": 0.02,
    "lost local job id": 0.03,
    "re-used local job id": 0.2,
    "node failure": 0.02,
    "owner's eviction": 0.01,
    "clock skew": 0.5,
}
"""Every kind of fault, and how often it strikes of the times when it could."""


class Faults:
    """Draws from `seed`; a kind without a rate never strikes, and nothing does while `on` is false.

    `struck` counts how often each kind did.
    """

    def __init__(self, seed: int = 0, rates: Mapping[str, float] | None = None) -> None:
        self.rng = random.Random(seed)
        self.rates = dict(rates or {})
        self.on = True
        self.struck: Counter[str] = Counter()

    def strikes(self, kind: str) -> bool:
        """Tell whether a fault of this kind happens now, and count it."""
        rate = self.rates.get(kind, 0.0) if self.on else 0.0
        if not rate or self.rng.random() >= rate:
            return False
        self.struck[kind] += 1
        return True

    def between(self, least: float, most: float) -> float:
        """Return a number between the two."""
        return self.rng.uniform(least, most)
