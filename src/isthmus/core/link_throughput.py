"""Throughput of TCP over a WAN link with delay and loss.

Link bandwidth counts IP packets, headers included. Goodput, the payload that an application receives, is at
most 1 / `WIRE_OVERHEAD` (96.5 %) of it.
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


def segment_bytes(link: Link) -> int:
    """Return the payload of a full TCP segment on `link`."""
    return link.mtu_bytes - HEADER_BYTES


def wire_bytes(num_bytes: int, segment: int = SEGMENT_BYTES) -> int:
    """Return the bytes on the wire for payload in segments of `segment` bytes, with headers; 0 gives one header."""
    return num_bytes + HEADER_BYTES * max(-(-num_bytes // segment), 1)


def cubic_bytes_per_s(round_trip_s: float, loss: float, segment: int = SEGMENT_BYTES) -> float:
    """Return the steady rate of one CUBIC flow under random loss, in bytes per second.

    The larger of CUBIC's own response function, 1.054 (RTT / p)^(3/4) / RTT segments per second with
    C = 0.4 and beta = 0.7 (RFC 9438, section 5.1), and that of the Reno-friendly region,
    sqrt(1.5 / p) / RTT (Mathis et al., 1997). `loss` must be positive; `segment` is the payload of a segment.
    """
    segments_cubic = 1.054 * math.pow(round_trip_s / loss, 0.75)
    segments_reno = math.sqrt(1.5 / loss)
    return float(max(segments_cubic, segments_reno) / round_trip_s * segment)


def effective_bytes_per_s(link: Link, reverse: Link | None = None) -> float:
    """Return the goodput of one TCP flow on `link`, in bytes per second.

    With `bbr`, loss p scales the rate by 1 - p; with `cubic` the response function bounds it, where a burst of losses
    counts once. Duplicates take their share of the wire. Without `reverse` the return path is assumed to have the same
    delay.
    """
    segment = segment_bytes(link)
    ceiling = link.bandwidth_bytes_per_s * (1 - link.loss) / (1 + link.duplication) / (link.mtu_bytes / segment)
    if link.loss == 0 or link.congestion_control == "bbr":
        return ceiling
    round_trip_s = max(link.delay_s + (reverse or link).delay_s, 1e-4)
    return min(ceiling, cubic_bytes_per_s(round_trip_s, link.loss / link.loss_burst_packets, segment))


def transfer_time_s(link: Link, num_bytes: float, reverse: Link | None = None) -> float:
    """Return the seconds from the first byte sent to the last byte received on an idle link."""
    return link.delay_s + num_bytes / effective_bytes_per_s(link, reverse)
