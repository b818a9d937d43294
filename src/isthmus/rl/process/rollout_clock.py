"""`RolloutClock`: what a rank that decodes spends its time on, by cause, and how many tokens it decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Cause = Literal["decode", "wait_samples", "wait_weights", "wait_link"]
"""Decoding; connected without a sample to decode; without complete weights; without a connection to the ledger."""

CAUSES: tuple[Cause, ...] = ("decode", "wait_samples", "wait_weights", "wait_link")


class RolloutClock:
    """Divides the time of a rank among `CAUSES`; `clock` returns seconds. It begins without a connection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._cause, self._since_s = clock, CAUSES[-1], clock()
        self._spent_s = dict.fromkeys(CAUSES, 0.0)
        self._num_tokens = 0

    def enter(self, cause: Cause) -> None:
        """Let the time from now on count as `cause`."""
        now_s = self._clock()
        self._spent_s[self._cause] += now_s - self._since_s
        self._cause, self._since_s = cause, now_s

    def add_tokens(self, count: int) -> None:
        """Add decoded tokens."""
        self._num_tokens += count

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call: seconds by cause, decoded tokens and their rate."""
        self.enter(self._cause)
        total_s = sum(self._spent_s.values())
        values = {f"{cause}_s": spent_s for cause, spent_s in self._spent_s.items()}
        values["decoded_tokens"] = float(self._num_tokens)
        values["rollout_tokens_per_s"] = self._num_tokens / total_s if total_s else 0.0
        self._spent_s, self._num_tokens = dict.fromkeys(CAUSES, 0.0), 0
        return values
