"""The rules of joint preemption: each test's first line is the rule."""

from __future__ import annotations

import pytest

from isthmus.control.state.events import AgentLost, JobDeleted, PreemptionAgreed, VictimNamed
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import ObservedLocalJob, ObservedPart
from isthmus.core.priority import PriorityMap
from tests.control.driver import Driver, seen
from tests.control.samples import cluster, plan


def busy(**more: object) -> Driver:
    """Job `low` trains on all chips of `a` and `b`; `high` is blocked: it wants two at `a`, one at `c`."""
    pool = Driver("a", "b", "c")
    pool.submit("low", plan(*"aaaabbbb"), priority="low", **more)
    pool.obey()
    pool.obey()
    assert pool.state("low") == "running"
    pool.submit("high", policy="manual", priority="high")
    pool.answer("high")
    pool.answer("high", plan("a", "a", "c", name="wanted"))
    assert pool.state("high") == "waiting"
    pool.choose("high", "wanted")
    assert pool.state("high") == "blocked"
    return pool


def preempting() -> Driver:
    """As `busy`, its user has agreed, and all of its sites are ready."""
    pool = busy()
    pool.preempt("high")
    for site in "ac":
        obey(pool, site, protects=False)
    return pool


def obey(pool: Driver, site: str, *, protects: bool = True) -> None:
    """Let a site execute its orders; without `protects` it has no verified checkpoint yet."""
    told = [pool.done(site, order) for order in pool.coordinator.orders(site)]
    done = [one if protects else one.model_copy(update={"protection": None}) for one in told]
    pool.report(site, *done)


def test_a_blocked_job_is_offered_victims_by_name_and_what_they_would_lose() -> None:
    """The reason says which site lacks what; a victim is named at the site where its chips are wanted."""
    pool = busy()
    running = [pool.done("a", order) for order in pool.coordinator.orders("a")]
    lost = [one.model_copy(update={"unsaved_s": 30.0}) if one.job == "low" else one for one in running]
    pool.report("a", *lost, seen("gone", 1, "released"))
    job = pool.coordinator.job_view("high")
    assert job.reason == "plan wanted does not fit now: a has 0 g free of the 2 needed"
    assert [(one.cluster, one.owner, one.job, one.chips, one.unsaved_s) for one in job.offer] == [
        ("a", "owner-a", "low", {"g": 4}, 30.0)
    ]


def test_the_whole_way_of_a_joint_preemption() -> None:
    """Ready everywhere, then protected everywhere, then released everywhere, then started."""
    pool = busy()
    assert pool.preempt("high") == ("a/low",)
    assert (pool.state("high"), pool.state("low")) == ("preempting", "running")
    assert (pool.orders("a")["high", 1], pool.orders("c")["high", 1]) == ("ready", "ready")
    obey(pool, "a")
    assert not any(order.protect for order in pool.coordinator.orders("b"))
    obey(pool, "c")
    assert {order.protect for site in "ab" for order in pool.coordinator.orders(site) if order.job == "low"} == {True}
    obey(pool, "a")
    assert (pool.state("low"), pool.orders("a")["high", 1]) == ("running", "ready")
    obey(pool, "b")
    assert (pool.state("high"), pool.state("low")) == ("preparing", "stopping")
    assert pool.orders("a") == {("low", 1): "released", ("high", 1): "prepared"}
    assert pool.orders("b") == {("low", 1): "released"}
    pool.obey("a", "b", "c")
    assert (pool.state("high"), pool.state("low")) == ("starting", "waiting")
    pool.obey("a", "c")
    assert pool.state("high") == "running"
    low = pool.coordinator.job_view("low")
    assert low.restarts == 0
    assert "job high of priority 'high' preempts it, checkpoint at step 7" in low.reason


def test_the_victim_goes_on_when_there_is_room_again() -> None:
    """It keeps its place in the queue and starts again, at the same sites or elsewhere."""
    pool = preempting()
    obey(pool, "b")
    obey(pool, "a")
    for _ in range(3):
        pool.obey("a", "b", "c")
    assert pool.state("high") == "running"
    pool.report("a", *(seen("high", 1, "succeeded") for _ in "x"), *queued(pool, "a"))
    pool.report("c", seen("high", 1, "succeeded"))
    for _ in range(4):
        pool.obey()
    assert pool.state("high") == "succeeded"
    assert (pool.state("low"), pool.coordinator.job_view("low").attempt) == ("running", 2)


