"""Quotas over REST and on the command line: who sets and sees what, and what the errors name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli import main
from isthmus.cli.commands.accounting.statement_formats import statement_page
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.control.service.auth import token_digest
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import InputError
from isthmus.core.owner.accounts import MAX_PLACES, Accounts, ChipsAt, Limits, Project
from isthmus.core.owner.own_quota import own_quota
from isthmus.core.owner.with_quota import QuotaChange
from isthmus.core.views.ledger_views import JobQuote, StatementView
from tests.cli.test_catalogue_commands import forwarded
from tests.control.serving import EAST, WEST, report, submission
from tests.control.test_ledger_api import paid
from tests.control.test_server_api import Server

pytestmark = pytest.mark.integration

Run = Callable[..., tuple[int, str]]
FILE = """\
projects:
  - {name: lab, members: [ann], limits: {chips: %d}}
  - {name: nlp, parent: lab, members: [bob]}
  - {name: other, members: [eve]}
users:
  - {name: bob, limits: {spend_per_month: 10}}
"""


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    """Run a command line as a caller; return its status and output."""

    def run_as(*arguments: object, caller: str = "root") -> tuple[int, str]:
        env = CliEnvironment(
            variables={"ISTHMUS_SERVER": "http://127.0.0.1:1", "ISTHMUS_TOKEN": caller},
            stdout=io.StringIO(), stderr=io.StringIO(), transport=forwarded(server), now=lambda: server.now_s,
        )  # fmt: skip
        status = main([str(one) for one in arguments], env=env)
        return status, env.stdout.getvalue() + env.stderr.getvalue()  # type: ignore[attr-defined]

    return run_as


def set_quotas(run: Run, folder: Path, text: str, caller: str = "root") -> tuple[int, str]:
    file = folder / "accounts.yaml"
    file.write_text(text)
    return run("quota", "set", file, caller=caller)


def shown(run: Run, caller: str, *more: str) -> dict[str, dict[str, Any]]:
    status, text = run("quota", "show", "--json", *more, caller=caller)
    assert status == 0, text
    return {f"{row['kind']}:{row['name']}": row for row in json.loads(text)["rows"]}


def test_each_user_sees_its_own_accounts_and_jobs_and_an_admin_all(server: Server, run: Run, tmp_path: Path) -> None:
    """Ann sees her projects and what they hold, and not the users of the pool, nor Bob's jobs."""
    for site in (EAST, WEST):
        server.sync(report(site))
    assert set_quotas(run, tmp_path, FILE % 8) == (0, "3 projects, 0 groups and 1 limited users are in effect\n")
    job = server.committed(name="one", project="nlp").id
    mine, all_of_it = shown(run, "ann"), shown(run, "root")
    assert mine.keys() == {"project:lab", "project:nlp", "user:ann"}
    assert (mine["project:lab"]["num_chips"], mine["project:lab"]["jobs"]) == (2, [job])
    assert {"project:other", "user:bob", "user:ann"} < all_of_it.keys()
    bobs = shown(run, "bob")
    assert bobs.keys() == {"project:lab", "project:nlp", "user:bob"}
    assert (bobs["project:nlp"]["num_chips"], bobs["project:nlp"]["jobs"]) == (2, [])
    assert shown(run, "bob", "--user", "bob")["user:bob"]["max_spend_millionths"] == 10_000_000
    assert run("quota", "show", "--project", "other", caller="ann")[0] == 5
    table = run("quota", "show")[1]
    assert "  project nlp" in table
    assert "2 of 8" in table


def test_only_an_admin_sets_quotas_and_what_it_did_is_audited(server: Server, run: Run, tmp_path: Path) -> None:
    """A limit below what runs is refused with what holds it; nothing changes then."""
    for site in (EAST, WEST):
        server.sync(report(site))
    assert set_quotas(run, tmp_path, FILE % 8, caller="ann")[0] == 4
    set_quotas(run, tmp_path, FILE % 8)
    job = server.committed(name="one", project="lab").id
    status, text = set_quotas(run, tmp_path, FILE % 1)
    assert (status, "project lab holds 2 chips now, more than 1" in text, f"{job} (2)" in text) == (6, True, True)
    server.until(lambda: "quotas-set" in run("audit", "--json")[1])
    assert shown(run, "root")["project:lab"]["max_chips"] == 8


