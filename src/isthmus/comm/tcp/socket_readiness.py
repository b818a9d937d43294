"""`Readiness`: whether a connection would begin to send at once what it is given, or keep it waiting.

A kernel takes megabytes for a connection that does not move: other lanes would have had them there already.
Linux tells how much is not sent yet, and how much may be on its way. BBR lets next to nothing be for 0.2 s,
every ten seconds, to see the bare round trip (N. Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 14(5), 2016, "ProbeRTT"): such a connection is left to rest, and the next piece takes
another.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

UNSENT_BYTES = 256 * 2**10
"""What the kernel takes of a connection that is not sent yet."""

_MOVES_S, _PAUSE_S = 0.05, 0.005
_PROBE_S, _PROBE_PACKETS = 0.2, 4

# of `struct tcp_info`, linux/tcp.h
_INFO_BYTES, _STATE, _OPEN = 148, 1, 0
_FIELD, _FIELDS = struct.Struct("=I"), (16, 68, 80)
"""Where the bytes of a packet, the round trip in microseconds, and the window in packets stand."""


def is_probing(connection: socket.socket) -> bool:
    """Tell whether BBR looks for the bare round trip, and a piece would take longer than that goes on.

    The window is that of a probe then, and no loss explains it.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # broken: whoever writes will see it
        return False
    (packet_bytes,), (round_trip_us,), (window,) = (_FIELD.unpack_from(info, at) for at in _FIELDS)
    rounds = UNSENT_BYTES / max(window * packet_bytes, 1)
    slow = rounds * round_trip_us / 1e6 > _PROBE_S
    return bool(info[_STATE] == _OPEN and window <= _PROBE_PACKETS and slow)


class Readiness:
    """Of one connection, as seen by the thread that writes to it."""

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
        """Tell whether the connection is ready; where it is not, some milliseconds later."""
        if self._rests():
            time.sleep(_PAUSE_S)
            return False
        return bool(self._poll.poll(1e3 * _MOVES_S))

    def _rests(self) -> bool:
        """Tell whether to leave it alone: a probe ends with the first packet after its time."""
        if self._probing is None or not self._probing(self._connection):
            self._rests_until_s = None
            return False
        now_s = self._clock()
        if self._rests_until_s is None:
            self._rests_until_s = now_s + _PROBE_S
        return now_s < self._rests_until_s


def _limit_unsent(connection: socket.socket) -> bool:
    """Have the kernel take no more than it can send soon; tell whether it is one that does, and says so."""
    if not (hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_NOTSENT_LOWAT")):
        return False
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        return True
    return False


def _uses_bbr(connection: socket.socket) -> bool:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0") == b"bbr"
