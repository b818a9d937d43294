"""The count of a ledger by other means finds what is missing, doubled or wrong, in the log of a pool with faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._ledger_recount import Recount, recount
from isthmus.control.accounting.ledger import Ledger, Transaction
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.simulation.chaos.run_chaos import CONFIG, run_chaos
from isthmus.control.simulation.simulated_server import MemoryLog

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def played() -> tuple[MemoryLog, list[Transaction]]:
    """A log, and the transactions of the server at its end."""
    log, last = MemoryLog(), list[Coordinator]()
    assert run_chaos(0, log, at_end=last.append).problems == []
    return log, last[0].state.meter.ledger.transactions


def counted(log: MemoryLog, transactions: list[Transaction]) -> Recount:
    """Count a ledger of these transactions."""
    return recount(log.events(), Ledger(transactions=transactions), CONFIG)


def some_usage(transactions: list[Transaction]) -> int:
    """The place of the longest usage."""
    usage = [one for one in transactions if one.kind == "usage" and one.resource is not None]
    return transactions.index(max(usage, key=lambda one: one.end_ms - one.begin_ms))


def test_the_ledger_of_the_server_has_each_interval_once(played: tuple[MemoryLog, list[Transaction]]) -> None:
    """Whatever crashed on the way."""
    assert len(played[1]) > 100
    assert counted(*played) == Recount()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda one: [], ("lost",)),
        (lambda one: [one, one], ("doubled",)),
        (lambda one: [replace(one, amount=one.amount + 1)], ("wrong",)),
        (lambda one: [replace(one, price_millionths=one.price_millionths + 1)], ("wrong",)),
        (lambda one: [replace(one, begin_ms=one.begin_ms + 1)], ("lost",)),
        (lambda one: [replace(one, job="another")], ("lost", "wrong")),
    ],
    ids=["missing", "doubled", "other amount", "other price", "begins late", "other job"],
)
def test_a_change_of_one_transaction_is_found(
    played: tuple[MemoryLog, list[Transaction]],
    change: Callable[[Transaction], list[Transaction]],
    found: tuple[str, ...],
) -> None:
    """By its kind, and nothing else is."""
    log, transactions = played
    at = some_usage(transactions)
    result = counted(log, [*transactions[:at], *change(transactions[at]), *transactions[at + 1 :]])
    assert {name for name in ("lost", "doubled", "wrong") if getattr(result, name)} == set(found)
