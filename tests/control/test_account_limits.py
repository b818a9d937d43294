"""Projects, groups and users: who may submit where, what their limits forbid, and what a refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import (
    AccountsSet,
    BudgetReached,
    BudgetsDue,
    Instruction,
    MakePlans,
    NoticeDue,
    SubscriptionSet,
    TariffPublished,
)
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.errors import AuthError, ConflictError, FieldError, InputError, NotFoundError
from isthmus.core.owner.accounts import Accounts
from isthmus.core.plan import Prediction
from tests.control.driver import RULES, Driver, seen
from tests.control.priced import HOUR_S, chip_price, tariff
from tests.control.samples import plan

LAB: dict[str, Any] = {"name": "lab", "members": ["ann", "group:speech"], "limits": {"chips": 3}}
NLP: dict[str, Any] = {"name": "nlp", "parent": "lab", "members": ["ben"]}
SPEECH: dict[str, Any] = {"name": "speech", "members": ["cat"]}


def accounts(*projects: dict[str, Any], **more: Any) -> Accounts:
    """Accounts with these projects, and the group `speech`."""
    return Accounts.model_validate({"projects": projects, "groups": [SPEECH]} | more)


def pool_with(*projects: dict[str, Any], chips: int = 4, **more: Any) -> Driver:
    """A pool of `a` and `b` with accounts."""
    pool = Driver("a", "b", chips=chips)
    set_accounts(pool, accounts(*projects, **more))
    return pool


def set_accounts(pool: Driver, given: Accounts) -> list[Instruction]:
    return pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=given))


def run(pool: Driver, job: str, *sites: str, **more: Any) -> None:
    """Submit a job with one chip at each of `sites` and let it start if it may."""
    pool.submit(job, plan(*sites), **more)
    pool.obey()
    pool.obey()


def end(pool: Driver, job: str) -> None:
    pool.cancel(job)
    pool.obey()
    pool.obey()


def test_a_project_and_those_below_it_hold_no_more_than_its_limit() -> None:
    """Ann in the lab and Ben below it share three chips; the next job waits with the reason until a release."""
    pool = pool_with(LAB, NLP)
    run(pool, "one", "a", "a", user="ann")
    run(pool, "two", "b", "b", user="ben")
    assert (pool.state("one"), pool.state("two")) == ("running", "waiting")
    assert pool.reason("two") == "project lab may hold 3 chips at once: 2 are held by 1 job, this one needs 2"
    run(pool, "three", "b", user="ben")
    assert pool.state("three") == "running"
    end(pool, "one")
    pool.obey()
    assert pool.state("two") == "running"


def test_the_limits_of_users_and_groups_hold_beside_those_of_projects() -> None:
    """One chip for Ann, one for all of the group; others are free."""
    group = SPEECH | {"limits": {"chips": 1}}
    pool = pool_with(groups=[group], users=[{"name": "ann", "limits": {"chips": 1}}])
    for job, user in (("a1", "ann"), ("a2", "ann"), ("c1", "cat"), ("c2", "cat"), ("b1", "bob"), ("b2", "bob")):
        run(pool, job, "a", user=user)
    states = {job: pool.state(job) for job in ("a1", "a2", "c1", "c2", "b1", "b2")}
    assert [job for job, state in states.items() if state == "waiting"] == ["a2", "c2"]
    assert pool.reason("a2").startswith("user ann may hold 1 chips at once")
    assert pool.reason("c2").startswith("group speech may hold 1 chips at once")


def test_a_limited_user_does_not_keep_the_head_of_the_queue() -> None:
    """Forty jobs of Ann wait for her limit; Bob's, submitted last, starts at once."""
    pool = pool_with(users=[{"name": "ann", "limits": {"chips": 1}}])
    for number in range(40):
        pool.submit(f"j{number}", plan("a"), user="ann")
    run(pool, "bob", "b", user="bob")
    assert pool.state("bob") == "running"
    assert len(pool.coordinator.state.indexes.order) == 0
    end(pool, "j0")
    pool.obey()
    assert [pool.state(f"j{number}") for number in (1, 2)] == ["running", "waiting"]


def test_the_planner_gets_the_limit_as_the_largest_size() -> None:
    """Without it the fastest plan might be one that can never start."""
    pool = pool_with(LAB)
    told = pool.asked
    pool.submit("one", user="ann")
    request = told["one"]
    assert isinstance(request, MakePlans)
    assert request.submission.job.placement.max_chips == 3
    pool.submit("two", user="bob")
    pool.answer("one", plan("a"))
    assert pool.asked["two"].submission.job.placement.max_chips is None


