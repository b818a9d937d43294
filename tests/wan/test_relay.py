"""Emulated links with real sockets: rate, round trip, sharing, back-pressure, ends, cuts, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.core.errors import NotFoundError, PeerError, UnavailableError
from isthmus.core.link_throughput import WIRE_OVERHEAD
from isthmus.core.pool import Pool
from isthmus.wan.background_emulator import BackgroundLinks, links_in_background
from isthmus.wan.dial import dial, format_address, parse_address
from tests.wan.lab import Worker, a_worker, closed_port, pool_of, receive, round_trips_s, wait_until
from tests.wan.virtual_links import Links, on_virtual_links

pytestmark = pytest.mark.slow

GOODPUT = 1 / WIRE_OVERHEAD


def joined(gbps: float, round_trip_ms: float) -> Pool:
    return pool_of({"between": ["a", "b"], "bandwidth_gbps": gbps, "round_trip_ms": round_trip_ms})


@pytest.fixture
def worker() -> Iterator[Worker]:
    with a_worker() as one:
        yield one


def a_to_b(links: BackgroundLinks, worker: Worker) -> socket.socket:
    connection = dial(worker.address, links.routes["a"]["b"])
    connection.settimeout(20)
    return connection


@pytest.mark.parametrize("gbps", [0.05, 0.2, 0.6])
def test_a_transfer_reaches_the_stated_rate_and_not_more(gbps: float) -> None:
    """Goodput with its headers is within 1 % of the bandwidth."""
    num_bytes = int(gbps * 0.25e9 / 8 * GOODPUT)

    async def script(links: Links) -> None:
        took_s = await (await links.dial(b"s")).swallow_s(num_bytes)
        assert took_s - 0.020 == pytest.approx(0.25, rel=0.01)

    on_virtual_links(joined(gbps, 20), script)


def test_a_small_message_takes_the_stated_round_trip() -> None:
    """Dialling too; unequal directions add up."""
    there = {"from": "a", "to": "b", "bandwidth_gbps": 1, "delay_ms": 30}
    back = {"from": "b", "to": "a", "bandwidth_gbps": 0.1, "delay_ms": 5}

    async def script(links: Links) -> None:
        start_s = links.now_s()
        client = await links.dial(b"e")
        assert links.now_s() - start_s == pytest.approx(0.035, abs=1e-4)
        assert await client.round_trip_s() == pytest.approx(0.035, abs=1e-4)

    on_virtual_links(pool_of(there, back), script)


def test_what_is_in_flight_holds_back_nothing() -> None:
    """Twenty messages sent at once come back one round trip later, not twenty."""

    async def script(links: Links) -> None:
        client, start_s = await links.dial(b"e"), links.now_s()
        for _ in range(20):
            await client.send(bytes(100))
        await client.receive(2000)
        assert links.now_s() - start_s == pytest.approx(0.040, abs=1e-3)

    on_virtual_links(joined(1, 40), script)


def test_two_flows_share_a_link_whichever_side_dialled() -> None:
    """Two flows that both send from a to b get half the link each."""
    num_bytes = int(0.025e9 / 8 * GOODPUT)

    async def script(links: Links) -> None:
        clients = [await links.dial(b"s") for _ in range(2)]
        took_s = await asyncio.gather(*(one.swallow_s(num_bytes) for one in clients))
        assert took_s == pytest.approx([0.26, 0.26], rel=0.08)
        carried = {ends[1]: one.delivered_bytes for ends, one in links.relay.directions.items()}
        assert carried == {"b": 2 * (num_bytes + 1), "a": 16}

    on_virtual_links(joined(0.2, 10), script)


def test_a_peer_that_does_not_read_stops_its_sender_and_nobody_else() -> None:
    """Back-pressure: what is taken from a flow is bounded; another flow on the link is not held up."""

    async def script(links: Links) -> None:
        stuck, free = await links.dial(b"q"), await links.dial(b"e")
        await stuck.send_until_stuck()
        held_by_the_kernel_bytes = 4 * (32 << 20)  # two sockets' buffers at each side of the relay
        assert stuck.sent_bytes < held_by_the_kernel_bytes + 3 * 2e9 / 8 * 0.03
        assert await free.round_trip_s() < 0.006
        links.go.set()
        stuck.sock.shutdown(socket.SHUT_WR)
        assert int.from_bytes(await stuck.receive(8), "big") == stuck.sent_bytes

    on_virtual_links(joined(2, 4), script)


def test_every_byte_arrives_in_order_under_jitter_and_loss(worker: Worker) -> None:
    """Modelled loss and jitter delay bytes; they change, reorder and lose none."""
    link = {"between": ["a", "b"], "bandwidth_gbps": 0.4, "round_trip_ms": 6, "jitter_ms": 2, "loss": 0.02}
    content = os.urandom(4_000_000)
    with links_in_background(pool_of(link)) as links, a_to_b(links, worker) as connection:
        connection.sendall(b"e")
        sender = threading.Thread(target=connection.sendall, args=(content,))
        sender.start()
        assert receive(connection, len(content)) == content
        sender.join()
        assert {link["loss_is"] for link in links.statistics()} == {"modelled"}


def test_half_close_leaves_the_other_half_open(worker: Worker) -> None:
    """The end of what is sent crosses behind the last byte; what comes back still comes, then its end."""
    with links_in_background(joined(1, 10)) as links, a_to_b(links, worker) as connection:
        connection.sendall(b"ehello")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            assert file.read() == b"hello"


def test_a_peer_that_breaks_off_is_seen_as_broken(worker: Worker) -> None:
    """A reset at one end is a reset at the other, not an orderly end."""
    with links_in_background(joined(1, 4)) as links:
        connection = a_to_b(links, worker)
        connection.sendall(b"sx")
        wait_until(lambda: sum(link["bytes"] for link in links.statistics()) == 2)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        wait_until(lambda: worker.errors)
        assert isinstance(worker.errors[0], ConnectionResetError)


def test_a_refused_peer_is_a_502_and_a_peer_error() -> None:
    """The proxy says that and why the worker could not be reached; `dial` names the peer and what to do."""
    target = closed_port()
    with (
        links_in_background(joined(1, 4)) as links,
        pytest.raises(PeerError, match=f"peer {target} .*502 Connection refused.*check"),
    ):
        dial(parse_address(target), links.routes["a"]["b"])


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/1.1", "405"),
        ("CONNECT nowhere HTTP/1.1", "400"),
        ("CONNECT 10.1.2.3:80 HTTP/1.1", "403"),
        ("CONNECT example.org:80 HTTP/1.1", "403"),
    ],
)
def test_only_a_connect_to_this_machine_is_served(request_line: str, status: str) -> None:
    """Anything else is answered with its HTTP status, and closed."""
    with (
        links_in_background(pool_of({"between": ["a", "b"], "bandwidth_gbps": 1, "delay_ms": 1})) as links,
        socket.create_connection(parse_address(links.routes["b"]["a"]), timeout=10) as connection,
    ):
        connection.sendall(f"{request_line}\r\n\r\n".encode())
        with connection.makefile("rb") as file:
            assert file.read().startswith(f"HTTP/1.1 {status} ".encode())


def test_a_cut_link_stalls_and_goes_on_where_it_stopped(worker: Worker) -> None:
    """1. a message is under way; 2. cut: it does not arrive, a new dial is refused; 3. restored: it comes."""
    with links_in_background(joined(1, 100)) as links:
        with a_to_b(links, worker) as connection:
            connection.sendall(b"ehello")
            links.cut("b", "a")
            assert all(link["cut"] for link in links.statistics())
            with pytest.raises(UnavailableError, match="503 Link Cut") as caught:
                a_to_b(links, worker)
            assert not isinstance(caught.value, PeerError)
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(5)
            links.restore("a", "b")
            connection.settimeout(10)
            assert receive(connection, 5) == b"hello"
        a_to_b(links, worker).close()


def test_a_link_cut_with_reset_breaks_its_connections_and_no_others(worker: Worker) -> None:
    """Only what crosses the cut link gets an error, the worker's side too."""
    fields = {"bandwidth_gbps": 1, "round_trip_ms": 4}
    with links_in_background(pool_of({"between": ["a", "b"], **fields}, {"between": ["a", "c"], **fields})) as links:
        with a_to_b(links, worker) as broken, dial(worker.address, links.routes["a"]["c"]) as whole:
            for connection in (broken, whole):
                connection.sendall(b"e")
                round_trips_s(connection, 1)
            links.cut("a", "b", reset=True)
            with pytest.raises(ConnectionResetError):
                broken.recv(1)
            wait_until(lambda: worker.errors)
            round_trips_s(whole, 1)
        with pytest.raises(NotFoundError, match="no link from b to c"):
            links.cut("b", "c")


