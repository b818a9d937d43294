"""`Bf16`: the upper half of float32, rounded to nearest even, 2 bytes a value. Error bound: |x| / 256, or 2^-134."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.comm.wire_formats.wire_format import Bytes, Floats
from isthmus.switch import NonFiniteError

_INFINITY = 0x7F80


class Bf16:
    """bfloat16; NaN and infinity pass. Finite values that would round to infinity raise `NonFiniteError`."""

    name = "bf16"

    def num_bytes(self, num_values: int) -> int:
        """Return 2 bytes a value."""
        return 2 * num_values

    def encode(self, values: Floats) -> Bytes:
        """Return `values` [N], each rounded to the nearest bfloat16, ties to even."""
        bits = values.view(np.uint32)
        half = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + half) >> np.uint64(16)).astype(np.uint16)
        finite = np.isfinite(values)
        if ((rounded & 0x7FFF)[finite] >= _INFINITY).any():
            raise NonFiniteError("a value exceeds bfloat16", hint="scale the values down, or sum in fp32")
        special = np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), bits >> np.uint32(16))
        return np.where(finite, rounded, special).astype(np.uint16).view(np.uint8)

    def decode(self, data: Bytes, num_values: int) -> Floats:
        """Return the values [num_values] of `data`."""
        return (data.view(np.uint16)[:num_values].astype(np.uint32) << np.uint32(16)).view(np.float32)

    def error_bound(self, values: Floats) -> NDArray[np.float64]:
        """Return |x| / 256 of each value [N], at least half the smallest subnormal bfloat16."""
        bound: NDArray[np.float64] = np.maximum(np.abs(values.astype(np.float64)) / 256, 2.0**-134)
        return bound
