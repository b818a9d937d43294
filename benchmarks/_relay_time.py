"""`RelayTime`: when the last site has a version, by `VersionRelay` on lines of a rate and a delay, in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.rl.relay.chunk_table import ChunkTable
from isthmus.rl.relay.relay_events import (
    ChunkArrived,
    ChunksAsked,
    Coding,
    RelayEvent,
    SourceJoined,
    Version,
    VersionOffered,
)
from isthmus.rl.relay.relay_instructions import AskChunks, CompleteVersion, SendChunk
from isthmus.rl.relay.version_relay import VersionRelay

ORIGIN = "a"
HEADER_BYTES = 300
"""A message without the content of a chunk."""


@dataclass
class _Line:
    """What a site sends over: messages leave one after another."""

    bytes_per_s: float
    free_s: float = 0.0
    sent_bytes: int = 0


@dataclass
class RelayTime:
    """Sites with uplinks of `gbps` and a delay between any two; `sources` are asked in their order, the origin last."""

    sources: Mapping[str, tuple[str, ...]]
    gbps: float
    delay_s: float
    num_weights: int
    one_uplink: bool
    lines: dict[str, _Line] = field(default_factory=dict)

    def last_site_s(self) -> float:
        """Return when the last site has whole weights of 16 bits; they are offered to all at 0."""
        table = ChunkTable({"w": self.num_weights})
        version = Version(0, "x")
        relays = {name: VersionRelay(ORIGIN, table.num_chunks) for name in self.sources}
        queue: list[tuple[float, int, str, RelayEvent]] = []
        numbers = itertools.count()
        ends: dict[str, float] = {}

        def send(now_s: float, sender: str, receiver: str, event: RelayEvent, content_bytes: int = 0) -> None:
            # With one uplink all that a site sends shares it; otherwise each pair has a line of its own.
            key = sender if self.one_uplink else f"{sender}>{receiver}"
            line = self.lines.setdefault(key, _Line(self.gbps * 1e9 / 8))
            size = HEADER_BYTES + content_bytes
            line.free_s = max(line.free_s, now_s) + size / line.bytes_per_s
            line.sent_bytes += size
            heapq.heappush(queue, (line.free_s + self.delay_s, next(numbers), receiver, event))

        for name, sources in self.sources.items():
            for place, source in enumerate((*sources, ORIGIN)):
                relays[name].handle(SourceJoined(source=source, place=place), 0.0)
            send(0.0, ORIGIN, name, VersionOffered(version=version))
        while queue:
            now_s, _, receiver, event = heapq.heappop(queue)
            if receiver == ORIGIN:
                found: list[object] = []
                if isinstance(event, ChunksAsked):
                    found = [SendChunk(child=event.child, coding=event.coding, number=one) for one in event.numbers]
            else:
                found = list(relays[receiver].handle(event, now_s))
            for one in found:
                if isinstance(one, AskChunks):
                    asked = ChunksAsked(child=receiver, coding=one.coding, numbers=one.numbers)
                    send(now_s, receiver, one.source, asked)
                elif isinstance(one, SendChunk):
                    size = 2 * table.chunks(Coding(version, None))[one.number].num_elements
                    chunk = ChunkArrived(source=receiver, coding=one.coding, number=one.number, is_right=True)
                    send(now_s, receiver, one.child, chunk, size)
                elif isinstance(one, CompleteVersion):
                    ends[receiver] = now_s
        if ends.keys() != self.sources.keys():
            raise ValueError(f"only {sorted(ends)} have the version")
        return max(ends.values())
