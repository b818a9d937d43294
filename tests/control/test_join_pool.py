"""A site joins by a code: once, within its terms; its agent's keys follow each other without a gap."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.state.events import (
    AgentLost,
    InvitationRevoked,
    PreemptionAgreed,
    ProbationEnded,
    SiteAccepted,
    SiteCordoned,
    SiteDraining,
    SiteInvited,
    SiteJoined,
    SiteLeft,
    VictimNamed,
)
from isthmus.core.errors import AuthError, ConflictError, NotFoundError
from isthmus.core.messages.agent_messages import PeerAddress
from tests.control.driver import Driver, identity, seen
from tests.control.joining import NORTH, actions, audit, digest, invite, join, renew, sync
from tests.control.samples import plan
from tests.control.serving import cluster
from tests.control.test_server_api import Server


def test_a_cluster_joins_by_a_code_and_its_agent_reports_with_its_own_key(server: Server) -> None:
    """Steps: the operator invites; the site joins; it is away until its agent reports with the key it has drawn."""
    answer = join(server, invite(server))
    assert (answer.status_code, answer.json()["site"], answer.json()["probation"]) == (200, "north", True)
    (view,) = server.shell.pool().clusters
    assert (view.cluster, view.connected, view.duty.state) == (NORTH, False, "open")
    assert sync(server, "key-1").status_code == 200
    (view,) = server.shell.pool().clusters
    assert view.connected
    assert view.duty.probation is not None
    assert {"site-invited", "site-joined", "site-registered"} <= set(actions(server))
    assert "key-1" not in str(audit(server))


def test_a_join_whose_answer_was_lost_is_repeated(server: Server) -> None:
    """The same code with the same key is the same join; nothing is done or recorded twice."""
    code = invite(server)
    first, again = join(server, code), join(server, code)
    assert (again.status_code, again.json()) == (200, first.json())
    assert actions(server).count("site-joined") == 1


def test_the_operator_lists_invitations_without_their_codes_and_revokes_them(server: Server) -> None:
    """Open, used, revoked and expired ones; a revoked one joins nothing."""
    used, revoked, expired, unused = (invite(server) for _ in range(4))
    join(server, used)
    listed = server.call("GET", "/v1/invitations", token="root")
    assert not any(code in listed.text for code in (used, revoked, expired, unused))
    server.call("POST", f"/v1/tokens/{listed.json()[1]['id']}/revoke", {}, token="root")
    assert join(server, revoked, "key-2", cluster("south", "owner-east")).status_code == 401
    states = [one["state"] for one in server.call("GET", "/v1/invitations", token="root").json()]
    assert states == ["used", "revoked", "open", "open"]
    server.now_s += 3601
    assert join(server, expired, "key-3", cluster("south", "owner-east")).status_code == 401
    states = [one["state"] for one in server.call("GET", "/v1/invitations", token="root").json()]
    assert states == ["used", "revoked", "expired", "expired"]


def test_a_new_key_ends_the_old_one_when_it_is_used(server: Server) -> None:
    """Steps: the next key is accepted; both count; the next one is used; the old one ends."""
    join(server, invite(server))
    sync(server, "key-1")
    assert renew(server, "key-1", "key-2").status_code == 200
    assert sync(server, "key-1").status_code == 200, "not used yet"
    assert sync(server, "key-2").status_code == 200
    assert sync(server, "key-1").status_code == 401
    assert renew(server, "key-2", "key-3").status_code == 200


def test_a_site_that_has_lost_its_key_joins_again_under_its_name(server: Server) -> None:
    """An invitation for this cluster ends the lost key; any other one does not."""
    join(server, invite(server))
    sync(server, "key-1")
    assert join(server, invite(server), "key-2").status_code == 409
    assert sync(server, "key-1").status_code == 200
    assert join(server, invite(server, cluster="north"), "key-2").status_code == 200
    assert sync(server, "key-1").status_code == 401
    assert sync(server, "key-2").status_code == 200


def test_after_leave_the_tokens_and_invitations_of_the_site_are_gone(server: Server) -> None:
    """Its key counts no more, its code cannot be used again, and the pool is as before."""
    before = server.shell.pool()
    code = invite(server)
    join(server, code)
    sync(server, "key-1")
    view = server.call("POST", "/v1/sites/north/leave", {}, token="key-1").json()
    assert {"site", "key", "invitation"} <= {one["kind"] for one in view["removed"]}
    assert sync(server, "key-1").json()["leaves"]
    assert server.call("POST", "/v1/agents/north/left", {}, token="key-1").json()["gone"]
    assert sync(server, "key-1").status_code == 401
    assert join(server, code, "key-2").status_code == 403
    assert server.shell.pool() == before
    assert json.loads(server.call("GET", "/v1/invitations", token="root").text) == []
    valid = [one for one in server.store.tokens() if one.is_valid(server.now_s) and one.site]
    assert valid == []


# Probation: pure rules of the coordinator.


def newcomer(site: str = "n", *others: str) -> Driver:
    """A pool that cluster `site` has joined by a code, on probation, beside `others`."""
    pool, here = Driver(*others), Driver(site).clusters[site]
    pool.tell(SiteInvited(now_s=pool.now_s, id="t-1", owner=here.owner, by="root", expires_s=pool.now_s + 60))
    pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=here, key=digest("k")))
    pool.clusters[site] = here
    pool.report(site)
    return pool


def on_probation(pool: Driver, site: str = "n") -> bool:
    return pool.coordinator.state.clusters[site].probation is not None


def train(pool: Driver, job: str, site: str = "n") -> None:
    """A job trains to its end at the site."""
    pool.submit(job, plan(site))
    pool.obey(site)
    pool.obey(site)
    pool.report(site, seen(job, 1, "succeeded"))
    pool.obey(site)
    assert pool.state(job) == "succeeded"


def test_a_site_on_probation_has_one_job_at_a_time() -> None:
    """While one runs, its other chips are not free; then the next one starts."""
    pool = newcomer()
    pool.submit("j", plan("n"))
    pool.submit("k", plan("n"))
    pool.obey("n")
    pool.obey("n")
    assert (pool.state("j"), pool.state("k")) == ("running", "waiting")
    pool.report("n", seen("j", 1, "succeeded"))
    pool.obey("n")
    pool.wait(1)
    assert pool.state("k") == "preparing"


@pytest.mark.attack
def test_a_job_of_high_priority_is_neither_planned_nor_started_on_probation() -> None:
    """The planner is not offered the site's chips; a plan that arrives nevertheless waits and says why."""
    pool = newcomer("n", "a")
    pool.submit("j", priority="high")
    assert set(pool.asked["j"].free_chips) == {"a"}
    pool.answer("j", plan("n"))
    assert pool.state("j") == "waiting"
    assert "n is on probation and takes no job of priority high" in pool.reason("j")
    pool.tell(SiteAccepted(now_s=pool.now_s, cluster="n", by="root"))
    assert pool.state("j") == "preparing"


