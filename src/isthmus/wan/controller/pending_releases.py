"""`PendingReleases`: orders to release that a domain has not answered yet, to be sent again for a time.

What a domain keeps beyond that time, its next report names, and it is ordered to release it then.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.wan.controller.controller_messages import BookingKey, ReleaseSpans, ToDomain


class PendingReleases:
    """Domains that have not answered, by booking and version."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[BookingKey, tuple[set[str], float]]] = {}

    def add(self, key: BookingKey, domains: Iterable[str], until_s: float) -> None:
        """Expect the answers of `domains`, until `until_s`."""
        known, _ = self._waiting.setdefault(key.name, {}).get(key, (set(), 0.0))
        self._waiting[key.name][key] = known.union(domains), until_s

    def answered(self, domain: str, key: BookingKey) -> None:
        """Record the answer of a domain."""
        waiting = self._waiting.get(key.name, {})
        if key in waiting:
            waiting[key][0].discard(domain)
            if not waiting[key][0]:
                del waiting[key]
            if not waiting:
                del self._waiting[key.name]

    def again(self, name: str, now_s: float) -> list[ToDomain]:
        """Return the orders of a booking to send again; those whose time is over are forgotten."""
        waiting = self._waiting.get(name, {})
        for key in [key for key, (_, until_s) in waiting.items() if until_s <= now_s]:
            del waiting[key]
        if not waiting:
            self._waiting.pop(name, None)
        return [
            ToDomain(domain, ReleaseSpans(key)) for key, (domains, _) in waiting.items() for domain in sorted(domains)
        ]
