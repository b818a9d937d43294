"""Two proxies and real connections through them: CONNECT, whole bytes, cuts, refusals, restarts, strangers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from isthmus.core.errors import InputError, PeerError, UnavailableError
from isthmus.wan.dial import dial, parse_address
from isthmus.wan.proxy.pick_proxy import ProxyLoad, pick_proxy
from isthmus.wan.proxy.proxy_config import LegTransport, LinkLegs, ProxyConfig, parse_network
from isthmus.wan.proxy.proxy_service import ProxyService

KEY = bytes(range(32))
HOME = ("127.0.0.1", 0)


class Sites:
    """The proxies of hangzhou (dialled) and nanjing (dials), on one loop in a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, far: list[ProxyService], near: ProxyService) -> None:
        self.loop, self.far, self.near = loop, far, near
        self.route = near.routes()["nanjing"]["hangzhou"]

    def call(self, function: Callable[[], object]) -> object:
        """Run `function` on the loop's thread."""

        async def run() -> object:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def break_legs(self) -> None:
        """Close every leg, as a network failure does."""

        def run() -> None:
            for proxy in self.near.dialled["hangzhou"]:
                proxy.shell.redial()

        self.call(run)


@asynccontextmanager
async def services(
    num_far: int, transport: LegTransport = "tcp", *, error_correction: bool = False, **options: object
) -> AsyncIterator[Sites]:
    """Start `num_far` proxies of hangzhou and one of nanjing, whose legs are of `transport`."""
    loop = asyncio.get_running_loop()
    far = [
        ProxyService(ProxyConfig("hangzhou", {}, {"nanjing": KEY}, listen=HOME, **options), loop)
        for _ in range(num_far)
    ]
    for one in far:
        one.start()
    addresses = [parse_address(one.listens_at or "") for one in far]
    config = ProxyConfig(
        "nanjing",
        {"hangzhou": addresses},
        {"hangzhou": KEY},
        num_legs=3,
        transport=transport,
        error_correction=error_correction,
    )
    near = ProxyService(config, loop)
    near.start()
    try:
        yield Sites(loop, far, near)
    finally:
        for one in (near, *far):
            one.close("the test is over")
        await asyncio.sleep(0.01)


@contextmanager
def sites(num_far: int = 1, **options: object) -> Iterator[Sites]:
    """Run the sites in a thread of their own."""
    started, stop = threading.Event(), None
    found: list[Sites] = []

    async def run() -> None:
        nonlocal stop
        stop = asyncio.Event()
        async with services(num_far, **options) as one:
            found.append(one)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(10)
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@contextmanager
def echo_worker() -> Iterator[tuple[str, int]]:
    """Echo until the end of each connection."""
    with socket.create_server(HOME) as listener:

        def echo(connection: socket.socket) -> None:
            with connection:
                try:
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def exchange(
    address: tuple[str, int], route: str, num_bytes: int, at_half: Callable[[], None] = lambda: None
) -> tuple[str, str]:
    """Send `num_bytes` and read their echo; return the digests of both. `at_half` runs when half is back."""
    data = os.urandom(num_bytes)
    got = hashlib.sha256()
    with dial(address, route) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        received, is_cut = 0, False
        while piece := connection.recv(1 << 16):
            got.update(piece)
            received += len(piece)
            if received > num_bytes // 2 and not is_cut:
                is_cut = True
                at_half()
        sender.join()
    return hashlib.sha256(data).hexdigest(), got.hexdigest()


@pytest.mark.parametrize("transport", ["tcp", "datagram"])
def test_bytes_cross_two_proxies_unchanged(transport: LegTransport) -> None:
    """A worker dials its route, the far proxy dials the target: bytes and both ends arrive."""
    with echo_worker() as address, sites(transport=transport) as both:
        sent, got = exchange(address, both.route, 3_000_000)
        assert sent == got
        (tunnel,) = both.call(both.far[0].statistics)["tunnels"]
        assert (tunnel["legs"], tunnel["received_bytes"]) == (3, 3_000_000)


def test_bytes_cross_with_error_correction() -> None:
    """Both sides send parity once the dialler does; legs that cannot have it refuse to start."""
    with echo_worker() as address, sites(transport="datagram", error_correction=True) as both:
        sent, got = exchange(address, both.route, 500_000)
        assert sent == got
    with pytest.raises(InputError, match="no error correction"):
        ProxyConfig("a", {"b": [HOME]}, {"b": KEY}, error_correction=True)


@pytest.mark.parametrize("transport", ["tcp", "datagram"])
def test_the_endpoints_do_not_notice_broken_legs(transport: LegTransport) -> None:
    """1. Half of the echo is back. 2. Every leg breaks. 3. New legs carry the rest, each byte once."""
    with echo_worker() as address, sites(transport=transport) as both:
        sent, got = exchange(address, both.route, 8_000_000, both.break_legs)
        assert sent == got
        assert both.call(both.near.statistics)["tunnels"][0]["legs_lost"] >= 3


def test_a_target_outside_the_allowed_networks_is_refused() -> None:
    """Holding a key opens the addresses of `allow`, no other ones; the worker learns which proxy refuses."""
    allow = (parse_network("10.9.0.0/16"),)
    with echo_worker() as address, sites(allow=allow) as both, pytest.raises(PeerError, match="403"):
        dial(address, both.route)


def test_a_dead_target_is_refused() -> None:
    """The worker gets the reason of the far side, as from any CONNECT proxy."""
    with socket.create_server(HOME) as gone:
        address = gone.getsockname()
    with sites() as both, pytest.raises(PeerError, match="502"):
        dial(address, both.route)


