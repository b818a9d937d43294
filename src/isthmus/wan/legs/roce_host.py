"""`RoceHost`: queue pairs of this host in user space, whose bytes legs see as those of a connected socket.

A leg dials a queue pair where it would dial TCP: the host gives one end of a pair of sockets, and carries what comes
out of the other end as SENDs through the gateway that `pick_gateway` names for the queue pair (4.2.5 of the report on
cross-domain pooling). Both sides use the dialler's number, so no connection message is needed: the first packet of an
unknown number, of the parity that the other address dials with, opens the far end. Nothing is trusted before the
greeting of the leg, which goes over it.

A gateway that refuses frames, or over which nothing of the far side comes for `silence_s`, is left for `RETRY_S`: its
queue pairs end at once, and the legs dial others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.wan.control.choose_transport import RoceFlow
from isthmus.wan.control.pick_gateway import pick_gateway
from isthmus.wan.legs.queue_pair_socket import QueuePairSocket
from isthmus.wan.roce.nic import NicSettings
from isthmus.wan.roce.request_order import STARTS
from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_view import MAX_FRAME_BYTES, RoceView, view_frame

RETRY_S = 5.0
"""Time for which a gateway that failed gets no new queue pairs, where another one takes them."""

RESEND_S, MAX_RETRIES = 0.5, 30
"""Patience of a queue pair: only the way to this site's gateway is bridged by it, and both may wait for a core."""

WINDOW_BYTES = 128 * 2**10
"""Payload of a queue pair without an acknowledgement: those of several fit the socket buffers of a busy gateway."""

MAX_QUEUE_PAIRS = 256
_MAX_READS = 64
_FIRST_PORT, _NUM_PORTS = 49_152, 16_384
_REQUEST_KINDS = frozenset({Opcode.SEND_FIRST, Opcode.SEND_MIDDLE, Opcode.SEND_LAST, Opcode.SEND_ONLY})
_RECEIVE_BYTES = 8 * 2**20

Address = tuple[str, int]
OnAccept = Callable[[socket.socket, str], None]
"""Called with the leg's end of a queue pair that another host opened, and that host's address."""


@dataclass(frozen=True, kw_only=True)
class GatewayDoor:
    """A gateway of this site: where it takes frames of NICs, where it sends them, and its share of queue pairs."""

    name: str
    frames: Address
    nic: Address
    weight: float = 1.0


class _OpenDoor:
    def __init__(self, door: GatewayDoor, now_s: float) -> None:
        self.door, self.heard_s, self.left_until_s = door, now_s, 0.0
        family = socket.AF_INET6 if ":" in door.frames[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self.socket.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                self.socket.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BYTES)
            self.socket.bind(door.nic)
            self.socket.connect(door.frames)  # a gateway that is gone refuses what is sent
        except OSError as error:
            self.socket.close()
            raise UnavailableError(
                f"frames of gateway {door.name} cannot be taken at {door.nic[0]}:{door.nic[1]}: {error.strerror}",
                hint="another process of this site may run already",
            ) from error


