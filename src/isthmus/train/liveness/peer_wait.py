"""`waiting_for_peer`: marks the calling thread as waiting for a peer, for the heartbeat thread to see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_waiting_threads: set[int] = set()


@contextmanager
def waiting_for_peer(thread: int | None = None) -> Iterator[None]:
    """Mark `thread` (default: the calling one) as waiting for a peer until the block ends, normally or by an error.

    Enclose every call in which a training step may block on another rank. Blocks may nest; the outermost one
    counts. Computation and copies belong outside, because a stall in them is to be detected.
    """
    thread = threading.get_ident() if thread is None else thread
    if thread in _waiting_threads:
        yield
        return
    _waiting_threads.add(thread)
    try:
        yield
    finally:
        _waiting_threads.discard(thread)


def is_waiting_for_peer(thread: int) -> bool:
    """Return whether the thread with the identifier `thread` (`threading.get_ident`) waits for a peer."""
    return thread in _waiting_threads
