"""`fewest_recomputed`: algorithm 1 of the heterogeneous-training report.

If a stage exceeds its memory, recompute more layers until it fits; a stage that does not fit with all layers
recomputed is infeasible. Memory falls with every recomputed layer, so the count is bisected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def fewest_recomputed(num_layers: int, stage_bytes: Callable[[int], float], limit_bytes: float) -> int | None:
    """Return the least number of recomputed layers with which the stage fits, or None if none suffices.

    `stage_bytes(r)` is the stage's memory with `r` of its `num_layers` layers recomputed. It must not
    increase with `r`, except from 0 to 1 (recomputation needs a working buffer).
    """
    if stage_bytes(0) <= limit_bytes:
        return 0
    found = bisect_left(range(1, num_layers + 1), True, key=lambda r: stage_bytes(r) <= limit_bytes)
    return found + 1 if found < num_layers else None
