"""`spare_collector`: have Python's cyclic collector look at what is new, and seldom at all there is."""

from __future__ import annotations

import gc

YOUNG = 50_000
"""Objects made and not yet freed, before the new ones are looked at."""

FULL = 10_000
"""So many looks at new ones before one at all: the records of a million jobs take it a second."""


def spare_collector() -> None:
    """Set the collector for a process that keeps many records which refer to each other in no cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, FULL)
