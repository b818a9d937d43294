"""Attacks on the port of a decision centre: strangers, forged lines, endless lines, silent crowds, the clear."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.server.tls import self_signed_certificate
from isthmus.core.errors import AuthError, InputError, UnavailableError
from isthmus.wan.centre.centre_client import CentreClient
from isthmus.wan.centre.centre_config import CentreConfig
from isthmus.wan.centre.centre_requests import CLIENT_REQUEST, MAX_LINE_BYTES
from isthmus.wan.centre.line_client import CentreAddress
from isthmus.wan.centre.line_server import MAX_CONNECTIONS
from isthmus.wan.centre.logged_centre import LoggedCentre
from isthmus.wan.centre.run_centre import CentreServer
from isthmus.wan.control.wan_topology import PathRequest
from isthmus.wan.dial import parse_address
from tests.attack.fuzzing import changed_bytes, places, replaced, values
from tests.wan.centre.test_logged_centre import NETWORK

pytestmark = pytest.mark.attack
TOKEN = "f" * 64
REQUEST = PathRequest.model_validate({"name": "one", "from": "a", "to": "b", "bandwidth_gbps": 0.6})
LINE = json.dumps(
    {"token": TOKEN, "message": {"kind": "ask", "request": REQUEST.model_dump(mode="json", by_alias=True)}}
).encode()


def served(tmp_path: Path, attack: Callable[[CentreServer, tuple[str, int]], Awaitable[None]], **tls: Path) -> None:
    """Serve a centre on loopback while `attack` runs; afterwards it still answers its clients."""

    async def run() -> None:
        centre = LoggedCentre(NETWORK, tmp_path / "centre")
        server = CentreServer(CentreConfig(listen=("127.0.0.1", 0), token=TOKEN, **tls), centre, lambda: 1000.0)
        address = parse_address(await server.start())
        try:
            await attack(server, address)
            client = CentreClient(CentreAddress(address=address, token=TOKEN, ca=tls.get("tls_cert")))
            assert (await asyncio.to_thread(client.look, "any")).state == "unknown"
            client.close()
        finally:
            await server.close()
            centre.close()

    asyncio.run(run())


async def answer_to(address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes and return all that comes back until the end."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except (TimeoutError, OSError):
        return b"open"
    finally:
        writer.close()


def test_strangers_book_nothing(tmp_path: Path) -> None:
    """Without the token, or with another one, nothing is booked and the connection ends."""

    async def attack(server: CentreServer, address: tuple[str, int]) -> None:
        for token in ("", "f" * 63, "F" * 64, TOKEN + "f"):
            client = CentreClient(CentreAddress(address=address, token=token))
            with pytest.raises(AuthError):
                await asyncio.to_thread(client.ask, REQUEST)
        assert server.num_refused == 4
        known = CentreClient(CentreAddress(address=address, token=TOKEN))
        assert (await asyncio.to_thread(known.look, "one")).state == "unknown"
        known.close()

    served(tmp_path, attack)


def test_lines_of_no_request_end_their_connection(tmp_path: Path) -> None:
    """Garbage, endless and deep lines are answered with an error, or by the end, in bounded memory."""

    async def attack(server: CentreServer, address: tuple[str, int]) -> None:
        bad = [b"\n", b"{}\n", b"[" * 60_000 + b"\n", b"\xff\x00\n", b"null\n", b"GET / HTTP/1.1\r\n\r\n"]
        for line in bad:
            assert b"error" in await answer_to(address, line)
        assert await answer_to(address, b"x" * (4 * MAX_LINE_BYTES)) in (b"", b"open")
        assert server.num_refused >= len(bad)

    served(tmp_path, attack)


def test_silent_callers_keep_no_client_out(tmp_path: Path) -> None:
    """More silent connections than there are places cost the oldest of them, not a client's."""

    async def attack(_server: CentreServer, address: tuple[str, int]) -> None:
        crowd = [await asyncio.open_connection(*address) for _ in range(MAX_CONNECTIONS + 8)]
        client = CentreClient(CentreAddress(address=address, token=TOKEN))
        assert (await asyncio.to_thread(client.ask, REQUEST)).state == "held"
        assert (await asyncio.to_thread(client.release, "one")).state == "released"
        client.close()
        for _, writer in crowd:
            writer.close()

    served(tmp_path, attack)


def test_a_client_with_the_ca_is_served_and_one_in_the_clear_is_not(tmp_path: Path) -> None:
    """With TLS a line in the clear has no answer, and a client that trusts another CA does not send its token."""
    now = datetime.datetime.now(datetime.UTC)
    own = self_signed_certificate(tmp_path / "tls", ("127.0.0.1",), now)
    other = self_signed_certificate(tmp_path / "other", ("127.0.0.1",), now)

    async def attack(_server: CentreServer, address: tuple[str, int]) -> None:
        client = CentreClient(CentreAddress(address=address, token=TOKEN, ca=own.trust))
        assert (await asyncio.to_thread(client.look, "one")).state == "unknown"
        client.close()
        stranger = CentreClient(CentreAddress(address=address, token=TOKEN, ca=other.trust))
        with pytest.raises(UnavailableError, match="certificate"):
            await asyncio.to_thread(stranger.look, "one")
        assert b"unknown" not in await answer_to(address, LINE + b"\n")

    async def run() -> None:
        centre = LoggedCentre(NETWORK, tmp_path / "centre")
        config = CentreConfig(listen=("127.0.0.1", 0), token=TOKEN, tls_cert=own.cert, tls_key=own.key)
        server = CentreServer(config, centre, lambda: 1000.0)
        try:
            await attack(server, parse_address(await server.start()))
        finally:
            await server.close()
            centre.close()

    asyncio.run(run())
    with pytest.raises(InputError, match="no CA"):
        CentreAddress(address=("10.0.0.9", 7600), token=TOKEN)


def test_a_false_centre_is_not_believed() -> None:
    """What answers no request, or without an end, raises; the client does not wait for ever."""
    for reply in (b"{}\n", b'{"name": "one", "state": "booked for ever"}\n', b"x" * (2 * MAX_LINE_BYTES)):
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            client = CentreClient(CentreAddress(address=listener.getsockname()))

            async def run(
                listener: socket.socket = listener, client: CentreClient = client, reply: bytes = reply
            ) -> None:
                asked = asyncio.create_task(asyncio.to_thread(client.look, "one"))
                sock, _ = await asyncio.to_thread(listener.accept)
                with closing(sock):
                    await asyncio.to_thread(sock.recv, 4096)
                    sock.sendall(reply)
                with pytest.raises(Exception, match="decision centre"):
                    await asked

            asyncio.run(run())
            client.close()


@given(changed_bytes(LINE))
def test_no_line_of_bytes_breaks_the_parser(line: bytes) -> None:
    """A changed line is a request or refused; nothing else is raised."""
    try:
        CLIENT_REQUEST.validate_json(line)
    except (ValueError, RecursionError):
        return


@given(st.data())
def test_no_document_breaks_the_parser(data: st.DataObject) -> None:
    """A request with any value in any place is a request or refused."""
    document: Any = json.loads(LINE)
    at = data.draw(st.sampled_from(list(places(document))))
    try:
        CLIENT_REQUEST.validate_python(replaced(document, at, data.draw(values)))
    except (ValueError, RecursionError):
        return