def test_a_pair_with_one_link_gets_the_same_back() -> None:
    """TCP needs both directions: a missing one mirrors the given one."""

    async def script(links: Links) -> None:
        assert {ends[0]: link.delay_ms for ends, link in links.relay.links.items()} == {"a": 12, "b": 12}
        assert await (await links.dial(b"e")).round_trip_s() == pytest.approx(0.024, abs=1e-4)

    on_virtual_links(pool_of({"from": "b", "to": "a", "bandwidth_gbps": 1, "delay_ms": 12}), script)


def test_ending_the_links_breaks_what_is_open_and_frees_the_ports(worker: Worker) -> None:
    """After the end no listener is left, and no open connection waits without end."""
    with links_in_background(joined(1, 4)) as links:
        route = links.routes["a"]["b"]
        connection = a_to_b(links, worker)
        connection.sendall(b"e")
    with connection, pytest.raises(ConnectionResetError):
        connection.recv(1)
    with pytest.raises(UnavailableError, match="start the gateway or link emulator"):
        dial(worker.address, format_address(*parse_address(route)))


def leave_early(links: BackgroundLinks, worker: Worker, way: int) -> None:
    """Open a connection and leave it in one of six ways, from before the request to amid a flow."""
    route = parse_address(links.routes["a"]["b"])
    if way == 0:  # says nothing
        socket.create_connection(route).close()
    elif way == 1:  # half a request
        with socket.create_connection(route) as raw:
            raw.sendall(b"CONNECT 127.0.0.1:")
    elif way == 2:  # asks and does not wait for the answer
        with socket.create_connection(route) as raw:
            raw.sendall(f"CONNECT {format_address(*worker.address)} HTTP/1.1\r\n\r\n".encode())
    elif way == 3:  # a peer that is not there
        with contextlib.suppress(PeerError):
            dial(parse_address(closed_port()), links.routes["a"]["b"]).close()
    elif way == 4:  # with an answer on the way
        with a_to_b(links, worker) as connection:
            connection.sendall(b"e" + bytes(100_000))
    else:  # with a reset in the middle of a flow
        connection = a_to_b(links, worker)
        connection.sendall(b"s" + bytes(300_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_churn_leaves_no_descriptor_behind(worker: Worker) -> None:
    """Connections that end in every way and moment free both their sockets, and the link still works."""
    with links_in_background(joined(1, 2)) as links:
        with a_to_b(links, worker) as first:
            first.sendall(b"e")
            round_trips_s(first, 1)
        wait_until(lambda: worker.num_open == 0)
        before = num_descriptors()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda way: leave_early(links, worker, way % 6), range(240)))
        wait_until(lambda: num_descriptors() <= before)
        with a_to_b(links, worker) as last:
            last.sendall(b"e")
            round_trips_s(last, 3)


@pytest.mark.parametrize("runs_first", [False, True])
def test_other_traffic_takes_its_share_or_what_runs_leave(runs_first: bool) -> None:
    """A run's transfer beside seven others: an eighth of the link where all take turns, else all of it."""
    gbps, num_bytes = 0.05, 200_000
    alone_s = num_bytes * 8e-9 / (gbps * GOODPUT)

    async def script(links: Links) -> None:
        others = [await links.dial(b"s", links.relay.other_routes()["a"]["b"]) for _ in range(7)]
        busy = [asyncio.create_task(one.swallow_s(1_000_000)) for one in others]
        await asyncio.sleep(0.2)
        took_s = await (await links.dial(b"s")).swallow_s(num_bytes) - 0.020
        assert not any(one.done() for one in busy)
        assert (took_s < 2 * alone_s) if runs_first else (took_s > 6 * alone_s)
        await asyncio.gather(*busy)

    on_virtual_links(joined(gbps, 20), script, runs_first=runs_first)
