"""Rules of the end: ranks that end together receive each other's leave, even if their connections break."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.comm.tcp.connection import Connection
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.send_queue import Fragment
from isthmus.core.errors import PeerError
from tests.comm.ranks import tcp_ranks

LINGER_S = 60.0
"""Longer than any delay of a busy machine."""


def test_who_ends_late_still_answers() -> None:
    """1. A leaves, and B receives its leave. 2. B ends, before its sending thread has run. 3. A receives B's leave."""
    heard, ending = threading.Event(), threading.Event()

    class HeldUp(Connection):
        def next_fragment(self) -> Fragment | None:
            if heard.is_set():
                ending.wait(0.2)
            return super().next_fragment()

    class Hearing(Peer):
        connection_type = HeldUp

        def on_peer_closed(self, reason: str) -> None:
            heard.set()
            super().on_peer_closed(reason)

    a, b = tcp_ranks([Peer, Hearing], linger_s=LINGER_S)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(a.close)
        assert heard.wait(60)
        b.close()
        first.result(60)
    assert [one.unclosed_peers() for one in (a, b)] == [[], []]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(one, marks=pytest.mark.slow) for one in range(3, 30))])
def test_nobody_ends_without_being_heard(seed: int) -> None:
    """Ranks that end at about the same time, some over connections that break at every moment of silence."""
    chance = random.Random(seed)
    size, lanes = chance.choice([2, 3]), chance.choice([1, 2, 3])
    heartbeat_s = chance.choice([0.003, 2.0])
    transports = tcp_ranks([Peer] * size, lanes=lanes, heartbeat_s=heartbeat_s, linger_s=LINGER_S)
    over = threading.Event()
    late_s = [chance.choice([0, chance.uniform(0, 0.004), chance.uniform(0, 0.03)]) for _ in transports]

    def end(rank: int) -> list[int]:
        over.wait(late_s[rank])
        transports[rank].close()
        return transports[rank].unclosed_peers()

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(end, range(size))) == [[]] * size
    assert [one.loss() for one in transports] == [None] * size


def test_who_dies_at_the_end_is_a_straggler() -> None:
    """1. A leaves, and B receives its leave. 2. B vanishes without an answer. A does not take it for one that left."""
    heard = threading.Event()

    class Vanishing(Peer):
        def on_peer_closed(self, reason: str) -> None:
            assert not reason
            heard.set()

    a, b = tcp_ranks([Peer, Vanishing], linger_s=LINGER_S)
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(a.close)
        assert heard.wait(60)
        b.abort()
        ends.result(60)
    assert a.unclosed_peers() == [1]
    assert isinstance(a.receive(1, 1, "x", memoryview(bytearray(1))).exception(60), PeerError)
