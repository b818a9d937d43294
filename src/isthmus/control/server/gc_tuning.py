"""`tune_gc`: tunes Python's cyclic garbage collector to run full collections rarely."""

from __future__ import annotations

import gc

YOUNG_THRESHOLD = 50_000
"""Number of net allocations that triggers a collection of the youngest generation."""

FULL_COLLECTION_RATIO = 10_000
"""Number of generation 1 collections before a full one, which takes 1 s with the records of 10^6 jobs."""


def tune_gc() -> None:
    """Tune the collector for a process with many long-lived records that form no reference cycles.

    What exists now is exempt from collections, without one before: it takes 0.4 s with the records of 10^5 jobs.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_THRESHOLD, 10, FULL_COLLECTION_RATIO)
