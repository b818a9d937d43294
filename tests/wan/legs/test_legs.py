"""Legs over TCP: the conformance kit, what strangers get, and what forged records do."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.noise import CipherState
from isthmus.wan.legs.check_leg import check_leg
from isthmus.wan.legs.dial_leg import connect_tcp, dial_leg
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_entrance import LegEntrance
from isthmus.wan.legs.leg_greeting import FIRST_BYTES, LegDialler, LegListener, OpenedLeg
from isthmus.wan.legs.tcp_leg import TcpLeg
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame

KEY = bytes(range(32))
OLDER_ID = hmac.digest(KEY, b"isthmus proxy: key id", "sha256")[:16]
"""What a proxy of the release before sends first."""
TUNNEL = b"t" * 16
SITES = "hangzhou", "nanjing"


def greeting(key: bytes = KEY, *, is_new: bool = True, sites: tuple[str, str] = SITES) -> LegDialler:
    """Return the first leg of a tunnel from hangzhou to nanjing."""
    return LegDialler(key, sites, TUNNEL, 0, is_new=is_new)


def dial_to(address: tuple[str, int], greeting: LegDialler) -> Awaitable[Leg | None]:
    """Dial a leg over TCP."""
    loop = asyncio.get_running_loop()
    return dial_leg(loop, lambda: connect_tcp(loop, address), greeting)


class Admitted:
    """Takes every leg of a new tunnel."""

    def __init__(self) -> None:
        self.legs: asyncio.Queue[Leg] = asyncio.Queue()
        self.opened: list[OpenedLeg] = []

    def __call__(self, opened: OpenedLeg) -> object:
        self.opened.append(opened)
        return self.legs.put_nowait if opened.is_new else None


@asynccontextmanager
async def entrance(max_waiting: int = 8) -> AsyncIterator[tuple[LegEntrance, Admitted, tuple[str, int]]]:
    """Run the entrance of nanjing, which shares `KEY` with hangzhou."""
    admitted, listener = Admitted(), socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    keys = LegListener("nanjing", {"hangzhou": KEY})
    found = LegEntrance(listener, keys, admitted, asyncio.get_running_loop(), max_waiting)
    try:
        yield found, admitted, address
    finally:
        found.close()
        await asyncio.sleep(0)


async def joined_legs() -> tuple[Leg, Leg]:
    """Return both ends of a leg."""
    async with entrance() as (_, admitted, address):
        dialled = await dial_to(address, greeting())
        assert dialled is not None
        return dialled, await admitted.legs.get()


def test_a_tcp_leg_is_a_leg() -> None:
    """It passes the kit of the seam."""
    asyncio.run(check_leg(joined_legs))


def test_a_leg_of_an_unknown_tunnel_is_not_taken() -> None:
    """A proxy that restarted does not know the tunnel: the dialler learns it, and nothing is admitted."""

    async def run() -> None:
        async with entrance() as (_, admitted, address):
            assert await dial_to(address, greeting(is_new=False)) is None
            assert admitted.legs.empty()

    asyncio.run(run())


@pytest.mark.parametrize(
    "dialler", [greeting(os.urandom(32)), greeting(sites=("nanjing", "hangzhou")), greeting(sites=("hangzhou", "x"))]
)
def test_another_key_or_site_gets_no_byte(dialler: LegDialler) -> None:
    """The connection closes before the listener has sent anything."""

    async def run() -> None:
        async with entrance() as (found, admitted, address):
            with pytest.raises(ConnectionResetError, match="another key, site or release"):
                await dial_to(address, dialler)
            assert not admitted.opened
            assert found.num_refused == 1

    asyncio.run(run())


def test_a_proxy_of_another_release_is_told_from_a_stranger(caplog: pytest.LogCaptureFixture) -> None:
    """It gets no byte, before any frame that it would misread; the log names site and versions, once."""
    older = OLDER_ID + greeting().first[len(OLDER_ID) :]
    listener = LegListener("nanjing", {"hangzhou": KEY})
    assert [listener.open(older) for _ in range(3)] == [None] * 3
    (line,) = caplog.messages
    assert "the proxy of hangzhou opens legs by version 1, this one by 2" in line
    assert listener.open(greeting().first) is not None


def test_a_recorded_greeting_admits_nothing() -> None:
    """1. A stranger records all bytes of a dialler. 2. It plays them back: without the key its proof fails."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        recorded = greeting()
        async with entrance() as (found, admitted, address):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, recorded.first)
            proof = recorded.proof(await loop.sock_recv(sock, 48))
            await loop.sock_sendall(sock, proof)
            (await admitted.legs.get()).close()
            again = socket.socket()
            again.setblocking(False)
            await loop.sock_connect(again, address)
            await loop.sock_sendall(again, recorded.first + proof)
            while data := await loop.sock_recv(again, 4096):
                assert len(data) <= 48
            assert (len(admitted.opened), found.num_refused) == (1, 1)
            sock.close()
            again.close()

    asyncio.run(run())


@given(st.binary(max_size=2 * FIRST_BYTES))
def test_no_random_bytes_open_a_leg(first: bytes) -> None:
    """Any length, any content: nothing opens, and no other error than None."""
    assert LegListener("nanjing", {"hangzhou": KEY}).open(first) is None


def test_silent_strangers_keep_no_proxy_out() -> None:
    """1. More silent connections than may wait. 2. The oldest ones close. 3. A proxy still gets in."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with entrance(max_waiting=4) as (_, admitted, address):
            silent = [socket.create_connection(address) for _ in range(12)]
            leg = await dial_to(address, greeting())
            assert leg is not None
            (await admitted.legs.get()).close()
            for sock in silent[:6]:
                sock.setblocking(False)
                with suppress(ConnectionResetError):
                    assert await asyncio.wait_for(loop.sock_recv(sock, 1), 5) == b""
            for sock in silent:
                sock.close()
            leg.close()

    asyncio.run(run())


@pytest.mark.parametrize("place", [0, 20, 47, 48, 70])
def test_a_changed_byte_breaks_the_leg(place: int) -> None:
    """A record that was changed on the way never reaches the owner."""

    async def run() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        key = os.urandom(32)
        sender, loop = CipherState(key), asyncio.get_running_loop()
        frame = TunnelFrame(FrameKind.DATA, 0, 0, 0, b"x" * 20)
        record = bytearray(sender.encrypt(frame.header()) + sender.encrypt(b"x" * 20))
        record[place] ^= 1
        leg, broken = TcpLeg(far, CipherState(key), CipherState(key), loop), asyncio.Event()

        class Owner:
            def leg_ready(self) -> None: ...

            def leg_frame(self, frame: TunnelFrame) -> None:
                raise AssertionError(f"a forged frame arrived: {frame}")

            def leg_broken(self, _reason: str) -> None:
                broken.set()

        leg.start(Owner())
        await loop.sock_sendall(near, bytes(record))
        await asyncio.wait_for(broken.wait(), 5)
        near.close()

    asyncio.run(run())
