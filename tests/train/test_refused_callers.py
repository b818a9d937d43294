"""Rules of the count of refused callers: an event a minute at most, of bounded length."""

from __future__ import annotations

from isthmus.train.liveness.refused_callers import INTERVAL_S, RefusedCallers


def test_the_first_caller_is_told_at_once_and_the_others_after_a_minute() -> None:
    """A flood makes one event a minute, with the count of each address."""
    callers = RefusedCallers()
    assert callers.add("10.0.0.1", 5.0) == "refused connections: 1 from 10.0.0.1"
    assert all(callers.add("10.0.0.1", 6.0) is None for _ in range(1000))
    assert callers.add("10.0.0.2", 5.0 + INTERVAL_S) == ("refused connections: 1000 from 10.0.0.1, 1 from 10.0.0.2")


def test_many_addresses_take_bounded_memory() -> None:
    """Callers beyond the first eight addresses are counted together."""
    callers = RefusedCallers()
    callers.add("a", 0.0)
    for number in range(1000):
        callers.add(f"10.0.{number // 256}.{number % 256}", 1.0)
    text = callers.add("10.0.0.0", INTERVAL_S)
    assert text is not None
    assert "992 from other addresses" in text
    assert text.count(" from ") == 9
