"""The agent's own metrics: what the page shows, and who may read it."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from isthmus.agent.metrics.agent_figures import STATES, agent_figures
from isthmus.agent.metrics.metrics_listener import MAX_HEAD_BYTES, MetricsListener
from isthmus.agent.metrics.sync_counts import SyncCounts
from isthmus.core.errors import InputError, UnavailableError
from tests.site.driver import local
from tests.site.test_propose_moves import fragmented, waits

TOKEN = "t" * 32


@pytest.fixture
def listener() -> Iterator[MetricsListener]:
    with closing(MetricsListener("127.0.0.1", 0, TOKEN)) as found:
        found.show(b"isthmus_agent_x 1.0\n")
        yield found


def get(
    listener: MetricsListener, path: str = "/metrics", token: str | None = TOKEN, timeout_s: float = 20
) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    host, port = listener.address
    return httpx.get(f"http://{host}:{port}{path}", headers=headers, timeout=timeout_s)


def test_the_page_shows_devices_fragments_parts_and_exchanges() -> None:
    """Eight devices are free, in fragments: two can be offered, one part waits for a place, a move is proposed."""
    east, kept = fragmented()
    east.wait(200)
    east.obey(*kept, waits())
    east.wait(40)
    syncs = SyncCounts()
    syncs.add_answer(0.5, 1e9)
    syncs.num_failed += 2
    text = agent_figures(east.machine, syncs, now_s=east.now_s, num_deferred=3, wall_s=1e9 + 1).decode()
    for line in (
        'isthmus_agent_devices{node_group="h20"} 16.0',
        'isthmus_agent_devices_free{node_group="h20"} 8.0',
        'isthmus_agent_devices_offered{node_group="h20"} 2.0',
        'isthmus_agent_devices_of_pool{node_group="h20"} 8.0',
        'isthmus_agent_parts{state="running"} 4.0',
        'isthmus_agent_parts{state="queued"} 1.0',
        "isthmus_agent_parts_without_place 1.0",
        "isthmus_agent_moves_proposed 1.0",
        "isthmus_agent_instructions_deferred 3.0",
        'isthmus_agent_syncs_total{outcome="answered"} 1.0',
        'isthmus_agent_syncs_total{outcome="failed"} 2.0',
    ):
        assert line in text.splitlines()


def test_no_label_grows_with_jobs() -> None:
    """Series are by state and node group: a hundred local jobs make not one more."""
    east, _ = fragmented()
    before = agent_figures(east.machine, SyncCounts(), now_s=0, num_deferred=0, wall_s=0)
    east.local(*(local(f"own-{number}", chips=1) for number in range(100)))
    after = agent_figures(east.machine, SyncCounts(), now_s=0, num_deferred=0, wall_s=0)
    names = [re.sub(rb" [^ ]*$", b"", line) for line in before.splitlines()]
    assert [re.sub(rb" [^ ]*$", b"", line) for line in after.splitlines()] == names
    assert len(names) < 3 * (2 * len(STATES) + 20)


def test_readers_need_the_token(listener: MetricsListener) -> None:
    """Without it, or with another one, nothing is shown; other paths and methods are refused."""
    assert get(listener).text == "isthmus_agent_x 1.0\n"
    assert get(listener, token=None).status_code == 401
    assert get(listener, token="x" * 32).status_code == 401
    assert get(listener, "/").status_code == 404
    host, port = listener.address
    answer = httpx.post(f"http://{host}:{port}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 405


def test_beyond_loopback_a_token_is_needed() -> None:
    """The agent refuses to listen for other machines without one, or with a short one."""
    with pytest.raises(InputError, match="need a token"):
        MetricsListener("0.0.0.0", 0)
    with pytest.raises(InputError, match="fewer than 16"):
        MetricsListener("127.0.0.1", 0, "short")


def test_a_taken_port_is_named() -> None:
    """The error says which address, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UnavailableError, match="cannot listen"):
        MetricsListener("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    "sent", [b"", b"\0" * 100, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES, b"\r\n\r\n"]
)
def test_hostile_bytes_get_nothing_and_stop_nothing(listener: MetricsListener, sent: bytes) -> None:
    """A head without end, none at all, or no request: the next reader is served."""
    with socket.create_connection(listener.address) as peer, contextlib.suppress(OSError):
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(5)
        assert b"isthmus_agent_x" not in peer.recv(65_536)
    assert get(listener).status_code == 200


def test_a_slow_reader_holds_the_page_up_for_two_seconds_at_most(listener: MetricsListener) -> None:
    """A head that comes byte by byte has one deadline in all."""
    with socket.create_connection(listener.address) as slow:
        slow.sendall(b"G")
        assert get(listener, timeout_s=8).status_code == 200
