"""`interruptible`, `terminable`: how commands end on Ctrl-C and on SIGTERM."""

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


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the first SIGTERM, so that a command removes what it has started; ignore others."""

    def on_signal(number: int, frame: object) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, on_signal)
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
