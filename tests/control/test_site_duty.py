"""Cordon, drain and leave: a closed site takes no parts, its jobs are saved, and nothing of it stays in the pool."""

from __future__ import annotations

import pytest

from isthmus.control.queries.sites.sole_checkpoints import sole_checkpoints
from isthmus.control.state.events import (
    AgentLost,
    DrainTimedOut,
    JobChanged,
    PlansMade,
    PreemptionAgreed,
    SiteCordoned,
    SiteDraining,
    SiteLeft,
    VictimNamed,
)
from isthmus.control.state.job_history import HistoryEntry
from isthmus.core.errors import AuthError, ConflictError, NotFoundError
from isthmus.core.messages.agent_messages import PeerAddress
from isthmus.core.plan import PlanSet
from tests.control.driver import Driver, identity, seen, started
from tests.control.samples import plan


def cordon(pool: Driver, site: str, role: str = "owner", *, cordoned: bool = True) -> None:
    pool.tell(
        SiteCordoned.model_validate(
            {"now_s": pool.now_s, "cluster": site, "by": "x", "role": role, "cordoned": cordoned}
        )
    )


def drain(pool: Driver, site: str, limit_s: float = 60.0, *, leaves: bool = False) -> None:
    pool.tell(
        SiteDraining(
            now_s=pool.now_s, cluster=site, by="x", role="owner", deadline_s=pool.now_s + limit_s, leaves=leaves
        )
    )


def duty(pool: Driver, site: str) -> str:
    return next(one.duty.state for one in pool.coordinator.pool_view().clusters if one.cluster.name == site)


def test_a_cordoned_site_takes_no_part_and_what_runs_there_goes_on() -> None:
    """A job that waits for a cordoned site starts when the cordon is lifted; one that runs there is not touched."""
    pool = started("a")
    cordon(pool, "b")
    cordon(pool, "a")
    pool.obey()
    assert pool.state("j") == "running"
    pool.submit("k", plan("b"))
    assert pool.state("k") == "waiting"
    assert "b is cordoned" in pool.reason("k")
    assert pool.orders("b") == {}
    cordon(pool, "b", cordoned=False)
    pool.wait(1)
    assert pool.state("k") == "preparing"


def test_a_job_of_policy_auto_is_planned_without_a_cordoned_site() -> None:
    """The planner is asked about the chips of open sites only."""
    pool = Driver("a", "b")
    cordon(pool, "a")
    pool.submit("j")
    assert set(pool.asked["j"].free_chips) == {"b"}


def test_only_an_admin_lifts_the_cordon_of_an_admin() -> None:
    """An owner cannot open a site that the operator has closed."""
    pool = Driver("a")
    cordon(pool, "a", "admin")
    with pytest.raises(AuthError, match="operator x has cordoned"):
        cordon(pool, "a", "owner", cordoned=False)
    cordon(pool, "a", "admin", cordoned=False)
    assert duty(pool, "a") == "open"


def test_the_acts_name_an_unknown_site() -> None:
    """Neither cordon nor drain of a site that has not joined; its end changes nothing."""
    pool = Driver("a")
    with pytest.raises(NotFoundError, match="no cluster 'x' has joined"):
        cordon(pool, "x")
    with pytest.raises(NotFoundError, match="no cluster 'x' has joined"):
        drain(pool, "x")
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="x"))
    assert pool.log[-1].kind == "agent-reported"


def test_repeating_an_act_changes_nothing() -> None:
    """A cordon, a drain and the lifting of no cordon are not logged twice; a later deadline does not count."""
    pool = Driver("a")
    cordon(pool, "a", cordoned=False)
    cordon(pool, "a")
    cordon(pool, "a")
    drain(pool, "a", 60)
    drain(pool, "a", 60)
    drain(pool, "a", 90)
    assert [event.kind for event in pool.log[1:]] == ["site-cordoned", "site-draining"]
    drain(pool, "a", 30)
    record = pool.coordinator.state.clusters["a"].drain
    assert record is not None
    assert record.deadline_s == pool.now_s + 30


def test_a_drained_site_saves_each_job_before_it_stops() -> None:
    """Steps: a drain orders a checkpoint at all sites of the job; it is stopped when all parts have verified it.

    The job waits with that step, and starts elsewhere; the site shows that it is drained.
    """
    pool = started("a", "b")
    drain(pool, "a")
    assert {order.protect for site in "ab" for order in pool.coordinator.orders(site)} == {True}
    assert (pool.state("j"), duty(pool, "a")) == ("running", "draining")
    pool.obey("a")
    assert pool.state("j") == "running", "b has not saved yet"
    pool.obey("b")
    assert pool.state("j") == "stopping"
    assert pool.coordinator.state.jobs["j"].saved_step == 7
    pool.obey()
    assert duty(pool, "a") == "drained"
    assert pool.coordinator.state.jobs["j"].restarts == 0, "a drain uses no restart"
    pool.answer("j", plan("c"))
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    assert pool.orders("a") == {}


