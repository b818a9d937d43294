"""A switch that is served by a thread of this process, over UDP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from isthmus.switch import SlotPool, serve_switch
from isthmus.wan import UdpSocket


@contextmanager
def served(pool: SlotPool, *, batches: bool = True) -> Iterator[tuple[str, int]]:
    """Yield the address of `pool`."""
    over = threading.Event()
    with closing(UdpSocket(batches=batches)) as udp:
        thread = threading.Thread(target=serve_switch, args=(pool, udp, time.monotonic, over.is_set))
        thread.start()
        try:
            yield udp.address
        finally:
            over.set()
            thread.join()
