"""`FixedPoint`: parts of a tensor as integers whose sum over all workers cannot overflow 32 bits.

Source: section 4.2 of the PASSING paper: the largest scale that cannot overflow. The scale follows from the largest
magnitude over all workers, so it is a function of the data: integers of a part are equal whichever path sums them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.core.errors import InputError

INT32_MAX = 2**31 - 1

NON_FINITE_BITS = 0x7F80_0000
"""Bits of infinity in float32; magnitudes at or above it are infinite or NaN."""


class NonFiniteError(InputError):
    """NaN, infinity, or a sum beyond float32, under a format of scaled integers."""


def magnitude_bits(parts: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the bits of the largest magnitude of each row of `parts` [num_parts, part_elements], as [num_parts].

    Bits of non-negative float32 are ordered as the numbers are, with NaN above infinity, so the largest bits over all
    workers are those of the largest magnitude, or tell that one worker has NaN or infinity.
    """
    bits: NDArray[np.uint32] = (parts.view(np.uint32) & np.uint32(0x7FFF_FFFF)).max(axis=-1, initial=0)
    return bits


@dataclass(frozen=True)
class FixedPoint:
    """Conversion for `num_workers` workers: `|sum of integers| <= 2^31 - 1`, always.

    With the magnitude m of a part over all workers, an integer is `round(value * L / m)` with
    `L = floor((2^31 - 1) / num_workers)`. The sum of `num_workers` values is off by at most
    `num_workers * m / (2 * L)`, and by the rounding of the result to float32.
    """

    num_workers: int

    @property
    def largest(self) -> int:
        """The largest integer of one worker."""
        return INT32_MAX // self.num_workers

    def error_bound(self, magnitude: float) -> float:
        """Return the bound of the error of a sum in a part of `magnitude`, before rounding to float32."""
        return self.num_workers * magnitude / (2 * self.largest)

    def scales(self, bits: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Return the scale of each part, [num_parts], from `bits` over all workers.

        Raises `NonFiniteError` if a worker has NaN or infinity.
        """
        if (bits >= NON_FINITE_BITS).any():
            raise NonFiniteError("a worker's values contain NaN or infinity", hint="skip the step, or sum in fp32")
        magnitudes = bits.view(np.float32).astype(np.float64)
        return np.divide(self.largest, magnitudes, out=np.ones_like(magnitudes), where=magnitudes > 0)

    def to_integers(self, parts: NDArray[np.float32], scales: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return `parts` [num_parts, part_elements] in integers; raises `NonFiniteError` where a scale is too large."""
        scaled: NDArray[np.float64] = np.rint(parts * scales[:, None])
        if not np.abs(scaled).max(initial=0.0) <= self.largest:
            raise NonFiniteError(
                f"a value is beyond the magnitude that {self.num_workers} workers agreed on, so a sum could overflow",
                hint="do not change a tensor before its all-reduce is done",
            )
        return scaled.astype(np.int32)

    def to_values(self, integers: NDArray[np.int32], scales: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return sums of integers [num_parts, part_elements] as float32; raises `NonFiniteError` beyond float32."""
        with np.errstate(over="ignore"):
            values: NDArray[Any] = (integers / scales[:, None]).astype(np.float32)
        if not np.isfinite(values).all():
            raise NonFiniteError("the sum of the workers' values exceeds float32", hint="scale the values down")
        return values
