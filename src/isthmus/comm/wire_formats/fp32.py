"""`Fp32`: values as they are, 4 bytes each. Error bound: 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.comm.wire_formats.wire_format import Bytes, Floats


class Fp32:
    """Float32, exactly; NaN and infinity included."""

    name = "fp32"

    def num_bytes(self, num_values: int) -> int:
        """Return 4 bytes a value."""
        return 4 * num_values

    def encode(self, values: Floats) -> Bytes:
        """Return the bytes of `values` [N]."""
        return values.view(np.uint8)

    def decode(self, data: Bytes, num_values: int) -> Floats:
        """Return the values [num_values] of `data`."""
        return data.view(np.float32)[:num_values].copy()

    def error_bound(self, values: Floats) -> NDArray[np.float64]:
        """Return zeros [N]."""
        return np.zeros(len(values))
