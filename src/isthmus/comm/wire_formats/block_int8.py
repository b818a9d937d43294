"""`BlockInt8`: 8-bit integers of a scale each 256 values. Error bound: m / 254, m the largest magnitude of the block.

Meant for error feedback (`ErrorFeedback`): what rounding takes from a step, the next step adds.
"""

from __future__ import annotations

import numpy as np

from isthmus.comm.wire_formats.scaled_integers import ScaledIntegers

BLOCK = 256


class BlockInt8(ScaledIntegers):
    """1 byte a value, and 4 for each block of 256."""

    def __init__(self) -> None:
        super().__init__("block-int8", np.int8, BLOCK)
