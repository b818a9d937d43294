"""`UserSpaceDevice`: a NIC of this process that speaks RoCEv2 from UDP port 4791 of one address.

Its queue pairs are those of `isthmus.wan.roce.nic` (go-back-N), with registered memory and posted receives. The packets
are those of a real NIC: the kernel adds the IP and UDP headers which the ICRC covers. For machines without a card, to
see that the leg works; it is far slower than TCP.
"""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from isthmus.comm.rdma.verbs import MTU_CODES, Completion, PairRecord
from isthmus.core.errors import ProtocolError
from isthmus.core.loopback import is_loopback
from isthmus.wan import (
    PSN_SPAN,
    UDP_PORT,
    MessageArrived,
    NicArrival,
    NicEvent,
    NicFailed,
    NicSettings,
    NicTick,
    PostWork,
    RethHeader,
    RoceNic,
    Transmit,
    WorkDone,
    frame_of_payload,
)

_LOOPBACK_MTU_CODE, _MTU_CODE = 5, 3
_IP_UDP_BYTES, _HEADER_BYTES = 28, 12
_WINDOW_BYTES = 64 * 2**10
"""Payload of a queue pair without an acknowledgement: those of several fit a socket's buffer."""
_RESEND_S, _MAX_RETRIES = 0.1, 20
_NOT_READY_CODE = 14
_BUFFER_BYTES = 8 * 2**20
_MAX_READS = 64
_IP_MTU_DISCOVER, _ALWAYS = 10, 2
"""From linux/in.h: with it packets have the identification 0, as the ICRC says."""

Faults = Callable[[bytes], Iterable[bytes]]
"""What becomes of a packet on its way: nothing, itself, or several."""


