"""What the server knows of the waits of an owner's users: what counts as a wait, pages, and who may read them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.control.queries.accounts.waited_jobs import waited_jobs
from isthmus.core.errors import FileError
from isthmus.core.files.user_files import load_pool
from isthmus.core.messages.agent_messages import ObservedPart, PartEvent
from isthmus.core.pool_parts.owner_users import MAX_OWNER_USERS
from isthmus.core.views.wait_views import WaitedJob
from tests.cli.test_catalogue_commands import forwarded
from tests.control.conftest import server
from tests.control.driver import Driver, seen, started
from tests.control.serving import EAST, WEST, report
from tests.control.test_job_history import report_events
from tests.control.test_server_api import Server

__all__ = ["server"]

FILE = """\
owners:
  - name: east
    users: [ann, bob]
  - {name: west, users: [%s]}
clusters:
  - {name: e, owner: east, node_groups: [{chip: H20, nodes: 1, chips_per_node: 8}]}
"""


def only(pool: Driver, now_s: float) -> WaitedJob:
    """The only job, as it is at `now_s`."""
    user = pool.coordinator.state.jobs["j"].user
    (found,), more = waited_jobs(pool.coordinator.state, (user,), 0, 1e9, now_s)
    assert more is None
    return found


def test_all_time_that_is_not_training_is_waiting() -> None:
    """Submitted and started at 100 s, it trains to 130 s; later than its end nothing counts."""
    pool = started("a", "b")
    running = only(pool, 125.0)
    assert (running.waited_s, running.ran_s, running.open, running.chips) == (0, 25, True, 2)
    pool.now_s = 130.0
    for site in "ab":
        pool.report(site, seen("j", 1, "succeeded"))
    pool.obey()
    ended = only(pool, 900.0)
    assert (ended.submitted_s, ended.waited_s, ended.ran_s, ended.started, ended.open) == (100, 0, 30, True, False)
    assert ended.chips == 2, "an ended job keeps its plan alone"


def test_work_that_is_lost_counts_as_waiting() -> None:
    """Saved after 40 s and lost after 60 s: of these 60 s, and of what follows, only 40 s were not waiting."""
    pool = started("a", "b", steps=100)
    pool.now_s = 150.0
    report_events(pool, "a", PartEvent(rank=0, number=0, kind="saved", time_s=140.0, step=50, seconds=0.5))
    pool.now_s = 160.0
    pool.report("b", seen("j", 1, "failed", "rank 1 was ended by signal 9"))
    found = only(pool, 200.0)
    assert (found.ran_s, found.waited_s, found.open) == (40, 60, True)


def test_the_month_and_the_users_bound_what_is_found() -> None:
    """The begin counts, the end does not; jobs of others are not there."""
    pool = started("a", "b")
    state, user = pool.coordinator.state, pool.coordinator.state.jobs["j"].user
    assert waited_jobs(state, (user,), 100, 101, 300)[0]
    assert not waited_jobs(state, (user,), 101, 1e9, 300)[0]
    assert not waited_jobs(state, (user,), 0, 100, 300)[0]
    assert not waited_jobs(state, ("stranger",), 0, 1e9, 300)[0]


def test_pages_have_every_job_once_and_examine_a_bounded_number() -> None:
    """Whatever the limit, following the cursor gives the same jobs in the order of submission."""
    pool = Driver("a")
    for number in range(7):
        pool.submit(f"j{number}")
    state, user = pool.coordinator.state, pool.coordinator.state.jobs["j0"].user
    for limits in ({"limit": 2}, {"max_examined": 3}, {"limit": 7}):
        found: list[str] = []
        jobs, after = waited_jobs(state, (user,), 0, 1e9, 200, **limits)
        while after is not None:
            found += [one.job for one in jobs]
            jobs, after = waited_jobs(state, (user,), 0, 1e9, 200, after=after, **limits)
        assert [*found, *(one.job for one in jobs)] == [f"j{number}" for number in range(7)]
    assert all(one.chips == 0 and not one.started for one in jobs)


@pytest.mark.parametrize(
    ("users", "reason"),
    [
        ("cy, ann", "user 'ann' is of owner east already"),
        ("cy, cy", "user 'cy' is in this list already"),
        ("a b", "must be a name of at most 63"),
        (", ".join(f"u{at}" for at in range(MAX_OWNER_USERS + 1)), f"at most {MAX_OWNER_USERS}"),
    ],
    ids=["two owners", "twice", "no name", "too many"],
)
def test_users_of_owners_are_checked_with_their_line(tmp_path: Path, users: str, reason: str) -> None:
    """A user is one of one owner; names and their number are bounded."""
    (tmp_path / "pool.yaml").write_text(FILE % users)
    with pytest.raises(FileError) as caught:
        load_pool(tmp_path / "pool.yaml")
    assert caught.value.line == 4
    assert reason in str(caught.value)
    assert users.startswith("a b") or "u0" in users or "list each user once" in str(caught.value.hint)


def test_users_of_two_owners_are_accepted(tmp_path: Path) -> None:
    """The file that the refusals begin from is valid."""
    (tmp_path / "pool.yaml").write_text(FILE % "cy")
    assert [one.users for one in load_pool(tmp_path / "pool.yaml").owners] == [("ann", "bob"), ("cy",)]


def shown(
    server: Server, caller: str, *more: str, owner: str = "owner-east", command: str = "waits"
) -> tuple[int, str]:
    """Status and output of the command as a caller."""
    env = CliEnvironment(
        variables={"ISTHMUS_SERVER": "http://127.0.0.1:1", "ISTHMUS_TOKEN": caller, "COLUMNS": "200"},
        stdout=io.StringIO(), stderr=io.StringIO(), transport=forwarded(server), now=lambda: server.now_s,
    )  # fmt: skip
    status = main([command, "--owner", owner, "--month", "1970-01", *more], env=env)
    return status, env.stdout.getvalue() + env.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.integration
def test_the_command_compares_the_jobs_of_the_owners_users(server: Server) -> None:
    """Ann's job began an hour late in the pool; on the chips of her owner alone it would have begun at once."""
    job = server.committed(name="one").id
    server.now_s += 3600
    for site in (EAST, WEST):
        server.sync(report(site, ObservedPart(job=job, attempt=1, state="running")))
    server.submit("bob", name="other")
    found = json.loads(shown(server, "owner-east", "--json")[1])
    assert (found["users"], found["jobs"], found["open"], found["compared"], found["final"]) == (1, 1, 1, 1, False)
    assert found["pool"]["mean_s"] == 3600
    assert found["alone"]["mean_s"] < 60
    assert found["verdict"] == "worse"
    status, text = shown(server, "root")
    assert status == 0
    assert "owner-east in 1970-01: 1 users, 1 jobs: worse so far" in text
    assert "1 jobs have not ended: their waits so far count" in text


