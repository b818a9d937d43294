"""Sample order: a new permutation per epoch, computable at any position in constant memory.

A Feistel network over the next power of four with cycle walking into the range (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). The result is the same on every machine and library
version.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

_ROUNDS = 6


def sample_order(first: int, count: int, num_samples: int, seed: int) -> np.ndarray:
    """Return the samples (int64 `[count]`, each in `[0, num_samples)`) at positions `first`, `first + 1`, ...

    Position p is in epoch p // num_samples. Each epoch contains every sample once, in an order that
    (`seed`, epoch) determines.
    """
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs = positions // num_samples
    order = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        order[in_epoch] = _permute(positions[in_epoch] - epoch * num_samples, num_samples, f"{seed}:{epoch}")
    return order


def _permute(values: np.ndarray, size: int, key: str) -> np.ndarray:
    """Apply the permutation of `[0, size)` with key `key` to `values` (int64 `[n]`)."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    result = values.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        result[outside] = _feistel(result[outside], keys, half_bits)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    """Apply the network to `values` (uint64 `[n]`) of 2 * `half_bits` bits."""
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    joined: np.ndarray = (left << shift) | right
    return joined


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the splitmix64 finaliser of each value (uint64 `[n]`)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
