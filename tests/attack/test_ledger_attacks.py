"""Attacks on accounting: owners whose prices cost the pool memory and time, and words in statements."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from isthmus.cli.commands.accounting.statement_formats import statement_csv, statement_focus, statement_page
from isthmus.control.accounting.ledger import Ledger, Transaction
from isthmus.control.accounting.make_statement import open_transactions
from isthmus.control.accounting.party_holdings import party_holdings
from isthmus.control.accounting.price_book import (
    DAY_MS,
    MAX_AHEAD_DAYS,
    MAX_BEGINS_PER_DAY,
    MAX_PUBLISHED_PER_DAY,
    MIN_MS,
)
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.ledger_access import LedgerAccess
from isthmus.control.service.auth import Caller
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import FieldError, QuotaError
from isthmus.core.owner.check_tariff import MAX_WINDOWS, check_tariff
from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.ledger_views import StatementLine, StatementView
from tests.control.driver import Driver
from tests.control.priced import chip_price, hold, holding, meter, tariff
from tests.control.test_metered_jobs import running
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack

CHIPS = PoolResource.chips("a", "g")


def clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


def windows(count: int, **more: Any) -> list[dict[str, Any]]:
    """Prices of `count` windows of a minute each, and one of the rest of the day."""
    times = [(at, at + 1) for at in range(count - 1)]
    hours = [f"{clock(begin)}-{clock(end)}" for begin, end in times] + [f"{clock(count - 1)}-24:00"]
    return [chip_price("a", 1 + place % 2, hours=one, **more) for place, one in enumerate(hours)]


def moment(at_ms: int) -> str:
    day, rest_ms = divmod(at_ms, DAY_MS)
    return f"1970-01-{1 + day:02d}T{clock(rest_ms // MIN_MS)}:00"


def test_a_day_has_no_more_prices_than_quarters_of_an_hour() -> None:
    """An owner who changes its price each minute would cut each job's hold into 1,440 transactions a day."""
    check_tariff(tariff(*windows(MAX_WINDOWS)))
    with pytest.raises(FieldError, match=f"has {MAX_WINDOWS + 1} prices a day"):
        check_tariff(tariff(*windows(MAX_WINDOWS + 1)))


def test_no_more_prices_of_a_resource_begin_in_a_day_than_the_quota() -> None:
    """In one tariff or in many; a month of a job then has a bounded number of intervals."""
    made = meter()
    price = [chip_price("a", 2, **{"from": moment(MIN_MS * (1 + at))}) for at in range(MAX_BEGINS_PER_DAY)]
    with pytest.raises(FieldError, match="begin in one day"):
        made.prices.check(tariff(*price), made.now_ms, "owner-a")
    made.prices.check(tariff(*price[:-1]), made.now_ms, "owner-a")
    made.publish(tariff(*price[:-1]), "owner-a")
    with pytest.raises(FieldError, match="begin in one day"):
        made.prices.check(tariff(price[-1]), made.now_ms, "owner-a")
    spans = list(made.prices.spans(CHIPS, "middle", 0, 31 * DAY_MS))
    assert len(spans) <= MAX_BEGINS_PER_DAY + 31 * MAX_WINDOWS


def test_no_price_begins_in_the_far_future() -> None:
    """Otherwise there is a day without a quota for each of the next 8,000 years."""
    made = meter()
    far = tariff(chip_price("a", 2, **{"from": "1971-02-01"}))
    with pytest.raises(FieldError, match=f"more than {MAX_AHEAD_DAYS} days ahead"):
        made.prices.check(far, made.now_ms, "owner-a")


def test_an_owner_publishes_no_more_prices_a_day_than_the_quota() -> None:
    """The next day it may again; other owners are not concerned."""
    pool = meter()
    pool.prices.published["owner-a"] = 0, MAX_PUBLISHED_PER_DAY
    late = tariff(chip_price("a", 2, **{"from": moment(DAY_MS)}))
    with pytest.raises(QuotaError, match="prices today"):
        pool.prices.check(late, pool.now_ms, "owner-a")
    assert pool.prices.check(late, pool.now_ms, "owner-b")
    assert pool.prices.check(late, pool.now_ms, "")
    pool.advance(86_401.0)
    late = tariff(chip_price("a", 3, **{"from": moment(2 * DAY_MS)}))
    assert pool.prices.check(late, pool.now_ms, "owner-a")
    pool.publish(late, "owner-a")
    assert pool.prices.published == {"owner-a": (1, 1)}


class _Guarded(list[Transaction]):
    """A ledger that is not read while the pool waits."""

    is_locked = False

    def __iter__(self):  # type: ignore[no-untyped-def]
        assert not self.is_locked, "everything else waits for this"
        return super().__iter__()


class _Actor:
    """Answers queries of a coordinator, and guards its ledger meanwhile."""

    def __init__(self, pool: Driver, ledger: _Guarded) -> None:
        self._pool, self._ledger = pool, ledger

    def query(self, question):  # type: ignore[no-untyped-def]
        self._ledger.is_locked = True
        try:
            return question(self._pool.coordinator)
        finally:
            self._ledger.is_locked = False


