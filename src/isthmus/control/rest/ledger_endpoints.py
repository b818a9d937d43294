"""The endpoints of money and of what it bought: tariffs, pages of the ledger, its check, statements, waits."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import After, CurrentCaller, Limit, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service import auth
from isthmus.core.base_model import Name
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.owner.tariff import Tariff
from isthmus.core.views.ledger_views import (
    LedgerCheckView,
    LedgerPage,
    PartyKind,
    PricesView,
    StatementView,
    TariffView,
)
from isthmus.core.views.wait_views import WaitedJobsPage

ledger_router = APIRouter(prefix="/v1", route_class=JsonRoute)
Month = Annotated[str, Query(max_length=16, description="the month of the statement, `YYYY-MM` in UTC")]


@ledger_router.post("/tariffs", status_code=201, responses=error_responses(ConflictError))
def publish_tariff(tariff: Tariff, caller: CurrentCaller, service: Service) -> TariffView:
    """Publish prices: an owner of its clusters, an admin of any cluster and of links. They hold from now or later on.

    Prices that overlap, leave a gap in the day or begin in the past are refused, and a second currency of the pool.
    """
    auth.require_role(caller, "owner")
    return service.ledger.publish(caller, tariff)


@ledger_router.get("/tariffs", responses=error_responses())
def get_prices(caller: CurrentCaller, service: Service) -> PricesView:
    """Return the published prices in force and to come: for an owner those of its clusters, for others all."""
    auth.require_role(caller, "owner", "user")
    return service.ledger.prices(caller)


@ledger_router.get("/ledger", responses=error_responses())
def get_ledger(caller: CurrentCaller, service: Service, after: After = 0, limit: Limit = 1000) -> LedgerPage:
    """Return entries of the ledger: for a user those of its jobs, for an owner its own, for an admin all.

    A page ends with a transaction; the next one begins after transaction `after`.
    """
    auth.require_role(caller, "owner", "user")
    return service.ledger.page(caller, after, limit)


@ledger_router.get("/ledger/check", responses=error_responses())
def check_ledger(caller: CurrentCaller, service: Service) -> LedgerCheckView:
    """Recount the ledger (admin only): sum, pairs, balances, and each amount from its price and time."""
    auth.require_role(caller)
    return service.ledger.check()


@ledger_router.get("/statements/{party}/{name}", responses=error_responses(NotFoundError))
def get_statement(party: PartyKind, name: Name, month: Month, caller: CurrentCaller, service: Service) -> StatementView:
    """Return the statement of an owner, a user, a job or a project for a month: each caller its own, an admin all.

    Members of a project, or of one above it, see its cost, and by name their own jobs only.
    """
    auth.require_role(caller, "owner", "user")
    return service.ledger.statement(caller, party, name, month)


@ledger_router.get("/waits/{owner}", responses=error_responses(NotFoundError))
def get_waits(
    owner: Name, month: Month, caller: CurrentCaller, service: Service, after: After = 0, limit: Limit = 1000
) -> WaitedJobsPage:
    """Return how long the jobs waited that an owner's own users submitted in a month: an owner its own, an admin all.

    The operator's pool file lists the users of each owner. The next page begins after job number `after`.
    """
    auth.require_role(caller, "owner")
    return service.ledger.waits(caller, owner, month, after, limit)
