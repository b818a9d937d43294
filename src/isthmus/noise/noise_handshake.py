"""`NoiseHandshake`: the handshake Noise_NNpsk0_25519_AESGCM_SHA256, and the cipher states that it ends with.

Source: T. Perrin, "The Noise Protocol Framework", revision 34 (2018): sections 5 (processing rules), 9 (pre-shared
keys) and 12 (functions). The pattern is `-> psk, e; <- e, ee`: both sides prove the pre-shared key, and every
connection gets keys of its own, which a later disclosure of that key does not reveal.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PROTOCOL_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"
KEY_BYTES = 32
TAG_BYTES = 16

REKEY_RECORDS = 2**20
"""Records under one key: 256 GiB of the longest parts, far below the bounds of GCM (RFC 5116, section 5.1)."""

_REKEY_NONCE = bytes(4) + b"\xff" * 8


class UnauthenticatedError(ConnectionResetError):
    """Raised for a message whose sender has not proved the key; a connection that says so counts as broken."""


class CipherState:
    """AES-256-GCM under `key` with a counter of records as nonce; one direction of a connection.

    Both sides replace the key after every `rekey_records` records (Noise, section 11.3).
    """

    def __init__(self, key: bytes, rekey_records: int = REKEY_RECORDS) -> None:
        self._aead, self._num_records, self._rekey_records = AESGCM(key), 0, rekey_records

    def encrypt(self, plain: bytes, associated: bytes = b"") -> bytes:
        """Return `plain` encrypted, with its tag."""
        return self._aead.encrypt(self._next_nonce(), plain, associated)

    def decrypt(self, sealed: bytes, associated: bytes = b"") -> bytes:
        """Return the content of `sealed`; raise `UnauthenticatedError` if its tag is wrong."""
        try:
            return self._aead.decrypt(self._next_nonce(), sealed, associated)
        except InvalidTag:
            raise UnauthenticatedError("a message failed its authentication") from None

    def encrypt_into(self, plain: bytes | bytearray | memoryview, into: memoryview) -> None:
        """Write `plain` encrypted, with its tag, to `into`, which is `TAG_BYTES` longer."""
        self._aead.encrypt_into(self._next_nonce(), plain, None, into)

    def decrypt_into(self, sealed: memoryview, into: memoryview) -> None:
        """Write the content of `sealed` to `into`; raise `UnauthenticatedError` if its tag is wrong.

        `into` then holds arbitrary bytes.
        """
        try:
            self._aead.decrypt_into(self._next_nonce(), sealed, None, into)
        except InvalidTag:
            raise UnauthenticatedError("a record failed its authentication") from None

    def _next_nonce(self) -> bytes:
        if self._num_records and self._num_records % self._rekey_records == 0:
            self._aead = AESGCM(self._aead.encrypt(_REKEY_NONCE, bytes(KEY_BYTES), b"")[:KEY_BYTES])
        number, self._num_records = self._num_records, self._num_records + 1
        return number.to_bytes(12, "big")


class NoiseHandshake:
    """One side of a handshake. The dialler writes the first message and reads the second, the other side vice versa.

    `prologue` is what both sides agree on besides the key; `ephemeral` is given by tests only.
    """

    def __init__(self, psk: bytes, prologue: bytes, ephemeral: X25519PrivateKey | None = None) -> None:
        self._chaining_key = self._hash = PROTOCOL_NAME
        self._own = ephemeral or X25519PrivateKey.generate()
        self._theirs = b""
        self._mix_hash(prologue)
        self._chaining_key, mixed, key = _derive(self._chaining_key, psk, 3)
        self._mix_hash(mixed)
        self._cipher = CipherState(key)

    @property
    def hash(self) -> bytes:
        """The hash of the whole handshake."""
        return self._hash

    def write_first(self, payload: bytes) -> bytes:
        """Return `e` and the encrypted payload: 48 bytes more than `payload`."""
        return self._write_ephemeral() + self._encrypt(payload)

    def read_first(self, message: bytes) -> bytes:
        """Return the payload of the first message; raise `UnauthenticatedError` if its sender has another key."""
        return self._decrypt(self._read_ephemeral(message))

    def write_second(self, payload: bytes) -> bytes:
        """Return the other `e`, and the payload under the shared secret too."""
        start = self._write_ephemeral()
        self._mix_shared()
        return start + self._encrypt(payload)

    def read_second(self, message: bytes) -> bytes:
        """Return the payload of the second message; raises like `read_first`."""
        rest = self._read_ephemeral(message)
        self._mix_shared()
        return self._decrypt(rest)

    def split(self) -> tuple[CipherState, CipherState]:
        """Return the cipher states from the dialler and to the dialler."""
        one, other = self.split_keys()
        return CipherState(one), CipherState(other)

    def split_keys(self) -> tuple[bytes, bytes]:
        """Return the keys of these two states, for ciphers of datagrams."""
        one, other = _derive(self._chaining_key, b"", 2)
        return one, other

    def _write_ephemeral(self) -> bytes:
        public = self._own.public_key().public_bytes_raw()
        self._mix_hash(public)
        self._mix_key(public)
        return public

    def _read_ephemeral(self, message: bytes) -> bytes:
        self._theirs = message[:KEY_BYTES]
        self._mix_hash(self._theirs)
        self._mix_key(self._theirs)
        return message[KEY_BYTES:]

    def _mix_shared(self) -> None:
        try:
            shared = self._own.exchange(X25519PublicKey.from_public_bytes(self._theirs))
        except ValueError:  # a point of low order: the shared secret would be zero
            raise UnauthenticatedError("a handshake has no valid public key") from None
        self._mix_key(shared)

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, key = _derive(self._chaining_key, material, 2)
        self._cipher = CipherState(key)

    def _encrypt(self, payload: bytes) -> bytes:
        sealed = self._cipher.encrypt(payload, self._hash)
        self._mix_hash(sealed)
        return sealed

    def _decrypt(self, sealed: bytes) -> bytes:
        payload = self._cipher.decrypt(sealed, self._hash)
        self._mix_hash(sealed)
        return payload


def _derive(chaining_key: bytes, material: bytes, count: int) -> list[bytes]:
    """Return `count` keys: the HKDF of Noise, section 4.3."""
    secret, found, last = hmac.digest(chaining_key, material, "sha256"), list[bytes](), b""
    for number in range(1, count + 1):
        last = hmac.digest(secret, last + bytes([number]), "sha256")
        found.append(last)
    return found
