"""What the coordinator refuses, in words that say what to do next; and what it takes as said already."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isthmus.control.state.events import (
    AgentLost,
    DeadlinePassed,
    EpochBegan,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
    VictimNamed,
)
from isthmus.core.errors import IsthmusError
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Link
from tests.control.driver import Driver, seen, started
from tests.control.samples import plan, submission


def choosing() -> Driver:
    """A pool in which the user of `j` chooses between `one` and `two`."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", name="one"), plan("b", name="two"), policy="manual", key="k")
    assert pool.state("j") == "choosing"
    return pool


def blocked() -> Driver:
    """`high` waits for chips on which `low` trains, and has been offered the plan `wanted`."""
    pool = Driver("a", "b")
    pool.submit("low", plan(*"aaaa"), priority="low")
    pool.obey()
    pool.obey()
    pool.submit("high", policy="manual", priority="high")
    pool.answer("high")
    pool.answer("high", plan("a", "a", name="wanted"))
    return pool


def ended(state: str) -> Driver:
    """A pool in which `j` has ended in `state`."""
    pool = started("a", restarts=0)
    if state == "cancelled":
        pool.cancel("j")
    else:
        pool.report("a", seen("j", 1, state))
    pool.obey()
    assert pool.state("j") == state
    return pool


def agree(job: str, *victims: str) -> Callable[[Driver], object]:
    """The user of `job` agrees to preempt `victims` at `a`."""
    named = tuple(VictimNamed(cluster="a", job=one, attempt=1) for one in victims)
    return lambda pool: pool.tell(PreemptionAgreed(now_s=pool.now_s, job_id=job, victims=named))


def again(job_id: str, key: str, **more: object) -> Callable[[Driver], object]:
    """User `u` submits another job."""
    return lambda pool: pool.submit(job_id, key=key, policy="manual", **more)


def delete(job: str) -> Callable[[Driver], object]:
    return lambda pool: pool.tell(JobDeleted(now_s=pool.now_s, job_id=job))


def held_at_a_lost_site() -> Driver:
    """`j` was cancelled while its parts were prepared, and no report of `a` says that they are released."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.obey("a")
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.cancel("j")
    pool.obey("b")
    assert pool.state("j") == "cancelled"
    return pool


def planning() -> Driver:
    """`j` is being planned."""
    pool = Driver("a")
    pool.submit("j", policy="manual")
    return pool


def chosen(name: str) -> Driver:
    """The user of `j` has chosen the plan `name`."""
    pool = choosing()
    pool.choose("j", name)
    return pool


def with_choice(pool: Driver) -> Driver:
    """The user of `high` has chosen the plan `wanted`."""
    pool.choose("high", "wanted")
    return pool


def stopping() -> Driver:
    """`j` has trained to the end, and its parts are not released yet."""
    pool = started("a")
    pool.report("a", seen("j", 1, "succeeded"))
    assert pool.state("j") == "stopping"
    return pool


LISTS = "(isthmus show high lists the victims it needs now)"
REFUSALS: list[tuple[Callable[[], Driver], Callable[[Driver], object], str]] = [
    (choosing, lambda pool: pool.cancel("x"), "no job 'x' (`isthmus jobs` lists them)"),
    (
        choosing,
        again("i", "k", steps=7),
        "job j was submitted with the same key, but other content (give the new job its own key)",
    ),
    (
        choosing,
        again("j", "other"),
        "the id j belongs to another job (submit again: each submission gets an id of its own)",
    ),
    (choosing, lambda pool: pool.choose("j", "three"), "job j has no plan 'three' (its plans: one, two)"),
    (
        planning,
        lambda pool: pool.choose("j", "one"),
        "job j has no plan 'one' (its plans: none yet)",
    ),
    (
        lambda: chosen("one"),
        lambda pool: pool.choose("j", "two"),
        "job j is preparing: its plan cannot be changed now",
    ),
    (lambda: started("a"), agree("j", "x"), "job j is running: only a waiting job can preempt others"),
    (
        blocked,
        agree("high", "low"),
        "job high has no plan, so it cannot preempt other jobs (choose one first: isthmus plans high)",
    ),
    (
        lambda: with_choice(blocked()),
        agree("high"),
        f"the chips of these jobs no longer suffice for job high: none given {LISTS}",
    ),
    (
        lambda: with_choice(blocked()),
        agree("high", "y", "x"),
        f"the chips of these jobs no longer suffice for job high: x, y {LISTS}",
    ),
    (lambda: ended("succeeded"), lambda pool: pool.cancel("j"), "job j has already succeeded"),
    (lambda: ended("failed"), lambda pool: pool.cancel("j"), "job j has already failed"),
    (stopping, lambda pool: pool.cancel("j"), "job j has already succeeded"),
    (lambda: started("a"), delete("j"), "job j is running (end it first: isthmus cancel j)"),
    (
        held_at_a_lost_site,
        delete("j"),
        "job j: a has not yet confirmed the release of its parts (try again when the site is connected)",
    ),
]


@pytest.mark.parametrize(("make", "act", "words"), REFUSALS, ids=[words for _, _, words in REFUSALS])
def test_a_refusal_says_what_and_what_to_do_next(
    make: Callable[[], Driver], act: Callable[[Driver], object], words: str
) -> None:
    """And nothing is logged."""
    pool = make()
    before = list(pool.log)
    with pytest.raises(IsthmusError) as raised:
        act(pool)
    assert str(raised.value) == words
    assert pool.log == before


def admits(pool: Driver, event: object) -> bool:
    """Return whether an event would change the state."""
    return pool.coordinator.admit(event)  # type: ignore[arg-type]


def test_a_repeated_submission_is_the_same_job_only_with_its_key() -> None:
    """Another user's key, and no key at all, name no known job."""
    pool = choosing()
    wish = submission("j", policy="manual", key="k")
    assert not admits(pool, JobSubmitted(now_s=1, job_id="i", user="u", submission=wish))
    assert admits(pool, JobSubmitted(now_s=1, job_id="i", user="v", submission=wish))
    plain = submission("j", policy="manual")
    assert admits(pool, JobSubmitted(now_s=1, job_id="i", user="u", submission=plain))
    assert pool.coordinator.job_id_of_key("u", "k") == "j"
    assert pool.coordinator.job_id_of_key("v", "k") is None
    assert pool.coordinator.job_id_of_key("u", "") is None