@pytest.mark.parametrize(
    "request_head", [b"GET / HTTP/1.1\r\n\r\n", b"CONNECT\r\n\r\n", b"x" * 9000, b"CONNECT a HTTP/1.1\r\n\r\n"]
)
def test_other_requests_are_refused(request_head: bytes) -> None:
    """A request that is no CONNECT, or too long, gets an error and no connection."""
    with sites() as both, socket.create_connection(parse_address(both.route), timeout=10) as connection:
        connection.sendall(request_head)
        assert connection.recv(100).split(b" ")[1] in (b"400", b"405")


@pytest.mark.parametrize("transport", ["tcp", "datagram"])
def test_a_restarted_far_proxy_serves_new_connections(transport: LegTransport) -> None:
    """1. A connection is open. 2. The far proxy stops: the connection breaks. 3. It returns: a new one works."""
    with echo_worker() as address, sites(transport=transport) as both:
        old = both.far[0]
        connection = dial(address, both.route)
        connection.settimeout(10)
        where = parse_address(old.listens_at or "")

        def restart() -> None:
            old.close("restart")
            again = ProxyService(ProxyConfig("hangzhou", {}, {"nanjing": KEY}, listen=where), both.loop)
            again.start()
            both.far[0] = again

        both.call(restart)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        connection.close()
        sent, got = exchange(address, both.route, 100_000)
        assert sent == got


def test_connections_are_balanced_over_the_proxies_of_a_site() -> None:
    """Of eight connections each of two proxies gets four; a connection stays where it began."""
    with echo_worker() as address, sites(num_far=2) as both:
        for proxy in both.near.dialled["hangzhou"]:
            while proxy.load().num_legs != 3:
                both.call(lambda: None)
        connections = [dial(address, both.route) for _ in range(8)]
        assert [proxy.load().num_streams for proxy in both.near.dialled["hangzhou"]] == [4, 4]
        for connection in connections:
            connection.close()


def test_without_a_far_proxy_a_worker_waits_no_longer_than_it_wants() -> None:
    """The near proxy knows no far one: the request waits for a leg, and the worker's own time-out ends it."""
    with socket.create_server(HOME) as gone:
        nowhere = gone.getsockname()
    with sites() as both:

        def retarget() -> None:
            config = ProxyConfig("nanjing", {"hangzhou": [nowhere]}, {"hangzhou": KEY})
            both.far.append(ProxyService(config, both.loop))
            both.far[-1].start()

        both.call(retarget)
        with pytest.raises(UnavailableError, match="did not answer"):
            dial(("127.0.0.1", 1), both.far[-1].routes()["nanjing"]["hangzhou"], timeout_s=0.3)


def test_a_busy_or_cut_proxy_is_not_picked() -> None:
    """Fewest connections a leg; then fewest bytes; one without a leg only if all have none."""
    assert pick_proxy([ProxyLoad(4, 8, 0), ProxyLoad(4, 3, 9), ProxyLoad(0, 0, 0)]) == 1
    assert pick_proxy([ProxyLoad(2, 4, 5), ProxyLoad(4, 8, 4)]) == 1
    assert pick_proxy([ProxyLoad(0, 4, 5), ProxyLoad(0, 8, 4)]) == 0


def test_legs_together_keep_to_their_rate() -> None:
    """A connection takes no more than the rate that is set for all legs, less a frame for each."""

    async def check() -> float:
        loop = asyncio.get_running_loop()
        far = ProxyService(ProxyConfig("hangzhou", {}, {"nanjing": KEY}, listen=HOME), loop)
        far.start()
        legs = LinkLegs(num_legs=2, gbps=0.04)
        near = ProxyService(
            ProxyConfig(
                "nanjing",
                {"hangzhou": [parse_address(far.listens_at or "")]},
                {"hangzhou": KEY},
                legs_to={"hangzhou": legs},
            ),
            loop,
        )
        near.start()
        with echo_worker() as target:
            route = near.routes()["nanjing"]["hangzhou"]
            sock = await asyncio.to_thread(dial, target, route)
            start_s, data = loop.time(), bytes(2_000_000)
            sender = asyncio.create_task(asyncio.to_thread(sock.sendall, data))
            left = len(data)
            while left:
                left -= len(await asyncio.to_thread(sock.recv, 2**16))
            await sender
            took_s = loop.time() - start_s
            sock.close()
        for one in (near, far):
            one.close("the test is over")
        await asyncio.sleep(0.01)
        return took_s

    least_s = (2_000_000 - 3 * 2**18) / 5e6
    assert asyncio.run(check()) >= least_s


def test_a_proxy_that_answers_no_greeting_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log of the side that dials names site, address and what may differ; its further tries add nothing."""

    async def run() -> str:
        async with services(1) as both:
            address = both.far[0].listens_at or ""
            other = ProxyConfig("nanjing", {"hangzhou": [parse_address(address)]}, {"hangzhou": bytes(32)}, num_legs=3)
            stranger = ProxyService(other, both.loop)
            stranger.start()
            assert both.far[0].entrance is not None
            while both.far[0].entrance.num_refused < 6:
                await asyncio.sleep(0.01)
            stranger.close("the test is over")
            return address

    address = asyncio.run(run())
    lines = [line for line in caplog.messages if line.startswith("no leg to")]
    assert lines == [f"no leg to hangzhou at {address}: the proxy does not answer: it has another key, site or release"]
