"""`UdpSocket`: datagrams in batches: several packets of one size by one system call, where the kernel can.

Linux splits what is sent with `UDP_SEGMENT` into packets and joins received ones with `UDP_GRO`. Without them, or where
the way out refuses them, each packet takes a call of its own.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from isthmus.core.errors import UnavailableError
from isthmus.core.messages.datagram import Address, Datagram

_UDP_SEGMENT, _UDP_GRO = 103, 104
"""Socket options of Linux (linux/udp.h), which Python does not name."""

_MAX_READ_BYTES = 2**16
_MAX_READS = 256
_BUFFER_BYTES = 8 * 2**20
_SPACE = socket.CMSG_SPACE(4)


class UdpSocket:
    """A UDP socket bound to `host` and `port`, non-blocking; `batches` asks for several packets a system call.

    Raises `UnavailableError` for an address that cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, batches: bool = True) -> None:
        self.num_calls = 0
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen at {host}: {error}", hint="state an address of this machine"
            ) from error
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise UnavailableError(
                f"cannot listen at {host}:{port}: {error.strerror}", hint="state another address or port, or port 0"
            ) from error
        self._socket.setblocking(False)
        for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._enlarge(name)
        self._segments = batches and self._try_gro()

    @property
    def address(self) -> Address:
        """Address and port that it is bound to."""
        found = self._socket.getsockname()
        return found[0], found[1]

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def receive(self) -> Iterator[Datagram]:
        """Yield what has arrived, up to `_MAX_READS` datagrams."""
        for _ in range(_MAX_READS):
            try:
                self.num_calls += 1
                data, ancillary, _, address = self._socket.recvmsg(_MAX_READ_BYTES, _SPACE)
            except OSError:  # nothing is left, or the answer of a host to an earlier packet
                return
            size = len(data)
            for level, kind, value in ancillary:
                if (level, kind) == (socket.IPPROTO_UDP, _UDP_GRO):
                    size = struct.unpack("i", value[:4])[0]
            yield Datagram((address[0], address[1]), data, size)

    def send(self, datagram: Datagram) -> None:
        """Send `datagram`; packets that the kernel cannot take are lost, as on a network."""
        data, size = datagram.data, datagram.packet_bytes
        if self._segments and len(data) > size:
            try:
                self.num_calls += 1
                self._socket.sendmsg(
                    [data], [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("H", size))], 0, datagram.address
                )
            except OSError as error:
                if error.errno not in _NO_SEGMENTS:
                    return
                self._segments = False
            else:
                return
        for start in range(0, len(data), size):
            self.num_calls += 1
            with suppress(OSError):
                self._socket.sendto(data[start : start + size], datagram.address)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _enlarge(self, name: int) -> None:
        """Ask for a buffer of `_BUFFER_BYTES`, beyond the machine's limit where this process may."""
        forced = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}[name]  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
        except OSError:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, name, _BUFFER_BYTES)

    def _try_gro(self) -> bool:
        try:
            self._socket.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        except OSError:
            return False
        return True


_NO_SEGMENTS = frozenset({errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.ENOPROTOOPT, errno.EOPNOTSUPP})
"""What a way out answers that cannot split datagrams."""
