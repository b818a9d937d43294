"""`RefusedCallers`: counts the callers that a rank turned away, for an event a minute at most."""

from __future__ import annotations

import threading
from collections import Counter

MAX_ADDRESSES = 8
"""Addresses that are counted one by one until the next event; callers of others are counted together."""

INTERVAL_S = 60.0


class RefusedCallers:
    """Callers that were turned away, by address. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._next_s = float("-inf")
        self._lock = threading.Lock()

    def add(self, address: str, now_s: float) -> str | None:
        """Count a caller at `now_s`; return a description of those since the last one, if one is due."""
        with self._lock:
            is_known = address in self._counts or len(self._counts) < MAX_ADDRESSES
            self._counts[address if is_known else "other addresses"] += 1
            if now_s < self._next_s:
                return None
            self._next_s, counts = now_s + INTERVAL_S, self._counts
            self._counts = Counter()
        callers = ", ".join(f"{count} from {where or 'unknown'}" for where, count in counts.most_common())
        return f"refused connections: {callers}"
