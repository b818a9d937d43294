"""The rules by which a job goes its way: each test's first line is the rule."""

from __future__ import annotations

import itertools

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.coordinator.job_lifecycle import JOB_TRANSITIONS, move_job
from isthmus.control.coordinator.part_observations import PART_TRANSITIONS, apply_observation
from isthmus.control.state.events import AgentLost, JobChanged, MakePlans, Restarted
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import PartRecord
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import ObservedPart
from tests.control.driver import RULES, Driver, seen, started
from tests.control.samples import plan, submission

# The way of one job ---------------------------------------------------------------------------------


def test_a_job_goes_the_whole_way() -> None:
    """Planned, held everywhere, committed, checked in, trained, released: then it has succeeded."""
    pool = Driver("a", "b", "c")
    pool.submit("j")
    assert pool.state("j") == "planning"
    assert pool.asked["j"].free_chips == {name: {"g": 4} for name in "abc"}
    pool.answer("j", plan("a", "b", "b"))
    assert pool.state("j") == "preparing"
    assert [pool.orders(site) for site in "abc"] == [{("j", 1): "prepared"}, {("j", 1): "prepared"}, {}]
    pool.obey("a")
    assert (pool.state("j"), pool.orders("a")) == ("preparing", {("j", 1): "prepared"})
    pool.obey("b")
    assert (pool.state("j"), pool.orders("a")) == ("starting", {("j", 1): "running"})
    pool.obey("a")
    assert pool.coordinator.orders("a")[0].rank_map is None
    pool.obey("b")
    assert pool.state("j") == "running"
    ranks = pool.coordinator.orders("a")[0].rank_map
    assert ranks is not None
    assert [(worker.rank, worker.cluster) for worker in ranks.workers] == [(0, "a"), (1, "b"), (2, "b")]
    pool.report("a", seen("j", 1, "succeeded"))
    assert pool.state("j") == "running"
    pool.report("b", seen("j", 1, "succeeded"))
    assert pool.state("j") == "stopping"
    pool.obey()
    assert pool.state("j") == "succeeded"
    assert [pool.orders(site) for site in "abc"] == [{}, {}, {}]
    assert {c.cluster.name: c.free_chips for c in pool.coordinator.pool_view().clusters} == {n: {"g": 4} for n in "abc"}


def test_what_a_rank_waits_for_is_in_the_view_of_its_job() -> None:
    """A wait of a running part is shown with its beginning until the site reports its end."""
    pool = started("a", "b")
    waits = pool.done("a", pool.coordinator.orders("a")[0])
    pool.report("a", waits.model_copy(update={"waiting": "rank 0 waits for rank 1", "waiting_since_s": 90.0}))
    (first, other) = pool.coordinator.job_view("j").parts
    assert (first.waiting, first.waiting_since_s, other.waiting) == ("rank 0 waits for rank 1", 90.0, "")
    pool.report("a", waits)
    assert pool.coordinator.job_view("j").parts[0].waiting == ""


def test_an_order_carries_what_a_site_needs_and_a_release_nothing() -> None:
    """Who prepares or runs gets job, plan and lease; who releases needs only the part's name."""
    pool = started("a", "b")
    order = pool.coordinator.orders("a")[0]
    assert order.spec is not None
    assert order.plan == plan("a", "b")
    assert order.lease_s == RULES.lease_s
    pool.cancel("j")
    order = pool.coordinator.orders("a")[0]
    assert (order.desired, order.spec, order.plan, order.rank_map) == ("released", None, None, None)