def preempted(*idle: str, **more: object) -> Driver:
    """Job `low` trained on half of `a` and `b`, and was preempted for `high` at both; it waits.

    `idle` were idle all the time. Each site has storage of its own.
    """
    pool = Driver("a", "b", *idle, chips=2)
    pool.storage_bytes = dict.fromkeys(pool.clusters, 10**15)
    for site in pool.clusters:
        pool.report(site)
    pool.submit("low", plan("a", "b"), priority="low", **more)
    if more:
        pool.choose("low", "p")
    for _ in range(2):
        pool.obey()
    assert pool.state("low") == "running"
    pool.submit("high", policy="manual", priority="high")
    pool.answer("high", plan(*"aabb", name="wanted"))
    pool.choose("high", "wanted")
    pool.preempt("high")
    for _ in range(5):
        pool.obey("a", "b")
    assert pool.state("high") == "running"
    return pool


def test_a_preempted_job_is_planned_again_and_goes_on_at_other_sites() -> None:
    """As when it was submitted, on what is free then; what other sites lack of its checkpoints is in the request."""
    pool = preempted("c", "d")
    asked = pool.asked["low"]
    assert pool.state("low") == "waiting"
    assert asked.free_chips == {"a": {"g": 0}, "b": {"g": 0}, "c": {"g": 2}, "d": {"g": 2}}
    assert {site: one.lacks_checkpoint for site, one in asked.fetches.items()} == {"c": True, "d": True}
    pool.answer("low", plan("c", "d", name="other"))
    for _ in range(3):
        pool.obey()
    low = pool.coordinator.job_view("low")
    assert (low.state, low.attempt > 1, low.restarts) == ("running", True, 0)
    assert {order.files_at for order in pool.coordinator.orders("c")} == {("a", "b")}
    assert "planned again: other on c, d" in [one.text for one in pool.coordinator.state.jobs["low"].history.entries]


def test_a_preempted_job_keeps_its_plan_while_no_other_one_fits() -> None:
    """It waits for its chips without a request, and is planned again when more become free elsewhere."""
    pool = preempted("c")
    pool.answer("low")
    before = pool.coordinator.job_view("low")
    assert (before.state, before.plan and before.plan.clusters) == ("waiting", ("a", "b"))
    pool.report("c")
    assert "low" not in pool.asked
    pool.clusters["d"] = cluster("d", 2)
    pool.report("d")
    pool.answer("low", plan("c", "d", name="other"))
    for _ in range(3):
        pool.obey()
    assert pool.state("low") == "running"


def test_a_preempted_job_whose_user_chose_its_plan_is_not_planned_again() -> None:
    """Only the user changes it: the job goes on at its sites once they have room."""
    pool = preempted("c", "d", policy="manual")
    assert "low" not in pool.asked
    assert pool.state("low") == "blocked"


def queued(pool: Driver, site: str) -> list[ObservedPart]:
    return [pool.done(site, one) for one in pool.coordinator.orders(site) if one.desired == "queued"]


@pytest.mark.parametrize("what", ["refused", "cancel", "ended", "lost", "late", "site away"])
def test_what_comes_between_ends_nobody(what: str) -> None:
    """A refusal, the requester's end, a victim's own end, silence: all is undone, no victim is released."""
    pool = busy() if what in ("refused", "late") else preempting()
    if what == "refused":
        pool.preempt("high")
        pool.report("a", seen("low", 1, "running"), seen("high", 1, "refused", "the owner says no"))
    elif what == "cancel":
        pool.cancel("high")
    elif what == "ended":
        pool.report("b", seen("low", 1, "succeeded"))
    elif what == "lost":
        pool.tell(AgentLost(now_s=pool.now_s, cluster="c"))
    elif what == "site away":
        pool.tell(AgentLost(now_s=pool.now_s, cluster="b"))
    else:
        pool.preempt("high")
        pool.wait(10)
    assert pool.state("high") in ("stopping", "waiting", "blocked", "cancelled")
    assert pool.state("low") == "running"
    for site in "ab":
        assert pool.orders(site)["low", 1] == "running"
        assert not any(order.protect for order in pool.coordinator.orders(site))
    for _ in range(2):
        for site in "ac":
            obey(pool, site)
    assert pool.state("high") == ("cancelled" if what == "cancel" else "blocked")
    if what == "refused":
        assert "no job was stopped: a refused its part (ranks 0, 1): the owner says no" in pool.reason("high")


