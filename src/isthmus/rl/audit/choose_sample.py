"""`is_chosen`: which samples are recomputed: a share that no engine can foresee."""

from __future__ import annotations

import hashlib
import hmac

from isthmus.rl.ledger.rollout_events import SampleKey

_BITS = 64


def is_chosen(secret: bytes, sample: SampleKey, share: float) -> bool:
    """Return whether `sample` is among the `share` (0 to 1) that `secret` chooses; the same at each call.

    The secret never leaves the rank that holds the ledger.
    """
    text = f"isthmus audit 1 {sample.prompt} {sample.number} {sample.attempt}".encode()
    drawn = int.from_bytes(hmac.digest(secret, text, hashlib.sha256)[: _BITS // 8], "big")
    return bool(drawn < share * 2**_BITS)