def test_a_site_with_storage_of_its_own_gets_no_sole_copy_of_checkpoints() -> None:
    """A job without copies elsewhere waits; with them it starts."""
    pool = newcomer()
    record = pool.coordinator.state.clusters["n"]
    record.free_storage_bytes = 10**12
    pool.submit("j", plan("n"), checkpoints={"copies": 0})
    assert "whose checkpoints have no copies elsewhere" in pool.reason("j")
    pool.submit("k", plan("n"), checkpoints={"copies": 1})
    assert pool.state("k") == "preparing"


def test_probation_ends_after_three_jobs_that_have_trained_to_their_end() -> None:
    """A job that is cancelled or fails does not count."""
    pool = newcomer()
    pool.submit("x", plan("n"), restarts=0)
    pool.obey("n")
    pool.obey("n")
    pool.report("n", seen("x", 1, "failed"))
    pool.obey("n")
    for job in ("j", "k"):
        train(pool, job)
    assert on_probation(pool)
    train(pool, "l")
    assert not on_probation(pool)


def test_probation_ends_after_a_day_in_contact_or_by_the_operator() -> None:
    """A site that is away stays on probation; an act for an unknown one is an error."""
    pool = newcomer()
    pool.wait(24 * 3600 - 1)
    assert on_probation(pool)
    pool.coordinator.state.clusters["n"].connected = False
    pool.tell(ProbationEnded(now_s=pool.now_s, cluster="n"))
    pool.wait(2)
    assert on_probation(pool)
    pool.report("n")
    pool.wait(1)
    assert not on_probation(pool)
    other = newcomer()
    other.tell(SiteAccepted(now_s=other.now_s, cluster="n", by="root"))
    assert not on_probation(other)
    with pytest.raises(NotFoundError, match="no cluster 'x' has joined"):
        other.tell(SiteAccepted(now_s=other.now_s, cluster="x", by="root"))


