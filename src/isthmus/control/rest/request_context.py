"""What endpoints take from a request: its caller, the service, and the cursor and size of a page."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlService
from isthmus.core.base_model import NonNegativeInt


async def get_caller(request: Request) -> Caller:
    """Return the request's caller as authenticated by the middleware."""
    caller: Caller = request.state.caller
    return caller


async def get_service(request: Request) -> ControlService:
    """Return the service that the application exposes."""
    service: ControlService = request.app.state.service
    return service


CurrentCaller = Annotated[Caller, Depends(get_caller)]
Service = Annotated[ControlService, Depends(get_service)]
MAX_STORED_INTEGER = 2**63 - 1
"""Largest integer that a store holds."""
After = Annotated[NonNegativeInt, Query(le=MAX_STORED_INTEGER, description="cursor: `next` of the previous page")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="largest number of entries per page")]