@pytest.mark.parametrize(
    ("sites", "checkpoints", "own_storage", "lost"),
    [
        ("ab", {"copies": 1}, "ab", ["", "j"]),
        ("abc", {"copies": 2}, "abc", ["", "", "j"]),
        ("abc", {"copies": 1}, "abc", ["", "j", "j"]),
        ("ab", {"copies": 0}, "ab", ["j", "j"]),
        ("a", {"copies": 1}, "a", ["j"]),
        ("ab", {"copies": 0, "copy_store": "s3://bucket/x"}, "ab", ["", ""]),
        ("ab", {"copies": 0}, "", ["", ""]),
    ],
)
def test_a_site_whose_storage_a_job_needs_to_go_on_is_known(
    sites: str, checkpoints: dict[str, object], own_storage: str, lost: list[str]
) -> None:
    """Each site leaves after the one before; `lost`: the job that would lose its checkpoint by that."""
    pool = Driver(*"abcd")
    pool.storage_bytes = dict.fromkeys(own_storage, 10**15)
    for site in "abcd":
        pool.report(site)
    pool.submit("j", plan(*sites), checkpoints=checkpoints)
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    for site, job in zip(sites, lost, strict=True):
        assert sole_checkpoints(pool.coordinator.state, site) == tuple(job)
        drain(pool, site, leaves=True)
    assert sole_checkpoints(pool.coordinator.state, "d") == ()


def test_a_job_that_has_gone_on_elsewhere_needs_the_site_no_more() -> None:
    """Its files are where it trains now."""
    pool = Driver("a", "b", "c")
    pool.storage_bytes = dict.fromkeys("abc", 10**15)
    for site in "abc":
        pool.report(site)
    pool.submit("j", plan("a"))
    pool.obey()
    pool.obey()
    assert sole_checkpoints(pool.coordinator.state, "a") == ("j",)
    drain(pool, "a")
    for _ in range(3):
        pool.obey()
    assert (duty(pool, "a"), sole_checkpoints(pool.coordinator.state, "a")) == ("drained", ("j",))
    pool.answer("j", plan("c"))
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    assert sole_checkpoints(pool.coordinator.state, "a") == ()


def test_at_the_deadline_a_job_that_has_not_saved_is_stopped() -> None:
    """A drain ends in bounded time, even if no worker answers the order to save."""
    pool = started("a")
    drain(pool, "a", 30)
    pool.wait(29)
    assert pool.state("j") == "running"
    pool.wait(2)
    assert pool.state("j") == "stopping"
    assert "without a new checkpoint" in pool.coordinator.state.jobs["j"].reason
    pool.tell(DrainTimedOut(now_s=pool.now_s, cluster="a"))
    assert pool.log[-1].kind == "drain-timed-out"
    assert [event.kind for event in pool.log].count("drain-timed-out") == 1


