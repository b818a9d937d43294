"""Passes the bytes of TCP connections through a `Shaper`: a `Direction` carries one `Half` per connection.

A chunk is read when the link's queue has space, kept until its delivery time, then written. A sender that is
faster than the link, or than its peer, finds its own socket full: this back-pressure bounds the memory.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from isthmus.wan.shaper import Flow, Shaper

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value that makes close() send a TCP reset."""


class Direction:
    """One direction of one link: schedules its connections round-robin and delivers chunks when due.

    Use only on the thread of `loop`. `bytes_delivered` counts payload. `late_s` is the largest delay of a
    delivery that the machine added since the caller last reset it to 0.
    """

    def __init__(self, shaper: Shaper, loop: asyncio.AbstractEventLoop) -> None:
        self.shaper, self.loop = shaper, loop
        self.bytes_delivered = 0
        self.late_s = 0.0
        self.is_cut = False
        self._stopped_s = 0.0  # total time cut: the link's clock stops during a cut
        self._cut_s = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._admitted = 0
        self._waiting: deque[Half] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def _now_s(self) -> float:
        return (self._cut_s if self.is_cut else self.loop.time()) - self._stopped_s

    def admit(self, num_bytes: int, flow: Flow, action: Callable[[Any], None], value: Any) -> None:
        """Send `num_bytes` of payload; call `action(value)` on delivery."""
        due_s = self.shaper.admit(self._now_s(), num_bytes, flow)
        self._admitted += 1
        heappush(self._due, (due_s, self._admitted, action, value))
        if self._due[0][1] == self._admitted:
            self._arm()

    async def cross(self, num_bytes: int, flow: Flow) -> None:
        """Send a message of `num_bytes` and wait for its delivery."""
        arrived = asyncio.Event()
        self.admit(num_bytes, flow, lambda _: arrived.set(), None)
        await arrived.wait()

    def take(self, half: Half) -> None:
        """Handle that `half` is readable: read now, or queue it until the link and its flow can send."""
        if half.ended:
            return
        pace_s = self.shaper.pace_s(self._now_s(), half.flow)
        if half.unwritten_bytes >= self.shaper.window_bytes:
            half.listen(False)
            half.is_held = True
        elif pace_s > 0:
            half.listen(False)
            self.loop.call_later(pace_s, self.take, half)
        elif self._waiting or self._room_s() > 0:
            half.listen(False)
            self._waiting.append(half)
            self._arm()
        else:
            half.read()
            half.listen(True)

    def _room_s(self) -> float:
        return 1.0 if self.is_cut else self.shaper.room_s(self._now_s())

    def _tick(self) -> None:
        self._timer = None
        if self.is_cut:
            return
        now_s = self._now_s()
        while self._due and self._due[0][0] <= now_s:
            due_s, _, action, value = heappop(self._due)
            self.late_s = max(self.late_s, now_s - due_s)
            action(value)
        while self._waiting and self._room_s() == 0:
            half = self._waiting.popleft()
            if not half.ended and half.read():
                self._requeue(half)
            else:
                half.listen(True)
        self._arm()

    def _requeue(self, half: Half) -> None:
        """Queue `half`, which probably has more to read, behind the others unless its flow is blocked."""
        held = half.unwritten_bytes >= self.shaper.window_bytes
        if held or self.shaper.pace_s(self._now_s(), half.flow) > 0:
            self.take(half)
        else:
            self._waiting.append(half)

    def _arm(self) -> None:
        """Set the timer to the next delivery or, with waiting halves, to when half the queue is free."""
        if self.is_cut or not (self._due or self._waiting):
            return
        next_s = self._due[0][0] if self._due else self._now_s()
        if self._waiting:
            next_s = min(next_s, self._now_s() + self._room_s() + self.shaper.queue_s / 2)
        when_s = next_s + self._stopped_s
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(when_s, self._tick)

    def cut(self) -> None:
        """Stop the link's clock: chunks in flight stay in flight, and no new ones are read."""
        if not self.is_cut:
            self._cut_s, self.is_cut = self.loop.time(), True

    def restore(self) -> None:
        """Restart the link's clock where it stopped: chunks in flight arrive at the link's rate."""
        if self.is_cut:
            self._stopped_s += self.loop.time() - self._cut_s
            self.is_cut = False
            self._tick()

    def forget(self) -> None:
        """Drop everything in flight, for shutdown."""
        self._due.clear()
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Half:
    """One direction of one connection: copies `source` over `direction` to `target`, including end of stream.

    Calls `on_end(error)` once: with None after passing on the end of stream, or with the error.
    """

    def __init__(
        self,
        direction: Direction,
        source: socket.socket,
        target: socket.socket,
        flow: Flow,
        on_end: Callable[[OSError | None], None],
    ) -> None:
        self.direction, self.source, self.target, self.flow = direction, source, target, flow
        self.on_end = on_end
        self.unwritten_bytes = 0
        self.ended = False
        self.is_held = False
        self._listens = False
        self._writes = False
        self._at_end = False
        self._out: deque[memoryview] = deque()

    def listen(self, on: bool) -> None:
        """Start or stop watching the source for readability."""
        on = on and not (self.ended or self._at_end)
        if on and not self._listens:
            self.direction.loop.add_reader(self.source, self.direction.take, self)
        elif self._listens and not on:
            self.direction.loop.remove_reader(self.source)
        self._listens = on

    def send(self, data: bytes) -> None:
        """Send bytes read from the source over the link; empty bytes mean end of stream."""
        self.unwritten_bytes += len(data)
        self._at_end = not data
        self.direction.admit(len(data), self.flow, self._deliver, data)

    def read(self) -> bool:
        """Read one chunk and send it; return True if it was full, since more is probably available."""
        wanted = self.direction.shaper.chunk_bytes
        try:
            data = self.source.recv(wanted)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.end(error)
            return False
        self.send(data)
        return len(data) == wanted

    def _deliver(self, data: bytes) -> None:
        if self.ended:
            return
        self.direction.bytes_delivered += len(data)
        self._out.append(memoryview(data))
        if len(self._out) == 1:
            self._write()

    def _write(self) -> None:
        try:
            while self._out:
                if not self._out[0]:
                    self.target.shutdown(socket.SHUT_WR)
                    self.end(None)
                    return
                sent = self.target.send(self._out[0])
                self.unwritten_bytes -= sent
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
            self._await_room(False)
        except (BlockingIOError, InterruptedError):
            self._await_room(True)
        except OSError as error:
            self.end(error)
            return
        if self.is_held and self.unwritten_bytes < self.direction.shaper.window_bytes:
            self.is_held = False
            self.direction.take(self)

    def _await_room(self, on: bool) -> None:
        if on and not self._writes:
            self.direction.loop.add_writer(self.target, self._write)
        elif self._writes and not on:
            self.direction.loop.remove_writer(self.target)
        self._writes = on

    def end(self, error: OSError | None) -> None:
        """Finish after the end of stream (None) or `error`; idempotent."""
        if self.ended:
            return
        self.listen(False)
        self._await_room(False)
        self.ended = True
        self._out.clear()
        self.on_end(error)


def close_with_reset(connection: socket.socket) -> None:
    """Close with a TCP reset, so that the other side gets an error."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()
