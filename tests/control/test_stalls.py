"""A site that is slow or hangs delays no other: stalls in mid-body, and a client that reads no answer."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.control.processes import until
from tests.control.serving import EAST, WEST, report, submission
from tests.control.test_stream import Streaming

pytestmark = pytest.mark.slow

NUM_STALLED = 100
"""More than the server has threads for requests."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Streaming]:
    server = Streaming(tmp_path)
    yield server
    server.close()


@contextlib.contextmanager
def connections(server: Streaming, request: bytes) -> Iterator[list[socket.socket]]:
    """Many connections that have each sent `request` and do nothing more."""
    port = httpx.URL(server.url).port
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_STALLED)]
        for connection in made:
            connection.sendall(request)
        yield made


def report_west(server: Streaming) -> None:
    """Send ten reports of the other site, and have each answered."""
    body = report(WEST).model_dump(mode="json", by_alias=True)
    for _ in range(10):
        assert server.call("POST", "/v1/agents/west/sync", "owner-west", body).status_code == 200


def with_an_answer(stalled: list[socket.socket]) -> list[socket.socket]:
    """Return the connections at which something has arrived, an end too."""
    return select.select(stalled, [], [], 0)[0]


def test_agents_that_stall_in_mid_body_delay_nobody(server: Streaming) -> None:
    """The script: 1. a hundred reports of east stop half way; 2. west's are answered while those stall."""
    body = report(EAST).model_dump_json(by_alias=True).encode()
    head = (
        "POST /v1/agents/east/sync HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {server.tokens['owner-east']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with connections(server, head.encode() + body[: len(body) // 2]) as stalled:
        report_west(server)
        assert with_an_answer(stalled) == []
        stalled[0].sendall(body[len(body) // 2 :])
        stalled[0].settimeout(10)
        assert stalled[0].recv(15) == b"HTTP/1.1 200 OK", "one that goes on is answered"


def test_clients_that_read_no_answer_delay_nobody(server: Streaming) -> None:
    """The script: 1. a hundred ask for a long list and read nothing; 2. west is answered while they wait."""
    wish = {"submissions": [_wish(i) for i in range(50)]}
    assert server.call("POST", "/v1/jobs:bulk", body=wish).status_code == 200
    ask = f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.tokens['ann']}\r\n\r\n"
    with connections(server, ask.encode()) as stalled:
        until(lambda: len(with_an_answer(stalled)) == NUM_STALLED, "the lists have been made")
        report_west(server)


def _wish(index: int) -> dict[str, object]:
    return submission(name=f"j{index}", output="x" * 20_000 + "{job}").model_dump(mode="json")
