"""Rules of the coordinator that no other file states; mutation tests found that each could be broken unnoticed."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.control.coordinator.accounting.metered_holdings import metered_holdings
from isthmus.control.coordinator.sites.join_pool import MAX_INVITATIONS
from isthmus.control.state.events import PlansMade, SiteInvited
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.plan import SEARCH_ENDED_EARLY, PlanSet, Refusal
from tests.control.driver import Driver, checked_pool, seen, started
from tests.control.samples import plan
from tests.control.test_coordinator_allocations import linked, predicted
from tests.control.test_coordinator_preemption import busy, preempted


def blocked() -> Driver:
    """Job `first` holds all of `a`; job `j`, whose user chose its plan at `a`, waits in the sites' queues."""
    pool = checked_pool("a", "b")
    pool.submit("first", plan(*"aaaa"))
    pool.submit("j", plan(*"aa", name="one"), plan(*"bb", name="two"), policy="manual", root="/pool/")
    pool.choose("j", "one")
    assert pool.state("j") == "blocked"
    return pool


def test_a_blocked_job_whose_plan_fails_its_checks_leaves_the_queues_and_asks_for_another() -> None:
    """1. It is checked while it waits. 2. Its site finds no data. 3. It is in no site's queue; its user chooses."""
    pool = blocked()
    assert pool.coordinator.site_queue("a") == ("j",)
    pool.check("a", data="failed")
    assert pool.state("j") == "choosing"
    assert pool.coordinator.site_queue("a") == ()
    pool.choose("j", "two")
    pool.check("b")
    assert pool.state("j") == "preparing"


def test_an_automatic_job_takes_the_first_of_its_other_plans_where_none_fits_now() -> None:
    """It waits with that plan, and its sites check it, rather than without any."""
    pool = checked_pool("a", "b", "c")
    pool.submit("first", plan(*"bbbbcccc"))
    pool.submit("j", plan("a", name="one"), plan("b", name="two"), plan("c", name="three"), root="/pool/")
    pool.check("a", data="failed")
    view = pool.coordinator.job_view("j")
    assert (view.state, view.plan and view.plan.id) == ("waiting", "two")


def test_a_report_of_as_many_chips_as_before_is_no_new_inventory() -> None:
    """Plans are compared with the pool's whole inventory again only when that has changed."""
    pool = Driver("a", "b")
    indexes = pool.coordinator.state.indexes
    before = indexes.inventory_version
    pool.report("a", free=2)
    pool.report("a")
    assert indexes.inventory_version == before
    pool.report("a", chips=6)
    assert indexes.inventory_version == before + 1


def test_a_victim_that_is_still_starting_is_stopped_without_a_checkpoint() -> None:
    """It has no work to save, so the preemption waits for the sites of its job alone."""
    pool = Driver("a", "b")
    pool.submit("low", plan(*"aaaabbbb"), priority="low")
    pool.obey()
    assert pool.state("low") == "starting"
    pool.submit("high", policy="manual", priority="high")
    pool.answer("high")
    pool.answer("high", plan("a", "b", name="wanted"))
    pool.choose("high", "wanted")
    assert pool.preempt("high") == ("a/low", "b/low")
    held = [seen("low", 1, "prepared"), seen("high", 1, "ready")]
    for site in "ab":
        pool.report(site, *held)
    assert (pool.state("high"), pool.state("low")) == ("preparing", "stopping")


def test_a_part_that_has_ended_before_the_others_is_metered_as_leaving() -> None:
    """Its site holds the chips until all parts have ended, and they train no more."""
    pool = started("a", "b")
    job = pool.coordinator.state.jobs["j"]
    pool.report("a", seen("j", 1, "succeeded"))
    assert {one.cluster: one.phase for one in metered_holdings(pool.coordinator.state, job)} == {
        "a": "leaving",
        "b": "running",
    }


def test_reserved_links_are_metered_once_and_at_no_cluster() -> None:
    """Owner and cluster are empty: links are the pool's."""
    pool = linked(1.0, "a", "b")
    pool.submit("j", predicted(plan("a", "b"), gbps=0.7))
    held = list(metered_holdings(pool.coordinator.state, pool.coordinator.state.jobs["j"]))
    assert [(one.cluster, one.owner) for one in held if one.amounts and one.amounts[0][0].kind == "link"] == [("", "")]