def test_a_victim_that_is_not_protected_in_time_is_left_alone() -> None:
    """The time for protection is bounded too, and the reason names who was late."""
    pool = preempting()
    pool.wait(700)
    assert "no verified checkpoint of low within 600 s" in pool.reason("high")
    assert pool.state("low") == "running"


def test_only_lower_levels_by_the_owners_own_map_are_offered() -> None:
    """Where an owner maps both priorities to one level, or the victim does not take it, there is no offer."""
    flat = PriorityMap(levels=("top", "rest"), high="top", middle="rest", low="rest")
    for priority, preemptible, levels, offered in (
        ("low", True, PriorityMap(), True),
        ("middle", True, PriorityMap(), False),
        ("low", False, PriorityMap(), False),
        ("low", True, flat, False),
    ):
        pool = Driver("a")
        pool.clusters["a"] = cluster("a", priorities=levels)
        pool.report("a")
        pool.submit("first", plan(*"aaaa"), priority=priority, preemptible=preemptible)
        pool.obey()
        pool.submit("next", policy="manual")
        pool.answer("next")
        pool.answer("next", plan("a", name="p"))
        pool.choose("next", "p")
        assert bool(pool.coordinator.job_view("next").offer) == offered


def test_nobody_is_preempted_who_is_not_needed() -> None:
    """Of several victims the fewest are taken, of lower priority first, then those that lose least."""
    pool = Driver("a", chips=4)
    for name, priority in (("one", "low"), ("two", "middle"), ("three", "low")):
        pool.submit(name, plan("a"), priority=priority)
    pool.obey()
    pool.obey()
    parts = [pool.done("a", order) for order in pool.coordinator.orders("a")]
    pool.report("a", *(p.model_copy(update={"unsaved_s": 50.0 if p.job == "one" else 10.0}) for p in parts))
    pool.submit("next", priority="high")
    pool.answer("next")
    pool.answer("next", plan("a", "a"))
    assert [one.job for one in pool.coordinator.job_view("next").offer] == ["three"]


def test_a_job_that_runs_is_offered_no_victims() -> None:
    """Although its pool is full, and a job of lower priority runs there."""
    pool = Driver("a", chips=4)
    for name, priority in (("low", "low"), ("high", "high")):
        pool.submit(name, plan("a", "a"), priority=priority)
    pool.obey()
    pool.obey()
    assert (pool.state("high"), pool.coordinator.job_view("high").offer) == ("running", ())


def test_local_victims_do_not_suffice_where_the_pool_has_promised_the_chips() -> None:
    """A local job took all 4 chips, 2 of which are promised to a job that may not be preempted."""
    pool = Driver("a", chips=4)
    pool.submit("first", plan("a", "a"), preemptible=False)
    own = ObservedLocalJob(name="own", chips={"g": 4}, level="low", running=True, preemptible=True)
    pool.report("a", local=(own,))
    for name, num_chips, victims in (("four", 4, []), ("two", 2, ["own"])):
        pool.submit(name, priority="high")
        pool.answer(name)
        pool.answer(name, plan(*"a" * num_chips))
        assert [one.job for one in pool.coordinator.job_view(name).offer] == victims
        pool.cancel(name)


def test_the_user_agrees_to_the_victims_that_were_named() -> None:
    """Where they would no longer do, nothing is begun, and the error says so; again, it changes nothing."""
    pool = busy()
    wrong = PreemptionAgreed(now_s=1, job_id="high", victims=(VictimNamed(cluster="b", job="low", attempt=1),))
    with pytest.raises(ConflictError, match="the chips of these jobs no longer suffice for job high: low"):
        pool.tell(wrong)
    pool.preempt("high")
    named = PreemptionAgreed(now_s=1, job_id="high", victims=(VictimNamed(cluster="a", job="low", attempt=1),))
    assert not pool.coordinator.admit(named)
    with pytest.raises(ConflictError, match="low is running: only a waiting job can preempt"):
        pool.tell(PreemptionAgreed(now_s=1, job_id="low", victims=()))


