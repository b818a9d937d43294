"""The rules of failure, restart and the user's verbs: each test's first line is the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    ForgetJob,
    JobDeleted,
    JobSubmitted,
    PlanningFailed,
    PlansMade,
)
from isthmus.control.state.invariants import violations
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.messages.agent_messages import ObservedPart
from isthmus.core.plan import PlanSet
from tests.control.driver import RULES, Driver, seen, started
from tests.control.samples import plan, submission

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
    job = pool.coordinator.job_view("j")
    assert (job.attempt, job.restarts) == (2, 1)
    assert job.reason == "restart 1 of 3: b failed its part (ranks 1): rank 1 was ended by signal 9"


def test_no_attempt_overlaps_the_one_before() -> None:
    """Until every site has confirmed the release, no site gets the next attempt, even if one is away."""
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
    assert pool.reason("j") == "a failed its part (ranks 0): rank 0 ended with status 1; restarts used: 1 of 1"


def test_a_worker_that_does_not_check_in_fails_the_attempt() -> None:
    """Starting is bounded too; the reason names the ranks that are missing."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.obey()
    pool.obey("a")
    pool.wait(20)
    assert pool.state("j") == "stopping"
    assert pool.reason("j") == "restart 1 of 3: ranks 1 at b did not check in within 20 s"


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
    assert "b failed its part (ranks 1): the agent restarted without the part" in pool.reason("j")
    assert pool.orders("b") == {("j", 1): "released"}


def test_a_new_agent_that_has_its_part_changes_nothing() -> None:
    """An agent that was killed and knows its parts again goes on."""
    pool = started("a", "b")
    pool.report("b", pool.done("b", pool.coordinator.orders("b")[0]), incarnation="2")
    assert pool.state("j") == "running"


def test_silence_proves_nothing() -> None:
    """A late report from before a part existed neither fails nor releases it.

    1. the agent reports (without the part), and the report is delayed; 2. the part prepares and runs; 3. it
    is ordered to release; 4. the late report arrives: the part counts as alive until its agent says `released`.
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
    assert (pool.state("j"), pool.coordinator.state.jobs["j"].state_after_stop) == ("stopping", "succeeded")


@pytest.mark.parametrize("state", ["running", "succeeded"])
def test_a_part_that_runs_untold_has_failed(state: str) -> None:
    """A site that claims to run what was never committed is not believed."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, state))
    assert pool.state("j") == "stopping"
    assert f"'{state}' for a part that was never ordered to run" in pool.reason("j")


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
    with pytest.raises(ConflictError, match="job j has already succeeded"):
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
    assert pool.coordinator.job_id_of_key("u", "k") is None


def test_the_same_key_is_the_same_job() -> None:
    """A repeated submission changes nothing; other content is a conflict; users do not share keys."""
    pool = Driver("a")
    pool.submit("j1", key="k")
    again = JobSubmitted(now_s=1, job_id="j2", user="u", submission=submission("j1", key="k"))
    assert not pool.coordinator.admit(again)
    assert pool.coordinator.job_id_of_key("u", "k") == "j1"
    with pytest.raises(ConflictError, match="same key"):
        pool.coordinator.admit(again.model_copy(update={"submission": submission("other", key="k")}))
    assert pool.coordinator.admit(again.model_copy(update={"user": "v"}))
    pool.submit("j3")
    pool.submit("j4")
    assert [job.id for job in pool.coordinator.list_jobs("u")] == ["j1", "j3", "j4"]


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


# Where the cause lies -------------------------------------------------------------------------------


def failed(attempt: int, fault: str, detail: str, state: str = "failed") -> ObservedPart:
    return ObservedPart(job="j", attempt=attempt, state=state, fault=fault, detail=detail)


BAD_DATA = "rank 1 ended with status 2: error: DataError: no text"
LOST_PEER = "rank 0 ended with status 9: error: PeerError: rank 1 was lost"


def test_what_cannot_mend_itself_ends_the_job_at_once() -> None:
    """A failure that another attempt would repeat uses no restart; the reason has site, rank and words."""
    pool = started("a", "b")
    pool.report("b", failed(1, "permanent", BAD_DATA))
    assert pool.state("j") == "stopping"
    pool.obey("a")
    pool.report("b", failed(1, "permanent", BAD_DATA, "released"))
    job = pool.coordinator.job_view("j")
    assert (job.state, job.attempt, job.restarts) == ("failed", 1, 0)
    assert job.reason == f"b failed its part (ranks 1): {BAD_DATA}; another attempt would fail in the same way"


