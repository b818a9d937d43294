"""`Tunnel`: one side of the connection between two proxies, as a pure state machine.

Source: the report on cross-domain pooling, 4.2.6 (segmented connections): a worker's connection ends at the near
proxy, which gives it an identifier and sends it with its original target to the far proxy, which connects to the
target. Between the two its bytes are striped over several legs. A leg may break at any time: what was on it is sent
again on another one, every frame counts once, and bytes are put in order by their offset, so the workers notice
nothing. The side that dials the legs is the one that opens streams.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isthmus.core.errors import ProtocolError
from isthmus.wan.tunnel.incoming_bytes import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, CreditBudget, IncomingBytes
from isthmus.wan.tunnel.outgoing_bytes import OutgoingBytes
from isthmus.wan.tunnel.seen_numbers import SeenNumbers
from isthmus.wan.tunnel.sent_frames import MAX_IN_FLIGHT, SentFrames
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
from isthmus.wan.tunnel.tunnel_frame import (
    MAX_RANGES,
    MAX_TEXT_BYTES,
    RANGE,
    USUAL_PAYLOAD_BYTES,
    FrameKind,
    TunnelFrame,
    parse_ranges,
    parse_text,
)
from isthmus.wan.tunnel.tunnel_legs import PING_S, SILENCE_S, TunnelLegs

ACK_DELAY_S = 0.02
"""Longest wait of an acknowledgement."""

ACK_FRAMES = 16
"""Frames after which an acknowledgement does not wait."""

MAX_STREAMS = 4096
"""Most streams of a tunnel, and most that its opener may have begun since the oldest one that is missing."""

MAX_EARLY = 2 * MAX_IN_FLIGHT
"""Most frames of a tunnel that wait for earlier bytes."""

BUDGET_BYTES = 2**28
"""Bytes of credit that a side gives to all streams of a tunnel."""

TUNNEL_TIMEOUT_S = 60.0
"""Time without a leg after which a tunnel ends, and its workers' connections with it."""


@dataclass(slots=True)
class _Stream:
    outgoing: OutgoingBytes
    incoming: IncomingBytes
    is_open: bool = False
    is_reading: bool = False
    early: list[TunnelInstruction] = field(default_factory=list)
    """What came before the far side's answer, in order."""


