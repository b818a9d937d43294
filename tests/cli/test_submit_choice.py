"""`isthmus submit --watch` of a job whose user chooses the plan: it asks, or says how to choose, and never hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.core.plan import PlanSet
from tests.cli.fake_server import FakeServer, Outcome, run
from tests.cli.samples import make_plan, write_job

ROOT = Path(__file__).parents[2]
JOB = "j-0000"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def planning_server(offered: str = "choosing") -> tuple[FakeServer, Callable[[float], None]]:
    """Return a server that has plans at the second look, and ends the job once a plan is chosen."""
    server, looks = FakeServer(), [0]

    def sleep(_: float) -> None:
        looks[0] += 1
        assert looks[0] < 50, "the command hangs"
        (view,) = server.jobs.values()
        if view.state == "planning":
            plans = PlanSet(plans=(make_plan("p1"), make_plan("p2")))
            server.jobs[JOB] = view.model_copy(update={"state": offered, "plans": plans, "reason": "2 plans"})
        elif view.plan is not None or view.job.policy == "auto":
            server.jobs[JOB] = view.model_copy(update={"state": "succeeded"})

    return server, sleep


def submit(job_file: Path, *more: str, typed: str | None = None, offered: str = "choosing") -> tuple[Outcome, str]:
    """Submit and watch; return the outcome and the id of the chosen plan ("" if none)."""
    server, sleep = planning_server(offered)
    done = run(server, "submit", job_file, "--watch", *more, typed=typed, terminal=typed is not None, sleep=sleep)
    plan = server.jobs[JOB].plan
    return done, plan.id if plan else ""


@pytest.mark.parametrize(("typed", "plan"), [("\n", "p1"), ("2\n", "p2"), ("p2\n", "p2"), ("7\nnope\n²\n1\n", "p1")])
def test_a_terminal_shows_the_plans_and_asks(job_file: Path, typed: str, plan: str) -> None:
    """Enter takes the first, a number or an id that plan; anything else repeats the question. Then it watches."""
    done, chosen = submit(job_file, typed=typed)
    assert (done.status, chosen) == (0, plan)
    assert "p2" in done.out
    assert "Which plan?" in done.out
    assert "succeeded" in done.out
    assert done.err.count("none of the plans") == typed.count("\n") - 1


@pytest.mark.parametrize("typed", ["q\n", ""])
def test_who_decides_later_learns_the_command(job_file: Path, typed: str) -> None:
    """`q` and a closed input leave the job waiting; the end says how to choose."""
    done, chosen = submit(job_file, typed=typed)
    assert (done.status, chosen) == (6, "")
    assert f"isthmus choose {JOB} p1" in done.err


@pytest.mark.parametrize("offered", ["choosing", "waiting"])
def test_without_a_terminal_the_command_that_chooses_is_printed(job_file: Path, offered: str) -> None:
    """Status 6 and the exact command, also for plans that must wait for chips; nothing hangs."""
    done, chosen = submit(job_file, offered=offered)
    assert (done.status, chosen) == (6, "")
    assert f"`isthmus choose {JOB} p1`" in done.err
    assert "2 plans" in done.err


def test_json_never_asks(job_file: Path) -> None:
    """A program gets the job and then the error, one document per line, even at a terminal."""
    done, _ = submit(job_file, "--json", typed="1\n")
    job, error = done.lines
    assert (done.status, job["id"], error["error"]) == (6, JOB, "ConflictError")
    assert f"isthmus choose {JOB} p1" in error["hint"]


def test_auto_needs_no_choice(job_file: Path) -> None:
    """`--auto` submits the job with `policy: auto`: the server takes the fastest plan."""
    server, sleep = planning_server()
    assert run(server, "submit", job_file, "--watch", "--auto", sleep=sleep).status == 0
    assert server.jobs[JOB].job.policy == "auto"
    assert not any(path.endswith("/choose") for path in server.seen)


def test_the_first_example_of_the_readme_does_not_stop_without_a_word(job_file: Path) -> None:
    """`submit` as the README has it, off a terminal, ends with a status and the next command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^isthmus (submit job\.yaml --watch)", text, flags=re.MULTILINE)
    server, sleep = planning_server()
    words = [str(job_file) if word == "job.yaml" else word for word in line.split()]
    done = run(server, *words, sleep=sleep)
    assert done.status == 6
    assert "isthmus choose" in done.err
