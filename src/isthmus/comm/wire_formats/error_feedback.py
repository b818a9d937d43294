"""`ErrorFeedback`: the rounding errors of one tensor's sums, which its next sum adds."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from isthmus.comm.wire_formats.wire_format import Bytes, Floats, WireFormat


class ErrorFeedback:
    """The residuals of one tensor or bucket; the caller keeps one for each, and gives it to each of its sums.

    With it, the sum of what was sent over any number of steps differs from the sum of the values by one residual at
    most: with block-scaled int8 by m / 253, where m bounds the magnitudes of a block over all steps.
    """

    def __init__(self) -> None:
        self._residuals: dict[Hashable, Floats] = {}

    def encode(self, place: Hashable, values: Floats, wire_format: WireFormat) -> tuple[Bytes, Floats]:
        """Return `values` [N] and the residual of `place` in `wire_format`, and what the receiver decodes, [N]."""
        residual = self._residuals.get(place)
        if residual is not None and residual.shape == values.shape:
            values = values + residual
        data = wire_format.encode(values)
        decoded = wire_format.decode(data, len(values))
        self._residuals[place] = values - decoded
        return data, decoded

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by `factor`: later values are in another unit, such as a new loss scale."""
        for residual in self._residuals.values():
            residual *= np.float32(factor)

    @property
    def largest(self) -> float:
        """The largest magnitude of a residual."""
        return max((float(np.abs(one).max(initial=0.0)) for one in self._residuals.values()), default=0.0)
