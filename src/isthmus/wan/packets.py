"""The relay of IP packets between emulated sites: rate, delay, jitter, a finite queue, packets really lost.

`python -m isthmus.wan.packets` is started by `wan.netns` and lives as long as its standard input: the first
line is its configuration, each further line asks for the counters, and the end ends it and its namespaces.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from isthmus.core.pool import Link, Pool
from isthmus.wan.clock import ask_to_be_woken_soon
from isthmus.wan.netns import delete_namespaces
from isthmus.wan.shaper import Shaper, both_ways

_BATCH = 64
"""Packets read from one device before deliveries get their turn."""


@dataclass
class PacketLink:
    """One direction: packets in, packets out when due. Tail drop at `queue_s` of backlog; loss on the wire.

    Sizes are IP packets. `lost` counts random loss, `dropped` what the full queue refused.
    """

    link: Link
    reverse: Link
    rng: Random
    target: int
    due: deque[tuple[float, bytes]] = field(default_factory=deque)
    packets: int = 0
    num_bytes: int = 0
    lost: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        shaper = Shaper(self.link, self.rng, self.reverse)
        self.path, self.queue_s = shaper.path, shaper.queue_s

    def offer(self, now_s: float, packet: bytes) -> None:
        """Take a packet from the sending site: queue it, drop it, or carry it and lose it on the way."""
        if self.path.backlog_s(now_s) > self.queue_s:
            self.dropped += 1
            return
        arrival_s = self.path.admit(now_s, len(packet))
        if self.link.loss and self.rng.random() < self.link.loss:
            self.lost += 1
            return
        self.due.append((arrival_s, packet))

    def deliver(self, now_s: float) -> None:
        """Write the packets that are due to the receiving site's device."""
        due, target = self.due, self.target
        while due and due[0][0] <= now_s:
            packet = due.popleft()[1]
            try:
                os.write(target, packet)
            except OSError:  # the site's device is down or full: to the sender a packet like any other lost
                self.dropped += 1
                continue
            self.packets += 1
            self.num_bytes += len(packet)


class PacketRelay:
    """All directions of a pool between devices: `devices` is {cluster: (IPv4 address, TUN descriptor)}."""

    def __init__(self, pool: Pool, devices: dict[str, tuple[str, int]], seed: int) -> None:
        links = both_ways(pool)
        self.links = {
            ends: PacketLink(
                link, links[ends[::-1]], Random(f"{seed}/{ends[0]}/{ends[1]}"), devices[ends[1]][1]
            )
            for ends, link in links.items()
        }
        packed = {name: socket.inet_aton(address) for name, (address, _) in devices.items()}
        self._outgoing = {
            fd: {packed[ends[1]]: link for ends, link in self.links.items() if ends[0] == name}
            for name, (_, fd) in devices.items()
        }

    def run(self, control: int, answer: int) -> None:
        """Relay until `control` ends; for each line on it write the counters as a line to `answer`."""
        descriptors = [*self._outgoing, control]
        while True:
            ready = select.select(descriptors, [], [], self._wait_s())[0]
            for descriptor in ready:
                if descriptor != control:
                    self._drain(descriptor)
                elif not os.read(control, 4096):
                    return
                else:
                    os.write(answer, (json.dumps(self.counters()) + "\n").encode())
            now_s = time.monotonic()
            for link in self.links.values():
                link.deliver(now_s)

    def counters(self) -> list[dict[str, Any]]:
        """Return what each direction delivered, lost and dropped: packets, and bytes of the delivered."""
        return [
            {"from": ends[0], "to": ends[1], "packets": link.packets, "bytes": link.num_bytes}
            | {"lost": link.lost, "dropped": link.dropped, "loss_is": "real"}
            for ends, link in self.links.items()
        ]

    def _wait_s(self) -> float | None:
        heads = [link.due[0][0] for link in self.links.values() if link.due]
        return max(0.0, min(heads) - time.monotonic()) if heads else None

    def _drain(self, descriptor: int) -> None:
        outgoing, now_s = self._outgoing[descriptor], time.monotonic()
        for _ in range(_BATCH):
            try:
                packet = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            link = outgoing.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if link is not None:
                link.offer(now_s, packet)


def main() -> None:
    """Read the configuration, relay until the input ends, delete the namespaces."""
    config = json.loads(_read_line(0))
    devices = {name: (address, fd) for name, (address, fd) in config["devices"].items()}
    relay = PacketRelay(Pool.model_validate(config["pool"]), devices, config["seed"])
    ask_to_be_woken_soon()
    try:
        os.write(1, b"ready\n")
        relay.run(0, 1)
    finally:
        delete_namespaces(config["namespaces"])


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(descriptor, 1)
        if not data:
            sys.exit(0)
        line += data
    return line


if __name__ == "__main__":
    main()
