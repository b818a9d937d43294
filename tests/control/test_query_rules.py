"""Rules of the queries that no other file states; mutation tests found that each could be broken unnoticed."""

from __future__ import annotations

import pytest

from isthmus.control.queries.catalogue.catalogue_versions import with_pins_of
from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.queries.forecast_inputs import expected_releases, local_releases
from isthmus.control.queries.sites.invited_size import require_invited_size
from isthmus.control.queries.sites.site_belongings import site_belongings
from isthmus.control.state.events import AgentLost, SiteInvited, SiteJoined
from isthmus.core.catalogue import HeldCopy
from isthmus.core.errors import AuthError
from isthmus.core.messages.agent_messages import ObservedLocalJob
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.views.site_views import Belonging
from tests.control.driver import Driver, identity, started
from tests.control.joining import digest
from tests.control.samples import cluster, plan, submission
from tests.control.test_coordinator_preemption import busy
from tests.control.test_site_duty import cordon, drain


def joined(*allowed: int | None, chips: int = 4) -> Driver:
    """Cluster `n` has joined once by each invitation, the latest last, each for a number of chips."""
    pool = Driver()
    pool.clusters["n"] = cluster("n", chips)
    for number, most in enumerate(allowed):
        invited = SiteInvited(
            now_s=pool.now_s, id=f"t-{number}", owner="owner-n", by="root", expires_s=pool.now_s + 60,
            cluster="n" if number else None, max_chips=most,
        )  # fmt: skip
        pool.tell(invited)
        pool.tell(SiteJoined(now_s=pool.now_s, invitation=f"t-{number}", cluster=cluster("n", chips), key=digest("k")))
    return pool


def test_a_site_reports_no_more_chips_than_its_latest_invitation_allows() -> None:
    """In all node groups together; an earlier invitation counts no more, and one without a number sets no bound."""
    groups = tuple(NodeGroup(name=name, chip="H20", nodes=1, chips_per_node=n) for name, n in (("g", 4), ("h", 1)))
    state = joined(4).coordinator.state
    with pytest.raises(AuthError, match="'n' has 5 chips, and its invitation is for 4 at most") as caught:
        require_invited_size(state, Cluster(name="n", owner="owner-n", node_groups=groups))
    assert caught.value.hint == "the operator allows more: isthmus site invite OWNER --cluster n --max-chips N"
    require_invited_size(state, cluster("n", 4))
    require_invited_size(state, cluster("other", 9))
    require_invited_size(joined(4, None).coordinator.state, cluster("n", 9))
    state = joined(4, 6).coordinator.state
    require_invited_size(state, cluster("n", 6))
    with pytest.raises(AuthError, match="has 7 chips"):
        require_invited_size(state, cluster("n", 7))


def test_what_a_site_leaves_behind_and_takes_along_is_listed_by_kind() -> None:
    """Removed with it: site, agent, invitation, copies. Kept: histories and the usage of their users."""
    pool = joined(None)
    pool.identities["n"] = identity("own")
    pool.copies["n"] = (HeldCopy(owner="u", version="1" * 64, num_bytes=3, complete=True),)
    pool.report("n")
    state = pool.coordinator.state
    record = state.clusters["n"]
    removed, kept = site_belongings(state, record)
    assert record.agent is not None
    assert removed == (
        Belonging(kind="site", name="n"),
        Belonging(kind="agent", name=record.agent.id[:12]),
        Belonging(kind="invitation", name="t-0"),
        Belonging(kind="copies", name="1 of versions of the catalogue"),
    )
    assert kept == ()
    pool = started("a", "b")
    _, kept = site_belongings(pool.coordinator.state, pool.coordinator.state.clusters["a"])
    assert kept == (
        Belonging(kind="history", name="of 1 jobs that had parts at a"),
        Belonging(kind="usage", name="of their 1 users"),
    )


