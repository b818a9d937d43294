"""Rules of links: a rank has those of the tree and those that it uses; meeting, loss and end concern all ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from isthmus.comm.join_ranks import join_ranks
from isthmus.comm.meeting.rank_tree import rank_tree
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.errors import PeerError, RestartError
from isthmus.wan import listen
from tests.comm.ranks import link_keys, tcp_transports

pytestmark = pytest.mark.integration

LIMIT_S = 30.0


class Places:
    """Where the ranks of a run listen, for as long as the test lasts."""

    def __init__(self, size: int, sites: Sequence[str] = ()) -> None:
        self.listeners = [listen("127.0.0.1") for _ in range(size)]
        self.endpoints = [Endpoint("127.0.0.1", one.getsockname()[1]) for one in self.listeners]
        self.sites = sites

    def join(self, rank: int, incarnation: int = 0, timeout_s: float = LIMIT_S, **options: Any) -> TcpTransport:
        greeting = Greeting("job-1", 1, rank, len(self.endpoints), incarnation)
        keys = link_keys(self.sites, rank) if self.sites else None
        listener = self.listeners[rank].dup()
        return join_ranks(greeting, self.endpoints, listener, timeout_s, keys=keys, heartbeat_s=0.3, **options)

    def close(self) -> None:
        for one in self.listeners:
            one.close()


@contextmanager
def joined(size: int, **options: Any) -> Iterator[list[TcpTransport]]:
    ranks = tcp_transports(size, heartbeat_s=0.3, **options)
    try:
        yield ranks
    finally:
        close_all(ranks)


def close_all(ranks: Sequence[JoinedTransport]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda one: one.close(), ranks))


def receive(transport: TcpTransport, peer: int, tag: int = 1) -> tuple[Future[Any], bytearray]:
    buffer = bytearray(1)
    return transport.receive(peer, tag, "x", memoryview(buffer)), buffer


def links_of(transport: TcpTransport) -> set[int]:
    return set(transport.traffic())


def test_a_rank_has_the_links_of_the_tree_and_those_that_it_uses() -> None:
    """24 ranks of which each sends to the next: links of two neighbours and the tree, and threads by their number."""
    size, before = 24, threading.active_count()
    with joined(size) as ranks:
        trees = [set(rank_tree([0] * size, rank).neighbours) for rank in range(size)]
        assert [links_of(one) for one in ranks] == trees
        for one in ranks:
            one.send((one.rank + 1) % size, 1, "x", memoryview(bytes([one.rank])))
        for one in ranks:
            arriving, buffer = receive(one, (one.rank - 1) % size)
            arriving.result(LIMIT_S)
            assert buffer[0] == (one.rank - 1) % size
        ring = [{(rank - 1) % size, (rank + 1) % size} for rank in range(size)]
        assert [links_of(one) for one in ranks] == [tree | near for tree, near in zip(trees, ring, strict=True)]
        while dialling := [
            one for one in threading.enumerate() if one.name.startswith(("isthmus-reconnect", "isthmus-answer"))
        ]:
            dialling[0].join(LIMIT_S)
        num_threads = threading.active_count() - before
        assert num_threads == sum(2 * len(links_of(one)) + 1 for one in ranks)
        assert max(2 * len(links_of(one)) + 1 for one in ranks) <= 2 + 16
    assert threading.active_count() <= before


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_dial_each_other_at_once_share_one_link(seed: int) -> None:
    """Both sides of pairs without a link send at once, over several connections: all arrives once and in order."""
    chance = random.Random(seed)
    with joined(9, lanes=3) as ranks:
        texts = [chance.randbytes(chance.choice([1, 300_000])) for _ in range(6)]
        pairs = [(4, 8), (5, 7), (6, 0)]

        def talk(mine: int, other: int) -> None:
            sends = [ranks[mine].send(other, 1, "x", memoryview(text)) for text in texts]
            for text in texts:
                buffer = bytearray(len(text))
                ranks[mine].receive(other, 1, "x", memoryview(buffer)).result(LIMIT_S)
                assert buffer == text
            for one in sends:
                one.result(LIMIT_S)

        with ThreadPoolExecutor(2 * len(pairs)) as pool:
            tasks = [pool.submit(talk, *one) for pair in pairs for one in (pair, pair[::-1])]
            for task in tasks:
                task.result(LIMIT_S)
        assert [one.loss() for one in ranks] == [None] * 9


def test_a_lost_rank_is_named_by_ranks_without_a_link_to_it() -> None:
    """1. Rank 8 is gone, and its address refuses. 2. Rank 3, which waits for rank 1, fails with the name of rank 8."""
    places = Places(9)
    with ThreadPoolExecutor(9) as pool:
        ranks = list(pool.map(places.join, range(9)))
    assert 8 not in links_of(ranks[3])
    waiting, _ = receive(ranks[3], 1)
    places.listeners[8].close()
    ranks[8].abort()
    error = waiting.exception(LIMIT_S)
    assert isinstance(error, PeerError)
    assert "peer 8 is lost" in str(error)
    for one in ranks[:8]:
        assert "peer 8 is lost" in str(one.loss(LIMIT_S))
    for one in ranks[:8]:  # not before all know: a rank that breaks its links passes nothing on
        one.abort()
    places.close()


@pytest.mark.parametrize("sites", ["", "aabbb"])
def test_a_rank_that_never_joins_is_named_by_all(sites: str) -> None:
    """Ranks that are no neighbours of the missing one learn from those that are, and nobody waits much longer."""
    places = Places(5, sites)
    with ThreadPoolExecutor(4) as pool:
        joins = [pool.submit(places.join, rank, timeout_s=2.0) for rank in range(4)]
        errors = [one.exception(LIMIT_S) for one in joins]
    for error in errors:
        assert isinstance(error, PeerError)
        assert "rank 4" in str(error)
    places.close()


def test_a_rank_that_joins_late_is_waited_for_by_all() -> None:
    """No rank returns before the last one has joined, also where it is no neighbour."""
    places = Places(6)
    with ThreadPoolExecutor(6) as pool:
        early = [pool.submit(places.join, rank) for rank in range(5)]
        assert not threading.Event().wait(0.5)
        assert not any(one.done() for one in early)
        ranks = [pool.submit(places.join, 5).result(LIMIT_S), *(one.result(LIMIT_S) for one in early)]
    close_all(ranks)
    places.close()


@pytest.mark.parametrize("replaced", [0, 1, 6])
def test_a_replaced_rank_is_met_again_by_all(replaced: int) -> None:
    """Root, inner rank or leaf: every other rank learns of the later incarnation, and all meet there."""
    places = Places(7)

    def join_again(rank: int) -> TcpTransport:
        while True:
            try:
                return places.join(rank, incarnation=1)
            except RestartError:
                continue

    with ThreadPoolExecutor(7) as pool:
        ranks = list(pool.map(places.join, range(7)))
        ranks[replaced].abort()
        back = pool.submit(join_again, replaced)
        stay = [rank for rank in range(7) if rank != replaced]
        losses = [ranks[rank].loss(LIMIT_S) for rank in stay]
        assert all(isinstance(one, RestartError) and one.incarnation == 1 for one in losses)
        for rank in stay:
            ranks[rank].abort()
        again = [*pool.map(join_again, stay), back.result(LIMIT_S)]
    close_all(again)
    assert [one.unclosed_peers() for one in again] == [[]] * 7
    places.close()


def test_a_rank_that_dies_at_the_end_is_missed_by_all() -> None:
    """1. A leaf dies, and its address stays open. 2. The others close: each misses a peer, also far from the leaf."""
    places = Places(9)
    with ThreadPoolExecutor(9) as pool:
        ranks = list(pool.map(lambda rank: places.join(rank, peer_timeout_s=1.0, linger_s=2.0), range(9)))
        ranks[8].abort()
        closes = [pool.submit(ranks[rank].close) for rank in range(8)]
        for one in closes:
            one.result(LIMIT_S)
    unclosed = [one.unclosed_peers() for one in ranks[:8]]
    assert all(unclosed)
    places.close()
