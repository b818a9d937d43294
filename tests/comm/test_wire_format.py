"""Rules of the wire format: bytes of a header, what is malformed, and the decisions of a greeting."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from isthmus.comm.channel.channel import PlainChannel, send_all
from isthmus.comm.channel.receive_exactly import LOW_WATER_BYTES, receive_exactly
from isthmus.comm.tcp.greeting import (
    Greeting,
    answer_greeting,
    receive_json_line,
    refusal_reason,
    send_greeting,
    send_json_line,
)
from isthmus.comm.tcp.wire_format import (
    ACK,
    CLOSE,
    DATA,
    FORMAT_VERSION,
    HEARTBEAT,
    MAX_FRAGMENT_BYTES,
    MAX_REASON_BYTES,
    NOTICE,
    FrameHeader,
    frame_parts,
    pack_header,
    read_header,
)
from isthmus.core.errors import PeerError, ProtocolError, RestartError, UnavailableError

HEADER = FrameHeader(DATA, 2**40, -3, 1.5, "é", message_bytes=100, offset=60, payload_bytes=40, left_s=2.5)
MINE = Greeting("run", 2, 0, 3, incarnation=4)
NO_WORKER = "^malformed greeting: the other side is not an Isthmus worker$"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets that wait at most 5 s."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(5)
        far.settimeout(5)
        yield near, far


class Unmarked:
    """A socket without a low-water mark, on which nothing waits."""

    def setsockopt(self, *_: int) -> None:
        """Take the mark, and ignore it."""

    def gettimeout(self) -> float:
        """Return some timeout."""
        return 1.0

    def settimeout(self, _: float) -> None:
        """Take the timeout, and ignore it."""


class SilentSocket(Unmarked):
    """A socket that times out before each answer; `answers` are what `recv_into` and `send` take at most."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.is_silent, self.calls = answers, False, list[int]()

    def _take(self, size: int) -> int:
        self.is_silent = not self.is_silent
        if self.is_silent:
            raise TimeoutError
        self.calls.append(size)
        return min(self.answers.pop(0), size)

    def recv_into(self, buffer: memoryview) -> int:
        size = self._take(len(buffer))
        buffer[:size] = b"x" * size
        return size

    def send(self, data: memoryview) -> int:
        return self._take(len(data))


def test_a_header_has_the_documented_bytes() -> None:
    """Kind, label length, number, tag, send time, time of writing, three lengths, in network order."""
    expected = struct.pack("!BBQqddQQQ", DATA, 2, 2**40, -3, 1.5, 2.5, 100, 60, 40) + "é".encode()
    assert pack_header(HEADER) == expected


def test_a_header_is_read_as_it_was_packed(pair: tuple[socket.socket, socket.socket]) -> None:
    """Every field comes back, and the bytes that follow stay in the socket."""
    near, far = pair
    near.sendall(pack_header(HEADER) + b"rest")
    assert read_header(PlainChannel(far)) == HEADER
    assert far.recv(10) == b"rest"


@pytest.mark.parametrize(("kind", "most"), [(CLOSE, MAX_REASON_BYTES), (HEARTBEAT, 0), (ACK, 0)])
def test_each_kind_bounds_its_message(pair: tuple[socket.socket, socket.socket], kind: int, most: int) -> None:
    """A message of the most bytes is accepted, one byte more is malformed."""
    near, far = pair
    fits = FrameHeader(kind, message_bytes=most, payload_bytes=most)
    near.sendall(pack_header(fits))
    assert read_header(PlainChannel(far)) == fits
    near.sendall(pack_header(FrameHeader(kind, message_bytes=most + 1, payload_bytes=1)))
    with pytest.raises(ValueError, match=rf"^kind {kind} with 1 of {most + 1} bytes$"):
        read_header(PlainChannel(far))