def test_a_limit_of_no_chips_asks_for_no_other_plan() -> None:
    """There is none: a job of one chip waits for the limit, not for the planner."""
    pool = pool_with(LAB)
    run(pool, "full", "a", "a", "a", "a", user="eve")
    pool.submit("one", plan("a"), user="ann")
    pool.asked.clear()
    set_accounts(pool, accounts(LAB | {"limits": {"chips": 0}}))
    assert pool.asked == {}


@pytest.mark.parametrize(
    ("user", "named", "found"),
    [
        ("ann", "lab", "lab"),
        ("ann", "nlp", "nlp"),  # a member of a project above
        ("cat", "nlp", "nlp"),  # through a group
        ("ben", None, "nlp"),  # the only one
        ("bob", None, ""),
    ],
)
def test_a_job_belongs_to_a_project_of_its_user(user: str, named: str | None, found: str) -> None:
    """Members of a project may use those below it; the only project is the default."""
    pool = pool_with(LAB, NLP)
    pool.submit("one", user=user, project=named)
    assert pool.coordinator.state.jobs["one"].project == found


def test_strangers_and_members_of_lower_projects_are_refused_alike() -> None:
    """A project that is another's does not exist for a user."""
    pool = pool_with(LAB, NLP)
    errors = list[str]()
    for user, named in (("ben", "lab"), ("ben", "none"), ("bob", "nlp")):
        with pytest.raises(NotFoundError) as error:
            pool.submit("one", user=user, project=named)
        errors.append(error.value.message)
    assert errors == [
        f"project: user '{user}' has no project '{named}'"
        for user, named in (("ben", "lab"), ("ben", "none"), ("bob", "nlp"))
    ]
    strict = pool_with(LAB, NLP, NLP | {"name": "own", "parent": None}, require_project=True)
    with pytest.raises(AuthError, match="member of no project"):
        strict.submit("one", user="bob")
    with pytest.raises(InputError, match="must name one"):
        strict.submit("one", user="ben")


def test_a_limit_below_what_runs_is_refused_with_the_time_when_it_would_hold() -> None:
    """Two jobs hold four chips; the first ends in an hour, the second in two."""
    pool = pool_with(NLP | {"parent": None})
    for job, hours in (("one", 1), ("two", 2)):
        lasting = plan("a", "b").model_copy(update={"predicted": predicted(hours * HOUR_S)})
        pool.submit(job, lasting, user="ben")
        pool.obey()
        pool.obey()
        assert pool.state(job) == "running"
    small = accounts(NLP | {"parent": None, "limits": {"chips": 2}})
    with pytest.raises(ConflictError, match=r"holds 4 chips now, more than 2; it would hold at 1970-01-01T01:01:40Z"):
        set_accounts(pool, small)
    pool.now_s += HOUR_S
    end(pool, "one")
    set_accounts(pool, small)
    assert pool.coordinator.state.accounts.accounts == small
    with pytest.raises(ConflictError, match="left out, but 1 of its jobs"):
        set_accounts(pool, accounts())


def predicted(iteration_s: float) -> Prediction:
    """The prediction of a plan whose only step takes so long."""
    return Prediction(
        iteration_s=iteration_s, tgs_tokens_per_card_s=1, samples_per_s=1, peak_memory_bytes=(), wan_gbps=(1e-3,)
    )


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"projects": [{"name": "a"}, {"name": "a"}]}, "projects.1.name: 'a' is entry 1 already"),
    ({"projects": [{"name": "a", "parent": "b"}]}, "projects.0.parent: there is no project 'b'"),
    (
        {"projects": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}]},
        "projects.0.parent: the project is above itself: a > b > a",
    ),
    ({"projects": [{"name": "a", "members": ["group:x"]}]}, "projects.0.members.0: there is no group 'x'"),
    ({"projects": [{"name": "a", "members": ["a b"]}]}, "projects.0.members.0: 'a b' is no name of a user"),
    (
        {"projects": [{"name": "a"}, {"name": "b", "parent": "a", "guaranteed_chips": 1}]},
        "projects.1.guaranteed_chips: the projects below a are guaranteed 1 chips, a itself 0",
    ),
    (
        {"projects": [{"name": "a", "guaranteed_chips": 2, "limits": {"chips": 1}}]},
        "projects.0.guaranteed_chips: 2 chips are guaranteed, but project a may hold 1 at once",
    ),
    (
        {"projects": [{"name": f"p{n}", "parent": f"p{n - 1}" if n else None} for n in range(9)]},
        "projects.8.parent: the tree is deeper than 8 projects",
    ),
)


