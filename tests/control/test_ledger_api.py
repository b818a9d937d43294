"""Tariffs, ledger and statements over REST and on the command line: who publishes, who sees what."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.control.service.auth import token_digest
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.messages.agent_messages import ObservedPart
from isthmus.core.views.ledger_views import LedgerPage
from tests.cli.test_catalogue_commands import forwarded
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.integration

Run = Callable[..., tuple[int, str]]
HOUR_S = 3600.0
PRICES = """\
currency: EUR
prices:
  - {cluster: %s, node_group: h20, per_chip_hour: "%s"}
"""


@pytest.fixture
def run(server: Server) -> Run:
    """Run a command line as a caller; return its status and output."""

    def run_as(*arguments: object, caller: str = "root") -> tuple[int, str]:
        env = CliEnvironment(
            variables={"ISTHMUS_SERVER": "http://127.0.0.1:1", "ISTHMUS_TOKEN": caller},
            stdout=io.StringIO(), stderr=io.StringIO(), transport=forwarded(server), now=lambda: server.now_s,
        )  # fmt: skip
        status = main([str(one) for one in arguments], env=env)
        return status, env.stdout.getvalue() + env.stderr.getvalue()  # type: ignore[attr-defined]

    return run_as


def publish(run: Run, folder: Path, cluster: str, price: str, caller: str) -> tuple[int, str]:
    """Publish one price by the command line."""
    file = folder / "tariff.yaml"
    file.write_text(PRICES % (cluster, price))
    return run("tariff", "set", file, caller=caller)


def paid(server: Server, run: Run, folder: Path, **more: str) -> str:
    """Let ann's job hold a chip at each site for an hour, at 1.50 in the east and 2 in the west; return its id."""
    for site in (EAST, WEST):
        server.sync(report(site))
    assert publish(run, folder, "east", "1.50", "owner-east") == (0, "1 prices in EUR are published\n")
    server.now_s += 1
    assert publish(run, folder, "west", "2", "root")[0] == 0
    job = server.committed(name="one", **more).id
    server.now_s += HOUR_S
    assert server.call("POST", f"/v1/jobs/{job}/cancel").status_code == 200
    for site in (EAST, WEST):
        server.sync(report(site, ObservedPart(job=job, attempt=1, state="released")))
    return job


def test_a_bill_is_the_same_for_the_user_and_the_owners_and_outlives_the_job(
    server: Server, run: Run, tmp_path: Path
) -> None:
    """3.50 of cost are 1.50 and 2.00 of income, also after the job is deleted."""
    job = paid(server, run, tmp_path)
    assert server.call("DELETE", f"/v1/jobs/{job}").status_code == 204
    month = ("--month", "1970-01", "--format", "json")
    totals = {
        name: json.loads(run("bill", option, name, *month, caller=caller)[1])["total_cents"]
        for option, name, caller in (
            ("--user", "ann", "ann"),
            ("--job", job, "ann"),
            ("--owner", "owner-east", "owner-east"),
            ("--owner", "owner-west", "root"),
        )
    }
    assert totals == {"ann": 350, job: 350, "owner-east": 150, "owner-west": 200}
    status, answer = run("ledger", "check", "--json")
    found = json.loads(answer)
    assert (status, found) == (0, {"entries": found["entries"], "sum": 0, "unpaired": 0, "differences": []})
    assert found["entries"] >= 4


def test_a_bill_has_the_formats_that_others_read(server: Server, run: Run, tmp_path: Path) -> None:
    """CSV, the columns of FOCUS, and a page that loads nothing; each has the amounts."""
    paid(server, run, tmp_path)
    month = ("--user", "ann", "--month", "1970-01", "--format")
    rows = list(csv.DictReader(io.StringIO(run("bill", *month, "csv", caller="ann")[1])))
    assert rows[-1]["job"] == "total"
    assert rows[-1]["amount"] == "3.50"
    assert {row["resource"] for row in rows[:-3]} == {"east/h20", "west/h20"}
    focus = list(csv.DictReader(io.StringIO(run("bill", *month, "focus", caller="ann")[1])))
    assert sum(float(row["BilledCost"]) for row in focus) == 3.5
    assert {row["BillingPeriodStart"] for row in focus} == {"1970-01-01T00:00:00.000Z"}
    page = run("bill", *month, "html", caller="ann")[1]
    assert "<strong>Total: 3.50 EUR</strong>" in page
    assert "src=" not in page
    assert "://" not in page


def test_each_caller_sees_its_own_entries_page_by_page(server: Server, run: Run, tmp_path: Path) -> None:
    """An owner its income, a user the cost of its jobs, a stranger nothing, an admin all; pages join without a gap."""
    job = paid(server, run, tmp_path)

    def accounts(token: str, limit: int = 1000) -> list[tuple[int, str]]:
        found, after = list[tuple[int, str]](), 0
        while True:
            answer = server.call("GET", f"/v1/ledger?after={after}&limit={limit}", token=token)
            assert answer.status_code == 200, answer.text
            page = LedgerPage.model_validate(answer.json())
            found += [(one.transaction, one.account) for one in page.entries]
            if page.after is None:
                return found
            assert page.after > after
            after = page.after

    assert {account for _, account in accounts("owner-east")} == {"owner:owner-east"}
    assert {account for _, account in accounts("ann")} == {f"job:{job}"}
    assert accounts("bob") == []
    everything = accounts("root")
    assert everything == accounts("root", limit=1) == accounts("root", limit=3)
    assert {account for _, account in everything} == {f"job:{job}", "owner:owner-east", "owner:owner-west"}


