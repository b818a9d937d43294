"""Rules of the timeline's messages: what a rank records, and how true the bars are beside the links' own record."""

from __future__ import annotations

from datetime import timedelta
from statistics import median

import pytest
import torch

from benchmarks._first_hour_timeline import DELAYS_MS, MICRO_BATCHES, compare_timeline
from isthmus.comm.transport.transport import Arrival
from isthmus.core.messages.agent_messages import ReceivedMessage
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.host_staging import HostStaging
from isthmus.train.communication.send_thread import PendingWork
from isthmus.train.communication.step_metrics import StepTimer
from tests.train.late_copies import LateCopies

ARRIVAL = Arrival(1.0, 2.0, 3.0, 4.0, 0.5)


class Done:
    """A work whose message has arrived."""

    arrival = ARRIVAL
    under_way = (1.0, 4.0)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def posted(peer: int, *, is_send: bool = False) -> PendingWork[TensorMessage]:
    work = PendingWork(TensorMessage(torch.zeros(6), peer, 7, is_send, "backward", 3))
    work.start(lambda _: Done())
    return work


def waited_for(work: object, *, is_traced: bool = True) -> list[ReceivedMessage]:
    """Wait for a work at rank 0 of cluster a; ranks 1 and 2 are in clusters b and a."""
    communicator = Communicator("aba", 0)
    communicator.timer = StepTimer(is_traced=is_traced)
    communicator.wait(work)
    return communicator.timer.messages


def test_a_receive_from_another_cluster_is_recorded_with_all_its_times() -> None:
    """Whenever the wait begins, the record has the times of the transport."""
    assert waited_for(posted(1)) == [
        ReceivedMessage(
            kind="backward", micro_batch=3, source=1, num_bytes=24, sent_s=1.0, first_left_s=2.0, last_left_s=3.0,
            arrived_s=4.0, clock_offset_s=0.5,
        )
    ]  # fmt: skip


def test_sends_messages_inside_a_cluster_and_steps_without_a_trace_are_not_recorded() -> None:
    """The receiver alone records, between clusters alone, in traced steps alone."""
    assert waited_for(posted(1, is_send=True)) == []
    assert waited_for(posted(2)) == []
    assert waited_for(posted(1), is_traced=False) == []


def test_a_receive_through_host_memory_is_recorded_too() -> None:
    """The copy to the device is no part of the message's times."""
    staged = HostStaging(LateCopies()).receive_to_device(torch.zeros(6), lambda _: posted(1))
    (found,) = waited_for(staged)
    assert (found.source, found.arrived_s) == (1, 4.0)


@pytest.mark.slow
def test_every_bar_of_a_known_schedule_agrees_with_the_links() -> None:
    """Under the overlapped schedule on links of 4 and 10 ms, every message has one bar, none of 0 ms, in its place.

    The benchmark reports the largest error; here, on a machine that may be busy, the median is below either delay.
    """
    found = compare_timeline(2)
    assert len(found.errors_ms) == 4 * MICRO_BATCHES
    assert (found.num_missing, found.num_empty) == (0, 0)
    assert median(found.errors_ms) < min(DELAYS_MS)
