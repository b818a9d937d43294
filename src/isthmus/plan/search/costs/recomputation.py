"""`fewest_recomputed`: algorithm 1 of the heterogeneous-training report.

Where a stage does not fit its memory, recomputed layers are added step by step; where it does not fit with
all of them recomputed, the stage is infeasible. As memory falls with every recomputed layer, the steps are
bisected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def fewest_recomputed(num_layers: int, stage_bytes: Callable[[int], float], limit_bytes: float) -> int | None:
    """Return the least number of recomputed layers with which the stage fits, None where none is enough.

    `stage_bytes(r)` is the stage's memory with `r` of its `num_layers` layers recomputed; it must not rise
    with `r`, but may from 0 to 1 (what recomputation works on is held beside the rest).
    """
    if stage_bytes(0) <= limit_bytes:
        return 0
    found = bisect_left(range(1, num_layers + 1), True, key=lambda r: stage_bytes(r) <= limit_bytes)
    return found + 1 if found < num_layers else None
