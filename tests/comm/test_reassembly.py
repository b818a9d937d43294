"""Rules of reassembly: each message arrives once, whatever fragments come twice, late or on which connection."""

from __future__ import annotations

import threading

import pytest

from isthmus.comm.tcp.reassembly import (
    MAX_PARTIAL_MESSAGES,
    MAX_SHORT_FRAGMENTS,
    MIN_FRAGMENT_BYTES,
    Reassembler,
)
from isthmus.comm.tcp.wire_format import DATA, FrameHeader
from isthmus.comm.transport.receive_matching import MAX_UNCLAIMED, ReceiveMatcher
from isthmus.comm.transport.transport import Arrival

ARRIVAL = Arrival(1.0, 1.0, 1.0, 2.0)


def fragment(number: int, offset: int = 0, size: int = 4, total: int = 8) -> FrameHeader:
    return FrameHeader(DATA, number, tag=9, label="x", message_bytes=total, offset=offset, payload_bytes=size)


class Peer:
    """A reassembler over a matcher, with the connections that it shut down."""

    def __init__(self, max_unclaimed_bytes: int = 100) -> None:
        self.matcher = ReceiveMatcher(1, max_unclaimed_bytes)
        self.shut: list[object] = []
        self.reassembler = Reassembler(self.matcher, self.shut.append)

    def begin(self, header: FrameHeader, connection: object = "a", dead: bool = False) -> memoryview | None:
        return self.reassembler.begin_fragment(header, connection, lambda: dead)

    def deliver(
        self, header: FrameHeader, data: bytes, connection: object = "a", arrival: Arrival = ARRIVAL
    ) -> Arrival | None:
        buffer = self.begin(header, connection)
        assert buffer is not None
        assert len(buffer) == len(data)
        buffer[:] = data
        return self.reassembler.end_fragment(header, arrival)


def test_a_message_is_complete_with_its_last_fragment() -> None:
    """Fragments may come in any order; the receive ends with the arrival of the one that completes it."""
    peer, into = Peer(), bytearray(8)
    received = peer.matcher.post_receive(9, "x", memoryview(into))
    assert not peer.deliver(fragment(0, offset=4), b"5678", "b")
    assert not peer.reassembler.has_message(0)
    assert not received.done()
    assert peer.deliver(fragment(0), b"1234")
    assert peer.reassembler.has_message(0)
    assert received.result(0) == ARRIVAL
    assert bytes(into) == b"12345678"
    assert peer.shut == []


def test_a_message_left_with_its_first_fragment_and_arrived_with_its_last() -> None:
    """Connections overtake each other: the times of a message are the extremes of its fragments' times."""
    peer, into = Peer(), bytearray(8)
    received = peer.matcher.post_receive(9, "x", memoryview(into))
    assert peer.deliver(fragment(0, offset=4), b"5678", "b", Arrival(1.0, 1.5, 1.5, 2.0, 0.25)) is None
    peer.deliver(fragment(0), b"1234", arrival=Arrival(1.0, 1.25, 1.25, 2.5, 0.25))
    assert received.result(0) == Arrival(1.0, 1.25, 1.5, 2.5, 0.25)


def test_a_message_that_lacks_one_byte_is_not_complete() -> None:
    """Completion counts bytes."""
    peer = Peer()
    assert not peer.deliver(fragment(0, size=7), b"1234567")
    assert peer.deliver(fragment(0, offset=7, size=1), b"8")


def test_a_message_without_bytes_is_complete_at_once() -> None:
    """An empty message consists of one empty fragment."""
    peer = Peer()
    assert peer.deliver(fragment(0, size=0, total=0), b"")
    assert peer.reassembler.has_message(0)


def test_a_fragment_that_was_received_is_discarded() -> None:
    """A duplicate gets no buffer, neither while its message is partial nor when it is complete."""
    peer = Peer()
    peer.deliver(fragment(0), b"1234")
    assert peer.begin(fragment(0)) is None
    peer.deliver(fragment(0, offset=4), b"5678")
    assert peer.begin(fragment(0)) is None
    assert peer.begin(fragment(0, offset=4)) is None


