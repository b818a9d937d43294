"""`WireFormat`: a way to write float32 values in fewer bytes, or in integers; and the known ones by name."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class WireFormat(Protocol):
    """Encodes float32 values [N] in `num_bytes(N)` bytes; stateless."""

    name: str

    def num_bytes(self, num_values: int) -> int:
        """Return the size of `num_values` encoded values."""
        ...

    def encode(self, values: Floats) -> Bytes:
        """Return `values` [N] as bytes; raises `NonFiniteError` for what the format cannot express."""
        ...

    def decode(self, data: Bytes, num_values: int) -> Floats:
        """Return the values [num_values] of `data`."""
        ...

    def error_bound(self, values: Floats) -> NDArray[np.float64]:
        """Return, for each of `values` [N], the largest difference between it and what is decoded."""
        ...
