"""The rules by which a job goes its way: each test's first line is the rule."""

from __future__ import annotations

import itertools

import pytest

from isthmus.control.coordinator import Coordinator
from isthmus.control.events import (
    AgentLost,
    ForgetJob,
    JobChanged,
    JobDeleted,
    JobSubmitted,
    MakePlans,
    PlanningFailed,
    PlansMade,
    Restarted,
)
from isthmus.control.lifecycle import JOB_STEPS, PART_STEPS, move, observe
from isthmus.control.records import JobRecord, PartRecord, State
from isthmus.core.errors import ConflictError, IllegalTransitionError, NotFoundError
from isthmus.core.messages import ObservedPart
from isthmus.core.plan import PlanSet
from tests.control.driver import RULES, Driver, seen
from tests.control.simulated import plan, submission


def started(*sites: str, restarts: int = 3) -> Driver:
    """A pool in which job `j` runs one stage at each of `sites`."""
    pool = Driver("a", "b", "c")
    pool.submit("j", plan(*sites), restarts=restarts)
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool


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
    assert {c.cluster.name: c.free_chips for c in pool.coordinator.pool().clusters} == {
        n: {"g": 4} for n in "abc"
    }


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
    """`policy: manual` holds no chip until the user has chosen; `auto` takes the fastest plan that fits."""
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
    assert pool.coordinator.job("j").plan == plan("b", name="two")


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
    assert pool.reason("j") == "b did not answer in 10 s"


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
    assert pool.coordinator.state.free()["b"] == {"g": 3}
    pool.obey("b")
    assert pool.coordinator.state.free()["b"] == {"g": 4}


def test_a_lease_that_ran_out_counts_as_refused_before_the_commit() -> None:
    """A site that let go by itself while others prepared makes all let go."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, "prepared"))
    pool.report("a", seen("j", 1, "released", "the lease ran out"))
    assert pool.state("j") == "stopping"
    assert pool.reason("j") == "a gave its part up (ranks 0): the lease ran out"


# Chips ----------------------------------------------------------------------------------------------


def test_chips_are_promised_once() -> None:
    """What one job was promised no other gets, whether or not its site has heard of it yet."""
    pool = Driver("a", chips=4)
    pool.submit("one", plan("a", "a", "a"))
    pool.submit("two")
    assert pool.asked["two"].free_chips == {"a": {"g": 1}}
    pool.answer("two", plan("a", "a"))
    assert pool.state("two") == "waiting"
    assert pool.orders("a") == {("one", 1): "prepared"}


def test_the_owners_own_work_counts() -> None:
    """Free is what the site says is free, less promises it did not know of when it said so."""
    pool = Driver("a", chips=4)
    pool.report("a", free=3)
    pool.submit("one", plan("a"))
    assert pool.coordinator.state.free() == {"a": {"g": 2}}
    pool.report("a", seen("one", 1, "prepared"), free=2)
    assert pool.coordinator.state.free() == {"a": {"g": 2}}


def test_waiting_jobs_are_tried_in_the_order_of_submission() -> None:
    """When chips come free, the job submitted first is planned first and the next sees what it left."""
    pool = Driver("a", chips=2)
    pool.submit("first", plan("a", "a"))
    for job in ("second", "third"):
        pool.submit(job)
        pool.answer(job)
        assert pool.reason(job) == "no plan fits what is free: too few chips"
    pool.cancel("first")
    pool.obey()
    assert list(pool.asked) == ["second"]
    pool.answer("second", plan("a"))
    assert pool.asked["third"].free_chips == {"a": {"g": 1}}


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


def test_a_chosen_plan_that_no_longer_fits_says_so_and_waits() -> None:
    """A manual job keeps its plan, says which site lacks what, and starts when it fits."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "a", name="one"), plan("b", name="two"), policy="manual")
    pool.report("a", free=1)
    pool.choose("j", "one")
    assert pool.state("j") == "waiting"
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
    assert (pool.state("j"), pool.orders("b")) == ("preparing", {("j", 1): "prepared"})


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
    assert "a now has 3 g in all" in pool.reason("two")


# Failure and restart --------------------------------------------------------------------------------


def test_a_failed_part_stops_all_and_the_job_starts_again() -> None:
    """One lost worker releases every part; when all are released the next attempt begins by the same plan."""
    pool = started("a", "b")
    pool.report("b", seen("j", 1, "failed", "rank 1 was ended by signal 9"))
    assert [pool.orders(site) for site in "ab"] == [{("j", 1): "released"}] * 2
    pool.obey("b")
    assert pool.state("j") == "stopping"
    pool.obey("a")
    assert (pool.state("j"), pool.orders("a")) == ("preparing", {("j", 2): "prepared"})
    job = pool.coordinator.job("j")
    assert (job.attempt, job.restarts) == (2, 1)
    assert job.reason == "restart 1 of 3: b failed its part (ranks 1): rank 1 was ended by signal 9"


