"""`LedgerAccess`: tariffs, ledger, statements and waits for callers: each sees its own accounts, an admin all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, starmap
from typing import NamedTuple

from isthmus.control.accounting.check_ledger import check_ledger
from isthmus.control.accounting.ledger import Transaction, job_account, owner_account
from isthmus.control.accounting.make_statement import make_statement, open_transactions, party_amount
from isthmus.control.accounting.meter import Meter
from isthmus.control.accounting.party_holdings import party_holdings
from isthmus.control.accounting.price_book import PriceSchedule
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.accounts.waited_jobs import waited_jobs
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.auth import Caller
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import TariffPublished
from isthmus.core.errors import AuthError, FieldError, NotFoundError
from isthmus.core.months import month_span_ms
from isthmus.core.owner.tariff import DAY_MIN, Tariff
from isthmus.core.pool import Pool
from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.ledger_views import (
    JobQuote,
    LedgerCheckView,
    LedgerEntry,
    LedgerPage,
    PartyKind,
    PricesView,
    PriceView,
    StatementView,
    TariffView,
)
from isthmus.core.views.wait_views import WaitedJobsPage

MAX_EXAMINED_TRANSACTIONS = 20_000
"""Transactions that one page looks at, so that a caller with few entries costs no more than one with many."""


MAX_QUOTES = 1_000
"""Jobs of a statement whose quotes are listed."""
MAX_LISTED_PRICES = 2_000
"""Prices that one answer lists."""


class _Books(NamedTuple):
    """What a statement needs of the pool state: the ledger, which only grows, and a copy of what is held now."""

    ledger: list[Transaction]
    # Transactions of the ledger that count; later ones belong to later events.
    num_transactions: int
    # The open holdings of the party, and their prices.
    held: Meter
    now_ms: int
    # The projects of a project's statement.
    projects: frozenset[str]

    @property
    def transactions(self) -> Iterator[Transaction]:
        """The transactions of the ledger, and those of what is held now."""
        return chain(islice(self.ledger, self.num_transactions), open_transactions(self.held, self.now_ms))


class LedgerAccess:
    """The ledger as callers may see it; `clock` counts from the epoch, `pool_file` lists the users of each owner."""

    def __init__(
        self, actor: CoordinatorActor, audit: AuditLog, clock: Callable[[], float], pool_file: Pool | None = None
    ) -> None:
        self._actor, self._audit, self._clock = actor, audit, clock
        self._users = {one.name: one.users for one in pool_file.owners} if pool_file else {}

    def publish(self, caller: Caller, tariff: Tariff) -> TariffView:
        """Publish prices: of an owner's clusters, or as admin of any; raises the errors of `admit_tariff`."""
        _require_person(caller)
        now_s = self._clock()
        owner = "" if caller.role == "admin" else caller.name
        event = TariffPublished(now_s=now_s, by=caller.name, owner=owner, tariff=tariff)
        line = self._audit.line("tariff-published", caller, owner, f"{len(tariff.prices)} prices in {tariff.currency}")
        try:
            currency = self._actor.propose(
                lambda _: event, lambda coordinator: coordinator.state.meter.prices.currency, line
            )
        except FieldError as error:
            self._audit.record("refused", caller, "tariff", error.message)
            raise
        return TariffView(currency=currency, prices=len(tariff.prices), accepted_s=now_s)

    def prices(self, caller: Caller) -> PricesView:
        """Return the published prices in force and to come: for an owner those of its clusters, for others all."""
        _require_person(caller)

        def read(coordinator: Coordinator) -> tuple[str, list[PriceView]]:
            state, book = coordinator.state, coordinator.state.meter.prices
            own = {name for name, record in state.clusters.items() if record.cluster.owner == caller.name}
            listed = book.listed(int(self._clock() * 1000), lambda name: caller.role != "owner" or name in own)
            views = chain.from_iterable(starmap(_price_views, listed))
            return book.currency, list(islice(views, MAX_LISTED_PRICES + 1))

        currency, prices = self._actor.query(read)
        more = len(prices) > MAX_LISTED_PRICES
        return PricesView(currency=currency, prices=tuple(prices[:MAX_LISTED_PRICES]), more=more)

    def page(self, caller: Caller, after: int, limit: int) -> LedgerPage:
        """Return up to `limit` entries of the caller's accounts in transactions after number `after`."""
        _require_person(caller)

        def read(coordinator: Coordinator) -> tuple[str, list[Transaction]]:
            meter = coordinator.state.meter
            return meter.prices.currency, meter.ledger.transactions[after : after + MAX_EXAMINED_TRANSACTIONS]

        currency, transactions = self._actor.query(read)
        entries: list[LedgerEntry] = []
        last: int | None = None
        for one in transactions:
            fresh = list(_visible_entries(caller, one))
            if entries and len(entries) + len(fresh) > limit:
                break
            entries.extend(fresh)
            last = one.number
        more = last is not None and (last != transactions[-1].number or len(transactions) == MAX_EXAMINED_TRANSACTIONS)
        return LedgerPage(currency=currency, entries=tuple(entries), after=last if more else None)

    def check(self) -> LedgerCheckView:
        """Recount the ledger up to now."""
        found = self._actor.query(lambda coordinator: check_ledger(coordinator.state.meter.ledger))
        return LedgerCheckView(
            entries=found.entries, sum=found.sum, unpaired=found.unpaired, differences=found.differences
        )

    def statement(self, caller: Caller, party: PartyKind, name: str, month: str) -> StatementView:
        """Return a statement that the caller may see; raise `NotFoundError` for others, `InputError` for no month."""
        _require_person(caller)
        user = None if caller.role == "admin" else caller.name
        role = "owner" if party == "owner" else "user"
        if user is not None and (caller.role != role or (party in ("owner", "user") and name != user)):
            raise self._refused(caller, party, name)
        books, owner = self._actor.query(lambda coordinator: self._read(coordinator, party, name, user))
        if party == "project" and not books.projects:
            raise self._refused(caller, party, name)
        only, projects = user if party == "job" else None, books.projects
        own = [
            one
            for one in books.transactions
            if only in (None, one.user) and party_amount(one, party, name, projects) is not None
        ]
        if party == "job" and not own and (owner is None or user not in (None, owner)):
            if owner is not None:
                self._audit.record("refused", caller, f"{party} {name}", "a statement of another user's job")
            raise NotFoundError(f"no job '{name}'", hint="`isthmus jobs` lists them")
        currency, viewer = books.held.prices.currency, user if party == "project" else None
        found = make_statement(
            own, currency, party, name, month, books.now_ms, projects=projects, viewer=viewer
        )  # fmt: skip
        shown = () if party == "owner" else tuple(dict.fromkeys(line.job for line in found.lines if line.job))
        quotes = self._actor.query(lambda coordinator: tuple(_quotes(coordinator, shown[:MAX_QUOTES])))
        return found.model_copy(update={"quotes": quotes})

    def waits(self, caller: Caller, owner: str, month: str, after: int, limit: int) -> WaitedJobsPage:
        """Return a page of the jobs that the owner's own users submitted in a month (`YYYY-MM`, UTC).

        Raises `NotFoundError` for an owner that is not the caller or that lists no users, `InputError` for no month.
        """
        _require_person(caller)
        begin_ms, end_ms = month_span_ms(month)
        if caller.role != "admin" and (caller.role != "owner" or caller.name != owner):
            self._audit.record("refused", caller, f"owner {owner}", "the waiting times of another owner's users")
            raise NotFoundError(f"no users of owner '{owner}' of yours", hint="ask for your own, with an owner's token")
        users, now_s = self._users.get(owner, ()), self._clock()
        if not users:
            raise NotFoundError(
                f"no user is listed as one of owner '{owner}'",
                hint="the operator lists them in the server's pool file: owners: [{name: ..., users: [...]}]",
            )
        begin_s, end_s = begin_ms / 1000, end_ms / 1000
        jobs, more = self._actor.query(
            lambda coordinator: waited_jobs(coordinator.state, users, begin_s, end_s, now_s, after=after, limit=limit)
        )
        return WaitedJobsPage(
            owner=owner, num_users=len(users), month_over=now_s >= end_s, jobs=tuple(jobs), after=more
        )  # fmt: skip

    def _refused(self, caller: Caller, party: PartyKind, name: str) -> NotFoundError:
        self._audit.record("refused", caller, f"{party} {name}", "a statement of another")
        return NotFoundError(f"no statement of {party} '{name}' of yours", hint="ask for your own")

    def _read(
        self, coordinator: Coordinator, party: PartyKind, name: str, user: str | None
    ) -> tuple[_Books, str | None]:
        """Return what statements need, and the user of job `name`, None if there is no such job.

        It costs what the party holds, not what the ledger has: everything else waits meanwhile.
        """
        meter, job = coordinator.state.meter, coordinator.state.jobs.get(name)
        now_ms = max(meter.now_ms, int(self._clock() * 1000))
        ledger = meter.ledger.transactions
        tree = coordinator.state.accounts.tree
        sees = party == "project" and name in tree.projects and (user is None or tree.may_use(user, name))
        projects = tree.below(name) if sees else frozenset()
        held = party_holdings(meter, party, name, projects)
        return _Books(ledger, len(ledger), held, now_ms, projects), job.user if job else None