def test_the_limits_of_one_account_are_set_alone(server: Server, run: Run, tmp_path: Path) -> None:
    """All else stays; the refusal names the limit, what uses it and when it would hold; each act is audited."""
    for site in (EAST, WEST):
        server.sync(report(site))
    set_quotas(run, tmp_path, FILE % 8)
    job = server.committed(name="one", project="lab").id

    def limit(account: str, body: object, token: str = "root") -> tuple[int, dict[str, Any]]:
        answer = server.call("POST", f"/v1/quotas/{account}", body, token=token)
        return answer.status_code, answer.json()

    status, found = limit("project:lab", {"chips": 4, "spend_per_month": "9.5"})
    assert (status, found["rows"][0]["max_chips"], found["rows"][0]["max_spend_millionths"]) == (201, 4, 9_500_000)
    assert limit("user:eve", {"chip_hours_per_month": 3})[0] == 201
    rows = shown(run, "root")
    assert (rows["user:eve"]["max_chip_hours"], rows["user:bob"]["max_spend_millionths"]) == (3, 10_000_000)
    assert rows["project:nlp"]["parent"] == "lab"
    status, found = limit("project:lab", {"chips": 1})
    assert (status, "holds 2 chips now, more than 1; " in found["message"], f"{job} (2)" in found["hint"]) == (
        409, True, True,
    )  # fmt: skip
    assert "when it would hold is not known" in found["message"]
    assert limit("user:bob", {})[0] == 201
    assert shown(run, "root").get("user:bob", {}).get("max_spend_millionths") is None
    assert limit("project:lab", {}, token="ann")[0] == 403
    lines = [json.loads(line) for line in run("audit", "--json")[1].splitlines()]
    text = json.dumps(lines)
    assert "chips 4, spend_per_month 9.5" in text
    assert "holds 2 chips now" in text


@pytest.mark.attack
@pytest.mark.parametrize(
    ("account", "body", "status"),
    [("project:none", {}, 404), ("group:", {}, 422), ("owner:a", {}, 422), ("user:", {"chips": 1}, 422),
     ("user:a b\u202e", {"chips": 1}, 422), ("user:" + "a" * 90, {}, 422), ("project:lab", {"chips": -1}, 422),
     ("project:lab", {"chips": 10**30}, 422), ("project:lab", {"spend_per_month": "NaN"}, 422),
     ("project:lab", {"chip": 1}, 422)],
)  # fmt: skip
def test_limits_that_name_no_account_or_no_amount_are_refused(
    server: Server, run: Run, tmp_path: Path, account: str, body: object, status: int
) -> None:
    """Nothing changes then."""
    set_quotas(run, tmp_path, FILE % 8)
    before = shown(run, "root")
    answer = server.call("POST", f"/v1/quotas/{account}", body, token="root")
    assert (answer.status_code, shown(run, "root")) == (status, before), answer.text


def test_a_wrong_field_is_refused_with_its_line(run: Run, tmp_path: Path) -> None:
    """By the command line before it is sent, and by the server for what only it knows."""
    status, text = set_quotas(run, tmp_path, "projects:\n  - name: a\n    parent: b\n")
    assert (status, "accounts.yaml:3" in text, "there is no project 'b'" in text) == (2, True, True), text
    assert run("check", tmp_path / "accounts.yaml")[0] == 2


def test_a_job_of_a_project_that_is_not_its_users_is_refused(server: Server, run: Run, tmp_path: Path) -> None:
    """The same for a project of others and for none, also in a dry run."""
    set_quotas(run, tmp_path, FILE % 8)
    for name in ("other", "none"):
        wish = submission("k", name="x", project=name).model_dump(mode="json")
        for path in ("/v1/jobs", "/v1/jobs:dry-run"):
            answer = server.call("POST", path, wish, token="ann")
            assert (answer.status_code, answer.json()["message"]) == (
                404,
                f"project: user 'ann' has no project '{name}'",
            )


