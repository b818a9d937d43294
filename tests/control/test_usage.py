"""Chip-hours that owners give and users take: what counts, from when to when, and who sees it."""

from __future__ import annotations

import pytest

from isthmus.control.algorithms.chip_use import ChipUse
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.usage_view import usage_view
from isthmus.control.service.auth import token_digest
from isthmus.control.state.events import AgentLost, RunLeaseEnded
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.views.usage_views import UsageView
from tests.control.driver import Driver, seen
from tests.control.samples import plan
from tests.control.serving import EAST
from tests.control.test_server_api import Server

HOUR_S = 3600.0


def used(pool: Driver) -> dict[tuple[str, str], float]:
    """Chip-hours by cluster and user, of those that are not zero."""
    rows = usage_view(pool.coordinator.state, pool.now_s).rows
    return {(row.cluster, row.user): row.chip_hours for row in rows if row.chip_hours}


def running(*sites: str, user: str = "ann") -> Driver:
    """A pool of `a` and `b` with 4 chips each, on which job `j` of a user trains with one chip at each of `sites`."""
    pool = Driver("a", "b")
    pool.submit("j", plan(*sites), user=user)
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool


def release(pool: Driver, site: str, job: str = "j", attempt: int = 1) -> None:
    """Let a site report the release of a part."""
    pool.report(site, seen(job, attempt, "released"))


def test_chips_count_from_their_allocation_until_their_site_has_released_them() -> None:
    """A site that takes an hour longer to release its part has given an hour more."""
    pool = running("a", "b")
    pool.now_s += 2 * HOUR_S
    pool.cancel("j")
    release(pool, "a")
    pool.now_s += HOUR_S
    release(pool, "b")
    pool.now_s += HOUR_S
    assert used(pool) == {("a", "ann"): 2.0, ("b", "ann"): 3.0}


def test_a_waiting_job_and_an_idle_site_count_nothing() -> None:
    """Only what is held is given; planning and waiting are free."""
    pool = running("a")
    pool.submit("w", user="bob")
    pool.now_s += HOUR_S
    assert used(pool) == {("a", "ann"): 1.0}


def test_what_was_given_in_an_attempt_that_failed_counts_too() -> None:
    """Both attempts held chips of the owner."""
    pool = running("a")
    pool.now_s += HOUR_S
    pool.report("a", seen("j", 1, "failed", "out of memory"))
    pool.obey()
    pool.wait(8.0)
    pool.obey()
    pool.obey()
    assert (pool.state("j"), pool.coordinator.state.jobs["j"].attempt) == ("running", 2)
    waited_s = 8.0
    pool.now_s += HOUR_S
    assert used(pool) == {("a", "ann"): pytest.approx(2.0, abs=waited_s / HOUR_S)}


def test_chips_that_a_job_takes_from_another_count_once() -> None:
    """Up to its release the victim has them, then the job that preempts it."""
    pool = Driver("a", chips=1)
    pool.submit("low", plan("a"), user="ann", preemptible=True, priority="low")
    pool.obey()
    pool.obey()
    pool.submit("high", plan("a"), user="bob", priority="high")
    pool.now_s += HOUR_S
    assert pool.preempt("high") == ("a/low",)
    pool.now_s += HOUR_S
    assert used(pool) == {("a", "ann"): 2.0}
    for _ in range(6):
        pool.obey()
    assert pool.state("high") == "running"
    pool.now_s += HOUR_S
    assert used(pool) == {("a", "ann"): 2.0, ("a", "bob"): 1.0}


def test_the_chips_of_a_lost_site_count_until_their_lease_has_ended() -> None:
    """Its workers may compute as long."""
    pool = Driver("a", "b")
    pool.run_lease_s = 60.0
    pool.report("a")
    pool.submit("j", plan("a"), user="ann")
    pool.obey()
    pool.obey()
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.now_s += HOUR_S
    pool.tell(RunLeaseEnded(now_s=pool.now_s, cluster="a"))
    pool.now_s += HOUR_S
    assert used(pool) == {("a", "ann"): 1.0}


def test_a_clock_that_is_set_back_takes_nothing_away_and_counts_nothing_twice() -> None:
    """Amounts never fall; an hour that the clock repeats is not counted from the first pass."""
    use = ChipUse()
    use.advance(1000.0)
    use.hold(("o", "a", "ann"), 2)
    use.advance(1000.0 + HOUR_S)
    use.advance(1000.0)
    assert [chip_s for _, chip_s, _ in use.amounts(0.0)] == [2 * HOUR_S]
    use.advance(1000.0 + HOUR_S)
    use.hold(("o", "a", "ann"), -2)
    use.advance(1000.0 + 9 * HOUR_S)
    assert list(use.amounts(1e9)) == [(("o", "a", "ann"), 4 * HOUR_S, 0)]
    assert use.since_s == 1000.0


