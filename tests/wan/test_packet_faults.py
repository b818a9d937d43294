"""Faults of links: bursts, duplicates, late packets and large ones, each in the stated share."""

from __future__ import annotations

import socket
from itertools import groupby
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.wan.netns import effective_capabilities, emulated_namespaces, unavailable_reason
from isthmus.wan.packet_faults import PacketFaults
from isthmus.wan.packet_relay import PacketLink
from isthmus.wan.shaper import Flow, Shaper
from isthmus.wan.tun_packet import HEADER_BYTES
from tests.wan.lab import link_of, pool_of
from tests.wan.test_packets import B, enqueue, packet

WHY = unavailable_reason(effective_capabilities())


@pytest.mark.parametrize(("loss", "burst"), [(0.01, 1.0), (0.01, 5.0), (0.2, 3.0), (0.5, 20.0)])
def test_bursts_have_the_stated_share_and_length(loss: float, burst: float) -> None:
    """Over many packets, within the spread of that many bursts; independent losses have bursts of 1 / (1 - p)."""
    faults = PacketFaults(link_of(loss=loss, loss_burst_packets=burst), Random(1))
    lost = [faults.loses() for _ in range(200_000)]
    runs = [len(list(run)) for is_lost, run in groupby(lost) if is_lost]
    assert sum(lost) / len(lost) == pytest.approx(loss, rel=0.12)
    assert sum(runs) / len(runs) == pytest.approx(burst if burst > 1 else 1 / (1 - loss), rel=0.08)


def test_independent_losses_are_those_of_earlier_versions() -> None:
    """One random number a packet, none without loss, so that runs by seed stay what they were."""
    faults, rng = PacketFaults(link_of(loss=0.3), Random(7)), Random(7)
    assert [faults.loses() for _ in range(100)] == [rng.random() < 0.3 for _ in range(100)]
    rng = Random(7)
    perfect = PacketFaults(link_of(), rng)
    assert not any((perfect.loses(), perfect.repeats(), perfect.delay_s()))
    assert rng.random() == Random(7).random()


def numbers(wire: socket.socket, count: int) -> list[int]:
    found = []
    for _ in range(count):
        data = wire.recv(10_000)
        found.append(int.from_bytes(data[HEADER_BYTES + 20 : HEADER_BYTES + 24], "big"))
    return found


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.3]))
def test_what_is_sent_arrives_lost_once_or_twice(seed: int, loss: float, late: float, twice: float) -> None:
    """Every packet is delivered, lost or dropped, and delivered twice if repeated; those in time stay in order."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        fields = {"loss": loss, "reordering": late, "reordering_ms": 3.0, "duplication": twice}
        link = PacketLink(link_of(**fields), link_of(), Random(seed), near.fileno())
        for number in range(40):
            enqueue(link, number * 1e-3, packet(B, number, 100))
        due = link.next_s()
        link.deliver(due - 1e-9)
        assert link.num_packets == 0
        link.deliver(1.0)
        assert link.next_s() == float("inf")
        found = numbers(far, link.num_packets)
        assert link.num_packets + link.num_lost == 40 + link.num_repeated
        assert len(set(found)) == 40 - link.num_lost
        if not late:
            assert found == sorted(found)
        else:
            assert all(
                abs(number - place) <= 8 + link.num_lost + link.num_repeated for place, number in enumerate(found)
            )


def test_a_late_packet_is_overtaken_and_no_other() -> None:
    """Packets a millisecond apart, some late by 2.5: each of those has two others before it, which keep their order."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        far.setblocking(False)
        link = PacketLink(link_of(reordering=0.2, reordering_ms=2.5), link_of(), Random(3), near.fileno())
        for number in range(60):
            enqueue(link, number * 1e-3, packet(B, number, 100))
        link.deliver(1.0)
        found = numbers(far, 60)
        overtaken = {one for place, one in enumerate(found) if any(other > one for other in found[:place])}
        assert len(overtaken) == link.num_late > 5
        in_time = [one for one in found if one not in overtaken]
        assert in_time == sorted(in_time)


