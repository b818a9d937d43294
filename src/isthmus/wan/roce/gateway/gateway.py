"""`Gateway`: one of the two RoCEv2 gateways of a long link, as a pure state machine.

Source: the report on cross-domain pooling, 4.2.4. A flow and a bounded buffer for each direction of a queue pair; what
is lost between the gateways is named and sent again, nothing else; NICs get frames in order, and near answers where
that is on; congestion control has three parts: notifications to the near NIC while its frames wait, a rate of each flow
between the gateways, and the far NIC's notifications, which slow the far gateway down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.gateway.connections import Connections
from isthmus.wan.roce.gateway.gateway_datagram import (
    DATA_BYTES,
    FRAME_PLACE,
    HEAD_BYTES,
    DataBody,
    DatagramKind,
    FailureEntry,
    FeedbackEntry,
    FlowFailure,
    GatewayDatagram,
    parse_datagram,
)
from isthmus.wan.roce.gateway.gateway_events import (
    GatewayEvent,
    GatewayInstruction,
    LinkDatagram,
    LinkDatagrams,
    NicFrame,
    NicFrames,
    SendOnLink,
)
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.incoming_side import IncomingSide
from isthmus.wan.roce.gateway.link_state import Heard, LinkState
from isthmus.wan.roce.gateway.outgoing_side import OutgoingSide
from isthmus.wan.roce.gateway.queue_pairs import QueuePairs
from isthmus.wan.roce.roce_opcodes import RESPONSES, Opcode
from isthmus.wan.roce.roce_view import FlowKey, RoceView, view_frame


@dataclass(frozen=True, kw_only=True)
class GatewayStatistics:
    """What a gateway has done and keeps."""

    num_queue_pairs: int
    """Directions of queue pairs, both ways."""
    num_paired: int
    """Queue pairs of which both directions are known to belong together."""
    held_bytes: int
    frames_taken: int
    """From NICs, each once."""
    frames_absorbed: int
    """Resends of NICs that did not cross the link."""
    frames_sent: int
    """Over the link, resends included."""
    frames_sent_again: int
    frames_repeated: int
    """Came twice over the link."""
    frames_handed: int
    """To NICs."""
    frames_refused: int
    """Forged, cut, beyond a bound, or of no flow."""
    near_notifications: int
    """Congestion notifications to NICs of this site."""
    queue_pairs_failed: int
    round_trip_s: float


class Gateway:
    """One side. Call `handle` with each event and carry out what it returns, in order.

    `epoch` is a random number from 1 to 2^32 - 1, another one at each start.
    """

    def __init__(self, settings: GatewaySettings, epoch: int) -> None:
        self.settings = settings
        self._link = LinkState(epoch, settings)
        self._pairs = QueuePairs()
        self._connections = Connections(settings.max_queue_pairs)
        self._outgoing = OutgoingSide(settings, self._link, self._pairs, self._connections)
        self._incoming = IncomingSide(
            settings, self._link, self._pairs, self._connections,
            on_answer=self._outgoing.answered, on_message=partial(self._note_connection, is_from_here=False),
        )  # fmt: skip
        self._num_refused = self._num_failed = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of frames that are kept, both ways."""
        return self._outgoing.held.used + self._incoming.held.used

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of NICs' frames that wait to be sent for the first time."""
        return self._outgoing.num_waiting_bytes

    @property
    def is_connected(self) -> bool:
        """Whether the other gateway has answered."""
        return self._link.is_known

    def next_tick_s(self, now_s: float) -> float:
        """Return when a `Tick` is due."""
        return min(self._link.hello_s, self._outgoing.next_s(now_s), self._incoming.next_s())

    def handle(self, event: GatewayEvent, now_s: float) -> list[GatewayInstruction]:
        """Return what to do after `event` at `now_s`, in order."""
        out: list[GatewayInstruction] = []
        match event:
            case NicFrame(frame):
                self._take_frames((frame,), now_s, out)
            case NicFrames(frames):
                self._take_frames(frames, now_s, out)
            case LinkDatagram(data):
                self._take_datagrams((data,), now_s, out)
            case LinkDatagrams(datagrams):
                self._take_datagrams(datagrams, now_s, out)
        if now_s >= self._link.hello_s:
            out += [SendOnLink(data) for data in self._link.hello(now_s)]
        self._incoming.finish(now_s, out)
        self._outgoing.tick(now_s, out)
        self._incoming.tick(now_s, out)
        self._fail_partners(now_s, out)
        self._outgoing.pump(now_s, out)
        return out

    def statistics(self) -> GatewayStatistics:
        """Return counters."""
        outgoing, incoming = self._outgoing, self._incoming
        return GatewayStatistics(
            num_queue_pairs=len(outgoing) + len(incoming),
            num_paired=len(self._pairs),
            held_bytes=self.held_bytes,
            frames_taken=outgoing.num_taken,
            frames_absorbed=outgoing.num_absorbed,
            frames_sent=outgoing.num_sent,
            frames_sent_again=outgoing.num_sent_again,
            frames_repeated=incoming.num_repeated,
            frames_handed=incoming.num_handed,
            frames_refused=self._num_refused + outgoing.num_refused + incoming.num_refused,
            near_notifications=outgoing.num_notified,
            queue_pairs_failed=self._num_failed,
            round_trip_s=self._link.least_round_trip_s,
        )

    def _take_frames(self, frames: Iterable[bytes], now_s: float, out: list[GatewayInstruction]) -> None:
        incoming, take = self._incoming, self._outgoing.take
        for frame in frames:
            try:
                view = view_frame(frame)
            except ProtocolError:
                self._num_refused += 1
                continue
            opcode = view.opcode
            if opcode in RESPONSES and incoming.answer(view, now_s, out):
                continue
            if opcode == Opcode.DATAGRAM_SEND_ONLY:
                self._note_connection(view, is_from_here=True)
            elif opcode == Opcode.CNP and incoming.slow_down(view.key, now_s):
                continue
            take(view, now_s, out)

    def _take_datagrams(self, datagrams: Iterable[bytes], now_s: float, out: list[GatewayInstruction]) -> None:
        for data in datagrams:
            flags = self._link.peer_heads.get(data[:HEAD_BYTES])
            if flags is not None and len(data) >= DATA_BYTES:  # as most are: a frame of the known peer
                self._link.peer_acknowledges, is_shared = flags
                flow, low = FRAME_PLACE.unpack_from(data, HEAD_BYTES)
                self._incoming.take(DataBody(flow, low, data[DATA_BYTES:], is_shared), now_s, out)
                continue
            try:
                datagram = parse_datagram(data)
            except ProtocolError:
                self._num_refused += 1
            else:
                self._take_datagram(datagram, now_s, out)

    def _take_datagram(self, datagram: GatewayDatagram, now_s: float, out: list[GatewayInstruction]) -> None:
        heard, replies = self._link.hear(datagram, now_s)
        out += [SendOnLink(data) for data in replies]
        if heard is Heard.IGNORED:
            return
        if heard is Heard.NEW_PEER:
            self._outgoing.begin_again(now_s)
            self._incoming.lose_peer(now_s)
        for entry in datagram.body:
            match entry:
                case DataBody():
                    self._incoming.take(entry, now_s, out)
                case FeedbackEntry():
                    self._outgoing.feedback(entry, now_s, out)
                case FailureEntry(flow, is_mine, reason):
                    if is_mine:
                        self._incoming.failed_there(flow, reason, now_s, out)
                    else:
                        self._outgoing.failed_there(flow, reason, out)
                case int() if datagram.kind is DatagramKind.PROBE:
                    self._incoming.probe(entry, now_s)
                case int():
                    self._incoming.forget(entry)

    def _note_connection(self, view: RoceView, *, is_from_here: bool) -> None:
        """Learn a queue pair from the message that sets it up; what a former one of its numbers left is over."""
        found = self._connections.note(view)
        if found is not None:
            back, there = found if is_from_here else found[::-1]  # a REP from here: the REQ's sender is at the far site
            self._outgoing.begin_anew(there.key)
            self._incoming.begin_anew(back.key)

    def _fail_partners(self, now_s: float, out: list[GatewayInstruction]) -> None:
        """A queue pair fails as a whole: the NIC at either end learns it by its next request."""
        outgoing, incoming = self._outgoing, self._incoming
        while outgoing.failed or incoming.failed:
            self._num_failed += 1
            if outgoing.failed:
                partner: FlowKey | None = self._pairs.incoming_of(outgoing.failed.pop().key)
                if partner is not None and (flow := incoming.flow(partner)) is not None:
                    incoming.fail(flow, FlowFailure.PEER, now_s, out)
            else:
                partner = self._pairs.outgoing_of(incoming.failed.pop().key)
                if partner is not None and (sent := outgoing.flow(partner)) is not None:
                    outgoing.fail(sent, FlowFailure.PEER, out)
