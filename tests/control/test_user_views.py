"""What users see of jobs and clusters, and which jobs a page of a listing holds."""

from __future__ import annotations

import pytest

from isthmus.control.state.events import AgentLost, SiteEnrolling, SiteGone
from isthmus.core.messages.agent_messages import PeerAddress, QueueEntry
from isthmus.core.views.api_views import AgentView, JobFilter, PartView
from tests.control.driver import Driver, identity, seen, started
from tests.control.samples import plan


def listed(pool: Driver, wanted: JobFilter | None = None, user: str | None = None, **more: object) -> object:
    """Return the ids of a page, and the job after which the next one starts."""
    options = {"after": None, "limit": 10, "newest_first": False} | more
    found, following = pool.coordinator.find_jobs(user, wanted or JobFilter(), **options)  # type: ignore[arg-type]
    return [view.id for view in found], following


def three() -> Driver:
    """Jobs `i`, `j` and `k`, submitted at 100, 110 and 120 s by ann, bob and ann; `i` is planned at `a`, `j` at `b`."""
    pool = Driver("a", "b")
    pool.submit("i", plan("a"), user="ann")
    pool.now_s = 110.0
    pool.submit("j", plan("b"), user="bob")
    pool.now_s = 120.0
    pool.submit("k", policy="manual", user="ann")
    return pool


def test_a_page_holds_as_many_jobs_as_asked_for_and_says_where_the_next_starts() -> None:
    """Oldest first or newest first; the last page is followed by none."""
    pool = three()
    assert listed(pool) == (["i", "j", "k"], None)
    assert listed(pool, limit=2) == (["i", "j"], "j")
    assert listed(pool, limit=2, after="j") == (["k"], None)
    assert listed(pool, limit=3) == (["i", "j", "k"], None)
    assert listed(pool, newest_first=True, limit=1) == (["k"], "k")
    assert listed(pool, newest_first=True, limit=5, after="k") == (["j", "i"], None)
    assert [view.id for view in pool.coordinator.list_jobs(limit=2)] == ["i", "j"]
    assert [view.id for view in pool.coordinator.list_jobs("ann", after="i")] == ["k"]


def test_a_page_ends_where_enough_jobs_were_examined() -> None:
    """Although none of them met the filter: the next page goes on from there."""
    pool = three()
    wanted = JobFilter(state=("choosing", "planning"))
    assert listed(pool, wanted, max_examined=2) == ([], "j")
    assert listed(pool, wanted, max_examined=2, after="j") == (["k"], None)
    assert listed(pool, wanted, max_examined=3) == (["k"], None)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"user": "ann"}, ["i", "k"]),
        ({"user": "eve"}, []),
        ({"state": ("preparing",)}, ["i", "j"]),
        ({"state": ("preparing",), "name": "j"}, ["j"]),
        ({"name": "k"}, ["k"]),
        ({"name": "k", "state": ("preparing",)}, []),
        ({"since_s": 110.0}, ["j", "k"]),
        ({"since_s": 110.5}, ["k"]),
        ({"owner": "owner-b"}, ["j"]),
        ({"owner": "owner-x"}, []),
        ({"owner": "owner-a", "since_s": 105.0}, []),
    ],
)
def test_a_filter_names_what_a_job_must_meet(wanted: dict[str, object], found: list[str]) -> None:
    """All of it; a job without a plan is at no owner's site."""
    assert listed(three(), JobFilter.model_validate(wanted)) == (found, None)


def test_a_user_lists_only_its_own_jobs() -> None:
    """Whatever user the filter names."""
    assert listed(three(), JobFilter(user="bob"), user="ann") == (["i", "k"], None)


def full() -> Driver:
    """A pool on all chips of which a job runs."""
    pool = Driver("a")
    pool.submit("runs", plan(*"aaaa"), priority="high")
    pool.obey()
    pool.obey()
    return pool


def wait(pool: Driver, job: str, **more: object) -> None:
    """Submit a job that waits for all chips."""
    pool.submit(job, **more)  # type: ignore[arg-type]
    pool.answer(job)
    pool.answer(job, plan(*"aaaa"))


def test_the_queue_is_listed_in_its_order() -> None:
    """First to start first, from behind a job on."""
    pool = full()
    for job, priority in (("low", "low"), ("high", "high"), ("middle", "middle")):
        wait(pool, job, priority=priority)
    assert [view.id for view in pool.coordinator.list_waiting()] == ["high", "middle", "low"]
    assert [view.id for view in pool.coordinator.list_waiting(after="high", limit=1)] == ["middle"]
    views = pool.coordinator.list_waiting()
    assert [(view.place, view.plans) for view in views] == [(1, None), (2, None), (3, None)], "a list has no plans"


