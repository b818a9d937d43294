"""The endpoints of tokens and of the audit log. Bodies are models of `isthmus.core`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import After, CurrentCaller, Limit, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service import auth
from isthmus.core.base_model import NonNegativeFloat
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.views.access_views import (
    MAX_TEXT_CHARS,
    AuditFilter,
    AuditPage,
    LimitsView,
    TokenGrant,
    TokenInfo,
    TokenRotation,
)
from isthmus.core.views.api_views import TokenRequest, TokenView

AuditSince = Annotated[
    NonNegativeFloat | None,
    Query(allow_inf_nan=False, description="only records at or after this time (seconds since the epoch)"),
]
AuditUser = Annotated[str | None, Query(max_length=MAX_TEXT_CHARS, description="only acts of this name, or on it")]

access_router = APIRouter(prefix="/v1", route_class=JsonRoute)


@access_router.post("/tokens", status_code=201, responses=error_responses(ConflictError))
def make_token(request: TokenRequest, caller: CurrentCaller, service: Service) -> TokenView:
    """Create a token for an owner, a user or an admin. Only this response contains it."""
    auth.require_role(caller)
    return service.make_token(caller, request)


@access_router.get("/tokens", responses=error_responses())
def list_tokens(caller: CurrentCaller, service: Service) -> list[TokenInfo]:
    """List the caller's tokens (an admin: all), without the tokens themselves, oldest first."""
    return list(service.tokens.list(caller))


@access_router.post("/tokens/{token_id}/revoke", responses=error_responses(NotFoundError, ConflictError))
def revoke_token(token_id: str, caller: CurrentCaller, service: Service) -> TokenInfo:
    """Revoke a token of the caller (an admin: any): it is rejected and its event streams end within a second."""
    revoked = service.tokens.revoke(caller, token_id)
    if revoked.role == "joiner":
        service.site_keys.revoke_invitation(token_id)
    return revoked


@access_router.post("/tokens/{token_id}/grant", responses=error_responses(NotFoundError, ConflictError))
def grant_token(token_id: str, grant: TokenGrant, caller: CurrentCaller, service: Service) -> TokenInfo:
    """Grant priority `high` to the jobs of a user's token, or take it back (admin only): it counts within a second."""
    auth.require_role(caller)
    return service.tokens.grant(caller, token_id, grant)


@access_router.post("/tokens/{token_id}/rotate", responses=error_responses(NotFoundError, ConflictError))
def rotate_token(token_id: str, rotation: TokenRotation, caller: CurrentCaller, service: Service) -> TokenView:
    """Replace a token of the caller (an admin: any): return a new one; the old one counts for `grace_s` more."""
    return service.tokens.rotate(caller, token_id, rotation)


@access_router.get("/limits", responses=error_responses())
def get_limits(caller: CurrentCaller, service: Service) -> LimitsView:
    """Return the limits of users and owners, and which users have most of them in use (admin only)."""
    auth.require_role(caller)
    return service.limits()


@access_router.get("/audit", responses=error_responses())
def get_audit(
    caller: CurrentCaller,
    service: Service,
    since_s: AuditSince = None,
    user: AuditUser = None,
    after: After = 0,
    limit: Limit = 1000,
    oldest: Annotated[bool, Query(description="without a cursor: the oldest records instead of the newest")] = False,
) -> AuditPage:
    """Return records of the audit log (admin only): the newest ones, or the first after the cursor `after`.

    Records are never changed, and each is chained to the one before by its `hash`; the server keeps them for 400 days.
    """
    auth.require_role(caller)
    service.audit.flush()
    records = service.store.audit(AuditFilter(since_s=since_s, user=user), after, limit, oldest=oldest)
    next_number = records[-1].number if records else after
    return AuditPage(records=records, next=next_number, store=service.store.store_id)
