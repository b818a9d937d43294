"""What each owner counts by itself: its cards at its prices, less what it owes back by the rules of the guide."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from isthmus.core.records.held_interval import HeldInterval, RecordedPart

MS_PER_HOUR = 3_600_000


@dataclass(kw_only=True, slots=True)
class ProgramRun:
    """What the programs of an attempt will do: when those of each site check in, and when all end."""

    begun_s: float
    checkin_s: dict[str, float]
    ends_s: float
    status: int


@dataclass(kw_only=True)
class OwnerCount:
    """What the owners know: their prices in millionths from a time in ms on, programs, and what they drove out."""

    prices: dict[str, list[tuple[int, int]]]
    runs: dict[tuple[str, int], ProgramRun] = field(default_factory=dict)
    # Site and part of what an owner's own jobs drove out: its owner pays the attempt back.
    evicted: set[tuple[str, RecordedPart]] = field(default_factory=set)

    def count(self, held: Mapping[str, Sequence[HeldInterval]], now_ms: int, end_ms: int) -> dict[str, Fraction]:
        """Return by site what its owner counts up to `end_ms` in millionths, from the records of all."""
        sums = dict.fromkeys(self.prices, Fraction(0))
        for site, intervals in held.items():
            for one in intervals:
                run = self.runs.get(tuple(one.part))
                lost_by = [other for other, part in self.evicted if part == one.part]
                for begin_ms, until_ms, owing in self._late(site, one, run, now_ms) if run else ():
                    cost = self._cost(site, one.chips, begin_ms, min(until_ms, end_ms))
                    sums[site] += cost
                    payers = owing or lost_by[:1]
                    for other in payers:
                        sums[other] -= cost / len(payers)
        return sums

    def _late(self, site: str, one: HeldInterval, run: ProgramRun, now_ms: int) -> list[tuple[int, int, list[str]]]:
        """Cut an interval where the sites change that are late: those whose workers have not all checked in."""
        end_ms = one.end_ms if one.end_ms is not None else now_ms
        checkin_ms = {name: round(at_s * 1000) for name, at_s in run.checkin_s.items()}
        cuts = sorted({one.begin_ms, end_ms, *(at for at in checkin_ms.values() if one.begin_ms < at < end_ms)})
        found = []
        for begin_ms, until_ms in itertools.pairwise(cuts):
            missing = [name for name, at_ms in checkin_ms.items() if at_ms > begin_ms]
            found.append((begin_ms, until_ms, [] if site in missing else missing))
        return found

    def _cost(self, site: str, chips: int, begin_ms: int, end_ms: int) -> Fraction:
        prices = self.prices[site]
        total = Fraction(0)
        for at, (since_ms, millionths) in enumerate(prices):
            until_ms = prices[at + 1][0] if at + 1 < len(prices) else end_ms
            span_ms = min(end_ms, until_ms) - max(begin_ms, since_ms)
            if span_ms > 0:
                total += Fraction(millionths * chips * span_ms, MS_PER_HOUR)
        return total
