"""Legs over queue pairs in user space, through RoCE gateways on loopback: the conformance kit, a lost gateway."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from isthmus.wan.dial import parse_address
from isthmus.wan.gateway.gateway_config import FarSite, GatewayConfig
from isthmus.wan.gateway.gateway_service import GatewayService
from isthmus.wan.legs.check_leg import check_leg
from isthmus.wan.legs.dial_leg import dial_leg
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_entrance import LegEntrance
from isthmus.wan.legs.leg_greeting import LegDialler, LegListener
from isthmus.wan.legs.roce_host import GatewayDoor, RoceHost
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import NicSettings, PostWork, RoceNic, Transmit
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame
from tests.wan.legs.test_legs import KEY, Admitted, greeting

NICS = {"hangzhou": "10.1.0.1", "nanjing": "10.2.0.1"}
SETTINGS = GatewaySettings(link_gbps=0.4, nic_gbps=10, round_trip_s=0.02, acknowledge_near=True)


def free_port() -> tuple[str, int]:
    """Return a free UDP address on loopback."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()


class TwoSites:
    """Hosts of hangzhou and nanjing, joined by pairs of gateways; the entrance is nanjing's."""

    def __init__(self, num_gateways: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.doors = {
            site: [GatewayDoor(name=f"g{n}", frames=free_port(), nic=free_port()) for n in range(num_gateways)]
            for site in NICS
        }
        self._legs: list[Leg] = []
        self.gateways = [self._start_pair(n) for n in range(num_gateways)]
        self.admitted = Admitted()
        keys = LegListener("nanjing", {"hangzhou": KEY})
        self.entrance = LegEntrance(None, keys, self.admitted, self._loop)
        self.near = RoceHost(NICS["hangzhou"], self.doors["hangzhou"], self._loop, lambda *_: None)
        self.far = RoceHost(NICS["nanjing"], self.doors["nanjing"], self._loop, self.entrance.greet)

    def _start_pair(self, number: int) -> list[GatewayService]:
        services: list[GatewayService] = []
        for site, other in (("nanjing", "hangzhou"), ("hangzhou", "nanjing")):
            far = FarSite(
                key=KEY,
                networks=[ipaddress.ip_network(NICS[other])],
                address=parse_address(services[0].listens_at) if services else None,
            )
            door = self.doors[site][number]
            config = GatewayConfig(
                site=site, near=[ipaddress.ip_network(NICS[site])], sites={other: far}, settings=SETTINGS,
                frames=door.frames, nics={NICS[site]: door.nic},
            )  # fmt: skip
            services.append(GatewayService(config, self._loop))
            services[-1].start()
        return services

    async def legs(self, dialler: LegDialler | None = None) -> tuple[Leg, Leg]:
        """Return both ends of a leg."""
        opens = dialler or greeting()
        dialled = await dial_leg(self._loop, self._open, opens)
        if dialled is None:
            raise AssertionError("the leg was not taken")
        pair = dialled, await self.admitted.legs.get()
        self._legs += pair
        return pair

    async def _open(self) -> socket.socket:
        return self.near.open(NICS["nanjing"])

    def close(self) -> None:
        """Close all."""
        for leg in self._legs:
            leg.close()
        self.entrance.close()
        for one in (self.near, self.far, *(one for pair in self.gateways for one in pair)):
            one.close()


@asynccontextmanager
async def two_sites(num_gateways: int = 1) -> AsyncIterator[TwoSites]:
    """Start two sites."""
    sites = TwoSites(num_gateways)
    try:
        yield sites
    finally:
        sites.close()
        await asyncio.sleep(0)


def test_a_leg_over_queue_pairs_keeps_every_rule_of_legs() -> None:
    """Frames of every size arrive whole both ways through gateways; a side that closes is noticed by the other."""

    async def check() -> None:
        async with two_sites() as sites:
            await check_leg(sites.legs, num_frames=10)

    asyncio.run(check())


def test_a_gateway_that_dies_breaks_its_legs_at_once_and_others_take_new_ones() -> None:
    """Within 0.3 s of a gateway's end its leg is broken, and every leg after it goes through the other gateway."""

    class Owner:
        def __init__(self) -> None:
            self.broken = asyncio.Event()

        def leg_ready(self) -> None: ...
        def leg_frame(self, frame: object) -> None: ...
        def leg_broken(self, _reason: str) -> None:
            self.broken.set()

    async def check() -> None:
        async with two_sites(2) as sites:
            used = dict.fromkeys(("g0", "g1"), 0)
            legs, owners = [], []
            for index in range(8):
                dialler = LegDialler(KEY, ("hangzhou", "nanjing"), b"t" * 16, index, is_new=True)
                leg, _ = await sites.legs(dialler)
                owner = Owner()
                leg.start(owner)
                legs.append(leg)
                owners.append(owner)
            for name in sites.near.gateways_used():
                used[name] += 1
            assert all(used.values()), used
            for one in sites.gateways[0]:
                one.close()
            for leg in legs:
                leg.send(TunnelFrame(FrameKind.PING))
            broken = [owner.broken.wait() for owner in owners]
            done, waiting = await asyncio.wait([asyncio.ensure_future(one) for one in broken], timeout=0.3)
            assert (len(done), len(waiting)) == (used["g0"], used["g1"])
            for one in waiting:
                one.cancel()
            assert sites.near.weights() == {"g1": 1.0}
            assert await sites.legs()

    asyncio.run(check())


def test_frames_of_strangers_open_no_queue_pair() -> None:
    """A frame for another address, in the middle of a message, or of this side's own parity is refused."""

    async def check() -> None:
        async with two_sites() as sites:
            loop = asyncio.get_running_loop()
            door = sites.doors["nanjing"][0]
            sites.gateways[0][0].close()
            with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
                stranger.bind(door.frames)
                for peer, number, psn in (("10.2.0.9", 2, 0), ("10.2.0.1", 2, 7), ("10.2.0.1", 3, 0)):
                    nic = RoceNic(
                        NicSettings(
                            address="10.1.0.1", peer=peer, queue_pair=number, peer_queue_pair=number, first_psn=psn
                        )
                    )
                    for one in nic.handle(PostWork("send", b"let me in"), loop.time()):
                        if isinstance(one, Transmit):
                            stranger.sendto(one.frame, door.nic)
                stranger.sendto(b"no frame", door.nic)
                await asyncio.sleep(0.05)
            assert sites.far.num_queue_pairs == 0
            assert sites.far.num_refused >= 4

    asyncio.run(check())
