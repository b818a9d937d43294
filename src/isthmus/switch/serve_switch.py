"""`serve_switch`: a `SlotPool` behind a UDP socket, until it is stopped."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from isthmus.switch.slot_pool import SlotPool
from isthmus.wan import UdpSocket

WAKE_S = 0.25
"""How often an idle switch looks whether it shall stop."""


def serve_switch(pool: SlotPool, udp: UdpSocket, clock: Callable[[], float], should_stop: Callable[[], bool]) -> None:
    """Answer packets until `should_stop()`; `clock()` is in seconds and only rises."""
    with selectors.DefaultSelector() as selector:
        selector.register(udp.fileno(), selectors.EVENT_READ)
        while not should_stop():
            if selector.select(WAKE_S):
                for reply in pool.handle_all(list(udp.receive()), clock()):
                    udp.send(reply)
