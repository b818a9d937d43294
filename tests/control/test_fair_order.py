"""The order in which waiting work of several users is served."""

from __future__ import annotations

import random
from collections import Counter

from isthmus.control.algorithms.fair_order import FairOrder

HIGH, MIDDLE = 0, 1


def served(order: FairOrder) -> list[int]:
    """Return the numbers in the order in which they are served."""
    found = []
    while (place := order.pop()) is not None:
        found.append(place[2])
    return found


def test_users_take_turns_within_a_priority_and_a_higher_priority_comes_first() -> None:
    """Three entries of one user, then one each of two others, then one of higher priority."""
    order = FairOrder()
    for number in (1, 2, 3):
        order.add("many", (MIDDLE, 0.0, number))
    order.add("few", (MIDDLE, 1.0, 4))
    order.add("fewer", (MIDDLE, 2.0, 5))
    order.add("fewer", (HIGH, 3.0, 6))
    assert order.first() == (HIGH, 3.0, 6)
    assert served(order) == [6, 1, 4, 5, 2, 3]


def test_a_user_who_comes_later_precedes_what_another_user_has_queued() -> None:
    """1. One user queues 300. 2. Ten are served. 3. Another user's entry is next."""
    order = FairOrder()
    for number in range(300):
        order.add("many", (MIDDLE, 0.0, number))
    for _ in range(10):
        order.pop()
    order.add("few", (MIDDLE, 1.0, 1000))
    assert order.pop() in ((MIDDLE, 0.0, 10), (MIDDLE, 1.0, 1000))
    assert 1000 not in [key[3] for key in list(order)[1:]]


def test_without_turns_entries_are_served_by_place_as_old_logs_were() -> None:
    """Arrival decides within a priority, whoever the user is."""
    order = FairOrder()
    for number, user in enumerate(("a", "a", "b", "a"), 1):
        order.add(user, (MIDDLE, float(number), number), in_turns=False)
    assert served(order) == [1, 2, 3, 4]


def test_an_entry_whose_user_may_not_be_served_is_passed_over() -> None:
    """It stays, and is served once its user may be."""
    order = FairOrder()
    order.add("busy", (HIGH, 0.0, 1))
    order.add("idle", (MIDDLE, 0.0, 2))
    assert order.pop(lambda user: user != "busy") == (MIDDLE, 0.0, 2)
    assert order.pop(lambda user: user != "busy") is None
    assert order.pop() == (HIGH, 0.0, 1)


def test_no_user_is_served_more_than_one_entry_ahead_of_another_that_waits() -> None:
    """For random arrivals: while two users of one priority have work, their counts differ by two at most."""
    chance, order, waiting, user_of = random.Random(1), FairOrder(), Counter[str](), dict[int, str]()
    since: dict[str, Counter[str]] = {}
    for number in range(2000):
        if chance.random() < 0.55:
            user = chance.choice("aaaaaaab")
            if not waiting[user]:
                since[user] = Counter()
            order.add(user, (MIDDLE, float(number), number))
            waiting[user], user_of[number] = waiting[user] + 1, user
            continue
        place = order.pop()
        if place is None:
            continue
        user = user_of[place[2]]
        waiting[user] -= 1
        for other in since:
            if waiting[other]:
                since[other][user] += 1
        for other in "ab":
            if other != user and waiting[other]:
                assert since[other][user] - since[other][other] <= 2
    assert not order or order.first()


def test_turns_are_forgotten_once_nothing_waits() -> None:
    """The state of users who are gone does not accumulate."""
    order = FairOrder()
    order.add("a", (MIDDLE, 0.0, 1))
    order.pop()
    order.forget_turns()
    assert (order.turns, order.served, order.entries) == ({}, {}, {})


def test_an_entry_is_there_from_its_addition_until_it_is_served_or_removed() -> None:
    """Its number is what names it; a second addition changes nothing."""
    order, place = FairOrder(), (1, 5.0, 7)
    assert place not in order
    order.add("ann", place)
    order.add("bob", (0, 1.0, 7))
    assert place in order
    assert (1, 5.0, 8) not in order
    assert len(order) == 1
    assert order.pop() == place
    assert place not in order
    order.add("ann", place)
    order.discard(place)
    order.discard(place)
    assert (place in order, order.pop()) == (False, None)
