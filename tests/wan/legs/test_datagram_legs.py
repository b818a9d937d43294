"""Legs over datagrams: the conformance kit, also over a line that loses, and what strangers and recordings get."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import pytest

from isthmus.core.messages.datagram import Address, Datagram
from isthmus.noise import DatagramCipher
from isthmus.wan.legs.check_leg import check_leg
from isthmus.wan.legs.datagram_entrance import DatagramEntrance
from isthmus.wan.legs.datagram_leg import DatagramKind, DatagramLeg
from isthmus.wan.legs.dial_datagram_leg import dial_datagram_leg
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_greeting import LegListener
from isthmus.wan.udp_socket import UdpSocket
from tests.wan.legs.test_legs import KEY, Admitted, greeting


class Network(asyncio.DatagramProtocol):
    """Stands between a dialler and the entrance: loses datagrams by seed, and keeps copies."""

    def __init__(self, far: Address, loss: float, seed: int = 1) -> None:
        self._far, self._loss, self._rng = far, loss, random.Random(seed)
        self._near: Address | None = None
        self.seen: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Address) -> None:
        if address != self._far:
            self._near = address
        to = self._near if address == self._far else self._far
        self.seen.append(data)
        if to is not None and self._rng.random() >= self._loss:
            self.transport.sendto(data, to)


@asynccontextmanager
async def entrance(
    loss: float | None = None, max_waiting: int = 8
) -> AsyncIterator[tuple[DatagramEntrance, Admitted, Address, Network | None]]:
    """Run the entrance of nanjing, behind a network where `loss` is given."""
    admitted, loop = Admitted(), asyncio.get_running_loop()
    udp = UdpSocket("127.0.0.1", batches=loss is None)
    address, network = udp.address, None
    found = DatagramEntrance(udp, LegListener("nanjing", {"hangzhou": KEY}), admitted, loop, max_waiting)
    if loss is not None:
        made = network = Network(address, loss)
        transport, _ = await loop.create_datagram_endpoint(lambda: made, local_addr=("127.0.0.1", 0))
        address = transport.get_extra_info("sockname")
    try:
        yield found, admitted, address, network
    finally:
        found.close()
        if network is not None:
            network.transport.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("loss", [None, 0.0, 0.05])
def test_a_datagram_leg_is_a_leg(loss: float | None) -> None:
    """It passes the kit of the seam, in batches, one by one, and where datagrams are lost."""

    async def run() -> None:
        async with AsyncExitStack() as stack:

            async def joined() -> tuple[DatagramLeg, Leg]:
                _, admitted, address, _ = await stack.enter_async_context(entrance(loss))
                dialled = await dial_datagram_leg(asyncio.get_running_loop(), address, greeting())
                assert dialled is not None
                return dialled, await admitted.legs.get()

            await check_leg(joined, 12 if loss is None else 6)

    asyncio.run(run())


def test_a_leg_of_an_unknown_tunnel_is_not_taken() -> None:
    """The dialler learns it, and nothing is admitted."""

    async def run() -> None:
        async with entrance() as (found, admitted, address, _):
            assert await dial_datagram_leg(asyncio.get_running_loop(), address, greeting(is_new=False)) is None
            assert admitted.legs.empty()
            assert found.num_legs == 0

    asyncio.run(run())


def test_a_greeting_survives_loss() -> None:
    """Half of all datagrams are lost: each message is sent until its answer comes, and one leg opens."""

    async def run() -> None:
        async with entrance(0.5) as (found, admitted, address, _):
            leg = await dial_datagram_leg(asyncio.get_running_loop(), address, greeting())
            assert leg is not None
            assert (len(admitted.opened), found.num_legs) == (1, 1)
            leg.close()
            (await admitted.legs.get()).close()
            assert found.num_legs == 0

    asyncio.run(run())


async def answers(address: Address, *messages: bytes, wait_s: float = 0.1) -> list[bytes]:
    """Send datagrams from a port of a stranger's; return what comes back."""
    loop, found = asyncio.get_running_loop(), []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        for message in messages:
            sock.sendto(message, address)
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    found.append(await loop.sock_recv(sock, 4096))
        except TimeoutError:
            return found


