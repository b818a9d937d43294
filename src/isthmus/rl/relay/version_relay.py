"""`VersionRelay`: takes versions of weights in from the nearest source, and passes each chunk on as it arrives.

A site has sources of chunks, nearest first: sites beside it, and the rank that trains. It asks one of them for all
chunks of a version at once, before they are made, and each source sends a chunk as soon as it has it: so a version
crosses a chain of sites while it is being coded, and each link once. A chunk counts only if it makes what the version
names, whatever site sent it. What a lost, slow or damaged source owes is asked of the next one; chunks that are here
stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from isthmus.rl.relay.relay_events import (
    ChildLost,
    ChunkArrived,
    ChunksAsked,
    Coding,
    RelayEvent,
    RelayTick,
    SourceExpected,
    SourceJoined,
    SourceLacks,
    SourceLost,
    Version,
    VersionOffered,
)
from isthmus.rl.relay.relay_instructions import (
    AskChunks,
    BeginVersion,
    CompleteVersion,
    FailVersion,
    ForgetCoding,
    KeepChunk,
    RefuseChunks,
    RelayInstruction,
    SendChunk,
)
from isthmus.rl.relay.relay_records import ArrivalRecord, ChildRecord, SourceRecord

EXPECTED_S = 3.0
"""Seconds that a source has to connect before farther ones are asked."""
SLOW_AFTER_S = 6.0
"""Seconds without a chunk after which what a source owes is asked of another one: more than a cut takes to be seen."""
MAX_DAMAGED = 3
"""Damaged chunks after which a source is not asked again."""
NUM_KEPT = 2
"""Codings whose chunks stay for sites that are behind."""
NUM_PAST = 64
MAX_WAITS = 4
"""Most codings that a site may wait for at once."""


class VersionRelay:
    """The chunks of one site; `num_chunks` by coding is the same at all sites.

    `origin` is the source that makes the versions: what it lacks or sends damaged cannot be had. `complete` is the
    version that the site has, None for a site without weights.
    """

    def __init__(self, origin: str, num_chunks: Callable[[Coding], int], complete: Version | None = None) -> None:
        self._origin, self._num_chunks = origin, num_chunks
        self.complete = complete
        self._sources: dict[str, SourceRecord] = {}
        self._children: dict[str, ChildRecord] = {}
        self._offer: VersionOffered | None = None
        self._arrival: ArrivalRecord | None = None
        self._kept: deque[Coding] = deque()
        self._past: deque[Version] = deque(maxlen=NUM_PAST)
        self._now_s = 0.0

    @property
    def arriving(self) -> Coding | None:
        """Return the coding that arrives, None between two versions."""
        return None if self._arrival is None else self._arrival.coding

    @property
    def missing(self) -> frozenset[int]:
        """Return the chunks that are still to come."""
        return frozenset() if self._arrival is None else frozenset(self._arrival.missing)

    def handle(self, event: RelayEvent, now_s: float) -> list[RelayInstruction]:
        """Return what an event at `now_s` asks of the shell, in this order."""
        self._now_s = now_s
        match event:
            case SourceExpected():
                until_s = now_s + EXPECTED_S
                self._sources[event.source] = SourceRecord(
                    name=event.source, place=event.place, is_up=False, expected_until_s=until_s
                )  # fmt: skip
                return []
            case SourceJoined():
                return self._join_source(event)
            case SourceLost():
                return self._lose_source(event.source)
            case VersionOffered():
                self._offer = event
                return self._begin_next()
            case ChunkArrived():
                return self._take(event)
            case SourceLacks():
                return self._note_lack(event)
            case ChunksAsked():
                return self._answer(event)
            case ChildLost():
                self._children.pop(event.child, None)
                return []
            case RelayTick():
                return self._ask_others_than_slow()

    def _join_source(self, event: SourceJoined) -> list[RelayInstruction]:
        known = self._sources.get(event.source)
        num_damaged = known.num_damaged if known is not None else 0
        self._sources[event.source] = SourceRecord(name=event.source, place=event.place, num_damaged=num_damaged)
        self._forget_asked(event.source)
        return [*self._begin_next(), *self._ask()]

    def _lose_source(self, name: str) -> list[RelayInstruction]:
        if (source := self._sources.get(name)) is None:
            return []
        source.is_up, source.expected_until_s = False, None
        self._forget_asked(name)
        return self._ask()

    def _forget_asked(self, name: str) -> None:
        """Take it that a source will deliver nothing of what it owes."""
        if (arrival := self._arrival) is not None:
            arrival.asked = {number: one for number, one in arrival.asked.items() if one != name}
            arrival.slow.discard(name)

    def _begin_next(self) -> list[RelayInstruction]:
        """Begin the version on offer, unless one arrives or it is here."""
        offer = self._offer
        if offer is None or self._arrival is not None or offer.version == self.complete:
            return []
        base = self.complete if self.complete in offer.bases else None
        return self._begin(Coding(offer.version, base))

    def _begin(self, coding: Coding) -> list[RelayInstruction]:
        if coding.version in self._past:
            self._past.remove(coding.version)
        for source in self._sources.values():
            source.lacks.clear()
        self._arrival = ArrivalRecord(coding=coding, missing=set(range(self._num_chunks(coding))))
        found: list[RelayInstruction] = [BeginVersion(coding=coding)]
        for name, child in self._children.items():
            for wanted in [one for one in child.waits if not self._may_come(one)]:
                del child.waits[wanted]
                found.append(RefuseChunks(child=name, coding=wanted))
        return [*found, *self._ask()]

    def _take(self, event: ChunkArrived) -> list[RelayInstruction]:
        source, arrival = self._sources.get(event.source), self._arrival
        if source is not None:
            source.active_s = self._now_s
        if arrival is None or arrival.coding != event.coding or event.number not in arrival.missing:
            return []
        if arrival.asked.get(event.number) == event.source:
            del arrival.asked[event.number]
        if not event.is_right:
            of_chunk = arrival.damaged.setdefault(event.number, {})
            of_chunk[event.source] = of_chunk.get(event.source, 0) + 1
            if source is not None:
                source.num_damaged += 1
            return self._ask()
        arrival.missing.remove(event.number)
        arrival.asked.pop(event.number, None)
        arrival.slow.discard(event.source)
        found: list[RelayInstruction] = [KeepChunk(coding=event.coding, number=event.number)]
        found += self._pass_on(event.coding, event.number)
        return found if arrival.missing else [*found, *self._complete(arrival.coding)]

    def _pass_on(self, coding: Coding, number: int) -> list[RelayInstruction]:
        found: list[RelayInstruction] = []
        for name, child in self._children.items():
            waits = child.waits.get(coding)
            if waits is not None and number in waits:
                del waits[number]
                found.append(SendChunk(child=name, coding=coding, number=number))
                if not waits:
                    del child.waits[coding]
        return found

    def _complete(self, coding: Coding) -> list[RelayInstruction]:
        """Note that a version is here, send it whole to the sites that wait for that, and begin the next one."""
        self._arrival, self.complete = None, coding.version
        self._past.append(coding.version)
        found: list[RelayInstruction] = [CompleteVersion(version=coding.version)]
        if coding.base is not None:
            self._kept.append(coding)
            if len(self._kept) > NUM_KEPT:
                found.append(ForgetCoding(coding=self._kept.popleft()))
        whole = Coding(coding.version, None)
        for name, child in self._children.items():
            waits = child.waits.pop(whole, {})
            found += [SendChunk(child=name, coding=whole, number=number) for number in waits]
        return [*found, *self._begin_next()]

    def _note_lack(self, event: SourceLacks) -> list[RelayInstruction]:
        source, arrival = self._sources.get(event.source), self._arrival
        if source is None or arrival is None or arrival.coding != event.coding:
            return []
        source.lacks.add(event.coding)
        self._forget_asked(event.source)
        return self._ask()

    def _ask(self) -> list[RelayInstruction]:
        """Ask for each chunk that is missing and not asked for; give the version up if no source has a part of it."""
        arrival = self._arrival
        if arrival is None:
            return []
        wanted: dict[str, list[int]] = {}
        owing = set(arrival.asked.values())
        ups = sorted((one for one in self._sources.values() if one.is_up), key=lambda one: (one.place, one.name))
        may = [one for one in ups if one.name not in arrival.slow] if self._is_gone(arrival.coding) else ups
        expected = [one.place for one in self._sources.values() if (one.expected_until_s or -1.0) > self._now_s]
        for number in sorted(arrival.missing - arrival.asked.keys()):
            source = _choose(may, arrival, number)
            if source is not None and any(place < source.place for place in expected):
                continue
            if source is not None:
                wanted.setdefault(source.name, []).append(number)
                arrival.asked[number] = source.name
            elif any(one.name == self._origin for one in ups):
                return self._give_up(arrival, ups)
        for name in wanted.keys() - owing:
            self._sources[name].active_s = self._now_s
        return [
            AskChunks(source=name, coding=arrival.coding, numbers=tuple(numbers)) for name, numbers in wanted.items()
        ]

    def _give_up(self, arrival: ArrivalRecord, ups: list[SourceRecord]) -> list[RelayInstruction]:
        """Begin the version on offer; where that is the same one, whole, and where it is whole already, say so."""
        coding, offer, self._arrival = arrival.coding, self._offer, None
        for source in self._sources.values():
            source.num_damaged = 0
        if offer is not None and offer.version == coding.version and coding.base is not None:
            return self._begin(Coding(coding.version, None))
        self._past.append(coding.version)
        if offer is not None and offer.version != coding.version:
            return self._begin_next()
        self._offer = None
        names = ", ".join(one.name for one in ups)
        return [FailVersion(version=coding.version, problem=f"no undamaged chunks of it from {names}")]

    def _is_gone(self, coding: Coding) -> bool:
        """Return whether the origin no longer makes a coding: another source has it now or never."""
        origin = self._sources.get(self._origin)
        return origin is not None and origin.is_up and coding in origin.lacks

    def _ask_others_than_slow(self) -> list[RelayInstruction]:
        """Ask others for what a source owes that has delivered nothing for long, where there are others."""
        arrival = self._arrival
        if arrival is None:
            return []
        for name in sorted(set(arrival.asked.values())):
            if self._now_s - self._sources[name].active_s <= SLOW_AFTER_S:
                continue
            others = [one for one in self._sources.values() if one.is_up and one.name not in (name, *arrival.slow)]
            if others or self._is_gone(arrival.coding):
                self._forget_asked(name)
                arrival.slow.add(name)
        return self._ask()

    def _answer(self, event: ChunksAsked) -> list[RelayInstruction]:
        """Send what is here; what is still to come is sent as it comes."""
        coding = event.coding
        count = self._num_chunks(coding)
        numbers = dict.fromkeys(one for one in event.numbers if 0 <= one < count)
        here = [one for one in numbers if self._has(coding, one)]
        found: list[RelayInstruction] = [SendChunk(child=event.child, coding=coding, number=one) for one in here]
        if len(here) == len(numbers):
            return found
        child = self._children.setdefault(event.child, ChildRecord())
        if not self._may_come(coding) or (coding not in child.waits and len(child.waits) >= MAX_WAITS):
            return [*found, RefuseChunks(child=event.child, coding=coding)]
        waits = child.waits.setdefault(coding, {})
        waits |= dict.fromkeys(one for one in numbers if not self._has(coding, one))
        return found

    def _has(self, coding: Coding, number: int) -> bool:
        if self._arrival is not None and self._arrival.coding == coding:
            return number not in self._arrival.missing
        return coding in self._kept or coding == (self.complete, None)

    def _may_come(self, coding: Coding) -> bool:
        """Return whether chunks of a coding that are not here may still come."""
        if self._arrival is not None and self._arrival.coding.version == coding.version:
            return coding == self._arrival.coding or coding.base is None
        is_older = self.complete is not None and coding.version.step <= self.complete.step
        return coding.version not in self._past and not is_older


def _choose(ups: list[SourceRecord], arrival: ArrivalRecord, number: int) -> SourceRecord | None:
    """Return the nearest source for a chunk: one that is not slow and has not damaged it, where there is one."""
    damaged = arrival.damaged.get(number, {})
    may = [
        one for one in ups
        if arrival.coding not in one.lacks and one.num_damaged < MAX_DAMAGED and damaged.get(one.name, 0) < MAX_DAMAGED
    ]  # fmt: skip
    return min(may, key=lambda one: (one.name in arrival.slow, damaged.get(one.name, 0), one.place), default=None)
