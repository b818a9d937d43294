"""Which reports of a site are logged, and what they set in motion."""

from __future__ import annotations

import itertools

import pytest

from isthmus.core.messages.agent_messages import ObservedLocalJob, QueueEntry
from tests.control.driver import Driver, seen, started
from tests.control.samples import plan


def running(**more: object) -> Driver:
    """`j` runs at `a`; `b` has a local job."""
    pool = started("a")
    pool.report("b", local=(local(),))
    return pool


def local(**more: object) -> ObservedLocalJob:
    """A local job on two chips."""
    fields = {"name": "x", "chips": {"g": 2}, "level": "middle", "running": True} | more
    return ObservedLocalJob.model_validate(fields)


def test_unsaved_work_is_shown_but_not_logged() -> None:
    """It grows with every report; of parts as of local jobs."""
    pool = running()
    (part,) = (pool.done("a", order) for order in pool.coordinator.orders("a"))
    pool.report("a", part)
    logged = len(pool.log)
    pool.report("a", part.model_copy(update={"unsaved_s": 50.0}))
    pool.report("b", local=(local(unsaved_s=70.0),))
    assert len(pool.log) == logged
    state = pool.coordinator.state
    assert state.clusters["a"].parts["j", 1].unsaved_s == 50
    assert state.clusters["b"].local_jobs["x"].unsaved_s == 70


@pytest.mark.parametrize(
    "change",
    [
        {"free": 1},
        {"incarnation": "2"},
        {"chips": 5},
        {"queue": (QueueEntry(job="x"),)},
        {"local": ()},
        {"local": (local(running=False),)},
        {"local": (local(preemptible=True),)},
        {"local": (local(), local(name="y"))},
        {"local": (local(name="y"),)},
    ],
    ids=str,
)
def test_every_other_change_is_logged_once(change: dict[str, object]) -> None:
    """The second equal report is none."""
    pool = running()
    logged = len(pool.log)
    for _ in range(2):
        pool.report("b", **change)  # type: ignore[arg-type]
        assert len(pool.log) == logged + 1


def test_a_part_that_appears_changes_or_goes_is_logged() -> None:
    """Each of the three; another part in its place, too."""
    pool = running()
    parts = [(), (seen("x", 1, "queued"),), (seen("x", 1, "ready"),), (seen("y", 1, "ready"),), ()]
    for before, after in itertools.pairwise(parts):
        logged = len(pool.log)
        pool.report("b", *before)
        assert len(pool.log) == logged
        pool.report("b", *after)
        assert len(pool.log) == logged + 1


@pytest.mark.parametrize(("before", "now", "logged"), [(500, 509, 0), (500, 511, 1), (500, 489, 1), (None, 500, 1)])
def test_free_storage_counts_by_the_percent(before: int | None, now: int, logged: int) -> None:
    """It changes all the time; a site that says nothing of it is another thing than one that has none."""
    pool = Driver("a")
    pool.clusters["a"] = pool.clusters["a"].model_copy(update={"storage_bytes": 1000})
    pool.report("a")
    record = pool.coordinator.state.clusters["a"]
    record.free_storage_bytes = before
    event = pool.log[-1].model_copy(update={"free_storage_bytes": now, "now_s": pool.now_s})
    assert pool.coordinator.admit(event) is bool(logged)
    assert not pool.coordinator.admit(event.model_copy(update={"free_storage_bytes": before}))


def test_only_more_free_chips_put_the_queue_in_order_again() -> None:
    """Fewer, or as many, let no job start."""
    pool = Driver("a", "b")
    count = pool.coordinator.state.indexes.freed_count

    def freed(free: int) -> bool:
        nonlocal count
        pool.report("a", free=free)
        before, count = count, pool.coordinator.state.indexes.freed_count
        return count > before

    assert [freed(free) for free in (2, 2, 1, 3, 3)] == [False, False, False, True, False]


def test_a_job_that_waits_starts_with_the_report_that_frees_its_chips() -> None:
    """Whether they were an owner's own or another job's."""
    pool = Driver("a")
    pool.report("a", local=(local(chips={"g": 4}),))
    pool.submit("j")
    pool.answer("j")
    pool.answer("j", plan("a", "a"))
    assert pool.state("j") == "waiting"
    pool.report("a", local=())
    assert pool.state("j") == "preparing"


def test_a_cause_that_is_found_later_gives_no_restart_back_that_was_not_used() -> None:
    """The first cause ended the job since no restart was left; the second one explains it."""
    pool = started("a", "b", restarts=0)
    lost = seen("j", 1, "failed", "rank 0 lost rank 1").model_copy(update={"fault": "peer"})
    cause = seen("j", 1, "failed", "no text").model_copy(update={"fault": "own"})
    pool.report("a", lost)
    pool.report("b", cause)
    view = pool.coordinator.job_view("j")
    assert (view.state, view.restarts) == ("stopping", 0)
    assert "no text" in view.reason


def test_a_cause_that_is_found_later_uses_the_same_restart() -> None:
    """Not a second one."""
    pool = started("a", "b", restarts=2)
    pool.report("a", seen("j", 1, "failed", "rank 0 lost rank 1").model_copy(update={"fault": "peer"}))
    pool.report("b", seen("j", 1, "failed", "no text").model_copy(update={"fault": "own"}))
    view = pool.coordinator.job_view("j")
    assert view.restarts == 1
    assert "no text" in view.reason
