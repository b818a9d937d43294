"""Rules of stop signals: a block handles them, and afterwards the previous handlers do."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress

import pytest

from isthmus.core.process.stop_signals import handled_stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_block_handles_stop_signals_and_then_restores_the_handlers(number: signal.Signals) -> None:
    """An error that leaves the block restores them as well."""
    before, received = signal.getsignal(number), list[int]()
    with suppress(KeyError), handled_stop_signals(lambda one, _: received.append(one)):
        signal.raise_signal(number)
        raise KeyError
    assert received == [number]
    assert signal.getsignal(number) is before


def test_other_threads_have_no_handlers() -> None:
    """Python delivers signals to the main thread only: elsewhere the block changes nothing."""
    before, during = signal.getsignal(signal.SIGINT), list[object]()

    def block() -> None:
        with handled_stop_signals(lambda *_: None):
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert during == [before]