@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda one: one if isinstance(one, str) else "")
def test_accounts_that_contradict_themselves_are_refused_with_the_field(given: dict[str, Any], message: str) -> None:
    """Nothing takes effect of accounts with an error."""
    pool = Driver("a")
    with pytest.raises(FieldError) as error:
        set_accounts(pool, Accounts.model_validate(given))
    assert error.value.message == message
    assert pool.coordinator.state.accounts.accounts == Accounts()


def spending(limits: dict[str, Any], **more: Any) -> Driver:
    """A pool with a project of Ben's with limits, in which a chip costs 1 for an hour."""
    pool = Driver("a", "b")
    pool.tell(TariffPublished(now_s=pool.now_s, by="root", tariff=tariff(chip_price("a", 1), chip_price("b", 1))))
    set_accounts(pool, accounts(NLP | {"parent": None, "limits": limits} | more))
    return pool


def wait(pool: Driver, seconds: float) -> list[BudgetReached]:
    """Let time pass; return what was reached."""
    pool.now_s += seconds
    for name in pool.coordinator.state.clusters:
        pool.coordinator.record_report(name, pool.now_s)
    events = pool.coordinator.due_events(pool.now_s)
    return [one for event in events for one in pool.tell(event) if isinstance(one, BudgetReached)]


def test_members_and_admins_are_told_of_a_budget() -> None:
    """At 80 %: who submits to the project, and each admin; other users, and subscribers of other topics, are not."""
    pool = spending({"chip_hours_per_month": 10})
    for role, name, topics in (
        ("user", "ben", ("budgets",)),
        ("user", "dan", ("budgets",)),
        ("admin", "root", ("budgets",)),
        ("admin", "night", ("sites",)),
    ):
        subscription = {"webhook": "https://hooks.example.org/", "topics": topics}
        given = {"now_s": pool.now_s, "role": role, "name": name, "subscription": subscription}
        pool.tell(SubscriptionSet.model_validate(given))
    run(pool, "one", "a", "b", user="ben")
    pool.now_s += 4.1 * HOUR_S
    for name in pool.coordinator.state.clusters:
        pool.coordinator.record_report(name, pool.now_s)
    events = pool.coordinator.due_events(pool.now_s)
    found = [one for event in events for one in pool.tell(event) if isinstance(one, NoticeDue)]
    text = "project nlp has used 80 % of a budget"
    assert [(one.name, one.notice.kind, one.notice.text) for one in found] == [
        ("ben", "budget-80", text), ("root", "budget-80", text)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "used"),
    [({"chip_hours_per_month": 10}, "used its 10 chip-hours"), ({"spend_per_month": "10"}, "spent its 10.00 EUR")],
)
def test_a_budget_warns_at_80_percent_and_pauses_jobs_with_a_checkpoint_at_100(
    limits: dict[str, Any], used: str
) -> None:
    """Two chips use ten chip-hours in five hours; the job waits with its checkpoint until the next month."""
    pool = spending(limits)
    run(pool, "one", "a", "b", user="ben")
    assert wait(pool, 3.9 * HOUR_S) == []
    (warned,) = wait(pool, 0.2 * HOUR_S)
    assert (warned.account, warned.percent) == ("project:nlp", 80)
    assert wait(pool, 0.2 * HOUR_S) == []
    (full,) = wait(pool, 0.8 * HOUR_S)
    assert (full.percent, full.text) == (100, f"project nlp has {used} of 1970-01")
    assert pool.state("one") == "running"
    assert pool.reason("one") == f"saves a checkpoint: project nlp has {used} of 1970-01"
    pool.obey()
    pool.obey()
    job = pool.coordinator.state.jobs["one"]
    assert (job.state, job.restarts) == ("waiting", 0)
    assert "checkpoint at step 7" in job.last_restart_reason
    if "one" in pool.asked:
        pool.answer("one", plan("a", "b"))
    assert pool.coordinator.state.indexes.capped.keys() == {"project:nlp"}
    run(pool, "two", "a", user="ben")
    assert pool.reason("two") == f"project nlp has {used} of 1970-01"
    wait(pool, 31 * 24 * HOUR_S)
    pool.obey()
    pool.obey()
    assert {pool.state(one) for one in ("one", "two")} == {"running"}


