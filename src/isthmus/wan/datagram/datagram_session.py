"""`DatagramSession`: one side of a leg over datagrams, as a pure state machine.

Frames are cut into pieces; each packet has a number of its own, and a piece that is lost goes again under a new one, so
that an acknowledgement always says which sending arrived. Frames are handed over as they become whole: the tunnel
above orders them. Source: the report on cross-domain pooling, 4.2.6 and 4.2.7 (a transport between gateways whose
losses are named and whose rate is that of the line).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from isthmus.core.errors import ProtocolError
from isthmus.wan.datagram.bottleneck_rate import BottleneckRate
from isthmus.wan.datagram.datagram_packet import (
    MAX_RANGES,
    AckPacket,
    ClosePacket,
    ParityPacket,
    PiecePacket,
    parse_packet,
)
from isthmus.wan.datagram.frame_assembly import FrameAssembly
from isthmus.wan.datagram.outgoing_frames import FramePiece, OutgoingFrames
from isthmus.wan.datagram.sent_packets import SentPackets, SentPiece
from isthmus.wan.datagram.session_events import (
    DeliverFrame,
    EndSession,
    PacketArrived,
    SendFrame,
    SendPacket,
    SessionEvent,
    SessionInstruction,
    TakeFrame,
    TimerFired,
)

IDLE_S = 10.0
"""Time without a packet of the far side after which the leg is over."""

MAX_PACKETS = 2**32
"""Packets under one key; the leg ends after them, and the tunnel dials another one."""

ACK_PACKETS = 16
"""Packets after which an acknowledgement does not wait."""

ACK_DELAY_S = 0.002
"""Longest wait of an acknowledgement."""

_ACK_REPEATS = 3
_BURST_S = 0.001
_MOST_BURST_BYTES = 256 * 2**10


class DatagramSession:
    """Call `handle` with each event and carry out what it returns, in order. A new session takes one frame."""

    def __init__(self, now_s: float, first_number: int = 0, *, error_correction: bool = False) -> None:
        """Packets are numbered from `first_number`; `error_correction` sends parity.

        A side to which parity comes sends some too.
        """
        self.ended: str | None = None
        """Why the leg is over; None before."""
        self.num_pieces = 0
        """Pieces and parity that were sent."""
        self._rate, self._sent = BottleneckRate(now_s), SentPackets()
        self._assembly, self._frames = FrameAssembly(), OutgoingFrames(has_parity=error_correction)
        self._next_number = first_number
        self._takes_frame = True
        self._came: deque[list[int]] = deque([[]], maxlen=_ACK_REPEATS)
        self._newest_came_s, self._ack_due_s = now_s, math.inf
        self._next_send_s, self._heard_s = now_s, now_s
        self._now_s, self._out = now_s, list[SessionInstruction]()

    @property
    def num_held_bytes(self) -> int:
        """Bytes kept here: of frames that have not arrived there, and of frames that have not come whole."""
        return self._frames.num_unacknowledged_bytes + self._assembly.num_held_bytes

    @property
    def num_pieces_again(self) -> int:
        """Pieces that were sent again."""
        return self._frames.num_pieces_again

    @property
    def num_frames_repaired(self) -> int:
        """Frames that were whole by their parity."""
        return self._assembly.num_repaired

    @property
    def bytes_per_s(self) -> float:
        """Rate at which packets leave at present."""
        return self._rate.bytes_per_s

    def next_due_s(self) -> float:
        """Return when a `TimerFired` is due, infinite for never."""
        if self.ended is not None:
            return math.inf
        has_room = self._frames.has_waiting and self._sent.num_bytes < self._rate.window_bytes
        send_s = self._next_send_s if has_room else math.inf
        return min(self._ack_due_s, self._sent.due_s(), send_s, self._heard_s + IDLE_S)

    def handle(self, event: SessionEvent, now_s: float) -> list[SessionInstruction]:
        """Return what to do after `event` at `now_s`, in order; nothing after the end."""
        if self.ended is not None:
            return []
        self._now_s, self._out = now_s, []
        try:
            _HANDLERS[type(event)](self, event)
        except ProtocolError as error:
            self._send_packet(ClosePacket().content())
            self._end(error.message)
        if self.ended is None:
            self._pump()
        return self._out

    def close(self) -> list[SessionInstruction]:
        """Return the packet that tells the far side; the session is over."""
        if self.ended is not None:
            return []
        self._out = []
        self._send_packet(ClosePacket().content())
        self.ended = "closed"
        return self._out

    # Events

    def _take_frame(self, event: SendFrame) -> None:
        if not self._takes_frame:
            raise ValueError("a frame before the session has asked for one")
        self._takes_frame = False
        self._frames.add(event.data)

    def _take_packet(self, event: PacketArrived) -> None:
        packet = parse_packet(event.content)
        self._heard_s = self._now_s
        if isinstance(packet, PiecePacket | ParityPacket):
            self._acknowledge_later(event.number)
            self._frames.has_parity |= isinstance(packet, ParityPacket)
            frame = self._assembly.add(packet)
            if frame is not None:
                self._out.append(DeliverFrame(frame))
        elif isinstance(packet, AckPacket):
            self._take_ack(packet)
        else:
            self._end("closed by the other side")

    def _take_ack(self, packet: AckPacket) -> None:
        if any(first + count > self._next_number for first, count in packet.ranges):
            raise ProtocolError("an acknowledgement of packets that were never sent")
        if sum(count for _, count in packet.ranges) > _ACK_REPEATS * ACK_PACKETS:
            raise ProtocolError("an acknowledgement of more packets than it may name")
        found = self._sent.acknowledge(packet.ranges, packet.delay_s, self._now_s)
        for sent in found:
            self._rate.arrived(sent.num_bytes, sent.delivery)
            self._frames.arrived(sent.piece)
        self._frames.parity.note(arrived=len(found))
        if found:
            self._rate.acknowledged(found[-1].delivery, self._sent.latest_rtt_s, self._now_s, self._sent.num_bytes)
        self._send_lost_again()

    def _fire(self, _event: TimerFired) -> None:
        if self._now_s >= self._heard_s + IDLE_S:
            self._end(f"nothing from the other side for {IDLE_S:.0f} s")
        else:
            self._send_lost_again()

    # Pieces

    def _send_lost_again(self) -> None:
        for sent in self._sent.lose(self._now_s):
            self._rate.lost(sent.num_bytes, sent.delivery)
            self._frames.parity.note(lost=1)
            self._frames.lost(sent.piece)

    def _pump(self) -> None:
        """Send the acknowledgement that is due, then pieces at the rate, lost ones first; ask for the next frame."""
        if self._now_s >= self._ack_due_s:
            self._send_ack()
        if self._frames.has_waiting:
            self._send_pieces()
        if not self._takes_frame and self._frames.has_room:
            self._takes_frame = True
            self._out.append(TakeFrame())

    def _send_pieces(self) -> None:
        """Send pieces until the rate or the window says to wait; late timers are made up for by one bounded burst."""
        latest_s, window_bytes, rate = self._now_s + _BURST_S / 2, self._rate.window_bytes, self._rate.bytes_per_s
        behind_s = max(_BURST_S, min(_MOST_BURST_BYTES, window_bytes / 4) / rate)
        self._next_send_s = max(self._next_send_s, self._now_s - behind_s)
        while self._next_send_s <= latest_s and self._sent.num_bytes < window_bytes:
            piece = self._frames.next_piece()
            if piece is None:
                return
            self._next_send_s += self._send_piece(piece) / rate

    def _send_piece(self, piece: FramePiece) -> int:
        """Send a piece; return the bytes of its packet."""
        content = piece.packet.content()
        number = self._send_packet(content)
        delivery = self._rate.sent(self._now_s, self._sent.num_bytes, has_more=self._frames.has_waiting)
        self._sent.add(SentPiece(number, piece, len(content), delivery))
        self.num_pieces += 1
        return len(content)

    def _send_packet(self, content: bytes) -> int:
        number = self._next_number
        self._next_number += 1
        self._out.append(SendPacket(number, content))
        if self._next_number >= MAX_PACKETS:
            self._end(f"{MAX_PACKETS} packets were sent under one key")
        return number

    # Acknowledgements

    def _acknowledge_later(self, number: int) -> None:
        came = self._came[-1]
        came.append(number)
        self._newest_came_s = self._now_s
        if len(came) >= ACK_PACKETS:
            self._ack_due_s = self._now_s
        elif len(came) == 1:
            self._ack_due_s = self._now_s + ACK_DELAY_S

    def _send_ack(self) -> None:
        """Name what has come since the last acknowledgement, and what the two before it named."""
        numbers = sorted({number for one in self._came for number in one})
        ranges: list[list[int]] = []
        for number in numbers:
            if ranges and number == sum(ranges[-1]) and ranges[-1][1] < 2**16 - 1:
                ranges[-1][1] += 1
            else:
                ranges.append([number, 1])
        named = tuple((first, count) for first, count in ranges[-MAX_RANGES:])
        self._send_packet(AckPacket(self._now_s - self._newest_came_s, named).content())
        self._came.append([])
        self._ack_due_s = math.inf

    def _end(self, reason: str) -> None:
        self.ended = reason
        self._out.append(EndSession(reason))


_HANDLERS: dict[type[SessionEvent], Callable[[DatagramSession, Any], None]] = {
    SendFrame: DatagramSession._take_frame,
    PacketArrived: DatagramSession._take_packet,
    TimerFired: DatagramSession._fire,
}
