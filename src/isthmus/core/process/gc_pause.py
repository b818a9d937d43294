"""`collection_paused`: pauses Python's cyclic garbage collector.

Source of the pause around a decode step: `long-sequence-rl.txt`, 2.2.4: a collection in one process delays its
launches, and with them all that wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector; reference counts free all objects but cycles, which wait for the end.

    A search for plans allocates millions of objects in few cycles: a third of its time would go to collections. The
    objects of a snapshot that is read would be scanned repeatedly while they are created.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