def test_a_manual_job_waits_for_its_user() -> None:
    """`policy: manual` holds no chip until the user has chosen; `auto_plan` takes the fastest plan that fits."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", name="one"), plan("b", name="two"), policy="manual")
    assert pool.state("j") == "choosing"
    assert pool.orders("a") == pool.orders("b") == {}
    pool.choose("j", "two")
    assert (pool.state("j"), pool.orders("b")) == ("preparing", {("j", 1): "prepared"})


def test_an_auto_job_takes_the_fastest_plan_that_still_fits() -> None:
    """Where the fastest plan went stale while it was being made, the next one is taken."""
    pool = Driver("a", "b")
    pool.submit("j")
    pool.report("a", free=0)
    pool.answer("j", plan("a", name="one"), plan("b", name="two"))
    assert pool.coordinator.job_view("j").plan == plan("b", name="two")


def test_watchers_hear_of_every_change() -> None:
    """Each step of a job yields `JobChanged`; a report without news yields nothing and is not admitted."""
    pool = Driver("a")
    pool.submit("j", plan("a"))
    assert pool.report("a", seen("j", 1, "prepared")) == [JobChanged(job_id="j")]
    assert pool.report("a", seen("j", 1, "prepared")) == []


# All or none ----------------------------------------------------------------------------------------


def test_one_refusal_releases_all() -> None:
    """A site that cannot hold its part makes all let go; the job waits, says who and why, and tries again."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, "prepared"))
    pool.report("b", seen("j", 1, "refused", "no space on /data"))
    assert pool.state("j") == "stopping"
    pool.obey()
    assert pool.state("j") == "waiting"
    assert pool.reason("j") == "b refused its part (ranks 1): no space on /data"
    pool.wait(1)
    assert pool.state("j") == "waiting"
    pool.wait(1)
    assert (pool.state("j"), pool.orders("a")) == ("preparing", {("j", 2): "prepared"})


def test_refusals_in_a_row_are_tried_less_and_less_often() -> None:
    """The back-off doubles with each refusal up to its bound."""
    pool = Driver("a")
    pool.submit("j", plan("a"))
    waits = []
    for attempt in range(1, 6):
        pool.report("a", seen("j", attempt, "refused"))
        pool.obey()
        waits.append(0)
        while pool.state("j") == "waiting":
            pool.wait(1)
            waits[-1] += 1
    assert waits == [2, 4, 8, 8, 8]


def test_the_reservation_time_out_releases_all() -> None:
    """No chip is held at one site for longer than the time-out while another does not answer."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, "prepared"))
    pool.wait(9)
    assert pool.state("j") == "preparing"
    pool.wait(1)
    assert (pool.state("j"), pool.orders("a")) == ("stopping", {("j", 1): "released"})
    assert pool.reason("j") == "b did not prepare within 10 s"


def test_a_site_that_went_away_while_preparing_is_not_waited_for() -> None:
    """A part never told to run has no process: the job goes on elsewhere, its chips stay promised."""
    pool = Driver("a", "b", "c")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, "prepared"))
    pool.tell(AgentLost(now_s=pool.now_s, cluster="b"))
    pool.wait(10)
    pool.obey("a")
    assert pool.state("j") == "waiting"
    pool.wait(2)
    pool.answer("j", plan("a", "c"))
    pool.obey("a", "c")
    assert pool.state("j") == "starting"
    assert pool.orders("b") == {("j", 1): "released"}
    pool.report("b")
    assert pool.coordinator.state.free_chips()["b"] == {"g": 3}
    pool.obey("b")
    assert pool.coordinator.state.free_chips()["b"] == {"g": 4}


def test_a_lease_that_ran_out_counts_as_refused_before_the_commit() -> None:
    """A site that let go by itself while others prepared makes all let go."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, "prepared"))
    pool.report("a", seen("j", 1, "released", "the lease ran out"))
    assert pool.state("j") == "stopping"
    assert pool.reason("j") == "a released its part (ranks 0): the lease ran out"


# Chips ----------------------------------------------------------------------------------------------


def test_chips_are_promised_once() -> None:
    """Chips promised to one job are promised to no other, whether or not their site knows the job yet."""
    pool = Driver("a", chips=4)
    pool.submit("one", plan("a", "a", "a"))
    pool.submit("two")
    assert pool.asked["two"].free_chips == {"a": {"g": 1}}
    pool.answer("two", plan("a", "a"))
    assert pool.state("two") == "waiting"
    assert pool.orders("a") == {("one", 1): "prepared", ("two", 1): "queued"}


