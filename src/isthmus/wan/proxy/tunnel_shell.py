"""`TunnelShell`: carries out what a `Tunnel` decides, with real legs and connections on an event loop."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import IsthmusError
from isthmus.wan.legs.leg import Leg
from isthmus.wan.proxy.worker_connection import WorkerConnection
from isthmus.wan.tunnel.tunnel import Tunnel
from isthmus.wan.tunnel.tunnel_events import (
    Accepted,
    Break,
    CloseLeg,
    Connect,
    DialFailed,
    DialLeg,
    EndWriting,
    FrameArrived,
    LegDown,
    LegReady,
    LegUp,
    OpenStream,
    Refused,
    SendFrame,
    SetReading,
    Stop,
    StreamBroken,
    StreamConnected,
    StreamData,
    StreamEnded,
    StreamRefused,
    StreamTaken,
    Tick,
    TunnelEnded,
    TunnelEvent,
    TunnelInstruction,
    Write,
)
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame

DialTo = Callable[[int], Awaitable[Leg | None]]
"""Dials the leg of an index: the leg, None if the far side does not know the tunnel; raises `OSError` if it fails."""

ConnectTo = Callable[[str], Awaitable[socket.socket]]
"""Connects to a target, if that is allowed; raises `RefusedTargetError`."""


class RefusedTargetError(IsthmusError):
    """Raised with an HTTP status, such as `403 Forbidden`, for a target that is not or cannot be connected to."""


@dataclass
class TunnelCounters:
    """What a tunnel has carried."""

    sent_bytes: int = 0
    received_bytes: int = 0
    num_legs_lost: int = 0


class _LegOwner:
    def __init__(self, shell: TunnelShell, leg: int) -> None:
        self._shell, self._leg = shell, leg

    def leg_ready(self) -> None:
        self._shell.leg_ready(self._leg)

    def leg_frame(self, frame: TunnelFrame) -> None:
        if frame.kind is FrameKind.DATA:
            self._shell.counters.received_bytes += len(frame.payload)
        self._shell.handle(FrameArrived(self._leg, frame))

    def leg_broken(self, _reason: str) -> None:
        self._shell.lose_leg(self._leg)


class TunnelShell:
    """One side of a tunnel: `dial` is for the side that dials, `connect` for the other; `on_end` is called once.

    All legs together take `bytes_per_s` on average, if that is given; each may take a frame at once.
    """

    def __init__(
        self,
        tunnel: Tunnel,
        loop: asyncio.AbstractEventLoop,
        *,
        dial: DialTo | None = None,
        connect: ConnectTo | None = None,
        on_end: Callable[[str], None] = lambda _: None,
        bytes_per_s: float | None = None,
    ) -> None:
        self.tunnel, self._loop = tunnel, loop
        self._bytes_per_s, self._paid_s = bytes_per_s, 0.0
        self.counters = TunnelCounters()
        self._dial, self._connect, self._on_end = dial, connect, on_end
        self._legs: dict[int, Leg] = {}
        self._next_leg = 0
        self._connections: dict[int, WorkerConnection] = {}
        self._openings: dict[int, tuple[asyncio.Future[None], bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._events: deque[TunnelEvent] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf

    def handle(self, event: TunnelEvent) -> None:
        """Pass an event to the tunnel, after those that wait, and carry out what it says."""
        self._events.append(event)
        self._handle_waiting()

    def _handle_waiting(self) -> None:
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for instruction in self.tunnel.handle(self._events.popleft(), self._loop.time()):
                    _CARRY_OUT[type(instruction)](self, instruction)
        finally:
            self._is_handling = False
        self._set_timer()

    def start(self) -> None:
        """Dial the first legs, or wait for them."""
        self.handle(Tick())

    def add_leg(self, leg: Leg, index: int) -> None:
        """Use an authenticated leg from now on."""
        number, self._next_leg = self._next_leg, self._next_leg + 1
        if self.tunnel.ended is not None:
            leg.close()
            return
        self._legs[number] = leg
        self._events.append(LegUp(number, index, leg.max_payload_bytes))  # goes before what came before the start
        leg.start(_LegOwner(self, number))
        self._handle_waiting()

    def leg_ready(self, number: int) -> None:
        """Let a leg take a frame, once the rate of all permits it."""
        if self._bytes_per_s is not None and self._paid_s > self._loop.time():
            self._loop.call_at(self._paid_s, self.handle, LegReady(number))
        else:
            self.handle(LegReady(number))

    def lose_leg(self, number: int) -> None:
        """Note that a leg broke."""
        if self._legs.pop(number, None) is not None:
            self.counters.num_legs_lost += 1
            self.handle(LegDown(number))

    def redial(self) -> None:
        """Close every leg, as a failure would; the side that dials opens new ones. No connection breaks."""
        for number, leg in list(self._legs.items()):
            leg.close()
            self.lose_leg(number)

    async def open(self, sock: socket.socket, target: str, rest: bytes, reply: bytes) -> None:
        """Open a stream for the worker at `sock`, after whose request `rest` came; `reply` says that it is open.

        Returns when it is; the socket is then the tunnel's. Raises `RefusedTargetError` if the far side refuses: the
        socket is still the caller's.
        """
        stream = self.tunnel.next_stream
        opening: asyncio.Future[None] = self._loop.create_future()
        connection = WorkerConnection(sock, stream, self, self._loop)
        self._openings[stream], self._connections[stream] = (opening, reply), connection
        self.handle(OpenStream(stream, target))
        try:
            await opening
        except asyncio.CancelledError:
            self._connections.pop(stream, None)
            self.handle(StreamBroken(stream, "the worker did not wait for its connection"))
            raise
        finally:
            self._openings.pop(stream, None)
        if rest:
            self.handle(StreamData(stream, rest))
        if stream in self._connections:
            connection.set_reading(is_on=True)

    def close(self, reason: str) -> None:
        """End the tunnel: the far side learns why."""
        self.handle(Stop(reason))

    # Calls of connections

    def worker_sent(self, stream: int, data: bytes) -> None:
        """See `WorkerOwner`."""
        self.handle(StreamData(stream, data) if data else StreamEnded(stream))

    def worker_took(self, stream: int, num_bytes: int) -> None:
        """See `WorkerOwner`."""
        self.handle(StreamTaken(stream, num_bytes))

    def worker_broke(self, stream: int, reason: str) -> None:
        """See `WorkerOwner`."""
        self._drop(stream, is_broken=True)
        self.handle(StreamBroken(stream, reason))

    def worker_closed(self, stream: int) -> None:
        """See `WorkerOwner`."""
        self._connections.pop(stream, None)

    # Instructions

    def _send_frame(self, instruction: SendFrame) -> None:
        if (leg := self._legs.get(instruction.leg)) is not None:
            if instruction.frame.kind is FrameKind.DATA:
                self.counters.sent_bytes += len(instruction.frame.payload)
            if self._bytes_per_s is not None:
                self._paid_s = max(self._paid_s, self._loop.time()) + len(instruction.frame.payload) / self._bytes_per_s
            leg.send(instruction.frame)

    def _dial_leg(self, instruction: DialLeg) -> None:
        self._spawn(self._dial_one(instruction.index))

    async def _dial_one(self, index: int) -> None:
        if self._dial is None:
            return
        try:
            leg = await self._dial(index)
        except (OSError, IsthmusError):
            self.handle(DialFailed(index))
            return
        if leg is None:
            self.handle(DialFailed(index, is_unknown=True))
        else:
            self.add_leg(leg, index)

    def _close_leg(self, instruction: CloseLeg) -> None:
        if (leg := self._legs.pop(instruction.leg, None)) is not None:
            leg.close()

    def _connect_target(self, instruction: Connect) -> None:
        task = self._spawn(self._connect_one(instruction.stream, instruction.target))
        self._connecting[instruction.stream] = task
        task.add_done_callback(lambda _: self._connecting.pop(instruction.stream, None))

    async def _connect_one(self, stream: int, target: str) -> None:
        try:
            if self._connect is None:
                raise RefusedTargetError("403 this proxy connects to nothing")
            sock = await self._connect(target)
        except RefusedTargetError as error:
            self.handle(StreamRefused(stream, error.message))
            return
        self._connections[stream] = WorkerConnection(sock, stream, self, self._loop)
        self.handle(StreamConnected(stream))

    def _accepted(self, instruction: Accepted) -> None:
        opening, reply = self._openings.get(instruction.stream, (None, b""))
        connection = self._connections.get(instruction.stream)
        if opening is not None and connection is not None and not opening.done():
            connection.reply(reply)  # ahead of what the far worker sends
            opening.set_result(None)

    def _refused(self, instruction: Refused) -> None:
        self._connections.pop(instruction.stream, None)
        opening, _ = self._openings.get(instruction.stream, (None, b""))
        if opening is not None and not opening.done():
            opening.set_exception(RefusedTargetError(instruction.reason))

    def _write(self, instruction: Write) -> None:
        if (connection := self._connections.get(instruction.stream)) is not None:
            connection.write(instruction.data)

    def _end_writing(self, instruction: EndWriting) -> None:
        if (connection := self._connections.get(instruction.stream)) is not None:
            connection.end_writing()

    def _set_reading(self, instruction: SetReading) -> None:
        connection = self._connections.get(instruction.stream)
        if connection is not None and instruction.stream not in self._openings:
            connection.set_reading(instruction.is_on)

    def _break(self, instruction: Break) -> None:
        self._drop(instruction.stream, is_broken=True)

    def _tunnel_ended(self, instruction: TunnelEnded) -> None:
        for task in list(self._tasks):
            if task is not asyncio.current_task(self._loop):
                task.cancel()
        for stream in list(self._connections):
            self._drop(stream, is_broken=True)
        self._on_end(instruction.reason)

    def _drop(self, stream: int, *, is_broken: bool) -> None:
        if (connection := self._connections.pop(stream, None)) is not None:
            connection.close(is_broken=is_broken)
        if (task := self._connecting.pop(stream, None)) is not None:
            task.cancel()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _set_timer(self) -> None:
        due_s = self.tunnel.next_tick_s()
        if self._timer is not None and self._timer_s <= due_s < math.inf:
            return  # it fires earlier, and is set again then
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer, self._timer_s = self._loop.call_at(due_s, self._tick), due_s

    def _tick(self) -> None:
        self._timer, self._timer_s = None, math.inf
        if self.tunnel.next_tick_s() <= self._loop.time():
            self.handle(Tick())
        else:
            self._set_timer()


_CARRY_OUT: dict[type[TunnelInstruction], Callable[[TunnelShell, Any], None]] = {
    SendFrame: TunnelShell._send_frame,
    DialLeg: TunnelShell._dial_leg,
    CloseLeg: TunnelShell._close_leg,
    Connect: TunnelShell._connect_target,
    Accepted: TunnelShell._accepted,
    Refused: TunnelShell._refused,
    Write: TunnelShell._write,
    EndWriting: TunnelShell._end_writing,
    SetReading: TunnelShell._set_reading,
    Break: TunnelShell._break,
    TunnelEnded: TunnelShell._tunnel_ended,
}
