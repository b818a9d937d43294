"""The honest queue: each test's first line is what the server says about a waiting job."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.queries.explain_wait import answer_query, query_job, query_queue
from isthmus.control.queries.forecast_inputs import ACTIVE_STATES, JobProgress
from isthmus.control.service.progress_tracker import ProgressTracker
from isthmus.control.state import allocations
from isthmus.control.state.job_records import TERMINAL_STATES
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import SEARCH_ENDED_EARLY, Plan, Prediction
from isthmus.core.views.queue_status import QueueStatus
from tests.control.driver import Driver, checked_pool
from tests.control.samples import plan


def timed(*sites: str, seconds: float, name: str = "p") -> Plan:
    """A plan whose only step takes so long."""
    memory = (1,) * len(sites)
    told = Prediction(iteration_s=seconds, tgs_tokens_per_card_s=1, samples_per_s=1, peak_memory_bytes=memory)
    return plan(*sites, name=name).model_copy(update={"predicted": told})


def stand(pool: Driver, job: str, viewer: str | None = "u", **paces: JobProgress) -> QueueStatus:
    state = pool.coordinator.state
    return answer_query(query_job(state, state.jobs[job], pool.now_s, paces, viewer))[0]


@pytest.fixture
def busy() -> Driver:
    """At `a` and `b` a job of 100 s runs on all chips; `next` wants a chip at both, `last` all at `a`."""
    pool = Driver("a", "b")
    pool.submit("long", timed(*"aaaabbbb", seconds=100.0))
    pool.obey()
    pool.obey()
    assert pool.state("long") == "running"
    pool.now_s += 1
    pool.submit("next", timed("a", "b", seconds=50.0))
    pool.now_s += 1
    pool.submit("last", timed(*"aaaa", seconds=10.0))
    return pool


def test_why_it_waits_at_which_owner(busy: Driver) -> None:
    """Which stage refused, the owner, the nodes that are lacking, and what is free of what is needed."""
    found = stand(busy, "next")
    assert [(one.stage, one.owner, one.lacking_nodes) for one in found.refused] == [
        ("compute", "owner-a", 1),
        ("compute", "owner-b", 1),
    ]
    assert found.refused[0].reason == "compute: a (owner-a) has 0 g free of the 1 needed"
    assert found.reason == "p waits for resources at a, b"
    assert found.needs == {"a": {"g": 1}, "b": {"g": 1}}


def test_its_place_who_is_ahead_and_when_it_should_start(busy: Driver) -> None:
    """It starts when those ahead have released what it needs: `next` after 100 s, `last` 50 s later."""
    first, second = stand(busy, "next"), stand(busy, "last")
    began_s = busy.coordinator.job_view("long").changed_s
    assert (first.place, first.ahead, first.start_s) == (1, (), pytest.approx(began_s + 100))
    assert (second.place, second.start_s) == (2, pytest.approx(began_s + 150))
    assert [one.job for one in second.ahead] == ["next"]
    assert second.earliest_s is not None
    assert second.latest_s is not None
    assert second.earliest_s < second.start_s < second.latest_s  # type: ignore[operator]


def test_a_measured_pace_goes_before_the_prediction(busy: Driver) -> None:
    """A run that is half as fast as predicted ends later, and all that wait for it start later."""
    slow = stand(busy, "next", long=JobProgress(steps_done=0, step_s=200.0))
    assert slow.start_s == pytest.approx(busy.now_s + 200)
    assert stand(busy, "next", long=JobProgress(steps_done=1, step_s=200.0)).start_s == busy.now_s


def test_a_run_of_unknown_length_promises_nothing() -> None:
    """No expected start behind a job whose end is unknown, and the note says so."""
    pool = Driver("a")
    pool.submit("long", plan(*"aaaa"))
    pool.obey()
    pool.obey()
    pool.submit("next", timed("a", seconds=1.0))
    found = stand(pool, "next")
    assert (found.place, found.start_s, found.latest_s) == (1, None, None)
    assert found.notes[0].startswith("no expected start")


def test_a_job_without_any_plan_is_told_what_every_stage_refused() -> None:
    """The planner's refusals stand as they are; the job has no place, since it waits for no known chips."""
    pool = Driver("a")
    pool.submit("j")
    assert stand(pool, "j").reason == "waiting for the planner"
    pool.answer("j", why="compute: a (owner-a) lacks 2 nodes")
    found = stand(pool, "j")
    assert found.reason == "no plan of the whole pool can hold this job"
    assert [one.reason for one in found.refused] == ["compute: a (owner-a) lacks 2 nodes"]
    assert found.place is None


def test_a_job_whose_user_has_to_choose_is_told_what_would_become_of_it(busy: Driver) -> None:
    """As if its first candidate were chosen now; it has no place before that."""
    busy.submit("mine", timed("a", seconds=5.0, name="one"), timed("b", seconds=9.0), policy="manual")
    found = stand(busy, "mine")
    assert found.reason == "the user must choose one of 2 plans"
    assert (found.place, found.notes[-1]) == (None, "as if plan one were chosen now")
    assert found.start_s is not None


def test_what_the_connected_pool_cannot_hold_stands_in_nobodys_way(busy: Driver) -> None:
    """A job for a site that is away has no place, and delays no forecast."""
    before = stand(busy, "last")
    busy.submit("lost", timed("nowhere", seconds=5.0))
    found = stand(busy, "lost")
    assert found.reason == "the connected pool cannot hold plan p"
    assert found.place is None
    assert stand(busy, "last") == before


