"""Rules of the entrance: who makes room, what a caller without a greeting gets, and that all ends with it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.tcp.entrance import Admit, Entrance, evicted_place
from isthmus.comm.tcp.greeting import Claim
from isthmus.comm.tcp.reconnect import GreetedChannel


@pytest.mark.parametrize(
    ("addresses", "place"),
    [("a", 0), ("abc", 0), ("abb", 1), ("abbaa", 0), ("mssss", 1), ("smsm", 0)],
)
def test_the_address_with_the_most_connections_makes_room(addresses: str, place: int) -> None:
    """Its oldest connection goes; between equals, the oldest of all."""
    assert evicted_place(addresses) == place


class Fixed:
    """A handshake whose greeting is the two bytes `hi`; an entrance answers and never dials."""

    first_bytes = 2

    def dial(self, sock: socket.socket, rank: int, number: int) -> GreetedChannel:
        raise AssertionError(f"an entrance has dialled rank {rank}")

    def open(self, first: bytes) -> str | None:
        return "hi" if first == b"hi" else None

    def answer(self, sock: socket.socket, opened: str, claim: Claim) -> tuple[int, int, GreetedChannel]:
        assert claim(1, 0)
        sock.sendall(b"ok")
        return 1, 0, (PlainChannel(sock), 0.0)


class Place:
    """An entrance, what it admitted, and which addresses it refused."""

    def __init__(self, max_waiting: int, admit: Admit | None = None) -> None:
        self.admitted: list[GreetedChannel] = []
        self.refused: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.entered = threading.Event()
        self.entrance = Entrance(
            self.listener, Fixed(), admit or self._admit, on_refused=self.refused.append, max_waiting=max_waiting
        )

    def _admit(self, _rank: int, _number: int, greeted: GreetedChannel) -> bool:
        self.admitted.append(greeted)
        self.entered.set()
        return True

    def call(self, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """Return a connection from `source` that the entrance has read."""
        caller = socket.create_connection(self.listener.getsockname(), source_address=(source, 0))
        caller.settimeout(10)
        caller.sendall(data)
        self.entrance.poll(5)
        return caller


@contextmanager
def place(max_waiting: int = 3, admit: Admit | None = None) -> Iterator[Place]:
    made = Place(max_waiting, admit)
    try:
        yield made
    finally:
        made.entrance.close()
        made.listener.close()
        for channel, _ in made.admitted:
            channel.close()


def test_a_caller_is_admitted_only_with_a_greeting() -> None:
    """One with other bytes is closed without an answer and counted; one that sends nothing and closes is not."""
    with place() as here:
        with here.call(b"hi") as member:
            assert member.recv(10) == b"ok"
            assert here.entered.wait(10)
        with here.call(b"no") as stranger:
            assert stranger.recv(10) == b""
        here.call().close()
        here.entrance.poll(5)
        assert here.refused == ["127.0.0.1"]
        assert len(here.admitted) == 1


@pytest.mark.parametrize("error", [None, OSError("broken meanwhile")])
def test_a_channel_that_is_not_admitted_is_closed(error: OSError | None) -> None:
    """Not its socket only: a channel by RDMA has a queue pair and a thread."""
    closed = threading.Event()

    def admit(_rank: int, _number: int, greeted: GreetedChannel) -> bool:
        sock = greeted[0].socket
        greeted[0].close = lambda: (sock.close(), closed.set())  # type: ignore[method-assign]
        if error is not None:
            raise error
        return False

    with place(admit=admit) as here, here.call(b"hi"):
        assert closed.wait(10)


def test_a_crowd_of_one_address_displaces_only_itself() -> None:
    """A member of another address that has waited longest keeps its place and is then admitted."""
    with place() as here, here.call(b"h", source="127.0.0.2") as member:
        crowd = [here.call() for _ in range(20)]
        assert here.refused == ["127.0.0.1"] * 18
        member.sendall(b"i")
        here.entrance.poll(5)
        assert member.recv(10) == b"ok"
        for one in crowd:
            one.close()


def test_closing_ends_what_waits() -> None:
    """No connection and no thread stays, and the listener stays open."""
    with place() as here:
        waiting = here.call(b"h")
        here.entrance.close()
        assert waiting.recv(10) == b""
        assert here.listener.fileno() >= 0
        waiting.close()
        here.entrance = Entrance(here.listener, Fixed(), lambda *_: True)
