"""`PipeBookings`: which booking has how much of which pipe when; nothing is ever booked beyond a pipe's capacity."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from isthmus.core.errors import ConflictError
from isthmus.wan.control.wan_topology import ServiceClass
from isthmus.wan.controller.rate_calendar import RateCalendar
from isthmus.wan.controller.wan_network import NetworkPipe


@dataclass(frozen=True, slots=True)
class PipeSpan:
    """A rate on one pipe from `start_s` until before `end_s`."""

    pipe: str
    start_s: float
    end_s: float
    kbps: int


class PipeBookings:
    """The calendars of some pipes, and the spans of each booking. A pipe that is down has nothing free."""

    def __init__(self, pipes: Iterable[NetworkPipe], bulk_share: float) -> None:
        self.capacity_kbps = {pipe.name: pipe.capacity_kbps for pipe in pipes}
        self.bulk_kbps = {name: math.floor(kbps * bulk_share) for name, kbps in self.capacity_kbps.items()}
        self.down: set[str] = set()
        self._all = {name: RateCalendar() for name in self.capacity_kbps}
        self._bulk: defaultdict[str, RateCalendar] = defaultdict(RateCalendar)
        self._spans: dict[Hashable, tuple[tuple[PipeSpan, ...], ServiceClass]] = {}
        self._of_pipe: defaultdict[str, dict[Hashable, None]] = defaultdict(dict)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether `key` is booked."""
        return key in self._spans

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys of all bookings, in the order in which they were booked."""
        return iter(self._spans)

    def free_kbps(self, pipe: str, start_s: float, end_s: float, service: ServiceClass) -> int:
        """Return what is free for a class at every moment of a time; negative after a pipe has shrunk."""
        if pipe in self.down:
            return 0
        free = self.capacity_kbps[pipe] - self._all[pipe].peak_kbps(start_s, end_s)
        if service == "bulk":
            return min(free, self.bulk_kbps[pipe] - self._bulk[pipe].peak_kbps(start_s, end_s))
        return free

    def free_without_bulk_kbps(self, pipe: str, start_s: float, end_s: float) -> int:
        """Return what training could have in a time if bulk bookings gave way."""
        if pipe in self.down:
            return 0
        steps = self._all[pipe].steps(start_s, end_s)
        used = max(kbps - self._bulk[pipe].least_kbps(first_s, last_s) for first_s, last_s, kbps in steps)
        return self.capacity_kbps[pipe] - used

    def free_steps(
        self, pipe: str, start_s: float, end_s: float, service: ServiceClass
    ) -> Iterator[tuple[float, float, int]]:
        """Yield (start, end, free kbit/s) of each step of a time."""
        for first_s, last_s, used_kbps in self._all[pipe].steps(start_s, end_s):
            free = 0 if pipe in self.down else self.capacity_kbps[pipe] - used_kbps
            if service == "training":
                yield first_s, last_s, free
                continue
            for from_s, to_s, bulk_kbps in self._bulk[pipe].steps(first_s, last_s):
                yield from_s, to_s, min(free, self.bulk_kbps[pipe] - bulk_kbps)

    def book(self, key: Hashable, spans: tuple[PipeSpan, ...], service: ServiceClass) -> PipeSpan | None:
        """Book all spans, or none; return the first one that does not fit. Raise `ConflictError` for a known key."""
        if key in self._spans:
            raise ConflictError(f"{key} is booked already", hint="release it first")
        for number, span in enumerate(spans):
            known = span.pipe in self.capacity_kbps and span.kbps > 0 and span.start_s < span.end_s
            if not known or self.free_kbps(span.pipe, span.start_s, span.end_s, service) < span.kbps:
                for one in spans[:number]:
                    self._add(one, -one.kbps, service)
                return span
            self._add(span, span.kbps, service)
        self._spans[key] = spans, service
        for span in spans:
            self._of_pipe[span.pipe][key] = None
        return None

    def release(self, key: Hashable) -> bool:
        """Release a booking; return whether there was one."""
        spans, service = self._spans.pop(key, ((), "training"))
        for span in spans:
            self._add(span, -span.kbps, service)
            self._of_pipe[span.pipe].pop(key, None)
        return bool(spans)

    def spans_of(self, key: Hashable) -> tuple[PipeSpan, ...]:
        """Return the spans of a booking; none for an unknown one."""
        return self._spans[key][0] if key in self._spans else ()

    def is_bulk(self, key: Hashable) -> bool:
        """Return whether a booking is of the class `bulk`."""
        return key in self._spans and self._spans[key][1] == "bulk"

    def bookings_on(self, pipe: str) -> list[Hashable]:
        """Return the keys of the bookings on a pipe, in the order in which they were booked."""
        return list(self._of_pipe[pipe])

    def over_booked(self) -> list[str]:
        """Return the pipes with more than their capacity booked, recounted from the spans of all bookings."""
        changes: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        bulk: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for spans, service in self._spans.values():
            for span in spans:
                for found in (changes, bulk) if service == "bulk" else (changes,):
                    found[span.pipe] += [(span.start_s, span.kbps), (span.end_s, -span.kbps)]
        over = [name for name, found in changes.items() if _peak(found) > self.capacity_kbps[name]]
        return sorted({*over, *(name for name, found in bulk.items() if _peak(found) > self.bulk_kbps[name])})

    def _add(self, span: PipeSpan, kbps: int, service: ServiceClass) -> None:
        self._all[span.pipe].add(span.start_s, span.end_s, kbps)
        if service == "bulk":
            self._bulk[span.pipe].add(span.start_s, span.end_s, kbps)


def _peak(changes: list[tuple[float, int]]) -> int:
    current = peak = 0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak
