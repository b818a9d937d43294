"""`WeightsName`: the name of a version of weights, made of its content block by block."""

from __future__ import annotations

import hashlib


class WeightsName:
    """SHA-256 of the header and of the SHA-256 of each block in order, so that blocks can be checked one by one."""

    def __init__(self, header: bytes) -> None:
        self._digest = hashlib.sha256(b"isthmus weights 1\0" + hashlib.sha256(header).digest())

    def add(self, block_digest: bytes) -> None:
        """Add the SHA-256 of the next block."""
        self._digest.update(block_digest)

    @property
    def digest(self) -> bytes:
        """Return the name, 32 bytes; print it as hexadecimal digits."""
        return self._digest.digest()
