"""`SentFrames`: numbered frames until the other proxy has acknowledged them, and on which leg each one is."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from isthmus.core.errors import ProtocolError
from isthmus.wan.tunnel.tunnel_frame import TunnelFrame

MAX_IN_FLIGHT = 4096
"""Most frames that wait for their acknowledgement."""

MAX_IN_FLIGHT_BYTES = 2**28
"""Most payload bytes that wait, whatever credit the other side gives."""


class SentFrames:
    """Frames in flight. `lost` gives back those of a leg that broke, which then leave again under their number."""

    def __init__(self) -> None:
        self.next_number = 0
        self.num_bytes = 0
        self._frames: dict[int, TunnelFrame] = {}
        self._legs: dict[int, int] = {}
        self._again: list[int] = []
        self._floor = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def has_room(self) -> bool:
        """Whether another frame may be sent for the first time."""
        return len(self._frames) < MAX_IN_FLIGHT and self.num_bytes < MAX_IN_FLIGHT_BYTES

    def number(self, frame: TunnelFrame, leg: int) -> TunnelFrame:
        """Return `frame` with the next number; it is on `leg` from now on."""
        found = TunnelFrame(frame.kind, self.next_number, frame.stream, frame.offset, frame.payload)
        self._frames[found.number], self._legs[found.number] = found, leg
        self.next_number += 1
        self.num_bytes += len(found.payload)
        return found

    def next_again(self, leg: int) -> TunnelFrame | None:
        """Return the lowest frame that has to be sent again; it is on `leg` from now on. None if there is none."""
        while self._again:
            number = heapq.heappop(self._again)
            if number in self._frames:
                self._legs[number] = leg
                return self._frames[number]
        return None

    def lose(self, leg: int) -> int:
        """Send all frames of `leg` again; return how many."""
        lost = [number for number, at in self._legs.items() if at == leg]
        for number in lost:
            del self._legs[number]
            heapq.heappush(self._again, number)
        return len(lost)

    def acknowledge(self, floor: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Forget all frames below `floor` and in `ranges`; raise `ProtocolError` for frames that were never sent."""
        if max([floor, *(end for _, end in ranges)]) > self.next_number:
            raise ProtocolError("an acknowledgement names frames that were never sent")
        for first, end in [(self._floor, floor), *ranges]:
            for number in range(first, end):
                self._forget(number)
        self._floor = max(self._floor, floor)

    def _forget(self, number: int) -> None:
        frame = self._frames.pop(number, None)
        if frame is not None:
            self.num_bytes -= len(frame.payload)
            self._legs.pop(number, None)
