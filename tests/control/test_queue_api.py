"""The honest queue over the REST interface."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isthmus.core.messages import ObservedPart, StepMetrics
from isthmus.core.standing import Standing
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.shell.start()
    with made.http:
        yield made
    made.shell.close()


def queue(server: Server, path: str = "/v1/queue", token: str = "ann") -> list[Standing]:
    return [Standing.model_validate(one) for one in server.call("GET", path, token=token).json()]


def taken(server: Server) -> str:
    """A job of ann's that is being prepared at both sites, and all their other chips in use."""
    found = server.prepared()
    parts = [ObservedPart(job=found.id, attempt=1, state="prepared")]
    for site in (EAST, WEST):
        server.sync(report(site, *parts, free_chips={"h20": 0}))
    return found.id


def test_a_waiting_job_answers_why_and_its_user_alone_may_ask(server: Server) -> None:
    """The refusals of the planner, in the job's own answer; to others the job does not exist."""
    taken(server)
    job = server.submit("ann")
    server.until(lambda: server.job(job.id).state == "waiting")
    answer = server.call("GET", f"/v1/jobs/{job.id}/queue")
    assert answer.status_code == 200
    found = Standing.model_validate(answer.json())
    assert (found.id, found.reason) == (job.id, "no plan fits what is free")
    assert found.refused[0].reason == "none free: ['east', 'west']"
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
    assert server.shell._progress.paces()[job].step_s == 3.0
