"""Rules of the agent's checks of other sites, over real sockets on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from isthmus.agent.network.own_address import own_address
from isthmus.agent.network.peer_prober import MAX_CONNECTIONS, MAX_GBPS, PeerProber, ProbeListener, check_peer
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, PeerCheck, PeerToCheck
from isthmus.wan import listen

LIMIT_S = 5.0
NONCE = "0123456789abcdef" * 2
FREE = threading.Event()


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    found = ProbeListener("127.0.0.1", None, LIMIT_S)
    yield found
    found.close()


@pytest.fixture
def prober() -> Iterator[PeerProber]:
    found = PeerProber("127.0.0.1", None, dict, LIMIT_S)
    yield found
    found.close()


def dialled(prober: PeerProber, port: int, nonce: str) -> PeerCheck:
    """Order `prober` to check site `a` at `port`; return its answer."""
    peer = PeerToCheck(cluster="a", number=7, host="127.0.0.1", port=port, nonce=nonce)
    waits_for(lambda: (prober.apply_orders(AgentOrders(peers_to_check=(peer,))), prober.checks())[1])
    return prober.checks()[0]


def waits_for(done: Callable[[], object]) -> None:
    """Return once `done` holds; the events of other threads are awaited, at most 5 s."""
    for _ in range(500):
        if done():
            return
        FREE.wait(0.01)
    raise AssertionError("not within 5 s")


def test_an_open_listener_is_reached_and_closed_when_it_is_no_longer_ordered(prober: PeerProber) -> None:
    """The address in the report has port and nonce while the server orders it; the answer repeats until dropped."""
    assert prober.address().port is None
    other = PeerProber("127.0.0.1", None, dict, LIMIT_S)
    other.apply_orders(AgentOrders(opens_listener=True))
    opened = other.address()
    assert other.busy
    assert opened.port is not None
    assert opened.nonce is not None
    check = dialled(prober, opened.port, opened.nonce)
    assert (check.cluster, check.number, check.reached, check.detail) == ("a", 7, True, "")
    assert check.round_trip_s is not None
    assert check.gbps is not None
    assert 0 < check.round_trip_s < LIMIT_S
    assert 0 < check.gbps <= MAX_GBPS
    prober.apply_orders(AgentOrders())
    assert prober.checks() == ()
    other.apply_orders(AgentOrders())
    assert (other.address().port, other.busy) == (None, False)
    assert check_peer(("127.0.0.1", opened.port), opened.nonce, None, LIMIT_S) == ("connection refused", None)
    other.close()


def test_only_the_listener_of_the_order_counts(prober: PeerProber, listener: ProbeListener) -> None:
    """With another nonce the listener stays silent, and what answers there is another process."""
    check = dialled(prober, listener.port, NONCE)
    assert (check.reached, check.detail) == (False, "another process answers there")


def test_a_port_that_accepts_and_says_nothing_ends_within_the_limit() -> None:
    """The check does not wait longer than its limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer within 0.05 s" in check_peer(silent.getsockname(), NONCE, None, 0.05)[0]


def test_the_way_leads_through_the_route(listener: ProbeListener) -> None:
    """A site is dialled through the same proxy as by its workers; a route that is down is named."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        route = f"127.0.0.1:{unused.getsockname()[1]}"
    why, _ = check_peer(("127.0.0.1", listener.port), listener.nonce, route, LIMIT_S)
    assert why.startswith(f"route {route}")


def test_garbage_silence_and_floods_leave_the_listener_open(listener: ProbeListener) -> None:
    """Callers without the nonce get no byte back, further ones are closed, and the right one is answered after."""
    callers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(MAX_CONNECTIONS + 8)]
    for caller in callers:
        caller.settimeout(LIMIT_S)
    over = [caller for caller in callers[MAX_CONNECTIONS:] if caller.recv(1) == b""]
    assert len(over) == 8
    for caller in callers[:MAX_CONNECTIONS]:
        caller.sendall(b"GET / HTTP/1.1\r\n" + bytes(1000))
    assert {_received(caller) for caller in callers[:MAX_CONNECTIONS]} == {b""}
    waits_for(lambda: check_peer(("127.0.0.1", listener.port), listener.nonce, None, LIMIT_S)[0] == "")
    for caller in callers:
        caller.close()


def _received(caller: socket.socket) -> bytes:
    try:
        return caller.recv(64)
    except ConnectionResetError:
        return b""


def test_the_listener_takes_the_lowest_free_port_of_the_range_and_says_when_there_is_none() -> None:
    """As the workers do; an agent whose range is taken reports it in its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        prober = PeerProber("127.0.0.1", (first, first), dict)
        prober.apply_orders(AgentOrders(opens_listener=True))
        assert "every port of the range is in use" in prober.address().problem
        assert (prober.address().port, prober.address().last_port) == (None, first)
    prober.apply_orders(AgentOrders(opens_listener=True))
    assert (prober.address().port, prober.address().problem) == (first, "")
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{first}-{first}: every port") as caught:
        listen("127.0.0.1", ports=(first, first))
    assert "--ports" in str(caught.value.hint)
    prober.close()


def test_the_own_address_is_the_one_that_leads_to_the_server() -> None:
    """Loopback for a server on loopback; a server whose name is unknown is an error that names --host."""
    assert own_address("http://127.0.0.1:8470") == "127.0.0.1"
    assert own_address("https://localhost:1") in ("127.0.0.1", "::1")
    with pytest.raises(UnavailableError, match="no way to the server") as caught:
        own_address("https://no-such-host.invalid:8470")
    assert "--host" in str(caught.value.hint)
