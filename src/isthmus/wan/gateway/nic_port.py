"""Where frames of this site's NICs come from and go to: a TUN device, or UDP datagrams on loopback.

A TUN device gets what the site routes to it: RoCEv2 packets of NICs to another site, from their IP header to their
ICRC; what is written to it goes on to the NIC by the host's routes. On loopback each datagram is one such packet.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from isthmus.core.errors import UnavailableError
from isthmus.wan.roce.roce_view import MAX_FRAME_BYTES

_TUN_DEVICE = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_SOCKET_BYTES = 8 * 2**20

Address = tuple[str, int]


class NicPort(Protocol):
    """Non-blocking frames of NICs."""

    @property
    def where(self) -> str:
        """What the port is, for a log."""
        ...

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        ...

    def read(self) -> bytes | None:
        """Return the next frame, None if none waits."""
        ...

    def write(self, frame: bytes, target: bytes, /) -> bool:
        """Send a frame to the NIC with the address `target`; return whether it went."""
        ...

    def close(self) -> None:
        """Close the port."""
        ...


class UdpNics:
    """Frames as datagrams at a loopback address; NICs are those in `nics`, by the bytes of their IP address."""

    def __init__(self, address: Address, nics: Mapping[bytes, Address]) -> None:
        self._nics = dict(nics)
        self._socket = bind_udp(address)

    @property
    def where(self) -> str:
        """See `NicPort`."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def fileno(self) -> int:
        """See `NicPort`."""
        return self._socket.fileno()

    def read(self) -> bytes | None:
        """See `NicPort`."""
        try:
            return self._socket.recv(MAX_FRAME_BYTES + 1)
        except (BlockingIOError, ConnectionRefusedError):
            return None

    def write(self, frame: bytes, target: bytes, /) -> bool:
        """See `NicPort`."""
        address = self._nics.get(target)
        if address is None:
            return False
        try:
            self._socket.sendto(frame, address)
        except OSError:  # full, or the NIC is gone: it resends
            return False
        return True

    def close(self) -> None:
        """See `NicPort`."""
        self._socket.close()


class TunNics:
    """A TUN device by its name, made anew or persistent; the operator sets it up and routes to it."""

    def __init__(self, name: str) -> None:
        try:
            self._descriptor = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(
                f"{_TUN_DEVICE} cannot be opened: {error.strerror}",
                hint="run with CAP_NET_ADMIN and pass the device to the container; --frames on loopback needs neither",
            ) from error
        try:
            fcntl.ioctl(self._descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
        except OSError as error:
            os.close(self._descriptor)
            raise UnavailableError(
                f"the TUN device {name} cannot be used: {error.strerror}",
                hint="CAP_NET_ADMIN is needed, and no other process may have it open",
            ) from error
        self._name = name

    @property
    def where(self) -> str:
        """See `NicPort`."""
        return f"device {self._name}"

    def fileno(self) -> int:
        """See `NicPort`."""
        return self._descriptor

    def read(self) -> bytes | None:
        """See `NicPort`."""
        try:
            return os.read(self._descriptor, 2**16)
        except (BlockingIOError, OSError):  # nothing waits, or the device is down
            return None

    def write(self, frame: bytes, _target: bytes, /) -> bool:
        """See `NicPort`."""
        try:
            os.write(self._descriptor, frame)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """See `NicPort`."""
        os.close(self._descriptor)


def bind_udp(address: Address) -> socket.socket:
    """Return a non-blocking UDP socket; raise `UnavailableError` if the address cannot be bound."""
    host, port = address
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        found.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            found.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        found.bind(address)
    except OSError as error:
        found.close()
        raise UnavailableError(
            f"cannot listen at {host}:{port}: {error.strerror}",
            hint="choose an address of this machine and a free port",
        ) from error
    return found
