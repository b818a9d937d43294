"""Hostile input to every parser of the links: frames, greetings, proxy requests and answers, within a bounded time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.channel.sealed_channel import SealedChannel
from isthmus.comm.tcp.greeting import Greeting, answer_greeting, refusal_reason, send_greeting
from isthmus.comm.tcp.sealed_greeting import FIRST_BYTES, SealedHandshake
from isthmus.comm.tcp.wire_format import DATA, MAX_FRAGMENT_BYTES, FrameHeader, pack_header, read_header
from isthmus.core.errors import IsthmusError
from isthmus.noise import CipherState
from isthmus.wan import links_in_background
from isthmus.wan.dial import MAX_HEAD_BYTES, dial
from tests.attack.fuzzing import Fuzz
from tests.comm.ranks import link_keys
from tests.control.serving import POOL

pytestmark = pytest.mark.attack

EXAMPLES, WHOLE_EXAMPLES = 200, 20_000
"""Examples of each parser in memory, here and with `--whole`; those that need a connection of their own try fewer."""
MINE = Greeting("job-1", 1, 0, 2)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@st.composite
def changed_head(draw: st.DrawFn) -> bytes:
    """Return a valid head of a frame of which a few bytes are replaced."""
    head = bytearray(pack_header(FrameHeader(DATA, label="x", message_bytes=8, payload_bytes=8)))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(head) - 1), st.integers(0, 255)), max_size=4)):
        head[place] = byte
    return bytes(head) + draw(st.binary(max_size=40))


def sockets_with(data: bytes) -> tuple[socket.socket, socket.socket]:
    """Return two sockets; the first reads `data`, then the end."""
    near, far = socket.socketpair()
    near.settimeout(10)
    far.sendall(data)
    far.shutdown(socket.SHUT_WR)
    return near, far


def test_any_bytes_are_a_frame_or_an_error(fuzz: Fuzz) -> None:
    """A head that is accepted announces at most a fragment, inside its message; else the error is one of two kinds."""

    def read_any(data: bytes) -> None:
        near, far = sockets_with(data)
        with near, far, contextlib.suppress(OSError, ValueError):
            header = read_header(PlainChannel(near))
            assert header.payload_bytes <= MAX_FRAGMENT_BYTES
            assert header.offset + header.payload_bytes <= header.message_bytes

    fuzz(st.binary(max_size=400) | changed_head(), read_any, examples=EXAMPLES, whole_examples=WHOLE_EXAMPLES)


def test_no_bytes_are_a_sealed_frame(fuzz: Fuzz) -> None:
    """Without the keys of the connection nothing is read, not even the kind of a frame."""
    keys = link_keys(("a", "b"), 0)
    sealed = SealedHandshake(MINE, keys, lambda: 0.0)

    def open_any(data: bytes) -> None:
        assert sealed.open(data[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0")) is None
        known = (keys.key_id("b") + data).ljust(FIRST_BYTES, b"\0")[:FIRST_BYTES]
        assert sealed.open(known) is None
        near, far = sockets_with(data)
        with near, far, pytest.raises(ConnectionResetError):
            read_header(SealedChannel(near, CipherState(bytes(32)), CipherState(bytes(32))))

    fuzz(st.binary(max_size=400), open_any, examples=EXAMPLES, whole_examples=WHOLE_EXAMPLES)


def test_any_object_is_a_greeting_of_this_run_or_refused(fuzz: Fuzz) -> None:
    """Only the true fields are accepted, by type too; a refusal is text."""

    def judge_any(changes: dict[str, object]) -> None:
        theirs = MINE.as_dict() | {"rank": 1} | changes
        reason = refusal_reason(MINE, theirs)
        assert isinstance(reason, str)
        if not reason:
            assert theirs["run"] == "job-1"
            assert theirs["rank"] == 1
            assert type(theirs["rank"]) is int

    fuzz(
        st.dictionaries(st.sampled_from([*MINE.as_dict(), "lane"]), JSON),
        judge_any,
        examples=EXAMPLES,
        whole_examples=WHOLE_EXAMPLES,
    )


def test_any_bytes_end_a_greeting_in_either_role(fuzz: Fuzz) -> None:
    """The error is one of the tree, or of the connection."""

    def greet_any(data: bytes) -> None:
        for role in (answer_greeting, send_greeting):
            near, far = sockets_with(data)
            with near, far, contextlib.suppress(OSError, IsthmusError):
                role(near, MINE)

    fuzz(st.binary(max_size=5000), greet_any, examples=EXAMPLES, whole_examples=WHOLE_EXAMPLES)


def test_any_answer_of_a_proxy_is_a_tunnel_or_an_error(fuzz: Fuzz) -> None:
    """A proxy that says anything else than a short head with status 2xx is named in an error."""

    def dial_any(answer: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as proxy:

            def reply() -> None:
                with contextlib.suppress(OSError), proxy.accept()[0] as caller:
                    caller.sendall(answer)

            thread = threading.Thread(target=reply)
            thread.start()
            try:
                dial(("127.0.0.1", 9), f"127.0.0.1:{proxy.getsockname()[1]}", 5).close()
                assert answer.startswith(b"HTTP/1.")
            except IsthmusError:
                pass
            thread.join(10)

    answers = st.binary(max_size=300) | st.just(b"HTTP/1.1 200 OK\r\n" + b"x" * 3 * MAX_HEAD_BYTES)
    fuzz(answers, dial_any, examples=40, whole_examples=400)


@pytest.fixture(scope="module")
def proxy() -> Iterator[tuple[str, int]]:
    """Yield the address of the emulated link from east to west."""
    with links_in_background(POOL) as links:
        host, _, port = links.routes["east"]["west"].rpartition(":")
        yield host, int(port)


def test_any_request_is_refused_by_the_proxy_or_closed(proxy: tuple[str, int], fuzz: Fuzz) -> None:
    """A proxy of an emulated link answers with a status of refusal, and serves the next caller."""

    def ask_any(data: bytes) -> None:
        for request in (data, b"CONNECT 10.1.2.3:80 HTTP/1.1"):
            with socket.create_connection(proxy, 10) as caller:
                caller.settimeout(10)
                with contextlib.suppress(ConnectionError):
                    caller.sendall(request + b"\r\n\r\n")
                    answer = caller.recv(100)
                    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
        assert answer.startswith(b"HTTP/1.1 403")

    requests = st.binary(max_size=200) | st.text(max_size=100).map(lambda text: f"CONNECT {text} HTTP/1.1".encode())
    fuzz(requests, ask_any, examples=40, whole_examples=400)
