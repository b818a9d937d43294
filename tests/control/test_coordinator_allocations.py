"""The rules of allocations and of the queue: each test's first line is the rule."""

from __future__ import annotations

import copy
import random
from dataclasses import fields

import pytest

from isthmus.control.queries.dry_run import dry_run_requests
from isthmus.control.queries.shortages import describe_shortages, refusals
from isthmus.control.state import allocations
from isthmus.control.state.events import AgentLost, AgentReported, JobDeleted, PoolSet
from isthmus.core.job import PlacementConstraints
from isthmus.core.messages.agent_messages import AgentReport, QueueEntry
from isthmus.core.plan import Plan, Prediction
from isthmus.core.pool import Link
from isthmus.core.pool_resource import PoolResource
from tests.control.driver import Driver, seen
from tests.control.samples import plan, submission

TB = 10**12


def predicted(candidate: Plan, *, gbps: float = 0.0, num_bytes: int = 0, iteration_s: float = 1.0) -> Plan:
    """Give a plan a bandwidth at each hop and storage at each stage."""
    told = Prediction(
        iteration_s=iteration_s,
        tgs_tokens_per_card_s=1,
        samples_per_s=1,
        peak_memory_bytes=(),
        wan_gbps=(gbps,) * len(candidate.hops()),
        storage_bytes=(num_bytes,) * len(candidate.stages),
    )
    return candidate.model_copy(update={"predicted": told})


def linked(gbps: float, *names: str) -> Driver:
    """Sites joined both ways by links of `gbps`."""
    pool = Driver(*names)
    links = tuple(
        Link.model_validate({"from": one, "to": other, "bandwidth_gbps": gbps, "delay_ms": 1})
        for one in names
        for other in names
        if one != other
    )
    pool.tell(PoolSet(now_s=1, links=links))
    return pool


def test_bandwidth_is_promised_with_the_chips_and_given_back_with_them() -> None:
    """Both ways at each hop; what is left goes to the planner; the next job says which link lacks what."""
    pool = linked(1.0, "a", "b")
    pool.submit("one", predicted(plan("a", "b"), gbps=0.7))
    pool.submit("two")
    assert pool.asked["two"].free_gbps == {"a>b": pytest.approx(0.3), "b>a": pytest.approx(0.3)}
    pool.answer("two", predicted(plan("a", "b"), gbps=0.7))
    assert pool.state("two") == "waiting"
    assert "the link a>b has 0.3 Gbit/s left of the 0.7 needed" in pool.reason("two")
    assert pool.coordinator.job_view("two").offer == ()
    pool.cancel("one")
    pool.obey()
    assert pool.state("two") == "preparing"


def test_a_job_without_network_co_scheduling_takes_links_as_they_come() -> None:
    """It is promised no bandwidth, and it waits for none."""
    pool = linked(1.0, "a", "b")
    pool.submit("one", predicted(plan("a", "b"), gbps=0.9))
    pool.submit("two", predicted(plan("a", "b"), gbps=0.9), placement=PlacementConstraints(network=False))
    assert pool.state("two") == "preparing"


def test_storage_is_promised_with_the_chips() -> None:
    """What a cluster has, less what is promised there and what its site says is used."""
    pool = Driver("a")
    pool.submit("one", predicted(plan("a"), num_bytes=6 * TB))
    pool.submit("two")
    assert pool.asked["two"].free_storage_bytes == {"a": 4 * TB}
    pool.answer("two", predicted(plan("a"), num_bytes=5 * TB))
    assert "of storage left of the 4.5 TiB needed" in pool.reason("two")
    pool.cancel("one")
    pool.obey()
    assert pool.state("two") == "preparing"
    report = AgentReport(cluster=pool.clusters["a"], incarnation="1", free_chips={"g": 4}, free_storage_bytes=7 * TB)
    pool.tell(AgentReported.from_report(report, pool.now_s))
    (view,) = pool.coordinator.pool_view().clusters
    assert view.free_storage_bytes == 2 * TB