def test_the_statement_of_a_project_names_to_its_members_their_own_jobs_alone(
    server: Server, run: Run, tmp_path: Path
) -> None:
    """Ann's job of the project below costs 3.50; Bob sees the cost without her name, a stranger and owners nothing."""
    set_quotas(run, tmp_path, FILE % 8)
    job = paid(server, run, tmp_path, project="nlp")
    month = ("--month", "1970-01", "--format", "json")

    def billed(project: str, caller: str) -> tuple[int, list[tuple[str, str]]]:
        status, text = run("bill", "--project", project, *month, caller=caller)
        assert status == 0, text
        found = json.loads(text)
        return found["total_cents"], sorted({(line["job"], line["user"]) for line in found["lines"]})

    assert billed("lab", "ann") == billed("nlp", "ann") == billed("lab", "root") == (350, [(job, "ann")])
    assert billed("nlp", "bob") == (350, [("", "")])
    for project, caller in (("lab", "bob"), ("other", "ann"), ("nlp", "owner-east"), ("none", "root")):
        assert run("bill", "--project", project, *month, caller=caller)[0] == 5, (project, caller)
    focus = run("bill", "--project", "lab", "--month", "1970-01", "--format", "focus")[1]
    assert '{""project"": ""nlp""}' in focus
    assert server.call("DELETE", f"/v1/jobs/{job}").status_code == 204
    assert billed("lab", "root") == (350, [(job, "ann")])


def test_a_bill_as_a_page_shows_the_predicted_cost_beside_the_actual_one() -> None:
    """For each job whose quote is known."""
    quote = JobQuote(job="j", quoted_millionths=4_000_000, cost_millionths=3_500_000)
    found = StatementView(
        party="user", name="ann", month="1970-01", currency="EUR", begin_ms=0, end_ms=1, until_ms=1, final=True,
        lines=(), carried_in_millionths=0, carried_out_millionths=0, total_cents=0, quotes=(quote,),
    )  # fmt: skip
    page = statement_page(found)
    assert "Predicted and actual cost" in page
    assert page.index("4.000000") < page.index("3.500000")


OWNED = """\
projects:
  - {name: lab, members: [bob], guaranteed_at: [{cluster: west, chips: 1}]}
  - name: east-lab
    owner: owner-east
    members: [ann]
    limits: {chips: 99, chips_at: [{cluster: west, chips: 1}]}
"""


def test_an_owner_sets_and_sees_the_quotas_of_its_projects_at_its_own_clusters(
    server: Server, run: Run, tmp_path: Path
) -> None:
    """What the operator set besides stays, the act is audited, and the operator sees it."""
    for site in (EAST, WEST):
        server.sync(report(site))
    assert set_quotas(run, tmp_path, OWNED)[0] == 0
    change = ("quota", "limit", "project:east-lab", "--at", "east=1", "--guarantee", "east/h20=1")
    status, text = run(*change, caller="owner-east")
    assert status == 0, text
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["project", "east-lab", "0", "0", "of", "99", "0.0", "0.00"],
        ["at", "east", "0", "0", "of", "1"],
        ["at", "east/h20", "1", "0"],
        ["at", "west", "0", "0", "of", "1"],
    ]
    mine = shown(run, "owner-east")
    assert mine.keys() == {"project:east-lab"}
    assert mine["project:east-lab"]["owner"] == "owner-east"
    assert shown(run, "root")["project:east-lab"] == mine["project:east-lab"]
    job = server.committed(name="one").id
    assert shown(run, "owner-east")["project:east-lab"]["jobs"] == [job]
    server.until(lambda: "chips_at east=1, guaranteed_at east/h20=1" in run("audit", "--json")[1])