@pytest.mark.integration
def test_an_owners_statement_has_the_waits_of_its_users(server: Server) -> None:
    """The figures of the command, in JSON, CSV and the page; an owner without users has none."""
    job = server.committed(name="one").id
    server.now_s += 3600
    for site in (EAST, WEST):
        server.sync(report(site, ObservedPart(job=job, attempt=1, state="running")))
    waits = json.loads(shown(server, "owner-east", "--json")[1])

    def bill(caller: str, form: str, owner: str = "owner-east") -> str:
        return shown(server, caller, "--format", form, command="bill", owner=owner)[1]

    assert json.loads(bill("owner-east", "json"))["waits"] == waits
    rows = {row["job"]: (row["quantity"], row["unit"]) for row in csv.DictReader(io.StringIO(bill("root", "csv")))}
    assert rows["wait in the pool, 1 jobs: mean"] == ("3600.0", "s")
    assert float(rows["wait alone, the same jobs (simulated): 95 of 100"][0]) < 60
    assert "waits: worse" in rows
    assert "total" in rows
    page = bill("owner-east", "html")
    assert "Waits of this owner&#x27;s own users" in page
    assert "1 users, 1 jobs: worse so far" in page
    assert json.loads(bill("owner-west", "json", owner="owner-west"))["waits"] is None
    assert "Waits of" not in bill("owner-west", "html", owner="owner-west")


@pytest.mark.integration
def test_strangers_learn_nothing_about_the_waits_of_an_owner(server: Server) -> None:
    """Another owner, a user, a wrong month, an owner without users, an owner that is not there."""
    path = "/v1/waits/owner-east?month=1970-01"
    assert server.call("GET", path, token="owner-east").status_code == 200
    assert server.call("GET", path, token="owner-west").status_code == 404
    assert server.call("GET", path, token="ann").status_code == 403
    assert server.call("GET", path, token=None).status_code == 401
    assert server.call("GET", "/v1/waits/owner-east?month=1970-13", token="root").status_code == 422
    assert server.call("GET", "/v1/waits/nobody?month=1970-01", token="root").status_code == 404
    status, text = shown(server, "owner-west", owner="owner-west")
    assert status == 5
    assert "no user is listed as one of owner 'owner-west'" in text
    assert "users: [" in text
    records = server.call("GET", "/v1/audit", token="root").json()["records"]
    assert any("the waiting times of another owner's users" in json.dumps(one) for one in records), records
