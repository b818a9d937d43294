"""`isthmus submit` waits some seconds for what the sites find of the job's files, and refuses the job as they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.client.api_client import ApiClient
from isthmus.client.site_checks import CHECKS_WAIT_S, await_checks, read_verdict, require_not_refused
from isthmus.core.errors import ConflictError
from isthmus.core.messages.preflight import CheckResult, SitePreflight
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import JobView
from tests.cli.fake_server import FakeServer, Outcome, Terminal, run
from tests.cli.samples import make_plan, write_job

JOB = "j-0000"
GOOD = CheckResult(name="model", status="passed")
BAD = CheckResult(name="data", status="failed", detail="/pool/text: no such file or folder", hint="copy it there")
PASSED = (SitePreflight(cluster="a", state="passed", results=(GOOD,)),)
FAILED = (*PASSED, SitePreflight(cluster="b", state="failed", results=(GOOD, BAD)))
SILENT = (*PASSED, SitePreflight(cluster="b", state="waiting"))
UNCHECKED = (SitePreflight(cluster="a", state="not checked"),)
OFFER = PlanSet(plans=(make_plan("p1"), make_plan("p2")))
MISSING = "b: data: /pool/text: no such file or folder (copy it there)"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def changes_at(look: int, server: FakeServer, **changes: object) -> Callable[[float], None]:
    """Return a `sleep` that changes the job at the `look`-th look at it."""
    looks = [0]

    def sleep(_: float) -> None:
        looks[0] += 1
        assert looks[0] < 100, "the command hangs"
        if looks[0] == look:
            server.jobs[JOB] = server.jobs[JOB].model_copy(update=changes)

    return sleep


def submit(job_file: Path, *more: str, checks: tuple[SitePreflight, ...] | None = None, **changes: object) -> Outcome:
    """Submit to a server that changes the job at the third look; `checks` are those of an offered plan."""
    server = FakeServer(site_checks={} if checks is None else {"p1": checks})
    return run(server, "submit", job_file, *more, sleep=changes_at(3, server, **changes))


def test_a_file_that_only_the_sites_miss_is_known_in_the_answer(job_file: Path) -> None:
    """A job that its sites refuse ends the command with status 6, the site, the file and what to do."""
    done = submit(
        job_file, "--auto", state="failed", reason="plan p1 failed its checks: b: /pool/text", preflight=FAILED
    )
    assert done.status == 6
    assert f"job {JOB} failed: plan p1 failed its checks: b: /pool/text" in done.err
    assert "repair it and submit again" in done.err
    assert "/pool/text: no such file or folder; copy it there" in done.out


def test_the_fastest_offered_plan_is_checked_where_the_user_chooses(job_file: Path) -> None:
    """The job stays; status 6 names the finding and what to do with the job."""
    done = submit(job_file, checks=FAILED, state="choosing", plans=OFFER)
    assert done.status == 6
    assert f"the sites refuse plan p1 of job {JOB}: {MISSING}" in done.err
    assert f"isthmus choose {JOB} p1" in done.err
    assert f"isthmus cancel {JOB}" in done.err


def test_checks_that_pass_are_said_with_the_next_step(job_file: Path) -> None:
    """Both for a plan that is offered and for one that the server has taken."""
    done = submit(job_file, checks=PASSED, state="choosing", plans=OFFER)
    assert done.status == 0
    assert "checks: passed at the sites of plan p1 (a)" in done.out
    assert f"isthmus choose {JOB} PLAN" in done.out
    done = submit(job_file, "--auto", state="preparing", plan=make_plan("p2"), preflight=PASSED)
    assert "checks: passed at the sites of plan p2 (a)" in done.out


@pytest.mark.parametrize("more", [{}, {"state": "waiting", "plan": make_plan(), "preflight": SILENT}])
def test_no_verdict_in_time_is_said_and_is_no_failure(job_file: Path, more: dict[str, object]) -> None:
    """The planner is busy, or a site is silent: after 10 s the job is queued, and the answer says what is open."""
    done = submit(job_file, **more)
    assert done.status == 0
    assert "queued; the sites' checks are not complete yet" in done.out


def test_json_holds_the_checks(job_file: Path) -> None:
    """The answer is the job with `checks`: state, plan, sites; a refusal is the error alone."""
    checks = submit(job_file, "--json", checks=PASSED, state="choosing", plans=OFFER).json["checks"]
    assert (checks["state"], checks["plan"]) == ("passed", "p1")
    assert checks["sites"][0]["results"][0]["name"] == "model"
    refused = submit(job_file, "--json", checks=FAILED, state="choosing", plans=OFFER)
    assert (refused.status, refused.json["error"]) == (6, "ConflictError")
    assert MISSING in refused.json["message"]


def test_no_wait_returns_at_once(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not one look at the job after its submission; the help states the limit of the wait."""
    server = FakeServer()
    done = run(server, "submit", job_file, "--no-wait", sleep=lambda _: pytest.fail("it waited"))
    assert done.status == 0
    assert server.seen[-1] == "POST /v1/jobs"
    assert "checks" not in run(FakeServer(), "submit", job_file, "--no-wait", "--json").json
    run(None, "submit", "--help")
    assert f"waits up to {CHECKS_WAIT_S:g} s" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_during_the_wait_says_that_the_job_goes_on(job_file: Path) -> None:
    """Exit 130, as with --watch."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    done = run(FakeServer(), "submit", job_file, sleep=interrupt)
    assert (done.status, done.err) == (130, f"job {JOB} continues; `isthmus cancel {JOB}` stops it\n")


def test_a_server_without_the_endpoint_leaves_the_checks_open(job_file: Path) -> None:
    """A server of an earlier version answers 404: the job is submitted all the same."""
    done = submit(job_file, state="choosing", plans=OFFER)
    assert done.status == 0
    assert "not complete yet" in done.out


def verdict(**changes: object) -> str:
    """The state of the verdict of the sample job with `changes`."""
    return read_verdict(FakeServer().add(**changes)).state


def test_the_verdict_follows_from_the_job_alone() -> None:
    """A job that has a plan has the verdict of its sites; one that is planned again has none yet."""
    assert verdict(state="waiting", preflight=PASSED) == "passed"
    assert verdict(state="waiting", preflight=SILENT) == "incomplete"
    assert verdict(state="waiting", preflight=()) == "incomplete"
    assert verdict(state="waiting", preflight=FAILED) == "incomplete", "of the plan before this one"
    assert verdict(state="planning", preflight=FAILED) == "incomplete"
    assert verdict(state="waiting", plan=None, plans=None, preflight=()) == "incomplete"
    assert verdict(state="running", preflight=()) == "not checked"
    assert verdict(state="preparing", preflight=UNCHECKED) == "not checked"
    assert verdict(state="failed", preflight=()) == "refused"


def wait_for(api: ApiClient, view: JobView, limit_s: float) -> tuple[str, float]:
    """Return the state of the verdict and the seconds of the wait on a clock that only sleeping advances."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    found = await_checks(api, view, limit_s=limit_s, now=lambda: now_s[0], sleep=sleep)[1]
    return found.state, now_s[0]


def test_the_wait_has_a_limit() -> None:
    """A job that stays in the planner costs `limit_s` and one more look."""
    server = FakeServer()
    view = server.add(state="planning", plan=None, plans=None)
    with server.client() as api:
        state, waited_s = wait_for(api, view, 3.0)
    assert (state, round(waited_s, 6)) == ("incomplete", 3.0)


def test_a_refusal_raises_and_anything_else_does_not() -> None:
    """`Client.submit(checks_wait_s=...)` and the command line share this."""
    view = FakeServer().add(state="failed", preflight=FAILED, reason="no such file or folder")
    with pytest.raises(ConflictError, match="no such file or folder"):
        require_not_refused(view, read_verdict(view))
    view = FakeServer().add(state="waiting", preflight=SILENT)
    require_not_refused(view, read_verdict(view))


def test_a_person_at_a_terminal_sees_what_the_command_waits_for(job_file: Path) -> None:
    """One line on standard error, nothing where it is no terminal."""
    assert run(FakeServer(), "submit", job_file).err == ""
    assert "waiting up to 10 s" in run(FakeServer(), "submit", job_file, error_stream=Terminal()).err
