"""The honest queue over the REST interface."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.control.placement import PlanRequest
from isthmus.control.service.planner_queue import PlannerQueue
from isthmus.control.state.events import MakePlans
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import ObservedPart, StepMetrics, WorkerAddress
from isthmus.core.messages.preflight import PreflightOrder
from isthmus.core.plan import PlanSet
from isthmus.core.views.queue_status import DryRun, QueueStatus
from isthmus.core.views.rank_views import RankView
from tests.control.driver import answered
from tests.control.serving import EAST, WEST, report, submission
from tests.control.test_server_api import Server


def queue(server: Server, path: str = "/v1/queue", token: str = "ann") -> list[QueueStatus]:
    return [QueueStatus.model_validate(one) for one in server.call("GET", path, token=token).json()]


def taken(server: Server) -> str:
    """A job of ann's that is being prepared at both sites, and all their other chips in use."""
    found = server.prepared()
    parts = [ObservedPart(job=found.id, attempt=1, state="prepared")]
    for site in (EAST, WEST):
        server.sync(report(site, *parts, free_chips={"h20": 0}))
    return found.id


def test_a_waiting_job_answers_why_and_its_user_alone_may_ask(server: Server) -> None:
    """What its plan lacks at which owner; to others the job does not exist."""
    taken(server)
    job = server.submit("ann")
    server.until(lambda: server.job(job.id).state == "waiting")
    answer = server.call("GET", f"/v1/jobs/{job.id}/queue")
    assert answer.status_code == 200
    found = QueueStatus.model_validate(answer.json())
    assert (found.id, found.reason) == (job.id, "p1 waits for resources at east, west")
    assert (found.place, server.job(job.id).place) == (1, 1)
    assert [(one.owner, one.lacking_nodes) for one in found.refused] == [("owner-east", 1), ("owner-west", 1)]
    assert server.call("GET", f"/v1/jobs/{job.id}/queue", token="bob").status_code == 404
    assert server.call("GET", "/v1/jobs/nothing/queue").status_code == 404


def test_the_queue_lists_the_callers_jobs_and_an_admin_sees_all(server: Server) -> None:
    """What runs is not in it; an owner's token may not ask."""
    running = taken(server)
    mine, other = server.submit("ann"), server.submit("bob")
    server.until(lambda: server.job(mine.id).state == "waiting")
    assert [one.id for one in queue(server)] == [mine.id]
    assert {one.id for one in queue(server, token="root")} == {mine.id, other.id}
    assert running not in {one.id for one in queue(server, token="root")}
    assert server.call("GET", "/v1/queue", token="owner-east").status_code == 403


def test_metrics_that_pass_the_server_are_the_pace_of_a_run(server: Server) -> None:
    """Lines of a job's own site count."""
    job = taken(server)
    line = StepMetrics(job=job, attempt=1, rank=0, step=0, values={"step_s": 3.0})
    part = ObservedPart(job=job, attempt=1, state="prepared")
    server.sync(report(EAST, part, free_chips={"h20": 0}, metrics=(line,)))
    assert server.shell._progress.job_progress()[job].step_s == 3.0


def dry_run(server: Server, **fields: object) -> DryRun:
    """What becomes of ann's job, and that nothing did become of it."""
    before = server.shell.last_event()
    answer = server.call("POST", "/v1/jobs:dry-run", submission(**fields))  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    assert server.shell.last_event() == before
    return DryRun.model_validate(answer.json())


def test_a_dry_run_says_where_a_job_would_run_and_changes_nothing(server: Server) -> None:
    """Chips are free: candidate plans, first in the queue, to start now; no job and no event came of it."""
    for site in (EAST, WEST):
        server.sync(report(site))
    found = dry_run(server)
    assert [plan.id for plan in found.plans.plans] == ["p1", "p2"]
    assert (found.standing.place, found.standing.start_s) == (1, server.now_s)
    assert found.standing.reason == "the resources are free: it starts next"
    assert found.standing.refused == ()
    assert server.call("GET", "/v1/jobs").json() == []


