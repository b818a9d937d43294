"""`Handshake`: how the connections of a rank are opened, with keys or, on one machine, without."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.tcp.greeting import Claim, Greeting, answer_greeting, send_greeting
from isthmus.comm.tcp.reconnect import GreetedChannel
from isthmus.comm.tcp.sealed_greeting import SealedHandshake


class Handshake(Protocol):
    """Opens connections in both roles. The first `first_bytes` of a dialler decide whether it is answered."""

    first_bytes: int

    def dial(self, sock: socket.socket, rank: int, number: int) -> GreetedChannel:
        """Greet the dialled `rank` for connection `number`; raises like `send_greeting`."""

    def open(self, first: bytes) -> Any | None:
        """Return the greeting that begins with `first`, None if it gets no answer."""

    def answer(self, sock: socket.socket, opened: Any, claim: Claim) -> tuple[int, int, GreetedChannel]:
        """Answer the greeting `opened`; return rank, number and connection; raises like `answer_greeting`."""


class PlainHandshake:
    """A `Handshake` in the clear."""

    first_bytes = 1

    def __init__(self, mine: Greeting, clock: Callable[[], float]) -> None:
        self._mine, self._clock = mine, clock

    def dial(self, sock: socket.socket, rank: int, number: int) -> GreetedChannel:
        """Greet; see `Handshake`."""
        del rank
        return PlainChannel(sock), send_greeting(sock, self._mine, self._clock, number)

    def open(self, first: bytes) -> bytes | None:
        """Return the start of the greeting, whatever it is."""
        return first

    def answer(self, sock: socket.socket, opened: bytes, claim: Claim) -> tuple[int, int, GreetedChannel]:
        """Answer; see `Handshake`."""
        rank, number, offset_s = answer_greeting(sock, self._mine, self._clock, claim, opened)
        return rank, number, (PlainChannel(sock), offset_s)


def make_handshake(mine: Greeting, keys: LinkKeys | None, clock: Callable[[], float]) -> Handshake:
    """Return the handshake with `keys`, or the one in the clear."""
    return PlainHandshake(mine, clock) if keys is None else SealedHandshake(mine, keys, clock)
