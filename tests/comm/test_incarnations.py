"""Rules of incarnations: a restarted rank connects to the others again, and receives no message of before."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting, send_greeting
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.core.errors import PeerError, RestartError, UnavailableError
from isthmus.wan import listen

pytestmark = pytest.mark.integration

LIMIT_S = 20.0
"""Less than the 30 s after which a silent peer counts as lost."""


class Places:
    """Where the ranks of a run listen, for as long as the test lasts: what supervisors keep."""

    def __init__(self, size: int) -> None:
        self.listeners = [listen("127.0.0.1") for _ in range(size)]
        self.endpoints = [Endpoint("127.0.0.1", one.getsockname()[1]) for one in self.listeners]

    def join(self, rank: int, incarnation: int, timeout_s: float = LIMIT_S, **options: Any) -> TcpTransport:
        """Meet the others as `incarnation`, or a later one, and return the transport."""
        while True:
            greeting = Greeting("job-1", 1, rank, len(self.endpoints), incarnation)
            try:
                met = connect_ranks(greeting, self.endpoints, self.listeners[rank], timeout_s)
            except RestartError as error:
                incarnation = error.incarnation
                continue
            return TcpTransport(greeting, self.endpoints, met, self.listeners[rank].dup(), heartbeat_s=0.2, **options)

    def join_all(self, incarnations: Sequence[int], **options: Any) -> list[TcpTransport]:
        with ThreadPoolExecutor(len(incarnations)) as pool:
            join = partial(self.join, **options)
            return list(pool.map(join, range(len(incarnations)), incarnations))

    def close(self, transports: Sequence[TcpTransport]) -> None:
        with ThreadPoolExecutor(len(transports)) as pool:
            list(pool.map(TcpTransport.close, transports))
        for one in self.listeners:
            one.close()


def test_who_is_parting_does_not_wait_for_a_rank_that_begins_anew() -> None:
    """1. The last rank dies. 2. The others, who have all they need, wait for its leave, with a message to it
    on its way. 3. Another takes its place: they learn that and end, with a straggler, for they have to meet
    it once more.
    """
    parting = threading.Semaphore(0)

    class Parting(Peer):
        def close(self, reason: str, linger_s: float) -> None:
            parting.release()
            super().close(reason, linger_s)

    places = Places(3)
    first = places.join_all([0, 0, 0], linger_s=600.0, peer_type=Parting)
    first[2].abort()
    for one in first[:2]:
        one.send(2, 1, "x", memoryview(b"o"))
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(first[rank].close) for rank in (0, 1)]
        assert all(parting.acquire(timeout=60) for _ in range(4))
        back = pool.submit(places.join, 2, 1, 60.0)
        for end in ends:
            end.result(60)
        assert [first[rank].unclosed_peers() for rank in (0, 1)] == [[2], [2]]
        others = list(pool.map(places.join, (0, 1), (1, 1)))
        places.close([*others, back.result()])


def receive(transport: TcpTransport, peer: int, tag: int = 1) -> tuple[Future[object], bytearray]:
    buffer = bytearray(1)
    return transport.receive(peer, tag, "x", memoryview(buffer)), buffer


@pytest.mark.parametrize(
    "killed", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_rank_that_comes_back_is_met_anew(killed: int) -> None:
    """Lowest, middle or highest: the others' waiters wake with `RestartError` before any time-out, all meet
    as the next incarnation, and a message of before is not what is received after.
    """
    places = Places(3)
    first = places.join_all([0, 0, 0])
    stays = (killed + 1) % 3, (killed + 2) % 3
    first[stays[0]].send(stays[1], 1, "x", memoryview(b"o"))
    waiting, _ = receive(first[stays[0]], killed)
    first[killed].abort()
    with ThreadPoolExecutor(3) as pool:
        back = pool.submit(places.join, killed, 1)
        losses = [first[rank].loss(LIMIT_S) for rank in stays]
        assert all(isinstance(one, RestartError) and one.incarnation == 1 for one in losses)
        assert isinstance(waiting.exception(LIMIT_S), PeerError)
        for rank in stays:
            first[rank].abort()
        others = list(pool.map(places.join, stays, (1, 1)))
        second = dict(zip((*stays, killed), (*others, back.result()), strict=True))
    arriving, buffer = receive(second[stays[1]], stays[0])
    second[stays[0]].send(stays[1], 1, "x", memoryview(b"n"))
    arriving.result(LIMIT_S)
    assert buffer == b"n"
    places.close(list(second.values()))


def test_ranks_that_count_differently_agree_on_the_latest() -> None:
    """A rank that was started twice is ahead: all ranks meet at its incarnation."""
    places = Places(3)
    transports = places.join_all([1, 4, 2])
    assert {one.incarnation for one in transports} == {4}
    places.close(transports)


@pytest.mark.slow
def test_who_is_behind_is_refused_and_told() -> None:
    """A greeting of an earlier incarnation gets the present one; one of a later incarnation may retry."""
    for mine, theirs, error in ((3, 1, RestartError), (0, 2, UnavailableError)):
        places = Places(2)
        with ThreadPoolExecutor(1) as pool:
            low = pool.submit(places.join, 0, mine)
            with socket.create_connection(places.listeners[0].getsockname()) as high:
                with pytest.raises(error) as caught:
                    send_greeting(high, Greeting("job-1", 1, 1, 2, theirs))
                if error is RestartError:
                    assert caught.value.incarnation == 3
            places.close([places.join(1, 3), low.result(LIMIT_S)])


def test_a_process_that_dies_while_it_greets_is_dialled_again() -> None:
    """The dialler waits for the process that replaces the dead one."""
    places = Places(2)
    with ThreadPoolExecutor(1) as pool:
        high = pool.submit(places.join, 1, 0)
        places.listeners[0].accept()[0].close()
        low = places.join(0, 1)
        assert high.result(LIMIT_S).incarnation == 1
        places.close([low, high.result()])


def test_a_place_that_nobody_keeps_is_lost_for_good() -> None:
    """Where the listener is gone with its process, the loss is no `RestartError`: no process will replace it."""
    places = Places(2)
    first = places.join_all([0, 0])
    places.listeners[0].close()
    first[0].abort()
    loss = first[1].loss(LIMIT_S)
    assert isinstance(loss, PeerError)
    assert not isinstance(loss, RestartError)
    places.close(first[1:])


def test_abandoning_ends_every_thread_at_once() -> None:
    """What was begun fails before any time-out, and no thread goes on beside the next incarnation."""
    places, before = Places(2), threading.active_count()
    first = places.join_all([0, 0])
    waiting, _ = receive(first[0], 1)
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(one.abort) for one in first]:
            ended.result(LIMIT_S)
    assert isinstance(waiting.exception(0), PeerError)
    menders = [one for one in threading.enumerate() if one.name.startswith("isthmus-reconnect")]
    for mender in menders:
        mender.join(LIMIT_S)
    assert threading.active_count() <= before
    places.close(first)
