"""Requests of one moment share a flush, and who is in no hurry waits for company."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.rest.request_batcher import RequestBatcher
from isthmus.control.service.background_writes import BackgroundWriter
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.state.events import Event, JobSubmitted, NoticeDue
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.views.access_views import AuditRecord
from tests.control.samples import submission


class Gated(MemoryStore):
    """A disk that notes the size of every append; each waits for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.appended: list[int] = []
        self.gate, self.entered = threading.Event(), threading.Event()

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        self.entered.set()
        assert self.gate.wait(20)
        self.appended.append(len(events))
        return super().append(events, expected_last, audit, notices)


def taking_in(job_id: str) -> ActorRequest:
    event = JobSubmitted(now_s=1.0, job_id=job_id, user="ann", submission=submission())
    return ActorRequest(lambda coordinator: coordinator.job_view(job_id).id, lambda _: event)


def test_what_comes_during_a_flush_shares_the_next_one() -> None:
    """The script: 1. a is being flushed; 2. b, c and d come; 3. the disk answers: two flushes in all."""
    disk = Gated()
    together = RequestBatcher(CoordinatorActor(disk, lambda _: None).execute)

    async def run() -> list[str]:
        first = asyncio.create_task(together.result_of(taking_in("a")))
        await asyncio.to_thread(disk.entered.wait, 20)
        others = [asyncio.create_task(together.result_of(taking_in(name))) for name in "bcd"]
        await asyncio.sleep(0)
        disk.gate.set()
        return [await each for each in (first, *others)]

    assert asyncio.run(run()) == ["a", "b", "c", "d"]
    assert disk.appended == [1, 3]


def test_one_request_s_error_is_its_own_and_who_went_away_holds_nobody_up() -> None:
    """A refused request and a cancelled one leave the third of their batch alone."""
    disk = Gated()
    together = RequestBatcher(CoordinatorActor(disk, lambda _: None).execute)

    def refuse(_: Coordinator) -> Event:
        raise InputError("no")

    async def run() -> str:
        first = asyncio.create_task(together.result_of(taking_in("a")))
        await asyncio.to_thread(disk.entered.wait, 20)
        refused = asyncio.create_task(together.result_of(ActorRequest(lambda _: None, refuse)))
        gone = asyncio.create_task(together.result_of(taking_in("gone")))
        last = asyncio.create_task(together.result_of(taking_in("b")))
        await asyncio.sleep(0)
        gone.cancel()
        disk.gate.set()
        await first
        with pytest.raises(InputError):
            await refused
        return str(await last)

    assert asyncio.run(run()) == "b"


def test_where_settling_itself_breaks_everybody_is_told() -> None:
    """What no request is to blame for is raised for all of the batch."""

    def settle(_: Sequence[ActorRequest]) -> None:
        raise UnavailableError("away")

    async def run() -> None:
        with pytest.raises(UnavailableError):
            await RequestBatcher(settle).result_of(taking_in("a"))

    asyncio.run(run())


def test_who_is_in_no_hurry_is_taken_along() -> None:
    """What was put in shares the flush of the next request that settles, before it."""
    disk = Gated()
    disk.gate.set()
    actor = CoordinatorActor(disk, lambda _: None)
    waiting = taking_in("a")
    actor.enqueue([waiting])
    assert not disk.appended
    actor.execute([taking_in("b")])
    assert waiting.value() == "a"
    assert disk.appended == [2]


def test_who_is_in_no_hurry_is_settled_where_nobody_comes() -> None:
    """Closing settles what is left."""
    disk = Gated()
    disk.gate.set()
    unhurried = BackgroundWriter(CoordinatorActor(disk, lambda _: None))
    unhurried.enqueue("a job", waiting := taking_in("a"))
    unhurried.close()
    assert waiting.value() == "a"
    assert disk.appended == [1]