def test_a_dry_run_of_a_job_that_would_wait_says_for_what_and_at_which_owner(server: Server) -> None:
    """The plans are those of the pool with nothing in use; the answer says what they lack now, and why none fits."""
    taken(server)
    found = dry_run(server)
    assert [plan.id for plan in found.plans.plans] == ["p1", "p2"]
    assert [one.reason for one in found.plans.refused] == ["none free: ['east', 'west']"]
    assert [(one.owner, one.stage) for one in found.standing.refused] == [
        ("owner-east", "compute"),
        ("owner-west", "compute"),
    ]
    assert found.standing.place == 1
    assert found.standing.start_s is None, "nobody predicted how long the running job takes"
    assert found.victims == (), "the other job is of the same priority"


def test_a_dry_run_names_whose_chips_a_job_could_have(server: Server) -> None:
    """A job of a lower level at both owners would have to go; it is named, and what it would give up."""
    running = taken(server)
    found = dry_run(server, priority="high")
    assert [(one.job, one.cluster, one.owner, one.chips) for one in found.victims] == [
        (running, "east", "owner-east", {"h20": 1}),
        (running, "west", "owner-west", {"h20": 1}),
    ]


def test_a_dry_run_is_refused_as_the_job_would_be(server: Server) -> None:
    """A name that does not exist, impossible degrees, and a caller who may not submit."""
    server.sync(report(EAST))
    wrong = submission(placement={"clusters": ["eats"]})
    for path in ("/v1/jobs", "/v1/jobs:dry-run"):
        assert server.call("POST", path, wrong).status_code == 422
        twice = server.call("POST", path, submission(parallel={"pp": 9}, placement={"max_chips": 8}))
        assert "9 chips (pp 9), placement.max_chips allows 8" in twice.json()["message"]
    assert server.call("POST", "/v1/jobs:dry-run", submission(), token="owner-east").status_code == 403


