"""What objects there are, while nothing but the end of its last reference frees one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.core.process.gc_pause import collection_paused


@contextmanager
def no_collector() -> Iterator[None]:
    """What is freed inside is freed because nothing refers to it, not because the collector ran."""
    gc.collect()
    with collection_paused():
        yield


def alive(kind: type) -> int:
    """Return how many there are of a kind of object."""
    return sum(type(one) is kind for one in gc.get_objects())
