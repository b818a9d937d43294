"""The Noise handshake and the ciphers that it ends with: what encrypts every connection between sites."""

from isthmus.noise.datagram_cipher import NUMBER_BYTES, DatagramCipher
from isthmus.noise.noise_handshake import (
    KEY_BYTES,
    TAG_BYTES,
    CipherState,
    NoiseHandshake,
    UnauthenticatedError,
)

__all__ = [
    "KEY_BYTES",
    "NUMBER_BYTES",
    "TAG_BYTES",
    "CipherState",
    "DatagramCipher",
    "NoiseHandshake",
    "UnauthenticatedError",
]