def test_a_job_that_cannot_save_is_stopped_after_the_time_of_a_checkpoint() -> None:
    """Otherwise a program without checkpoints would spend without bound."""
    pool = spending({"chip_hours_per_month": 1})
    run(pool, "one", "a", user="ben")
    wait(pool, HOUR_S)
    pool.report("a", seen("one", 1, "running"))
    wait(pool, RULES.checkpoint_timeout_s - 1)
    assert pool.state("one") == "running"
    wait(pool, 2)
    assert pool.state("one") == "stopping"
    assert "without a new checkpoint" in pool.coordinator.state.jobs["one"].reason


def test_a_raised_budget_lets_a_job_go_on_that_has_not_stopped_yet() -> None:
    """The checkpoint is no longer asked for, and the job never leaves its sites."""
    pool = spending({"chip_hours_per_month": 1})
    run(pool, "one", "a", user="ben")
    wait(pool, HOUR_S)
    assert [order.protect for order in pool.coordinator.orders("a")] == [True]
    set_accounts(pool, accounts(NLP | {"parent": None, "limits": {"chip_hours_per_month": 2}}))
    assert [order.protect for order in pool.coordinator.orders("a")] == [False]
    pool.obey()
    assert (pool.state("one"), pool.coordinator.state.jobs["one"].attempt) == ("running", 1)


def test_a_job_is_paused_at_its_max_price_and_a_dearer_plan_is_refused() -> None:
    """A chip costs 1 for an hour: a plan of two for three hours costs 6."""
    pool = spending({})
    dear = plan("a", "b", name="dear").model_copy(update={"predicted": predicted(3 * HOUR_S)})
    cheap = plan("a", name="cheap").model_copy(update={"predicted": predicted(4 * HOUR_S)})
    pool.submit("one", dear, cheap, user="ben", max_price="5")
    job = pool.coordinator.state.jobs["one"]
    assert job.plan is not None
    assert job.plan.id == "cheap"
    assert job.plans is not None
    assert [one.reason for one in job.plans.refused] == [
        "1 plans are predicted to cost more than max_price 5.00 EUR, the cheapest of them 6.00"
    ]
    pool.obey()
    pool.obey()
    assert job.quoted_millionths == 4_000_000
    assert [one.percent for one in wait(pool, 4 * HOUR_S)] == [80]
    assert [one.account for one in wait(pool, HOUR_S)] == ["job:one"]
    pool.obey()
    pool.obey()
    if "one" in pool.asked:
        pool.answer("one", cheap)
    assert pool.state("one") == "waiting"
    assert pool.reason("one").startswith("it has cost its max_price of 5.00 EUR; preempted: ")


def test_credits_of_owners_do_not_count_as_spent() -> None:
    """The site loses the attempt after two hours: the project has spent nothing."""
    pool = spending({"spend_per_month": "10"})
    run(pool, "one", "a", user="ben")
    pool.now_s += 2 * HOUR_S
    pool.report("a", incarnation="2")
    pool.obey()
    use = pool.coordinator.state.accounts.use_of("project:nlp")
    assert (use.millionths, use.chip_ms > 0) == (0, True)


def test_accounts_survive_a_replay_and_a_snapshot() -> None:
    """The state from the log alone, and from its stored form, equals the running one."""
    pool = spending({"chip_hours_per_month": 1, "chips": 1})
    run(pool, "one", "a", user="ben")
    run(pool, "two", "a", user="ben")
    wait(pool, 0.9 * HOUR_S)
    wait(pool, HOUR_S)
    state = pool.coordinator.state
    assert state.indexes.capped
    assert Coordinator.replay(pool.log, RULES).state.accounts == state.accounts
    assert restore_state(serialize_state(state)) == state


def test_an_event_of_budgets_that_changes_nothing_is_not_logged() -> None:
    """Looking does not fill the log."""
    pool = spending({"chip_hours_per_month": 1})
    run(pool, "one", "a", user="ben")
    before = len(pool.log)
    assert wait(pool, 60) == []
    assert pool.coordinator.admit(BudgetsDue(now_s=pool.now_s)) is False
    assert len(pool.log) == before