def test_the_owners_own_work_counts() -> None:
    """Free is what the site says is free, less promises it did not know of when it said so."""
    pool = Driver("a", chips=4)
    pool.report("a", free=3)
    pool.submit("one", plan("a"))
    assert pool.coordinator.state.free_chips() == {"a": {"g": 2}}
    pool.report("a", seen("one", 1, "prepared"), free=2)
    assert pool.coordinator.state.free_chips() == {"a": {"g": 2}}


def test_a_job_that_nothing_free_fits_is_planned_on_the_whole_pool_and_queues_for_it() -> None:
    """The second request names all chips; then the job waits in its sites' queues, in its turn."""
    pool = Driver("a", chips=2)
    pool.submit("first", plan("a", "a"))
    for job in ("second", "third"):
        pool.submit(job)
        assert pool.asked[job].free_chips == {"a": {"g": 0}}
        pool.answer(job)
        assert pool.asked[job].free_chips == {"a": {"g": 2}}
        pool.answer(job, plan("a", "a", name="whole"))
        assert pool.reason(job) == "plan whole does not fit now: a has 0 g free of the 2 needed"
    assert pool.coordinator.site_queue("a") == ("second", "third")
    assert [job.place for job in pool.coordinator.list_waiting()] == [1, 2]
    pool.cancel("first")
    pool.obey()
    assert (pool.state("second"), pool.state("third")) == ("preparing", "waiting")
    assert pool.orders("a") == {("second", 1): "prepared", ("third", 1): "queued"}


def test_what_the_first_in_the_queue_waits_for_is_kept_for_it() -> None:
    """No later job has the chips that the first waits for; chips that it does not need are free for any job."""
    pool = Driver("a", "b", chips=4)
    pool.submit("now", plan("a", "a", "a"))
    pool.submit("large")
    pool.answer("large")
    pool.answer("large", plan("a", "a", "a", "a"))
    pool.submit("small")
    assert pool.asked["small"].free_chips == {"a": {"g": 0}, "b": {"g": 4}}
    pool.answer("small", plan("a", name="late"), plan("b", name="fits"))
    assert pool.coordinator.job_view("small").plan == plan("b", name="fits")
    pool.cancel("now")
    pool.obey()
    assert pool.state("large") == "preparing"


def test_a_job_that_waits_looks_elsewhere_when_something_comes_free() -> None:
    """It is planned again on what is free and keeps its plan until another one fits."""
    pool = Driver("a", "b", chips=2)
    for name, site in (("one", "a"), ("two", "b")):
        pool.submit(name, plan(site, site))
    pool.obey()
    pool.submit("j")
    pool.answer("j")
    pool.answer("j", plan("a", "a", name="there"))
    pool.cancel("two")
    pool.obey()
    assert (pool.state("j"), pool.asked["j"].free_chips) == ("waiting", {"a": {"g": 0}, "b": {"g": 2}})
    assert pool.coordinator.site_queue("a") == ("j",)
    pool.answer("j", plan("b", "b", name="here"))
    assert (pool.state("j"), pool.coordinator.site_queue("a")) == ("preparing", ())
    assert pool.orders("b") == {("j", 2): "prepared"}
    assert pool.orders("a")["j", 1] == "released"


def test_a_job_that_fits_nowhere_is_planned_again_only_when_more_is_free() -> None:
    """A planner that found nothing is not asked again until some node group has more free than then."""
    pool = Driver("a")
    pool.submit("j")
    pool.answer("j")
    pool.report("a", free=1)
    pool.report("a", free=4)
    assert pool.asked == {}
    pool.report("a", chips=8)
    assert pool.asked["j"].free_chips == {"a": {"g": 8}}


