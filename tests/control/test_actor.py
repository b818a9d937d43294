"""The rules of the actor: nothing is answered or acted upon before it is durable, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.control.service.coordinator_actor import ActorRequest, AppliedEvent, CoordinatorActor
from isthmus.control.state.events import Event, JobCancelled, JobSubmitted, NoticeDue
from isthmus.control.store.store_interface import LogMovedError, MemoryStore
from isthmus.core.errors import IsthmusError, NotFoundError, UnavailableError
from isthmus.core.views.access_views import AuditRecord
from tests.control.samples import submission


class Disk(MemoryStore):
    """A disk whose next appends end as `endings` say: "lost", "kept" (and yet an error), "moved", "" (well).

    With `gate` set, an append waits for it; `entered` says that it has begun.
    """

    def __init__(self, *endings: str, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.endings, self.flushes = list(endings), 0
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        self.flushes += 1
        ending = self.endings.pop(0) if self.endings else ""
        if ending == "lost":
            raise UnavailableError("the disk is full")
        if ending == "moved":
            raise LogMovedError(expected_last or 0)
        number = super().append(events, expected_last, audit, notices)
        if ending == "kept":
            raise UnavailableError("the connection was lost")
        return number

    def jobs(self) -> list[str]:
        return [event.job_id for _, event in self.events() if isinstance(event, JobSubmitted)]


class Watched:
    """An actor on `disk`, and what its observer has received: (number, job, live, own)."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.told = disk, list[tuple[int, str, bool, bool]]()
        self.actor = CoordinatorActor(disk, self._observe)

    def _observe(self, folded: AppliedEvent) -> None:
        job_id = getattr(folded.event, "job_id", "")
        self.told.append((folded.number, job_id, folded.live, folded.appended_here))

    def known(self) -> list[str]:
        return self.actor.query(lambda coordinator: [job.id for job in coordinator.list_jobs()])


def submit(job_id: str) -> ActorRequest:
    """A request that submits a job under a key of its own and answers how many there are then."""
    event = JobSubmitted(now_s=1.0, job_id=job_id, user="u", submission=submission(job_id, key=job_id))
    return ActorRequest(lambda coordinator: len(coordinator.list_jobs()), lambda _: event)


def test_nobody_sees_what_is_not_yet_on_disk() -> None:
    """The script: 1. a submission is being flushed; 2. a read comes; 3. it is answered after the flush."""
    disk = Disk()
    watched = Watched(disk)
    disk.gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(watched.actor.execute, [submit("a")])
        assert disk.entered.wait(20)
        reading = pool.submit(watched.known)
        assert not writing.done()
        assert not reading.done()
        assert watched.told == []
        disk.gate.set()
        assert reading.result(20) == ["a"]
    assert watched.told == [(1, "a", True, True)]


def test_submissions_that_wait_together_share_a_flush() -> None:
    """While one is being flushed, all that come are decided and appended together."""
    disk = Disk()
    watched = Watched(disk)
    disk.gate = threading.Event()
    others = [submit(f"j{i}") for i in range(8)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(watched.actor.execute, [submit("first")])
        assert disk.entered.wait(20)
        watched.actor.enqueue(others)
        disk.gate.set()
        answers = sorted(done.value() for done in [*first.result(20), *watched.actor.complete(others)])
    assert answers == list(range(1, 10))
    assert disk.flushes == 2


@pytest.mark.parametrize("others", [0, 3])
def test_a_failed_append_leaves_nothing_behind(others: int) -> None:
    """Each write of the batch gets the error; a read gets the durable state; later writes succeed."""
    disk = Disk("", "lost")
    watched = Watched(disk)
    watched.actor.execute([submit("old")])
    read = ActorRequest(lambda coordinator: len(coordinator.list_jobs()))
    batch = [submit("a"), *(submit(f"b{i}") for i in range(others)), read]
    watched.actor.execute(batch)
    assert all(isinstance(request.error, UnavailableError) for request in batch[:-1])
    assert read.value() == 1
    assert watched.known() == disk.jobs() == ["old"]
    assert watched.actor.execute([submit("a")])[0].value() == 2
    assert [told[:2] for told in watched.told] == [(1, "old"), (2, "a")]


def test_an_append_of_unknown_outcome_is_looked_up_in_the_log() -> None:
    """What was kept although the answer was lost is there, and told once; trying again is safe."""
    watched = Watched(Disk("kept"))
    with pytest.raises(UnavailableError):
        watched.actor.execute([submit("a")])[0].value()
    assert watched.known() == ["a"]
    assert watched.actor.execute([submit("a")])[0].value() == 1
    assert watched.told == [(1, "a", True, False)]


def test_an_event_that_breaks_the_coordinator_is_never_on_disk() -> None:
    """Its sender gets the error; the rest of the batch is decided again without it and kept."""
    watched = Watched(Disk())
    watched.actor.execute([submit("old")])
    broken = JobSubmitted.model_construct(now_s=None, job_id="bad", user="u", submission=submission("bad"))
    bad = ActorRequest(lambda _: None, lambda _: broken)
    batch = [submit("a"), bad, submit("b")]
    watched.actor.execute(batch)
    assert isinstance(bad.error, TypeError)
    assert [batch[0].value(), batch[2].value()] == [2, 3]
    assert watched.known() == watched.disk.jobs() == ["old", "a", "b"]


def test_a_refused_event_changes_nothing() -> None:
    """What `admit` refuses, or a proposal raises, is its sender's alone."""
    watched = Watched(Disk())
    refused = ActorRequest(lambda _: None, lambda _: JobCancelled(now_s=2, job_id="nobody"))
    watched.actor.execute([refused, submit("a")])
    assert isinstance(refused.error, NotFoundError)
    assert watched.disk.jobs() == ["a"]


def test_a_log_that_others_append_to_is_read_first() -> None:
    """Two actors on one log: each decides on what both have appended, and observes every event once."""
    disk = Disk(shared=True)
    one, two = Watched(disk), Watched(disk)
    one.actor.execute([submit("a")])
    assert two.actor.execute([submit("b")])[0].value() == 2
    assert one.known() == two.known() == ["a", "b"]
    assert one.told == [(1, "a", True, True), (2, "b", True, False)]
    assert two.told == [(1, "a", True, False), (2, "b", True, True)]


def test_a_log_that_moved_is_read_and_the_batch_decided_again() -> None:
    """When another actor has appended in between, the request is settled on the log as it is then."""
    watched = Watched(Disk("moved", "moved"))
    assert watched.actor.execute([submit("a")])[0].value() == 1
    assert watched.disk.jobs() == ["a"]


def test_a_log_that_does_not_replay_is_named_by_its_event() -> None:
    """An actor that cannot rebuild the state says at which event."""
    disk = Disk()
    disk.append([JobCancelled(now_s=1, job_id="ghost")])
    with pytest.raises(IsthmusError, match="event 1 of the log, 'job-cancelled', cannot be replayed"):
        CoordinatorActor(disk, lambda _: None)
