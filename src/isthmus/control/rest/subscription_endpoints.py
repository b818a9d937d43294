"""The endpoints of subscriptions to notices."""

from __future__ import annotations

from fastapi import APIRouter

from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import CurrentCaller, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.core.views.notice_views import Subscription, SubscriptionView

subscription_router = APIRouter(prefix="/v1", route_class=JsonRoute)


@subscription_router.get("/subscription", responses=error_responses())
def get_subscription(caller: CurrentCaller, service: Service) -> SubscriptionView:
    """Return the caller's subscription to notices, without the secret of its webhooks."""
    return service.subscriptions.view(caller)


@subscription_router.put("/subscription", responses=error_responses())
def set_subscription(subscription: Subscription, caller: CurrentCaller, service: Service) -> SubscriptionView:
    """Subscribe to notices of the caller's jobs (an owner: sites; an admin: all); return the secret of its webhooks.

    Webhooks are signed as Standard Webhooks describe it, delivered at least once under one `webhook-id`, and repeated
    for a day. Their address is checked at each delivery.
    """
    return service.subscriptions.set(caller, subscription)


@subscription_router.delete("/subscription", status_code=204, responses=error_responses())
def remove_subscription(caller: CurrentCaller, service: Service) -> None:
    """End the caller's subscription; what waits for delivery is dropped."""
    service.subscriptions.set(caller, None)
