"""`ObjectSeal`: encrypts one object in pieces, so that any range of it can be read and verified alone.

    object = magic, salt [16], piece 0, piece 1, ...    a piece is AES-256-GCM of 64 KiB (the last: the rest), and a tag

The key of an object is HMAC-SHA256 of the job's key over its salt and its name, which has job, checkpoint and file: an
object under another name opens nothing. The nonce of a piece is its number, and the size of the whole is authenticated
with each, so pieces neither change places nor go missing. A salt is used once.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isthmus.core.errors import UnavailableError

PIECE_BYTES = 64 << 10
SALT_BYTES = 16
HEAD_BYTES = 4 + SALT_BYTES
_MAGIC = b"ISO1"
_TAG_BYTES = 16
_NONCE_BYTES = 12


class ObjectSeal:
    """Seals and opens the pieces of object `name` of `num_bytes`, under the job's `key` of 32 bytes."""

    def __init__(self, key: bytes, name: str, salt: bytes, num_bytes: int) -> None:
        self._name, self.num_bytes = name, num_bytes
        self.head = _MAGIC + salt
        self._cipher = AESGCM(hmac.digest(key, b"isthmus object: " + salt + name.encode(), "sha256"))

    @classmethod
    def of_head(cls, key: bytes, name: str, head: bytes, num_bytes: int) -> ObjectSeal:
        """Return the seal of an object that begins with `head`; raise `UnavailableError` if no object does."""
        if len(head) != HEAD_BYTES or head[: len(_MAGIC)] != _MAGIC:
            raise object_refused(name)
        return cls(key, name, head[len(_MAGIC) :], num_bytes)

    @property
    def num_pieces(self) -> int:
        """The number of pieces."""
        return -(-self.num_bytes // PIECE_BYTES)

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Return where pieces `first` to `end - 1` begin and end in the object."""
        return _offset(first), min(_offset(end), sealed_bytes(self.num_bytes))

    def seal(self, number: int, piece: bytes) -> bytes:
        """Return a piece as it is stored."""
        return self._cipher.encrypt(_nonce(number), piece, self._size)

    def open(self, first: int, data: bytes) -> bytes:
        """Return the contents of consecutive pieces from `first` on; raise `UnavailableError` if one was changed."""
        step = PIECE_BYTES + _TAG_BYTES
        try:
            return b"".join(
                self._cipher.decrypt(_nonce(first + number), data[begin : begin + step], self._size)
                for number, begin in enumerate(range(0, len(data), step))
            )
        except InvalidTag as error:
            raise object_refused(self._name) from error

    @property
    def _size(self) -> bytes:
        return self.num_bytes.to_bytes(8, "big")


def sealed_bytes(num_bytes: int) -> int:
    """Return the size of the object with contents of `num_bytes`."""
    return HEAD_BYTES + num_bytes + _TAG_BYTES * -(-num_bytes // PIECE_BYTES)


def contents_bytes(size: int) -> int:
    """Return the size of the contents of an object of `size`, which the seal of its pieces verifies."""
    body = max(size - HEAD_BYTES, 0)
    return max(body - _TAG_BYTES * -(-body // (PIECE_BYTES + _TAG_BYTES)), 0)


def object_refused(name: str) -> UnavailableError:
    """Return the error for an object that is not what this job has stored."""
    return UnavailableError(
        f"object {name} of checkpoints.copy_store is refused: it was changed, cut or exchanged",
        hint="let the sites that keep the parts take part in the job again, or restore the object from its store",
    )


def _offset(number: int) -> int:
    return HEAD_BYTES + number * (PIECE_BYTES + _TAG_BYTES)


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")
