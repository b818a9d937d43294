"""The arithmetic of a link: rate, order, delay, jitter, modelled loss, the bounds on what is queued."""

from __future__ import annotations

import statistics
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.link_throughput import SEGMENT_BYTES, cubic_bytes_per_s, effective_bytes_per_s, wire_bytes
from isthmus.core.pool import Link
from isthmus.wan.shaper import CHUNK_S, MAX_CHUNK_BYTES, Flow, Shaper, WirePath
from tests.wan.lab import link_of

pytestmark = pytest.mark.integration

LINKS = st.builds(
    link_of,
    bandwidth_gbps=st.floats(0.001, 400),
    delay_ms=st.floats(0, 200),
    jitter_ms=st.sampled_from([0.0, 0.5, 5.0]),
    loss=st.sampled_from([0.0, 1e-4, 1e-2, 0.3]),
    congestion_control=st.sampled_from(["bbr", "cubic"]),
)
SENDS = st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 100_000), st.integers(0, 2)), min_size=1, max_size=40)
"""Gap since the send before in seconds, payload bytes, which flow."""


def play(link: Link, sends: list[tuple[float, int, int]], seed: int = 0) -> list[tuple[float, float, int, int]]:
    """Send through a fresh shaper; return (sent at, delivered at, bytes, flow) of each."""
    shaper, flows, now_s, seen = Shaper(link, Random(seed)), [Flow(), Flow(), Flow()], 0.0, []
    for gap_s, num_bytes, flow in sends:
        now_s += gap_s
        seen.append((now_s, shaper.admit(now_s, num_bytes, flows[flow]), num_bytes, flow))
    return seen


@given(LINKS, SENDS)
def test_a_link_is_never_faster_than_its_bandwidth(link: Link, sends: list[tuple[float, int, int]]) -> None:
    """From any send on, the wire bytes of what follows take at least their time on the wire."""
    quiet = link.model_copy(update={"jitter_ms": 0.0})
    seen = play(quiet, sends)
    for first in range(len(seen)):
        last_s = max(delivered for _, delivered, _, _ in seen[first:])
        on_the_wire_s = sum(wire_bytes(n) for _, _, n, _ in seen[first:]) / link.bandwidth_bytes_per_s
        assert last_s >= seen[first][0] + on_the_wire_s + link.delay_s - 1e-9


@given(LINKS, SENDS)
def test_order_within_a_flow_is_kept(link: Link, sends: list[tuple[float, int, int]]) -> None:
    """Whatever jitter and loss do, a flow's bytes arrive in the order sent, and after that."""
    seen = play(link, sends)
    assert all(delivered >= sent for sent, delivered, _, _ in seen)
    for flow in range(3):
        assert all(a[1] <= b[1] for a, b in pairwise([x for x in seen if x[3] == flow]))


@given(LINKS, SENDS)
def test_without_jitter_the_delay_is_at_least_the_stated_one(link: Link, sends: list[tuple[float, int, int]]) -> None:
    """Loss and load only add to the one-way delay."""
    seen = play(link.model_copy(update={"jitter_ms": 0.0}), sends)
    assert all(delivered - sent >= link.delay_s for sent, delivered, _, _ in seen)


@given(LINKS, SENDS, st.integers(0, 5))
def test_the_same_seed_gives_the_same_deliveries(link: Link, sends: list[tuple[float, int, int]], seed: int) -> None:
    """A run can be played again to the last bit."""
    assert play(link, sends, seed) == play(link, sends, seed)


@given(st.floats(0.001, 400), st.floats(0, 200), st.lists(st.integers(1, 100_000), min_size=1, max_size=40))
def test_a_busy_wire_never_idles(gbps: float, delay_ms: float, sizes: list[int]) -> None:
    """Work conserving: what was queued at once is through exactly when its wire bytes are."""
    link = link_of(bandwidth_gbps=gbps, delay_ms=delay_ms)
    seen = play(link, [(0.0, size, i % 3) for i, size in enumerate(sizes)])
    total_s = sum(map(wire_bytes, sizes)) / link.bandwidth_bytes_per_s
    assert seen[-1][1] == pytest.approx(total_s + link.delay_s)


def test_jitter_is_the_standard_deviation_of_the_delay() -> None:
    """Messages far apart see independent, normally distributed delays around the stated one."""
    path = WirePath(1e9, 0.050, 0.004, Random(1))
    delays_ms = [(path.admit(t, 0) - t) * 1e3 for t in range(4000)]
    assert statistics.mean(delays_ms) == pytest.approx(50, abs=0.3)
    assert statistics.stdev(delays_ms) == pytest.approx(4, rel=0.05)


def test_jitter_does_not_slow_a_bulk_transfer() -> None:
    """Order is kept without the maximum of all draws being added to all: the rate stays, the delay nearly."""
    path, delays_s = WirePath(1e8, 0.010, 0.001, Random(2)), []
    for chunk in range(5000):
        now_s = chunk * 1e-3
        delays_s.append(path.admit(now_s, 1e5) - (now_s + 1e-3))
    assert statistics.mean(delays_s) == pytest.approx(0.010, abs=0.0007)
    assert min(delays_s) >= 0