def test_local_jobs_may_be_victims_where_their_owner_lets_them() -> None:
    """They are named in the order; from `prepared` on their agent ends them; chips are counted once."""
    pool = Driver("a", chips=4)
    own = ObservedLocalJob(name="own", chips={"g": 3}, level="low", running=True, preemptible=True, unsaved_s=20)
    pool.report("a", local=(own, own.model_copy(update={"name": "kept", "chips": {"g": 1}, "preemptible": False})))
    pool.submit("next", policy="manual")
    pool.answer("next")
    pool.answer("next", plan("a", "a", name="p"))
    pool.choose("next", "p")
    assert [(one.job, one.attempt) for one in pool.coordinator.job_view("next").offer] == [("own", 0)]
    pool.preempt("next")
    order = pool.coordinator.orders("a")[0]
    assert [(one.job, one.attempt) for one in order.victims] == [("own", 0)]
    pool.report("a", seen("next", 1, "ready"))
    assert (pool.state("next"), pool.orders("a")) == ("preparing", {("next", 1): "prepared"})
    waits = own.model_copy(update={"running": False})
    pool.report("a", seen("next", 1, "prepared"), free=1, local=(waits,))
    assert (pool.state("next"), pool.coordinator.state.free_chips()) == ("starting", {"a": {"g": 1}})


def test_who_is_evicted_by_its_owner_leaves_all_its_sites_and_has_not_failed() -> None:
    """No restart is used, whichever site reports first: the one that evicted, or one that lost its peer by that."""
    for first in ("a", "b"):
        pool = busy()
        evicted = ObservedPart(job="low", attempt=1, state="released", detail="evicted by the owner", fault="evicted")
        lost_peer = ObservedPart(job="low", attempt=1, state="failed", detail="lost rank 0", fault="peer")
        for site in (first, "ab".replace(first, "")):
            pool.report(site, evicted if site == "a" else lost_peer, *queued(pool, site))
            assert pool.orders("b")["low", 1] == "released"
        pool.obey("b")
        low = pool.coordinator.job_view("low")
        assert (low.state in ("waiting", "preparing"), low.restarts) == (True, 0)
        assert pool.state("high") == "preparing"


def test_a_site_that_learns_later_that_its_scheduler_took_the_devices_uses_no_restart() -> None:
    """1. A rank has ended by a signal, the cause is unknown. 2. The scheduler has ended the hold: the part says so."""
    pool = busy()
    ended = ObservedPart(job="low", attempt=1, state="failed", detail="rank 0 was ended by signal 15", fault="peer")
    pool.report("a", ended, *queued(pool, "a"))
    assert pool.coordinator.job_view("low").restarts == 1
    evicted = ended.model_copy(
        update={"state": "released", "detail": "the scheduler ended the hold", "fault": "evicted"}
    )
    pool.report("a", evicted, *queued(pool, "a"))
    pool.obey("b")
    low = pool.coordinator.job_view("low")
    assert (low.state in ("waiting", "preparing"), low.restarts) == (True, 0)


def test_an_earlier_job_takes_back_what_a_later_one_only_prepares() -> None:
    """Wound-wait: the later one waits again, and starts when there is room; never the other way."""
    pool = Driver("a", "b", chips=2)
    pool.submit("one", plan("a", "a"), policy="manual")
    pool.choose("one", "p")
    pool.report("a", seen("one", 1, "refused", "busy"))
    pool.obey()
    assert pool.state("one") == "waiting"
    pool.now_s += 1
    pool.submit("two", plan("a", "a", "b"))
    assert pool.state("two") == "preparing"
    pool.wait(2)
    assert (pool.state("one"), pool.state("two")) == ("blocked", "stopping")
    assert "requeued for job one" in pool.reason("two")
    pool.obey()
    assert (pool.state("one"), pool.state("two")) == ("preparing", "waiting")


def test_a_deleted_requester_leaves_no_trace() -> None:
    """Any job may claim its victims again."""
    pool = preempting()
    pool.cancel("high")
    pool.obey()
    pool.tell(JobDeleted(now_s=pool.now_s, job_id="high"))
    assert pool.coordinator.state.jobs["low"].preemptor is None


def test_a_preemption_that_is_undone_says_so_in_the_history() -> None:
    """With its cause, and that no job was stopped."""
    pool = busy()
    pool.preempt("high")
    pool.report("a", seen("low", 1, "running"), seen("high", 1, "refused", "the owner says no"))
    entry = [one for one in pool.coordinator.state.jobs["high"].history.entries if one.kind == "refused"][-1]
    assert entry.text.startswith("preemption aborted, no job was stopped: a refused its part")
    assert pool.coordinator.state.jobs["high"].reason == entry.text
