"""Tariffs that owners and the operator publish: their check, and their effect."""

from __future__ import annotations

from isthmus.control.state.events import TariffPublished
from isthmus.control.state.job_records import PoolState
from isthmus.core.errors import FieldError
from isthmus.core.owner.check_tariff import check_tariff
from isthmus.core.owner.tariff import TariffPrice


def admit_tariff(state: PoolState, event: TariffPublished) -> bool:
    """Return whether the tariff has prices that are not published yet.

    Raises `FieldError`, `QuotaError` or `ConflictError` for one that cannot take effect as it is.
    """
    now_ms = max(state.meter.now_ms, int(event.now_s * 1000))
    check_tariff(event.tariff, now_ms / 1000)
    for index, price in enumerate(event.tariff.prices):
        problem = _problem(state, event, price)
        if problem:
            raise FieldError(problem, place=("prices", str(index)), hint="isthmus pool lists clusters and groups")
    return state.meter.prices.check(event.tariff, now_ms, event.owner)


def apply_tariff(state: PoolState, event: TariffPublished) -> None:
    """Put the prices into effect, each from its time on."""
    state.meter.publish(event.tariff, event.owner)


def _problem(state: PoolState, event: TariffPublished, price: TariffPrice) -> str:
    """Return why the publisher cannot set this price; "" if it can. To an owner, clusters of others do not exist."""
    resource = price.resource
    if resource.kind == "link":
        if event.owner:
            return f"link {resource} is the pool's: the operator sets its price"
        return "" if resource in state.links else f"the pool has no link {resource}"
    record = state.clusters.get(resource.cluster)
    if record is None or event.owner not in ("", record.cluster.owner):
        return f"no cluster '{resource.cluster}' of {event.owner or 'the pool'} has joined"
    if resource.kind == "chips" and not record.capacity(resource.name):
        return f"cluster '{resource.cluster}' has no node group '{resource.name}'"
    return ""
