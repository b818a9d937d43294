"""Two gateways on loopback with NICs in user space: messages through real sockets, a lossy path, strangers, restart."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan.dial import parse_address
from isthmus.wan.gateway.gateway_config import Address, FarSite, GatewayConfig
from isthmus.wan.gateway.gateway_service import GatewayService
from isthmus.wan.gateway.nic_port import bind_udp
from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import MessageArrived, NicArrival, NicSettings, NicTick, PostWork, RoceNic, Transmit, WorkDone

KEY = bytes(range(32))
NEAR, FAR = ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("10.2.0.0/16")
SETTINGS = GatewaySettings(link_gbps=0.2, nic_gbps=10, round_trip_s=0.02, acknowledge_near=True)


class UserNic:
    """A `RoceNic` at a loopback socket."""

    def __init__(self, settings: NicSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.nic, self._loop = RoceNic(settings), loop
        self.socket = bind_udp(("127.0.0.1", 0))
        self.address: Address = self.socket.getsockname()
        self.gateway: Address | None = None
        self.arrived: list[bytes] = []
        self.num_done = 0
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(self.socket.fileno(), self._read)

    def post(self, work: PostWork) -> None:
        """Give the NIC work."""
        self._handle(work)

    def close(self) -> None:
        """Close the socket."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self.socket.fileno())
        self.socket.close()

    def _read(self) -> None:
        try:
            frame = self.socket.recv(9300)
        except BlockingIOError:
            return
        self._handle(NicArrival(frame))

    def _handle(self, event: PostWork | NicArrival | NicTick) -> None:
        for one in self.nic.handle(event, self._loop.time()):
            if isinstance(one, Transmit) and self.gateway is not None:
                self.socket.sendto(one.frame, self.gateway)
            elif isinstance(one, MessageArrived):
                self.arrived.append(one.data)
            elif isinstance(one, WorkDone):
                self.num_done += 1
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.nic.next_tick_s()
        self._timer = self._loop.call_at(due_s, self._handle, NicTick()) if due_s < float("inf") else None


