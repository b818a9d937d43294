"""Guaranteed chips: lent while they are not used, taken back whole jobs at a time, checkpoint first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import AccountsSet, PoolSet
from isthmus.control.state.queue_order import queue_head
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.owner.accounts import Accounts
from tests.control.driver import RULES, Driver
from tests.control.samples import plan


def pool_with(*projects: tuple[str, int], chips: int = 4, **more: Any) -> Driver:
    """A pool of `a` with projects of guaranteed chips, each with one member of its name in capitals."""
    pool = Driver("a", chips=chips)
    rows = [{"name": name, "members": [name.upper()], "guaranteed_chips": number} for name, number in projects]
    given = Accounts.model_validate({"projects": rows} | more)
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=given))
    return pool


def start(pool: Driver, job: str, user: str, chips: int = 1, **more: Any) -> None:
    pool.submit(job, plan(*"a" * chips), user=user, **more)
    pool.obey()
    pool.obey()


def settle(pool: Driver, turns: int = 12) -> None:
    """Let all sites obey until nothing changes any more, and the planner answer as before."""
    for _ in range(turns):
        for job in list(pool.asked):
            pool.answer(job, plan(*"a" * int(job.rpartition("-")[2])) if "-" in job else plan("a"))
        pool.obey()
        pool.wait(1.0)


def states(pool: Driver) -> dict[str, str]:
    return {job.id: job.state for job in pool.coordinator.list_jobs()}


def test_a_project_takes_back_what_it_is_guaranteed_with_a_checkpoint() -> None:
    """X has borrowed all four chips; one of its jobs, of the same priority, is saved and makes way for Y's."""
    pool = pool_with(("x", 2), ("y", 2))
    for number in range(4):
        start(pool, f"x{number}", "X")
    pool.submit("y0", plan("a"), user="Y")
    assert states(pool) == {"x0": "running", "x1": "running", "x2": "running", "x3": "running", "y0": "preempting"}
    settle(pool)
    found = states(pool)
    assert found["y0"] == "running"
    (victim,) = [job for job in pool.coordinator.state.jobs.values() if job.state != "running"]
    assert victim.project == "x"
    assert "project y takes back chips that it is guaranteed, for job y0, checkpoint at step 7" in (
        victim.last_restart_reason
    )


def test_a_project_within_its_own_guarantee_lends_nothing() -> None:
    """Y has its two chips; its third job waits, and a fourth of X, which has its own two, as well."""
    pool = pool_with(("x", 2), ("y", 2))
    for job, user in (("x0", "X"), ("x1", "X"), ("y0", "Y"), ("y1", "Y"), ("y2", "Y"), ("x2", "X")):
        start(pool, job, user)
    settle(pool)
    assert [job for job, state in states(pool).items() if state != "running"] == ["y2", "x2"]


def test_a_project_takes_chips_back_from_one_beside_it_and_not_from_itself() -> None:
    """Both are below the lab, which holds its guarantee: Y's second job takes X's, its third takes nothing."""
    rows = [
        {"name": "lab", "members": ["X", "Y"], "guaranteed_chips": 4},
        {"name": "x", "parent": "lab", "guaranteed_chips": 2},
        {"name": "y", "parent": "lab", "guaranteed_chips": 2},
    ]
    pool = pool_with(projects=rows)
    for number in range(4):
        start(pool, f"x{number}", "X", project="x")
    for number in range(3):
        start(pool, f"y{number}", "Y", project="y")
        settle(pool)
    assert sorted(job for job, state in states(pool).items() if state == "running")[-2:] == ["y0", "y1"]
    use = pool.coordinator.state.accounts
    assert [use.use_of(f"project:{name}").num_chips for name in ("lab", "x", "y")] == [4, 2, 2]


def lab(*, limit: int = 4, **guarantees: int) -> list[dict[str, Any]]:
    """A lab with a limit, with X and Y as members, and projects below it with guarantees."""
    below = [{"name": name, "parent": "lab", "guaranteed_chips": chips} for name, chips in guarantees.items()]
    top = {"name": "lab", "members": ["X", "Y"], "guaranteed_chips": limit, "limits": {"chips": limit}}
    return [top, *below]


def test_a_project_takes_chips_back_below_a_parent_that_is_at_its_limit() -> None:
    """The pool has free chips, but the lab may hold four: one of X's jobs is saved, and Y's starts, not X's again."""
    pool = pool_with(projects=lab(x=2, y=2), chips=8)
    for number in range(4):
        start(pool, f"x{number}", "X", project="x")
    start(pool, "x4", "X", project="x")
    pool.submit("y0", plan("a"), user="Y", project="y")
    job = pool.coordinator.state.jobs["y0"]
    assert job.reason == "project lab may hold 4 chips at once: 4 are held by 4 jobs, this one needs 1"
    assert [one.id for one in pool.coordinator.state.jobs.values() if one.pause_for == "y0"] == ["x3"]
    settle(pool)
    assert [job for job, state in states(pool).items() if state == "running"] == ["x0", "x1", "x2", "y0"]
    assert pool.coordinator.state.accounts.claims == {}
    assert "takes back chips that it is guaranteed, checkpoint at step 7" in (
        pool.coordinator.state.jobs["x3"].last_restart_reason
    )


