"""Rules of the preflight: no chips are held before every site of the plan has passed the checks of the job."""

from __future__ import annotations

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.preflight.plan_checks import own_checks
from isthmus.control.state.events import (
    PreemptionAgreed,
    PreflightTimedOut,
    SiteChecked,
    VictimNamed,
    decode_event,
    encode_event,
)
from isthmus.core.errors import ConflictError
from isthmus.core.messages.preflight import MAX_CHECKS, CheckStatus
from isthmus.core.plan import Prediction
from tests.control.driver import RULES, Driver, answered, checked_pool, seen
from tests.control.samples import plan, submission

OWN = ("model", "data", "checkpoints", "output", "storage")


def submitted(pool: Driver, *sites: str, policy: str = "auto", job: str = "j") -> Driver:
    """Submit a job with absolute paths and one plan at `sites`."""
    pool.submit(job, plan(*sites), policy=policy, root="/pool/")
    if policy == "manual":
        pool.choose(job, "p")
    return pool


def checks(pool: Driver, site: str) -> list[str]:
    """Return the names of the checks that a site is asked for."""
    return [one.name for order in pool.coordinator.preflight_orders(site) for one in order.checks]


def test_chips_are_held_only_after_all_sites_have_passed_both_phases() -> None:
    """A job waits, with the sites that must answer as its reason, and no part of it is ordered to hold chips.

    1. Each site checks its own files. 2. Each site looks for the other's files in the shared folders. 3. It starts.
    """
    pool = submitted(checked_pool("a", "b"), "a", "b")
    assert [checks(pool, site) for site in "ab"] == [list(OWN)] * 2
    assert (pool.state("j"), pool.reason("j")) == (
        "waiting",
        "a, b must check the job's files and storage before it starts",
    )
    pool.check("a")
    assert pool.reason("j").startswith("b must check")
    pool.check("b")
    orders = [pool.coordinator.preflight_orders(site)[0] for site in "ab"]
    assert [(order.phase, [(one.name, one.peer) for one in order.checks]) for order in orders] == [
        ("peers", [("checkpoints", "b"), ("output", "b")]),
        ("peers", [("checkpoints", "a"), ("output", "a")]),
    ]
    assert orders[0].checks[0].peer_path == "/there/c"
    assert pool.state("j") == "waiting"
    pool.check("a", "b")
    assert pool.state("j") == "preparing"
    assert [pool.coordinator.preflight_orders(site) for site in "ab"] == [(), ()]
    assert [(one.cluster, one.state, one.seconds) for one in pool.coordinator.job_view("j").preflight] == [
        ("a", "passed", 1.0),
        ("b", "passed", 1.0),
    ]


def test_middle_stages_check_no_data_and_one_site_no_peers() -> None:
    """Data is checked where a first or last stage reads it; a job at one site needs no shared folder."""
    pool = submitted(checked_pool("a", "b", "c"), "a", "b", "c")
    assert "data" not in checks(pool, "b")
    alone = submitted(checked_pool("a"), "a")
    asked = alone.coordinator.preflight_orders("a")[0].checks
    assert [one.name for one in asked] == list(OWN)
    assert {one.value for one in asked if one.kind == "write"} == {""}
    alone.check("a")
    assert alone.state("j") == "preparing"


def test_agents_without_checks_and_virtual_jobs_start_as_before() -> None:
    """An older agent is not asked; a rehearsal reads no files."""
    assert submitted(Driver("a", "b"), "a", "b").state("j") == "preparing"
    pool = checked_pool("a")
    pool.submit("j", plan("a"), root="/pool/", compute="virtual")
    assert pool.state("j") == "preparing"
    mixed = Driver("a", "b")
    mixed.checking = {"a"}
    mixed.report("a")
    submitted(mixed, "a", "b").check("a")
    assert mixed.state("j") == "preparing"
    assert [one.state for one in mixed.coordinator.job_view("j").preflight] == ["passed", "not checked"]


def test_chips_stay_reserved_while_sites_check() -> None:
    """A later job does not take the chips of a job that is being checked."""
    pool = submitted(checked_pool("a"), *"aaaa", job="first")
    submitted(pool, "a", job="second")
    pool.check("a")
    pool.check("a")
    assert (pool.state("first"), pool.state("second")) == ("preparing", "waiting")


def test_a_failed_check_takes_another_candidate_without_the_site() -> None:
    """Under the policy `auto` the next candidate without the site is checked, and the reason says why."""
    pool = checked_pool("a", "b")
    pool.submit("j", plan("a", "b", name="wide"), plan("b", name="only-b"), root="/pool/")
    pool.check("a", data="failed")
    pool.check("b")
    view = pool.coordinator.job_view("j")
    assert (view.state, view.plan and view.plan.id) == ("waiting", "only-b")
    assert checks(pool, "a") == []
    pool.check("b")
    assert pool.state("j") == "preparing"