def test_a_site_on_probation_is_shown_so_in_each_state_of_its_duty() -> None:
    """Open, cordoned and draining alike, with what it has still to prove."""
    pool = joined(None)
    pool.identities["n"] = identity("own")
    pool.report("n")
    shown = []
    for close in (None, cordon, drain):
        if close is not None:
            close(pool, "n")
        (view,) = pool.coordinator.pool_view().clusters
        assert view.duty.probation is not None
        shown.append((view.duty.state, view.duty.probation.num_succeeded))
    assert shown == [("open", 0), ("cordoned", 0), ("drained", 0)]


def test_the_shortest_lease_ends_the_parts_of_a_lost_site_too() -> None:
    """A lease of one second, or of a part of one, is a lease."""
    pool = Driver("a")
    pool.run_lease_s = 0.5
    pool.report("a")
    pool.submit("j", plan("a"))
    pool.obey()
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    (view,) = pool.coordinator.pool_view().clusters
    assert view.released_at_s == pool.now_s + pool.coordinator.state.config.lease_wait_s(0.5)


def test_users_jobs_of_a_node_group_without_a_report_of_free_chips_hold_all_of_it() -> None:
    """Chips that a site does not report as free are in use."""
    pool = Driver("a", chips=4)
    ends = ObservedLocalJob(name="u1", chips={"g": 4}, level="middle", running=True, ends_at_s=700.0)
    pool.report("a", free=0, local=(ends,))
    record = pool.coordinator.state.clusters["a"]
    record.free_chips = {}
    assert [one.at_s for one in local_releases(record, pool.now_s)] == [700.0]


def test_a_job_that_is_stopping_releases_its_chips_now() -> None:
    """Its remaining steps do not count."""
    pool = started("a")
    pool.cancel("j")
    assert pool.state("j") == "stopping"
    assert [one.at_s for one in expected_releases(pool.coordinator.state, pool.now_s, {})] == [pool.now_s]


def test_a_preempting_job_says_what_it_waits_for() -> None:
    """Its own reason, in the queue as well: not what it would lack if it were still waiting."""
    pool = busy()
    pool.preempt("high")
    job = pool.coordinator.state.jobs["high"]
    (status,) = answer_query(query_job(pool.coordinator.state, job, pool.now_s, {}, None))
    assert status.reason == job.reason == "preempting low: waiting for its sites to be ready"


def test_a_job_without_needs_or_beyond_the_pool_is_offered_no_victims() -> None:
    """Before it has a plan, and where its plan needs more than the whole pool."""
    pool = Driver("a")
    pool.submit("low", plan(*"aaaa"), priority="low")
    pool.obey()
    pool.obey()
    pool.submit("high", policy="manual", priority="high")
    assert pool.coordinator.job_view("high").offer == ()
    pool.answer("high")
    pool.answer("high", plan(*"aaaa", name="wanted"))
    pool.choose("high", "wanted")
    assert [one.job for one in pool.coordinator.job_view("high").offer] == ["low"]
    pool.report("a", pool.done("a", pool.coordinator.orders("a")[0]), chips=3, free=0)
    assert pool.coordinator.job_view("high").offer == ()


def test_of_the_victims_that_are_not_needed_the_most_expensive_is_spared_first() -> None:
    """1. Three are chosen, cheapest first. 2. Two would do. 3. `medium` is spared rather than `small`."""
    pool = Driver("a", chips=4)
    pool.submit("small", plan("a", name="s"), priority="low")
    pool.submit("medium", plan("a", name="m"), priority="low")
    pool.submit("large", plan(*"aa", name="l"), priority="low")
    for _ in range(2):
        pool.obey()
    unsaved = {"small": 1.0, "medium": 2.0, "large": 3.0}
    orders = pool.coordinator.orders("a")
    pool.report("a", *(pool.done("a", one).model_copy(update={"unsaved_s": unsaved[one.job]}) for one in orders))
    pool.submit("high", policy="manual", priority="high")
    pool.answer("high")
    pool.answer("high", plan(*"aaa", name="wanted"))
    pool.choose("high", "wanted")
    assert sorted(one.job for one in pool.coordinator.job_view("high").offer) == ["large", "small"]


def test_a_job_without_names_of_the_catalogue_keeps_its_paths() -> None:
    """The very job is returned, so nothing of it is checked or copied again."""
    job = submission(root="/pool/").job
    assert with_pins_of(job, job, "u") is job
