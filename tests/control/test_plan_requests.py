"""Which chips a job is planned on: the free ones where it may use some, else the whole pool at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import PoolSet
from isthmus.core.job import PlacementConstraints
from tests.control.driver import RULES, Driver
from tests.control.samples import cluster, plan

MEMORY = "too little memory: the model needs about 80 GB on 4 chips, which have 64 GB"


def busy(*, needs_free_chips: bool = True) -> Driver:
    """Return a pool of which a job holds all chips of site `a`; site `b` is free."""
    pool = Driver("a", "b", chips=1)
    pool.tell(PoolSet(now_s=1, planner_turns=True, needs_free_chips=needs_free_chips))
    pool.submit("first", plan("a"))
    pool.obey()
    assert pool.state("first") == "starting"
    return pool


ONLY_A = (
    PlacementConstraints(clusters=("a",)),
    PlacementConstraints(owners=("owner-a",)),
    PlacementConstraints(owners=("owner-a",), chips=("H20",)),
)


@pytest.mark.parametrize("placement", ONLY_A)
def test_a_job_that_may_use_no_free_chip_is_planned_on_the_whole_pool_at_once(placement: PlacementConstraints) -> None:
    """Its one answer gives it a plan to wait with; a request on the free chips could only be refused."""
    pool = busy()
    pool.submit("next", placement=placement)
    assert pool.asked["next"].free_chips == {"a": {"g": 1}, "b": {"g": 1}}
    pool.answer("next", plan("a"))
    assert (pool.state("next"), "next" in pool.asked) == ("waiting", False)
    assert pool.coordinator.state.jobs["next"].plan is not None


@pytest.mark.parametrize(
    "placement", [PlacementConstraints(), PlacementConstraints(clusters=("b",)), PlacementConstraints(chips=("H20",))]
)
def test_a_job_that_may_use_a_free_chip_is_planned_on_the_free_ones(placement: PlacementConstraints) -> None:
    """Whether they suffice is for the planner to say."""
    pool = busy()
    pool.submit("next", placement=placement)
    assert pool.asked["next"].free_chips["a"] == {"g": 0}


@pytest.mark.parametrize("placement", [PlacementConstraints(chips=("H100",)), PlacementConstraints(regions=("north",))])
def test_free_chips_of_another_kind_or_region_count_as_none(placement: PlacementConstraints) -> None:
    pool = busy()
    pool.submit("next", placement=placement)
    assert pool.asked["next"].free_chips["a"] == {"g": 1}
    pool.answer("next", why=MEMORY)
    assert pool.reason("next").endswith(MEMORY)


def test_a_request_says_whose_job_it_is() -> None:
    """The planner takes turns among users."""
    pool = Driver("a")
    pool.submit("j", user="ann")
    assert (pool.asked["j"].user, pool.asked["j"].submission.job.name) == ("ann", "j")


@pytest.mark.parametrize(("turns", "window", "num_planned"), [(True, 1, 4), (True, 2, 8), (False, 1, 1)])
def test_jobs_behind_the_head_are_planned_until_few_windows_of_them_wait(
    turns: bool, window: int, num_planned: int
) -> None:
    """Four windows of planned jobs; under a log of before users took turns, the head alone."""
    pool = Driver()
    pool.coordinator = Coordinator(replace(RULES, queue_window=window))
    pool.tell(PoolSet(now_s=1, planner_turns=turns))
    pool.clusters = {"a": cluster("a", 1)}
    pool.report("a")
    pool.submit("running", plan("a"))
    for number in range(10):
        pool.submit(f"j{number}")
    planned = list[str]()
    while pool.asked:
        planned += pool.asked
        pool.answer(planned[-1], plan("a"))
    assert planned == [f"j{number}" for number in range(num_planned)]


def test_a_job_starts_when_the_chips_that_it_was_not_planned_on_become_free() -> None:
    """1. It waits with a plan of the whole pool. 2. The job before it ends. 3. It gets its chips."""
    pool = busy()
    pool.submit("next", placement=ONLY_A[0])
    pool.answer("next", plan("a"))
    pool.cancel("first")
    pool.obey()
    if "next" in pool.asked:
        pool.answer("next", plan("a"))
    pool.obey()
    assert pool.state("next") in ("preparing", "starting")


def test_an_empty_pool_is_asked_once() -> None:
    """All its chips are free, and there are none: the job parks until a site arrives."""
    pool = Driver()
    pool.tell(PoolSet(now_s=1, planner_turns=True, needs_free_chips=True))
    pool.submit("next")
    pool.answer("next", why="no cluster is free")
    assert (pool.state("next"), "next" in pool.asked) == ("waiting", False)


def test_a_user_who_waits_for_plans_gets_the_reasons_of_the_free_chips() -> None:
    """A job with `policy: manual` is planned on the free chips as well: its shortages are shown."""
    pool = busy()
    pool.submit("next", policy="manual", placement=ONLY_A[0])
    assert pool.asked["next"].free_chips["a"] == {"g": 0}


def test_a_log_of_an_earlier_version_is_replayed_as_it_was() -> None:
    """Its `PoolSet` lacks the rule: the first answer is that for the free chips, the second for the whole pool."""
    pool = busy(needs_free_chips=False)
    pool.submit("next", placement=ONLY_A[0])
    assert pool.asked["next"].free_chips["a"] == {"g": 0}
    pool.answer("next", why="a has no free chip")
    assert pool.asked["next"].free_chips["a"] == {"g": 1}
    pool.answer("next", plan("a"))
    replayed = Coordinator.replay(pool.log, RULES)
    assert replayed.state == pool.coordinator.state