def test_a_claim_that_is_cancelled_lets_the_other_job_go_on() -> None:
    """X's job has been asked for a checkpoint, and is not stopped."""
    pool = pool_with(projects=lab(x=2, y=2), chips=8)
    for number in range(4):
        start(pool, f"x{number}", "X", project="x")
    pool.submit("y0", plan("a"), user="Y", project="y")
    assert [order.protect for order in pool.coordinator.orders("a")].count(True) == 1
    pool.cancel("y0")
    settle(pool, turns=3)
    assert [pool.coordinator.state.jobs[f"x{number}"].attempt for number in range(4)] == [1, 1, 1, 1]
    assert [order.protect for order in pool.coordinator.orders("a")].count(True) == 0


def test_jobs_of_no_project_hold_lent_chips_and_jobs_that_may_not_be_preempted_keep_them() -> None:
    """A stranger's job makes way; one that is not preemptible does not."""
    pool = pool_with(("y", 4))
    start(pool, "s0", "S", preemptible=False)
    for number in (1, 2, 3):
        start(pool, f"s{number}", "S")
    for number in range(4):
        start(pool, f"y{number}", "Y")
        settle(pool)
    running = sorted(job for job, state in states(pool).items() if state == "running")
    assert running == ["s0", "y0", "y1", "y2"]


def test_a_guarantee_starts_on_free_chips_that_are_reserved_for_others() -> None:
    """A large job of a stranger waits first and reserves; Y's starts all the same."""
    pool = pool_with(("y", 2))
    start(pool, "s0", "S", chips=2, preemptible=False)
    start(pool, "s1", "S", chips=4)
    start(pool, "y0", "Y", chips=2)
    assert states(pool) == {"s0": "running", "s1": "waiting", "y0": "running"}


def test_a_reclaim_that_a_site_refuses_is_tried_again_later_and_no_job_is_stopped() -> None:
    """It does not try at every report."""
    pool = pool_with(("x", 0), ("y", 1), chips=1)
    start(pool, "x0", "X")
    pool.submit("y0", plan("a"), user="Y")
    attempt = pool.coordinator.state.jobs["y0"].attempt
    assert states(pool)["y0"] == "preempting"
    refused = [
        done.model_copy(update={"state": "refused", "detail": "no"}) if order.job == "y0" else done
        for order in pool.coordinator.orders("a")
        for done in (pool.done("a", order),)
    ]
    pool.report("a", *refused)
    pool.obey()
    job = pool.coordinator.state.jobs["y0"]
    assert (job.state, job.attempt, job.state_deadline_s is not None) == ("waiting", attempt, True)
    assert states(pool)["x0"] == "running"
    pool.wait(10)
    settle(pool)
    assert states(pool)["y0"] == "running"


sizes = st.lists(st.tuples(st.sampled_from("xyzs"), st.integers(1, 3)), min_size=1, max_size=8)


@settings(deadline=None)
@given(
    jobs=sizes, guarantees=st.tuples(*[st.integers(0, 3)] * 3), limits=st.tuples(*[st.integers(1, 6)] * 3),
    spare=st.integers(0, 3), in_lab=st.booleans(),
)  # fmt: skip
def test_reclaim_reaches_the_guarantee_and_no_project_exceeds_its_limit(
    jobs: list[tuple[str, int]], guarantees: tuple[int, ...], limits: tuple[int, ...], spare: int, in_lab: bool
) -> None:
    """A job that waits, when nothing changes any more, would exceed its project's guarantee or limit.

    The driver checks after every event that no account holds more than its limit. With `in_lab` all projects are below
    one that may hold no more than their guarantees together.
    """
    rows = [
        {"name": name, "members": [name], "guaranteed_chips": min(have, most), "limits": {"chips": most}}
        for name, have, most in zip("xyz", guarantees, limits, strict=True)
    ]
    total = sum(min(pair) for pair in zip(guarantees, limits, strict=True))
    pool = Driver("a", chips=max(3, total) + spare)
    if in_lab:
        rows = [row | {"parent": "lab"} for row in rows]
        rows.append({"name": "lab", "guaranteed_chips": total, "limits": {"chips": total}})
    accounts = Accounts.model_validate({"projects": rows})
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=accounts))
    for number, (user, chips) in enumerate(jobs):
        pool.submit(f"{user}{number}-{chips}", plan(*"a" * chips), user=user)
        pool.obey()
    settle(pool, turns=40)
    book = pool.coordinator.state.accounts
    for job in pool.coordinator.state.live_jobs.values():
        if job.state == "running" or not job.project:
            continue
        project, held = book.tree.projects[job.project], book.use_of(f"project:{job.project}").num_chips
        assert held + job.num_chips > project.guaranteed_chips, (states(pool), job.id, job.reason)


