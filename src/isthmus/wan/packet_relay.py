"""IP packet relay between emulated sites: rate, delay, jitter, a finite queue and real packet loss.

`wan.netns` starts `python -m isthmus.wan.packet_relay`. The first line of its standard input is the configuration,
each further line requests the counters; at end of file the process deletes its namespaces and exits.
"""

from __future__ import annotations

import gc
import json
import math
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from isthmus.core.pool import Link, Pool
from isthmus.wan.netns import delete_namespaces
from isthmus.wan.packet_faults import PacketFaults
from isthmus.wan.precise_timing import request_prompt_wakeup
from isthmus.wan.shaper import Shaper, links_both_ways
from isthmus.wan.tun_packet import WirePacket, measure_packet, surviving_segments

_MAX_READ_PACKETS = 64
"""Packets to read from one device before delivering due packets."""

_MAX_READ_BYTES = 2**16 + 64
_GC_THRESHOLD = 100_000


@dataclass
class PacketLink:
    """One direction of a link: delays packets, tail-drops at `queue_s` of backlog, loses, repeats and reorders some.

    Sizes are those of IP packets. Of several segments that come as one packet each is lost by itself; the full queue
    drops them together. What the IP packets carry, TCP, UDP or other, makes no difference.
    """

    link: Link
    reverse: Link
    rng: Random
    target_fd: int
    """TUN descriptor of the receiving site."""
    in_flight: deque[tuple[float, bytes, WirePacket]] = field(default_factory=deque)
    """(delivery time in seconds, header and packet, what it is on the wire), in order."""
    late: list[tuple[float, int, bytes, WirePacket]] = field(default_factory=list)
    """A heap of packets that later ones overtake: (delivery time, number, header and packet, what it is)."""
    num_packets: int = 0
    """Packets delivered, each segment as one."""
    num_bytes: int = 0
    """Bytes delivered."""
    num_lost: int = 0
    """Packets lost at random."""
    num_dropped: int = 0
    """Packets that the full queue, or the receiving device, dropped, and those larger than the link's MTU."""
    num_late: int = 0
    """Packets sent on late, for later ones to overtake."""
    num_repeated: int = 0
    """Packets sent on twice."""

    def __post_init__(self) -> None:
        shaper = Shaper(self.link, self.rng, self.reverse)
        self.path, self.queue_s = shaper.path, shaper.queue_s
        self.faults = PacketFaults(self.link, self.rng)

    def enqueue(self, now_s: float, data: bytes, packet: WirePacket) -> None:
        """Enqueue a packet from the sending site, drop it (queue full) or lose it (at random)."""
        too_large = packet.num_segments == 1 and packet.num_bytes > self.link.mtu_bytes
        if too_large or self.path.backlog_s(now_s) > self.queue_s:
            self.num_dropped += packet.num_segments
            return
        arrival_s = self.path.admit(now_s, packet.num_bytes)
        lost = {place for place in range(packet.num_segments) if self.faults.loses()} if self.link.loss else ()
        if lost:
            self.num_lost += len(lost)
            pieces = surviving_segments(data, packet, lost)
            self.in_flight.extend((arrival_s, *piece) for piece in pieces)
            return
        late_s = self.faults.delay_s()
        if late_s:
            self.num_late += packet.num_segments
            heappush(self.late, (arrival_s + late_s, self.num_late, data, packet))
        else:
            self.in_flight.append((arrival_s, data, packet))
        if self.faults.repeats():
            self.num_repeated += packet.num_segments
            self.in_flight.append((self.path.admit(now_s, packet.num_bytes), data, packet))

    def next_s(self) -> float:
        """Return when the next packet is due; infinity if none is in flight."""
        next_s = self.in_flight[0][0] if self.in_flight else math.inf
        return min(next_s, self.late[0][0]) if self.late else next_s

    def deliver(self, now_s: float) -> None:
        """Write due packets to the receiving site's device."""
        due = self.in_flight
        while self.late and self.late[0][0] <= now_s:
            while due and due[0][0] <= self.late[0][0]:
                self._write(*due.popleft()[1:])
            self._write(*heappop(self.late)[2:])
        while due and due[0][0] <= now_s:
            self._write(*due.popleft()[1:])

    def _write(self, data: bytes, packet: WirePacket) -> None:
        try:
            os.write(self.target_fd, data)
        except OSError:  # the device is down or full
            self.num_dropped += packet.num_segments
            return
        self.num_packets += packet.num_segments
        self.num_bytes += packet.num_bytes


class PacketRelay:
    """Relay for all links of a pool; `devices` is {cluster: (IPv4 address, TUN descriptor)}."""

    def __init__(
        self,
        pool: Pool,
        devices: dict[str, tuple[str, int]],
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        links = links_both_ways(pool)
        self.links = {
            ends: PacketLink(link, links[ends[::-1]], Random(f"{seed}/{ends[0]}/{ends[1]}"), devices[ends[1]][1])  # noqa: S311 - seeded, so that runs repeat; no secret
            for ends, link in links.items()
        }
        packed = {name: socket.inet_aton(address) for name, (address, _) in devices.items()}
        self._outgoing = {
            fd: {packed[ends[1]]: link for ends, link in self.links.items() if ends[0] == name}
            for name, (_, fd) in devices.items()
        }

    def run(self, control_fd: int, answer_fd: int) -> None:
        """Relay until end of file on `control_fd`; for each line on it write the counters to `answer_fd`."""
        descriptors = [*self._outgoing, control_fd]
        while True:
            ready = select.select(descriptors, [], [], self._wait_s())[0]
            for descriptor in ready:
                if descriptor != control_fd:
                    self._read_device(descriptor)
                elif not os.read(control_fd, 4096):
                    return
                else:
                    os.write(answer_fd, (json.dumps(self.counters()) + "\n").encode())
            now_s = self._clock()
            for link in self.links.values():
                link.deliver(now_s)

    def counters(self) -> list[dict[str, Any]]:
        """Return per direction the packets and bytes delivered, and the packets lost, dropped, late and repeated."""
        return [
            {"from": ends[0], "to": ends[1], "packets": link.num_packets, "bytes": link.num_bytes}
            | {"lost": link.num_lost, "dropped": link.num_dropped, "loss_is": "real"}
            | {"late": link.num_late, "repeated": link.num_repeated}
            for ends, link in self.links.items()
        ]

    def _wait_s(self) -> float | None:
        next_s = min((link.next_s() for link in self.links.values()), default=math.inf)
        return max(0.0, next_s - self._clock()) if next_s < math.inf else None

    def _read_device(self, descriptor: int) -> None:
        outgoing, now_s = self._outgoing[descriptor], self._clock()
        for _ in range(_MAX_READ_PACKETS):
            try:
                data = os.read(descriptor, _MAX_READ_BYTES)
            except BlockingIOError:
                return
            packet = measure_packet(data)
            link = outgoing.get(packet.target) if packet else None
            if packet is not None and link is not None:
                link.enqueue(now_s, data, packet)


def main() -> None:
    """Read the configuration, relay until end of input, delete the namespaces."""
    config = json.loads(_read_line(0))
    devices = {name: (address, fd) for name, (address, fd) in config["devices"].items()}
    relay = PacketRelay(Pool.model_validate(config["pool"]), devices, config["seed"])
    request_prompt_wakeup()
    gc.freeze()  # packets are freed by their counts; collections would take a tenth of the time
    gc.set_threshold(_GC_THRESHOLD)
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