def test_a_fragment_has_at_most_256_kib(pair: tuple[socket.socket, socket.socket]) -> None:
    """A longer payload is malformed, however long its message is."""
    near, far = pair
    fits = FrameHeader(DATA, message_bytes=2**40, offset=5, payload_bytes=MAX_FRAGMENT_BYTES)
    near.sendall(pack_header(fits))
    assert read_header(PlainChannel(far)) == fits
    near.sendall(pack_header(FrameHeader(DATA, message_bytes=2**40, payload_bytes=MAX_FRAGMENT_BYTES + 1)))
    with pytest.raises(ValueError, match=rf"^kind 1 with {MAX_FRAGMENT_BYTES + 1} of {2**40} bytes$"):
        read_header(PlainChannel(far))


def test_a_frame_has_a_part_for_each_of_header_label_and_payload() -> None:
    """The receiver knows the size of each part from the header; an empty part is left out."""
    packed = pack_header(HEADER)
    assert frame_parts(HEADER, b"p" * 40) == [packed[:-2], packed[-2:], b"p" * 40]
    assert frame_parts(FrameHeader(ACK, 7), b"") == [pack_header(FrameHeader(ACK, 7))]


@pytest.mark.parametrize(
    "header",
    [
        FrameHeader(6),
        FrameHeader(NOTICE, message_bytes=4097),
        FrameHeader(0),
        FrameHeader(DATA, message_bytes=10, offset=5, payload_bytes=6),
        FrameHeader(DATA, message_bytes=10, offset=11),
    ],
)
def test_an_unknown_kind_or_a_fragment_past_the_end_is_malformed(
    pair: tuple[socket.socket, socket.socket], header: FrameHeader
) -> None:
    """The payload lies within its message, and only five kinds exist."""
    near, far = pair
    near.sendall(pack_header(header))
    with pytest.raises(ValueError, match=f"^kind {header.kind} with"):
        read_header(PlainChannel(far))


@pytest.mark.parametrize("times", [{"sent_s": float("nan")}, {"left_s": float("inf")}])
def test_a_header_with_a_time_that_is_no_number_is_malformed(
    pair: tuple[socket.socket, socket.socket], times: dict[str, float]
) -> None:
    """Times enter the metrics, which accept finite numbers only."""
    near, far = pair
    near.sendall(pack_header(FrameHeader(DATA, message_bytes=1, payload_bytes=1, **times)))
    with pytest.raises(ValueError, match=r"^message 0 has the times"):
        read_header(PlainChannel(far))


def test_a_closed_connection_is_a_reset(pair: tuple[socket.socket, socket.socket]) -> None:
    """Reading a header or a line from a peer that closed raises `ConnectionResetError`."""
    near, far = pair
    near.close()
    with pytest.raises(ConnectionResetError, match=r"^closed its connection$"):
        read_header(PlainChannel(far))
    with pytest.raises(ConnectionResetError, match=r"^closed its connection while greeting$"):
        receive_json_line(far)


def test_silence_ends_a_read_unless_it_is_tolerated() -> None:
    """A timeout raises `TimeoutError`; while silence is tolerated the read goes on. One read takes at most 1 MiB."""
    buffer = bytearray(2**20 + 5)
    with pytest.raises(TimeoutError):
        receive_exactly(SilentSocket([5]), memoryview(buffer))  # type: ignore[arg-type]
    patient = SilentSocket([2**21, 3, 2])
    receive_exactly(patient, memoryview(buffer), lambda: True)  # type: ignore[arg-type]
    assert bytes(buffer) == b"x" * (2**20 + 5)
    assert patient.calls == [2**20, 5, 2]


def test_a_header_waits_for_a_silent_peer_only_if_told_to() -> None:
    """`tolerate_silence` holds for the fixed part and for the label."""
    packed = pack_header(HEADER)

    class Slow:
        """Times out before each part of the header."""

        def __init__(self) -> None:
            self.parts = iter([None, packed[:-2], None, packed[-2:]])

        def recv_into(self, buffer: memoryview) -> int:
            part = next(self.parts)
            if part is None:
                raise TimeoutError
            buffer[: len(part)] = part
            return len(part)

    assert read_header(PlainChannel(Slow()), lambda: True) == HEADER  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        read_header(PlainChannel(Slow()))  # type: ignore[arg-type]


class CountedReads(socket.socket):
    """A socket that counts its reads."""

    num_reads = 0

    def recv_into(self, *arguments: Any) -> int:
        self.num_reads += 1
        return super().recv_into(*arguments)


