"""`Connection`: one TCP connection to a peer, with a send thread and a receive thread."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from isthmus.comm.channel.channel import Channel
from isthmus.comm.rdma.rdma_channel import RdmaChannel
from isthmus.comm.tcp.reassembly import Reassembler
from isthmus.comm.tcp.send_queue import MAX_UNACKED_MESSAGES, Fragment, SendQueue
from isthmus.comm.tcp.socket_readiness import SendReadiness
from isthmus.comm.tcp.wire_format import (
    ACK,
    CLOSE,
    DATA,
    HEARTBEAT,
    MAX_REASON_BYTES,
    NOTICE,
    FrameHeader,
    frame_parts,
    read_header,
)
from isthmus.comm.transport.transport import Arrival
from isthmus.core.process.steady_clock import steady_time_s

_UNCHECKED_BYTES = 4 * 2**10
"""Fragments up to this size skip the readiness check: they fit in the first packets."""

_IDLE_HEARTBEATS = 10
"""Heartbeats without a message after which a connection counts as idle."""
_IDLE_SLOWDOWN, _IDLE_HEARTBEAT_S = 5, 1.5
"""An idle connection has heartbeats this much more rarely, but not more rarely than every `_IDLE_HEARTBEAT_S`."""

_MESSAGE_KINDS = (DATA, ACK)
"""What makes a connection busy. Notices do not: many ranks that meet would all send heartbeats at the full rate."""

_CONNECTION_ERRORS = (OSError, ValueError, MemoryError)


class ConnectionOwner(Protocol):
    """The peer that owns the connections; its callbacks run on either connection thread."""

    reassembler: Reassembler
    send_queue: SendQueue
    close_reason: str | None

    @property
    def tolerates_silence(self) -> bool:
        """Whether the peer may be silent: it has not joined yet, or ends."""
        ...

    def on_activity(self) -> None:
        """Record that a frame arrived."""
        ...

    def on_acked(self, num_bytes: int) -> None:
        """Count a message that the peer acknowledged."""
        ...

    def on_received(self, num_bytes: int, arrival: Arrival) -> None:
        """Count a message that was received completely."""
        ...

    def on_notice(self, tag: int, text: bytes) -> None:
        """Handle a notice of the peer; raises `ValueError` for a malformed one."""
        ...

    def on_peer_closed(self, reason: str) -> None:
        """Handle a CLOSE frame from the peer on one connection; `reason` is empty for an orderly close."""
        ...

    def on_closed(self) -> None:
        """Handle that this rank sent its CLOSE frame on one connection."""
        ...

    def on_broken(self, connection: Connection, error: Exception) -> None:
        """Handle a broken connection; called once per connection."""
        ...


class Connection:
    """Connection `number` to a peer whose clock is `clock_offset_s` ahead of ours.

    Silence of `silence_timeout_s` counts as broken, and a part of a frame that takes longer than `part_timeout_s`,
    except while the owner tolerates silence: the peer may still be joining or finishing. A connection that has carried
    no message yet, or none for `_IDLE_HEARTBEATS`, has rarer heartbeats, announced by the last one, and may be silent
    for as many. When the connection breaks, its unacknowledged fragments return to the send queue.
    """

    def __init__(
        self,
        number: int,
        channel: Channel,
        clock_offset_s: float,
        owner: ConnectionOwner,
        *,
        heartbeat_s: float,
        silence_timeout_s: float,
        part_timeout_s: float,
        clock: Callable[[], float] = steady_time_s,
    ) -> None:
        self.number, self.dead = number, False
        self.peer_closed = self.has_closed = False
        # Whether it broke and the owner has not begun yet to reopen it.
        self.is_failing = False
        self._channel, self._clock_offset_s, self._owner = channel, clock_offset_s, owner
        self._heartbeat_s, self._clock = heartbeat_s, clock
        self._interval_s, self._silence_timeout_s = heartbeat_s, silence_timeout_s
        self._idle_interval_s = max(heartbeat_s, min(_IDLE_SLOWDOWN * heartbeat_s, _IDLE_HEARTBEAT_S))
        self._last_message_s = -math.inf
        self._unacked: deque[Fragment] = deque()
        self._sent_acks: deque[Fragment] = deque(maxlen=MAX_UNACKED_MESSAGES)
        self._lock = threading.Lock()
        # By RDMA, TCP carries nothing whose pace would tell.
        self._readiness = channel if isinstance(channel, RdmaChannel) else SendReadiness(channel.socket)
        channel.socket.settimeout(self._silence_limit_s(self._idle_interval_s))
        channel.part_timeout_s = part_timeout_s
        self._threads = [
            threading.Thread(target=loop, name=f"isthmus-connection-{number}-{what}", daemon=True)
            for loop, what in ((self._send_loop, "send"), (self._receive_loop, "receive"))
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def abort(self) -> None:
        """Break the connection and stop both threads."""
        self.dead = True
        self.shut_down()
        self._owner.send_queue.wake()

    def shut_down(self) -> None:
        """Shut the socket down, as a network failure would."""
        self._channel.shut_down()

    def join(self) -> None:
        """Join both threads and close the socket."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._channel.close()

    def _handle_failure(self, error: Exception) -> None:
        with self._lock:
            known = self.dead
            self.is_failing, self.dead = not known, True
        self.abort()
        if not known:
            self._owner.on_broken(self, error)

    def _send_loop(self) -> None:
        send_queue = self._owner.send_queue
        fragment: Fragment | None = None
        try:
            while not (self.dead or self.has_closed):
                fragment = self.next_fragment()
                if fragment is not None:
                    self._write_fragment(fragment)
                    self._track_unacked(fragment)
                    if fragment.header.kind == CLOSE:
                        self.has_closed = True
                        self._owner.on_closed()
        except OSError as error:
            if fragment is not None:
                self._track_unacked(fragment)
            self._handle_failure(error)
        send_queue.requeue([*self._sent_acks, *self._unacked])

    def next_fragment(self) -> Fragment | None:
        """Return the next fragment or, after an idle heartbeat interval, a heartbeat; None to check again."""
        owner = self._owner
        if owner.close_reason is not None:
            reason = memoryview(owner.close_reason.encode()[:MAX_REASON_BYTES])
            return Fragment(FrameHeader(CLOSE, message_bytes=len(reason), payload_bytes=len(reason)), reason)
        fragment = owner.send_queue.take(max_bytes=_UNCHECKED_BYTES)
        if fragment is not None:
            return fragment
        if owner.send_queue.has_fragments():
            is_ready = self._readiness.wait_ready(owner.send_queue.wake_next)
            return owner.send_queue.take(part_bytes=self._readiness.part_bytes) if is_ready else None
        if owner.send_queue.wait_for_work(self._interval_s, lambda: self.dead or owner.close_reason is not None):
            return None
        is_idle = time.monotonic() - self._last_message_s > _IDLE_HEARTBEATS * self._heartbeat_s
        self._interval_s = self._idle_interval_s if is_idle else self._heartbeat_s
        return Fragment(FrameHeader(HEARTBEAT, round(1e3 * self._interval_s)), memoryview(b""))

    def _write_fragment(self, fragment: Fragment) -> None:
        header = replace(fragment.header, left_s=self._clock())
        if header.kind in _MESSAGE_KINDS:
            self._last_message_s, self._interval_s = time.monotonic(), self._heartbeat_s
        self._channel.write(frame_parts(header, fragment.payload), lambda: self.dead)

    def _track_unacked(self, fragment: Fragment) -> None:
        """Remember a sent fragment or acknowledgement until a resend is ruled out."""
        if fragment.header.kind == ACK:
            self._sent_acks.append(fragment)
        elif fragment.header.kind == DATA:
            self._unacked.append(fragment)
            while self._unacked and not self._owner.send_queue.is_unacked(self._unacked[0].header.number):
                self._unacked.popleft()

    def _receive_loop(self) -> None:
        try:
            while self._receive_frame(read_header(self._channel, self._tolerates_silence)):
                self._owner.on_activity()
        except _CONNECTION_ERRORS as error:
            self._handle_failure(error)

    def _tolerates_silence(self) -> bool:
        return self._owner.tolerates_silence and not self.dead

    def _receive_frame(self, header: FrameHeader) -> bool:
        """Receive one frame; return False after CLOSE."""
        owner = self._owner
        if header.kind == HEARTBEAT:
            self._expect_heartbeat(header.number / 1e3)
            return True
        if header.kind in _MESSAGE_KINDS:
            self._last_message_s = time.monotonic()
        if header.kind == DATA:
            self._receive_fragment(header)
        elif header.kind == ACK:
            num_bytes = owner.send_queue.mark_acked(header.number)
            if num_bytes is not None:
                owner.on_acked(num_bytes)
        elif header.kind in (CLOSE, NOTICE):
            text = bytearray(header.payload_bytes)
            self._read_payload(memoryview(text))
            if header.kind == NOTICE:
                owner.on_notice(header.tag, bytes(text))
                return True
            self.peer_closed = True
            owner.on_peer_closed(text.decode(errors="replace"))
            return False
        return True

    def _expect_heartbeat(self, interval_s: float) -> None:
        """Let the peer be silent for as many heartbeats as ever, of which the next comes after `interval_s`."""
        limit_s = self._silence_limit_s(interval_s)
        if limit_s != self._channel.socket.gettimeout():
            self._channel.socket.settimeout(limit_s)

    def _silence_limit_s(self, interval_s: float) -> float:
        """Return how long a peer may be silent whose next heartbeat comes after `interval_s`."""
        share = min(max(interval_s, self._heartbeat_s), self._idle_interval_s) / self._heartbeat_s
        return share * self._silence_timeout_s

    def _receive_fragment(self, header: FrameHeader) -> None:
        owner = self._owner
        into = owner.reassembler.begin_fragment(header, self, lambda: self.dead)
        if into is None:
            self._read_payload(memoryview(bytearray(header.payload_bytes)))
            if owner.reassembler.has_message(header.number):
                owner.send_queue.queue_ack(header.number)
            return
        try:
            self._read_payload(into)
        except BaseException:
            owner.reassembler.end_fragment(header, None)
            raise
        ahead_s = self._clock_offset_s
        left_s = header.left_s - ahead_s
        arrival = Arrival(header.sent_s - ahead_s, left_s, left_s, self._clock(), ahead_s)
        whole = owner.reassembler.end_fragment(header, arrival)
        if whole is not None:
            owner.on_received(header.message_bytes, whole)
            owner.send_queue.queue_ack(header.number)

    def _read_payload(self, into: memoryview) -> None:
        if len(into):
            self._channel.read_into(into, self._tolerates_silence)
