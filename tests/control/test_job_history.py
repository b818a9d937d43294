"""Rules of a job's history: every event once, with its time, from the log alone; bounded, in pages."""

from __future__ import annotations

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.history_page import history_page
from isthmus.control.state.job_history import MAX_ENTRIES, JobHistory
from isthmus.core.messages.agent_messages import PartEvent
from isthmus.core.views.api_views import HistoryEvent
from tests.control.driver import RULES, Driver, seen, started
from tests.control.test_coordinator_preemption import busy
from tests.control.test_coordinator_preemption import obey as obey_in_turn


def history(pool: Driver, job: str = "j") -> list[HistoryEvent]:
    return list(history_page(pool.coordinator.state.jobs[job], 0, 1000).events)


def kinds(pool: Driver, job: str = "j") -> list[str]:
    return [event.kind for event in history(pool, job)]


def report_events(pool: Driver, site: str, *events: PartEvent) -> None:
    """Report a running part of site `site` with events of its workers."""
    (order,) = pool.coordinator.orders(site)
    pool.report(site, pool.done(site, order).model_copy(update={"events": events}))


def test_a_job_tells_its_way_to_the_end_with_times() -> None:
    """Submitted, planned, reserved, held, started, finished: in this order, each at the time of its event."""
    pool = started("a", "b")
    pool.now_s = 130.0
    for site in "ab":
        pool.report(site, seen("j", 1, "succeeded"))
    pool.obey()
    assert kinds(pool) == ["submitted", "planned", "waiting", "reserving", "held", "started", "stopping", "finished"]
    found = history(pool)
    assert [event.number for event in found] == sorted(event.number for event in found)
    assert [event.time_s for event in found] == [100.0] * 6 + [130.0] * 2
    assert "on a, b" in found[3].text


def test_the_first_cause_of_a_failure_is_told_once() -> None:
    """1. Site a lost its peer. 2. Site b, with the cause, reports later: it replaces the first explanation. 3. No
    restart is left: the last entry says that and does not repeat the cause."""
    pool = started("a", "b", restarts=0)
    peer = seen("j", 1, "failed", "rank 1 is gone").model_copy(update={"fault": "peer"})
    own = seen("j", 1, "failed", "rank 1 was ended by signal 9").model_copy(update={"fault": "own"})
    pool.report("a", peer)
    pool.report("b", own)
    pool.obey()
    lost, failed = history(pool)[-2:]
    assert (lost.kind, lost.cluster) == ("lost", "b")
    assert lost.text == "b failed its part (ranks 1): rank 1 was ended by signal 9"
    assert (failed.kind, failed.text) == ("failed", "restarts used: 0 of 0")
    assert sum("signal 9" in event.text for event in history(pool)) == 1
    assert not any("is gone" in event.text for event in history(pool))


def test_losses_recoveries_and_checkpoints_inside_an_attempt_are_told_once() -> None:
    """1. A worker dies at b and is replaced. 2. Both ranks report the recovery. 3. Reports repeat all of it.

    The job's own restarts stay 0, the worker's count; times are the site's, never after the report.
    """
    pool = started("a", "b", steps=100)
    pool.now_s = 200.0
    died = PartEvent(rank=1, number=0, kind="died", time_s=150.0, detail="worker process was killed by SIGKILL")
    again = PartEvent(rank=1, number=90, kind="restarted", time_s=151.0)
    resumed = [
        PartEvent(rank=rank, number=180, kind="resumed", time_s=153.0 + rank, step=40, seconds=2.5) for rank in (0, 1)
    ]
    saved = PartEvent(rank=0, number=270, kind="saved", time_s=999.0, step=50, seconds=0.5)
    for _ in range(2):
        report_events(pool, "b", died, again, resumed[1])
        report_events(pool, "a", resumed[0], saved)
    lost, back, checkpoint = history(pool)[-3:]
    assert (lost.kind, lost.cluster, lost.rank, lost.time_s) == ("worker-lost", "b", 1, 150.0)
    assert (back.kind, back.step, back.seconds) == ("resumed", 40, 2.5)
    assert (checkpoint.kind, checkpoint.step, checkpoint.time_s) == ("checkpoint", 50, 200.0)
    view = pool.coordinator.job_view("j")
    assert (view.restarts, view.worker_restarts) == (0, 1)


def test_a_site_tells_of_its_own_ranks_only() -> None:
    """An event that a site claims for another site's rank is dropped."""
    pool = started("a", "b")
    before = kinds(pool)
    report_events(pool, "a", PartEvent(rank=1, number=0, kind="died", time_s=1.0))
    assert kinds(pool) == before


def test_a_preempted_job_names_the_job_that_takes_its_chips() -> None:
    """The victim's history has the other job and the step of its checkpoint; it uses no restart."""
    pool = busy()
    pool.preempt("high")
    for site in ("a", "c", "a", "b"):
        obey_in_turn(pool, site)
    (event,) = [one for one in history(pool, "low") if one.kind == "preempted"]
    assert event.job == "high"
    assert event.text.endswith("checkpoint at step 7")
    assert "preempting" in kinds(pool, "high")


def test_the_history_is_rebuilt_from_the_log() -> None:
    """It is derived from events alone: a replay gives the same."""
    pool = started("a", "b")
    pool.report("b", seen("j", 1, "failed", "rank 1 was ended by signal 9"))
    pool.obey()
    again = Coordinator.replay(pool.log, RULES)
    assert again.state.jobs["j"].history == pool.coordinator.state.jobs["j"].history


def test_the_history_is_bounded_and_read_in_pages() -> None:
    """Repeated waits and checkpoints take one entry; the oldest entries are dropped and counted."""
    told = JobHistory()
    for step in range(1000):
        told.add("checkpoint", float(step), 1, step=step)
    assert [one.step for one in told.entries] == [999]
    for attempt in range(2 * MAX_ENTRIES):
        told.add("lost", 0.0, attempt)
    pool = started("a")
    job = pool.coordinator.state.jobs["j"]
    job.history = told
    first = history_page(job, 0, 10)
    assert (len(first.events), first.dropped) == (10, MAX_ENTRIES + 1)
    rest = history_page(job, first.next, 1000)
    assert len(rest.events) == MAX_ENTRIES - 10
    assert history_page(job, rest.next, 1000).events == ()