def test_messages_may_complete_out_of_order() -> None:
    """Each number is complete for itself; duplicates of every complete one are discarded."""
    peer = Peer()
    for number in (2, 0, 3, 1):
        assert not peer.reassembler.has_message(number)
        assert peer.deliver(fragment(number, size=8), b"12345678")
        assert peer.reassembler.has_message(number)
    assert [peer.begin(fragment(number, size=8)) for number in range(4)] == [None] * 4
    assert not peer.reassembler.has_message(4)


def test_a_failed_fragment_is_read_again() -> None:
    """A fragment whose connection broke counts nothing; another connection delivers it."""
    peer = Peer()
    assert peer.begin(fragment(0)) is not None
    assert not peer.reassembler.end_fragment(fragment(0), None)
    assert not peer.deliver(fragment(0), b"1234", "b")
    assert peer.deliver(fragment(0, offset=4), b"5678", "b")


def test_a_length_that_contradicts_an_earlier_fragment_is_malformed() -> None:
    """All fragments of a message state the same length."""
    peer = Peer()
    peer.deliver(fragment(5), b"1234")
    with pytest.raises(ValueError, match=r"^message 5 has 8 bytes, not 9$"):
        peer.begin(fragment(5, offset=4, total=9))


def test_one_connection_at_a_time_writes_a_fragment() -> None:
    """A second connection shuts down the first, and waits until it has let go of the buffer."""
    peer, buffers = Peer(), list[memoryview | None]()
    asked = threading.Event()
    peer.reassembler = Reassembler(peer.matcher, lambda one: (peer.shut.append(one), asked.set()))
    assert peer.begin(fragment(0), "a") is not None
    second = threading.Thread(target=lambda: buffers.append(peer.begin(fragment(0), "b")), daemon=True)
    second.start()
    assert asked.wait(5)
    assert peer.shut == ["a"]
    assert buffers == []
    peer.reassembler.end_fragment(fragment(0), None)
    second.join(5)
    assert buffers[0] is not None
    assert not peer.reassembler.end_fragment(fragment(0), ARRIVAL)


def test_a_fragment_that_the_first_connection_completed_is_discarded_by_the_second() -> None:
    """The connection that waited finds the fragment received."""
    peer, buffers = Peer(), list[memoryview | None]()
    asked = threading.Event()
    peer.reassembler = Reassembler(peer.matcher, lambda _: asked.set())
    peer.begin(fragment(0), "a")
    second = threading.Thread(target=lambda: buffers.append(peer.begin(fragment(0), "b")), daemon=True)
    second.start()
    assert asked.wait(5)
    peer.reassembler.end_fragment(fragment(0), ARRIVAL)
    second.join(5)
    assert buffers == [None]


class FullMatcher(ReceiveMatcher):
    """A matcher without space for the first `waits` looks."""

    def __init__(self, waits: int) -> None:
        super().__init__(1)
        self.waits, self.timeouts_s = waits, list[float]()

    def wait_for_space(self, timeout_s: float) -> bool:
        self.timeouts_s.append(timeout_s)
        self.waits -= 1
        return self.waits < 0


def test_a_new_message_waits_for_space_and_a_dead_connection_gives_up() -> None:
    """It looks once a second; a fragment of a message that is known never waits."""
    matcher = FullMatcher(2)
    reassembler = Reassembler(matcher, lambda _: None)
    assert reassembler.begin_fragment(fragment(0), "a", lambda: False) is not None
    assert matcher.timeouts_s == [1.0] * 3
    matcher.waits = 10
    assert reassembler.begin_fragment(fragment(0, offset=4), "b", lambda: False) is not None
    assert reassembler.begin_fragment(fragment(1), "b", lambda: True) is None
    assert matcher.timeouts_s == [1.0] * 4
    matcher.waits = 0
    reassembler.end_fragment(fragment(0), ARRIVAL)
    reassembler.end_fragment(fragment(0, offset=4), ARRIVAL)
    matcher.waits = 10
    assert reassembler.begin_fragment(fragment(0), "b", lambda: True) is None
    assert matcher.timeouts_s == [1.0] * 4


