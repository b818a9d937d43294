"""`ScaledIntegers`: blocks of values as integers of a scale per block: what the scaled formats share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.comm.wire_formats.wire_format import Bytes, Floats
from isthmus.switch import NonFiniteError, magnitude_bits

_INFINITY_BITS = 0x7F80_0000


class ScaledIntegers:
    """Integers of `dtype`, whose scale is the largest with which the block's largest magnitude m fits.

    A block of `block` values (None: all of them) is written as m in float32, then each value as
    `round(x * L / m)`, where L is the largest integer. A decoded value is off by at most m / (2 L), and by the
    rounding to float32.
    """

    def __init__(self, name: str, dtype: type[np.signedinteger[Any]], block: int | None = None) -> None:
        self.name = name
        self._dtype, self._block = np.dtype(dtype), block
        self._largest = int(np.iinfo(dtype).max)

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of the integers, and 4 a block."""
        return num_values * self._dtype.itemsize + 4 * self._num_blocks(num_values)

    def encode(self, values: Floats) -> Bytes:
        """Return `values` [N] as bytes; raises `NonFiniteError` for NaN and infinity."""
        blocks = self._blocks(values)
        bits = magnitude_bits(blocks)
        if (bits >= _INFINITY_BITS).any():
            raise NonFiniteError(
                f"values contain NaN or infinity, which {self.name} cannot express", hint="skip the step, or use fp32"
            )
        integers = np.rint(blocks * self._scales(bits)[:, None]).astype(self._dtype).reshape(-1)[: len(values)]
        return np.concatenate([bits.view(np.uint8), integers.view(np.uint8)])

    def decode(self, data: Bytes, num_values: int) -> Floats:
        """Return the values [num_values] of `data`."""
        start = 4 * self._num_blocks(num_values)
        bits = data[:start].copy().view(np.uint32)
        integers = data[start : start + num_values * self._dtype.itemsize].copy().view(self._dtype)
        with np.errstate(over="ignore"):  # the sender refuses what is not finite; a forged message may hold anything
            values: Floats = (self._blocks(integers) / self._scales(bits)[:, None]).astype(np.float32)
        return values.reshape(-1)[:num_values]

    def error_bound(self, values: Floats) -> NDArray[np.float64]:
        """Return, for each value [N], m / (2 L) of its block and the rounding to float32."""
        magnitudes = magnitude_bits(self._blocks(values)).view(np.float32).astype(np.float64)
        size = self._block or max(len(values), 1)
        bound = np.repeat(magnitudes / (2 * self._largest), size)[: len(values)]
        return bound + np.maximum(np.abs(values.astype(np.float64)) * 2.0**-23, 2.0**-149)

    def _num_blocks(self, num_values: int) -> int:
        return -(-num_values // self._block) if self._block else min(num_values, 1)

    def _blocks(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return `values` [N] in blocks [num_blocks, block], the last one padded by zeros."""
        num = self._num_blocks(len(values))
        size = self._block or len(values)
        if num * size == len(values):
            return values.reshape(num, size)
        padded = np.zeros(num * size, values.dtype)
        padded[: len(values)] = values
        return padded.reshape(num, size)

    def _scales(self, bits: NDArray[np.uint32]) -> NDArray[np.float64]:
        magnitudes = bits.view(np.float32).astype(np.float64)
        return np.divide(self._largest, magnitudes, out=np.ones_like(magnitudes), where=magnitudes > 0)
