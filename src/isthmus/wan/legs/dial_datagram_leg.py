"""`dial_datagram_leg`: open a leg over datagrams to a proxy of another site."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from isthmus.core.errors import UnavailableError
from isthmus.core.messages.datagram import Address, Datagram
from isthmus.noise import DatagramCipher, UnauthenticatedError
from isthmus.wan.legs.datagram_leg import DatagramKind, DatagramLeg
from isthmus.wan.legs.dial_leg import DIAL_TIMEOUT_S
from isthmus.wan.legs.leg_greeting import SECOND_BYTES, LegDialler
from isthmus.wan.udp_socket import UdpSocket

PROOF, KNOWN, UNKNOWN = b"proof", b"known", b"unknown"
"""Contents of message 0 of each side: the dialler proves the key now, the listener says whether it has the tunnel."""

_FIRST_WAIT_S, _MOST_WAIT_S = 0.2, 1.0


async def dial_datagram_leg(
    loop: asyncio.AbstractEventLoop, address: Address, greeting: LegDialler, *, error_correction: bool = False
) -> DatagramLeg | None:
    """Return the leg, None if the proxy does not know its tunnel; with `error_correction` both sides send parity.

    Raises `OSError` (also without an answer within `DIAL_TIMEOUT_S`, as with a wrong key).
    """
    place = (await loop.getaddrinfo(*address))[0][4]
    found = str(place[0]), int(place[1])
    host = "::" if ":" in found[0] else "0.0.0.0"  # noqa: S104 - only what the proxy sends is looked at
    try:
        udp = UdpSocket(host)
    except UnavailableError as error:
        raise OSError(str(error)) from error
    dialling = _Dialling(udp, found, greeting, loop, error_correction=error_correction)
    loop.add_reader(udp, dialling.read)
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            leg = await dialling.run()
    except BaseException:
        dialling.shut()
        raise
    if leg is None:
        dialling.shut()
    return leg


class _Dialling:
    """Sends a message until its answer comes; afterwards hands the leg its packets."""

    def __init__(
        self,
        udp: UdpSocket,
        address: Address,
        greeting: LegDialler,
        loop: asyncio.AbstractEventLoop,
        *,
        error_correction: bool,
    ) -> None:
        self._udp, self._address, self._greeting, self._loop = udp, address, greeting, loop
        self._error_correction = error_correction
        self._answer: asyncio.Future[bytes] | None = None
        self._expect: Callable[[bytes], bool] = lambda _: False
        self._ciphers: tuple[DatagramCipher, DatagramCipher] | None = None
        self._verdict = b""
        self._leg: DatagramLeg | None = None

    async def run(self) -> DatagramLeg | None:
        await self._ask(bytes([DatagramKind.FIRST]) + self._greeting.first, self._is_second)
        if self._ciphers is None:
            raise UnauthenticatedError("the listener has not proved the key")
        sending, receiving = self._ciphers
        await self._ask(bytes([DatagramKind.PROOF]) + sending.seal(PROOF), self._is_verdict)
        if self._verdict != KNOWN:
            return None
        self._leg = DatagramLeg(
            self._udp, self._address, sending, receiving, self._loop, self.shut,
            error_correction=self._error_correction,
        )  # fmt: skip
        return self._leg

    def read(self) -> None:
        for datagram in self._udp.receive():
            if datagram.address[:2] != self._address:
                continue
            if self._leg is not None:
                self._leg.take(datagram)
            elif self._answer is not None and not self._answer.done() and self._expect(datagram.data):
                self._answer.set_result(datagram.data)

    def shut(self) -> None:
        if self._udp.fileno() >= 0:
            self._loop.remove_reader(self._udp)
            self._udp.close()

    async def _ask(self, message: bytes, expect: Callable[[bytes], bool]) -> None:
        self._expect, self._answer = expect, self._loop.create_future()
        wait_s = _FIRST_WAIT_S
        while not self._answer.done():
            self._udp.send(Datagram(self._address, message, len(message)))
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._answer), wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)

    def _is_second(self, data: bytes) -> bool:
        if len(data) != 1 + SECOND_BYTES or data[0] != DatagramKind.SECOND:
            return False
        try:
            sending, receiving = self._greeting.read_second(data[1:])
        except UnauthenticatedError:
            return False
        self._ciphers = DatagramCipher(sending), DatagramCipher(receiving)
        return True

    def _is_verdict(self, data: bytes) -> bool:
        if self._ciphers is None or data[:1] != bytes([DatagramKind.VERDICT]):
            return False
        try:
            self._verdict = self._ciphers[1].open(data[1:])
        except UnauthenticatedError:
            return False
        return True
