"""Dialling: directly, through a CONNECT proxy, and what is said when either cannot be had."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError, PeerError, UnavailableError
from isthmus.wan import listen, local_address
from isthmus.wan.dial import dial, format_address, parse_address


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Accept one connection, hand it to `answer`, close it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join(10)


def closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        return host, port


def read_all(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


@given(st.sampled_from(["127.0.0.1", "::1", "worker-3.site"]), st.integers(1, 65535))
def test_addresses_survive_a_round_trip_through_text(host: str, port: int) -> None:
    """What `format_address` writes, `parse_address` reads back."""
    assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:-1"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    """Anything but host:port is an input error that shows what to write."""
    with pytest.raises(InputError, match=r"127\.0\.0\.1:7001"):
        parse_address(text)


def test_without_a_route_the_peer_is_dialled_directly() -> None:
    """The socket is connected, blocking, and sends small messages at once."""
    with serving(lambda c: c.sendall(c.recv(3))) as address, dial(address, None) as connection:
        assert connection.gettimeout() is None
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.sendall(b"abc")
        assert connection.recv(3) == b"abc"


def test_bytes_that_follow_the_answer_at_once_are_left_for_the_caller() -> None:
    """`dial` reads the head of the answer and not one byte more, also when it comes in pieces."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        for piece in (b"HTTP/1.1 200 OK\r\n", b"\r", b"\nhello"):
            connection.sendall(piece)

    with serving(answer) as proxy, dial(("10.0.0.9", 5), format_address(*proxy)) as connection:
        assert read_all(connection) == b"hello"


def test_the_request_names_the_peer() -> None:
    """The proxy is asked for host:port in both the request line and Host (RFC 9110, section 9.3.6)."""
    asked: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        asked.append(connection.recv(1000))
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    with serving(answer) as proxy, dial(("::1", 5), format_address(*proxy)):
        pass
    assert asked == [b"CONNECT [::1]:5 HTTP/1.1\r\nHost: [::1]:5\r\n\r\n"]


def test_a_refused_peer_is_a_peer_error() -> None:
    """Direct or behind a proxy, a peer that is not there is named, with what to do."""
    address = closed_port()
    with pytest.raises(PeerError, match=f":{address[1]} cannot be reached.*check") as caught:
        dial(address, None)
    assert caught.value.hint

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")

    with serving(refuse) as proxy, pytest.raises(PeerError, match="502 Bad Gateway"):
        dial(address, format_address(*proxy))


def test_a_route_that_is_not_there_is_an_unavailable_error_but_no_peer_error() -> None:
    """The fault of the route is not put on the peer."""
    with pytest.raises(UnavailableError, match=r"route .* cannot be reached") as caught:
        dial(("127.0.0.1", 1), format_address(*closed_port()))
    assert not isinstance(caught.value, PeerError)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"SSH-2.0-x\r\n\r\n", "is not an HTTP CONNECT proxy"),
        (b"", "closed before it answered"),
        (b"x" * 9000, "is no"),
    ],
)
def test_a_route_that_is_no_proxy_is_named(reply: bytes, message: str) -> None:
    """Another protocol, a silent close, or an endless head: each has its error, none hangs."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(reply)

    with serving(answer) as proxy, pytest.raises(UnavailableError, match=message):
        dial(("127.0.0.1", 1), format_address(*proxy))


def test_a_route_that_never_answers_ends_with_the_time_out() -> None:
    """`timeout_s` bounds the wait for the proxy's answer."""
    done = threading.Event()

    def say_nothing(_: socket.socket) -> None:
        done.wait(10)

    with serving(say_nothing) as proxy:
        try:
            with pytest.raises(UnavailableError, match="timed out"):
                dial(("127.0.0.1", 1), format_address(*proxy), timeout_s=0.05)
        finally:
            done.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "0.0.0.0", "no such host.invalid", ""])
def test_an_address_of_this_machine_or_none_at_all_stays(host: str) -> None:
    """Only an address of another machine is replaced; what is wrong is left for `listen` to name."""
    assert local_address(host) == host


def test_an_address_of_another_machine_is_never_listened_at() -> None:
    """The documentation's network 192.0.2.0/24 is nowhere: either there is no route, or the own end of one is bound."""
    found = local_address("192.0.2.1")
    if found != "192.0.2.1":
        listen(found).close()