def test_a_failed_check_without_another_plan_fails_the_job() -> None:
    """The pool is planned once more without the site; without a plan the job fails with site, check and finding."""
    pool = submitted(checked_pool("a", "b"), "a")
    pool.check("a", data="failed")
    assert (pool.state("j"), pool.asked["j"].free_chips) == ("waiting", {"b": {"g": 4}})
    pool.answer("j", why="too few chips")
    pool.answer("j", why="too few chips")
    assert pool.state("j") == "failed"
    assert pool.reason("j") == ("plan p failed its checks: a: data: /pool/d is bad; no plan without a: too few chips")
    (site,) = pool.coordinator.job_view("j").preflight
    assert [(one.name, one.status) for one in site.results if one.status != "passed"] == [("data", "failed")]
    alone = submitted(checked_pool("a"), "a")
    alone.check("a", model="failed")
    assert (alone.state("j"), alone.reason("j")) == (
        "failed",
        "plan p failed its checks: a: model: /pool/m is bad; the pool has no other site",
    )


def test_a_user_chooses_again_among_the_other_plans() -> None:
    """Under the policy `manual` the job asks for another choice; the same plan is checked again if chosen again."""
    pool = checked_pool("a", "b")
    pool.submit("j", plan("a", name="one"), plan("b", name="two"), policy="manual", root="/pool/")
    pool.choose("j", "one")
    pool.check("a", tokenizer="failed", storage="failed")
    assert pool.state("j") == "choosing"
    assert pool.reason("j") == "plan one failed its checks: a: storage: /pool/c is bad; choose another plan"
    pool.choose("j", "one")
    assert pool.state("j") == "waiting"
    pool.check("a")
    assert pool.state("j") == "preparing"


def test_sites_without_a_shared_folder_are_refused_together() -> None:
    """Either site alone stays possible: only plans with both are excluded, and the reason names both."""
    pool = checked_pool("a", "b")
    pool.submit("j", plan("a", "b", name="wide"), plan("b", name="only-b"), root="/pool/")
    pool.check("a", "b")
    pool.check("a", "b", checkpoints="failed")
    view = pool.coordinator.job_view("j")
    assert (view.state, view.plan and view.plan.id) == ("waiting", "only-b")
    (reason,) = {reason for reason, _ in pool.coordinator.state.jobs["j"].conflicts.values()}
    assert reason.startswith("a: checkpoints:")


def test_passed_checks_expire() -> None:
    """A job that waited for chips longer than its checks are valid is checked again before it starts."""
    pool = submitted(checked_pool("a"), *"aaaa", job="first")
    pool.check("a")
    submitted(pool, *"aaaa", policy="manual", job="second")
    pool.check("a")
    assert checks(pool, "a") == []
    pool.obey()
    pool.obey()
    assert (pool.state("first"), pool.state("second")) == ("running", "blocked")
    pool.wait(RULES.preflight_valid_s + 1)
    pool.report("a", seen("first", 1, "succeeded"))
    pool.obey()
    assert (pool.state("first"), pool.state("second")) == ("succeeded", "blocked")
    assert checks(pool, "a") == list(OWN)
    pool.check("a")
    assert pool.state("second") == "preparing"


@pytest.mark.parametrize("silent", [True, False])
def test_a_site_that_gives_no_result_is_asked_again_a_limited_number_of_times(silent: bool) -> None:
    """No answer in time, or a check that does not finish: back-off, another round, and at last a failure."""
    pool = submitted(checked_pool("a"), "a")
    for number in range(1, RULES.max_unknown_preflights + 1):
        assert pool.coordinator.preflight_orders("a")[0].round == number
        if silent:
            pool.wait(RULES.preflight_timeout_s + 1)
        else:
            pool.check("a", data="unknown")
        if number < RULES.max_unknown_preflights:
            assert pool.state("j") == "waiting"
            assert pool.coordinator.preflight_orders("a") == ()
            pool.wait(RULES.max_retry_s + 1)
    assert pool.state("j") == "failed"
    words = "a has not answered the checks of the job" if silent else "a: data: /pool/d is bad"
    assert words in pool.reason("j")
    assert "asked 5 times" in pool.reason("j")


