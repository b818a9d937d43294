"""`QueuePairSocket`: a queue pair in user space behind one end of a pair of sockets, as a byte stream."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable

from isthmus.wan.roce.nic import (
    MessageArrived,
    NicArrival,
    NicEvent,
    NicFailed,
    NicSettings,
    NicTick,
    PostWork,
    RoceNic,
    Transmit,
    WorkDone,
)

MESSAGE_BYTES = 64 * 2**10
"""Longest SEND."""

MAX_POSTED = 4
"""Most SENDs that are not complete: what waits beyond stays with the leg."""

MAX_HELD_BYTES = 4 * 2**20
"""Bytes for the leg that wait here; beyond them the receiver is not ready."""

LINGER_S = 2.0
"""Longest time from the leg's end to the end of its queue pair."""

_NOT_READY_CODE = 15
_BUFFER_BYTES = 2**20


class QueuePairSocket:
    """Carries what comes out of its end as SENDs, and writes messages of the peer to it; an empty one is the end."""

    def __init__(
        self,
        settings: NicSettings,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """`send` takes frames for the gateway; `on_end` is called once."""
        self.nic, self._loop, self._send, self._on_end = RoceNic(settings), loop, send, on_end
        self.far_end, self._near_end = socket.socketpair()
        for one in (self.far_end, self._near_end):
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.was_heard = False
        """Whether a message of the peer has come."""
        self._num_posted, self._num_held = 0, 0
        self._held: deque[memoryview] = deque()
        self._is_reading = self._has_ended = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._linger: asyncio.TimerHandle | None = None
        self._set_reading()

    def take(self, frame: bytes) -> None:
        """Take a frame of the peer, or of the gateway in its place."""
        self._handle(NicArrival(frame))

    def close(self) -> None:
        """End at once: the leg sees its socket closed."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._near_end)
        self._loop.remove_writer(self._near_end)
        self._near_end.close()
        self._on_end()

    def _handle(self, event: NicEvent) -> None:
        if self._is_closed:
            return
        instructions = self.nic.handle(event, self._loop.time())
        for one in instructions:  # the last message is acknowledged too
            if isinstance(one, Transmit):
                self._send(one.frame)
        for one in instructions:
            if isinstance(one, MessageArrived):
                self._hand_over(one.data)
            elif isinstance(one, NicFailed):
                self.close()
            elif isinstance(one, WorkDone):
                self._num_posted -= 1
            if self._is_closed:
                return
        if self._has_ended and self.nic.is_idle:
            self.close()
            return
        self._set_reading()
        self._set_timer()

    def _hand_over(self, data: bytes) -> None:
        self.was_heard = True
        if not data:
            self.close()
            return
        self._held.append(memoryview(data))
        self._num_held += len(data)
        if len(self._held) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._held:
                num_sent = self._near_end.send(self._held[0])
                self._num_held -= num_sent
                if num_sent == len(self._held[0]):
                    self._held.popleft()
                else:
                    self._held[0] = self._held[0][num_sent:]
            self._loop.remove_writer(self._near_end)
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._near_end, self._flush)
        except OSError:  # the leg has closed
            self._end()
        self.nic.not_ready_code = _NOT_READY_CODE if self._num_held > MAX_HELD_BYTES else None

    def _read(self) -> None:
        try:
            data = self._near_end.recv(MESSAGE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._num_posted += 1
            self._handle(PostWork("send", data))
        else:
            self._end()

    def _end(self) -> None:
        """Tell the peer that the leg is closed, and end when it knows."""
        if self._has_ended or self._is_closed:
            return
        self._has_ended = True
        self._linger = self._loop.call_later(LINGER_S, self.close)
        self._num_posted += 1
        self._handle(PostWork("send", b""))

    def _set_reading(self) -> None:
        is_on = self._num_posted < MAX_POSTED and not self._has_ended
        if is_on == self._is_reading:
            return
        self._is_reading = is_on
        if is_on:
            self._loop.add_reader(self._near_end, self._read)
        else:
            self._loop.remove_reader(self._near_end)

    def _set_timer(self) -> None:
        due_s = self.nic.next_tick_s()
        if self._timer is not None and self._timer_s <= due_s and self._timer_s > self._loop.time():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, due_s
        if due_s < math.inf:
            self._timer = self._loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._handle(NicTick())
