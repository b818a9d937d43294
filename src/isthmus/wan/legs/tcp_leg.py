"""`TcpLeg`: a leg over one TCP stream, with a record of AES-256-GCM for each header and each payload.

The congestion control is set per socket: BBR keeps its rate where packets are lost at random (N. Cardwell et al.,
"BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016). The kernel holds little unsent data, so a slow
stream takes few frames and the others the rest.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from isthmus.core.errors import ProtocolError
from isthmus.noise import TAG_BYTES, CipherState, UnauthenticatedError
from isthmus.wan.legs.leg import LegOwner
from isthmus.wan.tunnel.tunnel_frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, TunnelFrame, parse_frame_header

CONGESTION_CONTROL = "bbr"

_SO_MAX_PACING_RATE = 47
"""Socket option of Linux (asm-generic/socket.h), which Python does not name."""
_MAX_PACING = 2**32 - 2
_UNSENT_BYTES = 2**20
_MAX_READS = 16
_MAX_WRITES = 4
_HEADER_RECORD_BYTES = HEADER_BYTES + TAG_BYTES


def set_leg_options(
    sock: socket.socket, congestion_control: str = CONGESTION_CONTROL, bytes_per_s: int | None = None
) -> bool:
    """Prepare the socket of a leg, which sends at most `bytes_per_s`; return whether the kernel has the control."""
    sock.setblocking(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False  # the end of a queue pair, which has a rate of its own
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if bytes_per_s is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(bytes_per_s, _MAX_PACING))
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    except OSError:
        return False
    return True


class TcpLeg:
    """A `Leg` over `sock`, whose handshake ended with the two cipher states."""

    max_payload_bytes = MAX_PAYLOAD_BYTES

    def __init__(
        self, sock: socket.socket, sending: CipherState, receiving: CipherState, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._sock, self._sending, self._receiving, self._loop = sock, sending, receiving, loop
        self._owner: LegOwner | None = None
        self._out = memoryview(b"")
        self._out_buffer = bytearray(_HEADER_RECORD_BYTES + MAX_PAYLOAD_BYTES + TAG_BYTES)
        self._in_buffer = bytearray(MAX_PAYLOAD_BYTES + TAG_BYTES + _HEADER_RECORD_BYTES)
        self._wanted, self._filled = _HEADER_RECORD_BYTES, 0
        self._descriptor = sock.fileno()  # the loop looks numbers up faster than sockets
        self._frame: TunnelFrame | None = None
        self._low_water = 1
        self._is_writing = self._has_sent = False

    def start(self, owner: LegOwner) -> None:
        """Begin to call `owner`; see `Leg`."""
        self._owner = owner
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, frame: TunnelFrame) -> None:
        """Send a frame; see `Leg`."""
        payload, buffer = frame.payload, memoryview(self._out_buffer)
        self._sending.encrypt_into(frame.header(), buffer[:_HEADER_RECORD_BYTES])
        end = _HEADER_RECORD_BYTES
        if payload:
            end += len(payload) + TAG_BYTES
            self._sending.encrypt_into(payload, buffer[_HEADER_RECORD_BYTES:end])
        self._out, self._has_sent = buffer[:end], True
        if self._owner is not None:
            self._write()
            if self._owner is not None and not self._is_writing:
                self._is_writing = True
                self._loop.add_writer(self._descriptor, self._writable)

    def close(self) -> None:
        """Close; see `Leg`."""
        self._owner = None
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            self._sock.close()

    def _writable(self) -> None:
        for _ in range(_MAX_WRITES):
            if self._out:
                self._write()
            if self._out or self._owner is None:
                return
            self._has_sent = False
            self._owner.leg_ready()
            if not self._has_sent:
                if self._owner is not None:
                    self._is_writing = False
                    self._loop.remove_writer(self._descriptor)
                return

    def _write(self) -> None:
        try:
            while self._out:
                self._out = self._out[self._sock.send(self._out) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._break(error.strerror or str(error))

    def _read(self) -> None:
        try:
            for _ in range(_MAX_READS):
                if self._owner is None:
                    return
                end = self._wanted if self._frame is None else self._wanted + _HEADER_RECORD_BYTES
                num_bytes = self._sock.recv_into(memoryview(self._in_buffer)[self._filled : end])
                if num_bytes == 0:
                    self._break("closed by the other proxy")
                    return
                self._filled += num_bytes
                while self._filled >= self._wanted and self._owner is not None:
                    self._take_record()
            self._set_low_water(1)
        except (BlockingIOError, InterruptedError):
            self._set_low_water(self._wanted - self._filled)
        except (ProtocolError, UnauthenticatedError, OSError) as error:
            self._break(str(error))

    def _take_record(self) -> None:
        sealed = memoryview(self._in_buffer)[: self._wanted]
        content = bytearray(self._wanted - TAG_BYTES)
        self._receiving.decrypt_into(sealed, memoryview(content))
        rest = self._in_buffer[self._wanted : self._filled]  # at most the next header
        self._in_buffer[: len(rest)] = rest
        self._filled = len(rest)
        if self._frame is None:
            frame, num_bytes = parse_frame_header(content)
            if num_bytes:
                self._frame, self._wanted = frame, num_bytes + TAG_BYTES
                return
        else:
            head, self._frame = self._frame, None
            frame = TunnelFrame(head.kind, head.number, head.stream, head.offset, content)
            self._wanted = _HEADER_RECORD_BYTES
        if self._owner is not None:
            self._owner.leg_frame(frame)

    def _set_low_water(self, num_bytes: int) -> None:
        """Wake this process once per record rather than with each packet: nothing can be done with a part of one."""
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _break(self, reason: str) -> None:
        owner = self._owner
        self.close()
        if owner is not None:
            owner.leg_broken(reason)