def test_a_replaced_worker_changes_its_own_entry_of_the_rank_map() -> None:
    """The other ranks keep theirs, and all sites get the new address with their orders."""
    pool = started("a", "b")
    moved = WorkerAddress(rank=0, cluster="a", host="h", port=99)
    pool.report("a", seen("j", 1, "running").model_copy(update={"workers": (moved,)}))
    for site in "ab":
        (order,) = pool.coordinator.orders(site)
        assert order.rank_map is not None
        assert [one.port for one in order.rank_map.workers] == [99, 2]


def test_a_job_that_is_planned_again_at_the_same_sites_has_no_new_line_in_its_history() -> None:
    """Only other sites are news to its user."""
    pool = preempted("c")
    pool.answer("low", plan("a", "b", name="again"))
    texts = [one.text for one in pool.coordinator.state.jobs["low"].history.entries]
    assert not any("planned again" in text for text in texts)


def test_a_preemption_that_times_out_names_the_sites_that_are_not_ready() -> None:
    """And how long they had."""
    pool = busy()
    pool.preempt("high")
    pool.report("a", *(pool.done("a", one) for one in pool.coordinator.orders("a")))
    pool.wait(11)
    texts = [one.text for one in pool.coordinator.state.jobs["high"].history.entries]
    assert any("c did not get ready within 10 s" in text for text in texts)


def test_the_reasons_of_a_search_on_free_chips_are_listed_once_each() -> None:
    """Where the search of the whole pool was ended early, they are what is known."""
    pool = Driver("a", chips=1)
    pool.submit("first", plan("a"))
    pool.obey()
    pool.submit("large", user="v")
    job = pool.coordinator.state.jobs["large"]
    reasons = ("too few chips", "too little memory", "too few chips")
    refused = tuple(Refusal(clusters=(), reason=reason) for reason in reasons)
    pool.tell(PlansMade(now_s=pool.now_s, job_id="large", round=job.round, plans=PlanSet(plans=(), refused=refused)))
    pool.answer("large", why=f"{SEARCH_ENDED_EARLY} without a plan")
    assert job.reason == "no plan fits the free resources: too few chips; too little memory"


def test_a_job_without_a_plan_is_planned_again_at_once_where_the_pool_has_grown_meanwhile() -> None:
    """1. The planner gets all chips. 2. A site reports more. 3. The planner's refusal is of the pool as it was."""
    pool = Driver("a", chips=1)
    pool.submit("large")
    assert pool.asked["large"].free_chips == {"a": {"g": 1}}
    pool.report("a", chips=3)
    pool.answer("large")
    assert pool.asked["large"].free_chips == {"a": {"g": 3}}


def test_invitations_that_have_ended_make_room_for_new_ones() -> None:
    """Used and open ones stay, expired and revoked ones go once the list is full."""
    pool = Driver("a")

    def invite(number: int, expires_s: float) -> None:
        event = SiteInvited(now_s=pool.now_s, id=f"t-{number}", owner="o", by="root", expires_s=expires_s)
        assert pool.coordinator.admit(event)
        pool.coordinator.handle(event)

    invite(0, pool.now_s + 1e6)
    for number in range(1, MAX_INVITATIONS):
        invite(number, pool.now_s + 1)
    state = pool.coordinator.state
    state.invitations["t-1"] = dataclasses.replace(state.invitations["t-1"], joined="a")
    pool.now_s += 2
    invite(MAX_INVITATIONS, pool.now_s + 1)
    assert list(state.invitations) == ["t-0", "t-1", f"t-{MAX_INVITATIONS}"]


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_an_attempt_begins_without_what_its_sites_reported_of_an_earlier_life(state: str) -> None:
    """A report of a part that the server has not ordered yet decides nothing about it later."""
    pool = Driver("a", "b")
    pool.report("a", seen("j", 1, state))
    pool.submit("j", plan("a", "b"))
    assert pool.state("j") == "preparing"
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