@pytest.mark.parametrize("state", ["failed", "released"])
def test_who_lost_a_peer_does_not_hide_why(state: str) -> None:
    """The site that only lost its peer reports first; the root cause, told later, decides."""
    pool = started("a", "b")
    pool.report("a", failed(1, "peer", LOST_PEER))
    assert pool.reason("j").endswith(f"a failed its part (ranks 0): {LOST_PEER}")
    pool.report("b", failed(1, "permanent", BAD_DATA, state))
    assert BAD_DATA in pool.reason("j")
    pool.report("b", failed(1, "permanent", BAD_DATA, "released"))
    pool.report("a", failed(1, "peer", LOST_PEER, "released"))
    job = pool.coordinator.job_view("j")
    assert (job.state, job.restarts) == ("failed", 0)
    assert BAD_DATA in job.reason


def test_a_site_may_find_out_more_about_its_failure() -> None:
    """What a site tells later of a part that it had reported failed counts, if it explains more."""
    pool = started("a", "b")
    pool.report("a", failed(1, "peer", LOST_PEER))
    pool.report("a", failed(1, "own", "rank 0 ended with status 1: out of memory"))
    assert pool.reason("j").endswith("rank 0 ended with status 1: out of memory")
    pool.report("a", failed(1, "peer", LOST_PEER, "released"))
    pool.obey("b")
    job = pool.coordinator.job_view("j")
    assert (job.state, job.attempt, job.restarts) == ("preparing", 2, 1)
    assert job.reason.endswith("rank 0 ended with status 1: out of memory")


def test_a_cancelled_job_stays_cancelled_whatever_its_sites_say() -> None:
    """A failure learnt of after the user cancelled does not change how the job ends."""
    pool = started("a", "b")
    pool.report("a", failed(1, "peer", LOST_PEER))
    pool.cancel("j")
    pool.report("b", failed(1, "permanent", BAD_DATA, "released"))
    pool.obey("a")
    assert (pool.state("j"), pool.reason("j")) == ("cancelled", "cancelled by the user")


# The inventory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [("other",), ("other", "g"), ()])
def test_a_site_may_come_back_with_other_node_groups(groups: tuple[str, ...]) -> None:
    """What is promised on a group that is gone is taken back; nothing else is offered in its stead."""
    pool = started("a", "b")
    here = pool.clusters["a"]
    renamed = [here.node_groups[0].model_copy(update={"name": name}) for name in groups]
    pool.clusters["a"] = here.model_copy(update={"node_groups": tuple(renamed)})
    report = AgentReported(
        now_s=pool.now_s,
        cluster=pool.clusters["a"],
        incarnation="2",
        free_chips=dict.fromkeys(groups, 4),
        parts=(pool.done("a", pool.coordinator.orders("a")[0]),),
    )
    pool.tell(report)
    assert pool.state("j") == ("running" if "g" in groups else "stopping")
    assert set(pool.coordinator.state.free_chips()["a"]) == set(groups)
    assert violations(Coordinator.replay(pool.log, RULES).state, pool.now_s, grace_s=1e9) == []


# Clocks ---------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_delays_nothing() -> None:
    """What was due before is due, not an hour late; an agent that still reports is connected again at once."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.report("a", seen("j", 1, "refused", "busy"))
    pool.report("a", seen("j", 1, "released"))
    pool.report("b", seen("j", 1, "released"))
    assert pool.state("j") == "waiting"
    pool.now_s -= 3600
    due = pool.coordinator.due_events(pool.now_s)
    assert {event.kind for event in due} == {"agent-lost", "deadline-passed"}
    for event in due:
        pool.tell(event)
    pool.obey()
    assert pool.coordinator.pool_view().clusters[0].connected
    assert pool.coordinator.due_events(pool.now_s) == ()


@given(st.floats(1.7e9, 2.2e9))
def test_no_deadline_has_passed_when_it_is_set(now_s: float) -> None:
    """Whatever the time of day is rounded to, what was just begun is not yet due."""
    pool = Driver("a")
    pool.now_s = now_s
    pool.report("a", incarnation="2")
    pool.submit("j", plan("a"))
    assert (pool.state("j"), pool.coordinator.due_events(now_s)) == ("preparing", ())


def test_a_clock_that_is_set_forward_does_not_stop_what_runs() -> None:
    """Agents look lost until their next report; a running job runs on."""
    pool = started("a", "b")
    pool.now_s += 3600
    for event in pool.coordinator.due_events(pool.now_s):
        pool.tell(event)
    assert pool.state("j") == "running"
    pool.obey()
    assert (pool.state("j"), pool.reason("j")) == ("running", "")
