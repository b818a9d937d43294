"""`RoceNic`: one queue pair of a NIC in user space, for tests and benchmarks: go-back-N, short resend times, DCQCN.

Sources: InfiniBand Architecture Specification, volume 1, 9.7 (reliable connections); measured NICs resend after 2 to
16 ms on long paths, whatever time-out they are given; `dcqcn` for the rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.dcqcn import DcqcnRate
from isthmus.wan.roce.near_replies import ACK, BECN, CNP_BYTES, NAK_ACCESS, NAK_SEQUENCE, RNR_FIRST, RNR_LAST
from isthmus.wan.roce.request_order import MESSAGE_ENDS, REQUESTS, STARTS
from isthmus.wan.roce.rnr_timers import RNR_TIMERS_S
from isthmus.wan.roce.roce_opcodes import PSN_SPAN, RESPONSES, Opcode, psn_distance
from isthmus.wan.roce.roce_packet import RETH, AethHeader, RethHeader, RocePacket, build_roce
from isthmus.wan.roce.roce_view import BTH_BYTES, RoceView, view_frame

CNP_INTERVAL_S = 50e-6
BURST_S = 10e-6

_SEND = (Opcode.SEND_ONLY, Opcode.SEND_FIRST, Opcode.SEND_MIDDLE, Opcode.SEND_LAST)
_WRITE = (Opcode.WRITE_ONLY, Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST)
_NOTIFYING_WRITE = (
    Opcode.WRITE_ONLY_IMMEDIATE,
    Opcode.WRITE_FIRST,
    Opcode.WRITE_MIDDLE,
    Opcode.WRITE_LAST_IMMEDIATE,
)
_WRITES = frozenset({*_WRITE, *_NOTIFYING_WRITE})
_HAS_IMMEDIATE = frozenset({Opcode.WRITE_ONLY_IMMEDIATE, Opcode.WRITE_LAST_IMMEDIATE})
_READ = (
    Opcode.READ_RESPONSE_ONLY,
    Opcode.READ_RESPONSE_FIRST,
    Opcode.READ_RESPONSE_MIDDLE,
    Opcode.READ_RESPONSE_LAST,
)


@dataclass(frozen=True, kw_only=True)
class NicSettings:
    """A queue pair and its peer."""

    address: str
    peer: str
    queue_pair: int
    peer_queue_pair: int
    source_port: int = 49_152
    first_psn: int = 0
    """Of requests; both ends are set up with it."""
    peer_first_psn: int = 0
    mtu_bytes: int = 1024
    window_bytes: int = 2**20
    """Most payload without an acknowledgement."""
    resend_s: float = 4e-3
    max_retries: int = 7
    port_gbps: float = 1.0
    memory: bytes = b""
    """What READs of the peer get."""
    ack_packets: int = 64
    """Most packets without one that asks for an acknowledgement."""


@dataclass(frozen=True, slots=True)
class PostWork:
    """Send `data` as a SEND or a WRITE, or READ `num_bytes` from `address` of the peer's memory.

    A WRITE with an `immediate` tells the peer of it.
    """

    kind: str
    data: bytes = b""
    address: int = 0
    num_bytes: int = 0
    key: int = 1
    immediate: int | None = None


@dataclass(frozen=True, slots=True)
class NicArrival:
    """A frame has come from the network."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class NicTick:
    """Time has passed; due at `RoceNic.next_tick_s`."""


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a frame to the network."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Posted work is complete; `data` is what a READ got."""

    data: bytes = b""


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message of the peer is complete: a SEND, or a WRITE to `target`."""

    data: bytes
    target: RethHeader | None = None
    immediate: int | None = None


@dataclass(frozen=True, slots=True)
class NicFailed:
    """The queue pair is in its error state."""

    reason: str


NicEvent = PostWork | NicArrival | NicTick
NicInstruction = Transmit | WorkDone | MessageArrived | NicFailed


@dataclass(slots=True)
class _Packet:
    psn: int
    frame: bytes
    num_bytes: int
    last_psn: int
    is_end: bool
    read: bytearray | None = None
    read_bytes: int = 0


class RoceNic:
    """One side of a queue pair. Call `handle` with each event and carry out what it returns."""

    def __init__(self, settings: NicSettings) -> None:
        self.settings = settings
        self.failed: str | None = None
        self.num_sent = self.num_sent_again = self.num_notified = 0
        self.rate = DcqcnRate(settings.port_gbps * 1e9 / 8)
        self.not_ready_code: int | None = None
        """Answer SENDs and WRITEs with `receiver not ready` and this timer; None while the receiver is ready."""
        self.accepts: Callable[[RethHeader | None, int], bool] = lambda _target, _num_bytes: True
        """Whether a WRITE to a target, or a SEND (None), may be this long in bytes; another one ends the queue pair."""
        self._next_psn, self._expected = settings.first_psn, settings.peer_first_psn
        self._unsent: deque[_Packet] = deque()
        self._unacked: deque[_Packet] = deque()
        self._window_bytes = self._num_since_ack = 0
        self._due_s, self._resend_s, self._retries = 0.0, math.inf, 0
        self._sent_to = settings.first_psn
        self._message, self._has_nak, self._parts, self._num_bytes = 0, False, list[bytes](), 0
        self._target: RethHeader | None = None
        self._cnp_s = -math.inf
        self._out: list[NicInstruction] = []

    @property
    def is_idle(self) -> bool:
        """Whether all posted work is complete."""
        return not self._unsent and not self._unacked

    @property
    def num_waiting_packets(self) -> int:
        """Packets of posted work that were not sent."""
        return len(self._unsent)

    def next_tick_s(self) -> float:
        """Return when a `NicTick` is due."""
        if self.failed is not None:
            return math.inf
        can_send = self._unsent and self._fits(self._unsent[0])
        return min(self._resend_s, self._due_s if can_send else math.inf)

    def handle(self, event: NicEvent, now_s: float) -> list[NicInstruction]:
        """Return what to do after `event` at `now_s`."""
        self._out = []
        if self.failed is not None:
            return []
        if isinstance(event, PostWork):
            self._post(event)
        elif isinstance(event, NicArrival):
            try:
                view = view_frame(event.frame)
            except ProtocolError:
                return []
            if view.queue_pair == self.settings.queue_pair:
                self._arrive(view, now_s)
        if now_s >= self._resend_s:
            self._timeout(now_s)
        self._send(now_s)
        return self._out

    # Requester

    def _post(self, work: PostWork) -> None:
        if work.kind == "read":
            span = max(1, -(-work.num_bytes // self.settings.mtu_bytes))
            psn, last = self._next_psn, (self._next_psn + span - 1) % PSN_SPAN
            source = RethHeader(work.address, 1, work.num_bytes)
            frame = self._frame(Opcode.READ_REQUEST, psn, reth=source, wants_ack=True)
            self._unsent.append(_Packet(psn, frame, 0, last, True, bytearray(), work.num_bytes))
            self._next_psn = (last + 1) % PSN_SPAN
            return
        for opcode, part, reth in self._parts_of(work):
            extra = (
                work.immediate.to_bytes(4, "big") if work.immediate is not None and opcode in _HAS_IMMEDIATE else b""
            )
            is_end = opcode in MESSAGE_ENDS
            self._num_since_ack += 1
            wants_ack = is_end or self._num_since_ack >= self.settings.ack_packets
            if wants_ack:
                self._num_since_ack = 0
            frame = self._frame(opcode, self._next_psn, reth=reth, extra=extra, payload=part, wants_ack=wants_ack)
            self._unsent.append(_Packet(self._next_psn, frame, len(part), self._next_psn, is_end))
            self._next_psn = (self._next_psn + 1) % PSN_SPAN

    def _parts_of(self, work: PostWork) -> list[tuple[int, bytes, RethHeader | None]]:
        mtu = self.settings.mtu_bytes
        parts = [work.data[place : place + mtu] for place in range(0, len(work.data), mtu)] or [b""]
        write = _WRITE if work.immediate is None else _NOTIFYING_WRITE
        opcodes = _choose(write if work.kind == "write" else _SEND, len(parts))
        reth = RethHeader(work.address, work.key, len(work.data)) if work.kind == "write" else None
        return [
            (opcode, part, None if place else reth)
            for place, (opcode, part) in enumerate(zip(opcodes, parts, strict=False))
        ]

    def _send(self, now_s: float) -> None:
        while self._unsent and now_s >= self._due_s and self._fits(self._unsent[0]):
            packet = self._unsent.popleft()
            self._unacked.append(packet)
            self._window_bytes += packet.num_bytes
            self.num_sent += 1
            if psn_distance(self._sent_to, packet.psn) < 0:
                self.num_sent_again += 1
            else:
                self._sent_to = (packet.last_psn + 1) % PSN_SPAN
            self._transmit(packet.frame)
            self.rate.sent(len(packet.frame))
            self._due_s = max(self._due_s, now_s - BURST_S) + len(packet.frame) / self.rate.bytes_per_s(now_s)
            if self._resend_s == math.inf:
                self._resend_s = now_s + self.settings.resend_s

    def _fits(self, packet: _Packet) -> bool:
        return not self._unacked or self._window_bytes + packet.num_bytes <= self.settings.window_bytes

    def _timeout(self, now_s: float) -> None:
        self._retries += 1
        if self._retries > self.settings.max_retries:
            self._fail("retries exceeded")
        elif self._unacked:
            self._go_back(self._unacked[0].psn, now_s)
        else:
            self._resend_s = math.inf

    def _go_back(self, psn: int, now_s: float) -> None:
        while self._unacked and psn_distance(psn, self._unacked[-1].last_psn) >= 0:
            packet = self._unacked.pop()
            self._window_bytes -= packet.num_bytes
            if packet.read is not None:
                packet.read.clear()
            self._unsent.appendleft(packet)
        self._resend_s = math.inf
        self._due_s = max(self._due_s, now_s)

    def _acknowledge(self, psn: int, now_s: float) -> None:
        while self._unacked and psn_distance(self._unacked[0].last_psn, psn) >= 0:
            if self._unacked[0].read is not None and len(self._unacked[0].read) < self._unacked[0].read_bytes:
                self._go_back(self._unacked[0].psn, now_s)  # its response was lost
                return
            packet = self._unacked.popleft()
            self._window_bytes -= packet.num_bytes
            self._retries = 0
            self._resend_s = now_s + self.settings.resend_s if self._unacked else math.inf
            if packet.is_end:
                self._out.append(WorkDone(bytes(packet.read or b"")))
        while self._unsent and psn_distance(self._unsent[0].last_psn, psn) >= 0 and self._unsent[0].read is None:
            packet = self._unsent.popleft()  # went back too early
            self._retries = 0
            if packet.is_end:
                self._out.append(WorkDone())

    def _response(self, view: RoceView, now_s: float) -> None:
        if view.opcode == Opcode.ACKNOWLEDGE:
            syndrome = view.syndrome
            if syndrome < RNR_FIRST:
                self._acknowledge(view.psn, now_s)
                return
            self._acknowledge((view.psn - 1) % PSN_SPAN, now_s)
            if not self._unacked or psn_distance(self._unacked[-1].last_psn, view.psn) > 0:
                return  # of no request that is outstanding
            if psn_distance(self._unacked[0].psn, view.psn) < 0:
                return
            if RNR_FIRST <= syndrome <= RNR_LAST:
                self._go_back(view.psn, now_s)
                self._due_s = now_s + RNR_TIMERS_S[syndrome & 31]
            elif syndrome == NAK_SEQUENCE:
                self._go_back(view.psn, now_s)
            else:
                self._fail(f"the responder refused a request: {syndrome:#04x}")
            return
        packet = next((one for one in self._unacked if one.read is not None and _within(view.psn, one)), None)
        if packet is None or packet.read is None:
            return
        place = psn_distance(packet.psn, view.psn) * self.settings.mtu_bytes
        if place == len(packet.read):
            packet.read += view.frame[-4 - view.num_payload_bytes - _padding(view) : -4 - _padding(view)]
            self._resend_s = now_s + self.settings.resend_s
        if view.psn == packet.last_psn and len(packet.read) == packet.read_bytes:
            self._acknowledge(view.psn, now_s)

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self._unsent.clear()
        self._unacked.clear()
        self._out.append(NicFailed(reason))

    # Responder

    def _arrive(self, view: RoceView, now_s: float) -> None:
        if view.opcode == Opcode.CNP:
            self.num_notified += 1
            self.rate.notify(now_s)
        elif view.opcode in RESPONSES:
            self._response(view, now_s)
        elif view.opcode in REQUESTS:
            if view.has_congestion_mark and now_s - self._cnp_s >= CNP_INTERVAL_S:
                self._cnp_s = now_s
                self._transmit(self._frame(Opcode.CNP, 0, payload=bytes(CNP_BYTES), reserved_bits=BECN))
            self._request(view)

    def _request(self, view: RoceView) -> None:
        distance = psn_distance(self._expected, view.psn)
        is_read = view.opcode == Opcode.READ_REQUEST
        if distance > 0:
            if not self._has_nak:
                self._has_nak = True
                self._answer(self._expected, NAK_SEQUENCE)
        elif distance < 0:
            if is_read:
                self._read(view)
            else:
                self._answer((self._expected - 1) % PSN_SPAN, ACK)
        elif self.not_ready_code is not None:
            self._answer(view.psn, RNR_FIRST | self.not_ready_code)
        elif not is_read and not self._may_take(view):
            self._answer(view.psn, NAK_ACCESS)
            self._fail("the peer wrote where it may not")
        else:
            self._has_nak = False
            span = max(1, -(-view.read_bytes // self.settings.mtu_bytes)) if is_read else 1
            self._expected = (view.psn + span) % PSN_SPAN
            if view.opcode in MESSAGE_ENDS:
                self._message = (self._message + 1) % PSN_SPAN
            if is_read:
                self._read(view)
                return
            padding = _padding(view)
            end = len(view.frame) - 4 - padding - view.num_payload_bytes
            self._parts.append(view.frame[end : end + view.num_payload_bytes])
            if view.opcode in MESSAGE_ENDS:
                immediate = int.from_bytes(view.frame[end - 4 : end], "big") if view.opcode in _HAS_IMMEDIATE else None
                self._out.append(MessageArrived(b"".join(self._parts), self._target, immediate))
                self._parts, self._target = [], None
            if view.wants_ack:
                self._answer(view.psn, ACK)

    def _may_take(self, view: RoceView) -> bool:
        """Return whether a packet of a SEND or a WRITE fits the message that it begins or continues."""
        is_write = view.opcode in _WRITES
        if view.opcode in STARTS:
            self._parts, self._num_bytes = [], 0
            self._target = RethHeader(*RETH.unpack_from(view.frame, view.base + BTH_BYTES)) if is_write else None
        self._num_bytes += view.num_payload_bytes
        if self._target is not None and self._num_bytes > self._target.num_bytes:
            return False
        return (self._target is not None) == is_write and self.accepts(self._target, self._num_bytes)

    def _read(self, view: RoceView) -> None:
        start = int.from_bytes(view.frame[view.base + 12 : view.base + 20], "big")
        data, mtu = self.settings.memory[start : start + view.read_bytes], self.settings.mtu_bytes
        parts = [data[place : place + mtu] for place in range(0, len(data), mtu)] or [b""]
        for place, (opcode, part) in enumerate(zip(_choose(_READ, len(parts)), parts, strict=True)):
            aeth = None if opcode == Opcode.READ_RESPONSE_MIDDLE else AethHeader(ACK, self._message)
            self._transmit(self._frame(opcode, (view.psn + place) % PSN_SPAN, aeth=aeth, payload=part))

    def _answer(self, psn: int, syndrome: int) -> None:
        self._transmit(self._frame(Opcode.ACKNOWLEDGE, psn, aeth=AethHeader(syndrome, self._message)))

    def _transmit(self, frame: bytes) -> None:
        self._out.append(Transmit(frame))

    def _frame(self, opcode: int, psn: int, **fields: Any) -> bytes:
        settings = self.settings
        padding = bytes(-len(fields.get("payload", b"")) % 4)
        return build_roce(
            RocePacket(
                source=settings.address, target=settings.peer, opcode=opcode, queue_pair=settings.peer_queue_pair,
                psn=psn, source_port=settings.source_port, padding=padding, **fields,
            )
        )  # fmt: skip


def _choose(opcodes: tuple[Opcode, Opcode, Opcode, Opcode], count: int) -> list[Opcode]:
    """Return the opcodes of a message of `count` packets."""
    only, first, middle, last = opcodes
    return [only] if count == 1 else [first, *[middle] * (count - 2), last]


def _padding(view: RoceView) -> int:
    return view.frame[view.base + 1] >> 4 & 3


def _within(psn: int, packet: _Packet) -> bool:
    return psn_distance(packet.psn, psn) >= 0 and psn_distance(psn, packet.last_psn) >= 0
