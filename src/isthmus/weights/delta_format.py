"""`DeltaWriter` and `DeltaReader`: the bytes of a delta file.

    head      magic, block size, name of the base, name of the target, bytes of the new header
    header    the new safetensors header; nothing where it is the base's
    records   one a block: kind, payload bytes; unless it is unchanged the SHA-256 of the old and new block, and payload
    checksum  SHA-256 of the SHA-256 of header and records, and of the head

Integers are little-endian. Blocks are checked one by one; the checksum finds what alters no block.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

from isthmus.weights.delta_error import DeltaError, damaged
from isthmus.weights.weights_file import BLOCK_BYTES, MAX_HEADER_BYTES

MAX_METADATA_BYTES = 1 << 20
"""What a new header may have beyond the one of its base: both have the same tensors, so only metadata differ."""

_MAGIC = b"ISTHDLT1"
_HEAD = struct.Struct("<8sI32s32sI")
_RECORD = struct.Struct("<BI")
_DIGESTS = struct.Struct("<32s32s")
_DIGEST_BYTES = 32


def largest_header(base_bytes: int) -> int:
    """Return the largest size of the header of a version whose base has a header of `base_bytes`."""
    return min(base_bytes + MAX_METADATA_BYTES, MAX_HEADER_BYTES)


class RecordKind(IntEnum):
    """How a record gives a block: as in the base, by its changes, or in full."""

    SAME = 0
    CHANGES = 1
    FULL = 2


@dataclass(frozen=True, kw_only=True)
class DeltaRecord:
    """One block: its kind, the SHA-256 of its old and new content, and its payload."""

    kind: RecordKind
    old_sha256: bytes = b""
    new_sha256: bytes = b""
    payload: bytes = b""


class DeltaWriter:
    """Writes a delta to `stream`, which can seek: the names of the versions are known after the last block."""

    def __init__(self, stream: BinaryIO, header: bytes) -> None:
        self._stream, self._header_bytes, self._digest = stream, len(header), hashlib.sha256(header)
        stream.write(bytes(_HEAD.size) + header)

    def add(self, record: DeltaRecord) -> None:
        """Write the record of the next block."""
        data = _RECORD.pack(record.kind, len(record.payload))
        if record.kind != RecordKind.SAME:
            data += _DIGESTS.pack(record.old_sha256, record.new_sha256) + record.payload
        self._digest.update(data)
        self._stream.write(data)

    def finish(self, base: bytes, target: bytes) -> int:
        """Write the names of both versions, 32 bytes each, and the checksum; return the bytes of the delta."""
        head = _HEAD.pack(_MAGIC, BLOCK_BYTES, base, target, self._header_bytes)
        self._stream.write(hashlib.sha256(self._digest.digest() + head).digest())
        num_bytes = self._stream.tell()
        self._stream.seek(0)
        self._stream.write(head)
        return num_bytes


class DeltaReader:
    """Reads a delta from `stream`; raises `DeltaError` for another format, for sizes too large, and for what is cut.

    A new header has at most `max_header_bytes`.
    """

    def __init__(self, stream: BinaryIO, max_header_bytes: int) -> None:
        self._stream = stream
        self._head = self._exactly(_HEAD.size)
        magic, block_bytes, self.base, self.target, length = _HEAD.unpack(self._head)
        if magic != _MAGIC or block_bytes != BLOCK_BYTES:
            raise DeltaError("this is no delta of this version", hint="pass a file that `isthmus rl delta` wrote")
        if length > max_header_bytes:
            raise damaged(f"a header of {length} bytes")
        self.header = self._exactly(length)
        self._digest = hashlib.sha256(self.header)

    def read(self, block_bytes: int) -> DeltaRecord:
        """Return the record of the next block, of `block_bytes`; its payload is not longer than the block."""
        head = self._exactly(_RECORD.size)
        self._digest.update(head)
        kind, length = _RECORD.unpack(head)
        if kind not in tuple(RecordKind) or length > block_bytes or (kind == RecordKind.SAME and length):
            raise damaged(f"a record of kind {kind} with {length} bytes for a block of {block_bytes}")
        if kind == RecordKind.SAME:
            return DeltaRecord(kind=RecordKind.SAME)
        data = self._exactly(_DIGESTS.size + length)
        self._digest.update(data)
        old, new = _DIGESTS.unpack_from(data)
        return DeltaRecord(kind=RecordKind(kind), old_sha256=old, new_sha256=new, payload=data[_DIGESTS.size :])

    def finish(self) -> int:
        """Compare the checksum and return the bytes of the delta; nothing may follow."""
        if self._exactly(_DIGEST_BYTES) != hashlib.sha256(self._digest.digest() + self._head).digest():
            raise damaged("it has another checksum")
        if self._stream.read(1):
            raise damaged("there are bytes after its end")
        return self._stream.tell()

    def _exactly(self, num_bytes: int) -> bytes:
        found = self._stream.read(num_bytes)
        if len(found) < num_bytes:
            missing = num_bytes - len(found)
            raise DeltaError(f"the delta ends {missing} bytes too early", hint="it was cut short: fetch it again")
        return found
