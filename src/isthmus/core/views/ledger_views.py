"""What the ledger shows: pages of entries, the result of its check, and statements of a month."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeInt, PositiveInt

PartyKind = Literal["owner", "user", "job", "project"]
"""Of what a statement is: an owner's income, or the cost of a user's jobs, one job, or a project with those below."""

HoldPhase = Literal["waiting", "starting", "running", "saving", "leaving"]
"""What a part does that holds chips: it waits for other parts, starts, trains, saves for its end, or is released."""


class TariffView(FrozenModel):
    """What has taken effect of a published tariff: its prices, from when the ones without a time hold."""

    currency: str
    prices: PositiveInt
    accepted_s: float


class PriceView(FrozenModel):
    """A published price: of `resource` for jobs of a priority, from `begins_ms` on, in the window of the day (UTC).

    `resource` is `CLUSTER/GROUP` (a chip), `CLUSTER:storage` (a terabyte) or `FROM>TO` (a Gbit/s), each for an hour.
    """

    resource: str
    job_class: str
    begins_ms: int
    begin_min: NonNegativeInt
    end_min: PositiveInt
    price_millionths: NonNegativeInt


class PricesView(FrozenModel):
    """The prices in force and those that begin later, a bounded number; `more` says that some are left out."""

    currency: str
    prices: tuple[PriceView, ...]
    more: bool = False


class LedgerEntry(FrozenModel):
    """One entry of a transaction; its entries sum to 0. `millionths` of the currency: owed to the account if positive.

    Times are milliseconds since the epoch on the server's clock; `dated_ms` decides the month. For usage `amount` of
    `resource` (chips, bytes or kbit/s) was held in [begin_ms, end_ms) at `price_millionths` for a chip, a terabyte or a
    Gbit/s in an hour.
    """

    transaction: PositiveInt
    index: NonNegativeInt
    account: str
    millionths: int
    kind: str
    dated_ms: int
    job: str
    user: str
    attempt: int
    cluster: str = ""
    resource: str = ""
    phase: str = ""
    begin_ms: int
    end_ms: int
    amount: NonNegativeInt = 0
    price_millionths: NonNegativeInt = 0


class LedgerPage(FrozenModel):
    """Entries of some transactions. The next page begins after transaction `after` (None: this was the last page)."""

    currency: str
    entries: tuple[LedgerEntry, ...]
    after: PositiveInt | None = None


class LedgerCheckView(FrozenModel):
    """What a recount found: entries, their sum in millionths, and those of transactions that do not sum to 0."""

    entries: NonNegativeInt
    sum: int
    unpaired: NonNegativeInt
    differences: tuple[str, ...]


class StatementLine(FrozenModel):
    """What a job held of a resource in one phase at one price, or what was credited back.

    `quantity` is in chip-hours, terabyte-hours or Gbit/s-hours, `millionths` the exact amount, `cents` what the line
    adds to the total: the remainder of each line goes into the next.
    """

    job: str
    user: str
    kind: str
    cluster: str = ""
    resource: str = ""
    phase: str = ""
    price_millionths: NonNegativeInt = 0
    quantity: float = 0.0
    first_ms: int
    last_ms: int
    millionths: int
    cents: int
    project: str = ""


class JobQuote(FrozenModel):
    """What a job was predicted to cost when it first started, and what all of it has cost so far."""

    job: str
    quoted_millionths: NonNegativeInt
    cost_millionths: int


class StatementView(FrozenModel):
    """The statement of a party for one month (UTC): income of an owner, cost of a user or a job; in hundredths.

    A member of a project sees the jobs of others as one line for each price, without their names. `quotes` are of jobs
    that are not deleted.

    `carried_in_millionths` is what earlier statements left below a hundredth, `carried_out_millionths` what this one
    leaves. With `final` false the month is not over: what is held now is counted up to `until_ms`.
    """

    party: PartyKind
    name: str
    month: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$")]
    currency: str
    begin_ms: int
    end_ms: int
    until_ms: int
    final: bool
    lines: tuple[StatementLine, ...]
    carried_in_millionths: int
    carried_out_millionths: int
    total_cents: int
    quotes: tuple[JobQuote, ...] = ()