def test_no_attempt_overlaps_the_one_before() -> None:
    """Until every site has confirmed the release, none is told of the next attempt: not if one is away."""
    pool = started("a", "b")
    pool.report("b", seen("j", 1, "failed"))
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.obey("b")
    pool.wait(1000)
    assert (pool.state("j"), pool.orders("b")) == ("stopping", {})
    assert pool.reason("j").endswith("; a is not connected")
    pool.obey("a")
    assert pool.state("j") == "preparing"


def test_the_restarts_are_bounded() -> None:
    """A job that fails more often than `max_restarts` has failed, with its last failure as the reason."""
    pool = started("a", restarts=1)
    for attempt in (1, 2):
        pool.report("a", seen("j", attempt, "failed", "rank 0 ended with status 1"))
        pool.obey()
        pool.obey()
        pool.obey()
    assert pool.state("j") == "failed"
    assert (
        pool.reason("j") == "a failed its part (ranks 0): rank 0 ended with status 1; restarts used: 1 of 1"
    )


def test_a_worker_that_does_not_check_in_fails_the_attempt() -> None:
    """Starting is bounded too; the reason names the ranks that are missing."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.obey()
    pool.obey("a")
    pool.wait(20)
    assert pool.state("j") == "stopping"
    assert pool.reason("j") == "restart 1 of 3: ranks 1 at b did not check in in 20 s"


def test_a_site_speaks_for_its_own_ranks_only() -> None:
    """An address that a site claims for another site's rank is not believed."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.obey()
    honest = pool.done("a", pool.coordinator.orders("a")[0])
    forged = honest.workers[0].model_copy(update={"rank": 1, "cluster": "b"})
    pool.report("a", honest.model_copy(update={"workers": (*honest.workers, forged)}))
    assert pool.state("j") == "starting"


def test_a_lost_agent_does_not_stop_a_running_job() -> None:
    """Workers do not need their agent: the job runs on, says who is away, and goes on when it is back."""
    pool = started("a", "b")
    pool.tell(AgentLost(now_s=pool.now_s, cluster="b"))
    assert (pool.state("j"), pool.reason("j")) == ("running", "b is not connected")
    pool.obey("b")
    assert (pool.state("j"), pool.reason("j")) == ("running", "")


def test_an_agent_that_comes_back_without_its_part_has_lost_it() -> None:
    """A new agent that does not know a running part: the part failed, and the job starts again."""
    pool = started("a", "b")
    pool.report("b", incarnation="2")
    assert pool.state("j") == "stopping"
    assert "b failed its part (ranks 1): the agent came back without it" in pool.reason("j")
    assert pool.orders("b") == {("j", 1): "released"}


def test_a_new_agent_that_has_its_part_changes_nothing() -> None:
    """An agent that was killed and knows its parts again goes on."""
    pool = started("a", "b")
    pool.report("b", pool.done("b", pool.coordinator.orders("b")[0]), incarnation="2")
    assert pool.state("j") == "running"


def test_silence_proves_nothing() -> None:
    """A late report from before a part existed neither fails nor releases it.

    1. the agent reports (without the part), and the report is delayed; 2. the part prepares and runs; 3. it
    is told to release; 4. the late report arrives: the part counts as alive until its agent says `released`.
    """
    pool = started("a", "b")
    pool.report("b")
    assert pool.state("j") == "running"
    pool.cancel("j")
    pool.report("a")
    pool.report("b")
    assert (pool.state("j"), pool.orders("b")) == ("stopping", {("j", 1): "released"})


def test_a_part_only_moves_forward() -> None:
    """A late report of an earlier state does not take a part back."""
    pool = started("a", "b")
    pool.report("b", seen("j", 1, "succeeded"))
    pool.report("b", seen("j", 1, "prepared"))
    pool.report("a", seen("j", 1, "succeeded"))
    assert (pool.state("j"), pool.coordinator.state.jobs["j"].ending) == ("stopping", "succeeded")


@pytest.mark.parametrize("state", ["running", "succeeded"])
def test_a_part_that_runs_untold_has_failed(state: str) -> None:
    """A site that claims to run what was never committed is not believed."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, state))
    assert pool.state("j") == "stopping"
    assert f"'{state}' of a part that was never told to run" in pool.reason("j")


def test_what_nobody_knows_is_released() -> None:
    """A part of a forgotten job or attempt is ordered released; once it is, it is forgotten."""
    pool = Driver("a")
    pool.report("a", seen("ghost", 3, "running"))
    assert pool.orders("a") == {("ghost", 3): "released"}
    pool.report("a", seen("ghost", 3, "released"))
    assert pool.orders("a") == {}


# The user's verbs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_cancel_releases_everywhere_first(rounds: int) -> None:
    """A job that holds chips is cancelled once every site has released; asking twice changes nothing."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    for _ in range(rounds):
        pool.obey()
    pool.cancel("j")
    pool.cancel("j")
    assert pool.state("j") == "stopping"
    pool.obey()
    assert (pool.state("j"), pool.reason("j")) == ("cancelled", "cancelled by the user")
    pool.cancel("j")


def test_cancel_overrides_a_restart_but_not_success() -> None:
    """A job that stops to start again can be cancelled; one that has trained to its end can not."""
    pool = started("a")
    pool.report("a", seen("j", 1, "failed"))
    pool.cancel("j")
    pool.obey()
    assert pool.state("j") == "cancelled"
    pool = started("a")
    pool.report("a", seen("j", 1, "succeeded"))
    with pytest.raises(ConflictError, match="job j has succeeded already"):
        pool.cancel("j")


