"""`interruptible`: long work that a first Ctrl-C asks to end, and that then shows what it has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Note the first Ctrl-C in the list given; the second interrupts as usual."""
    found: list[int] = []

    def note(number: int, frame: object) -> None:  # noqa: ARG001
        if found:
            raise KeyboardInterrupt
        found.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread: nobody can interrupt it
        yield found
        return
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
