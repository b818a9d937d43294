"""`LoginBackoff`: which addresses have sent too many requests without a valid token. Pure: the clock is an argument.

Each address has a leaky bucket (Turner, "New directions in communications", 1986), and so has the server as a whole,
since an attacker may have many addresses. A full bucket never holds up a valid token: its only effect is that requests
without one are refused at once, at the least cost, with a growing delay to wait.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FREE_FAILURES = 10.0
"""Failures of an address before it is limited."""
LEAK_PER_S = 0.1
"""Failures of an address that are forgotten per second."""
FREE_FAILURES_IN_ALL = 200.0
"""Failures of all addresses before every request without a valid token is refused at once."""
LEAK_IN_ALL_PER_S = 50.0
"""Failures of all addresses that are forgotten per second."""
MAX_FAILURES = 600.0
"""Failures that a bucket holds: an address that stops is free after about 100 minutes at the latest."""
MAX_DELAY_S = 60.0
"""Longest delay that a refusal names."""
MAX_ADDRESSES = 10_000
"""Addresses with a bucket; the one whose last failure is oldest loses its bucket first."""


@dataclass(slots=True)
class _Bucket:
    num_failures: float
    at_s: float

    def level(self, now_s: float, leak_per_s: float) -> float:
        return max(0.0, self.num_failures - max(0.0, now_s - self.at_s) * leak_per_s)

    def add(self, now_s: float, leak_per_s: float) -> float:
        """Count a failure and return the level."""
        self.num_failures = min(MAX_FAILURES, self.level(now_s, leak_per_s) + 1.0)
        self.at_s = now_s
        return self.num_failures


class LoginBackoff:
    """Failed logins by address, bounded in memory, and those that were not reported yet."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._all = _Bucket(0.0, 0.0)
        self._unreported: dict[str, int] = {}
        self._num_unlisted = 0

    def is_limited(self, address: str, now_s: float) -> bool:
        """Return whether a request without a valid token from `address` is refused at once."""
        bucket = self._buckets.get(address)
        if bucket is not None and bucket.level(now_s, LEAK_PER_S) >= FREE_FAILURES:
            return True
        return self._all.level(now_s, LEAK_IN_ALL_PER_S) >= FREE_FAILURES_IN_ALL

    def record_failure(self, address: str, now_s: float) -> float:
        """Count a failure; return how long the sender should wait, in seconds (0: it may try again)."""
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = _Bucket(0.0, now_s)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(address)
        excess = bucket.add(now_s, LEAK_PER_S) - FREE_FAILURES
        is_full_in_all = self._all.add(now_s, LEAK_IN_ALL_PER_S) >= FREE_FAILURES_IN_ALL
        self._count(address)
        if excess < 0 and not is_full_in_all:
            return 0.0
        return float(min(MAX_DELAY_S, 2.0 ** min(10.0, 1.0 + max(0.0, excess) // 10)))

    def take_report(self) -> tuple[dict[str, int], int]:
        """Return the failures by address since the last call, and those of addresses beyond `MAX_ADDRESSES`."""
        found = self._unreported, self._num_unlisted
        self._unreported, self._num_unlisted = {}, 0
        return found

    def _count(self, address: str) -> None:
        if address in self._unreported or len(self._unreported) < MAX_ADDRESSES:
            self._unreported[address] = self._unreported.get(address, 0) + 1
        else:
            self._num_unlisted += 1
