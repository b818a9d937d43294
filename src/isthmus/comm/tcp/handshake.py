"""`Handshake`: how the connections of a rank are opened: with keys or, on one machine, without; then by RDMA or not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.rdma.open_device import open_device
from isthmus.comm.rdma.upgrade_channel import upgrade_channel
from isthmus.comm.tcp.greeting import Claim, Greeting, answer_greeting, send_greeting
from isthmus.comm.tcp.reconnect import GreetedChannel, GreetedRecords
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

    def dial(self, sock: socket.socket, rank: int, number: int) -> GreetedRecords:
        """Greet; see `Handshake`."""
        del rank
        return PlainChannel(sock), send_greeting(sock, self._mine, self._clock, number)

    def open(self, first: bytes) -> bytes | None:
        """Return the start of the greeting, whatever it is."""
        return first

    def answer(self, sock: socket.socket, opened: bytes, claim: Claim) -> tuple[int, int, GreetedRecords]:
        """Answer; see `Handshake`."""
        rank, number, offset_s = answer_greeting(sock, self._mine, self._clock, claim, opened)
        return rank, number, (PlainChannel(sock), offset_s)


class RdmaHandshake:
    """A `Handshake` whose connections to the ranks of `devices` go on by RDMA, over the device named there."""

    def __init__(self, inner: PlainHandshake | SealedHandshake, devices: Mapping[int, str]) -> None:
        self.first_bytes, self.open = inner.first_bytes, inner.open
        self._inner, self._devices = inner, devices

    def dial(self, sock: socket.socket, rank: int, number: int) -> GreetedChannel:
        """Greet; see `Handshake`. Raises what `upgrade_channel` raises too."""
        return self._upgrade(rank, self._inner.dial(sock, rank, number))

    def answer(self, sock: socket.socket, opened: Any, claim: Claim) -> tuple[int, int, GreetedChannel]:
        """Answer; see `Handshake`."""
        rank, number, greeted = self._inner.answer(sock, opened, claim)
        return rank, number, self._upgrade(rank, greeted)

    def _upgrade(self, rank: int, greeted: GreetedRecords) -> GreetedChannel:
        device = self._devices.get(rank)
        return greeted if device is None else (upgrade_channel(greeted[0], open_device(device), rank), greeted[1])


def make_handshake(
    mine: Greeting, keys: LinkKeys | None, clock: Callable[[], float], rdma: Sequence[str | None]
) -> Handshake:
    """Return the handshake with `keys`, or the one in the clear; `rdma` has the device to each rank, None for TCP.

    Raises `InputError` for a device that this machine lacks.
    """
    inner = PlainHandshake(mine, clock) if keys is None else SealedHandshake(mine, keys, clock)
    devices = {rank: name for rank, name in enumerate(rdma) if name is not None}
    for name in set(devices.values()):
        open_device(name)
    return RdmaHandshake(inner, devices) if devices else inner