@pytest.fixture
def tcp_pair() -> Iterator[tuple[socket.socket, CountedReads]]:
    """A connection over loopback, whose second end counts its reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with near, CountedReads(fileno=accepted.detach()) as far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.settimeout(5)
        yield near, far


def test_a_long_part_wakes_its_reader_once_for_many_packets(tcp_pair: tuple[socket.socket, CountedReads]) -> None:
    """A read waits for the low-water mark or the rest of the part; a header afterwards waits for one byte."""
    near, far = tcp_pair
    part, part_bytes = bytearray(LOW_WATER_BYTES), b"y" * LOW_WATER_BYTES
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(receive_exactly, far, memoryview(part))
        for start in range(0, len(part), 1000):
            near.sendall(part_bytes[start : start + 1000])
        near.sendall(b"next")
        reading.result(5)
    assert part == part_bytes
    assert far.num_reads == 1
    assert far.gettimeout() == 5
    assert far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert far.recv(9) == b"next"


@pytest.mark.attack
def test_a_dripping_part_takes_its_own_time_and_no_timeout_of_silence(
    tcp_pair: tuple[socket.socket, CountedReads],
) -> None:
    """The first bytes count at once, however long the peer may be silent: here the read would wait for 5 s."""
    near, far = tcp_pair
    near.sendall(b"y" * 10)
    times_s = iter([0.0, 0.0, 1.0, 20.0])

    def drip() -> float:
        near.sendall(b"y")
        return next(times_s)

    with pytest.raises(TimeoutError, match=r"within 10 s"):
        receive_exactly(far, memoryview(bytearray(2 * LOW_WATER_BYTES)), timeout_s=10, clock=drip)
    assert far.gettimeout() == 5


@pytest.mark.attack
def test_bytes_below_the_mark_count_as_activity_and_silence_ends_the_read(
    tcp_pair: tuple[socket.socket, CountedReads],
) -> None:
    """A slow peer's bytes are read at the end of the timeout; only a timeout without any breaks the connection."""
    near, far = tcp_pair
    far.settimeout(0.05)
    part = bytearray(2 * LOW_WATER_BYTES)
    near.sendall(b"y" * 10)
    with pytest.raises(TimeoutError):
        receive_exactly(far, memoryview(part))
    assert part[:11] == b"y" * 10 + b"\0"
    near.close()
    with pytest.raises(ConnectionResetError):
        receive_exactly(far, memoryview(part))


class Dripping(Unmarked):
    """A peer that sends `first` bytes at once, then one every second of the time that `now_s` counts."""

    def __init__(self, first: int) -> None:
        self.first, self.now_s, self.num_sent = first, 0.0, 0

    def recv_into(self, buffer: memoryview) -> int:
        count, self.first = min(self.first or 1, len(buffer)), 0
        self.now_s += self.num_sent > 0
        self.num_sent += count
        return count


@pytest.mark.attack
@pytest.mark.parametrize("first", [1, 40, 100_000])
def test_a_part_that_begins_and_does_not_end_is_given_up(first: int) -> None:
    """A byte now and then breaks no silence: the time of a part counts from its first byte."""
    peer = Dripping(first)
    with pytest.raises(TimeoutError, match=rf"sent {first + 11} of 200000 bytes within 10 s"):
        receive_exactly(peer, memoryview(bytearray(200_000)), timeout_s=10, clock=lambda: peer.now_s)  # type: ignore[arg-type]
    assert peer.now_s == 11


def test_a_part_that_ends_in_time_and_one_of_a_rank_that_closes_are_read() -> None:
    """A slow part is read whole; while the owner closes, its own limit of time ends the wait."""
    peer = Dripping(90)
    receive_exactly(peer, memoryview(bytearray(100)), timeout_s=10, clock=lambda: peer.now_s)  # type: ignore[arg-type]
    assert peer.num_sent == 100
    peer = Dripping(0)
    receive_exactly(peer, memoryview(bytearray(100)), lambda: True, 10, lambda: peer.now_s)  # type: ignore[arg-type]
    assert peer.now_s == 99


