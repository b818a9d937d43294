"""Rules of handing exchanges over: they begin in order, elsewhere, and their errors reach the waiter."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta

import pytest

from isthmus.core.errors import PeerError
from isthmus.train.communication.exact_sleep import SPIN_S, sleep_exactly
from isthmus.train.communication.send_thread import SendThread

DEADLINE_S = 10.0


class Done:
    """A work that is done once it has begun."""

    under_way = (1.0, 2.0)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Message:
    """One that can be asked whether it is still held."""


def test_exchanges_begin_in_the_order_in_which_they_were_handed_over() -> None:
    """The submitting thread goes on at once; exchanges begin in the order of submission."""
    poster: SendThread[int] = SendThread()
    gate, begun = threading.Event(), list[int]()

    def start(message: int) -> Done:
        gate.wait(DEADLINE_S)
        begun.append(message)
        return Done()

    posted = poster.submit([1, 2], start) + poster.submit([3], start)
    assert not posted[0].is_completed()
    assert begun == []
    gate.set()
    assert all(one.wait() for one in posted)
    assert begun == [1, 2, 3]
    assert posted[0].is_completed()
    assert posted[0].under_way == (1.0, 2.0)


def test_what_starting_raises_is_raised_by_waiting() -> None:
    """An exchange that cannot begin fails its waiter, each time, and not those after it."""
    poster: SendThread[str] = SendThread()

    def start(message: str) -> Done:
        if message == "bad":
            raise PeerError("rank 1 is lost")
        return Done()

    bad, good = poster.submit(["bad", "good"], start)
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 is lost"):
            bad.wait()
    assert good.wait()


def test_between_exchanges_it_holds_none() -> None:
    """An exchange that has begun and has no waiter left is freed; submitting none is harmless."""
    poster: SendThread[Message] = SendThread()
    assert poster.submit([], lambda _: Done()) == []
    message = Message()
    known, (posted,) = weakref.ref(message), poster.submit([message], lambda _: Done())
    del message
    assert posted.wait()
    poster.drain()
    del posted
    assert known() is None


def test_the_thread_ends_with_the_poster() -> None:
    """A poster without references leaves no thread behind."""
    others = set(threading.enumerate())
    poster: SendThread[int] = SendThread()
    poster.submit([1], lambda _: Done())[0].wait()
    (thread,) = set(threading.enumerate()) - others
    del poster
    gc.collect()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_sleep_ends_when_it_should() -> None:
    """The timer, which is late, is asked for less; the rest is waited for by looking at the clock."""
    now_s, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds + 1e-4 if seconds else 1e-5

    sleep_exactly(0.02, lambda: now_s[0], sleep)
    assert now_s[0] == pytest.approx(100.02, abs=2e-5)
    assert slept[0] == pytest.approx(0.02 - SPIN_S)
    assert set(slept[1:]) == {0.0}
