"""`SealedLink`: an authenticated, encrypted datagram link between two gateways, as a pure state machine.

Source: Noise_NNpsk0 (`isthmus.noise`) with the key that two sites share. A session begins with two datagrams; the
dialler's first record proves the key, so a recording of the first opens nothing. Each session has an index at its
receiver; a new one replaces the old after its first record, and what is on its way under the old still counts.

| kind | fields after kind (1 byte) and three zero bytes |
|---|---|
| 1 first | dialler's index (4), id of the key (16), first message of the handshake |
| 2 second | dialler's index (4), listener's index (4), second message |
| 3 record | receiver's index (4), number (8), encrypted content, tag (16) |
"""

from __future__ import annotations

import hmac
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.noise import DatagramCipher, NoiseHandshake, UnauthenticatedError

FIRST, SECOND, RECORD = 1, 2, 3
KEY_ID_BYTES = 16
RECORD_OVERHEAD_BYTES = 32
"""Bytes of a record beyond its content."""

HELLO_INTERVAL_S = 0.25
KEEPALIVE_S = 0.2
SILENCE_S = 0.6
"""Time without a record after which the dialler opens another session."""

RENEW_RECORDS = 2**31
RENEW_S = 3600.0
MAX_UNPROVEN = 8
MIN_ANSWER_INTERVAL_S = 0.02
"""Shortest time between answers to first datagrams: each costs a key exchange."""

_HEAD = struct.Struct("!B3xI")
LinkAddress = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SendDatagram:
    """Send bytes to an address."""

    data: bytes
    address: LinkAddress


@dataclass(frozen=True, slots=True)
class Opened:
    """Content that the other gateway has sent."""

    content: bytes


@dataclass(slots=True)
class _Session:
    own_index: int
    peer_index: int
    sending: DatagramCipher
    receiving: DatagramCipher
    address: LinkAddress
    since_s: float