def test_a_chosen_plan_that_no_longer_fits_blocks_its_job() -> None:
    """It keeps its plan, says which site lacks what, and starts when it fits."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "a", name="one"), plan("b", name="two"), policy="manual")
    pool.report("a", free=1)
    pool.choose("j", "one")
    assert pool.state("j") == "blocked"
    assert pool.reason("j") == "plan one does not fit now: a has 1 g free of the 2 needed"
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    assert pool.reason("j") == "plan one does not fit now: a is not connected"
    pool.report("a", free=2)
    assert pool.state("j") == "preparing"


def test_a_waiting_job_may_be_given_another_plan() -> None:
    """While its plan does not fit, the user may choose another."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", name="one"), plan("b", name="two"), policy="manual")
    pool.report("a", free=0)
    pool.choose("j", "one")
    pool.choose("j", "two")
    assert (pool.state("j"), pool.orders("b")) == ("preparing", {("j", 2): "prepared"})


def test_a_cluster_that_shrinks_takes_the_latest_promise_back() -> None:
    """Where the inventory no longer holds what was promised, the job submitted last makes way."""
    pool = Driver("a", chips=4)
    pool.submit("one", plan("a", "a"))
    pool.now_s += 1
    pool.submit("two", plan("a", "a"))
    pool.obey()
    pool.obey()
    running = [pool.done("a", order) for order in pool.coordinator.orders("a")]
    pool.report("a", *running, chips=3, free=0)
    assert (pool.state("one"), pool.state("two")) == ("running", "stopping")
    assert "a now has 3 g in total" in pool.reason("two")


# Time, restart, tables ------------------------------------------------------------------------------


def test_silence_longer_than_the_rules_allow_loses_an_agent() -> None:
    """`due` names the agents without a report; a report, or a restart of the server, restarts the time."""
    pool = Driver("a")
    assert pool.coordinator.due_events(pool.now_s + 3) == ()
    assert pool.coordinator.due_events(pool.now_s + 4) == (AgentLost(now_s=pool.now_s + 4, cluster="a"),)
    again = Coordinator.replay(pool.log, RULES)
    again.handle(Restarted(now_s=pool.now_s + 500))
    assert again.due_events(pool.now_s + 503) == ()


def test_the_planner_is_asked_again_after_a_restart() -> None:
    """A request whose answer died with the old server is made again, word for word."""
    pool = Driver("a")
    pool.submit("j")
    first = pool.asked["j"]
    pool.report("a", free=1)
    again = Coordinator.replay(pool.log, RULES)
    assert [x for x in again.handle(Restarted(now_s=1)) if isinstance(x, MakePlans)] == [first]


def test_a_table_lacks_every_other_step() -> None:
    """A step that the table does not have raises, with the story; nothing has changed then."""
    state = PoolState(config=RULES)
    states = sorted({a for a, _ in JOB_TRANSITIONS} | {b for _, b in JOB_TRANSITIONS})
    for before, after in itertools.product(states, states):
        if (before, after) in JOB_TRANSITIONS:
            continue
        job = JobRecord.create("j", 1, "u", submission(), 0.0)
        job.state = before
        job.history.add("submitted", 1.0, 0, "by u")
        with pytest.raises(IllegalTransitionError, match=f"no step from {before} to {after}; .*submitted .* by u"):
            move_job(state, job, after, 2.0)
        assert (job.state, job.changed_s, job.history.num_added) == (before, 0, 1)


def test_no_report_can_ask_a_part_for_a_step_it_does_not_have() -> None:
    """Whatever an agent reports of a part in whatever state: a step of the table, or nothing."""
    lives = sorted({a for a, _ in PART_TRANSITIONS} | {b for _, b in PART_TRANSITIONS})
    for before, after in itertools.product(lives, lives):
        if after == "ordered":
            continue
        pool = Driver("a")
        part = PartRecord(job="j", attempt=1, cluster="a", ranks=(0,), chips={"g": 1}, state=before)
        pool.coordinator.state.clusters["a"].parts["j", 1] = part
        changed = apply_observation(pool.coordinator.state, part, ObservedPart(job="j", attempt=1, state=after))
        assert changed == ((before, after) in PART_TRANSITIONS)
