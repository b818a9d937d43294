"""The Noise handshake and the ciphers that it ends with: what encrypts every connection between sites."""

from isthmus.noise.noise_handshake import (
    KEY_BYTES,
    TAG_BYTES,
    CipherState,
    NoiseHandshake,
    NumberedCipher,
    UnauthenticatedError,
)

__all__ = ["KEY_BYTES", "TAG_BYTES", "CipherState", "NoiseHandshake", "NumberedCipher", "UnauthenticatedError"]
