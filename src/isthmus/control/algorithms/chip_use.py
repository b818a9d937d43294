"""`ChipUse`: exact chip-seconds by owner, cluster and user, counted while parts hold their chips.

Time passes from event to event of the log and never backwards, so every replay of a log finds the same amounts, and
none ever falls. While the clock is set back nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

UseKey = tuple[str, str, str]
"""Owner, cluster and user."""


@dataclass(slots=True)
class HeldChips:
    """Chip-seconds up to `at_s` of `ChipUse.elapsed_s`, and the chips that are held since."""

    used_chip_s: float = 0.0
    num_chips: int = 0
    at_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ChipUse:
    """What each owner's clusters have given to each user."""

    held: dict[UseKey, HeldChips] = field(default_factory=dict)
    # Seconds that have passed since the first event.
    elapsed_s: float = 0.0
    # Time of the first and of the newest event, in seconds since the epoch; None before the first.
    since_s: float | None = None
    now_s: float | None = None

    def advance(self, now_s: float) -> None:
        """Let time pass up to an event."""
        self.elapsed_s, self.now_s = self._elapsed_at(now_s), now_s
        if self.since_s is None:
            self.since_s = now_s

    def hold(self, key: UseKey, num_chips: int) -> None:
        """Count `num_chips` more chips from now on (fewer, if negative)."""
        one = self.held.setdefault(key, HeldChips(at_s=self.elapsed_s))
        one.used_chip_s += one.num_chips * (self.elapsed_s - one.at_s)
        one.num_chips, one.at_s = one.num_chips + num_chips, self.elapsed_s

    def amounts(self, now_s: float) -> Iterator[tuple[UseKey, float, int]]:
        """Yield each key with its chip-seconds at `now_s` and the chips that are held, in the order of keys."""
        elapsed_s = self._elapsed_at(now_s)
        for key, one in sorted(self.held.items()):
            yield key, one.used_chip_s + one.num_chips * (elapsed_s - one.at_s), one.num_chips

    def _elapsed_at(self, now_s: float) -> float:
        return self.elapsed_s + max(0.0, now_s - (now_s if self.now_s is None else self.now_s))
