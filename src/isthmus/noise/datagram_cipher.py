"""`DatagramCipher`: AES-256-GCM for datagrams, which may be lost, late or repeated: each carries its number.

Source: T. Perrin, "The Noise Protocol Framework", revision 34 (2018), 11.4 (out-of-order transport messages); RFC 6479
for the window of numbers that have been seen.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isthmus.noise.noise_handshake import UnauthenticatedError

NUMBER_BYTES = 8
WINDOW_DATAGRAMS = 16_384
"""How far behind the newest one a datagram may come."""

MAX_DATAGRAMS = 2**32
"""Datagrams under one key (RFC 5116, section 5.1)."""


class DatagramCipher:
    """One direction under `key`; the sender counts, the receiver refuses what it has seen."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self.num_sealed = 0
        """Datagrams sealed so far."""
        self._newest, self._seen = -1, 0

    def seal(self, plain: bytes) -> bytes:
        """Return number, encrypted content and tag."""
        if self.num_sealed >= MAX_DATAGRAMS:
            raise UnauthenticatedError("a key has sealed all the datagrams that it may")
        number = self.num_sealed.to_bytes(NUMBER_BYTES, "big")
        self.num_sealed += 1
        return number + self._aead.encrypt(bytes(4) + number, plain, None)

    def open(self, sealed: bytes) -> bytes:
        """Return the content; raise `UnauthenticatedError` for a wrong tag, a repeated or a very late datagram."""
        number = int.from_bytes(sealed[:NUMBER_BYTES], "big")
        behind = self._newest - number
        if behind >= WINDOW_DATAGRAMS or (behind >= 0 and self._seen >> behind & 1):
            raise UnauthenticatedError("a datagram came twice, or too late")
        try:
            plain = self._aead.decrypt(bytes(4) + sealed[:NUMBER_BYTES], sealed[NUMBER_BYTES:], None)
        except (InvalidTag, ValueError):
            raise UnauthenticatedError("a datagram failed its authentication") from None
        if behind < 0:
            self._seen = (self._seen << min(-behind, WINDOW_DATAGRAMS) | 1) & _WINDOW_MASK
            self._newest = number
        else:
            self._seen |= 1 << behind
        return plain


_WINDOW_MASK = (1 << WINDOW_DATAGRAMS) - 1