def test_a_statement_reads_no_ledger_while_the_pool_waits() -> None:
    """A user who asks for statements again and again holds up no report, however long the ledger is."""
    pool = running("a", "b")
    pool.now_s += 3600
    pool.cancel("j")
    pool.obey()
    books = pool.coordinator.state.meter.ledger
    books.transactions = guarded = _Guarded(books.transactions)
    audit = AuditLog(MemoryStore())
    access = LedgerAccess(_Actor(pool, guarded), audit, lambda: pool.now_s)  # type: ignore[arg-type]
    caller = Caller(role="user", name="ann")
    assert access.statement(caller, "user", "ann", "1970-01").total_cents == 200


def test_what_a_party_holds_is_what_a_statement_of_it_needs() -> None:
    """Of an owner, a user and a job: the same amounts as from all that is held, and nothing of others."""
    made = meter()
    hold(made, holding("a", chips=2), holding("b", late=("owner-a",), attempt=1))
    hold(made, holding("b"), job="k", user="bob")
    made.advance(3600)
    every = open_transactions(made, made.now_ms)
    for party, name in (("owner", "owner-a"), ("owner", "owner-b"), ("user", "ann"), ("user", "bob"), ("job", "j")):
        excerpt = party_holdings(made, party, name)  # type: ignore[arg-type]
        found = open_transactions(excerpt, made.now_ms)
        jobs = {one.job for one in found}
        assert [(one.job, one.entries) for one in found] == [(one.job, one.entries) for one in every if one.job in jobs]
        if party == "owner":
            accounts = [entry for one in every for entry in one.entries if entry[0] == f"owner:{name}"]
            assert accounts == [entry for one in found for entry in one.entries if entry[0] == f"owner:{name}"]
        else:
            assert jobs == {"k" if name == "bob" else "j"}
    assert party_holdings(made, "user", "eve").jobs == {}
    assert made.ledger == Ledger()


@pytest.mark.parametrize("month", ["9999-12", "2999-12", "0000-01", "2\u066027-01"])
def test_no_month_ends_a_request_with_a_server_error(month: str) -> None:
    """The last month of the calendar has no next one."""
    server = Server()
    server.shell.start()
    with server.http:
        answer = server.call("GET", f"/v1/statements/user/ann?month={month}")
    server.shell.close()
    assert answer.status_code == (200 if month == "2999-12" else 422)


def test_asking_for_others_money_is_in_the_audit_log() -> None:
    """Statements of another user, owner or job, and prices of another owner's cluster."""
    server = Server()
    server.shell.start()
    with server.http:
        job = server.prepared().id
        prices = {"currency": "EUR", "prices": [{"cluster": "west", "node_group": "h20", "per_chip_hour": 1}]}
        assert server.call("POST", "/v1/tariffs", prices, token="owner-east").status_code == 422
        for path in ("user/ann", "owner/owner-east", f"job/{job}"):
            answer = server.call("GET", f"/v1/statements/{path}?month=1970-01", token="bob")
            assert answer.status_code == 404
        assert server.call("GET", "/v1/statements/job/nothing?month=1970-01", token="bob").status_code == 404
        found = server.call("GET", "/v1/audit", token="root").json()["records"]
    server.shell.close()
    refused = [(one["actor"], one["subject"]) for one in found if one["action"] == "refused"]
    assert refused == [
        ("owner-east", "tariff"), ("bob", "user ann"), ("bob", "owner owner-east"), ("bob", f"job {job}"),
    ]  # fmt: skip


FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\uff1dA1", "\t=A1", "\r=A1", "\n=A1", "--1", "-1e9")
HIDDEN = "a\u202eb\x1b[2Jc"


def statement(text: str) -> StatementView:
    """A statement with `text` wherever a server may put one."""
    line = StatementLine(
        job=text, user=text, kind=text, cluster=text, resource=text, phase=text, first_ms=0, last_ms=0, millionths=-5,
        cents=-1,
    )  # fmt: skip
    return StatementView(
        party="user", name=text, month="2027-01", currency=text, begin_ms=0, end_ms=1, until_ms=1, final=True,
        lines=(line,), carried_in_millionths=0, carried_out_millionths=0, total_cents=-1,
    )  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("write", [statement_csv, statement_focus])
def test_no_word_of_a_statement_is_a_formula(write: Any, text: str) -> None:
    """Amounts stay numbers; everything else that a spreadsheet would execute is text."""
    cells = [cell for row in csv.reader(io.StringIO(write(statement(text)))) for cell in row]
    numbers = [cell for cell in cells if cell.startswith(("-", "+", "="))]
    assert set(numbers) <= {"-0.01", "-0.000005", "-5"}
    assert not any(cell[:1] in ("@", "\uff1d", "\t", "\r", "\n") for cell in cells)


@pytest.mark.parametrize("write", [statement_csv, statement_focus, statement_page])
def test_no_hidden_character_of_a_statement_is_left(write: Any) -> None:
    """A file of a statement shows what reorders or controls text, and a page runs and loads nothing."""
    found = write(statement(HIDDEN))
    assert "\u202e" not in found
    assert "\x1b" not in found
    assert "<U+202E>" in found or "&lt;U+202E&gt;" in found
    page = statement_page(statement("<script>alert(1)</script>"))
    assert "<script>" not in page
    assert "default-src 'none'" in page