def test_a_delay_is_never_negative() -> None:
    """Jitter larger than the delay is cut off at 0: nothing arrives before it was sent."""
    path = WirePath(1e9, 0.001, 0.100, Random(3))
    assert all(path.admit(float(t), 0) >= t for t in range(1000))


@pytest.mark.parametrize(("control", "loss"), [("bbr", 0.01), ("bbr", 0.2), ("cubic", 0.001), ("cubic", 0.01)])
def test_loss_leaves_a_flow_the_rate_of_its_congestion_control(control: str, loss: float) -> None:
    """A long transfer reaches what `effective_bytes_per_s` says; loss delays, but costs no more rate."""
    link = link_of(loss=loss, congestion_control=control, delay_ms=20)
    shaper, flow = Shaper(link, Random(4)), Flow()
    total_bytes = round(effective_bytes_per_s(link) * 20)
    sent_bytes, now_s, arrival_s = 0, 0.0, 0.0
    while sent_bytes < total_bytes:
        now_s += max(shaper.queue_wait_s(now_s), shaper.pacing_wait_s(now_s, flow))
        arrival_s = shaper.admit(now_s, shaper.chunk_bytes, flow)
        sent_bytes += shaper.chunk_bytes
    assert arrival_s == pytest.approx(20, rel=0.02)


def test_cubic_flows_add_up_where_bbr_flows_share() -> None:
    """Under loss the bound of cubic is each flow's own, so four flows get four times as much as one."""
    link = link_of(loss=0.01, congestion_control="cubic", delay_ms=20)
    each = cubic_bytes_per_s(0.04, 0.01)
    shaper, arrivals_s = Shaper(link, Random(5)), []
    for flow in [Flow() for _ in range(4)]:
        for _ in range(round(each * 10) // SEGMENT_BYTES):
            arrivals_s.append(shaper.admit(0.0, SEGMENT_BYTES, flow))
    assert max(arrivals_s) == pytest.approx(10, rel=0.02)


def test_a_lost_packet_holds_its_flow_up_by_one_round_trip_and_no_other_flow() -> None:
    """How often follows from packets and loss; how long is whole round trips; others are not behind it."""
    link = link_of(loss=0.02, delay_ms=15)
    held, messages = 0, 4000
    shaper = Shaper(link, Random(6))
    for message in range(messages):
        extra_s = shaper.admit(message, 3 * SEGMENT_BYTES, Flow()) - message - 0.015
        round_trips = extra_s / 0.030
        assert round_trips - round(round_trips) < 0.01
        held += round(round_trips) > 0
    assert held / messages == pytest.approx(1 - 0.98**3, rel=0.1)


@given(LINKS)
def test_queue_and_chunks_are_bounded(link: Link) -> None:
    """The queue holds a round trip or more and is finite; a chunk is whole segments, about `CHUNK_S` long."""
    shaper, flow, now_s = Shaper(link, Random(7)), Flow(), 1.0
    assert shaper.queue_s >= 2 * link.delay_s
    assert shaper.chunk_bytes % SEGMENT_BYTES == 0
    assert shaper.chunk_bytes <= max(SEGMENT_BYTES, MAX_CHUNK_BYTES + SEGMENT_BYTES)
    assert shaper.window_bytes >= 2 * link.delay_s * shaper.flow_bytes_per_s + shaper.chunk_bytes
    admitted = 0
    while shaper.queue_wait_s(now_s) == 0 and admitted < 5000:
        shaper.admit(now_s, shaper.chunk_bytes, flow)
        admitted += 1
    if link.congestion_control == "bbr" and shaper.chunk_bytes > SEGMENT_BYTES:
        assert shaper.path.backlog_s(now_s) <= shaper.queue_s + 4 * CHUNK_S


@given(LINKS, SENDS)
def test_what_goes_first_goes_as_if_it_were_alone_and_both_share_one_wire(
    link: Link, sends: list[tuple[float, int, int]]
) -> None:
    """Flow 0 is a run's, the others are not: they do not delay it, and all together keep to the bandwidth."""
    quiet = link.model_copy(update={"jitter_ms": 0.0, "loss": 0.0})
    others = Shaper(quiet, Random(0))
    first, alone = Shaper(quiet, Random(0), low_priority=others), Shaper(quiet, Random(0))
    flows, lone, now_s, last_s, on_the_wire_s = [Flow(), Flow(), Flow()], Flow(), 0.0, 0.0, 0.0
    for gap_s, num_bytes, flow in sends:
        now_s += gap_s
        arrived_s = (others if flow else first).admit(now_s, num_bytes, flows[flow])
        if flow == 0:
            assert arrived_s == alone.admit(now_s, num_bytes, lone)
        on_the_wire_s += wire_bytes(num_bytes) / quiet.bandwidth_bytes_per_s
        last_s = max(last_s, arrived_s, others.path.backlog_s(now_s) + now_s + quiet.delay_s)
    assert last_s >= sends[0][0] + on_the_wire_s + quiet.delay_s - 1e-9