def test_a_send_goes_on_after_silence_until_it_is_stopped() -> None:
    """A busy peer delays a send; once stopped, the timeout is raised. One send takes at most 1 MiB."""
    patient = SilentSocket([2**21, 3, 2])
    send_all(patient, memoryview(bytes(2**20 + 5)), lambda: False)  # type: ignore[arg-type]
    assert patient.calls == [2**20, 5, 2]
    with pytest.raises(TimeoutError):
        send_all(SilentSocket([5]), memoryview(b"12345"), lambda: True)  # type: ignore[arg-type]


def test_a_line_of_json_is_read_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    """The object comes back; what follows the line stays in the socket."""
    near, far = pair
    send_json_line(near, {"a": [1, "é"]})
    near.sendall(b"rest")
    assert receive_json_line(far) == {"a": [1, "é"]}
    assert far.recv(10) == b"rest"


@pytest.mark.parametrize("line", [b"[1]\n", b"GET / HTTP/1.1\n", b"[" * 4095 + b"\n", b" " * 4097])
def test_what_is_no_object_of_4096_bytes_is_malformed(pair: tuple[socket.socket, socket.socket], line: bytes) -> None:
    """A list, other words, deep nesting and a line that does not end are refused."""
    near, far = pair
    near.sendall(line)
    with pytest.raises(ProtocolError, match=NO_WORKER):
        receive_json_line(far)


def test_a_line_of_4096_bytes_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    """The limit counts the newline."""
    near, far = pair
    near.sendall(b'{"a": 1}'.ljust(4095) + b"\n")
    assert receive_json_line(far) == {"a": 1}


def test_a_greeting_tells_version_byte_order_and_identity() -> None:
    """These are all its fields."""
    assert MINE.as_dict() == {
        "isthmus": FORMAT_VERSION,
        "byteorder": sys.byteorder,
        "run": "run",
        "attempt": 2,
        "rank": 0,
        "size": 3,
        "incarnation": 4,
    }
    assert Greeting("run", 2, 0, 3).incarnation == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"rank": 2}, ""),
        ({"incarnation": 9}, ""),
        ({"isthmus": 2}, "isthmus is 2 there and 6 here"),
        ({"run": "x"}, "run is 'x' there and 'run' here"),
        ({"attempt": 3}, "attempt is 3 there and 2 here"),
        ({"size": None}, "size is None there and 3 here"),
        ({"incarnation": True}, "incarnation True is not an integer"),
        ({"incarnation": "4"}, "incarnation '4' is not an integer"),
        ({"rank": 0}, "rank 0 must be below 3 and another than 0"),
        ({"rank": 3}, "rank 3 must be below 3 and another than 0"),
        ({"rank": "1"}, "rank '1' must be below 3 and another than 0"),
    ],
)
def test_a_greeting_is_refused_for_the_first_difference(change: dict[str, Any], reason: str) -> None:
    """Only rank and incarnation may differ; the rank is another one of the run."""
    assert refusal_reason(MINE, MINE.as_dict() | {"rank": 1} | change) == reason


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Run `call` in a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_greeting_measures_the_clock_of_the_other_side(pair: tuple[socket.socket, socket.socket]) -> None:
    """The dialler learns the answering clock minus its own, the answerer the opposite; both name rank and connection.

    Virtual clocks: the dialler's advances by 2 per reading from 100, so a round trip takes 2; the answerer's stands
    at 1101, thus between the two readings of the first ping it is ahead by 1000.
    """
    near, far = pair
    ticks = count(100.0, 2.0)
    answered = in_background(lambda: answer_greeting(far, MINE, lambda: 1101.0))
    offset_s = send_greeting(near, Greeting("run", 2, 1, 3, incarnation=4), lambda: next(ticks), number=7)
    # All round trips take 2; `min` keeps the smallest offset of them, that of the last ping: 1101 - 113.
    assert offset_s == 1101.0 - 113.0
    assert answered.result(5) == (1, 7, -offset_s)