def test_delete_takes_ended_jobs_only() -> None:
    """Only an ended job of which nothing is left anywhere can be deleted; its records go with it."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"), key="k")
    pool.report("a", seen("j", 1, "prepared"))
    delete = JobDeleted(now_s=pool.now_s, job_id="j")
    with pytest.raises(ConflictError, match="job j is preparing"):
        pool.tell(delete)
    pool.tell(AgentLost(now_s=pool.now_s, cluster="b"))
    pool.cancel("j")
    pool.obey("a")
    assert pool.state("j") == "cancelled"
    with pytest.raises(ConflictError, match="b has not yet confirmed"):
        pool.tell(delete)
    pool.obey("b")
    assert pool.tell(delete) == [ForgetJob(job_id="j")]
    with pytest.raises(NotFoundError, match="no job 'j'"):
        pool.state("j")
    assert pool.coordinator.job_of_key("u", "k") is None


def test_the_same_key_is_the_same_job() -> None:
    """A repeated submission changes nothing; other content is a conflict; users do not share keys."""
    pool = Driver("a")
    pool.submit("j1", key="k")
    again = JobSubmitted(now_s=1, job_id="j2", user="u", submission=submission("j1", key="k"))
    assert not pool.coordinator.admit(again)
    assert pool.coordinator.job_of_key("u", "k") == "j1"
    with pytest.raises(ConflictError, match="same key"):
        pool.coordinator.admit(again.model_copy(update={"submission": submission("other", key="k")}))
    assert pool.coordinator.admit(again.model_copy(update={"user": "v"}))
    pool.submit("j3")
    pool.submit("j4")
    assert [job.id for job in pool.coordinator.jobs("u")] == ["j1", "j3", "j4"]


def test_choosing_is_allowed_while_it_matters() -> None:
    """An unknown plan is not found; the chosen one again changes nothing; a running job's plan stands."""
    pool = Driver("a")
    pool.submit("j", plan("a", name="one"), plan("a", name="two"), policy="manual")
    with pytest.raises(NotFoundError, match="no plan 'three'"):
        pool.choose("j", "three")
    pool.choose("j", "one")
    pool.choose("j", "one")
    with pytest.raises(ConflictError, match="its plan cannot be changed now"):
        pool.choose("j", "two")


def test_a_job_the_planner_cannot_read_has_failed() -> None:
    """`PlanningFailed` ends the job with the planner's words; a late answer changes nothing."""
    pool = Driver("a")
    pool.submit("j")
    failed = PlanningFailed(now_s=1, job_id="j", round=1, reason="the model has fewer layers than stages")
    pool.tell(failed)
    assert (pool.state("j"), pool.reason("j")) == ("failed", "the model has fewer layers than stages")
    assert not pool.coordinator.admit(failed)
    assert not pool.coordinator.admit(PlansMade(now_s=1, job_id="j", round=1, plans=PlanSet(plans=())))


# Time, restart, tables ------------------------------------------------------------------------------


def test_silence_longer_than_the_rules_allow_loses_an_agent() -> None:
    """`due` names the agents that were not heard; a report, or a restart of the server, begins anew."""
    pool = Driver("a")
    assert pool.coordinator.due(pool.now_s + 3) == ()
    assert pool.coordinator.due(pool.now_s + 4) == (AgentLost(now_s=pool.now_s + 4, cluster="a"),)
    again = Coordinator.replay(pool.log, RULES)
    again.handle(Restarted(now_s=pool.now_s + 500))
    assert again.due(pool.now_s + 503) == ()


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
    state = State(rules=RULES)
    states = sorted({a for a, _ in JOB_STEPS} | {b for _, b in JOB_STEPS})
    for before, after in itertools.product(states, states):
        if (before, after) in JOB_STEPS:
            continue
        job = JobRecord(id="j", user="u", submission=submission(), submitted_s=0, changed_s=0, state=before)
        job.story.append("1.000 submitted by u")
        with pytest.raises(
            IllegalTransitionError, match=f"no step from {before} to {after}; .*submitted by u"
        ):
            move(state, job, after, 2.0)
        assert (job.state, job.changed_s, len(job.story)) == (before, 0, 1)


def test_no_report_can_ask_a_part_for_a_step_it_does_not_have() -> None:
    """Whatever an agent reports of a part in whatever state: a step of the table, or nothing."""
    lives = sorted({a for a, _ in PART_STEPS} | {b for _, b in PART_STEPS})
    for before, after in itertools.product(lives, lives):
        if after == "ordered":
            continue
        pool = Driver("a")
        part = PartRecord(job="j", attempt=1, cluster="a", ranks=(0,), chips={"g": 1}, state=before)
        pool.coordinator.state.clusters["a"].promised["j", 1] = part
        changed = observe(pool.coordinator.state, part, ObservedPart(job="j", attempt=1, state=after))
        assert changed == ((before, after) in PART_STEPS)