def test_reasons_and_refusals_state_the_same_shortages() -> None:
    """One for each resource of which too little is free, and one for each cluster that is away; none if all is free."""
    pool = linked(1.0, "a", "b")
    state = pool.coordinator.state
    needs = {
        PoolResource.chips("a", "g"): 4,
        PoolResource.chips("b", "g"): 5,
        PoolResource.chips("z", "g"): 1,
        PoolResource.chips("z", "h"): 1,
        PoolResource.storage("a"): 16 * TB,
        PoolResource.storage("z"): 1,
        PoolResource.link("a", "b"): 2_000_000,
        PoolResource.link("a", "z"): 500_000,
    }
    assert describe_shortages(state, needs).split("; ") == [
        "b has 4 g free of the 5 needed",
        "z has not joined",
        "a has 9.1 TiB of storage left of the 14.6 TiB needed",
        "the link a>b has 1 Gbit/s left of the 2 needed",
        "the link a>z has 0 Gbit/s left of the 0.5 needed",
    ]
    found = refusals(state, needs)
    assert [one.reason for one in found] == [
        "compute: b (owner-b) has 4 g free of the 5 needed",
        "compute: z has not joined",
        "storage: a (owner-a) has 9.1 TiB left of the 14.6 TiB needed",
        "network: a to b has 1 Gbit/s left of the 2 needed",
        "network: a to z has 0 Gbit/s left of the 0.5 needed",
    ]
    assert [one.clusters for one in found] == [("b",), ("z",), ("a",), ("a", "b"), ("a", "z")]
    assert [one.owner for one in found] == ["owner-b", None, "owner-a", "owner-a", "owner-a"]
    lacking = [(one.lacking_nodes, one.lacking_bytes, one.lacking_gbps) for one in found]
    assert lacking == [(1, 0, 0.0), (0, 0, 0.0), (0, 6 * TB, 0.0), (0, 0, 1.0), (0, 0, 0.5)]
    free = {PoolResource.chips("a", "g"): 4, PoolResource.link("b", "a"): 1_000_000}
    assert (describe_shortages(state, free), refusals(state, free)) == ("", ())


def test_a_lost_site_is_one_refusal_of_its_owner_and_its_links_are_counted_as_before() -> None:
    """What it would have free does not matter; the rate of a link is the operator's word."""
    pool = linked(1.0, "a", "b")
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    needs = {
        PoolResource.chips("a", "g"): 1,
        PoolResource.storage("a"): 16 * TB,
        PoolResource.link("a", "b"): 2_000_000,
    }
    found = refusals(pool.coordinator.state, needs)
    assert [(one.reason, one.owner) for one in found] == [
        ("compute: a is not connected", "owner-a"),
        ("network: a to b has 1 Gbit/s left of the 2 needed", "owner-a"),
    ]


def test_the_question_whether_a_plan_fits_changes_nothing() -> None:
    """Free, reserved for others, taken: three answers, and the job is as it was, its cached values included."""
    pool = Driver("a", "b", chips=1)
    pool.submit("one", plan("a"))
    pool.submit("two", plan("a", "b"))
    state = pool.coordinator.state
    job = state.jobs["two"]
    assert pool.state("two") == "waiting"
    before = {one.name: copy.deepcopy(getattr(job, one.name)) for one in fields(job)}
    assert allocations.plan_fits(state, job, plan("b"), {})
    assert not allocations.plan_fits(state, job, plan("b"), {PoolResource.chips("b", "g"): 1})
    assert not allocations.plan_fits(state, job, plan("a"), {})
    assert {name: getattr(job, name) for name in before} == before


@pytest.mark.parametrize(
    ("objective", "started"),
    [("utilisation", ["job3"]), ("throughput", ["job2", "job4"]), ("arrival", ["job2"])],
)
def test_what_starts_is_what_the_objective_says(objective: str, started: list[str]) -> None:
    """The report's worked case (4.3.1), 6 chips free at each queue: the objective says who has them.

    By arrival nothing is kept for the first, since its owner's own work has the other two that it needs.
    """
    pool = Driver("q1", "q2", "q3", chips=8)
    pool.tell(PoolSet(now_s=1, objective=objective))
    for site in ("q1", "q2", "q3"):
        pool.report(site, free=0)
    needs = {
        "job1": ("q1",) * 8,
        "job2": ("q1",) * 5 + ("q2",) * 5,
        "job3": ("q1",) * 6 + ("q2",) * 6 + ("q3",) * 6,
        "job4": ("q3",) * 4,
    }
    for number, (job, sites) in enumerate(needs.items()):
        pool.now_s += number
        pool.submit(job, policy="manual")
        pool.answer(job)
        pool.answer(job, plan(*sites))
        pool.choose(job, "p")
    events = [
        AgentReported(now_s=pool.now_s, cluster=pool.clusters[q], incarnation="1", free_chips={"g": 6}, parts=())
        for q in ("q1", "q2", "q3")
    ]
    state = pool.coordinator.state
    for record in (state.clusters["q1"], state.clusters["q2"]):
        record.free_chips, record.cached_free = {"g": 6}, None  # all three queues are free at one stroke
    pool.tell(events[2])
    assert [job for job in needs if pool.state(job) == "preparing"] == started


