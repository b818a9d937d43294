"""`interruptible`: the first Ctrl-C requests an early end, so that partial results can be printed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Append the first Ctrl-C to the yielded list; the second raises `KeyboardInterrupt`."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:  # noqa: ARG001
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = signal.signal(signal.SIGINT, on_signal)
    except ValueError:  # not the main thread: signals do not arrive here
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
