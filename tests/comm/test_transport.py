"""Rules of the transport: the fake and TCP pass one kit; TCP also meets strangers, silence and cut lines."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.tcp.connection import Connection
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting, refusal_reason, send_greeting, send_json_line
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.reconnect import Reconnector
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.wire_format import (
    ACK,
    CLOSE,
    DATA,
    HEARTBEAT,
    FrameHeader,
    pack_header,
    read_header,
)  # fmt: skip
from isthmus.comm.transport.check_transport import check_joined_transport, check_transport
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.comm.transport.receive_matching import ReceiveMatcher
from isthmus.comm.transport.transport import Arrival, Transport
from isthmus.core.base_model import TransportKind
from isthmus.core.errors import PeerError, ProtocolError, UnavailableError
from isthmus.wan import listen
from tests.comm.ranks import tcp_transports, transports
from tests.comm.relay import Relay

pytestmark = pytest.mark.integration


def peer_behind(
    near: socket.socket, on_loss: Callable[[PeerError], None] = lambda _: None, *, peer_type: type[Peer] = Peer
) -> Peer:
    """Return rank 1 behind a connection that cannot be made again."""

    def gone(rank: int, lane: int) -> None:
        raise PeerError(f"lane {lane} of {rank} is gone")

    return peer_type(1, [(PlainChannel(near), 0.0)], heartbeat_s=60, timeout_s=5, on_loss=on_loss, redial=gone)


def test_the_fake_conforms() -> None:
    """The in-memory transport keeps every rule of the seam."""
    check_transport(memory_transports)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
def test_transports_conform(lanes: int) -> None:
    """The TCP transport keeps every rule of the seam, over one connection or several."""
    check_joined_transport(partial(transports, lanes=lanes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("sites", ["", "abb"])
def test_transports_conform_through_a_proxy(kind: TransportKind, sites: str) -> None:
    """A route (an HTTP CONNECT proxy) changes nothing but the path, nor does a process of its own, nor do keys."""
    with Relay() as relay:
        check_joined_transport(lambda size: transports(size, relay.address, kind=kind, lanes=2, sites=sites))
        assert relay.num_carried > 3 * 2**20


def test_a_cut_line_is_mended() -> None:
    """Connections that break while both workers live are made again; what was under way arrives, once."""
    with Relay() as relay:
        transports = tcp_transports(2, relay.address, lanes=2, heartbeat_s=0.2)
        data = random.Random(1).randbytes(2**20)
        for tag in range(6):
            buffer = bytearray(len(data))
            waiting = transports[1].receive(0, tag, "x", memoryview(buffer))
            sent = transports[0].send(1, tag, "x", memoryview(data))
            relay.cut()
            waiting.result(20)
            sent.result(20)
            assert buffer == data
        assert transports[1].traffic()[0].received_messages == 6
        assert [one.loss() for one in transports] == [None, None]
        for one in transports:
            one.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [*(("thread", seed) for seed in range(4)), ("process", 4), ("process", 5)])
def test_cuts_and_silences_lose_and_double_nothing(kind: TransportKind, seed: int) -> None:
    """Messages both ways while lines are cut and held at random: each arrives once, in order, unchanged."""
    chance, over = random.Random(seed), threading.Event()
    sizes = [chance.choice([0, 5, 70_000, 700_000]) for _ in range(120)]
    texts = [chance.randbytes(size) for size in sizes]

    def disturb(relay: Relay) -> None:
        while not over.wait(chance.uniform(0.02, 0.3)):
            if chance.random() < 0.6:
                relay.cut()
            else:
                relay.flowing.clear()
                over.wait(chance.uniform(0, 0.8))
                relay.flowing.set()

    def talk(mine: Transport) -> None:
        other = 1 - mine.rank
        sends = [mine.send(other, place % 3, "x", memoryview(text)) for place, text in enumerate(texts)]
        for place, text in enumerate(texts):
            buffer = bytearray(len(text))
            mine.receive(other, place % 3, "x", memoryview(buffer)).result(60)
            assert buffer == text, place
        for one in sends:
            one.result(60)

    with Relay() as relay:
        both = transports(2, relay.address, kind=kind, lanes=3, heartbeat_s=0.1)
        trouble = threading.Thread(target=disturb, args=(relay,))
        trouble.start()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(talk, both))
        over.set()
        trouble.join()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one.close(), both))


def test_of_two_that_come_back_as_one_lane_one_stays() -> None:
    """1. A connection breaks; its dialler opens it again, gets no answer, and opens it once more. 2. While the old
    one still ends, both new connections ask for its place. 3. One gets it, and the other is closed too: no
    thread and no connection is left at the end.
    """
    ends = [socket.socketpair() for _ in range(3)]
    ending, first = threading.Barrier(2), list[Connection]()

    class Slow(Connection):
        def start(self) -> None:
            first.append(self)
            super().start()

        def join(self) -> None:
            if self is first[0]:
                ending.wait(10)
            super().join()

    class SlowPeer(Peer):
        connection_type = Slow

    peer = peer_behind(ends[0][0], peer_type=SlowPeer)
    peer.start()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda end: peer.attach(0, (PlainChannel(end[0]), 0.0)), ends[1:])) == [True, True]
    peer.abort()
    assert [near.fileno() for near, _ in ends] == [-1, -1, -1]
    for _, far in ends:
        far.close()


def test_a_connection_that_another_caller_starts_is_replaced_after_its_start() -> None:
    """1. A first caller has replaced a broken connection and is about to start the new one. 2. A second caller
    replaces connection 0 too: it waits for the start, because a thread cannot be joined before. 3. Both succeed,
    and no thread and no connection is left at the end.
    """
    ends = [socket.socketpair() for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        started, second = list[Connection](), list[Future[bool]]()

        class StartsLate(Connection):
            def start(self) -> None:
                started.append(self)
                if len(started) == 2:
                    second.append(pool.submit(peer.attach, 0, (PlainChannel(ends[2][0]), 0.0)))
                    wait(second, timeout=0.3)  # ends early only if the second caller fails
                super().start()

        class LatePeer(Peer):
            connection_type = StartsLate

        peer = peer_behind(ends[0][0], peer_type=LatePeer)
        peer.start()
        assert pool.submit(peer.attach, 0, (PlainChannel(ends[1][0]), 0.0)).result(10)
        assert second[0].result(10)
    peer.abort()
    assert [near.fileno() for near, _ in ends] == [-1, -1, -1]
    for _, far in ends:
        far.close()


def test_a_worker_that_is_gone_is_lost_at_once() -> None:
    """Who no longer listens is not waited for: every waiter wakes, and the error names peer and reason."""
    transports = tcp_transports(2, heartbeat_s=5)
    waiting = transports[1].receive(0, 1, "x", memoryview(bytearray(1)))
    transports[0].abort()
    error = waiting.exception(10)  # a silent peer is lost after 30 s
    assert isinstance(error, PeerError)
    assert "peer 0" in str(error)
    assert transports[1].loss(10) is not None
    for one in transports:
        one.close("the test is over")


@pytest.mark.slow
def test_silence_is_loss() -> None:
    """A line that carries nothing for the peer time-out counts as lost, though no connection was closed."""
    with Relay() as relay:
        transports = tcp_transports(2, relay.address, heartbeat_s=0.05, peer_timeout_s=0.4)
        waiting = [one.receive(1 - one.rank, 1, "x", memoryview(bytearray(1))) for one in transports]
        relay.flowing.clear()
        errors = [str(one.exception(10)) for one in waiting]
        assert any("silent for 0.4 s" in error for error in errors), errors
        relay.flowing.set()
        for one in transports:
            one.close("the test is over")


@pytest.mark.slow
def test_heartbeats_keep_an_idle_line() -> None:
    """Peers that have nothing to say for longer than the time-out stay connected."""
    transports = tcp_transports(2, heartbeat_s=0.05, peer_timeout_s=0.4)
    assert not threading.Event().wait(0.8)
    transports[0].send(1, 1, "x", memoryview(b"y"))
    transports[1].receive(0, 1, "x", memoryview(bytearray(1))).result(10)
    for one in transports:
        one.close()


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"isthmus": 99}, "isthmus is 99"),
        ({"attempt": 2}, "attempt is 2"),
        ({"run": "other"}, "run is 'other'"),
        ({"size": 4}, "size is 4"),
        ({"rank": 3}, "rank 3 must be below"),
        ({"rank": 0}, "rank 0 must be below"),
        ({"rank": -1}, "rank -1 must be below"),
        ({"rank": True}, "rank True must be below"),
        ({"rank": "1"}, "rank '1' must be below"),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_greeting_of_another_run_is_refused(theirs: dict[str, object], why: str) -> None:
    """Version, run, attempt, size and rank must fit; the refusal says which does not."""
    mine = Greeting("job-1", 1, 0, 3)
    answer = refusal_reason(mine, Greeting("job-1", 1, 1, 3).as_dict() | theirs)
    assert answer.startswith(why)
    assert bool(answer) == bool(why)


def meet(greetings: list[Greeting], timeout_s: float = 10) -> list[object]:
    """Let the ranks meet; return what each got, an error included."""
    listeners = [listen("127.0.0.1") for _ in greetings]
    endpoints = [Endpoint("127.0.0.1", one.getsockname()[1]) for one in listeners]

    def run(place: int) -> object:
        try:
            met = connect_ranks(greetings[place], endpoints, listeners[place], timeout_s)
        except (PeerError, ProtocolError) as error:
            return error
        for lanes in met.values():
            for connection, _ in lanes:
                connection.close()
        return sorted(met)

    with ThreadPoolExecutor(len(greetings)) as pool:
        results = list(pool.map(run, range(len(greetings))))
    for one in listeners:
        one.close()
    return results


def test_all_ranks_meet() -> None:
    """After the meeting each rank is connected to every other."""
    assert meet([Greeting("j", 1, rank, 4) for rank in range(4)]) == [
        [1, 2, 3],
        [0, 2, 3],
        [0, 1, 3],
        [0, 1, 2],
    ]


@pytest.mark.slow
def test_a_rank_of_another_attempt_is_turned_away() -> None:
    """Neither side of a mismatched pair starts: one is refused, the other waits in vain for the right one."""
    waiting, refused = meet([Greeting("j", 1, 0, 2), Greeting("j", 2, 1, 2)], timeout_s=1)
    assert isinstance(refused, PeerError)
    assert "attempt is 2 there and 1 here" in str(refused)
    assert isinstance(waiting, PeerError)
    assert "rank 1 never connected" in str(waiting)


def test_a_stranger_does_not_disturb_the_meeting() -> None:
    """A connection that says something else is closed, and the right peer is still awaited."""
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        endpoints = [Endpoint("127.0.0.1", one.getsockname()[1]) for one in (first, second)]
        with socket.create_connection(first.getsockname()) as stranger, ThreadPoolExecutor(2) as pool:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            low = pool.submit(connect_ranks, Greeting("j", 1, 0, 2), endpoints, first, 10)
            high = pool.submit(connect_ranks, Greeting("j", 1, 1, 2), endpoints, second, 10)
            for met in (low.result(), high.result()):
                for [(connection, _)] in met.values():
                    connection.close()


@pytest.mark.parametrize("words", [b"[" * 4000 + b"\n", b"\xff\xfe\n", b"7\n", b"{}\n", b"x" * 5000, b"", b"\n"])
def test_no_stranger_s_words_end_the_meeting(words: bytes) -> None:
    """Whatever a stranger says, or leaves unsaid, it is turned away within the meeting and the ranks meet."""
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        endpoints = [Endpoint("127.0.0.1", one.getsockname()[1]) for one in (first, second)]
        strangers = [socket.create_connection(first.getsockname()) for _ in range(5)]
        for one in strangers:
            one.sendall(words)
        with ThreadPoolExecutor(2) as pool:
            low = pool.submit(connect_ranks, Greeting("j", 1, 0, 2), endpoints, first, 30)
            high = pool.submit(connect_ranks, Greeting("j", 1, 1, 2), endpoints, second, 30)
            for met in (low.result(), high.result()):
                assert len(met) == 1
                for [(connection, _)] in met.values():
                    connection.close()
        for one in strangers:
            one.close()


def test_a_rank_that_connects_twice_is_turned_away_the_second_time() -> None:
    """The first connection of a rank stays; a later one of the same rank is refused with that reason."""
    mine, theirs = Greeting("j", 1, 0, 3), Greeting("j", 1, 1, 3)
    with listen("127.0.0.1") as first, ThreadPoolExecutor(1) as pool:
        endpoints = [Endpoint("127.0.0.1", first.getsockname()[1])] * 3
        low = pool.submit(connect_ranks, mine, endpoints, first, 20)
        with (
            socket.create_connection(first.getsockname()) as one,
            socket.create_connection(first.getsockname()) as two,
            socket.create_connection(first.getsockname()) as third,
        ):
            send_greeting(one, theirs)
            with pytest.raises(UnavailableError, match="rank 1 is already connected"):
                send_greeting(two, theirs)
            send_greeting(third, Greeting("j", 1, 2, 3))
            met = low.result(20)
            assert sorted(met) == [1, 2]
            assert met[1][0][0].socket.getpeername() == one.getsockname()
            for [(connection, _)] in met.values():
                connection.close()


def test_a_peer_that_refuses_connections_is_an_error_at_once() -> None:
    """A rank that has checked in and is gone ends the meeting without waiting for the others."""
    with listen("127.0.0.1") as gone:
        port = gone.getsockname()[1]
    with listen("127.0.0.1") as own:
        endpoints = [Endpoint("127.0.0.1", port)] * 3
        with pytest.raises(PeerError, match="rank 0: peer 127"):
            connect_ranks(Greeting("j", 1, 1, 3), endpoints, own, timeout_s=60)


def test_a_peer_of_another_version_is_a_protocol_error() -> None:
    """The refusal of a worker of another format version reaches the dialler as a `ProtocolError`."""
    with listen("127.0.0.1") as other, listen("127.0.0.1") as own, ThreadPoolExecutor(1) as pool:
        endpoints = [Endpoint("127.0.0.1", other.getsockname()[1])] * 2
        dialling = pool.submit(connect_ranks, Greeting("j", 1, 1, 2), endpoints, own, 10)
        with other.accept()[0] as connection:
            connection.recv(4096)
            send_json_line(connection, {"refused": "isthmus is 1 there and 2 here"})
            assert isinstance(dialling.exception(10), ProtocolError)


def test_a_port_in_use_is_unavailable() -> None:
    """A worker that cannot listen says where."""
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=str(port)):
            listen("127.0.0.1", port)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=40))
def test_a_mailbox_loses_and_doubles_nothing(steps: list[tuple[bool, int]]) -> None:
    """Whatever the order of asking and arriving, the k-th request of a tag gets the k-th message of it."""
    mailbox = ReceiveMatcher(0)
    asked: dict[int, list[bytearray]] = {0: [], 1: [], 2: []}
    futures: dict[int, list[object]] = {0: [], 1: [], 2: []}
    sent = {0: 0, 1: 0, 2: 0}
    for arrives, tag in steps:
        if arrives:
            slot = mailbox.begin_message(tag, "x", 1)
            slot.buffer[0] = sent[tag]
            sent[tag] += 1
            mailbox.complete(slot, Arrival(0, 0, 0, 0))
        else:
            asked[tag].append(bytearray(1))
            futures[tag].append(mailbox.post_receive(tag, "x", memoryview(asked[tag][-1])))
    mailbox.fail(PeerError("over"))
    for tag in asked:
        for place, (buffer, future) in enumerate(zip(asked[tag], futures[tag], strict=True)):
            if place < sent[tag]:
                assert future.result(0)
                assert buffer[0] == place
            else:
                assert isinstance(future.exception(0), PeerError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        pack_header(FrameHeader(9)),
        pack_header(FrameHeader(HEARTBEAT, message_bytes=8)),
        pack_header(FrameHeader(CLOSE, message_bytes=2**20)),
        pack_header(FrameHeader(DATA, label="x", message_bytes=2**62)),
        pack_header(FrameHeader(DATA, label="x", message_bytes=2**40)),
        pack_header(FrameHeader(DATA, label="x", message_bytes=4, offset=3, payload_bytes=2)),
        pack_header(FrameHeader(DATA, tag=2, message_bytes=4, payload_bytes=1))
        + b"1"
        + pack_header(FrameHeader(DATA, message_bytes=5, payload_bytes=1)),
        b"\x01\x02" + bytes(48) + b"\xff\xff",
        b"GET / HTTP/1.1\r\nHost: nobody at all\r\n\r\n",
    ],
)
def test_what_is_no_frame_is_a_loss(sent: bytes) -> None:
    """Bytes that no worker sends end the connection and wake every waiter; no thread dies of them."""
    near, far = socket.socketpair()
    losses: list[PeerError] = []
    peer = peer_behind(near, losses.append)
    waiting = peer.matcher.post_receive(2, "x", memoryview(bytearray(1)))
    peer.start()
    far.sendall(sent)
    far.shutdown(socket.SHUT_WR)
    assert isinstance(waiting.exception(10), PeerError)
    peer.join(1)
    far.close()
    assert len(losses) == 1


def test_what_is_sent_after_the_leave_is_an_error() -> None:
    """A message that the peer will never read is not reported as sent, however late it comes."""
    near, far = socket.socketpair()
    peer = peer_behind(near)
    peer.start()
    before = peer.send(1, "x", memoryview(b"1"))
    head = read_header(PlainChannel(far))
    far.sendall(pack_header(FrameHeader(ACK, head.number)))
    assert before.result(10) is None
    late = peer.send(1, "x", memoryview(b"2"))
    far.sendall(pack_header(FrameHeader(CLOSE)))
    assert isinstance(late.exception(10), PeerError)
    far.close()
    peer.join(1)
    assert isinstance(peer.send(1, "x", memoryview(b"3")).exception(10), PeerError)


def test_sends_racing_with_the_end_are_all_answered() -> None:
    """Every future is done once the connection is closed, whichever side of the close its send fell."""
    for _ in range(20):
        near, far = socket.socketpair()
        peer = peer_behind(near)
        peer.start()
        futures: list[Future[None]] = []
        started = threading.Event()

        def push(peer: Peer = peer, futures: list = futures, started: threading.Event = started) -> None:
            for _ in range(200):
                futures.append(peer.send(1, "x", memoryview(b"1")))
                started.set()

        pusher = threading.Thread(target=push)
        pusher.start()
        started.wait()
        far.close()
        peer.join(0.0)
        pusher.join()
        for one in futures:
            one.exception(10)


def test_a_mailbox_remembers_no_tag_that_is_over() -> None:
    """A million tags, each used once, as collectives do, leave nothing behind."""
    mailbox = ReceiveMatcher(0)
    for tag in range(100):
        future = mailbox.post_receive(tag, "x", memoryview(bytearray(1)))
        mailbox.complete(mailbox.begin_message(tag, "x", 1), Arrival(0, 0, 0, 0))
        future.result(0)
        mailbox.complete(mailbox.begin_message(tag, "x", 1), Arrival(0, 0, 0, 0))
        mailbox.post_receive(tag, "x", memoryview(bytearray(1))).result(0)
    assert (mailbox.num_tags, mailbox.unclaimed_bytes) == (0, 0)


def test_a_message_that_ends_after_the_loss_changes_nothing() -> None:
    """1. A message begins to arrive. 2. Another peer is lost, and every receive fails. 3. The message ends."""
    mailbox = ReceiveMatcher(0)
    future = mailbox.post_receive(1, "x", memoryview(bytearray(4)))
    slot = mailbox.begin_message(1, "x", 4)
    mailbox.fail(PeerError("another one"))
    mailbox.complete(slot, Arrival(0, 0, 0, 0))
    assert isinstance(future.exception(0), PeerError)


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_message_of_another_size_fails_its_receive_alone(asked_first: bool) -> None:
    """A mismatch names both labels; the next message of the tag still finds its receive."""
    mailbox = ReceiveMatcher(3)
    wrong = mailbox.post_receive(1, "float32[2]", memoryview(bytearray(8))) if asked_first else None
    mailbox.complete(mailbox.begin_message(1, "float32[1]", 4), Arrival(0, 0, 0, 0))
    wrong = wrong or mailbox.post_receive(1, "float32[2]", memoryview(bytearray(8)))
    with pytest.raises(PeerError, match=r"peer 3 sent float32\[1\] where float32\[2\] was expected"):
        wrong.result(0)
    right = mailbox.post_receive(1, "float32[2]", memoryview(bytearray(8)))
    mailbox.complete(mailbox.begin_message(1, "float32[2]", 8), Arrival(0, 0, 0, 0))
    right.result(0)


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_message_cut_off_fails_its_receive(asked_first: bool) -> None:
    """A line lost in the middle of a message fails the receive that it was for; it never hangs."""
    mailbox = ReceiveMatcher(0)
    if asked_first:
        future = mailbox.post_receive(1, "x", memoryview(bytearray(4)))
        mailbox.begin_message(1, "x", 4)
    else:
        mailbox.begin_message(1, "x", 4)
        future = mailbox.post_receive(1, "x", memoryview(bytearray(4)))
    mailbox.fail(PeerError("cut"))
    assert isinstance(future.exception(0), PeerError)


def test_a_full_mailbox_holds_the_reader_until_someone_asks() -> None:
    """Unasked-for messages beyond the bound stop reading, unless a receive waits for one further behind."""
    mailbox = ReceiveMatcher(0, max_unclaimed_bytes=4)
    slot = mailbox.begin_message(1, "x", 8)
    mailbox.complete(slot, Arrival(0, 0, 0, 0))
    assert not mailbox.wait_for_space(0)
    mailbox.post_receive(2, "x", memoryview(bytearray(1)))
    assert mailbox.wait_for_space(0)


class RecordedWaits(threading.Event):
    """An event that records how long it is waited for, without waiting; set after `num` waits."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.waits_s, self._num = list[float](), num

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout or 0.0)
        if len(self.waits_s) == self._num:
            self.set()
        return self.is_set()


def test_attempts_to_reconnect_are_spread_by_passed_in_randomness() -> None:
    """The pause doubles up to 1 s, times 0.5 to 1.5: ranks that lose their links together do not dial together."""

    def no_route(_rank: int, _number: int) -> None:
        raise UnavailableError("no route")

    numbers = iter([0.0, 0.5, 0.9, 0.25, 0.0, 0.5])
    stopped = RecordedWaits(6)
    one = Reconnector(1, 60.0, no_route, lambda *_: None, stopped, lambda: next(numbers))
    one.reconnect(0, OSError("cut"), lambda: True, lambda *_: True)
    assert stopped.waits_s == pytest.approx([0.05, 0.2, 0.56, 0.6, 0.5, 1.0])
