"""Passes the bytes of TCP connections through a `Shaper`: a `LinkDirection` carries one `HalfStream` per connection.

A chunk is read when the link's queue has space, kept until its delivery time, then written. A sender that is
faster than the link, or than its peer, finds its own socket full: this back-pressure bounds the memory.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

from isthmus.wan.shaper import Flow, Shaper

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value that makes close() send a TCP reset."""


@dataclass(frozen=True, kw_only=True)
class DeliveredChunk:
    """Bytes that crossed a link, in the order of their stream, and when (seconds of the event loop's clock)."""

    # Number of the stream among those of its direction.
    stream: int
    data: bytes
    # When the link took the bytes from the sender, and when it passed them to the receiver.
    read_s: float
    delivered_s: float


class LinkDirection:
    """One direction of one link: schedules its connections round-robin and delivers chunks when due.

    Use only on the thread of `loop`. `delivered_bytes` counts payload. `max_late_s` is the largest delay of a
    delivery that the machine added since the caller last reset it to 0. `record` gets every delivered chunk.
    """

    def __init__(
        self,
        shaper: Shaper,
        loop: asyncio.AbstractEventLoop,
        record: Callable[[DeliveredChunk], None] | None = None,
    ) -> None:
        self.shaper, self.loop, self.record = shaper, loop, record
        self.num_streams = 0
        self.delivered_bytes = 0
        self.max_late_s = 0.0
        self.is_cut = False
        self._total_cut_s = 0.0  # total time cut: the link's clock stops during a cut
        self._cut_at_s = 0.0
        self._scheduled: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_admitted = 0
        self._waiting: deque[HalfStream] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def _now_s(self) -> float:
        return (self._cut_at_s if self.is_cut else self.loop.time()) - self._total_cut_s

    def admit(self, num_bytes: int, flow: Flow, action: Callable[[Any], None], value: Any) -> None:
        """Send `num_bytes` of payload; call `action(value)` on delivery."""
        due_s = self.shaper.admit(self._now_s(), num_bytes, flow)
        self._num_admitted += 1
        heappush(self._scheduled, (due_s, self._num_admitted, action, value))
        if self._scheduled[0][1] == self._num_admitted:
            self._set_timer()

    async def transmit(self, num_bytes: int, flow: Flow) -> None:
        """Send a message of `num_bytes` and wait for its delivery."""
        arrived = asyncio.Event()
        self.admit(num_bytes, flow, lambda _: arrived.set(), None)
        await arrived.wait()

    def on_readable(self, half: HalfStream) -> None:
        """Handle that `half` is readable: read now, or queue it until the link and its flow can send."""
        if half.finished:
            return
        pace_s = self.shaper.pacing_wait_s(self._now_s(), half.flow)
        if half.unwritten_bytes >= self.shaper.window_bytes:
            half.set_reading(False)
            half.window_full = True
        elif pace_s > 0:
            half.set_reading(False)
            self.loop.call_later(pace_s, self.on_readable, half)
        elif self._waiting or self._queue_wait_s() > 0:
            half.set_reading(False)
            self._waiting.append(half)
            self._set_timer()
        else:
            half.read()
            half.set_reading(True)

    def _queue_wait_s(self) -> float:
        return 1.0 if self.is_cut else self.shaper.queue_wait_s(self._now_s())

    def _on_timer(self) -> None:
        self._timer = None
        if self.is_cut:
            return
        now_s = self._now_s()
        while self._scheduled and self._scheduled[0][0] <= now_s:
            due_s, _, action, value = heappop(self._scheduled)
            self.max_late_s = max(self.max_late_s, now_s - due_s)
            action(value)
        while self._waiting and self._queue_wait_s() == 0:
            half = self._waiting.popleft()
            if not half.finished and half.read():
                self._requeue(half)
            else:
                half.set_reading(True)
        self._set_timer()

    def _requeue(self, half: HalfStream) -> None:
        """Queue `half`, which probably has more to read, behind the others unless its flow is blocked."""
        held = half.unwritten_bytes >= self.shaper.window_bytes
        if held or self.shaper.pacing_wait_s(self._now_s(), half.flow) > 0:
            self.on_readable(half)
        else:
            self._waiting.append(half)

    def _set_timer(self) -> None:
        """Set the timer to the next delivery or, with waiting halves, to when half the queue is free."""
        if self.is_cut or not (self._scheduled or self._waiting):
            return
        next_s = self._scheduled[0][0] if self._scheduled else self._now_s()
        if self._waiting:
            next_s = min(next_s, self._now_s() + self._queue_wait_s() + self.shaper.queue_s / 2)
        when_s = next_s + self._total_cut_s
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(when_s, self._on_timer)

    def cut(self) -> None:
        """Stop the link's clock: chunks in flight stay in flight, and no new ones are read."""
        if not self.is_cut:
            self._cut_at_s, self.is_cut = self.loop.time(), True

    def restore(self) -> None:
        """Restart the link's clock where it stopped: chunks in flight arrive at the link's rate."""
        if self.is_cut:
            self._total_cut_s += self.loop.time() - self._cut_at_s
            self.is_cut = False
            self._on_timer()

    def clear(self) -> None:
        """Drop everything in flight, for shutdown."""
        self._scheduled.clear()
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HalfStream:
    """One direction of one connection: copies `source` over `direction` to `target`, including end of stream.

    Calls `on_finished(error)` once: with None after passing on the end of stream, or with the error.
    """

    def __init__(
        self,
        direction: LinkDirection,
        source: socket.socket,
        target: socket.socket,
        flow: Flow,
        on_finished: Callable[[OSError | None], None],
    ) -> None:
        self.direction, self.source, self.target, self.flow = direction, source, target, flow
        self.on_finished = on_finished
        direction.num_streams += 1
        self.number = direction.num_streams
        self.unwritten_bytes = 0
        self.finished = False
        self.window_full = False
        self._is_reading = False
        self._is_writing = False
        self._at_eof = False
        self._write_queue: deque[memoryview] = deque()

    def set_reading(self, enabled: bool) -> None:
        """Start or stop watching the source for readability."""
        enabled = enabled and not (self.finished or self._at_eof)
        if enabled and not self._is_reading:
            self.direction.loop.add_reader(self.source, self.direction.on_readable, self)
        elif self._is_reading and not enabled:
            self.direction.loop.remove_reader(self.source)
        self._is_reading = enabled

    def send(self, data: bytes) -> None:
        """Send bytes read from the source over the link; empty bytes mean end of stream."""
        self.unwritten_bytes += len(data)
        self._at_eof = not data
        deliver = self._deliver
        if self.direction.record is not None:
            deliver = partial(self._deliver_recorded, self.direction.record, self.direction.loop.time())
        self.direction.admit(len(data), self.flow, deliver, data)

    def read(self) -> bool:
        """Read one chunk and send it; return True if it was full, since more is probably available."""
        wanted = self.direction.shaper.chunk_bytes
        try:
            data = self.source.recv(wanted)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.finish(error)
            return False
        self.send(data)
        return len(data) == wanted

    def _deliver(self, data: bytes) -> None:
        if self.finished:
            return
        self.direction.delivered_bytes += len(data)
        self._write_queue.append(memoryview(data))
        if len(self._write_queue) == 1:
            self._write()

    def _deliver_recorded(self, record: Callable[[DeliveredChunk], None], read_s: float, data: bytes) -> None:
        now_s = self.direction.loop.time()
        record(DeliveredChunk(stream=self.number, data=data, read_s=read_s, delivered_s=now_s))
        self._deliver(data)

    def _write(self) -> None:
        try:
            while self._write_queue:
                if not self._write_queue[0]:
                    self.target.shutdown(socket.SHUT_WR)
                    self.finish(None)
                    return
                sent = self.target.send(self._write_queue[0])
                self.unwritten_bytes -= sent
                if sent == len(self._write_queue[0]):
                    self._write_queue.popleft()
                else:
                    self._write_queue[0] = self._write_queue[0][sent:]
            self._set_writing(False)
        except (BlockingIOError, InterruptedError):
            self._set_writing(True)
        except OSError as error:
            self.finish(error)
            return
        if self.window_full and self.unwritten_bytes < self.direction.shaper.window_bytes:
            self.window_full = False
            self.direction.on_readable(self)

    def _set_writing(self, enabled: bool) -> None:
        if enabled and not self._is_writing:
            self.direction.loop.add_writer(self.target, self._write)
        elif self._is_writing and not enabled:
            self.direction.loop.remove_writer(self.target)
        self._is_writing = enabled

    def finish(self, error: OSError | None) -> None:
        """Finish after the end of stream (None) or `error`; idempotent."""
        if self.finished:
            return
        self.set_reading(False)
        self._set_writing(False)
        self.finished = True
        self._write_queue.clear()
        self.on_finished(error)


def close_with_reset(sock: socket.socket) -> None:
    """Close with a TCP reset, so that the other side gets an error."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