@pytest.mark.parametrize(("project", "job", "found"), [
    ("high", "low", "high"), ("middle", "low", "low"), ("middle", "high", "high"), ("low", "high", "low"),
])  # fmt: skip
def test_the_priority_at_sites_follows_from_project_and_job(project: str, job: str, found: str) -> None:
    """Their own levels then follow by the map that each site registered when it joined."""
    pool = pool_with(projects=[{"name": "x", "members": ["X"], "priority": project}])
    start(pool, "j", "X", priority=job)
    assert [order.priority for order in pool.coordinator.orders("a")] == [found]


def test_the_queue_orders_by_project_then_by_job() -> None:
    """A low job of a high project precedes a high one of a project of no rank, and jobs of one project keep theirs."""
    rows = [{"name": name, "members": [name], "priority": name} for name in ("high", "middle", "low")]
    pool = pool_with(projects=rows, chips=1)
    start(pool, "first", "S", preemptible=False)
    for user in ("low", "middle", "high"):
        for priority in ("low", "high"):
            pool.submit(f"{user}-{priority}", plan("a"), user=user, priority=priority)
    for asked in list(pool.asked):
        pool.answer(asked, plan("a"))
    order = [pool.coordinator.state.indexes.ids_by_number[key[2]] for key in pool.coordinator.state.indexes.order]
    assert order == ["high-high", "high-low", "middle-high", "middle-low", "low-high", "low-low"]


def test_jobs_that_wait_follow_a_new_priority_of_their_project_and_jobs_that_run_keep_theirs() -> None:
    """As if they were submitted now: in the queue and at the sites. Logs of earlier versions do not say so."""
    rows = [{"name": name, "members": [name.upper()]} for name in "xy"]
    pool = pool_with(projects=rows, chips=1)
    start(pool, "y0", "Y", preemptible=False)
    for name in ("x1", "y1", "y2"):
        pool.submit(name, user=name[0].upper(), priority="low")
    state = pool.coordinator.state
    assert queued(pool) == ["x1", "y1", "y2"]
    raised = Accounts.model_validate({"projects": [rows[0], rows[1] | {"priority": "high"}]})
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=raised))
    assert queued(pool) == ["x1", "y1", "y2"]
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=Accounts.model_validate({"projects": rows})))
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=raised, ranks_waiting=True))
    assert queued(pool) == ["y1", "y2", "x1"]
    assert [state.jobs[name].priority for name in ("y0", "y1", "y2", "x1")] == ["middle", "high", "high", "low"]
    pool.cancel("y0")
    settle(pool)
    assert states(pool)["y1"] == "running"
    assert {order.priority for order in pool.coordinator.orders("a") if order.job == "y1"} == {"high"}
    assert Coordinator.replay(pool.log, RULES).state.indexes.order == state.indexes.order


def queued(pool: Driver) -> list[str]:
    state = pool.coordinator.state
    return [state.indexes.ids_by_number[key[2]] for key in queue_head(state)]


def test_projects_share_the_chips_of_a_priority_by_their_weights() -> None:
    """With fair share on, three of heavy's jobs come for one of light's, whoever the user."""
    rows = [
        {"name": "light", "members": ["L"], "weight": 1},
        {"name": "heavy", "members": ["H", "I"], "weight": 3},
    ]
    pool = pool_with(projects=rows, chips=1)
    pool.tell(PoolSet(now_s=pool.now_s, half_life_s=3600.0))
    start(pool, "first", "S", preemptible=False)
    for number in range(4):
        pool.submit(f"l{number}", user="L")
        pool.submit(f"h{number}", user="HI"[number % 2])
    state = pool.coordinator.state
    order = [state.indexes.ids_by_number[key[2]] for key in queue_head(state)]
    assert [job[0] for job in order[:6]].count("h") == 4
    assert sorted(order) == sorted(f"{one}{number}" for one in "lh" for number in range(4))


def test_claims_survive_a_replay_and_a_snapshot() -> None:
    """The state with a claim and a job that saves for it equals that of the log, and its own stored form."""
    pool = pool_with(projects=lab(x=2, y=2), chips=8)
    for number in range(4):
        start(pool, f"x{number}", "X", project="x")
    pool.submit("y0", plan("a"), user="Y", project="y")
    state = pool.coordinator.state
    assert state.accounts.claims == {"project:lab": {"y0": 1}}
    again = Coordinator.replay(pool.log, RULES).state
    assert (again.accounts, again.jobs["x3"].pause_for) == (state.accounts, "y0")
    assert restore_state(serialize_state(state)) == state