def _quotes(coordinator: Coordinator, jobs: Iterable[str]) -> Iterator[JobQuote]:
    """Yield the quotes of jobs that are known and have started, beside what they have cost."""
    for job_id in jobs:
        job = coordinator.state.jobs.get(job_id)
        if job is not None and job.quoted_millionths is not None:
            cost = -coordinator.state.meter.ledger.balances.get(job_account(job_id), 0)
            yield JobQuote(job=job_id, quoted_millionths=job.quoted_millionths, cost_millionths=cost)


def _price_views(resource: PoolResource, schedule: PriceSchedule) -> Iterator[PriceView]:
    """Yield the prices of a schedule: one line if all priorities have the same."""
    same = len(set(schedule.windows.values())) == 1
    for job_class, windows in list(schedule.windows.items())[: 1 if same else None]:
        ends = [one.begin_min for one in windows[1:]] + [DAY_MIN]
        for window, end_min in zip(windows, ends, strict=True):
            yield PriceView(
                resource=str(resource), job_class="all" if same else job_class, begins_ms=schedule.begins_ms,
                begin_min=window.begin_min, end_min=end_min, price_millionths=window.price_millionths,
            )  # fmt: skip


def _require_person(caller: Caller) -> None:
    """Raise `AuthError` for the key of a site's agent, which neither publishes prices nor reads accounts."""
    if caller.site or caller.role == "joiner":
        raise AuthError("the key of a site may not do this", hint="use the token of the owner")


def _visible_entries(caller: Caller, one: Transaction) -> Iterator[LedgerEntry]:
    """Yield the entries of a transaction on accounts of the caller."""
    for index, (account, millionths) in enumerate(one.entries):
        if (
            caller.role == "admin"
            or (caller.role == "owner" and account == owner_account(caller.name))
            or (caller.role == "user" and one.user == caller.name and account == job_account(one.job))
        ):
            yield LedgerEntry(
                transaction=one.number,
                index=index,
                account=account,
                millionths=millionths,
                kind=one.kind,
                dated_ms=one.dated_ms,
                job=one.job,
                user=one.user,
                attempt=one.attempt,
                cluster=one.cluster,
                resource=str(one.resource) if one.resource else "",
                phase=one.phase or "",
                begin_ms=one.begin_ms,
                end_ms=one.end_ms,
                amount=one.amount,
                price_millionths=one.price_millionths,
            )
