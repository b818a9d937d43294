"""`SendReadiness`: whether a TCP connection would send new data immediately or buffer it.

The kernel buffers megabytes for a stalled connection that another connection could deliver sooner. So
`TCP_NOTSENT_LOWAT` bounds the unsent bytes. BBR's ProbeRTT phase holds a connection at four packets for
0.2 s every ten seconds (N. Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5),
2016); during that phase the connection is paused and fragments go to another one.

On a thin link a fragment of full size would occupy one connection for long while the others have nothing left to send.
So a connection takes no more than it sends in some milliseconds, and the kernel buffers twice as much.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

MAX_UNSENT_BYTES = 256 * 2**10
"""Most unsent bytes that the kernel may buffer per connection."""

MIN_PART_BYTES = 4 * 2**10
"""Least bytes to take at a time."""

_PART_S = 0.02
"""Time in which a connection sends what it takes at a time, if a window leaves per round trip; BBR's is twice that."""

_WRITABLE_WAIT_S, _PAUSE_S = 0.05, 0.005
_PROBE_RTT_S, _PROBE_RTT_PACKETS = 0.2, 4

# Layout of `struct tcp_info`, linux/tcp.h
_TCP_INFO_BYTES, _STATE_OFFSET, _STATE_OPEN = 148, 1, 0
_UINT32, _FIELD_OFFSETS = struct.Struct("=I"), (16, 68, 80)
"""Offsets of the packet size in bytes, the round trip in microseconds and the window in packets."""


class TcpState(NamedTuple):
    """What the kernel says of a connection."""

    is_open: bool
    """Whether no loss is being repaired."""
    packet_bytes: int
    round_trip_s: float
    window_packets: int

    @property
    def is_probing_rtt(self) -> bool:
        """Whether BBR is in ProbeRTT and sending a fragment would outlast that phase.

        Detected as a window of at most four packets in TCP state open, that is without a loss.
        """
        rounds = MAX_UNSENT_BYTES / max(self.window_packets * self.packet_bytes, 1)
        slow = rounds * self.round_trip_s > _PROBE_RTT_S
        return self.is_open and self.window_packets <= _PROBE_RTT_PACKETS and slow

    @property
    def part_bytes(self) -> int:
        """Bytes of a fragment that the connection sends in some milliseconds, from `MIN_PART_BYTES` on."""
        sent_bytes = self.window_packets * self.packet_bytes * _PART_S / max(self.round_trip_s, 1e-6)
        return min(max(int(sent_bytes), MIN_PART_BYTES), MAX_UNSENT_BYTES)


def tcp_state(sock: socket.socket) -> TcpState | None:
    """Return the state of the connection `sock`; None where the kernel does not say."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):  # broken, so that the next write raises; or another system
        return None
    (packet_bytes,), (round_trip_us,), (window,) = (_UINT32.unpack_from(info, at) for at in _FIELD_OFFSETS)
    return TcpState(info[_STATE_OFFSET] == _STATE_OPEN, packet_bytes, round_trip_us / 1e6, window)


class SendReadiness:
    """Send readiness of one connection; for its sending thread only."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        state: Callable[[socket.socket], TcpState | None] = tcp_state,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._clock = sock, clock
        self._state = state if _set_unsent_limit(sock, MAX_UNSENT_BYTES) else None
        self._is_paced_by_bbr = self._state is not None and _uses_bbr(sock)
        self.part_bytes = MAX_UNSENT_BYTES
        """Bytes to take at a time, since `wait_ready` was true last."""
        self._unsent_bytes = MAX_UNSENT_BYTES
        self._paused_until_s: float | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)

    def wait_ready(self, before_wait: Callable[[], None] = lambda: None) -> bool:
        """Return whether the connection is ready; before False, call `before_wait` and block for some milliseconds."""
        state = self._state(self._socket) if self._state else None
        if self._is_paused(state):
            before_wait()
            time.sleep(_PAUSE_S)
            return False
        if state is not None:
            self.part_bytes = state.part_bytes
            self._limit_unsent(2 * state.part_bytes)
        if self._poll.poll(0):
            return True
        before_wait()
        return bool(self._poll.poll(1e3 * _WRITABLE_WAIT_S))

    def _limit_unsent(self, num_bytes: int) -> None:
        """Let the kernel buffer about `num_bytes`; unlike values only, because each is a system call."""
        num_bytes = min(num_bytes, MAX_UNSENT_BYTES)
        if not self._unsent_bytes / 2 < num_bytes < 2 * self._unsent_bytes:
            _set_unsent_limit(self._socket, num_bytes)
            self._unsent_bytes = num_bytes

    def _is_paused(self, state: TcpState | None) -> bool:
        """Return whether ProbeRTT pauses the connection: it ends with the first packet after 0.2 s."""
        if state is None or not (self._is_paced_by_bbr and state.is_probing_rtt):
            self._paused_until_s = None
            return False
        now_s = self._clock()
        if self._paused_until_s is None:
            self._paused_until_s = now_s + _PROBE_RTT_S
        return now_s < self._paused_until_s


def _set_unsent_limit(sock: socket.socket, num_bytes: int) -> bool:
    """Set `TCP_NOTSENT_LOWAT`; return whether the kernel supports it and `TCP_INFO`."""
    if not (hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_NOTSENT_LOWAT")):
        return False
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)
        return True
    return False


def _uses_bbr(sock: socket.socket) -> bool:
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0") == b"bbr"