def test_other_users_jobs_stand_in_the_queue_without_their_names(busy: Driver) -> None:
    """The name of another user's job ahead is hidden; that there is one, and its priority, is shown."""
    assert [one.job for one in stand(busy, "last", viewer="u").ahead] == ["next"]
    other = stand(busy, "last", viewer="somebody")
    assert [(one.job, one.priority) for one in other.ahead] == [(None, "middle")]
    state = busy.coordinator.state
    assert answer_query(query_queue(state, busy.now_s, {}, "somebody")) == ()
    assert [one.id for one in answer_query(query_queue(state, busy.now_s, {}, None))] == ["next", "last"]
    assert [one.id for one in answer_query(query_queue(state, busy.now_s, {}, "u", limit=1))] == ["next"]


def test_chips_that_are_free_may_be_reserved_for_a_job_ahead() -> None:
    """Both places say so: the queue's status and the job's own view."""
    pool = Driver("a")
    pool.submit("long", timed(*"aaa", seconds=100.0))
    pool.obey()
    pool.obey()
    pool.submit("next", timed("a", "a", seconds=10.0))
    pool.submit("last", timed("a", seconds=500.0))
    assert pool.state("last") == "waiting"
    assert stand(pool, "last").reason == "the resources are free, but reserved for jobs ahead of it"
    assert pool.reason("last") == "the chips of plan p are reserved for jobs ahead of it in the queue"
    assert stand(pool, "last").refused == ()


def test_a_job_whose_sites_have_not_checked_it_waits_for_them() -> None:
    """Those that have not answered are named, in both places."""
    pool = checked_pool("a", "b")
    pool.submit("j", timed("a", "b", seconds=1.0), root="/there/")
    words = "a, b must check the job's files and storage before it starts"
    assert (stand(pool, "j").reason, pool.reason("j")) == (words, words)
    pool.check("a", phases=1)
    assert stand(pool, "j").reason == "b must check the job's files and storage before it starts"


def test_a_job_without_a_plan_for_the_free_chips_is_told_so() -> None:
    """A search that ended early says nothing of the whole pool."""
    pool = Driver("a")
    pool.submit("j")
    pool.answer("j", why=f"{SEARCH_ENDED_EARLY}: 20 s")
    assert stand(pool, "j").reason == "no plan fits the free resources"
    assert pool.reason("j") == f"no plan fits the free resources: {SEARCH_ENDED_EARLY}: 20 s"


def test_a_running_job_has_no_place(busy: Driver) -> None:
    """It has what it needs."""
    found = stand(busy, "long")
    assert (found.state, found.place, found.needs, found.refused) == ("running", None, {}, ())


def test_the_pace_is_that_of_the_last_steps_and_late_lines_change_nothing() -> None:
    """Lines come in any order and from every rank; the furthest step counts."""

    def line(step: int, step_s: float | None) -> StepMetrics:
        return StepMetrics(job="j", attempt=1, rank=0, step=step, values={"step_s": step_s})

    seen = ProgressTracker()
    seen.record_metrics([line(0, 2.0), line(1, 2.0), line(0, 99.0), line(2, None)])
    assert seen.job_progress() == {"j": JobProgress(steps_done=3, step_s=2.0)}
    seen.record_metrics([line(3, 12.0)])
    assert seen.job_progress()["j"].step_s == pytest.approx(4.0)
    seen.forget("j")
    assert seen.job_progress() == {}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_every_job_that_does_not_run_yet_is_told_where_it_stands(seed: int) -> None:
    """Each once; places are those of the queue; no start is before now or outside its band; whatever is
    lacking is named.
    """
    chance, pool, plans = random.Random(seed), Driver("a", "b", "c"), dict[str, Plan]()
    for number in range(chance.randint(4, 14)):
        act = chance.choice(("submit", "submit", "submit", "obey", "cancel", "wait"))
        if act == "submit":
            sites = [chance.choice("abcx") for _ in range(chance.randint(1, 6))]
            plans[f"j{number}"] = timed(*sites, seconds=chance.choice((0.0, 5.0, 50.0)))
            pool.submit(f"j{number}", policy=chance.choice(("auto", "manual")))
        elif act == "obey":
            pool.obey(chance.choice("abc"))
        elif act == "cancel" and pool.coordinator.state.live_jobs:
            pool.cancel(chance.choice(sorted(pool.coordinator.state.live_jobs)))
        else:
            pool.wait(chance.uniform(0, 30))
        for job in [job for job in pool.asked if pool.state(job) not in TERMINAL_STATES and chance.random() < 0.8]:
            pool.answer(job, plans[job])
    state = pool.coordinator.state
    found = answer_query(query_queue(state, pool.now_s, {}, None))
    waiting = {one.id for one in state.live_jobs.values() if one.state not in ACTIVE_STATES}
    assert {one.id for one in found} == waiting
    assert len(found) == len(waiting)
    for one in found:
        assert one.place == pool.coordinator.job_view(one.id).place
        assert one.id not in {ahead.job for ahead in one.ahead}
        if one.start_s is not None:
            assert pool.now_s <= (one.earliest_s or 0.0) <= one.start_s
            assert one.latest_s is None or one.start_s <= one.latest_s
        lacks = not allocations.fits(state, state.jobs[one.id].needs or {}, {})
        assert bool(one.refused) == lacks or state.jobs[one.id].plan is None
        assert stand(pool, one.id, None).place == one.place
