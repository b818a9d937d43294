"""`VerbsDevice`, `VerbsPair`: the seam between a channel and an RDMA device, real or in user space.

Source: InfiniBand Architecture Specification, volume 1, chapters 10 and 11 (verbs of reliable connections).
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import astuple, dataclass
from typing import Protocol

from isthmus.core.errors import ProtocolError

MTU_CODES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""Path MTUs in bytes by their code."""

_RECORD = struct.Struct("!8s16sHIIBIQI")
_MAGIC = b"isthrdm1"
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True)
class PairRecord:
    """What a side tells the other about its queue pair; `region_bytes` from `address` on may be written with `key`."""

    gid: bytes
    """Global identifier of the port, 16 bytes; over Ethernet an IPv6 address, or an IPv4 one in its form."""
    local_id: int
    """Of a port of InfiniBand; 0 over Ethernet."""
    number: int
    first_psn: int
    mtu_code: int
    region_bytes: int
    address: int
    key: int

    def packed(self) -> bytes:
        """Return the record as bytes."""
        return _RECORD.pack(_MAGIC, *astuple(self))


def unpack_record(data: bytes | bytearray, region_bytes: int) -> PairRecord:
    """Return the record in `data`; raise `ProtocolError` for one that no queue pair has, or of another region."""
    magic, *fields = _RECORD.unpack(data)
    one = PairRecord(*fields)
    gid = ipaddress.IPv6Address(one.gid)
    where = gid.ipv4_mapped or gid
    wrong = {
        "its form": magic != _MAGIC,
        f"gid {gid}": where.is_multicast or where.is_unspecified or str(where) == "255.255.255.255",
        f"number {one.number}": not 2 <= one.number < 2**24,
        f"packet number {one.first_psn}": one.first_psn >= 2**24,
        f"MTU {one.mtu_code}": one.mtu_code not in MTU_CODES,
        f"region of {one.region_bytes} bytes": one.region_bytes != region_bytes,
        f"address {one.address:#x}": one.address + one.region_bytes > 2**64,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ProtocolError(f"the peer's record of a queue pair is refused: {what}")
    return one


@dataclass(frozen=True)
class Completion:
    """The end of posted work: of a receive, which has a message, or of a SEND or WRITE, in the order of the posts."""

    is_receive: bool
    number: int
    """What it was posted with."""
    num_bytes: int = 0
    """Of a SEND that was received."""
    immediate: int | None = None
    """Of a WRITE of the peer, which has used this receive."""
    error: str = ""
    """Why the work failed, and with it the queue pair."""


class VerbsPair(Protocol):
    """A queue pair and the memory that it may use, as offsets. Thread-safe; its first error ends it.

    Raises `OSError` for work that the device does not take.
    """

    record: PairRecord

    def connect(self, peer: PairRecord) -> None:
        """Accept packets of the pair `peer`, and send to it."""

    def post_receive(self, number: int, offset: int, num_bytes: int) -> None:
        """Lend memory to the next message of the peer."""

    def post_send(self, offset: int, num_bytes: int) -> None:
        """Send memory to a receive of the peer; it does not change until that completes."""

    def post_write(self, offset: int, num_bytes: int, address: int, immediate: int) -> None:
        """Write memory to `address` of the peer's region, and use a receive there to say so."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there are completions."""

    def poll(self) -> list[Completion]:
        """Return the completions since the last call, without waiting."""

    def close(self) -> None:
        """Destroy the pair; packets on the way are lost."""


class VerbsDevice(Protocol):
    """An RDMA device."""

    def open_pair(self, memory: memoryview, region_offset: int, region_bytes: int, depth: int) -> VerbsPair:
        """Return a new pair that uses `memory`, which it registers; the peer may write to the region.

        At most `depth` receives, and as many sends, are posted at a time. Raises `OSError`.
        """
