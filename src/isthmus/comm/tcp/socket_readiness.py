"""`Readiness`: whether a TCP connection would send new data immediately or buffer it.

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

UNSENT_BYTES = 256 * 2**10
"""Unsent bytes that the kernel may buffer per connection."""

_MOVES_S, _PAUSE_S = 0.05, 0.005
_PROBE_S, _PROBE_PACKETS = 0.2, 4

# Layout of `struct tcp_info`, linux/tcp.h
_INFO_BYTES, _STATE, _OPEN = 148, 1, 0
_FIELD, _FIELDS = struct.Struct("=I"), (16, 68, 80)
"""Offsets of the packet size in bytes, the round trip in microseconds and the window in packets."""


def is_probing(connection: socket.socket) -> bool:
    """Return whether BBR is in ProbeRTT and sending a fragment would outlast that phase.

    Detected as a window of at most four packets in TCP state open, that is without a loss.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # broken: the next write raises
        return False
    (packet_bytes,), (round_trip_us,), (window,) = (_FIELD.unpack_from(info, at) for at in _FIELDS)
    rounds = UNSENT_BYTES / max(window * packet_bytes, 1)
    slow = rounds * round_trip_us / 1e6 > _PROBE_S
    return bool(info[_STATE] == _OPEN and window <= _PROBE_PACKETS and slow)


class Readiness:
    """Send readiness of one connection; for its sending thread only."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        probing: Callable[[socket.socket], bool] = is_probing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._clock = connection, clock
        self._probing = probing if _limit_unsent(connection) and _uses_bbr(connection) else None
        self._rests_until_s: float | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLOUT)

    def wait(self) -> bool:
        """Return whether the connection is ready; block for some milliseconds before returning False."""
        if self._rests():
            time.sleep(_PAUSE_S)
            return False
        return bool(self._poll.poll(1e3 * _MOVES_S))

    def _rests(self) -> bool:
        """Return whether ProbeRTT pauses the connection: it ends with the first packet after 0.2 s."""
        if self._probing is None or not self._probing(self._connection):
            self._rests_until_s = None
            return False
        now_s = self._clock()
        if self._rests_until_s is None:
            self._rests_until_s = now_s + _PROBE_S
        return now_s < self._rests_until_s


def _limit_unsent(connection: socket.socket) -> bool:
    """Set `TCP_NOTSENT_LOWAT`; return whether the kernel supports it and `TCP_INFO`."""
    if not (hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_NOTSENT_LOWAT")):
        return False
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        return True
    return False


def _uses_bbr(connection: socket.socket) -> bool:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0") == b"bbr"
