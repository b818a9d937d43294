"""`SendReadiness`: whether a TCP connection would send new data immediately or buffer it.

The kernel buffers megabytes for a stalled connection that another connection could deliver sooner. So
`TCP_NOTSENT_LOWAT` bounds the unsent bytes. BBR's ProbeRTT phase holds a connection at four packets for
0.2 s every ten seconds (N. Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5),
2016); during that phase the connection is paused and fragments go to another one.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

MAX_UNSENT_BYTES = 256 * 2**10
"""Unsent bytes that the kernel may buffer per connection."""

_WRITABLE_WAIT_S, _PAUSE_S = 0.05, 0.005
_PROBE_RTT_S, _PROBE_RTT_PACKETS = 0.2, 4

# Layout of `struct tcp_info`, linux/tcp.h
_TCP_INFO_BYTES, _STATE_OFFSET, _STATE_OPEN = 148, 1, 0
_UINT32, _FIELD_OFFSETS = struct.Struct("=I"), (16, 68, 80)
"""Offsets of the packet size in bytes, the round trip in microseconds and the window in packets."""


def is_probing_rtt(sock: socket.socket) -> bool:
    """Return whether BBR is in ProbeRTT and sending a fragment would outlast that phase.

    Detected as a window of at most four packets in TCP state open, that is without a loss.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # broken: the next write raises
        return False
    (packet_bytes,), (round_trip_us,), (window,) = (_UINT32.unpack_from(info, at) for at in _FIELD_OFFSETS)
    rounds = MAX_UNSENT_BYTES / max(window * packet_bytes, 1)
    slow = rounds * round_trip_us / 1e6 > _PROBE_RTT_S
    return bool(info[_STATE_OFFSET] == _STATE_OPEN and window <= _PROBE_RTT_PACKETS and slow)


class SendReadiness:
    """Send readiness of one connection; for its sending thread only."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        probing: Callable[[socket.socket], bool] = is_probing_rtt,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._clock = sock, clock
        self._is_probing = probing if _set_unsent_limit(sock) and _uses_bbr(sock) else None
        self._paused_until_s: float | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)

    def wait_ready(self) -> bool:
        """Return whether the connection is ready; block for some milliseconds before returning False."""
        if self._is_paused():
            time.sleep(_PAUSE_S)
            return False
        return bool(self._poll.poll(1e3 * _WRITABLE_WAIT_S))

    def _is_paused(self) -> bool:
        """Return whether ProbeRTT pauses the connection: it ends with the first packet after 0.2 s."""
        if self._is_probing is None or not self._is_probing(self._socket):
            self._paused_until_s = None
            return False
        now_s = self._clock()
        if self._paused_until_s is None:
            self._paused_until_s = now_s + _PROBE_RTT_S
        return now_s < self._paused_until_s


def _set_unsent_limit(sock: socket.socket) -> bool:
    """Set `TCP_NOTSENT_LOWAT`; return whether the kernel supports it and `TCP_INFO`."""
    if not (hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_NOTSENT_LOWAT")):
        return False
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        return True
    return False


def _uses_bbr(sock: socket.socket) -> bool:
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0") == b"bbr"