@pytest.mark.attack
def test_a_stranger_gets_no_byte() -> None:
    """Any datagram without the key: no answer, no leg, and the entrance goes on."""

    async def run() -> None:
        async with entrance() as (found, admitted, address, _):
            others = greeting(os.urandom(32)).first, greeting(sites=("nanjing", "hangzhou")).first
            kinds = [bytes([kind]) + os.urandom(90) for kind in range(8)]
            first = bytes([DatagramKind.FIRST])
            assert await answers(address, b"", *kinds, *(first + one for one in others)) == []
            assert found.num_refused == 3
            assert not admitted.opened

    asyncio.run(run())


@pytest.mark.attack
def test_a_recorded_greeting_admits_nothing() -> None:
    """1. A stranger records a dialler's datagrams. 2. It plays them back: one answer, shorter than the question."""

    async def run() -> None:
        async with entrance(0.0) as (found, admitted, address, network):
            leg = await dial_datagram_leg(asyncio.get_running_loop(), address, greeting())
            assert leg is not None
            assert network is not None
            sent = [one for one in network.seen if one[0] in (DatagramKind.FIRST, DatagramKind.PROOF)]
            played = await answers(found._udp.address, *sent)
            assert [one[0] for one in played] == [DatagramKind.SECOND]
            assert len(played[0]) < len(sent[0])
            assert (len(admitted.opened), found.num_legs) == (1, 1)
            leg.close()
            (await admitted.legs.get()).close()

    asyncio.run(run())


@pytest.mark.attack
def test_silent_callers_keep_no_proxy_out() -> None:
    """More unproven callers than may wait: the oldest go, and a proxy gets in."""

    async def run() -> None:
        async with entrance(max_waiting=4) as (found, admitted, address, _):
            first = bytes([DatagramKind.FIRST])
            assert len(await answers(address, *(first + greeting().first for _ in range(12)))) == 12
            leg = await dial_datagram_leg(asyncio.get_running_loop(), address, greeting())
            assert leg is not None
            assert found.num_refused == 8 + 1
            leg.close()
            (await admitted.legs.get()).close()

    asyncio.run(run())


@pytest.mark.attack
def test_forged_packets_do_nothing() -> None:
    """From the far side's own address, also old ones again: they are counted and dropped, the leg goes on."""

    async def run() -> None:
        async with entrance() as (_, admitted, address, _):
            loop = asyncio.get_running_loop()
            dialled = await dial_datagram_leg(loop, address, greeting())
            assert dialled is not None
            far = await admitted.legs.get()
            assert isinstance(far, DatagramLeg)

            async def same() -> tuple[DatagramLeg, DatagramLeg]:
                packet = bytes([DatagramKind.PACKET])
                for number in range(50):
                    forged = packet + number.to_bytes(8, "big") + os.urandom(40)
                    loop.call_later(0.001 * number, far.take, Datagram(address, forged, len(forged)))
                return dialled, far

            from isthmus.wan.legs import check_leg as kit

            await kit._check_frames(same, 4)
            assert far.num_refused > 0

    asyncio.run(run())


def test_a_second_answer_that_is_forged_does_not_end_the_dialling() -> None:
    """Who guesses the dialler's port sends an answer without the key; the listener's own still counts."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with closing(UdpSocket("127.0.0.1")) as udp:
            dialling = loop.create_task(dial_datagram_leg(loop, udp.address, greeting()))
            keys, opened = LegListener("nanjing", {"hangzhou": KEY}), None
            while opened is None:
                await asyncio.sleep(0.01)
                for one in udp.receive():
                    opened = keys.open(one.data[1:])
                    for second in (os.urandom(48), b"", opened.second if opened else b""):
                        message = bytes([DatagramKind.SECOND]) + second
                        udp.send(Datagram(one.address, message, len(message)))
            proof = None
            while proof is None:
                await asyncio.sleep(0.01)
                proof = next((one for one in udp.receive() if one.data[0] == DatagramKind.PROOF), None)
            assert DatagramCipher(opened.keys[1]).open(proof.data[1:]) == b"proof"
            dialling.cancel()

    asyncio.run(run())