@pytest.mark.parametrize("answered", [0, 1])
def test_an_attempt_that_has_not_trained_is_stopped_at_once(answered: int) -> None:
    """A job that prepares or starts has nothing to save: it waits again."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    if answered:
        for site in "ab":
            pool.report(site, seen("j", 1, "prepared"))
    assert pool.state("j") == ("starting" if answered else "preparing")
    drain(pool, "a")
    assert pool.state("j") == "stopping"
    pool.obey()
    assert duty(pool, "a") == "drained"


def test_a_waiting_job_leaves_the_queue_of_a_drained_site() -> None:
    """A part in the queue of the site holds no chips, and goes as well."""
    pool = started(*"aaaa")
    pool.submit("k", plan("a"), policy="manual")
    pool.choose("k", "p")
    pool.obey()
    assert ("k", 1) in pool.coordinator.state.clusters["a"].parts
    drain(pool, "a")
    pool.obey()
    pool.obey()
    assert duty(pool, "a") == "drained"
    assert pool.state("k") in ("waiting", "blocked")


def test_uncordon_ends_a_drain_and_the_job_trains_on() -> None:
    """The order to save is taken back: a later preemption asks for a new checkpoint, not for this one."""
    pool = started("a", "b")
    drain(pool, "a")
    pool.obey("a")
    cordon(pool, "a", cordoned=False)
    pool.obey()
    assert (pool.state("j"), duty(pool, "a")) == ("running", "open")
    assert not any(part.checkpoint_requested for part in pool.coordinator.state.jobs["j"].current_parts())


def test_a_preemption_at_a_drained_site_is_undone_and_its_victim_saved_for_the_drain() -> None:
    """Race: 1. a preemption waits for the victim's checkpoint; 2. the site is drained; 3. the victim has saved.

    The preemptor waits again, the victim is stopped by the drain with its checkpoint.
    """
    pool = started(*"aaaa", priority="low")
    pool.submit("k", plan("a"), policy="manual", priority="high")
    pool.choose("k", "p")
    assert pool.preempt("k") == ("a/j",)
    pool.report("a", seen("j", 1, "running"), seen("k", 1, "ready"))
    drain(pool, "a")
    pool.obey()
    pool.obey()
    pool.obey()
    assert pool.state("j") in ("stopping", "waiting")
    assert pool.state("k") in ("waiting", "blocked")
    assert duty(pool, "a") == "drained"
    victim = VictimNamed(cluster="a", job="j", attempt=1)
    with pytest.raises(ConflictError, match="a takes no parts now"):
        pool.tell(PreemptionAgreed(now_s=pool.now_s, job_id="k", victims=(victim,)))


def test_a_site_leaves_only_when_it_is_asked_to_and_empty() -> None:
    """An early or foreign end changes nothing; a site that leaves cannot be opened again."""
    pool = started("a")
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="a"))
    drain(pool, "a")
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="a"))
    drain(pool, "a", leaves=True)
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="a"))
    assert "a" in pool.coordinator.state.clusters, "its part is not released yet"
    with pytest.raises(ConflictError, match="is leaving the pool"):
        cordon(pool, "a", cordoned=False)
    pool.obey()
    pool.obey()
    assert pool.coordinator.may_leave("a")
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="a"))
    assert "a" not in pool.coordinator.state.clusters
    assert pool.state("j") == "waiting"
    assert pool.coordinator.job_view("j").parts == ()


def test_nothing_of_a_site_is_left_in_the_pool_state() -> None:
    """The state after `leave` is the state before the site joined, but for what histories and counters say."""
    before, after = Driver("a", "b"), Driver("a", "b")
    for pool in (before, after):
        pool.addresses = {name: PeerAddress(host="h", port=1) for name in "ab"}
        pool.report("a")
        pool.report("b")
    newcomer = Driver("c").clusters["c"]
    after.clusters["c"] = newcomer
    after.addresses["c"] = PeerAddress(host="h", port=1)
    after.identities["c"] = identity("own")
    after.report("c")
    after.submit("j", plan("c"))
    after.obey("c")
    after.obey("c")
    assert after.state("j") == "running"
    after.cancel("j")
    after.obey("c")
    drain(after, "c", leaves=True)
    after.tell(SiteLeft(now_s=after.now_s, cluster="c"))
    one, other = before.coordinator.state, after.coordinator.state
    assert one.clusters == other.clusters
    assert (one.links, one.allocated_kbps, one.live_jobs) == (other.links, other.allocated_kbps, other.live_jobs)
    assert before.coordinator.pool_view() == after.coordinator.pool_view()


def test_a_lost_site_can_be_drained_and_leaves_when_its_parts_are_released() -> None:
    """Nothing waits for the checkpoint of a site without contact: its lease or the operator ends its parts."""
    pool = started("a", "b")
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    drain(pool, "a", 10, leaves=True)
    pool.wait(11)
    assert pool.state("j") == "stopping"
    assert not pool.coordinator.may_leave("a")


def test_plans_that_arrive_after_the_cordon_do_not_start_there() -> None:
    """Race: 1. the planner is asked; 2. the site is cordoned; 3. the planner answers with a plan there."""
    pool = Driver("a", "b")
    pool.submit("j")
    asked = pool.asked.pop("j")
    cordon(pool, "a")
    pool.tell(PlansMade(now_s=pool.now_s, job_id="j", round=asked.round, plans=PlanSet(plans=(plan("a"),))))
    assert pool.state("j") == "waiting"
    assert pool.orders("a") == {}


def last_event(pool: Driver, kind: str) -> HistoryEntry:
    """Return the newest entry of a kind in the history of job `j`."""
    return [one for one in pool.coordinator.state.jobs["j"].history.entries if one.kind == kind][-1]


def test_the_history_of_a_job_says_which_site_was_drained_and_with_what_it_goes_on() -> None:
    """With the step that was saved, or that none was by the deadline."""
    pool = started("a", "b")
    drain(pool, "a")
    pool.obey("a")
    pool.obey("b")
    saved = last_event(pool, "preempted")
    assert (saved.cluster, saved.text) == ("a", "a is drained, checkpoint at step 7")
    pool = started("a", "b")
    drain(pool, "b", 30)
    pool.wait(31)
    lost = last_event(pool, "preempted")
    assert (lost.cluster, lost.text) == ("b", "b is drained, without a new checkpoint by the deadline")


def test_a_verified_checkpoint_is_a_change_of_its_job() -> None:
    """Who follows the job learns it from the report that brings it, although no state changes."""
    pool = started("a", "b")
    drain(pool, "a")
    (part,) = (pool.done("a", order) for order in pool.coordinator.orders("a"))
    assert part.protection is not None
    changed = [one.job_id for one in pool.report("a", part) if isinstance(one, JobChanged)]
    assert (changed, pool.state("j")) == (["j"], "running")


def test_a_job_that_is_being_stopped_is_not_stopped_again_by_a_drain() -> None:
    """Its history has one end of the attempt."""
    pool = started("a", "b")
    pool.cancel("j")
    drain(pool, "a", 30)
    pool.wait(31)
    assert pool.state("j") == "stopping"
    kinds = [one.kind for one in pool.coordinator.state.jobs["j"].history.entries]
    assert "preempted" not in kinds
    pool.obey()
    assert pool.state("j") == "cancelled"
