"""What a WAN link does to a transfer: rate, delay, jitter, and the rate that TCP reaches under loss.

A link's bandwidth is that of its wire: IP packets, headers included. What an application gets is the goodput,
at most 1 / `WIRE_OVERHEAD` (96.5 %) of it.
"""

from __future__ import annotations

import math

from isthmus.core.pool import Link

SEGMENT_BYTES = 1448
"""Payload of a TCP segment at MTU 1500 with timestamps."""

WIRE_OVERHEAD = 1500 / 1448
"""Bytes on the wire per payload byte at MTU 1500 (IPv4 and TCP headers with timestamps)."""


HEADER_BYTES = 52
"""IPv4 and TCP headers of a segment, with timestamps."""


def wire_bytes(num_bytes: int) -> int:
    """Return the bytes on the wire of `num_bytes` of payload with their headers; 0 is a bare header."""
    return num_bytes + HEADER_BYTES * max(-(-num_bytes // SEGMENT_BYTES), 1)


def cubic_bytes_per_s(round_trip_s: float, loss: float) -> float:
    """Return the steady rate of one CUBIC flow under random loss, in bytes a second.

    The larger of CUBIC's own response function, 1.054 (RTT / p)^(3/4) / RTT segments a second with
    C = 0.4 and beta = 0.7 (RFC 9438, section 5.1), and that of the Reno-friendly region,
    sqrt(1.5 / p) / RTT (Mathis et al., 1997). `loss` must be positive.
    """
    segments_cubic = 1.054 * math.pow(round_trip_s / loss, 0.75)
    segments_reno = math.sqrt(1.5 / loss)
    return float(max(segments_cubic, segments_reno) / round_trip_s * SEGMENT_BYTES)


def effective_bytes_per_s(link: Link, reverse: Link | None = None) -> float:
    """Return what one TCP flow reaches on `link`, in bytes a second.

    Payload bytes: the headers are taken off. With `bbr` loss costs only the lost packets, (1 - p) of the
    rate; with `cubic` the response function bounds it. Without `reverse` the way back is taken to be as
    long as the way there.
    """
    ceiling = link.bytes_per_s * (1 - link.loss) / WIRE_OVERHEAD
    if link.loss == 0 or link.congestion_control == "bbr":
        return ceiling
    round_trip_s = max(link.delay_s + (reverse or link).delay_s, 1e-4)
    return min(ceiling, cubic_bytes_per_s(round_trip_s, link.loss))


def transfer_s(link: Link, num_bytes: float, reverse: Link | None = None) -> float:
    """Return the seconds from the first byte sent to the last byte received, on an otherwise idle link."""
    return link.delay_s + num_bytes / effective_bytes_per_s(link, reverse)
