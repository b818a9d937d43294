"""The endpoints of quotas: the operator sets projects, groups and limits, owners those of their projects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import CurrentCaller, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service import auth
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.with_quota import QuotaChange
from isthmus.core.views.quota_views import AccountsView, QuotaView

quota_router = APIRouter(prefix="/v1", route_class=JsonRoute)
_ACCOUNT_TEXT = "one account, as `project:NAME`, `group:NAME` or `user:NAME`"
Account = Annotated[str | None, Query(max_length=80, description=_ACCOUNT_TEXT)]
NamedAccount = Annotated[str, Path(max_length=80, description=_ACCOUNT_TEXT)]


@quota_router.post("/quotas", status_code=201, responses=error_responses(ConflictError))
def set_quotas(accounts: Accounts, caller: CurrentCaller, service: Service) -> AccountsView:
    """Set projects, groups and limits in place of those before (admin only).

    A limit below what runs is refused with the time at which it would hold.
    """
    auth.require_role(caller)
    return service.quotas_of_accounts.set(caller, accounts)


@quota_router.post("/quotas/{account}", status_code=201, responses=error_responses(NotFoundError, ConflictError))
def set_quota(account: NamedAccount, quota: QuotaChange, caller: CurrentCaller, service: Service) -> QuotaView:
    """Set the quota of one account in place of the one before; an amount that is left out has no limit.

    An owner sets for its projects the chips of its own clusters alone; what the operator set besides stays. A limit
    below what runs is refused with what uses it and the time at which it would hold, a guarantee of more chips than
    there are with who else holds them.
    """
    auth.require_role(caller, "owner")
    return service.quotas_of_accounts.set_quota(caller, account, quota)


@quota_router.get("/quotas", responses=error_responses(NotFoundError))
def show_quotas(caller: CurrentCaller, service: Service, account: Account = None) -> QuotaView:
    """Return accounts with their limits and use.

    For a user its own and those of its projects, for an owner its projects, for an admin all.
    """
    auth.require_role(caller, "user", "owner")
    return service.quotas_of_accounts.show(caller, account)
