"""`isthmus.Client` against a fake server: what each method returns, how following ends, what errors say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus import Client, IsthmusError
from isthmus.core.errors import ConflictError, InputError, NotFoundError, PlanError, UnavailableError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import LogChunk
from tests.cli.fake_server import TOKEN, URL, FakeServer
from tests.cli.samples import START_S, make_metrics, make_plan, write_job


def connect(server: FakeServer, folder: Path, on_sleep: Callable[[], None] = lambda: None) -> Client:
    """Return a client of `server` on a clock that only sleeping advances."""
    (folder / "token").write_text(TOKEN)
    now_s = [START_S]

    def sleep(seconds: float) -> None:
        now_s[0] += max(seconds, 0.01)
        on_sleep()

    where = {"transport": server.transport(), "now": lambda: now_s[0], "sleep": sleep}
    return Client(URL, token_file=folder / "token", **where)


def test_a_job_file_is_submitted_as_the_command_line_does(tmp_path: Path) -> None:
    """Relative paths start at the file; `auto` sets the policy; a repeated key is the same job; a `Job` works too."""
    server, file = FakeServer(), write_job(tmp_path)
    with connect(server, tmp_path) as client:
        view = client.submit(str(file), auto=True, key="k")
        assert (view.job.policy, view.job.model) == ("auto", str(tmp_path / "config.json"))
        assert client.submit(file, key="k").id == view.id
        job = Job.model_validate(view.job.model_dump() | {"policy": "manual"})
        assert client.submit(job).job.policy == "manual"
        assert client.dry_run(file).standing.state == "waiting"


def test_submit_waits_for_the_checks_only_when_asked_to(tmp_path: Path) -> None:
    """`checks_wait_s` returns the job as the sites have left it; a refusal raises with their finding."""
    server, file = FakeServer(), write_job(tmp_path)

    def fail() -> None:
        for name, view in server.jobs.items():
            server.jobs[name] = view.model_copy(update={"state": "failed", "reason": "b: /pool/text: no such file"})

    with connect(server, tmp_path, fail) as client:
        assert client.submit(file).state == "planning"
        with pytest.raises(ConflictError, match="failed: b: /pool/text: no such file"):
            client.submit(file, checks_wait_s=5)
    with connect(FakeServer(), tmp_path) as client:
        assert client.submit(file, checks_wait_s=5).state == "planning"


def test_plans_wait_for_the_planner_and_say_when_there_are_none(tmp_path: Path) -> None:
    """While the job is planned the client asks again, up to `timeout_s`; a failed job is a `PlanError`."""
    server = FakeServer()
    view = server.add(state="planning", plan=None, plans=None)

    def planned() -> None:
        server.add(state="choosing", plan=None)

    assert [one.id for one in connect(server, tmp_path, planned).plans(view).plans] == ["p1", "p2"]
    server.add(state="planning", plan=None, plans=None)
    with pytest.raises(ConflictError, match="still being planned after 2 s"):
        connect(server, tmp_path).plans(view.id, timeout_s=2)
    server.add(state="failed", plan=None, plans=None, reason="tp 3 does not divide")
    with pytest.raises(PlanError, match="tp 3 does not divide"):
        connect(server, tmp_path).plans(view.id)


def test_watch_yields_every_metric_once_and_ends_with_the_job(tmp_path: Path) -> None:
    """Updates carry only new metrics; the last one has the final state; a restart of the server is waited for."""
    server, coming, taken = FakeServer(), make_metrics(), [0]
    view = server.add(state="running")

    def progress() -> None:
        taken[0] += 30
        server.outages = 6 if taken[0] == 60 else 0
        server.metrics[view.id] = coming[: taken[0]]
        if taken[0] >= len(coming):
            server.add(state="succeeded")

    updates = list(connect(server, tmp_path, progress).watch("stdlib-moe"))
    assert [one for update in updates for one in update.metrics] == coming
    assert updates[-1].view.state == "succeeded"
    steps = [update.step for update in updates if update.loss is not None]
    assert steps == sorted(steps)
    assert updates[-1].loss is not None


def test_watch_gives_up_on_a_server_that_stays_away(tmp_path: Path) -> None:
    """After a minute without a server the iterator raises."""
    server = FakeServer()
    view = server.add()
    client = connect(server, tmp_path)
    updates = client.watch(view)
    assert next(updates).view.id == view.id
    server.outages = 10**6
    with pytest.raises(UnavailableError):
        next(updates)


def test_logs_are_whole_lines_of_a_rank(tmp_path: Path) -> None:
    """Chunks may end anywhere; the last line comes although it has no end."""
    server = FakeServer()
    view = server.add()
    texts = ((0, "one\ntw"), (1, "other\n"), (0, "o\nthree"))
    server.logs[view.id] = [
        LogChunk(job=view.id, attempt=1, rank=rank, offset=number, text=text)
        for number, (rank, text) in enumerate(texts)
    ]
    with connect(server, tmp_path) as client:
        assert [line.text for line in client.logs(view, rank=0)] == ["one", "two", "three"]
        assert [(line.rank, line.text) for line in client.logs(view.name)][1] == (1, "other")


def test_jobs_are_filtered_and_changed(tmp_path: Path) -> None:
    """Filters, choice, cancellation and the pool, by name, by id and by what `submit` returned."""
    server = FakeServer()
    server.add(id="j-old", name="old", state="failed", submitted_s=START_S - 500)
    view = server.add(id="j-new", name="new", state="choosing", plan=None, submitted_s=START_S - 5)
    client = connect(server, tmp_path)
    assert [one.id for one in client.jobs()] == ["j-new", "j-old"]
    assert [one.id for one in client.jobs(state=["failed"], limit=1)] == ["j-old"]
    chosen = client.choose("new", "p1").plan
    assert chosen is not None
    assert chosen.id == make_plan().id
    assert client.cancel(view).state == "stopping"
    assert client.job("j-n").id == "j-new"
    assert len(client.pool().clusters) == 3


def test_errors_say_what_is_wrong_and_what_to_do_next(tmp_path: Path) -> None:
    """Each is an `IsthmusError` of its kind with a message and a hint, whoever found the mistake."""
    server = FakeServer()
    view = server.add(state="choosing", plan=None)
    client = connect(server, tmp_path)
    mistakes: list[tuple[type[IsthmusError], Callable[[], object], str]] = [
        (NotFoundError, lambda: client.cancel("nope"), "no job 'nope'"),
        (NotFoundError, lambda: client.choose(view, "p9"), "no plan p9"),
        (InputError, lambda: client.submit(tmp_path / "missing.yaml"), "missing.yaml"),
        (InputError, lambda: client.jobs(state=["runing"]), "state 'runing'"),  # type: ignore[list-item]
        (InputError, lambda: client.jobs(name="a b"), "name 'a b'"),
        (InputError, lambda: client.jobs(since_s=-1), "since_s '-1'"),
    ]
    for kind, call, words in mistakes:
        with pytest.raises(kind) as raised:
            call()
        assert words in raised.value.message
        assert raised.value.hint
