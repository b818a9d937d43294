"""A connection hands its socket no more than that sends soon, and nothing while BBR holds it back."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.comm.tcp.send_queue import Fragment, SendQueue
from isthmus.comm.tcp.socket_readiness import MAX_UNSENT_BYTES, MIN_PART_BYTES, SendReadiness, TcpState, tcp_state
from isthmus.comm.tcp.wire_format import MAX_FRAGMENT_BYTES

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        there, _ = server.accept()
        with there:
            yield here, there


def test_a_connection_that_does_not_move_is_given_nothing_more(pair: Pair) -> None:
    here, there = pair
    readiness = SendReadiness(here)
    assert readiness.wait_ready()
    here.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += here.send(bytes(2**16))
    assert not readiness.wait_ready()
    there.settimeout(10)
    while sent:
        sent -= len(there.recv(2**20))
    assert readiness.wait_ready()


def test_a_connection_that_probes_rests_for_the_length_of_a_probe_and_not_for_ever(pair: Pair) -> None:
    now_s, probes = [0.0], [True]
    readiness = _of_bbr(pair[0], now_s, probes)
    assert not readiness.wait_ready()
    now_s[0] = 0.1
    assert not readiness.wait_ready()
    now_s[0] = 0.25
    assert readiness.wait_ready()
    assert readiness.wait_ready(), "its time is over: the next packet ends the probe"
    probes[0] = False
    assert readiness.wait_ready()
    probes[0] = True
    assert not readiness.wait_ready(), "the next probe has a time of its own"


def test_a_connection_that_has_sent_little_does_not_probe(pair: Pair) -> None:
    _of_bbr(pair[0], [0.0], [False])
    state = tcp_state(pair[0])
    assert state is not None
    assert not state.is_probing_rtt


@pytest.mark.parametrize(
    ("state", "packet_bytes", "round_trip_us", "window", "probes"),
    [
        pytest.param(0, 1448, 40_000, 4, True, id="the bare round trip is looked for, far away"),
        pytest.param(0, 1448, 40_000, 10, False, id="a connection that has just begun"),
        pytest.param(4, 1448, 40_000, 1, False, id="after a loss"),
        pytest.param(0, 65_483, 100, 4, False, id="to a proxy on this host, where four packets are a piece"),
        pytest.param(0, 1448, 1000, 4, False, id="so near that a piece is there before a probe ends"),
    ],
)
def test_a_probe_is_told_from_what_the_kernel_says(
    state: int, packet_bytes: int, round_trip_us: int, window: int, probes: bool
) -> None:
    info = bytearray(148)
    info[1] = state
    for at, value in ((16, packet_bytes), (68, round_trip_us), (80, window)):
        struct.pack_into("=I", info, at, value)

    class Told(socket.socket):
        def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]
            return bytes(info)

    with Told() as connection:
        found = tcp_state(connection)
    assert found == (state == 0, packet_bytes, round_trip_us / 1e6, window)
    assert found.is_probing_rtt is probes


@pytest.mark.parametrize(
    ("round_trip_s", "window", "part_bytes"),
    [
        pytest.param(0.1, 5, MIN_PART_BYTES, id="five packets a long round trip"),
        pytest.param(0.02, 10, 10 * 1448, id="a connection that begins"),
        pytest.param(0.02, 40, 40 * 1448, id="an eighth of 0.1 Gbit/s over 20 ms: 58 KB"),
        pytest.param(0.02, 1000, MAX_UNSENT_BYTES, id="a fat link"),
        pytest.param(1e-4, 10, MAX_UNSENT_BYTES, id="a near peer"),
        pytest.param(0.0, 10, MAX_UNSENT_BYTES, id="no round trip yet"),
    ],
)
def test_a_connection_takes_what_it_sends_in_some_milliseconds(
    pair: Pair, round_trip_s: float, window: int, part_bytes: int
) -> None:
    """A slow connection leaves the rest of a message to the others."""
    state = TcpState(is_open=True, packet_bytes=1448, round_trip_s=round_trip_s, window_packets=window)
    readiness = SendReadiness(pair[0], state=lambda _: state)
    assert readiness.wait_ready()
    assert readiness.part_bytes == part_bytes
    limit = pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    assert part_bytes < limit <= min(4 * part_bytes, MAX_UNSENT_BYTES) or limit == MAX_UNSENT_BYTES


@given(st.lists(st.integers(1, MAX_FRAGMENT_BYTES), min_size=1, max_size=20), st.integers(0, 2 * MAX_FRAGMENT_BYTES))
def test_connections_share_a_message_in_parts_of_their_own(parts: list[int], size: int) -> None:
    """Parts of any sizes cover the message once; those of a broken connection are sent again as they were."""
    outbox, data = SendQueue(), random.Random(0).randbytes(size)
    outbox.put(1, "x", memoryview(data), 0.0)
    taken: list[Fragment] = []
    for part in parts:
        if (found := outbox.take(part_bytes=part)) is not None:
            assert len(found.payload) <= part
            taken.append(found)
    outbox.requeue(taken)
    again: list[Fragment] = []
    while (found := outbox.take(part_bytes=MAX_FRAGMENT_BYTES if len(again) >= len(taken) else 1)) is not None:
        again.append(found)
    assert again[: len(taken)] == taken
    assert [one.header.offset for one in again] == list(accumulate((len(one.payload) for one in again[:-1]), initial=0))
    assert b"".join(one.payload for one in again) == data
    assert {one.header.payload_bytes - len(one.payload) for one in again} == {0}


def test_a_broken_connection_is_ready_so_that_who_writes_sees_it(pair: Pair) -> None:
    readiness = SendReadiness(pair[0])
    pair[0].shutdown(socket.SHUT_RDWR)
    assert readiness.wait_ready()


def test_little_pieces_are_taken_alone_while_a_long_one_stays() -> None:
    outbox = SendQueue()
    outbox.put(1, "little", memoryview(bytes(100)), 0.0)
    outbox.put(2, "long", memoryview(bytes(MAX_FRAGMENT_BYTES)), 0.0)
    assert [_label(outbox.take(max_bytes=1000)) for _ in range(2)] == ["little", None]
    assert outbox.has_fragments()
    assert _label(outbox.take()) == "long"
    assert not outbox.has_fragments()


def _label(piece: Fragment | None) -> str | None:
    return None if piece is None else piece.header.label


def _of_bbr(connection: socket.socket, now_s: list[float], probes: list[bool]) -> SendReadiness:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        pytest.skip("the kernel has no BBR: modprobe tcp_bbr")

    def state(_: socket.socket) -> TcpState:
        return TcpState(True, 1448, 0.04, 4 if probes[0] else 10)

    return SendReadiness(connection, state=state, clock=lambda: now_s[0])
