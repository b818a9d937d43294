"""`Datagram`: packets of one size, as one system call takes or gives them."""

from __future__ import annotations

from dataclasses import dataclass

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True)
class Datagram:
    """Packets of `packet_bytes` each (the last may be shorter) from or to one address."""

    address: Address
    data: bytes
    packet_bytes: int