def test_a_job_that_has_trained_waits_and_is_checked_again() -> None:
    """Its work is worth more than a clear failure: a full disk is repaired, and the job continues."""
    pool = submitted(checked_pool("a"), "a", policy="manual")
    pool.check("a")
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    pool.wait(RULES.preflight_valid_s + 1)
    pool.report("a", seen("j", 1, "failed", "disk"))
    pool.obey()
    pool.check("a", storage="failed")
    assert (pool.state("j"), pool.reason("j")) == ("waiting", "a: storage: /pool/c is bad")
    pool.wait(RULES.max_retry_s + 1)
    pool.check("a")
    assert pool.state("j") == "preparing"


def test_late_and_foreign_answers_change_nothing() -> None:
    """Dropped: a repeated answer, one of another round or phase, of another site, of another job, of other checks."""
    pool = submitted(checked_pool("a", "b"), "a", "b")
    (order,) = pool.coordinator.preflight_orders("a")
    good = answered(order)
    wrong = (
        ("c", good),
        ("a", good.model_copy(update={"round": 2})),
        ("a", good.model_copy(update={"phase": "peers"})),
        ("a", good.model_copy(update={"job": "other"})),
        ("a", good.model_copy(update={"results": good.results[:-1]})),
        ("a", good.model_copy(update={"results": good.results * 2})),
    )
    for site, answer in wrong:
        assert not pool.coordinator.admit(SiteChecked(now_s=pool.now_s, cluster=site, answer=answer))
    pool.check("a")
    assert not pool.coordinator.admit(SiteChecked(now_s=pool.now_s, cluster="a", answer=good))
    assert not pool.coordinator.admit(PreflightTimedOut(now_s=pool.now_s, job_id="j", round=2))
    pool.cancel("j")
    assert pool.coordinator.preflight_orders("b") == ()


def test_no_victim_is_preempted_for_a_job_whose_files_are_missing() -> None:
    """Chips are taken from others only for a job whose sites have passed; the error says to wait."""
    pool = checked_pool("a")
    pool.submit("low", plan(*"aaaa"), priority="low")
    pool.obey()
    pool.obey()
    pool.submit("j", plan("a"), policy="manual", priority="high", root="/pool/")
    pool.choose("j", "p")
    assert checks(pool, "a") == list(OWN), "a job that waits for chips is checked early"
    assert pool.coordinator.job_view("j").offer == ()
    victims = (VictimNamed(cluster="a", job="low", attempt=1),)
    with pytest.raises(ConflictError, match="have not passed the checks of job j yet"):
        pool.tell(PreemptionAgreed(now_s=pool.now_s, job_id="j", victims=victims))
    pool.check("a")
    pool.preempt("j")
    assert pool.state("j") == "preempting"


@pytest.mark.parametrize("status", ["passed", "failed", "unknown"])
def test_the_log_rebuilds_the_preflight(status: CheckStatus) -> None:
    """The events survive the log, and replaying them gives the same state."""
    pool = submitted(checked_pool("a", "b"), "a", "b")
    pool.check("a", output=status)
    pool.check("b")
    pool.wait(1)
    again = Coordinator.replay([decode_event(encode_event(event)) for event in pool.log], RULES)
    assert again.state.jobs == pool.coordinator.state.jobs
    assert again.preflight_orders("a") == pool.coordinator.preflight_orders("a")


def test_what_a_site_checks_follows_from_job_and_plan() -> None:
    """Weights for finetuning, the bytes that all sites write, nothing for URLs, and a bounded number of checks."""
    job = submission(root="/pool/", task="finetune").job
    predicted = Prediction.model_construct(storage_bytes=(3, 4))
    wide = plan("a", "b").model_copy(update={"predicted": predicted})
    found = {one.name: one for one in own_checks(job, wide, "a", "mark")}
    assert (found["model"].value, found["storage"].num_bytes) == ("weights", 7)
    assert {name: one.value for name, one in found.items() if one.kind == "write"} == dict.fromkeys(
        ("checkpoints", "output"), "mark"
    )
    remote = job.data.model_copy(update={"paths": ("s3://bucket/text", "relative"), "tokenizer": "/pool/tokenizer"})
    names = [one.name for one in own_checks(job.model_copy(update={"data": remote}), wide, "b", "")]
    assert names == ["model", "tokenizer", "checkpoints", "output", "storage"]
    many = job.data.model_copy(update={"paths": tuple(f"/pool/{number}" for number in range(10_000))})
    assert len(own_checks(job.model_copy(update={"data": many}), wide, "b", "")) < MAX_CHECKS
    fetched = [one.name for one in own_checks(job, wide, "a", "", has_files=False)]
    assert fetched == ["checkpoints", "output", "storage"]