ACTS = ("train", "fail", "peers", "cordon", "open", "drain", "accept", "lose", "wait", "copies")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(acts=st.lists(st.sampled_from(ACTS), max_size=8))
def test_whatever_a_site_has_done_nothing_of_it_is_left_after_it_has_left(acts: list[str]) -> None:
    """The state before the join and after the leave is the same, but for ended jobs and what users have used."""
    pool, here = Driver("a"), Driver("n").clusters["n"]
    pool.addresses["a"] = PeerAddress(host="h", port=1)
    pool.report("a")
    before = copy.deepcopy(pool.coordinator.state)
    pool.tell(SiteInvited(now_s=pool.now_s, id="t-1", owner=here.owner, by="root", expires_s=pool.now_s + 60))
    pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=here, key=digest("k")))
    pool.clusters["n"], pool.identities["n"] = here, identity("own")
    pool.report("n")
    for number, act in enumerate(acts):
        act_on(pool, act, f"j{number}")
    for job in pool.coordinator.list_jobs():
        with contextlib.suppress(ConflictError):  # it has ended, or ends
            pool.cancel(job.id)
    until_s = pool.now_s + 10
    pool.tell(SiteDraining(now_s=pool.now_s, cluster="n", by="x", role="owner", deadline_s=until_s, leaves=True))
    for _ in range(3):
        pool.obey("n")
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="n"))
    after = pool.coordinator.state
    pool.report("a")
    before.clusters["a"].last_report_s = after.clusters["a"].last_report_s
    before.clusters["a"].last_contact_s = after.clusters["a"].last_contact_s
    assert after.clusters == before.clusters
    assert (after.invitations, after.links, after.allocated_kbps) == (before.invitations, {}, {})
    assert (after.live_jobs, after.indexes.reserved) == ({}, {})


def act_on(pool: Driver, act: str, job: str) -> None:
    """One thing that happens at site `n`, or is done to it."""
    told, now_s = pool.tell, pool.now_s
    if act in ("train", "fail"):
        pool.submit(job, plan("n"), restarts=0)
        pool.obey("n")
        pool.obey("n")
        if pool.state(job) == "running":
            pool.report("n", seen(job, 1, "succeeded" if act == "train" else "failed"))
    elif act == "peers":
        pool.addresses["n"] = PeerAddress(host="h", port=2)
        pool.report("n")
    elif act in ("cordon", "open"):
        told(SiteCordoned(now_s=now_s, cluster="n", by="x", role="admin", cordoned=act == "cordon"))
    elif act == "drain":
        told(SiteDraining(now_s=now_s, cluster="n", by="x", role="owner", deadline_s=now_s + 5))
    elif act == "accept":
        told(SiteAccepted(now_s=now_s, cluster="n", by="root"))
    elif act == "lose":
        told(AgentLost(now_s=now_s, cluster="n"))
    elif act == "copies":
        pool.copies["n"] = ()
        pool.report("n")
    else:
        pool.wait(3)


def test_a_preemption_on_probation_is_refused_with_every_sites_reason() -> None:
    """A job of high priority takes chips at none of them, whoever holds them."""
    pool = newcomer("n", "a")
    pool.submit("low", plan("n"), priority="low", preemptible=True)
    pool.obey("n")
    pool.obey("n")
    assert pool.state("low") == "running"
    pool.submit("j", priority="high")
    pool.answer("j", plan("n"))
    victims = (VictimNamed(cluster="n", job="low", attempt=1),)
    with pytest.raises(ConflictError, match=r"cannot start: n is on probation and takes no job of priority high$"):
        pool.tell(PreemptionAgreed(now_s=pool.now_s, job_id="j", victims=victims))
    assert pool.state("low") == "running"


def test_an_invitation_joins_the_site_that_it_names() -> None:
    """Neither another cluster nor one of another owner; without a probation if the operator knows it."""
    pool, here = Driver(), Driver("n").clusters["n"]
    pool.tell(
        SiteInvited(
            now_s=pool.now_s, id="t-1", owner=here.owner, by="root", expires_s=pool.now_s + 60, cluster="n",
            probation=False,
        )
    )  # fmt: skip
    other = here.model_copy(update={"name": "m"})
    with pytest.raises(AuthError, match="for cluster 'n', not for 'm'") as caught:
        pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=other, key=digest("k")))
    assert caught.value.hint.startswith("write this name into the cluster's file")
    foreign = here.model_copy(update={"owner": "eve"})
    with pytest.raises(AuthError, match=f"for a cluster of owner '{here.owner}'"):
        pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=foreign, key=digest("k")))
    pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=here, key=digest("k")))
    assert not on_probation(pool)


def test_an_invitation_that_has_ended_joins_nothing() -> None:
    """At its last moment, after it was revoked, and with another key after it was used."""
    for ending in ("expired", "revoked", "used"):
        pool, here = Driver(), Driver("n").clusters["n"]
        pool.tell(SiteInvited(now_s=pool.now_s, id="t-1", owner=here.owner, by="root", expires_s=pool.now_s + 60))
        if ending == "expired":
            pool.now_s += 60
        elif ending == "revoked":
            pool.tell(InvitationRevoked(now_s=pool.now_s, id="t-1"))
            assert pool.coordinator.state.invitations["t-1"].revoked
        else:
            pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=here, key=digest("k")))
        num_events = len(pool.log)
        pool.tell(InvitationRevoked(now_s=pool.now_s, id="t-1"))
        assert len(pool.log) == num_events, f"an invitation that is {ending} is not open, so nothing is taken back"
        with pytest.raises((AuthError, ConflictError), match=r"the invitation has ended|has joined"):
            pool.tell(SiteJoined(now_s=pool.now_s, invitation="t-1", cluster=here, key=digest("other")))
