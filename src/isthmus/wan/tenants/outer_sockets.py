"""VXLAN packets between gateways: `OuterSenders`, raw sockets, and `OuterReceivers`, UDP sockets (Linux, root).

Each VNI sends by a socket of its own, and control traffic is received by one of its own, so that a tenant that fills
its socket or its queue takes no room from another, nor from heartbeats.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

from isthmus.core.errors import UnavailableError
from isthmus.wan.tenancy.packets.frame_buffer import HEADROOM_BYTES, MAX_FRAME_BYTES, FrameBuffer

SEND_BYTES = 2**20
RECEIVE_BYTES = 16 * 2**20
_IP_RECVTOS = 13
_SO_ATTACH_REUSEPORT_CBPF = 51
_SO_RCVBUFFORCE = 33
_LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x20, 0x74, 0x15, 0x06


class OuterReceivers:
    """Sockets of the gateway at `address`, on UDP `port`; what is under `control_vni` comes to one of its own."""

    def __init__(self, address: str, port: int, control_vni: int) -> None:
        self.control = _receiver(address, port)
        try:
            _choose_by_vni(self.control, control_vni)
            self.tenants = _receiver(address, port)
        except BaseException:
            self.control.close()
            raise

    def close(self) -> None:
        """Close both sockets."""
        self.control.close()
        self.tenants.close()


class OuterSenders:
    """A socket for each VNI, opened when it first sends."""

    def __init__(self) -> None:
        self._senders: dict[int, socket.socket] = {}
        self.num_unsent = self.num_too_long = 0

    def send(self, vni: int, gateway: bytes, packet: bytes | memoryview) -> None:
        """Send a packet with its IPv4 header; where its VNI has no more room, it is lost."""
        sender = self._senders.get(vni)
        if sender is None:
            sender = self._senders[vni] = _sender()
        try:
            sender.sendto(packet, (socket.inet_ntoa(gateway), 0))
        except BlockingIOError:
            self.num_unsent += 1
        except OSError as error:
            self.num_too_long += error.errno == errno.EMSGSIZE
            self.num_unsent += error.errno != errno.EMSGSIZE

    def forget(self, vni: int) -> None:
        """Close the socket of a tenant that is gone."""
        if (sender := self._senders.pop(vni, None)) is not None:
            sender.close()

    def close(self) -> None:
        """Close all sockets."""
        for one in self._senders.values():
            one.close()


def read_outer(receiver: socket.socket, buffer: FrameBuffer) -> tuple[bytes, int] | None:
    """Read a UDP payload into a buffer; return the sender's address and the traffic class, None if none waits."""
    buffer.start = HEADROOM_BYTES
    room = memoryview(buffer.data)[HEADROOM_BYTES : HEADROOM_BYTES + MAX_FRAME_BYTES]
    try:
        num_bytes, extra, _, address = receiver.recvmsg_into([room], 64)
    except BlockingIOError:
        return None
    except OSError:
        return None
    buffer.end = HEADROOM_BYTES + num_bytes
    traffic_class = next((data[0] for level, _, data in extra if level == socket.IPPROTO_IP and data), 0)
    return socket.inet_aton(address[0]), traffic_class


def _receiver(address: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        found.setblocking(False)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.setsockopt(socket.IPPROTO_IP, _IP_RECVTOS, 1)
        found.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        found.bind((address, port))
    except OSError as error:
        found.close()
        raise UnavailableError(
            f"cannot receive VXLAN at {address}:{port}: {error.strerror}",
            hint="the address of `site` under gateways is one of this machine, and no other program has the port",
        ) from error
    return found


def _sender() -> socket.socket:
    try:
        found = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    except PermissionError as error:
        raise UnavailableError("raw sockets need CAP_NET_RAW", hint="run as root") from error
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    return found


def _choose_by_vni(receiver: socket.socket, control_vni: int) -> None:
    """Let the kernel give control traffic to the first socket of the port, all else to the second (classic BPF)."""
    program = [
        (_LOAD_WORD, 0, 0, 4),  # the VXLAN header's second word
        (_SHIFT_RIGHT, 0, 0, 8),
        (_IF_EQUAL, 0, 1, control_vni),
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, 1),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filter_of = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(code))
    receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, filter_of)