def test_an_owner_sets_nothing_else_and_a_stranger_sees_nothing(server: Server, run: Run, tmp_path: Path) -> None:
    """No account of others, no cluster of others, no limit of the operator's; each refusal is audited."""
    for site in (EAST, WEST):
        server.sync(report(site))
    set_quotas(run, tmp_path, OWNED)
    before = shown(run, "root")
    refused = [
        ("owner-east", "project:lab", ("--at", "east=1"), 5, "no account 'project:lab'"),
        ("owner-west", "project:east-lab", ("--at", "west=1"), 5, "no account 'project:east-lab'"),
        ("owner-east", "user:bob", ("--chips", "1"), 5, "no account 'user:bob'"),
        ("owner-east", "project:none", ("--none",), 5, "no account 'project:none'"),
        ("owner-east", "project:east-lab", ("--at", "west=8"), 4, "cluster 'west' is not yours"),
        ("owner-east", "project:east-lab", ("--guarantee", "none=1"), 4, "cluster 'none' is not yours"),
        ("owner-east", "project:east-lab", ("--chips", "7"), 4, "chips: the operator sets it"),
        ("owner-east", "project:east-lab", ("--guarantee", "east=99"), 2, "99 chips of east are guaranteed, it has"),
        ("bob", "project:east-lab", ("--none",), 4, "may not do this"),
    ]
    for caller, account, more, status, text in refused:
        found = run("quota", "limit", account, *more, caller=caller)
        assert (found[0], text in found[1]) == (status, True), found
    assert shown(run, "root") == before
    assert shown(run, "owner-west") == {}
    assert run("quota", "show", "--project", "east-lab", caller="owner-west")[0] == 5
    assert set_quotas(run, tmp_path, OWNED, caller="owner-east")[0] == 4
    server.until(lambda: run("audit", "--json")[1].count('"action": "refused"') >= 8)


def test_guarantees_are_of_projects_and_name_chips(run: Run) -> None:
    """The command line says what to write."""
    assert "no limit is given" in run("quota", "limit", "group:speech")[1]
    assert "--none with limits" in run("quota", "limit", "group:speech", "--none", "--chips", "1")[1]
    assert "a user has no guarantee" in run("quota", "limit", "user:ann", "--guarantee", "east=1")[1]
    assert "'east' names no chips" in run("quota", "limit", "project:lab", "--at", "east")[1]
    assert "chips_at.0.chips: " in run("quota", "limit", "project:lab", "--at", "east=many")[1]


def test_an_account_is_what_was_typed(server: Server, run: Run, tmp_path: Path) -> None:
    """Signs of an address in a name change no other account."""
    server.sync(report(EAST))
    set_quotas(run, tmp_path, FILE % 8)
    for name in ("lab?x=1", "lab#", "lab/nlp", "../lab"):
        assert run("quota", "limit", f"project:{name}", "--chips", "1")[0] != 0, name
    assert shown(run, "root")["project:lab"]["max_chips"] == 8


def test_the_key_of_a_site_neither_sets_nor_reads_quotas(server: Server, run: Run, tmp_path: Path) -> None:
    """It is on a machine of the site: accounts are the owner's."""
    for site in (EAST, WEST):
        server.sync(report(site))
    set_quotas(run, tmp_path, OWNED)
    server.store.put_token(
        StoredToken(role="owner", name="owner-east", digest=token_digest("key"), created_s=0, site="east")
    )
    assert run("quota", "show", caller="key")[0] == 4
    assert run("quota", "limit", "project:east-lab", "--at", "east=1", caller="key")[0] == 4


def test_an_owner_names_no_more_places_than_fit_beside_those_of_others() -> None:
    """The lines that the operator set for other clusters stay, and count."""
    places = tuple(ChipsAt(cluster="east", node_group=f"g{at}", chips=1) for at in range(MAX_PLACES))
    kept = Limits(chips_at=(ChipsAt(cluster="west", chips=1),))
    accounts = Accounts(projects=(Project(name="lab", owner="owner-east", limits=kept),))
    with pytest.raises(InputError, match="65 places with those of other owners' clusters, at most 64"):
        own_quota(accounts, "project:lab", QuotaChange(chips_at=places), "owner-east", {"east"})