def test_who_asks_a_busy_planner_is_told_to_ask_again() -> None:
    """No request hangs: after the time limit, or where enough already wait, the answer is that there is no plan yet."""
    asked_for, go_on = threading.Event(), threading.Event()

    def slow(_: PlanRequest) -> PlanSet:
        asked_for.set()
        go_on.wait(10)
        return PlanSet(plans=())

    hasty = PlannerQueue(slow, None, lambda: 0.0, lambda _: None, interactive_timeout_s=0.01)
    asked = MakePlans(job_id="j", round=1, submission=submission(), clusters=(EAST,), free_chips={})
    with pytest.raises(ConflictError, match=r"has not answered within 0\.01 s"):
        hasty.plan_now(asked)
    asked_for.clear()
    full = PlannerQueue(slow, None, lambda: 0.0, lambda _: None, max_interactive_requests=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(full.plan_now, asked)
        assert asked_for.wait(10)
        with pytest.raises(ConflictError, match="1 requests already wait"):
            full.plan_now(asked)
        go_on.set()
        assert waiting.result(10).plans == ()
    for one in (hasty, full):
        one.close()


def test_a_dry_run_shows_what_the_sites_find_and_leaves_no_event(server: Server) -> None:
    """The sites of the first plan are asked although there is no job; a site without an answer is shown as such."""
    for site in (EAST, WEST):
        server.sync(report(site, checks=True))
    fields = {"model": "/pool/model", "output": "/pool/out", "checkpoints": {"folder": "/pool/ckpt"}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(dry_run, server, **fields)
        orders: list[PreflightOrder] = []
        server.until(lambda: bool(orders.extend(server.sync(report(EAST, checks=True)).preflights) or orders))
        assert orders[0].temporary
        server.sync(report(EAST, checks=True, preflights=(answered(orders[0], model="failed"),)))
        (order,) = server.sync(report(WEST, checks=True)).preflights
        server.sync(report(WEST, checks=True, preflights=(answered(order),)))
        found = asked.result(10)
    assert [(one.cluster, one.state) for one in found.preflight] == [("east", "failed"), ("west", "passed")]
    assert [one.detail for one in found.preflight[0].results if one.status == "failed"] == ["/pool/model is bad"]
    assert server.sync(report(EAST, checks=True)).preflights == ()


def test_an_offered_plan_is_checked_without_choosing_it(server: Server) -> None:
    """The sites answer for the plan; the job stays as it is; a plan that is not offered is not found."""
    for site in (EAST, WEST):
        server.sync(report(site, checks=True))
    fields = {"model": "/pool/model", "output": "/pool/out", "checkpoints": {"folder": "/pool/ckpt"}}
    job = server.submit("ann", policy="manual", **fields)
    server.until(lambda: server.job(job.id).plans is not None)
    path = f"/v1/jobs/{job.id}/plans/{server.job(job.id).plans.plans[0].id}/check"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.call, "POST", path)
        orders: list[PreflightOrder] = []
        server.until(lambda: bool(orders.extend(server.sync(report(EAST, checks=True)).preflights) or orders))
        server.sync(report(EAST, checks=True, preflights=(answered(orders[0], model="failed"),)))
        (order,) = server.sync(report(WEST, checks=True)).preflights
        server.sync(report(WEST, checks=True, preflights=(answered(order),)))
        found = asked.result(10).json()
    assert [(one["cluster"], one["state"]) for one in found] == [("east", "failed"), ("west", "passed")]
    assert (server.job(job.id).state, server.job(job.id).plan) == ("choosing", None)
    waiting = server.call("POST", f"{path}?timeout_s=0").json()
    assert {one["state"] for one in waiting} == {"waiting"}
    assert server.call("POST", f"/v1/jobs/{job.id}/plans/none/check").status_code == 404
    assert server.call("POST", f"{path}?timeout_s=9").status_code == 422


def test_a_site_answers_the_checks_of_a_job_with_its_reports(server: Server) -> None:
    """Orders are repeated until all sites have answered, also for a report that was lost on its way."""
    for site in (EAST, WEST):
        server.sync(report(site, checks=True))
    fields = {"model": "/pool/model", "output": "/pool/out", "checkpoints": {"folder": "/pool/ckpt"}}
    job = server.submit("ann", **fields)
    server.until(lambda: server.job(job.id).plan is not None)
    for phase in ("own", "peers"):
        for site in (EAST, WEST):
            (order,) = server.sync(report(site, checks=True)).preflights
            assert (order.phase, order.temporary) == (phase, False)
            assert server.sync(report(site, checks=True)).preflights == (order,)
            assert server.job(job.id).state == "waiting"
            server.sync(report(site, checks=True, preflights=(answered(order),)))
    assert server.job(job.id).state == "preparing"
    assert [(one.cluster, one.state) for one in server.job(job.id).preflight] == [
        ("east", "passed"),
        ("west", "passed"),
    ]


def test_ranks_are_shown_to_the_jobs_user_alone(server: Server) -> None:
    """All ranks of the plan, with the addresses of those that have checked in; no plan is a conflict."""
    job = server.committed()
    worker = WorkerAddress(rank=0, cluster="east", host="10.0.0.7", port=7001, device="h20/0/1")
    server.sync(report(EAST, ObservedPart(job=job.id, attempt=1, state="running", workers=(worker,))))
    answer = server.call("GET", f"/v1/jobs/{job.id}/ranks")
    assert answer.status_code == 200
    found = [RankView.model_validate(one) for one in answer.json()]
    assert [(one.rank, one.cluster, one.node, one.addresses) for one in found] == [
        (0, "east", "h20/0", ("10.0.0.7",)),
        (1, "west", "", ()),
    ]
    assert [[peer.rank for peer in one.peers] for one in found] == [[1], [0]]
    assert server.call("GET", f"/v1/jobs/{job.id}/ranks", token="bob").status_code == 404
    assert server.call("GET", "/v1/jobs/nothing/ranks").status_code == 404
