"""The order of samples: another permutation in each epoch, computed for any position without the others.

A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002): no memory, and the same on every machine and library version.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

_ROUNDS = 6


def sample_order(first: int, count: int, num_samples: int, seed: int) -> np.ndarray:
    """Return the samples (int64 `[count]`, each in `[0, num_samples)`) at positions `first`, `first + 1`, ...

    Position p lies in epoch p // num_samples; every epoch holds each sample once, in an order of its own that
    follows from (`seed`, epoch).
    """
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs = positions // num_samples
    order = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order[here] = _permute(positions[here] - epoch * num_samples, num_samples, f"{seed}:{epoch}")
    return order


def _permute(values: np.ndarray, size: int, key: str) -> np.ndarray:
    """Return the images of `values` under the permutation of `[0, size)` that `key` names."""
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
    """Return one pass of the network over values of 2 * `half_bits` bits."""
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    joined: np.ndarray = (left << shift) | right
    return joined


def _mix(values: np.ndarray) -> np.ndarray:
    """Return a well-scattered 64-bit function of each value (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
