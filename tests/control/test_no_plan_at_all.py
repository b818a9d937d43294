"""The reason of a job that no plan of the whole pool could hold, also while the pool is busy."""

from __future__ import annotations

from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.state.job_records import NO_PLAN_AT_ALL
from isthmus.core.plan import SEARCH_ENDED_EARLY
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
