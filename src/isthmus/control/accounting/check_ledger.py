"""`check_ledger`: recounts a ledger: sums, pairs, balances, and each amount from its price and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.control.accounting.ledger import MS_PER_HOUR, UNITS_PER_PRICE, Ledger, Transaction

MAX_DIFFERENCES = 100
"""Most differences that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCheck:
    """The result: entries, their sum in millionths, entries of transactions that do not sum to 0, and what differs."""

    entries: int
    sum: int
    unpaired: int
    differences: tuple[str, ...]


def check_ledger(ledger: Ledger) -> LedgerCheck:
    """Recount all transactions; an intact ledger has sum 0, no unpaired entries and no differences."""
    entries = total = unpaired = 0
    balances: dict[str, int] = {}
    differences: list[str] = []
    for expected, one in enumerate(tuple(ledger.transactions), start=1):
        sums = sum(millionths for _, millionths in one.entries)
        entries, total = entries + len(one.entries), total + sums
        unpaired += len(one.entries) if sums or len(one.entries) < 2 else 0
        for account, millionths in one.entries:
            balances[account] = balances.get(account, 0) + millionths
        if len(differences) < MAX_DIFFERENCES:
            differences.extend(_differences(one, expected))
    differences.extend(_balance_differences(balances, ledger.balances))
    if entries != ledger.num_entries:
        differences.append(f"{ledger.num_entries} entries were counted, {entries} are there")
    return LedgerCheck(entries=entries, sum=total, unpaired=unpaired, differences=tuple(differences[:MAX_DIFFERENCES]))


def _differences(one: Transaction, expected: int) -> Iterator[str]:
    if one.number != expected:
        yield f"transaction {one.number} stands where {expected} is due"
    if one.resource is None:
        return
    exact = one.price_millionths * one.amount * (one.end_ms - one.begin_ms)
    booked = max((millionths for _, millionths in one.entries), default=0)
    due = exact // (MS_PER_HOUR * UNITS_PER_PRICE[one.resource.kind])
    if not due <= booked <= due + 1:
        yield f"transaction {one.number} is {booked} millionths, by price and time {due}"


def _balance_differences(found: dict[str, int], kept: dict[str, int]) -> Iterator[str]:
    for account in sorted(found.keys() | kept.keys()):
        if found.get(account, 0) != kept.get(account, 0):
            yield f"{account}: the balance is {kept.get(account, 0)} millionths, its entries {found.get(account, 0)}"
