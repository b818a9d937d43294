"""Greetings with keys: the handshake of `noise_handshake` around a `Greeting`, and what a stranger gets: nothing.

1. The dialler sends the id of the key, its ephemeral key, and its greeting, encrypted.
2. A listener that cannot decrypt it closes the connection without an answer. Else it sends its own ephemeral key.
3. The dialler proves that it holds the key now, by the first record under the keys of this connection: a recorded
   handshake ends here, before it has claimed a rank or named a later incarnation.
4. The listener answers whether it takes the connection; then both compare their clocks.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.comm.channel.link_keys import KEY_ID_BYTES, LinkKeys
from isthmus.comm.channel.receive_exactly import receive_exactly
from isthmus.comm.channel.sealed_channel import SealedChannel
from isthmus.comm.tcp.greeting import Claim, Greeting, answer_clock, measure_clock
from isthmus.comm.tcp.reconnect import GreetedRecords
from isthmus.comm.tcp.wire_format import FORMAT_VERSION
from isthmus.core.errors import PeerError, ProtocolError, RestartError, UnavailableError
from isthmus.noise import KEY_BYTES, TAG_BYTES, NoiseHandshake, UnauthenticatedError

_GREETING = struct.Struct("!HBIIIQ")
"""Format version, whether little-endian, rank, size, number of the connection, incarnation."""

_VERDICT = struct.Struct("!BQ")
_ACCEPTED, _TAKEN, _OTHER_INCARNATION, _OTHER_VERSION, _OTHER_RUN = range(5)

FIRST_BYTES = KEY_ID_BYTES + KEY_BYTES + _GREETING.size + TAG_BYTES
_SECOND_BYTES = KEY_BYTES + TAG_BYTES
_PROOF = b"isthmus"


@dataclass(frozen=True)
class OpenedGreeting:
    """A first message that was encrypted with a key of this run."""

    site: str
    """The site that holds the key besides ours."""
    version: int
    little_endian: bool
    rank: int
    size: int
    number: int
    incarnation: int
    noise: NoiseHandshake


class SealedHandshake:
    """Opens connections of the rank of `mine` with `keys`; a `Handshake`."""

    first_bytes = FIRST_BYTES

    def __init__(self, mine: Greeting, keys: LinkKeys, clock: Callable[[], float]) -> None:
        self._mine, self._keys, self._clock = mine, keys, clock

    def dial(self, sock: socket.socket, rank: int, number: int) -> GreetedRecords:
        """Greet the dialled `rank` for connection `number`; raises like `send_greeting`."""
        mine, site = self._mine, self._keys.sites[rank]
        noise = NoiseHandshake(self._keys.psk(site), self._prologue(self._keys.site, site, rank))
        identity = FORMAT_VERSION, sys.byteorder == "little", mine.rank, mine.size, number, mine.incarnation
        sock.sendall(self._keys.key_id(site) + noise.write_first(_GREETING.pack(*identity)))
        second = bytearray(_SECOND_BYTES)
        receive_exactly(sock, memoryview(second))
        noise.read_second(bytes(second))
        sending, receiving = noise.split()
        channel = SealedChannel(sock, sending, receiving)
        channel.write([_PROOF])
        verdict = bytearray(_VERDICT.size)
        channel.read_into(memoryview(verdict))
        self._check_verdict(*_VERDICT.unpack(verdict))
        return channel, measure_clock(channel, self._clock)

    def open(self, first: bytes) -> OpenedGreeting | None:
        """Return the greeting in a first message; None for a stranger's or a repeated one."""
        key_id, message = first[:KEY_ID_BYTES], first[KEY_ID_BYTES:]
        site = self._keys.site_of_key(key_id)
        if site is None:
            return None
        noise = NoiseHandshake(self._keys.psk(site), self._prologue(site, self._keys.site, self._mine.rank))
        try:
            content = noise.read_first(message)
        except UnauthenticatedError:
            return None
        if not self._keys.is_first_use(message[:KEY_BYTES]):
            return None
        version, little, rank, size, number, incarnation = _GREETING.unpack(content)
        return OpenedGreeting(site, version, bool(little), rank, size, number, incarnation, noise)

    def answer(self, sock: socket.socket, opened: OpenedGreeting, claim: Claim) -> tuple[int, int, GreetedRecords]:
        """Answer `opened`; return rank, number of the connection, and the connection; raises like `answer_greeting`.

        Nothing is claimed and no incarnation counts before the dialler has proved the key.
        """
        sock.sendall(opened.noise.write_second(b""))
        receiving, sending = opened.noise.split()
        channel = SealedChannel(sock, sending, receiving)
        proof = bytearray(len(_PROOF))
        channel.read_into(memoryview(proof))
        verdict = self._judge(opened, claim)
        channel.write([_VERDICT.pack(verdict, FORMAT_VERSION if verdict == _OTHER_VERSION else self._mine.incarnation)])
        if verdict == _OTHER_INCARNATION and opened.incarnation > self._mine.incarnation:
            raise RestartError(f"rank {opened.rank} has restarted", incarnation=opened.incarnation)
        if verdict == _TAKEN:
            raise UnavailableError(f"rejected a greeting of rank {opened.rank} at {opened.site} for now")
        if verdict != _ACCEPTED:
            raise ProtocolError(f"rejected a greeting of rank {opened.rank} at {opened.site}: verdict {verdict}")
        return opened.rank, opened.number, (channel, answer_clock(channel, self._clock))

    def _judge(self, opened: OpenedGreeting, claim: Claim) -> int:
        mine, sites = self._mine, self._keys.sites
        if opened.version != FORMAT_VERSION:
            return _OTHER_VERSION
        is_peer = opened.size == mine.size == len(sites) and opened.rank != mine.rank and opened.rank < mine.size
        same_order = opened.little_endian == (sys.byteorder == "little")
        if not (is_peer and same_order and sites[opened.rank] == opened.site):
            return _OTHER_RUN
        if opened.incarnation != mine.incarnation:
            return _OTHER_INCARNATION
        return _ACCEPTED if claim(opened.rank, opened.number) else _TAKEN

    def _check_verdict(self, verdict: int, number: int) -> None:
        """Raise the error of a verdict other than acceptance; `number` is the listener's incarnation or version."""
        who = f"the worker dialled by rank {self._mine.rank}"
        if verdict == _OTHER_INCARNATION and number > self._mine.incarnation:
            raise RestartError(f"{who} has restarted", incarnation=number)
        if verdict in (_TAKEN, _OTHER_INCARNATION):
            raise UnavailableError(f"{who} refused: it is not ready for this connection yet")
        if verdict == _OTHER_VERSION:
            raise ProtocolError(
                f"{who} has link format {number}, this one {FORMAT_VERSION}", hint="use the same release at all sites"
            )
        if verdict != _ACCEPTED:
            raise PeerError(f"{who} refused: rank, size or byte order do not fit its run")

    def _prologue(self, dialler: str, listener: str, rank: int) -> bytes:
        """Return what both sides know besides the key; a message to one rank opens nothing at another."""
        return json.dumps(["isthmus link", self._mine.run, self._mine.attempt, dialler, listener, rank]).encode()