class Tunnel:
    """One side. Call `handle` with each event and carry out what it returns, in order."""

    def __init__(
        self,
        *,
        is_dialler: bool,
        num_legs: int,
        now_s: float,
        budget: CreditBudget | None = None,
        silence_s: float = SILENCE_S,
        ping_s: float = PING_S,
    ) -> None:
        """`budget` may be shared with other tunnels; without one this tunnel has `BUDGET_BYTES`.

        A leg on which nothing has come for `silence_s` counts as broken; both sides send every `ping_s` at least.
        """
        self.is_dialler = is_dialler
        self.next_stream = 0
        """Identifier of the next stream that this side opens."""
        self.ended: str | None = None
        """Why the tunnel is over; None before."""
        self.num_frames_again = 0
        """Frames that were sent again since their leg broke."""
        self._budget = budget or CreditBudget(BUDGET_BYTES)
        self._legs = TunnelLegs(num_legs if is_dialler else 0, now_s, silence_s=silence_s, ping_s=ping_s)
        self._streams: dict[int, _Stream] = {}
        self._sent, self._seen = SentFrames(), SeenNumbers(2 * MAX_IN_FLIGHT)
        self._opened_here = SeenNumbers(MAX_STREAMS)
        self._control: deque[TunnelFrame] = deque()
        self._sendable: dict[int, None] = {}
        self._max_payload_bytes: int | None = None
        self._ack_due_s, self._num_unacknowledged = math.inf, 0
        self._now_s, self._out = now_s, list[TunnelInstruction]()

    @property
    def num_streams(self) -> int:
        """Streams that are open or being opened."""
        return len(self._streams)

    @property
    def num_legs(self) -> int:
        """Legs that are up."""
        return len(self._legs)

    @property
    def num_unacknowledged_bytes(self) -> int:
        """Payload that is kept until the far side has it."""
        return self._sent.num_bytes

    @property
    def num_held_bytes(self) -> int:
        """Bytes of workers kept here: waiting to leave, and unacknowledged."""
        return self._sent.num_bytes + sum(one.outgoing.num_waiting_bytes for one in self._streams.values())

    def next_tick_s(self) -> float:
        """Return when a `Tick` is due, infinite for never."""
        if self.ended is not None:
            return math.inf
        lost_s = math.inf if len(self._legs) else self._legs.empty_since_s + TUNNEL_TIMEOUT_S
        ack_s = self._ack_due_s if self._legs.first_ready() is not None else math.inf
        return min(ack_s, self._legs.next_due_s(), lost_s)

    def handle(self, event: TunnelEvent, now_s: float) -> list[TunnelInstruction]:
        """Return what to do after `event` at `now_s`, in order; nothing after the end of the tunnel."""
        if self.ended is not None:
            return []
        self._now_s, self._out = now_s, []
        try:
            _HANDLERS[type(event)](self, event)
        except ProtocolError as error:
            self._end(error.message, says_so=True)
        if self.ended is None:
            self._pump()
        return self._out

    # Workers

    def _open_stream(self, event: OpenStream) -> None:
        if event.stream != self.next_stream or not self.is_dialler:
            raise ProtocolError(f"stream {event.stream} is opened out of order")
        if len(self._streams) >= MAX_STREAMS or not self._budget.take(MIN_WINDOW_BYTES):
            self._out.append(Refused(event.stream, "503 too many connections through this proxy"))
            return
        self.next_stream += 1
        self._streams[event.stream] = _Stream(OutgoingBytes(), IncomingBytes(self._budget))
        self._queue(FrameKind.OPEN, event.stream, MIN_WINDOW_BYTES, event.target)

    def _stream_connected(self, event: StreamConnected) -> None:
        if (stream := self._streams.get(event.stream)) is not None and not stream.is_open:
            stream.is_open = True
            self._queue(FrameKind.OPENED, event.stream, stream.incoming.limit)
            self._set_reading(event.stream, stream)

    def _stream_refused(self, event: StreamRefused) -> None:
        if event.stream in self._streams:
            self._forget(event.stream)
            self._queue(FrameKind.REFUSED, event.stream, 0, event.reason)

    def _stream_data(self, event: StreamData) -> None:
        if (stream := self._streams.get(event.stream)) is not None and not stream.outgoing.has_ended:
            stream.outgoing.add(event.data)
            self._set_reading(event.stream, stream)
            self._mark_sendable(event.stream, stream)

    def _stream_ended(self, event: StreamEnded) -> None:
        if (stream := self._streams.get(event.stream)) is not None and not stream.outgoing.has_ended:
            stream.outgoing.has_ended = True
            self._set_reading(event.stream, stream)
            self._mark_sendable(event.stream, stream)

    def _stream_taken(self, event: StreamTaken) -> None:
        if (stream := self._streams.get(event.stream)) is not None:
            limit = stream.incoming.take(event.num_bytes)
            if limit is not None:
                self._queue(FrameKind.CREDIT, event.stream, limit)
            self._forget_if_done(event.stream, stream)

    def _stream_broken(self, event: StreamBroken) -> None:
        if event.stream in self._streams:
            self._forget(event.stream)
            self._queue(FrameKind.RESET, event.stream, 0, event.reason)

    # Legs

    def _leg_up(self, event: LegUp) -> None:
        if self._max_payload_bytes not in (None, event.max_payload_bytes):
            raise ProtocolError("a leg takes frames of another length than those before")
        self._max_payload_bytes = event.max_payload_bytes
        replaced = self._legs.add(event.leg, event.index, self._now_s)
        if replaced is not None:
            self._out.append(CloseLeg(replaced))
            self._lose(replaced)

    def _leg_ready(self, event: LegReady) -> None:
        self._legs.mark_ready(event.leg, self._now_s)

    def _leg_down(self, event: LegDown) -> None:
        self._lose(event.leg)

    def _dial_failed(self, event: DialFailed) -> None:
        if event.is_unknown:
            self._end("the other proxy has restarted", says_so=False)
        else:
            self._legs.dial_failed(event.index, self._now_s)
            self._dial()

    def _lose(self, leg: int) -> None:
        if self._legs.remove(leg, self._now_s):
            self.num_frames_again += self._sent.lose(leg)
            if self._seen.floor or self._num_unacknowledged:
                self._ack_due_s = self._now_s  # the last acknowledgement may have been on it
            self._dial()

    def _tick(self, _event: Tick) -> None:
        for leg in self._legs.silent(self._now_s):
            self._out.append(CloseLeg(leg))
            self._lose(leg)
        self._dial()
        for leg in self._legs.to_ping(self._now_s):
            self._send(leg, TunnelFrame(FrameKind.PING))
        if not len(self._legs) and self._now_s >= self._legs.empty_since_s + TUNNEL_TIMEOUT_S:
            self._end(f"no leg to the other proxy for {TUNNEL_TIMEOUT_S:.0f} s", says_so=False)

    def _dial(self) -> None:
        self._out += [DialLeg(index) for index in self._legs.to_dial(self._now_s)]

    def _stop(self, event: Stop) -> None:
        self._end(event.reason, says_so=True)

    def _end(self, reason: str, *, says_so: bool) -> None:
        self.ended = reason
        for stream, one in list(self._streams.items()):
            failed = Break(stream, reason) if one.is_open or not self.is_dialler else Refused(stream, f"503 {reason}")
            self._out.append(failed)
            self._forget(stream)
        if says_so and (leg := self._legs.first_ready()) is not None:
            self._send(leg, TunnelFrame(FrameKind.END, payload=_text(reason)))
        self._sent, self._control = SentFrames(), deque()
        self._out += [CloseLeg(leg) for leg in self._legs.all()]
        self._out.append(TunnelEnded(reason))

    # Frames that arrive

    def _frame_arrived(self, event: FrameArrived) -> None:
        frame = event.frame
        if event.leg not in self._legs:
            return
        self._legs.heard(event.leg, self._now_s)
        if frame.kind is FrameKind.ACK:
            self._sent.acknowledge(frame.offset, parse_ranges(frame.payload))
        elif frame.kind is FrameKind.END:
            self._end(f"the other proxy ended the tunnel: {parse_text(frame.payload)}", says_so=False)
        elif frame.kind is not FrameKind.PING:
            self._acknowledge_later()
            if self._seen.add(frame.number):
                self._take(frame)

    def _acknowledge_later(self) -> None:
        self._num_unacknowledged += 1
        delay_s = 0.0 if self._num_unacknowledged >= ACK_FRAMES else ACK_DELAY_S
        self._ack_due_s = min(self._ack_due_s, self._now_s + delay_s)

    def _take(self, frame: TunnelFrame) -> None:
        if frame.kind is FrameKind.OPEN:
            self._take_open(frame)
            return
        stream = self._streams.get(frame.stream)
        if stream is None:
            self._take_late(frame)
        elif frame.kind is FrameKind.DATA:
            chunks = stream.incoming.add(frame.offset, frame.payload)
            self._hand_out(frame.stream, stream, [Write(frame.stream, chunk) for chunk in chunks])
            if stream.incoming.num_early and sum(s.incoming.num_early for s in self._streams.values()) > MAX_EARLY:
                raise ProtocolError("too many frames wait for earlier bytes")
        elif frame.kind is FrameKind.FIN:
            stream.incoming.finish(frame.offset)
            self._hand_out(frame.stream, stream, [])
        elif frame.kind is FrameKind.CREDIT:
            stream.outgoing.raise_limit(min(frame.offset, stream.outgoing.offset + 2 * MAX_WINDOW_BYTES))
            self._mark_sendable(frame.stream, stream)
        elif frame.kind is FrameKind.RESET:
            self._forget(frame.stream)
            reason = f"the far connection broke: {parse_text(frame.payload)}"
            is_waiting = self.is_dialler and not stream.is_open
            self._out.append(Refused(frame.stream, f"502 {reason}") if is_waiting else Break(frame.stream, reason))
        else:
            self._take_answer(frame, stream)

    def _take_answer(self, frame: TunnelFrame, stream: _Stream) -> None:
        if not self.is_dialler or stream.is_open:
            raise ProtocolError(f"stream {frame.stream} was answered already")
        if frame.kind is FrameKind.REFUSED:
            self._forget(frame.stream)
            self._out.append(Refused(frame.stream, parse_text(frame.payload)))
            return
        stream.is_open = True
        stream.outgoing.raise_limit(min(frame.offset, MAX_WINDOW_BYTES))
        self._out.append(Accepted(frame.stream))
        self._set_reading(frame.stream, stream)
        self._out += stream.early
        stream.early = []
        self._mark_sendable(frame.stream, stream)
        self._forget_if_done(frame.stream, stream)

    def _take_open(self, frame: TunnelFrame) -> None:
        if self.is_dialler:
            raise ProtocolError("streams are opened by the side that dials")
        if not self._opened_here.add(frame.stream):
            return
        if not self._budget.take(MIN_WINDOW_BYTES):
            self._queue(FrameKind.REFUSED, frame.stream, 0, "503 the far proxy has too many connections")
            return
        outgoing = OutgoingBytes(min(frame.offset, MAX_WINDOW_BYTES))
        self._streams[frame.stream] = _Stream(outgoing, IncomingBytes(self._budget))
        self._out.append(Connect(frame.stream, parse_text(frame.payload)))

    def _take_late(self, frame: TunnelFrame) -> None:
        """Ignore frames of a stream that is over here; a reset may overtake the frame that opens its stream."""
        if self.is_dialler:
            is_known = frame.stream < self.next_stream
        elif frame.kind is FrameKind.RESET:
            self._opened_here.add(frame.stream)
            is_known = True
        else:
            is_known = frame.stream in self._opened_here
        if not is_known:
            raise ProtocolError(f"a frame {frame.kind.name} of stream {frame.stream}, which was never opened")

    def _hand_out(self, number: int, stream: _Stream, writes: list[Write]) -> None:
        found: list[TunnelInstruction] = [*writes]
        if stream.incoming.is_complete:
            found.append(EndWriting(number))
        if stream.is_open or not self.is_dialler:
            self._out += found
        else:
            stream.early += found
        self._forget_if_done(number, stream)

    # Frames that leave

    def _queue(self, kind: FrameKind, stream: int, offset: int, text: str = "") -> None:
        self._control.append(TunnelFrame(kind, 0, stream, offset, _text(text)))

    def _mark_sendable(self, number: int, stream: _Stream) -> None:
        if stream.is_open and stream.outgoing.can_send:
            self._sendable[number] = None

    def _set_reading(self, number: int, stream: _Stream) -> None:
        is_on = stream.is_open and stream.outgoing.takes_more(is_reading=stream.is_reading)
        if is_on != stream.is_reading:
            stream.is_reading = is_on
            self._out.append(SetReading(number, is_on))

    def _pump(self) -> None:
        """Send what there is on the legs that take a frame: acknowledgements, control, frames again, data in turns."""
        while (leg := self._legs.first_ready()) is not None:
            frame = self._next_frame(leg)
            if frame is None:
                return
            self._send(leg, frame)

    def _next_frame(self, leg: int) -> TunnelFrame | None:
        if self._now_s >= self._ack_due_s:
            self._ack_due_s, self._num_unacknowledged = math.inf, 0
            ranges = b"".join(RANGE.pack(*one) for one in self._seen.ranges(MAX_RANGES))
            return TunnelFrame(FrameKind.ACK, offset=self._seen.floor, payload=ranges)
        if (again := self._sent.next_again(leg)) is not None:
            return again
        if not self._sent.has_room:
            return None
        if self._control:
            return self._sent.number(self._control.popleft(), leg)
        most = self._max_payload_bytes or USUAL_PAYLOAD_BYTES
        if not self._legs.is_quick(leg):
            most = min(most, USUAL_PAYLOAD_BYTES)
        while self._sendable:
            number = next(iter(self._sendable))
            del self._sendable[number]
            if (frame := self._stream_frame(number, most)) is not None:
                return self._sent.number(frame, leg)
        return None

    def _stream_frame(self, number: int, max_bytes: int) -> TunnelFrame | None:
        stream = self._streams.get(number)
        if stream is None or not stream.outgoing.can_send:
            return None
        outgoing, offset = stream.outgoing, stream.outgoing.offset
        if payload := outgoing.next_payload(max_bytes):
            self._mark_sendable(number, stream)
            self._set_reading(number, stream)
            return TunnelFrame(FrameKind.DATA, 0, number, offset, payload)
        frame = TunnelFrame(FrameKind.FIN, 0, number, outgoing.take_end())
        self._forget_if_done(number, stream)
        return frame

    def _send(self, leg: int, frame: TunnelFrame) -> None:
        self._legs.use(leg, self._now_s)
        self._out.append(SendFrame(leg, frame))

    def _forget_if_done(self, number: int, stream: _Stream) -> None:
        if stream.outgoing.end_sent and stream.incoming.is_taken:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._streams.pop(number).incoming.release()
        self._sendable.pop(number, None)


def _text(text: str) -> bytes:
    return text.encode("ascii", "replace")[:MAX_TEXT_BYTES]


_HANDLERS: dict[type, Callable[[Tunnel, Any], None]] = {
    OpenStream: Tunnel._open_stream,
    StreamConnected: Tunnel._stream_connected,
    StreamRefused: Tunnel._stream_refused,
    StreamData: Tunnel._stream_data,
    StreamEnded: Tunnel._stream_ended,
    StreamTaken: Tunnel._stream_taken,
    StreamBroken: Tunnel._stream_broken,
    LegUp: Tunnel._leg_up,
    LegReady: Tunnel._leg_ready,
    LegDown: Tunnel._leg_down,
    DialFailed: Tunnel._dial_failed,
    FrameArrived: Tunnel._frame_arrived,
    Tick: Tunnel._tick,
    Stop: Tunnel._stop,
}
