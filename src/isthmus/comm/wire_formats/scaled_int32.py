"""`ScaledInt32`: 32-bit integers of one scale a message. Error bound: m / (2 (2^31 - 1)), m the largest magnitude."""

from __future__ import annotations

import numpy as np

from isthmus.comm.wire_formats.scaled_integers import ScaledIntegers


class ScaledInt32(ScaledIntegers):
    """4 bytes a value; finer than float32 for values near the largest, coarser for small ones."""

    def __init__(self) -> None:
        super().__init__("scaled-int32", np.int32)