def test_an_answer_counts_only_for_the_open_request() -> None:
    """One of an earlier round, of an unknown job, and a second one are late."""
    pool = planning()
    asked = pool.asked["j"]
    answer = PlansMade(now_s=1, job_id="j", round=asked.round, plans=PlanSet(plans=(plan("a"),), refused=()))
    assert pool.coordinator.awaits_plans("j", asked.round)
    assert admits(pool, answer)
    assert admits(pool, PlanningFailed(now_s=1, job_id="j", round=asked.round, reason="r"))
    for late in ({"round": asked.round - 1}, {"job_id": "x"}):
        assert not admits(pool, answer.model_copy(update=late))
    assert not pool.coordinator.awaits_plans("j", asked.round - 1)
    assert not pool.coordinator.awaits_plans("x", asked.round)
    pool.answer("j", plan("a"))
    assert not admits(pool, answer)
    assert not pool.coordinator.awaits_plans("j", asked.round)


def test_a_choice_that_was_made_is_not_made_again() -> None:
    """Neither while the job waits nor once it runs with that plan."""
    pool = chosen("one")
    assert not admits(pool, PlanChosen(now_s=1, job_id="j", plan_id="one"))
    waiting = with_choice(blocked())
    assert not admits(waiting, PlanChosen(now_s=1, job_id="high", plan_id="wanted"))


def test_an_agreement_that_has_begun_is_not_made_again() -> None:
    """The same victims in any order; others are refused."""
    pool = with_choice(blocked())
    pool.preempt("high")
    assert pool.state("high") == "preempting"
    agreed = PreemptionAgreed(now_s=1, job_id="high", victims=(VictimNamed(cluster="a", job="low", attempt=1),))
    assert not admits(pool, agreed)
    with pytest.raises(IsthmusError, match="only a waiting job can preempt others"):
        admits(pool, agreed.model_copy(update={"victims": ()}))


@pytest.mark.parametrize("done", [True, False])
def test_a_job_is_cancelled_once(*, done: bool) -> None:
    """While its parts are released, and after."""
    pool = started("a")
    pool.cancel("j")
    if done:
        pool.obey()
    assert pool.state("j") == ("cancelled" if done else "stopping")
    assert not admits(pool, JobCancelled(now_s=1, job_id="j"))


def test_what_is_late_changes_nothing() -> None:
    """A deadline of an earlier state or attempt, the loss of a lost or unknown site, an earlier epoch."""
    pool = Driver("a", "b")
    pool.submit("j", plan("a"))
    due = DeadlinePassed(now_s=1, job_id="j", state="preparing", attempt=1)
    assert admits(pool, due)
    for late in ({"state": "starting"}, {"attempt": 2}, {"job_id": "x"}):
        assert not admits(pool, due.model_copy(update=late))
    pool.obey()
    pool.obey()
    assert not admits(pool, due), "a running job has no deadline"
    assert admits(pool, AgentLost(now_s=1, cluster="b"))
    pool.tell(AgentLost(now_s=1, cluster="b"))
    assert not admits(pool, AgentLost(now_s=1, cluster="b"))
    assert not admits(pool, AgentLost(now_s=1, cluster="x"))
    pool.tell(EpochBegan(now_s=1, epoch=3))
    assert [admits(pool, EpochBegan(now_s=1, epoch=epoch)) for epoch in (2, 3, 4)] == [False, False, True]


def test_rules_of_the_pool_are_set_only_where_they_differ() -> None:
    """Each of them: the links, the objective, the patience, and whether users take turns at the planner."""
    pool = Driver("a", "b")
    link = Link.model_validate({"from": "a", "to": "b", "bandwidth_gbps": 1, "delay_ms": 1})
    rules = PoolSet(now_s=1, links=(link,), objective="deadline", patience_s=7, planner_turns=False)
    pool.tell(rules)
    assert not admits(pool, rules)
    for other in ({"links": ()}, {"objective": "arrival"}, {"patience_s": 8}, {"planner_turns": True}):
        assert admits(pool, rules.model_copy(update=other))
