"""Which notices go together and when: every notice is delivered, given up or dropped, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.algorithms.delivery_queue import (
    FIRST_RETRY_S,
    GIVE_UP_S,
    GROUP_INTERVAL_S,
    GROUP_WAIT_S,
    LAST_RETRY_S,
    MAX_NOTICES,
    MAX_WAITING,
    DeliveryQueue,
    NoticeBatch,
)

ANN, BOB = ("user", "ann", "webhook"), ("user", "bob", "email")


def test_notices_of_a_storm_share_messages() -> None:
    """The first waits a moment for others; a storm is one message a minute of at most a hundred notices."""
    waiting = DeliveryQueue()
    for number in range(1, 251):
        waiting.add(ANN, number, 100.0)
    assert waiting.due(100.0 + GROUP_WAIT_S - 0.1) == []
    sizes, now_s = list[int](), 100.0 + GROUP_WAIT_S
    while found := waiting.due(now_s):
        (message,) = found
        sizes.append(len(message.notices))
        assert waiting.due(now_s) == [], "one message at a time"
        waiting.delivered(message)
        assert waiting.due(now_s + GROUP_INTERVAL_S - 1) == []
        now_s += GROUP_INTERVAL_S
    assert sizes == [MAX_NOTICES, MAX_NOTICES, 50]
    assert (waiting.num_waiting, waiting.next_s()) == (0, None)


def test_a_failed_message_is_repeated_as_it_was_ever_later() -> None:
    """Newer notices wait behind it; after a day it is given up, and the next message says how many were lost."""
    waiting = DeliveryQueue()
    waiting.add(ANN, 7, 0.0)
    (first,) = waiting.due(10.0)
    now_s, delays = 10.0, list[float]()
    waiting.add(ANN, 8, 11.0)
    message = first
    while not waiting.failed(message, now_s, 0.0):
        next_s = waiting.next_s()
        assert next_s is not None
        delays.append(next_s - now_s)
        now_s = next_s
        (message,) = waiting.due(now_s)
        assert (message.number, message.notices, message.is_new) == (7, (7,), False)
    assert delays[:4] == [FIRST_RETRY_S, 20.0, 40.0, 80.0]
    assert max(delays) == LAST_RETRY_S
    assert GIVE_UP_S - 2 * LAST_RETRY_S < now_s <= GIVE_UP_S + 10
    (last,) = waiting.due(now_s)
    assert (last.notices, last.num_dropped) == ((8,), 1)


def test_a_receiver_says_when_to_come_again() -> None:
    """`Retry-After` counts up to an hour; jitter only delays."""
    waiting = DeliveryQueue()
    waiting.add(ANN, 1, 0.0)
    (message,) = waiting.due(5.0)
    assert not waiting.failed(message, 5.0, 1.0)
    assert waiting.next_s() == 5.0 + FIRST_RETRY_S * 1.25
    (message,) = waiting.due(20.0)
    assert not waiting.failed(message, 20.0, 0.0, retry_after_s=1e9)
    assert waiting.next_s() == 20.0 + LAST_RETRY_S


def test_what_an_earlier_process_began_goes_first_under_its_number() -> None:
    """Also when it was interrupted between the attempt and its end; a second open message is a fault, and waits."""
    waiting = DeliveryQueue()
    assert waiting.restore(ANN, [(3, (3, 4)), (5, (5,))], 50.0) == [5]
    waiting.add(ANN, 5, 50.0)
    (message,) = waiting.due(50.0)
    assert (message.number, message.notices, message.is_new) == (3, (3, 4), False)
    waiting.delivered(message)
    (message,) = waiting.due(60.0)
    assert (message.notices, message.is_new) == ((5,), True)


def test_one_receiver_that_is_away_does_not_delay_another() -> None:
    """Each has its own order and times; what waits for one is bounded, and the oldest go first."""
    waiting = DeliveryQueue()
    dropped = [one for number in range(MAX_WAITING + 5) for one in waiting.add(ANN, number, 0.0)]
    assert dropped == [0, 1, 2, 3, 4]
    waiting.add(BOB, 9999, 0.0)
    found = {one.receiver: one for one in waiting.due(GROUP_WAIT_S)}
    assert found[ANN].num_dropped == 5
    assert found[BOB].notices == (9999,)


@given(st.data())
def test_every_notice_ends_once(data: st.DataObject) -> None:
    """Whatever fails: in order for a receiver, each in one message alone, delivered, given up, or dropped."""
    waiting, now_s, number = DeliveryQueue(), 0.0, 0
    ended, added = {ANN: list[int](), BOB: list[int]()}, {ANN: list[int](), BOB: list[int]()}
    flying, composed = list[NoticeBatch](), dict[int, tuple[int, ...]]()
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "time", "end", "fail"])):
            case "add":
                receiver = data.draw(st.sampled_from([ANN, BOB]))
                number += 1
                added[receiver].append(number)
                assert waiting.add(receiver, number, now_s) == []
            case "time":
                now_s += data.draw(st.sampled_from([1.0, 70.0, 4000.0, 90_000.0]))
                for message in waiting.due(now_s):
                    assert message.receiver not in {one.receiver for one in flying}
                    assert composed.setdefault(message.number, message.notices) == message.notices
                    flying.append(message)
            case "end" if flying:
                message = flying.pop(0)
                waiting.delivered(message)
                ended[message.receiver] += message.notices
            case "fail" if flying:
                message = flying.pop(0)
                if waiting.failed(message, now_s, 0.5):
                    ended[message.receiver] += message.notices
    for receiver, notices in ended.items():
        assert notices == added[receiver][: len(notices)]
    waits = sum(len(added[one]) - len(ended[one]) for one in added)
    assert waiting.num_waiting == waits
