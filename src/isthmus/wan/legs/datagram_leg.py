"""`DatagramLeg`: a leg over UDP datagrams, each encrypted under its number; `DatagramSession` decides.

A datagram is a byte that names its kind, and for packets of a leg their number and their sealed content. What fails its
authentication is dropped and counted: strangers neither end a leg nor slow it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import IntEnum

from isthmus.core.errors import ProtocolError
from isthmus.core.messages.datagram import Address, Datagram
from isthmus.noise import NUMBER_BYTES, DatagramCipher, UnauthenticatedError
from isthmus.wan.datagram.datagram_session import DatagramSession
from isthmus.wan.datagram.session_events import (
    DeliverFrame,
    EndSession,
    PacketArrived,
    SendFrame,
    SendPacket,
    SessionInstruction,
    TakeFrame,
    TimerFired,
)
from isthmus.wan.legs.leg import LegOwner
from isthmus.wan.tunnel.tunnel_frame import HEADER_BYTES, USUAL_PAYLOAD_BYTES, TunnelFrame, parse_frame_header
from isthmus.wan.udp_socket import UdpSocket

FIRST_NUMBER = 1
"""Number of a leg's first packet; 0 is that of the proof and of the verdict, under the same keys."""

_MOST_PACKETS = 13
"""Packets of a system call; a longer run is split packet by packet where a device takes less than 64 KiB at once."""
_HEAD_BYTES = 1 + NUMBER_BYTES


class DatagramKind(IntEnum):
    """The first byte of a datagram."""

    FIRST = 1
    SECOND = 2
    PROOF = 3
    VERDICT = 4
    PACKET = 5


_PACKET = bytes([DatagramKind.PACKET])


class DatagramLeg:
    """A `Leg` to `address` over `udp`, whose owner calls `take` with what comes from there."""

    max_payload_bytes = USUAL_PAYLOAD_BYTES

    def __init__(
        self,
        udp: UdpSocket,
        address: Address,
        sending: DatagramCipher,
        receiving: DatagramCipher,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], None],
        *,
        error_correction: bool = False,
    ) -> None:
        """`on_end` is called once, when the leg needs no more datagrams; `error_correction` sends parity."""
        self._udp, self._address, self._loop, self._on_end = udp, address, loop, on_end
        self._sending, self._receiving = sending, receiving
        self._owner: LegOwner | None = None
        self._session = DatagramSession(loop.time(), FIRST_NUMBER, error_correction=error_correction)
        self._is_open, self._is_handling = True, False
        self._early: list[Datagram] = []
        self._packets: list[SendPacket] = []
        self._timer: asyncio.TimerHandle | None = None
        self.num_refused = 0
        """Packets that failed their authentication, or came twice."""

    @property
    def session(self) -> DatagramSession:
        """What decides; for its counters."""
        return self._session

    def start(self, owner: LegOwner) -> None:
        """Begin to call `owner`; see `Leg`."""
        self._owner = owner
        early, self._early = self._early, []
        for datagram in early:
            self.take(datagram)
        self._set_timer()

    def send(self, frame: TunnelFrame) -> None:
        """Send a frame; see `Leg`."""
        if self._is_open:
            self._handle([SendFrame(frame.header() + bytes(frame.payload))])

    def close(self) -> None:
        """Close; see `Leg`."""
        self._owner = None
        if self._is_open:
            self._packets += [one for one in self._session.close() if isinstance(one, SendPacket)]
            self._send_packets()
            self._shut()

    def take(self, datagram: Datagram) -> None:
        """Take packets of the far side: datagrams of the kind PACKET."""
        if self._owner is None:
            if self._is_open and len(self._early) < 64:
                self._early.append(datagram)
            return
        data, size = datagram.data, datagram.packet_bytes
        events = []
        for start in range(0, len(data), size):
            packet = data[start : start + size]
            if packet[0] != DatagramKind.PACKET:
                continue
            number = int.from_bytes(packet[1:_HEAD_BYTES], "big")
            try:
                events.append(PacketArrived(number, self._receiving.open(packet[1:])))
            except UnauthenticatedError:
                self.num_refused += 1
        if events:
            self._handle(events)

    def _handle(self, events: list[PacketArrived] | list[SendFrame] | list[TimerFired]) -> None:
        """Handle events in turn; the packets leave in order of their numbers, also those of events in between."""
        is_outermost, self._is_handling = not self._is_handling, True
        now_s = self._loop.time()
        for event in events:
            instructions = self._session.handle(event, now_s)
            self._packets += [one for one in instructions if isinstance(one, SendPacket)]
            if len(self._packets) >= _MOST_PACKETS:
                self._send_packets()
            for one in instructions:
                if not isinstance(one, SendPacket):
                    self._carry_out(one)
        if not is_outermost:
            return
        self._is_handling = False
        self._send_packets()
        if self._is_open:
            self._set_timer()

    def _carry_out(self, instruction: SessionInstruction) -> None:
        owner = self._owner
        if isinstance(instruction, EndSession):
            self._owner = None
            self._shut()
            if owner is not None:
                owner.leg_broken(instruction.reason)
        elif owner is None:
            return
        elif isinstance(instruction, TakeFrame):
            self._loop.call_soon(self._ready)
        elif isinstance(instruction, DeliverFrame):
            try:
                frame = _frame_of(instruction.data)
            except ProtocolError as error:
                self.close()
                owner.leg_broken(str(error))
            else:
                owner.leg_frame(frame)

    def _ready(self) -> None:
        if self._owner is not None:
            self._owner.leg_ready()

    def _send_packets(self) -> None:
        """Send the packets that wait, those of one size that follow each other by one system call."""
        batch, size = bytearray(), 0
        waiting, self._packets = self._packets, []
        for one in waiting:
            packet = _PACKET + self._sending.seal(one.content)
            if batch and (len(packet) > size or len(batch) % size or len(batch) >= size * _MOST_PACKETS):
                self._udp.send(Datagram(self._address, bytes(batch), size))
                batch.clear()
            if not batch:
                size = len(packet)
            batch += packet
        if batch:
            self._udp.send(Datagram(self._address, bytes(batch), size))

    def _set_timer(self) -> None:
        due_s = self._session.next_due_s()
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return  # it fires earlier, and is set again then
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._fire) if due_s < math.inf else None

    def _fire(self) -> None:
        self._timer = None
        if not self._is_open:
            return
        if self._session.next_due_s() <= self._loop.time():
            self._handle([TimerFired()])
        else:
            self._set_timer()

    def _shut(self) -> None:
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_end()


def _frame_of(data: bytes) -> TunnelFrame:
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes")
    head, num_bytes = parse_frame_header(data[:HEADER_BYTES])
    if len(data) != HEADER_BYTES + num_bytes:
        raise ProtocolError(f"a frame of {num_bytes} bytes came with {len(data) - HEADER_BYTES}")
    return TunnelFrame(head.kind, head.number, head.stream, head.offset, data[HEADER_BYTES:])
