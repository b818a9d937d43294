"""`ScaledInt16`: 16-bit integers of one scale a message. Error bound: m / 65534, m the largest magnitude."""

from __future__ import annotations

import numpy as np

from isthmus.comm.wire_formats.scaled_integers import ScaledIntegers


class ScaledInt16(ScaledIntegers):
    """2 bytes a value."""

    def __init__(self) -> None:
        super().__init__("scaled-int16", np.int16)