class LossyPath:
    """A UDP relay in front of the far gateway that drops a share of datagrams by seed."""

    def __init__(self, target: Address, loss: float, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loss, self._rng, self._loop = target, loss, Random(1), loop
        self.front, self._back = bind_udp(("127.0.0.1", 0)), bind_udp(("127.0.0.1", 0))
        self.address: Address = self.front.getsockname()
        self._client: Address | None = None
        for one in (self.front, self._back):
            loop.add_reader(one.fileno(), self._pass_on, one)

    def _pass_on(self, source: socket.socket) -> None:
        data, address = source.recvfrom(2**16)
        if source is self.front:
            self._client = address
        if self._rng.random() < self._loss:
            return
        if source is self.front:
            self._back.sendto(data, self._target)
        elif self._client is not None:
            self.front.sendto(data, self._client)

    def close(self) -> None:
        """Close both sockets."""
        for one in (self.front, self._back):
            self._loop.remove_reader(one.fileno())
            one.close()


class Pair:
    """Both gateways, both NICs, and the path between the gateways."""

    def __init__(self, loop: asyncio.AbstractEventLoop, loss: float, form: type[Gateway]) -> None:
        self.loop, self.form = loop, form
        base = {"source_port": 50_001, "port_gbps": 0.5, "max_retries": 10**6, "resend_s": 0.05}
        near = NicSettings(address="10.1.0.1", peer="10.2.0.1", queue_pair=17, peer_queue_pair=18, **base)
        far = NicSettings(address="10.2.0.1", peer="10.1.0.1", queue_pair=18, peer_queue_pair=17, **base)
        self.near_nic, self.far_nic = UserNic(near, loop), UserNic(far, loop)
        self.far = self.start_far()
        self.path = LossyPath(parse_address(self.far.listens_at), loss, loop)
        self.near = GatewayService(
            GatewayConfig(
                site="a", near=[NEAR], sites={"b": FarSite(key=KEY, networks=[FAR], address=self.path.address)},
                settings=SETTINGS, frames=("127.0.0.1", 0), nics={"10.1.0.1": self.near_nic.address},
            ),
            loop,
            form,
        )  # fmt: skip
        self.near.start()
        self.near_nic.gateway = parse_address(self.near.frames_at)

    def start_far(self, listen: Address = ("127.0.0.1", 0)) -> GatewayService:
        """Start the far gateway."""
        service = GatewayService(
            GatewayConfig(
                site="b", near=[FAR], sites={"a": FarSite(key=KEY, networks=[NEAR])}, settings=SETTINGS,
                listen=listen, frames=("127.0.0.1", 0), nics={"10.2.0.1": self.far_nic.address},
            ),
            self.loop,
            self.form,
        )  # fmt: skip
        service.start()
        self.far_nic.gateway = parse_address(service.frames_at)
        return service

    async def until(self, is_so: Callable[[], bool], most_s: float = 20.0) -> None:
        """Wait until something is so."""

        async def poll() -> None:
            while not is_so():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(poll(), most_s)

    def close(self) -> None:
        """Close everything."""
        for one in (self.near, self.far, self.path, self.near_nic, self.far_nic):
            one.close()


def with_pair(test: Callable[[Pair], Awaitable[None]], loss: float = 0.0, form: type[Gateway] = Gateway) -> None:
    """Run `test` with gateways and NICs on one loop."""

    async def run() -> None:
        pair = Pair(asyncio.get_running_loop(), loss, form)
        try:
            await test(pair)
        finally:
            pair.close()

    asyncio.run(run())


def messages(count: int, seed: int) -> list[bytes]:
    """Return random messages."""
    rng = Random(seed)
    return [rng.randbytes(5000) for _ in range(count)]


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_messages_cross_two_gateways_by_real_sockets(loss: float, form: type[Gateway]) -> None:
    """Both ways at once, whole and in order, whatever the path between the gateways loses."""

    async def run(pair: Pair) -> None:
        there, back = messages(40, 1), messages(40, 2)
        for one, other in zip(there, back, strict=True):
            pair.near_nic.post(PostWork("write", one))
            pair.far_nic.post(PostWork("send", other))
        await pair.until(lambda: len(pair.far_nic.arrived) == len(pair.near_nic.arrived) == 40)
        assert pair.far_nic.arrived == there
        assert pair.near_nic.arrived == back
        await pair.until(lambda: pair.near_nic.num_done == pair.far_nic.num_done == 40)
        (link,) = pair.near.statistics()["links"]
        assert link["is_open"]
        assert link["num_paired"] == 1
        assert link["frames_sent_again"] > 0 or not loss
        assert pair.near.statistics()["datapath"] == ("python" if form is Gateway else "native")

    with_pair(run, loss, form)


def test_a_far_gateway_that_restarts_is_found_again(form: type[Gateway]) -> None:
    """Another process at its address goes on where the first one stopped."""

    async def run(pair: Pair) -> None:
        all_of_them = messages(60, 3)
        for one in all_of_them[:30]:
            pair.near_nic.post(PostWork("send", one))
        await pair.until(lambda: len(pair.far_nic.arrived) > 5)
        listen = parse_address(pair.far.listens_at)
        pair.far.close()
        pair.far = pair.start_far(listen)
        for one in all_of_them[30:]:
            pair.near_nic.post(PostWork("send", one))
        await pair.until(lambda: len(pair.far_nic.arrived) == 60)
        assert pair.far_nic.arrived == all_of_them

    with_pair(run, form=form)


def test_strangers_reach_nothing() -> None:
    """Datagrams without the key, and frames of addresses that belong to no site, are counted and dropped."""

    async def run(pair: Pair) -> None:
        stranger = bind_udp(("127.0.0.1", 0))
        rng = Random(4)
        for size in (0, 3, 8, 40, 200):
            stranger.sendto(rng.randbytes(size), parse_address(pair.far.listens_at))
        wrong = NicSettings(address="10.9.0.1", peer="10.2.0.1", queue_pair=5, peer_queue_pair=18)
        (sent, *_) = RoceNic(wrong).handle(PostWork("send", b"forged"), 0.0)
        assert isinstance(sent, Transmit)
        assert pair.near_nic.gateway is not None
        stranger.sendto(sent.frame, pair.near_nic.gateway)
        await pair.until(lambda: pair.far.statistics()["strangers"] >= 4)
        await pair.until(lambda: pair.near.statistics()["frames_refused"] == 1)
        assert pair.far_nic.arrived == []
        stranger.close()

    with_pair(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"frames": ("0.0.0.0", 0)}, "without authentication"),
        ({"frames": None}, "TUN device"),
        ({"tun": "roce0"}, "TUN device"),
        ({"frames": None, "tun": "../x"}, "name of a device"),
        ({"near": []}, "--near"),
        ({"near": [ipaddress.ip_network("10.2.3.0/24")]}, "overlaps"),
        ({"sites": {}}, "no other site"),
        ({"site": "b"}, "this site"),
        ({"site": "a b"}, "no name of a site"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    """The error names the value and what to give instead."""
    good = {
        "site": "a", "near": [NEAR], "sites": {"b": FarSite(key=KEY, networks=[FAR])}, "settings": SETTINGS,
        "frames": ("127.0.0.1", 0),
    }  # fmt: skip
    with pytest.raises(InputError) as error:
        GatewayConfig(**(good | change))  # type: ignore[arg-type]
    assert words in f"{error.value.message} {error.value.hint}"


def test_an_address_in_use_is_said() -> None:
    """The error names the address."""
    taken = bind_udp(("127.0.0.1", 0))
    with pytest.raises(UnavailableError, match=str(taken.getsockname()[1])):
        bind_udp(taken.getsockname())
    taken.close()