def test_the_shortest_round_trip_gives_the_offset(pair: tuple[socket.socket, socket.socket]) -> None:
    """Of round trips of 8, 10, 6 and 4 s the second counts: 9 s of it passed at the other side, 0.5 s of the others.

    Its two ways take half a second each.
    """
    near, far = pair
    own = iter([0.0, 8.0, 10.0, 20.0, 30.0, 36.0, 40.0, 44.0])
    other = iter([54.0, 54.5, 60.5, 69.5, 83.0, 83.5, 92.0, 92.5])
    dialler = Greeting("run", 2, 1, 3, incarnation=4)
    answered = in_background(lambda: answer_greeting(far, MINE, lambda: next(other)))
    assert send_greeting(near, dialler, lambda: next(own)) == 50.0
    assert answered.result(5) == (1, 0, -50.0)


def test_a_greeting_without_a_lane_is_for_lane_0(pair: tuple[socket.socket, socket.socket]) -> None:
    """A dialler of one connection need not number it."""
    near, far = pair
    send_json_line(near, Greeting("run", 2, 1, 3, incarnation=4).as_dict())
    for _ in range(5):
        near.sendall(struct.pack("!dd", 0.0, 0.0))
    assert answer_greeting(far, MINE)[:2] == (1, 0)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (
            {"refused": "isthmus is 2 there"},
            ProtocolError,
            "^the worker dialled by rank 1 refused: isthmus is 2 there$",
        ),
        ({"refused": "run differs"}, PeerError, "^the worker dialled by rank 1 refused: run differs$"),
        ({"refused": "busy", "later": True}, UnavailableError, "refused: busy$"),
        ({"refused": "old", "incarnation": 5}, RestartError, "^the worker dialled by rank 1 has restarted$"),
        ({"refused": "same", "incarnation": 4}, PeerError, "refused: same$"),
        ({"refused": "odd", "incarnation": True}, PeerError, "refused: odd$"),
    ],
)
def test_a_refused_dialler_learns_what_to_do(
    pair: tuple[socket.socket, socket.socket], answer: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Another version, another run, a retry later, or a restart each have their own error."""
    near, far = pair
    send_json_line(far, answer)
    with pytest.raises(error, match=words) as caught:
        send_greeting(near, Greeting("run", 2, 1, 3, incarnation=4), number=1)
    assert type(caught.value) is error
    if isinstance(caught.value, RestartError):
        assert caught.value.incarnation == 5
    assert json.loads(far.recv(4096)) == Greeting("run", 2, 1, 3, incarnation=4).as_dict() | {"lane": 1}


@pytest.mark.parametrize(
    ("change", "claims", "refused", "later", "error"),
    [
        ({"run": "x"}, True, "run is 'x' there and 'run' here", False, ProtocolError),
        ({"lane": "1"}, True, "lane must be an integer, got '1'", False, ProtocolError),
        ({"lane": True, "run": "x"}, True, "run is 'x' there and 'run' here", False, ProtocolError),
        ({"incarnation": 3}, True, "incarnation is 3 there and 4 here", False, ProtocolError),
        ({"incarnation": 5}, True, "incarnation is 5 there and 4 here", True, RestartError),
        ({}, False, "rank 1 is already connected", True, UnavailableError),
    ],
)
def test_an_answer_says_why_and_whether_to_retry(
    pair: tuple[socket.socket, socket.socket],
    change: dict[str, Any],
    claims: bool,
    refused: str,
    later: bool,
    error: type[Exception],
) -> None:
    """The dialler of a later incarnation and one whose connection number is taken may retry; others may not."""
    near, far = pair
    claimed: list[tuple[int, int]] = []

    def claim(rank: int, number: int) -> bool:
        claimed.append((rank, number))
        return claims

    send_json_line(near, Greeting("run", 2, 1, 3, incarnation=4).as_dict() | {"lane": 2} | change)
    with pytest.raises(error) as caught:
        answer_greeting(far, MINE, claim=claim)
    assert receive_json_line(near) == {"refused": refused, "later": later, "incarnation": 4}
    if isinstance(caught.value, RestartError):
        assert caught.value.incarnation == 5
        assert str(caught.value) == "rank 1 has restarted"
    else:
        assert str(caught.value) == f"rejected a greeting: {refused}"
    assert claimed == ([] if claims else [(1, 2)])
