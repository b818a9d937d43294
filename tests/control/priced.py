"""Tariffs and ledgers for the tests of accounting."""

from __future__ import annotations

from typing import Any

from isthmus.control.accounting.holdings import Holding
from isthmus.control.accounting.meter import Meter
from isthmus.core.owner.tariff import Tariff
from isthmus.core.pool_resource import PoolResource

HOUR_S = 3600.0
UNIT = 1_000_000
"""Millionths of one euro."""


def tariff(*prices: dict[str, Any], currency: str = "EUR") -> Tariff:
    """Return a tariff of prices as a file states them."""
    return Tariff.model_validate({"currency": currency, "prices": prices})


def chip_price(cluster: str, price: object, **more: Any) -> dict[str, Any]:
    """Return a price of the node group `g` of a cluster."""
    return {"cluster": cluster, "node_group": "g", "per_chip_hour": price} | more


def holding(cluster: str = "a", chips: int = 1, **more: Any) -> Holding:
    """Return what a part of attempt 1 holds at a cluster of `owner-CLUSTER`."""
    amounts = ((PoolResource.chips(cluster, "g"), chips),)
    fields: dict[str, Any] = {
        "attempt": 1,
        "cluster": cluster,
        "owner": f"owner-{cluster}",
        "phase": "running",
        "amounts": amounts,
    }
    return Holding(**(fields | more))


def meter(*prices: dict[str, Any], now_s: float = 0.0) -> Meter:
    """Return a meter at `now_s` with these prices, or 1 for each chip of `a` and `b`."""
    made = Meter()
    made.advance(now_s)
    made.publish(tariff(*(prices or (chip_price("a", 1), chip_price("b", 1)))))
    return made


def hold(made: Meter, *holdings: Holding, job: str = "j", user: str = "ann", job_class: Any = "middle") -> None:
    """Tell the meter what a job holds from now on."""
    made.observe(job, user, job_class, holdings)


def balances(made: Meter) -> dict[str, float]:
    """Return the balance of each account in units of the currency, without those of 0."""
    return {account: millionths / UNIT for account, millionths in made.ledger.balances.items() if millionths}