def test_a_queue_that_has_drifted_is_seen_and_told_again() -> None:
    """A site that reports the pool's jobs in another order is counted; the order sent to it stays."""
    pool = Driver("a")
    pool.report("a", free=0)
    for number, job in enumerate("xyz"):
        pool.now_s += number
        pool.submit(job)
        pool.answer(job)
        pool.answer(job, plan("a"))
    wanted = [QueueEntry(job=job, attempt=1) for job in "xyz"]
    parts = [seen(job, 1, "queued") for job in "xyz"]
    pool.report("a", *parts, free=0, queue=tuple(wanted))
    assert pool.coordinator.pool_view().clusters[0].misplaced == 0
    drifted = (wanted[2], QueueEntry(job="own"), wanted[0], wanted[1])
    pool.report("a", *parts, free=0, queue=drifted)
    assert pool.coordinator.pool_view().clusters[0].misplaced == 3
    assert pool.coordinator.site_queue("a") == ("x", "y", "z")


def test_a_higher_priority_goes_first_and_nobody_waits_for_ever() -> None:
    """`high` starts before what came earlier; after its patience the oldest is not overtaken by its like."""
    pool = Driver("a", chips=4)
    pool.tell(PoolSet(now_s=1, objective="throughput", patience_s=50))
    pool.report("a", free=0)
    for job, chips, priority in (("large", 4, "middle"), ("small", 1, "middle"), ("urgent", 1, "high")):
        pool.now_s += 1
        pool.submit(job, priority=priority)
        pool.answer(job)
        pool.answer(job, plan(*("a",) * chips))
    pool.report("a", free=1)
    assert [pool.state(job) for job in ("urgent", "small", "large")] == ["preparing", "waiting", "waiting"]
    pool.cancel("urgent")
    pool.wait(60)
    pool.report("a", seen("urgent", 1, "released"), free=2)
    assert pool.state("small") == "waiting"
    assert "reserved for jobs ahead of it" in pool.reason("small")
    pool.report("a", free=4)
    assert pool.state("large") == "preparing"


def test_a_dry_run_plans_without_what_is_reserved_and_leaves_the_pool_as_it_is() -> None:
    """The planner request of a dry run lacks the chips reserved for others; the free chips stay those of a replay."""
    pool = Driver("a", chips=4)
    pool.report("a", free=3)
    state, asked = pool.coordinator.state, submission()
    state.indexes.reserved[PoolResource.chips("a", "g")] = 2
    on_free, on_idle = dry_run_requests(state, "user", asked)
    assert (on_free.free_chips, on_idle.free_chips) == ({"a": {"g": 1}}, {"a": {"g": 4}})
    assert dry_run_requests(state, "user", asked)[0].free_chips == {"a": {"g": 1}}
    assert (state.free_chips(), state.clusters["a"].free_in_group("g")) == ({"a": {"g": 3}}, 3)


def test_a_view_of_free_chips_is_read_only() -> None:
    """A query that tries to change the free chips of a cluster fails, instead of changing the pool."""
    pool = Driver("a", chips=4)
    pool.report("a", free=3)
    view = pool.coordinator.state.free_chips()["a"]
    with pytest.raises(TypeError, match="does not support item assignment"):
        view["g"] = 0  # type: ignore[index]
    pool.report("a", free=2)
    assert (view, pool.coordinator.state.free_chips()["a"]) == ({"g": 3}, {"g": 2})


def test_lists_are_given_page_by_page() -> None:
    """Jobs of a user by age and waiting jobs by place, each page from behind a job on, deletions or not."""
    pool = Driver("a")
    pool.report("a", free=0)
    names = [f"j{number}" for number in range(20)]
    for name in names:
        pool.submit(name, priority=random.Random(name).choice(("low", "middle", "high")))
    pool.cancel("j3")
    pool.tell(JobDeleted(now_s=pool.now_s, job_id="j3"))
    asked = pool.coordinator
    names.remove("j3")
    pages = [asked.list_jobs("u", limit=7)]
    while pages[-1]:
        pages.append(asked.list_jobs("u", after=pages[-1][-1].id, limit=7))
    assert [job.id for page in pages for job in page] == names
    first = asked.list_waiting(limit=10)
    rest = asked.list_waiting(after=first[-1].id, limit=100)
    assert [job.place for job in (*first, *rest)] == list(range(1, 20))
    order = [("high", "middle", "low").index(job.job.priority) for job in (*first, *rest)]
    assert order == sorted(order)
