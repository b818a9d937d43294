"""`SubscriptionAccess`: callers subscribe to notices for their own role and name."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.auth import Caller
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.service.notify.notifier import printed_secret, webhook_secret
from isthmus.control.service.notify.notify_settings import NotifySettings
from isthmus.control.state.events import SubscriptionSet
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import AuthError, InputError
from isthmus.core.views.notice_views import Subscription, SubscriptionView


class SubscriptionAccess:
    """Sets and shows subscriptions; `clock` counts from the epoch."""

    def __init__(
        self,
        actor: CoordinatorActor,
        store: Store,
        settings: NotifySettings,
        audit: AuditLog,
        clock: Callable[[], float],
    ) -> None:
        self._actor, self._store, self._settings, self._audit, self._clock = actor, store, settings, audit, clock

    def find(self, role: str, name: str) -> Subscription | None:
        """Return the subscription of a role and name."""

        def read(coordinator: Coordinator) -> Subscription | None:
            record = coordinator.state.subscriptions.get((role, name))
            return record.subscription if record is not None else None

        return self._actor.query(read)

    def view(self, caller: Caller) -> SubscriptionView:
        """Return the caller's subscription, without the secret of its webhooks."""
        _require_person(caller)
        return SubscriptionView(subscription=self.find(caller.role, caller.name))

    def set(self, caller: Caller, subscription: Subscription | None) -> SubscriptionView:
        """Replace the caller's subscription, or with None remove it; return it with the secret that signs webhooks.

        Raises `InputError` for a channel that the operator does not offer.
        """
        _require_person(caller)
        if subscription is not None:
            self._check(subscription)
        event = SubscriptionSet.model_validate(
            {"now_s": self._clock(), "role": caller.role, "name": caller.name, "subscription": subscription}
        )
        act = "unsubscribed" if subscription is None else "subscribed"
        line = self._audit.line(act, caller, caller.name, _described(subscription))
        self._actor.propose(lambda _: event, lambda _: None, line)
        if subscription is None or not subscription.webhook:
            return SubscriptionView(subscription=subscription)
        secret = webhook_secret(self._store, caller.role, caller.name, subscription.webhook)
        return SubscriptionView(subscription=subscription, secret=printed_secret(secret))

    def _check(self, subscription: Subscription) -> None:
        if not subscription.channels or not subscription.topics:
            raise InputError(
                "a subscription needs a webhook or an e-mail address, and a topic", hint="name one of each"
            )
        if subscription.webhook and not self._settings.webhooks:
            raise InputError("this server sends no webhooks", hint="use e-mail, or ask the operator")
        if subscription.webhook.startswith("http:") and not self._settings.networks:
            raise InputError("webhooks go by https", hint="use a URL that begins with https://")
        if subscription.email:
            self._settings.check_email(subscription.email)


def _require_person(caller: Caller) -> None:
    if caller.site or caller.role == "joiner":
        raise AuthError("the key of a site's agent subscribes to nothing", hint="use a token of the owner")


def _described(subscription: Subscription | None) -> str:
    """Return where notices go, without paths, which may hold secrets."""
    if subscription is None:
        return ""
    host = urlsplit(subscription.webhook).hostname if subscription.webhook else ""
    domain = subscription.email.rpartition("@")[2]
    where = [f"webhook at {host}"] * bool(host) + [f"e-mail at {domain}"] * bool(domain)
    return f"{', '.join(where)}: {', '.join(subscription.topics)}"
