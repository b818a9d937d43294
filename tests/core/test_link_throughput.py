"""Rules of link throughput: exact values of the formulas, and which of them applies."""

from __future__ import annotations

import math

import pytest

from isthmus.core.link_throughput import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    WIRE_OVERHEAD,
    cubic_bytes_per_s,
    effective_bytes_per_s,
    transfer_time_s,
    wire_bytes,
)
from isthmus.core.pool import Link


def link(**fields) -> Link:
    return Link(source="a", target="b", **({"bandwidth_gbps": 8, "delay_ms": 20} | fields))


@pytest.mark.parametrize(
    ("num_bytes", "segments"),
    [(0, 1), (1, 1), (SEGMENT_BYTES, 1), (SEGMENT_BYTES + 1, 2), (2 * SEGMENT_BYTES, 2), (2 * SEGMENT_BYTES + 1, 3)],
)
def test_each_segment_begun_adds_one_header(num_bytes: int, segments: int) -> None:
    """An empty payload still sends one bare header."""
    assert wire_bytes(num_bytes) == num_bytes + segments * HEADER_BYTES


def test_a_full_segment_is_a_packet_of_1500_bytes() -> None:
    """Segment, headers and overhead are those of MTU 1500."""
    assert wire_bytes(SEGMENT_BYTES) == 1500
    assert math.isclose(SEGMENT_BYTES * WIRE_OVERHEAD, 1500)


def test_cubic_has_its_own_response_at_long_delay() -> None:
    """RFC 9438, 5.1: 1.054 (RTT / p)^(3/4) segments per round trip, where it exceeds Reno's."""
    expected = 1.054 * (0.2 / 1e-4) ** 0.75 / 0.2 * SEGMENT_BYTES
    assert cubic_bytes_per_s(0.2, 1e-4) == pytest.approx(expected)
    assert expected > math.sqrt(1.5 / 1e-4) / 0.2 * SEGMENT_BYTES


def test_cubic_is_as_fast_as_reno_at_short_delay() -> None:
    """Mathis et al.: sqrt(3/2 / p) segments per round trip, where it exceeds CUBIC's own response."""
    expected = math.sqrt(1.5 / 0.01) / 0.001 * SEGMENT_BYTES
    assert cubic_bytes_per_s(0.001, 0.01) == pytest.approx(expected)
    assert expected > 1.054 * (0.001 / 0.01) ** 0.75 / 0.001 * SEGMENT_BYTES


def test_goodput_without_loss_is_the_bandwidth_less_headers() -> None:
    """Without loss both algorithms fill the link: 8 Gbit/s carry 1e9 bytes per second, headers included."""
    for algorithm in ("bbr", "cubic"):
        assert effective_bytes_per_s(link(congestion_control=algorithm)) == pytest.approx(1e9 * 1448 / 1500)


def test_bbr_loses_only_what_the_link_loses() -> None:
    """BBR's rate is scaled by 1 - p, whatever the delay."""
    assert effective_bytes_per_s(link(loss=0.25, delay_ms=500)) == pytest.approx(0.75e9 * 1448 / 1500)


def test_cubic_is_bounded_by_its_response_over_both_delays() -> None:
    """The round trip is the delay there and back; without a return link the same delay twice."""
    lossy = link(loss=0.01, congestion_control="cubic")
    assert effective_bytes_per_s(lossy) == pytest.approx(cubic_bytes_per_s(0.04, 0.01))
    assert effective_bytes_per_s(lossy, link(delay_ms=60)) == pytest.approx(cubic_bytes_per_s(0.08, 0.01))


def test_cubic_without_delay_uses_a_round_trip_of_100_us() -> None:
    """A delay of 0 would give an infinite rate; the smallest round trip is 1e-4 s."""
    lossy = link(loss=0.9, delay_ms=0, congestion_control="cubic", bandwidth_gbps=8000)
    assert effective_bytes_per_s(lossy) == pytest.approx(cubic_bytes_per_s(1e-4, 0.9))


def test_cubic_is_never_faster_than_the_link() -> None:
    """On a slow link the bandwidth, less loss and headers, is the bound."""
    slow = link(loss=1e-4, bandwidth_gbps=0.008, congestion_control="cubic")
    assert effective_bytes_per_s(slow) == pytest.approx(1e6 * (1 - 1e-4) * 1448 / 1500)


def test_a_transfer_uses_the_delay_of_the_return_link_too() -> None:
    """One way of delay passes before the last byte; the return link bounds the rate of CUBIC."""
    lossy, back = link(loss=0.01, congestion_control="cubic"), link(delay_ms=60)
    assert transfer_time_s(lossy, 1e6, back) == pytest.approx(0.02 + 1e6 / cubic_bytes_per_s(0.08, 0.01))
