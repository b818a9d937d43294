"""The shell of a tunnel: what comes on a leg counts from the leg's first moment."""

from __future__ import annotations

import asyncio
import socket

from isthmus.wan.legs.leg import LegOwner
from isthmus.wan.proxy.tunnel_shell import RefusedTargetError, TunnelShell
from isthmus.wan.tunnel.tunnel import Tunnel
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame


class EagerLeg:
    """A leg on which frames have come before it is started: it hands them over at once, as datagram legs do."""

    max_payload_bytes = 1000

    def __init__(self, *frames: TunnelFrame) -> None:
        self.frames, self.sent = frames, list[TunnelFrame]()

    def start(self, owner: LegOwner) -> None:
        self.owner = owner
        for frame in self.frames:
            owner.leg_frame(frame)

    def send(self, frame: TunnelFrame) -> None:
        self.sent.append(frame)

    def close(self) -> None:
        pass


def test_frames_that_came_before_the_start_of_a_leg_are_taken() -> None:
    """The other side opens a stream at once: the tunnel acts on it, for nobody sends it again."""

    async def run() -> list[str]:
        asked: list[str] = []

        async def connect(target: str) -> socket.socket:
            asked.append(target)
            raise RefusedTargetError("closed")

        loop = asyncio.get_running_loop()
        tunnel = Tunnel(is_dialler=False, num_legs=0, now_s=loop.time())
        shell = TunnelShell(tunnel, loop, connect=connect)
        shell.add_leg(EagerLeg(TunnelFrame(FrameKind.OPEN, 0, 0, 0, b"10.0.0.2:7000")), 0)
        for _ in range(5):
            await asyncio.sleep(0)
        return asked

    assert asyncio.run(run()) == ["10.0.0.2:7000"]
