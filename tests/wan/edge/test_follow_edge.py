"""The edge follows what is booked: each change once, and what cannot be applied leaves in force what is set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import Booking
from isthmus.wan.edge.edge_settings import EdgeSettings
from isthmus.wan.edge.follow_edge import follow_edge
from tests.wan.edge.test_edge_settings import TCP, booking


def test_changes_are_applied_once_and_errors_keep_what_is_set(caplog: pytest.LogCaptureFixture) -> None:
    """A booking begins and ends by time, a broken file and a promise too large are logged once, each."""
    one, large = booking("r", 0.3, TCP, start_s=1.0, end_s=3.0), booking("l", 5.0, TCP)
    files: list[Sequence[Booking] | None] = [[one], [one], [one], None, None, [one, large], [one]]
    applied: list[tuple[EdgeSettings | None, EdgeSettings]] = []
    looks = iter(range(len(files)))
    now_s = -1.0

    def read() -> Sequence[Booking]:
        nonlocal now_s
        now_s += 1.0
        found = files[next(looks)]
        if found is None:
            raise InputError("the file is broken")
        return found

    last = follow_edge(
        read, lambda old, new: applied.append((old, new)), lambda _: now_s == len(files) - 1, lambda: now_s, "a", 1.0
    )
    names = [[found.name for found in new.classes[2:]] for _, new in applied]
    assert names == [[], ["r"], []]
    assert [old for old, _ in applied[1:]] == [new for _, new in applied[:-1]]
    assert last == applied[-1][1]
    assert [record.message.count("broken") for record in caplog.records] == [1, 0]