def test_packets_beyond_the_mtu_are_dropped_and_jumbo_frames_pass() -> None:
    """9,000 bytes pass where the link says so, and cost one header."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        for mtu, delivered in ((1500, 0), (9000, 1)):
            link = PacketLink(link_of(mtu_bytes=mtu), link_of(), Random(0), near.fileno())
            enqueue(link, 0.0, packet(B, size=9000))
            link.deliver(1.0)
            assert (link.num_packets, link.num_dropped) == (delivered, 1 - delivered)
    large, small = (effective_bytes_per_s(link_of(mtu_bytes=mtu)) * 8e-9 for mtu in (9000, 1500))
    assert (large, small) == (pytest.approx(8948 / 9000), pytest.approx(1448 / 1500))


def test_links_without_root_have_the_faults_that_tcp_shows() -> None:
    """Jumbo frames and duplicates change the rate, bursts the number of round trips; order is TCP's own."""

    def rate_gbps(**fields: object) -> float:
        shaper, flow = Shaper(link_of(delay_ms=0, **fields), Random(1)), Flow()
        return 8e7 * 8e-9 / max(shaper.admit(0.0, 10**6, flow) for _ in range(80))

    assert rate_gbps() == pytest.approx(1448 / 1500, rel=1e-3)
    assert rate_gbps(mtu_bytes=9000) == pytest.approx(8948 / 9000, rel=1e-3)
    assert rate_gbps(duplication=0.25) == pytest.approx(1448 / 1500 / 1.25, rel=1e-3)
    late = []
    for burst in (1.0, 10.0):
        shaper = Shaper(link_of(loss=0.01, loss_burst_packets=burst), Random(2))
        delays = [shaper.admit(now_s, 1448, Flow()) - now_s - 0.010 for now_s in range(20_000)]
        late.append(sum(delay_s > 0.01 for delay_s in delays) / len(delays))
    assert late[0] == pytest.approx(0.01, rel=0.25)
    assert late[1] == pytest.approx(0.001, rel=0.6)
    one, many = (
        effective_bytes_per_s(link_of(loss=0.01, congestion_control="cubic", loss_burst_packets=n)) for n in (1, 8)
    )
    assert many > 2 * one


@pytest.mark.attack
@pytest.mark.parametrize(
    "fields",
    [
        {"reordering": 0.1},
        {"reordering": 1.0, "reordering_ms": 1.0},
        {"reordering_ms": 1e9},
        {"duplication": 1.0},
        {"duplication": -0.1},
        {"mtu_bytes": 9001},
        {"mtu_bytes": 100},
        {"loss_burst_packets": 0.5},
        {"loss_burst_packets": 1e9},
        {"loss": 0.9, "loss_burst_packets": 2.0},
    ],
)
def test_faults_that_no_link_has_are_refused(fields: dict[str, float]) -> None:
    """Late without a delay, more than all packets, sizes that no link carries, bursts too short for their share."""
    with pytest.raises(ValidationError):
        link_of(**fields)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run: sudo .venv/bin/python -m pytest -m root tests/wan")
def test_faults_and_jumbo_frames_reach_udp_between_namespaces() -> None:
    """Datagrams of 8,900 bytes arrive whole; some twice, some late, as the counters say."""
    import subprocess
    import sys

    receive = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('0.0.0.0', 5001)); "
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23); print('up', flush=True); s.settimeout(3)\n"
        "n = []\n"
        "try:\n"
        "    while True: n.append(len(s.recv(10000)))\n"
        "except TimeoutError: print(len(n), set(n) == {8900})"
    )
    send = (
        "import socket, sys, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(300): s.sendto(bytes(8900), (sys.argv[1], 5001)); time.sleep(0.001)"
    )
    fields = {"mtu_bytes": 9000, "duplication": 0.2, "reordering": 0.2, "reordering_ms": 4}
    pool = pool_of({"between": ["a", "b"], "bandwidth_gbps": 1, "round_trip_ms": 2} | fields)
    with emulated_namespaces(pool) as namespaces:
        receiver = namespaces.run_in("b", [sys.executable, "-c", receive], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        namespaces.run_in("a", [sys.executable, "-c", send, namespaces.sites["b"].address]).wait()
        count, are_whole = receiver.communicate(timeout=30)[0].split()
        counters = next(one for one in namespaces.counters() if one["from"] == "a")
    assert are_whole == "True"
    assert int(count) == 300 + counters["repeated"] - counters["dropped"]
    assert 30 < counters["repeated"] < 100
    assert 30 < counters["late"] < 100
