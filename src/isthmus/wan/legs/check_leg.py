"""`check_leg`: the conformance kit of `Leg`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from isthmus.wan.legs.leg import Leg
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame

_SIZES = (1, 15, 1400, 65_537)
_WAIT_S = 20.0

MakeLegs = Callable[[], Awaitable[tuple[Leg, Leg]]]
"""Makes two legs that are joined, authenticated, not started."""


class _End:
    """Sends a list of frames, one at a time, and keeps what comes."""

    def __init__(self, leg: Leg, frames: list[TunnelFrame], expected: int) -> None:
        self._leg, self._frames, self._expected = leg, list(frames), expected
        self.got: list[TunnelFrame] = []
        self.broken: str | None = None
        self.has_all, self.is_broken = asyncio.Event(), asyncio.Event()
        if not expected:
            self.has_all.set()

    def leg_ready(self) -> None:
        if self._frames:
            self._leg.send(self._frames.pop(0))

    def leg_frame(self, frame: TunnelFrame) -> None:
        self.got.append(frame)
        if len(self.got) >= self._expected:
            self.has_all.set()

    def leg_broken(self, reason: str) -> None:
        self.broken = reason
        self.is_broken.set()


def _frames(leg: Leg, count: int, salt: int) -> list[TunnelFrame]:
    sizes = (*_SIZES, leg.max_payload_bytes)
    data = [
        TunnelFrame(FrameKind.DATA, number, salt, number, bytes([salt + number % 200]) * sizes[number % len(sizes)])
        for number in range(count)
    ]
    return [*data, TunnelFrame(FrameKind.PING)]


def _content(frames: list[TunnelFrame]) -> list[tuple[int, int, int, int, bytes]]:
    return sorted((one.kind, one.number, one.stream, one.offset, bytes(one.payload)) for one in frames)


async def _done(event: asyncio.Event) -> None:
    await event.wait()


async def check_leg(make: MakeLegs, num_frames: int = 40) -> None:
    """Check every rule of `Leg` on what `make` returns; raise `AssertionError` with the rule that is broken."""
    await _check_frames(make, num_frames)
    await _check_close(make)


async def _check_frames(make: MakeLegs, num_frames: int) -> None:
    """Frames of every size, both ways at once, arrive as they were sent."""
    legs = await make()
    ends, sent = [], [_frames(legs[0], num_frames, 1), _frames(legs[1], num_frames, 7)]
    for leg, frames, other in zip(legs, sent, reversed(sent), strict=True):
        end = _End(leg, frames, len(other))
        leg.start(end)
        ends.append(end)
    for end in ends:
        end.leg_ready()
    for end in ends:
        await asyncio.wait_for(_done(end.has_all), _WAIT_S)
    for leg in legs:
        leg.close()
    for end, frames in zip(ends, reversed(sent), strict=True):
        if _content(end.got) != _content(frames):
            raise AssertionError("frames arrive changed, twice or not at all")
        if end.broken is not None:
            raise AssertionError(f"a leg breaks by itself: {end.broken}")


async def _check_close(make: MakeLegs) -> None:
    """A side that closes is not called again; the other one learns it."""
    legs = await make()
    ends = [_End(leg, [], 1) for leg in legs]
    for leg, end in zip(legs, ends, strict=True):
        leg.start(end)
    legs[0].close()
    legs[0].close()
    await asyncio.wait_for(_done(ends[1].is_broken), _WAIT_S)
    if ends[0].broken is not None:
        raise AssertionError("a leg calls its owner after `close`")
