"""The validation split: which documents or conversations are held out of training."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def hold_out_tokens(
    documents: Sequence[np.ndarray], fraction: float, min_tokens: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split `documents` (token arrays, int `[L]`) into training and validation, each in their order.

    Validation gets `fraction` of the tokens, at least `min_tokens`, at most half. Documents are held out in
    the order of their content hash, which is independent of seed and file names; of the last one only the
    tail is taken.
    """
    total = sum(len(document) for document in documents)
    needed = min(max(round(fraction * total), min_tokens), total // 2) if fraction > 0 else 0
    cuts = [len(document) for document in documents]
    for index in _hash_order(documents) if needed else ():
        taken = min(needed, cuts[index])
        cuts[index] -= taken
        needed -= taken
        if needed == 0:
            break
    parts = list(zip(documents, cuts, strict=True))
    training = [document[:cut] for document, cut in parts if cut > 0]
    return training, [document[cut:] for document, cut in parts if cut < len(document)]


def hold_out_items(items: Sequence[np.ndarray], fraction: float) -> frozenset[int]:
    """Return the indices of the held-out `items` (token arrays, int `[L]`): `fraction` of them.

    At least one and at most half are held out; none for a single item or `fraction` 0.
    """
    wanted = min(max(round(fraction * len(items)), 1), len(items) // 2) if fraction > 0 else 0
    return frozenset(_hash_order(items)[:wanted]) if wanted else frozenset()


def _hash_order(arrays: Sequence[np.ndarray]) -> list[int]:
    digests = [blake2b(array.tobytes(), digest_size=16).digest() for array in arrays]
    return sorted(range(len(arrays)), key=digests.__getitem__)