def test_statements_of_others_do_not_exist(server: Server, run: Run, tmp_path: Path) -> None:
    """Neither another owner's nor another user's, nor a job of another; the ledger is recounted for admins alone."""
    job = paid(server, run, tmp_path)
    for caller, party, name in (
        ("bob", "user", "ann"), ("bob", "job", job), ("bob", "owner", "owner-east"), ("ann", "owner", "owner-east"),
        ("owner-west", "owner", "owner-east"), ("owner-east", "job", job), ("owner-east", "user", "ann"),
    ):  # fmt: skip
        answer = server.call("GET", f"/v1/statements/{party}/{name}?month=1970-01", token=caller)
        assert answer.status_code == 404, (caller, party, answer.text)
    assert server.call("GET", "/v1/ledger/check", token="ann").status_code == 403
    assert server.call("GET", "/v1/statements/user/ann?month=1970-13").status_code == 422


def test_the_key_of_a_site_neither_publishes_nor_reads(server: Server, run: Run, tmp_path: Path) -> None:
    """It is on a machine of the site: prices and accounts are the owner's."""
    paid(server, run, tmp_path)
    server.store.put_token(
        StoredToken(role="owner", name="owner-east", digest=token_digest("key"), created_s=0, site="east")
    )
    assert publish(run, tmp_path, "east", "9", "key")[0] == 4
    assert server.call("GET", "/v1/ledger", token="key").status_code == 403
    assert server.call("GET", "/v1/statements/owner/owner-east?month=1970-01", token="key").status_code == 403


@pytest.mark.parametrize(
    ("prices", "line", "text"),
    [
        ('  - {cluster: east, node_group: h20, per_chip_hour: "-1"}', 3, "at least 0"),
        ("  - {cluster: east, node_group: h20, per_chip_hour: 1}\n" * 2, 4, "overlaps price 1"),
        ('  - {cluster: east, node_group: h20, per_chip_hour: 1, hours: "08:00-20:00"}', 3, "no price for class"),
        ("  - {cluster: east, node_group: h20, per_chip_hour: 1, from: 1970-01-01}", 3, "has passed"),
        ("  - {cluster: north, node_group: h20, per_chip_hour: 1}", 3, "no cluster 'north'"),
        ("  - {cluster: east, node_group: h100, per_chip_hour: 1}", 3, "no node group 'h100'"),
        ("  - {cluster: east, per_chip_hour: 1}", 3, "per_chip_hour needs"),
    ],
)
def test_a_refused_tariff_names_line_and_reason(
    server: Server, run: Run, tmp_path: Path, prices: str, line: int, text: str
) -> None:
    """Whether the file or the server finds it; nothing is published."""
    server.sync(report(EAST))
    file = tmp_path / "tariff.yaml"
    file.write_text(f"currency: EUR\nprices:\n{prices}\n")
    status, answer = run("tariff", "set", file, caller="owner-east")
    assert status == 2
    assert f"tariff.yaml:{line}: " in answer
    assert text in answer
    assert server.call("GET", "/v1/ledger", token="root").json()["currency"] == ""


def test_a_pool_has_one_currency(server: Server, run: Run, tmp_path: Path) -> None:
    """The first tariff sets it; another one is a conflict."""
    paid(server, run, tmp_path)
    file = tmp_path / "other.yaml"
    file.write_text((PRICES % ("east", "1")).replace("EUR", "USD"))
    status, answer = run("tariff", "set", file, caller="owner-east")
    assert status == 6
    assert "in USD, the pool in EUR" in answer


def test_a_bill_is_of_one_party(server: Server, run: Run) -> None:
    """Two are a mistake, and so is none."""
    assert run("bill", "--month", "1970-01")[0] == 2
    assert run("bill", "--month", "1970-01", "--owner", "a", "--user", "b")[0] == 2


def test_the_tariff_of_the_guide_is_published_as_it_says(server: Server, run: Run, tmp_path: Path) -> None:
    """`docs/guide/billing.md`: the file passes the check, and an owner publishes it."""
    server.sync(report(EAST))
    page = (Path(__file__).parents[2] / "docs" / "guide" / "billing.md").read_text()
    file = tmp_path / "tariff.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert run("check", file)[0] == 0
    assert run("tariff", "set", file, caller="owner-east") == (0, "3 prices in EUR are published\n")


def cards(file: Path, job: str, begin_s: float, end_s: float) -> Path:
    """The record of cards of the site in the east: one card from and to."""
    held = {"at_s": begin_s, "event": "held", "job": job, "attempt": 1, "cards": ["h20/0/0"]}
    lines = [held, {"at_s": end_s, "event": "released", "job": job, "attempt": 1}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_an_owner_compares_its_record_of_cards_with_the_ledger(server: Server, run: Run, tmp_path: Path) -> None:
    """Only its own site; a difference without a known cause ends the command with status 6."""
    job = paid(server, run, tmp_path)
    begin_s = server.now_s - HOUR_S
    asked = ("ledger", "compare", "--site", "east", "--month", "1970-01", "--cards")
    file = cards(tmp_path / "whole.jsonl", job, begin_s - 1, begin_s + HOUR_S + 1)
    status, answer = run(*asked, file, "--json", caller="owner-east")
    found = json.loads(answer)
    assert (status, found["unexplained"], found["record"]) == (0, 0, "cards")
    assert [one["cause"] for one in found["causes"]] == ["late release", "queue end"]
    assert abs(found["percent"]) < 0.1
    assert json.loads(run(*asked, file, "--json", caller="root")[1]) == found
    others = json.loads(run(*asked, file, "--json", caller="owner-west")[1].splitlines()[0])
    assert others["ours_chip_hours"] == 0
    status, answer = run(
        *asked, cards(tmp_path / "half.jsonl", job, begin_s, begin_s + HOUR_S / 2), caller="owner-east"
    )
    assert status == 6
    assert "unknown" in answer
