"""`DatagramEntrance`: the UDP port at which proxies of other sites open legs over datagrams.

A stranger gets no byte, and no answer is longer than what asked for it. Who has the key but has not proved to have it
now, as in a recording, costs one of `max_waiting` places for `GREETING_TIMEOUT_S`; when there are too many, the oldest
of the busiest host goes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from isthmus.core.errors import ProtocolError
from isthmus.core.messages.datagram import Address, Datagram
from isthmus.noise import DatagramCipher, UnauthenticatedError
from isthmus.wan.legs.datagram_leg import DatagramKind, DatagramLeg
from isthmus.wan.legs.dial_datagram_leg import KNOWN, PROOF, UNKNOWN
from isthmus.wan.legs.leg_entrance import GREETING_TIMEOUT_S, MAX_WAITING, AdmitLeg
from isthmus.wan.legs.leg_greeting import LegListener, OpenedLeg
from isthmus.wan.udp_socket import UdpSocket

_KEPT_VERDICTS = 256


@dataclass
class _Waiting:
    first: bytes
    opened: OpenedLeg
    sending: DatagramCipher
    receiving: DatagramCipher
    until_s: float


class DatagramEntrance:
    """The entrance at `udp`, which it closes at the end."""

    def __init__(
        self,
        udp: UdpSocket,
        keys: LegListener,
        admit: AdmitLeg,
        loop: asyncio.AbstractEventLoop,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._udp, self._keys, self._admit, self._loop = udp, keys, admit, loop
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[Address, bytes], _Waiting] = {}
        self._legs: dict[Address, DatagramLeg] = {}
        self._verdicts: dict[tuple[Address, bytes], bytes] = {}
        self.num_refused = 0
        """First messages of strangers, and callers that proved no key in time."""
        loop.add_reader(udp, self._read)

    @property
    def num_legs(self) -> int:
        """Legs that are up."""
        return len(self._legs)

    def close(self) -> None:
        """Stop; legs are closed by their owners before."""
        if self._udp.fileno() >= 0:
            self._loop.remove_reader(self._udp)
            self._udp.close()

    def _read(self) -> None:
        for datagram in self._udp.receive():
            kind = datagram.data[:1]
            if kind == bytes([DatagramKind.PACKET]):
                if (leg := self._legs.get(datagram.address)) is not None:
                    leg.take(datagram)
            elif len(datagram.data) == datagram.packet_bytes:
                if kind == bytes([DatagramKind.FIRST]):
                    self._greet(datagram.address, datagram.data[1:])
                elif kind == bytes([DatagramKind.PROOF]):
                    self._prove(datagram.address, datagram.data[1:])

    def _greet(self, address: Address, first: bytes) -> None:
        waiting = self._waiting.get((address, first))
        if waiting is None:
            opened = self._keys.open(first)
            if opened is None:
                self.num_refused += 1
                return
            self._make_room()
            sending, receiving = (DatagramCipher(key) for key in opened.keys)
            until_s = self._loop.time() + GREETING_TIMEOUT_S
            waiting = self._waiting[address, first] = _Waiting(first, opened, sending, receiving, until_s)
        self._answer(address, DatagramKind.SECOND, waiting.opened.second)

    def _prove(self, address: Address, proof: bytes) -> None:
        if (verdict := self._verdicts.get((address, proof))) is not None:
            self._answer(address, DatagramKind.VERDICT, verdict)  # the first one was lost
            return
        for (place, first), waiting in list(self._waiting.items()):
            if place == address and _proves(waiting, proof):
                del self._waiting[place, first]
                self._open(address, proof, waiting)
                return

    def _open(self, address: Address, proof: bytes, waiting: _Waiting) -> None:
        try:
            take = self._admit(waiting.opened)
        except ProtocolError:  # no answer: the dialler tries again later
            self.num_refused += 1
            return
        verdict = waiting.sending.seal(KNOWN if take is not None else UNKNOWN)
        self._verdicts[address, proof] = verdict
        if len(self._verdicts) > _KEPT_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._answer(address, DatagramKind.VERDICT, verdict)
        if take is None:
            return
        if (earlier := self._legs.pop(address, None)) is not None:
            earlier.close()
        leg = DatagramLeg(
            self._udp, address, waiting.sending, waiting.receiving, self._loop, lambda: self._forget(address, leg)
        )
        self._legs[address] = leg
        take(leg)

    def _forget(self, address: Address, leg: DatagramLeg) -> None:
        if self._legs.get(address) is leg:
            del self._legs[address]

    def _make_room(self) -> None:
        now_s = self._loop.time()
        for key in [key for key, one in self._waiting.items() if now_s > one.until_s]:
            del self._waiting[key]
            self.num_refused += 1
        if len(self._waiting) >= self._max_waiting:
            busiest, _ = Counter(address[0] for address, _ in self._waiting).most_common(1)[0]
            del self._waiting[next(key for key in self._waiting if key[0][0] == busiest)]
            self.num_refused += 1

    def _answer(self, address: Address, kind: DatagramKind, content: bytes) -> None:
        message = bytes([kind]) + content
        self._udp.send(Datagram(address, message, len(message)))


def _proves(waiting: _Waiting, proof: bytes) -> bool:
    try:
        return waiting.receiving.open(proof) == PROOF
    except UnauthenticatedError:
        return False
