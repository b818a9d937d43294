"""`PacketPort`: frames of a device as they are on the wire, read and sent by a packet socket (Linux, CAP_NET_RAW)."""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

from isthmus.core.errors import NotFoundError, ProtocolError, UnavailableError
from isthmus.wan.tenancy.packets.frame_buffer import HEADROOM_BYTES, MAX_FRAME_BYTES, FrameBuffer
from isthmus.wan.tenancy.packets.inner_checksum import complete_checksum

SOCKET_BYTES = 8 * 2**20
_ETH_P_ALL = 3
_SOL_PACKET = 263
_ADD_MEMBERSHIP, _AUXDATA, _IGNORE_OUTGOING = 1, 8, 23
_PROMISCUOUS = 1
_AUX = struct.Struct("=IIIHHHH")
_NO_CHECKSUM, _VLAN_VALID, _GSO_TCP = 1 << 3, 1 << 4, 1 << 8
_TAG = struct.Struct("!HH")
_VLAN = 0x8100


@dataclass(slots=True)
class PortCounts:
    """What a port could not take or send."""

    num_unsent: int = 0
    num_merged: int = 0
    """Frames that a NIC or a kernel has put together: switch its offloads off."""


class PacketPort:
    """The device `name`. `read` fills the buffer that it is given; a tag is left out, and returned."""

    def __init__(self, name: str) -> None:
        self.name, self.counts = name, PortCounts()
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError as error:
            raise UnavailableError("packet sockets need CAP_NET_RAW", hint="run as root") from error
        try:
            self._socket.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
            self._socket.setsockopt(_SOL_PACKET, _AUXDATA, 1)
            self._socket.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
            index = socket.if_nametoindex(name)
            member = struct.pack("=iHH8s", index, _PROMISCUOUS, 0, b"")
            self._socket.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, member)
            self._socket.bind((name, _ETH_P_ALL))
        except OSError as error:
            self._socket.close()
            raise NotFoundError(
                f"the device {name} cannot be used: {error.strerror}", hint="`ip link` lists this machine's devices"
            ) from error

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def read(self, buffer: FrameBuffer) -> int | None:
        """Read the next frame; return its VLAN, 0 without a tag, None if none waits."""
        while True:
            buffer.start = HEADROOM_BYTES
            room = memoryview(buffer.data)[HEADROOM_BYTES : HEADROOM_BYTES + MAX_FRAME_BYTES]
            try:
                num_bytes, extra, flags, _ = self._socket.recvmsg_into([room], 64)
            except BlockingIOError:
                return None
            except OSError:  # the device is down or gone
                return None
            buffer.end = HEADROOM_BYTES + num_bytes
            status, vlan = 0, 0
            for _, kind, data in extra:
                if kind == _AUXDATA:
                    status, _, _, _, _, tag, _ = _AUX.unpack_from(data)
                    vlan = tag & 0xFFF if status & _VLAN_VALID else 0
            if status & _GSO_TCP or flags & socket.MSG_TRUNC:
                self.counts.num_merged += 1
                continue
            if status & _NO_CHECKSUM:
                with contextlib.suppress(ProtocolError):  # the gateway refuses it
                    complete_checksum(buffer)
            return vlan

    def send(self, vlan: int, frame: bytes | memoryview) -> None:
        """Send a frame, with a tag unless `vlan` is 0; a device that is full loses it."""
        parts = [frame] if not vlan else [frame[:12], _TAG.pack(_VLAN, vlan), frame[12:]]
        try:
            self._socket.sendmsg(parts)
        except OSError:
            self.counts.num_unsent += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
