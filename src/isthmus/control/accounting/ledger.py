"""`Ledger`: append-only transactions in double entry.

Amounts are integers: millionths of the currency's unit. An account's entry is positive if the account is owed the
amount, negative if it owes it; the entries of a transaction sum to 0. A correction is another transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.ledger_views import HoldPhase

TransactionKind = Literal["usage", "proven", "late", "lost"]
"""`usage`: held and charged; `proven`: the same, while the site was away, by its agent's word; `late`: credited back by
the owner of a site that others waited for; `lost`: credited back by the owner at whose site an attempt was lost."""

POOL_ACCOUNT = "pool"
"""The account of the pool, which is owed for the bandwidth of links."""
MS_PER_HOUR = 3_600_000
UNITS_PER_PRICE = {"chips": 1, "storage": 10**12, "link": 10**6}
"""Amount of a resource that its price is of: a chip, a terabyte, a Gbit/s (in kbit/s)."""


def job_account(job: str) -> str:
    """Return the account that a job is charged on."""
    return f"job:{job}"


def owner_account(owner: str) -> str:
    """Return the account of an owner; of the pool for ""."""
    return f"owner:{owner}" if owner else POOL_ACCOUNT


@dataclass(slots=True, kw_only=True)
class Transaction:
    """One transaction. Times are milliseconds since the epoch on the server's clock.

    It never changes; to make one of a frozen data class would cost twice as much.

    `dated_ms` decides the month that it counts to. For usage `amount` of `resource` was held in [begin_ms, end_ms) at
    `price_millionths` for an hour; other kinds have neither a resource nor a price.
    """

    number: int
    kind: TransactionKind
    dated_ms: int
    job: str
    user: str
    attempt: int
    cluster: str = ""
    # The project of the job; "": none.
    project: str = ""
    resource: PoolResource | None = None
    phase: HoldPhase | None = None
    begin_ms: int = 0
    end_ms: int = 0
    amount: int = 0
    price_millionths: int = 0
    # Account and amount in millionths of each entry.
    entries: tuple[tuple[str, int], ...]


@dataclass(slots=True, kw_only=True)
class Ledger:
    """All transactions, in order, and the sum of the entries of each account."""

    transactions: list[Transaction] = field(default_factory=list)
    balances: dict[str, int] = field(default_factory=dict)
    # Entries of all transactions.
    num_entries: int = 0

    @property
    def next_number(self) -> int:
        """The number of the next transaction, from 1."""
        return len(self.transactions) + 1

    def add(self, transaction: Transaction) -> None:
        """Add a transaction with the next number."""
        self.transactions.append(transaction)
        self.num_entries += len(transaction.entries)
        for account, millionths in transaction.entries:
            self.balances[account] = self.balances.get(account, 0) + millionths
