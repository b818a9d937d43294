"""The reason of a job that no plan of the whole pool could hold, also while the pool is busy."""

from __future__ import annotations

from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.state.events import AgentLost, PlansMade
from isthmus.control.state.job_records import NO_PLAN_AT_ALL
from isthmus.core.plan import SEARCH_ENDED_EARLY, PlanSet, Refusal
from tests.control.driver import Driver
from tests.control.samples import plan

MEMORY = "too little memory: the model needs about 80 GB on 4 chips, which have 64 GB"


def busy() -> Driver:
    """Return a pool whose only chips are held by a job, with a second job that has no plan on what is free."""
    pool = Driver("a", chips=1)
    pool.submit("first", plan("a"))
    pool.obey()
    pool.submit("large", user="v")
    pool.answer("large", why="a has no free chip")
    return pool


def test_a_job_that_no_plan_could_hold_says_so_and_why_while_the_pool_is_busy() -> None:
    """1. A job runs on all chips. 2. No plan for another fits what is free. 3. Nor does one the whole pool."""
    pool = busy()
    pool.answer("large", why=MEMORY)
    job = pool.coordinator.state.jobs["large"]
    assert (job.state, job.reason) == ("waiting", f"{NO_PLAN_AT_ALL}: {MEMORY}")
    (status,) = answer_query(query_job(pool.coordinator.state, job, pool.now_s, {}, None))
    assert status.reason == NO_PLAN_AT_ALL


def test_a_search_that_was_ended_early_proves_nothing() -> None:
    """Its job waits for free resources, as far as is known."""
    pool = busy()
    pool.answer("large", why=f"{SEARCH_ENDED_EARLY} without a plan")
    assert pool.coordinator.state.jobs["large"].reason.startswith("no plan fits the free resources")


def test_a_job_with_a_plan_on_the_whole_pool_waits_for_its_chips() -> None:
    """It could start once they are free: its reason says nothing of the whole pool."""
    pool = busy()
    pool.answer("large", plan("a"))
    job = pool.coordinator.state.jobs["large"]
    assert job.plan is not None
    assert NO_PLAN_AT_ALL not in job.reason


def parked() -> Driver:
    """Return the pool with the second job known to have no plan on all chips; no request is open."""
    pool = busy()
    pool.answer("large", why=MEMORY)
    assert "large" not in pool.asked
    return pool


def test_a_job_without_a_plan_on_the_whole_pool_is_planned_again_when_the_pool_has_more_chips() -> None:
    """Not when chips become free, nor when a site comes back with as many as before."""
    pool = parked()
    pool.cancel("first")
    pool.obey()
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.report("a")
    assert "large" not in pool.asked
    pool.report("a", chips=2)
    assert pool.asked["large"].free_chips == {"a": {"g": 2}}


def test_each_reason_of_the_planner_is_named_once() -> None:
    """Reasons of several searches are separated, and equal ones of several sites are one."""
    pool = busy()
    job = pool.coordinator.state.jobs["large"]
    refused = tuple(Refusal(clusters=(), reason=why) for why in ("too few chips", "too little memory", "too few chips"))
    pool.tell(PlansMade(now_s=pool.now_s, job_id="large", round=job.round, plans=PlanSet(plans=(), refused=refused)))
    assert job.reason == f"{NO_PLAN_AT_ALL}: too few chips; too little memory"


def test_a_user_who_chooses_is_told_why_a_plan_would_wait() -> None:
    """The reasons of the search on free chips stay with a job whose search on all chips finds plans."""
    pool = Driver("a", chips=1)
    pool.submit("first", plan("a"))
    pool.obey()
    pool.submit("large", policy="manual", user="v")
    pool.tell(
        PlansMade(
            now_s=pool.now_s,
            job_id="large",
            round=pool.coordinator.state.jobs["large"].round,
            plans=PlanSet(plans=(), refused=tuple(Refusal(clusters=(), reason=why) for why in ("one", "two"))),
        )
    )
    pool.answer("large", plan("a"))
    assert pool.reason("large") == (
        "no plan fits the free resources: one; two; 1 plans fit the idle pool: choose one to wait for its chips"
    )