class UserSpaceDevice:
    """The device of `address`, IPv4; `faults` is for tests. Raises `OSError` if the port is in use."""

    def __init__(self, address: str, *, faults: Faults = lambda packet: (packet,)) -> None:
        self.address, self._faults = address, faults
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _ALWAYS)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            self._socket.bind((address, UDP_PORT))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.lock = threading.RLock()
        self._pairs: dict[int, UserSpacePair] = {}
        self._waker, self._next_tick_s, self._is_closed = os.eventfd(0, os.EFD_NONBLOCK), math.inf, False
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="isthmus-nic", daemon=True)
        self._thread.start()

    def open_pair(self, memory: memoryview, region_offset: int, region_bytes: int, depth: int) -> UserSpacePair:
        """Return a new pair; see `VerbsDevice`."""
        del depth
        with self.lock:
            if self._failure:
                raise OSError(self._failure)
            number = 2
            while number < 2**8 or number in self._pairs:
                number = secrets.randbelow(2**24)
            gid = ipaddress.IPv6Address(f"::ffff:{self.address}").packed
            first_psn, key = secrets.randbelow(PSN_SPAN), secrets.randbelow(2**32)
            address = secrets.randbelow(2**47) * 2**12
            mtu_code = _LOOPBACK_MTU_CODE if is_loopback(self.address) else _MTU_CODE
            record = PairRecord(gid, 0, number, first_psn, mtu_code, region_bytes, address, key)
            pair = self._pairs[number] = UserSpacePair(self, record, memory, region_offset)
            return pair

    def close(self) -> None:
        """End the device: its pairs send nothing more."""
        self._is_closed = True
        os.eventfd_write(self._waker, 1)
        self._thread.join()
        self._socket.close()
        os.close(self._waker)

    def forget(self, number: int) -> None:
        """Drop a pair; the lock is held."""
        self._pairs.pop(number, None)

    def transmit(self, frame: bytes, target: str) -> None:
        """Send a packet; one that finds no room is lost."""
        for packet in self._faults(frame[_IP_UDP_BYTES:]):
            try:
                self._socket.sendto(packet, (target, UDP_PORT))
            except OSError:
                continue

    def wake_by(self, due_s: float) -> None:
        """Let the thread of the device tick at `due_s`."""
        if due_s < self._next_tick_s:
            os.eventfd_write(self._waker, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whatever it is: nothing else ends the work of the pairs
            with self.lock:
                self._failure = f"the NIC in user space has failed: {error!r}"
                for pair in list(self._pairs.values()):
                    pair.fail(self._failure)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        while not self._is_closed:
            with self.lock:
                now_s = time.monotonic()
                for pair in list(self._pairs.values()):
                    if pair.next_tick_s() <= now_s:
                        pair.handle(NicTick())
                self._next_tick_s = min((one.next_tick_s() for one in self._pairs.values()), default=math.inf)
            left_s = self._next_tick_s - time.monotonic()
            ready = {one for one, _ in poll.poll(None if left_s == math.inf else math.ceil(max(1e3 * left_s, 0)))}
            if self._waker in ready:
                os.eventfd_read(self._waker)
            if self._socket.fileno() in ready:
                self._read()

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            try:
                payload, (source, port) = self._socket.recvfrom(2**16)
            except OSError:
                return
            pair = self._pairs.get(int.from_bytes(payload[5:8], "big")) if len(payload) >= _HEADER_BYTES else None
            if pair is not None and source == pair.peer_address:
                frame = frame_of_payload(payload, source, self.address, port)
                with self.lock:
                    pair.handle(NicArrival(frame))


class UserSpacePair:
    """A queue pair of a `UserSpaceDevice`; a `VerbsPair`."""

    def __init__(self, device: UserSpaceDevice, record: PairRecord, memory: memoryview, region_offset: int) -> None:
        self.record, self.peer_address = record, ""
        self._device, self._memory, self._region_offset = device, memory, region_offset
        self._nic: RoceNic | None = None
        self._peer_key = 0
        self._receives: deque[tuple[int, int, int]] = deque()
        self._completions: deque[Completion] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def connect(self, peer: PairRecord) -> None:
        """Join `peer`; see `VerbsPair`."""
        where = ipaddress.IPv6Address(peer.gid).ipv4_mapped
        if where is None:
            raise ProtocolError(f"gid {ipaddress.IPv6Address(peer.gid)} is not of IPv4, as those in user space are")
        settings = NicSettings(
            address=self._device.address,
            peer=str(where),
            queue_pair=self.record.number,
            peer_queue_pair=peer.number,
            source_port=UDP_PORT,
            first_psn=self.record.first_psn,
            peer_first_psn=peer.first_psn,
            mtu_bytes=min(MTU_CODES[self.record.mtu_code], MTU_CODES[peer.mtu_code]),
            window_bytes=_WINDOW_BYTES,
            resend_s=_RESEND_S,
            max_retries=_MAX_RETRIES,
            port_gbps=1e6,
            ack_packets=8,
        )
        with self._device.lock:
            self._nic, self._peer_key, self.peer_address = RoceNic(settings), peer.key, str(where)
            self._nic.accepts = self._accepts
            self._set_ready()

    def post_receive(self, number: int, offset: int, num_bytes: int) -> None:
        """Lend memory; see `VerbsPair`."""
        with self._device.lock:
            self._receives.append((number, offset, num_bytes))
            self._set_ready()

    def post_send(self, offset: int, num_bytes: int) -> None:
        """Send; see `VerbsPair`."""
        self.handle(PostWork("send", bytes(self._memory[offset : offset + num_bytes])))

    def post_write(self, offset: int, num_bytes: int, address: int, immediate: int) -> None:
        """Write; see `VerbsPair`."""
        data = bytes(self._memory[offset : offset + num_bytes])
        self.handle(PostWork("write", data, address, key=self._peer_key, immediate=immediate))

    def fileno(self) -> int:
        """Return the descriptor of completions; see `VerbsPair`."""
        return self._event

    def poll(self) -> list[Completion]:
        """Return completions; see `VerbsPair`."""
        with self._device.lock:
            found = list(self._completions)
            self._completions.clear()
            if found:
                os.eventfd_read(self._event)
            return found

    def close(self) -> None:
        """Destroy the pair."""
        with self._device.lock:
            self._device.forget(self.record.number)
            self._nic = None
            os.close(self._event)

    def fail(self, reason: str) -> None:
        """Report that the device has failed; the lock is held."""
        self._complete(Completion(is_receive=False, number=0, error=reason))

    def next_tick_s(self) -> float:
        """Return when a `NicTick` is due."""
        return math.inf if self._nic is None else self._nic.next_tick_s()

    def handle(self, event: NicEvent) -> None:
        """Let the queue pair handle `event`, and carry out what it returns."""
        with self._device.lock:
            if self._nic is None:
                if isinstance(event, PostWork):
                    raise OSError("the queue pair is not connected")
                return
            for one in self._nic.handle(event, time.monotonic()):
                if isinstance(one, Transmit):
                    self._device.transmit(one.frame, self.peer_address)
                elif isinstance(one, MessageArrived):
                    self._arrived(one)
                elif isinstance(one, WorkDone):
                    self._complete(Completion(is_receive=False, number=0))
                elif isinstance(one, NicFailed):
                    self._complete(Completion(is_receive=False, number=0, error=one.reason))
            self._device.wake_by(self._nic.next_tick_s())

    def _set_ready(self) -> None:
        if self._nic is not None:
            self._nic.not_ready_code = None if self._receives else _NOT_READY_CODE

    def _accepts(self, target: RethHeader | None, num_bytes: int) -> bool:
        if target is None:
            return num_bytes <= self._receives[0][2]
        first, record = target.address - self.record.address, self.record
        return target.key == record.key and first >= 0 and first + target.num_bytes <= record.region_bytes

    def _arrived(self, message: MessageArrived) -> None:
        target, size = message.target, len(message.data)
        if target is not None:
            place = self._region_offset + target.address - self.record.address
            self._memory[place : place + size] = message.data
        if target is not None and message.immediate is None:
            return
        number, offset, _ = self._receives.popleft()
        if target is None:
            self._memory[offset : offset + size] = message.data
        self._set_ready()
        self._complete(Completion(is_receive=True, number=number, num_bytes=size, immediate=message.immediate))

    def _complete(self, one: Completion) -> None:
        self._completions.append(one)
        os.eventfd_write(self._event, 1)