def test_a_part_is_shown_with_its_owner_and_both_its_states() -> None:
    """What is wanted, and what the site says."""
    pool = started("a", "b", "b")
    pool.report("b", seen("j", 1, "failed", "no text").model_copy(update={"fault": "own"}))
    assert pool.coordinator.job_view("j").parts == (
        PartView(cluster="a", owner="owner-a", ranks=(0,), desired="released", observed="running"),
        PartView(cluster="b", owner="owner-b", ranks=(1, 2), desired="released", observed="failed", detail="no text"),
    )


def enrolled() -> Driver:
    """`j` runs at `a`, whose agent is enrolled and whose workers have a lease."""
    pool = Driver("a", "b")
    pool.run_lease_s = 30.0
    pool.addresses["a"] = PeerAddress(host="h", port=1)
    pool.identities["a"] = identity("own", 3, 5)
    pool.report("a")
    pool.submit("j", plan("a"))
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool


def test_a_cluster_is_shown_with_its_agent_and_what_may_run_there() -> None:
    """Its free chips, whether it is in contact, when it reported, and which jobs it has."""
    pool = enrolled()
    first, other = pool.coordinator.pool_view().clusters
    known = pool.coordinator.state.clusters["a"].agent
    assert known is not None
    assert first.agent == AgentView(
        id=known.id[:12], enrolled_s=100.0, session=3, session_s=100.0, host="h", gone=False, enrolling=False,
        run_lease_s=30.0,
    )  # fmt: skip
    assert (first.connected, first.free_chips, first.jobs, first.last_report_s) == (True, {"g": 3}, ("j",), 100.0)
    assert (first.released_at_s, first.awaited, first.unknown_parts, first.queue) == (None, False, (), ())
    assert (other.agent, other.jobs, other.free_chips) == (None, (), {"g": 4})


def test_a_lost_cluster_is_shown_with_the_end_of_its_workers() -> None:
    """Its lease and the margin after its last report; the word of the operator needs none."""
    pool = enrolled()
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    rules = pool.coordinator.state.config
    (lost, _) = pool.coordinator.pool_view().clusters
    assert (lost.connected, lost.released_at_s) == (False, 100.0 + rules.lease_wait_s(30.0))
    assert pool.reason("j").endswith("a is not connected")
    pool.cancel("j")
    wait_s = rules.lease_wait_s(30.0)
    assert pool.reason("j").endswith(
        f"a is not connected; its workers count as ended after {wait_s:g} s without contact"
    )
    pool.tell(SiteGone(now_s=pool.now_s, cluster="a", by="root"))
    (gone, _) = pool.coordinator.pool_view().clusters
    assert gone.agent is not None
    assert (gone.agent.gone, gone.released_at_s, gone.jobs) == (True, None, ())
    assert pool.state("j") == "cancelled"
    pool.tell(SiteEnrolling(now_s=pool.now_s, cluster="a", by="owner"))
    (agreed, _) = pool.coordinator.pool_view().clusters
    assert agreed.agent is not None
    assert agreed.agent.enrolling


def test_workers_without_a_lease_count_as_ended_at_no_time() -> None:
    """Of a lost site whose agent gives them none."""
    pool = started("a")
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    lost = pool.coordinator.pool_view().clusters[0]
    assert (lost.connected, lost.jobs, lost.released_at_s) == (False, ("j",), None)


def test_jobs_out_of_order_in_a_sites_queue_are_counted() -> None:
    """Of those that the server ordered; local jobs between them are the site's business."""
    pool = full()
    for job in ("p", "q", "r"):
        wait(pool, job)
    assert pool.coordinator.site_queue("a") == ("p", "q", "r")
    entries = {job: QueueEntry(job=job, attempt=1) for job in "pqr"}
    own = [pool.done("a", order) for order in pool.coordinator.orders("a")]
    local = QueueEntry(job="x")

    def misplaced(*queue: QueueEntry) -> int:
        pool.report("a", *own, queue=queue)
        return pool.coordinator.pool_view().clusters[0].misplaced

    assert misplaced(entries["p"], local, entries["q"], entries["r"]) == 0
    assert misplaced(entries["q"], local, entries["p"], entries["r"]) == 2
    assert misplaced(entries["r"], entries["p"], entries["q"]) == 3


def test_releases_come_before_other_orders_and_what_is_unknown_is_released() -> None:
    """An old attempt, a deleted job; what the site has released needs no order."""
    pool = started("a")
    running = [pool.done("a", order) for order in pool.coordinator.orders("a")]
    pool.report("a", *running, seen("old", 1, "running"), seen("gone", 2, "released"))
    found = [(order.job, order.attempt, order.desired) for order in pool.coordinator.orders("a")]
    assert found == [("old", 1, "released"), ("j", 1, "running")]
    assert pool.coordinator.orders("nowhere") == ()