def test_a_message_above_the_bound_takes_no_memory() -> None:
    """Without a receive a message has at most `max_message_bytes`; a posted receive is its own bound."""
    matcher = ReceiveMatcher(1, max_message_bytes=8)
    with pytest.raises(ValueError, match=r"^a message of 9 bytes, where at most 8 are expected$"):
        matcher.begin_message(1, "x", 9)
    assert matcher.unclaimed_bytes == 0
    assert len(matcher.begin_message(1, "x", 8).place(0, 8)) == 8
    into = memoryview(bytearray(9))
    matcher.post_receive(2, "x", into)
    assert matcher.begin_message(2, "x", 9).buffer is into


def test_a_message_that_does_not_fit_its_receive_is_read_and_dropped() -> None:
    """It takes no memory of its length; its fragments are counted, and then the receive fails."""
    peer, into = Peer(), bytearray(4)
    received = peer.matcher.post_receive(9, "x", memoryview(into))
    assert not peer.deliver(fragment(0, offset=4, total=2**40), b"5678")
    assert peer.matcher.unclaimed_bytes == 0
    assert not received.done()
    peer = Peer()
    received = peer.matcher.post_receive(9, "x", memoryview(into))
    assert not peer.deliver(fragment(0, offset=4), b"5678")
    assert peer.deliver(fragment(0), b"1234")
    assert "was expected" in str(received.exception(0))
    assert into == bytes(4)


@pytest.mark.attack
def test_fragments_that_overlap_are_refused() -> None:
    """Else one of them could be written after the message is complete, into memory in other use by then."""
    peer, into = Peer(), bytearray(8)
    received = peer.matcher.post_receive(9, "x", memoryview(into))
    late = peer.begin(fragment(0, offset=2, size=4), "slow")
    assert late is not None
    peer.deliver(fragment(0, offset=0, size=4), b"1234", "b")
    with pytest.raises(ValueError, match="overlap"):
        peer.begin(fragment(0, offset=4, size=4), "c")
    assert not received.done()
    peer.reassembler.end_fragment(fragment(0, offset=2, size=4), None)
    peer.deliver(fragment(0, offset=4, size=4), b"5678", "c")
    assert (bytes(into), received.done()) == (b"12345678", True)


@pytest.mark.attack
def test_a_message_has_no_more_fragments_than_a_sender_cuts() -> None:
    """Fragments of no byte or of one would cost a hundred bytes of memory each."""
    peer = Peer(max_unclaimed_bytes=2**30)
    peer.deliver(fragment(0, size=1, total=2**20), b"x")
    with pytest.raises(ValueError, match="empty fragment"):
        peer.begin(fragment(0, offset=1, size=0, total=2**20))
    for offset in range(1, 2**20 // MIN_FRAGMENT_BYTES + MAX_SHORT_FRAGMENTS):
        peer.deliver(fragment(0, offset=offset, size=1, total=2**20), b"x")
    with pytest.raises(ValueError, match="more than 1088 fragments"):
        peer.begin(fragment(0, offset=2**19, size=1, total=2**20))


@pytest.mark.attack
def test_messages_at_a_time_are_bounded() -> None:
    """A peer begins messages and ends none."""
    peer = Peer(max_unclaimed_bytes=2**30)
    for number in range(MAX_PARTIAL_MESSAGES):
        assert peer.begin(fragment(number)) is not None
    with pytest.raises(ValueError, match="messages at a time"):
        peer.begin(fragment(MAX_PARTIAL_MESSAGES))


@pytest.mark.attack
def test_empty_messages_that_nothing_receives_are_bounded() -> None:
    """They have no bytes to count, and a receive that is posted for another one admits them."""
    peer = Peer()
    waiting = peer.matcher.post_receive(1, "x", memoryview(bytearray(1)))
    for number in range(MAX_UNCLAIMED):
        peer.deliver(fragment(number, size=0, total=0), b"")
    with pytest.raises(ValueError, match="without a receive"):
        peer.begin(fragment(MAX_UNCLAIMED, size=0, total=0))
    assert not waiting.done()
    assert peer.matcher.post_receive(9, "x", memoryview(bytearray())).done()
    peer.deliver(fragment(MAX_UNCLAIMED, size=0, total=0), b"")