class SealedLink:
    """One side. `peer_address` is where it dials; without one it waits to be dialled."""

    def __init__(
        self,
        key: bytes,
        sites: tuple[str, str],
        peer_address: LinkAddress | None,
        random_index: Callable[[], int],
    ) -> None:
        """`sites` are this one and the other; `random_index` returns numbers from 0 to 2^32 - 1."""
        self._psk = hmac.digest(key, b"isthmus gateway: handshake", "sha256")
        self._key_id = hmac.digest(key, b"isthmus gateway: key id", "sha256")[:KEY_ID_BYTES]
        self._sites = sites
        self._peer_address, self._random_index = peer_address, random_index
        self._dialling: tuple[int, NoiseHandshake] | None = None
        self._current: _Session | None = None
        self._sessions: dict[int, _Session] = {}
        self._unproven: dict[int, _Session] = {}
        self._dial_s = -math.inf if peer_address is not None else math.inf
        self._sent_s = self._heard_s = self._answered_s = -math.inf
        self.num_refused = self.num_sessions = 0

    @property
    def is_open(self) -> bool:
        """Whether records can be sent."""
        return self._current is not None

    def next_tick_s(self) -> float:
        """Return when `tick` is due."""
        return min(self._dial_s, self._sent_s + KEEPALIVE_S if self._current is not None else math.inf)

    def seal(self, content: bytes, now_s: float) -> SendDatagram | None:
        """Return the record that carries `content`; None while no session is open."""
        session = self._current
        if session is None:
            return None
        self._sent_s = now_s
        return SendDatagram(_HEAD.pack(RECORD, session.peer_index) + session.sending.seal(content), session.address)

    def tick(self, now_s: float) -> list[SendDatagram]:
        """Return what is due: the first datagram of a session, or a record that shows life."""
        found: list[SendDatagram] = []
        if now_s >= self._dial_s:
            found += self._dial(now_s)
        if self._current is not None and now_s >= self._sent_s + KEEPALIVE_S:
            alive = self.seal(b"", now_s)
            found += [alive] if alive is not None else []
        return found

    def is_addressed(self, data: bytes) -> bool:
        """Return whether a datagram is for this link: by its index, or by the key that it names."""
        if len(data) < _HEAD.size:
            return False
        kind, index = _HEAD.unpack_from(data)
        if kind == FIRST:
            return data[_HEAD.size : _HEAD.size + KEY_ID_BYTES] == self._key_id
        if kind == SECOND:
            return self._dialling is not None and self._dialling[0] == index
        return index in self._sessions or index in self._unproven

    def receive(self, data: bytes, address: LinkAddress, now_s: float) -> list[SendDatagram | Opened]:
        """Return what a datagram carries, or what to answer; nothing for a stranger's."""
        if len(data) < _HEAD.size or data[1:4] != bytes(3):
            self.num_refused += 1
            return []
        kind, index = _HEAD.unpack_from(data)
        try:
            if kind == RECORD:
                return self._receive_record(index, data[_HEAD.size :], address, now_s)
            if kind == FIRST:
                return self._receive_first(index, data[_HEAD.size :], address, now_s)
            if kind == SECOND:
                return self._receive_second(index, data[_HEAD.size :], address, now_s)
        except (UnauthenticatedError, ValueError, struct.error):
            pass
        self.num_refused += 1
        return []

    # Sessions

    def _dial(self, now_s: float) -> list[SendDatagram]:
        session = self._current
        if self._peer_address is None:
            return []
        if session is not None:
            is_old = now_s - session.since_s >= RENEW_S or session.sending.num_sealed >= RENEW_RECORDS
            if now_s - self._heard_s < SILENCE_S and not is_old:
                self._dial_s = now_s + SILENCE_S / 2
                return []
        index = self._random_index()
        noise = NoiseHandshake(self._psk, _prologue(*self._sites))
        self._dialling = index, noise
        self._dial_s = now_s + HELLO_INTERVAL_S
        return [SendDatagram(_HEAD.pack(FIRST, index) + self._key_id + noise.write_first(b""), self._peer_address)]

    def _receive_first(
        self, index: int, body: bytes, address: LinkAddress, now_s: float
    ) -> list[SendDatagram | Opened]:
        if body[:KEY_ID_BYTES] != self._key_id or now_s - self._answered_s < MIN_ANSWER_INTERVAL_S:
            raise UnauthenticatedError("a first datagram of a stranger, or too soon")
        self._answered_s = now_s
        noise = NoiseHandshake(self._psk, _prologue(*reversed(self._sites)))
        noise.read_first(body[KEY_ID_BYTES:])
        second = noise.write_second(b"")
        receiving, sending = noise.split_keys()
        own = self._random_index()
        session = _Session(own, index, DatagramCipher(sending), DatagramCipher(receiving), address, now_s)
        self._unproven[own] = session
        while len(self._unproven) > MAX_UNPROVEN:
            del self._unproven[next(iter(self._unproven))]
        return [SendDatagram(_HEAD.pack(SECOND, index) + own.to_bytes(4, "big") + second, address)]

    def _receive_second(
        self, index: int, body: bytes, address: LinkAddress, now_s: float
    ) -> list[SendDatagram | Opened]:
        if self._dialling is None or self._dialling[0] != index:
            raise UnauthenticatedError("an answer to nothing")
        noise, peer_index = self._dialling[1], int.from_bytes(body[:4], "big")
        self._dialling = None  # an answer that fails has spoiled the handshake's state
        noise.read_second(body[4:])
        sending, receiving = noise.split_keys()
        session = _Session(index, peer_index, DatagramCipher(sending), DatagramCipher(receiving), address, now_s)
        self._adopt(session, now_s)
        self._dial_s = now_s + SILENCE_S
        proof = self.seal(b"", now_s)
        return [proof] if proof is not None else []

    def _receive_record(
        self, index: int, body: bytes, address: LinkAddress, now_s: float
    ) -> list[SendDatagram | Opened]:
        session = self._sessions.get(index) or self._unproven.get(index)
        if session is None:
            raise UnauthenticatedError("a record of no session")
        content = session.receiving.open(body)
        self._heard_s = now_s
        session.address = address
        if index in self._unproven:
            del self._unproven[index]
            self._adopt(session, now_s)
        return [Opened(content)] if content else []

    def _adopt(self, session: _Session, now_s: float) -> None:
        """Send by a session from now on; take records of it and of the one before it."""
        self.num_sessions += 1
        previous = self._current
        self._sessions = {one.own_index: one for one in (previous, session) if one is not None}
        self._current, self._heard_s = session, now_s


def _prologue(dialler: str, listener: str) -> bytes:
    return json.dumps(["isthmus gateway 1", dialler, listener]).encode()
