"""`count_spending`: after an event, adds what the ledger has booked since to the accounts of the jobs."""

from __future__ import annotations

from itertools import islice

from isthmus.control.accounting.ledger import job_account
from isthmus.control.state.job_records import PoolState


def count_spending(state: PoolState) -> None:
    """Count the transactions that are not counted yet: a charge as spent, what is credited back as not spent."""
    book, transactions = state.accounts, state.meter.ledger.transactions
    if book.num_counted == len(transactions):
        return
    for one in islice(transactions, book.num_counted, None):
        charged = -sum(millionths for account, millionths in one.entries if account == job_account(one.job))
        book.spend(book.tree.accounts_of(one.user, one.project), charged, one.dated_ms, state.meter.now_ms)
    book.num_counted = len(transactions)