def test_nothing_is_counted_before_the_first_event() -> None:
    """The time since the epoch is no usage."""
    use = ChipUse()
    use.hold(("o", "a", "ann"), 2)
    use.advance(1e9)
    assert [chip_s for _, chip_s, _ in use.amounts(1e9 + 1)] == [2.0]
    assert ChipUse().since_s is None


def test_a_replay_and_a_snapshot_find_the_same_usage() -> None:
    """It follows from the log alone."""
    pool = running("a", "b")
    pool.now_s += HOUR_S
    pool.cancel("j")
    release(pool, "a")
    before = pool.coordinator.state.chip_use
    assert before.held[pool.clusters["a"].owner, "a", "ann"].used_chip_s == HOUR_S
    assert Coordinator.replay(pool.log).state.chip_use == before
    assert restore_state(serialize_state(pool.coordinator.state)).chip_use == before


def test_a_part_of_a_state_of_an_earlier_version_counts_from_nothing_to_nothing() -> None:
    """Its chips were not counted when it got them, and are not taken off when it releases them."""
    pool = running("a")
    part = pool.coordinator.state.jobs["j"].parts[1, "a"]
    part.used_chips, part.used_owner = 0, ""
    pool.coordinator.state.chip_use = ChipUse()
    pool.cancel("j")
    pool.now_s += HOUR_S
    release(pool, "a")
    assert used(pool) == {}
    assert [one.num_chips for one in pool.coordinator.state.chip_use.held.values()] == []


def test_a_site_that_changes_hands_has_given_as_its_former_owner() -> None:
    """What the part holds goes to the owner of whom it got its chips; the next part's to the new one."""
    pool = running("a")
    former = pool.clusters["a"].owner
    pool.clusters["a"] = pool.clusters["a"].model_copy(update={"owner": "new"})
    pool.report("a", seen("j", 1, "running"))
    assert pool.coordinator.state.clusters["a"].cluster.owner == "new"
    pool.now_s += HOUR_S
    pool.cancel("j")
    release(pool, "a")
    view = usage_view(pool.coordinator.state, pool.now_s)
    assert view.given == {former: 1.0}


def test_the_sums_are_those_of_the_rows() -> None:
    """By owner and by user; of one owner, cluster or user, only its rows."""
    pool = running("a", "b")
    pool.submit("k", plan("b"), user="bob")
    pool.now_s += HOUR_S
    state, owners = pool.coordinator.state, {name: pool.clusters[name].owner for name in ("a", "b")}
    view = usage_view(state, pool.now_s)
    assert (view.since_s, view.now_s) == (100.0, pool.now_s)
    assert view.taken == {"ann": 2.0, "bob": 1.0}
    assert view.given == {owners["a"]: 1.0, owners["b"]: 2.0}
    assert {(row.user, row.num_chips) for row in usage_view(state, pool.now_s, cluster="b").rows} == {
        ("ann", 1),
        ("bob", 1),
    }
    assert usage_view(state, pool.now_s, owner=owners["a"]).taken == {"ann": 1.0}
    assert usage_view(state, pool.now_s, user="bob").given == {owners["b"]: 1.0}


def test_each_caller_sees_its_own(server: Server) -> None:
    """An owner what its clusters gave, a user what it took, an operator all; the key of a site only that site."""
    server.committed(name="one")
    server.store.put_token(
        StoredToken(role="owner", name="owner-east", digest=token_digest("key"), created_s=0, site="elsewhere")
    )
    server.now_s += HOUR_S

    def ask(token: str) -> UsageView:
        answer = server.call("GET", "/v1/usage", token=token)
        assert answer.status_code == 200
        return UsageView.model_validate(answer.json())

    everything = ask("root")
    assert set(everything.given) == {"owner-east", "owner-west"}
    assert everything.taken == {"ann": pytest.approx(sum(everything.given.values()))}
    assert everything.taken["ann"] > 0
    assert ask("ann").rows == everything.rows
    assert ask("owner-east").rows == tuple(row for row in everything.rows if row.cluster == EAST.name)
    assert ask("bob").rows == ask("key").rows == ()
