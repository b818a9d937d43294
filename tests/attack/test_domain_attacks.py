"""Attacks on the port of a domain's controller, and on a centre by a false controller."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import AuthError
from isthmus.wan.centre.centre_config import CentreConfig
from isthmus.wan.centre.domain_courier import DomainCourier
from isthmus.wan.centre.domain_requests import DOMAIN_REQUEST, DomainMessage, DomainReply, PrepareMessage
from isthmus.wan.centre.line_client import CentreAddress, LineClient
from isthmus.wan.centre.logged_centre import LoggedCentre
from isthmus.wan.centre.logged_domain import LoggedDomain
from isthmus.wan.centre.run_domain import DomainServer
from isthmus.wan.controller.domain_controller import DomainController
from isthmus.wan.controller.wan_network import WanNetwork
from isthmus.wan.dial import parse_address
from tests.attack.fuzzing import changed_bytes, places, replaced, values
from tests.wan.centre.test_domain_port import REMOTE, ask
from tests.wan.controller.wan_lab import ladder

pytestmark = pytest.mark.attack
TOKEN = "f" * 64
SPAN = {"pipe": "bd", "start_s": 1.0, "end_s": 2.0, "kbps": 500_000}
PREPARE = {"kind": "prepare", "name": "one", "version": 7, "spans": [SPAN], "service": "training", "lease_s": 30.0}
LINE = json.dumps({"token": TOKEN, "message": PREPARE}).encode()
REPLY = json.dumps(
    {"epoch": 1, "number": 2, "answer": {"kind": "report", "prepared": [{"name": "one", "version": 7}]}}
).encode()


def test_strangers_order_nothing_and_garbage_ends_its_connection(tmp_path: Path) -> None:
    """Without the token nothing is prepared; lines that are no order are refused, and the port serves on."""

    async def run() -> None:
        domain = LoggedDomain(ladder(), "two", tmp_path, 1000.0)
        server = DomainServer(CentreConfig(listen=("127.0.0.1", 0), token=TOKEN), domain, lambda: 1000.0)
        address = parse_address(await server.start())
        try:
            for token in ("", "f" * 63, TOKEN + "f"):
                stranger = LineClient(CentreAddress(address=address, token=token), "domain", "")
                with pytest.raises(AuthError):
                    await asyncio.to_thread(stranger.call, PREPARE)
            for line in (b"{}\n", b"[" * 60_000 + b"\n", b"\xff\n", b"GET / HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(line)
                assert b"error" in await asyncio.wait_for(reader.read(), 5)
                writer.close()
                await writer.wait_closed()
            assert domain.num_bookings == 0
            client = LineClient(CentreAddress(address=address, token=TOKEN), "domain", "")
            assert (await asyncio.to_thread(client.call, PREPARE))["answer"]["kind"] == "prepared"
            greedy = PREPARE | {"name": "two", "spans": [SPAN | {"kbps": 900_000}]}
            assert (await asyncio.to_thread(client.call, greedy))["answer"]["kind"] == "refused"
            foreign = PREPARE | {"name": "two", "spans": [SPAN | {"pipe": "ab"}]}
            assert (await asyncio.to_thread(client.call, foreign))["answer"]["kind"] == "refused"
            client.close()
        finally:
            await server.close()
            domain.close()

    asyncio.run(run())


def test_a_false_controller_breaks_no_centre(tmp_path: Path) -> None:
    """What it answers is no reply, or another domain's: the courier goes on, and the centre takes nothing from it."""
    said: list[DomainMessage] = []
    replies = [b"{}\n", b"nonsense\n", b'{"epoch": -1}\n', b"[1]\n", REPLY + b"\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        while await reader.readline():
            writer.write(replies.pop(0))
            if not replies:
                done.set()
                replies.append(b"{}\n")
        writer.close()
        await writer.wait_closed()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        courier = DomainCourier("two", CentreAddress(address=server.sockets[0].getsockname()), said.append)
        centre = LoggedCentre(ladder(), tmp_path, REMOTE)
        centre.handle(ask("one", 0.5), 1000.0)
        for number in range(6):
            centre.handle(ask(f"more-{number}", 0.01), 1000.0)
        for order in centre.take_orders():
            courier.send(order.order)
        courier.start()
        await asyncio.wait_for(done.wait(), 20)
        await courier.close()
        await asyncio.gather(*filter(None, connections))
        server.close()
        for message in said:
            centre.domain_answered(message, 1001.0)
        assert centre.outcome("one").state == "preparing"
        centre.close()

    done, connections = asyncio.Event(), list[asyncio.Task[None] | None]()
    asyncio.run(run())


@given(changed_bytes(LINE), changed_bytes(REPLY))
def test_no_line_breaks_the_parsers(order: bytes, reply: bytes) -> None:
    """A changed line is an order, or a reply, or refused; nothing else is raised."""
    for parse, line in ((DOMAIN_REQUEST.validate_json, order), (DomainReply.model_validate_json, reply)):
        try:
            parse(line)
        except (ValueError, RecursionError):
            continue


@given(st.data())
def test_no_order_breaks_the_controller(data: st.DataObject) -> None:
    """An order with any value in any place is refused by the parser or answered, and over-books nothing."""
    document: Any = json.loads(LINE)
    at = data.draw(st.sampled_from(list(places(document))))
    try:
        message = DOMAIN_REQUEST.validate_python(replaced(document, at, data.draw(values))).message
    except (ValueError, RecursionError):
        return
    domain = DomainController(WanNetwork(ladder()), "two", 1)
    if isinstance(message, PrepareMessage):
        domain.handle(message.order(), 1.0)
    assert domain.invariants() == []