class RoceHost:
    """The queue pairs of `address`, through `doors`; `on_accept` takes those that other hosts open."""

    def __init__(
        self,
        address: str,
        doors: Sequence[GatewayDoor],
        loop: asyncio.AbstractEventLoop,
        on_accept: OnAccept,
        *,
        mtu_bytes: int = 1024,
        round_trip_s: float = 0.1,
        silence_s: float = 0.6,
    ) -> None:
        """Raise `UnavailableError` if a door's address cannot be bound."""
        self.address, self._loop, self._on_accept = address, loop, on_accept
        self._mtu_bytes, self._round_trip_s, self._silence_s = mtu_bytes, round_trip_s, silence_s
        self._pairs: dict[tuple[str, int], tuple[QueuePairSocket, _OpenDoor]] = {}
        self._ended: dict[tuple[str, int], None] = {}
        self._doors: dict[str, _OpenDoor] = {}
        self._watch: asyncio.TimerHandle | None = None
        self.num_refused = 0
        """Frames that were forged, strange or of no queue pair."""
        self.num_left = 0
        """Times that a gateway was left."""
        try:
            for door in doors:
                self._doors[door.name] = one = _OpenDoor(door, loop.time())
                loop.add_reader(one.socket, self._read, one)
        except UnavailableError:
            self.close()
            raise
        self._look()

    @property
    def num_queue_pairs(self) -> int:
        """Queue pairs that are open."""
        return len(self._pairs)

    def gateways_used(self) -> list[str]:
        """Return the gateway of each open queue pair."""
        return [one.door.name for _, one in self._pairs.values()]

    def weights(self) -> dict[str, float]:
        """Return the share of each gateway that `open` uses: none for those that were left."""
        now_s = self._loop.time()
        usable = {name: one.door.weight for name, one in self._doors.items() if one.left_until_s <= now_s}
        return usable if any(usable.values()) else {name: one.door.weight for name, one in self._doors.items()}

    def open(self, peer: str) -> socket.socket:
        """Return a socket whose bytes go to `peer` over a new queue pair.

        Raises `UnavailableError` if no gateway takes it.
        """
        peer = str(ipaddress.ip_address(peer))
        number = self._free_number(peer)
        port = _FIRST_PORT + number % _NUM_PORTS
        flow = RoceFlow(source=self.address, target=peer, source_port=port, required_gbps=1.0)
        return self._add(peer, number, self._doors[pick_gateway(flow, self.weights(), Counter(self.gateways_used()))])

    def close(self) -> None:
        """Close everything."""
        if self._watch is not None:
            self._watch.cancel()
        for pair, _ in list(self._pairs.values()):
            pair.close()
        for one in self._doors.values():
            self._loop.remove_reader(one.socket)
            one.socket.close()
        self._doors.clear()

    def _free_number(self, peer: str) -> int:
        ports = {number % _NUM_PORTS for address, number in self._pairs if address == peer}
        while True:
            number = secrets.randbelow(2**23 - 1) * 2 + 2 + self._dials_odd(self.address, peer)
            if number < 2**24 and number % _NUM_PORTS not in ports and (peer, number) not in self._pairs:
                return number

    @staticmethod
    def _dials_odd(dialler: str, other: str) -> int:
        return int(ipaddress.ip_address(dialler).packed > ipaddress.ip_address(other).packed)

    def _add(self, peer: str, number: int, one: _OpenDoor) -> socket.socket:
        if len(self._pairs) >= MAX_QUEUE_PAIRS:
            raise UnavailableError(f"{len(self._pairs)} queue pairs are open", hint="use fewer streams")
        settings = NicSettings(
            address=self.address,
            peer=peer,
            queue_pair=number,
            peer_queue_pair=number,
            source_port=_FIRST_PORT + number % _NUM_PORTS,
            mtu_bytes=self._mtu_bytes,
            window_bytes=WINDOW_BYTES,
            resend_s=max(RESEND_S, 4 * self._round_trip_s),
            max_retries=MAX_RETRIES,
            port_gbps=10.0,
        )
        if not any(known is one for _, known in self._pairs.values()):
            one.heard_s = self._loop.time()
        key = peer, number
        pair = QueuePairSocket(settings, self._loop, partial(self._send, one), partial(self._forget, key))
        self._pairs[key] = pair, one
        return pair.far_end

    def _forget(self, key: tuple[str, int]) -> None:
        self._pairs.pop(key, None)
        self._ended[key] = None
        if len(self._ended) > 4 * MAX_QUEUE_PAIRS:
            del self._ended[next(iter(self._ended))]

    def _send(self, one: _OpenDoor, frame: bytes) -> None:
        try:
            one.socket.send(frame)
        except ConnectionRefusedError:
            self._loop.call_soon(self._leave, one)
        except OSError:  # full: the queue pair resends
            return

    def _read(self, one: _OpenDoor) -> None:
        for _ in range(_MAX_READS):
            try:
                frame = one.socket.recv(MAX_FRAME_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionRefusedError:
                self._leave(one)
                return
            except OSError:
                return
            try:
                self._take(view_frame(frame), one)
            except ProtocolError:
                self.num_refused += 1

    def _take(self, view: RoceView, one: _OpenDoor) -> None:
        half = len(view.ends) // 2
        source, target = (str(ipaddress.ip_address(end)) for end in (view.ends[:half], view.ends[half:]))
        if target != self.address:
            raise ProtocolError(f"a frame for {target}")
        if view.opcode in _REQUEST_KINDS:  # of the far host: acknowledgements are the near gateway's
            one.heard_s = self._loop.time()
        key = source, view.queue_pair
        if key not in self._pairs:
            is_first = view.opcode in STARTS and view.opcode in _REQUEST_KINDS and view.psn == 0
            is_dialled = view.queue_pair % 2 == self._dials_odd(source, self.address)
            if not (is_first and is_dialled) or key in self._ended or len(self._pairs) >= MAX_QUEUE_PAIRS:
                raise ProtocolError(f"a frame of the unknown queue pair {view.queue_pair}")
            self._on_accept(self._add(source, view.queue_pair, one), source)
        self._pairs[key][0].take(view.frame)

    def _look(self) -> None:
        """Leave doors over which the far side is silent."""
        if len(self._doors) > 1:
            now_s = self._loop.time()
            for one in self._doors.values():
                is_used = any(known is one and pair.was_heard for pair, known in self._pairs.values())
                if is_used and now_s > one.heard_s + self._silence_s:
                    self._leave(one)
        self._watch = self._loop.call_later(min(0.05, self._silence_s / 4), self._look)

    def _leave(self, one: _OpenDoor) -> None:
        """End the queue pairs of a gateway: their legs break now, not after their own silence."""
        mine = [pair for pair, known in self._pairs.values() if known is one]
        if not mine and one.left_until_s > self._loop.time():
            return
        self.num_left += 1
        one.left_until_s = self._loop.time() + RETRY_S
        for pair in mine:
            with suppress(OSError):
                pair.close()
