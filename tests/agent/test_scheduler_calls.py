"""Calls of an adapter in a thread: their order, and what becomes of their answers."""

from __future__ import annotations

import threading

from isthmus.agent.service.scheduler_calls import SchedulerCalls
from isthmus.core.errors import UnavailableError


def test_urgent_calls_go_before_those_that_wait() -> None:
    """While one call blocks, others come; the urgent one is made next, the others in their order."""
    calls, begun, goes_on, last = SchedulerCalls(blocks=True), threading.Event(), threading.Event(), threading.Event()
    made: list[str] = []

    def block() -> None:
        begun.set()
        goes_on.wait(10)

    def end() -> None:
        made.append("third")
        last.set()

    calls.submit("slow", block)
    assert begun.wait(10)
    calls.submit("first", lambda: made.append("first"))
    calls.submit("second", lambda: made.append("second"))
    calls.submit("third", end)
    calls.submit("renewal", lambda: made.append("renewal"), urgent=True)
    goes_on.set()
    assert last.wait(10)
    assert made == ["renewal", "first", "second", "third"]
    calls.close()


def test_answers_and_errors_are_handed_over_by_collect() -> None:
    """A call that fails reports its error; its key can be called again."""
    arrived = threading.Semaphore(0)
    calls, answers, errors = SchedulerCalls(blocks=True, on_answer=arrived.release), list[int](), list[Exception]()

    def fail() -> None:
        raise UnavailableError("late")

    calls.submit("a", lambda: 5, answers.append)
    calls.submit("b", fail, on_error=errors.append)
    assert arrived.acquire(timeout=10)
    assert arrived.acquire(timeout=10)
    calls.collect()
    assert (answers, [str(error) for error in errors]) == ([5], ["late"])
    assert not calls.busy
    calls.close()
