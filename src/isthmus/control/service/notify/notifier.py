"""`Notifier`: delivers the stored notices of a pool, while this server leads; `DeliveryQueue` decides what goes when.

A notice is stored with the event that it follows from and deleted once its receiver has it, so a killed server loses
none. A message is stored before its first attempt: the next server repeats it under the same id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from isthmus.control.algorithms.delivery_queue import DeliveryQueue, NoticeBatch, Receiver
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.notify.notify_settings import NotifySettings
from isthmus.control.service.notify.send_email import send_email
from isthmus.control.service.notify.send_webhook import DeliveryError, send_webhook
from isthmus.control.store.store_interface import Store, StoredNotice
from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.text.printable import printable
from isthmus.core.views.notice_views import NoticeMessage, Subscription

NUM_SENDERS = 4
"""Messages that are sent at a time."""
POLL_S = 2.0
"""Interval at which notices of other servers are read."""
SECRET_NAME = "notices"  # noqa: S105 - the name of a secret
_PAGE_SIZE = 1000

_log = logging.getLogger("isthmus.notify")


class _Outcome(NamedTuple):
    message: NoticeBatch
    # The queue that it is of: one of an earlier leadership does not count.
    queue: DeliveryQueue
    # None: delivered.
    error: Exception | None


class Notifier:
    """Delivers notices in threads of its own; `find` returns the subscription of a role and name.

    `on_outcome` counts messages by channel and outcome: `delivered`, `failed`, `dropped`.
    """

    def __init__(
        self,
        store: Store,
        find: Callable[[str, str], Subscription | None],
        settings: NotifySettings,
        audit: AuditLog,
        clock: Callable[[], float],
        is_leader: Callable[[], bool],
        on_outcome: Callable[[str, str], None] = lambda _channel, _outcome: None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store, self._find, self._settings, self._audit = store, find, settings, audit
        self._clock, self._is_leader, self._on_outcome, self._jitter = clock, is_leader, on_outcome, jitter
        self._queue: DeliveryQueue | None = None
        self._stored: dict[int, StoredNotice] = {}
        self._last_read = 0
        self._outcomes = queue.SimpleQueue[_Outcome]()
        self._wakes, self._is_closed = threading.Event(), threading.Event()
        self._senders = ThreadPoolExecutor(max_workers=NUM_SENDERS, thread_name_prefix="notify")
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def wake(self) -> None:
        """Read the notices of an event that is durable now."""
        self._wakes.set()

    def close(self) -> None:
        """Stop; what is not delivered is delivered by the next server. Waits for messages on their way."""
        self._is_closed.set()
        self._wakes.set()
        if self._thread.is_alive():
            self._thread.join()
        self._senders.shutdown(wait=True, cancel_futures=True)

    @property
    def num_waiting(self) -> int:
        """Number of notices that wait for their delivery by this server."""
        return len(self._stored)

    def step(self, now_s: float) -> float:
        """Take outcomes, read new notices, send what is due; return after how many seconds to look again."""
        while not self._outcomes.empty():
            self._end(self._outcomes.get(), now_s)
        if not self._is_leader():
            self._queue, self._stored = None, {}
            return POLL_S
        if self._queue is None:
            self._queue, self._stored, self._last_read = DeliveryQueue(), {}, 0
        self._read_notices(self._queue, now_s)
        for message in self._queue.due(now_s):
            if message.is_new:
                self._store.batch_notices(message.number, message.notices)
            notices = [self._stored[one] for one in message.notices]
            self._senders.submit(self._send, self._queue, message, notices)
        self._queue.forget_idle(now_s)
        next_s = self._queue.next_s()
        return POLL_S if next_s is None else min(POLL_S, max(0.05, next_s - now_s))

    def _run(self) -> None:
        wait_s = 0.0
        while not self._is_closed.is_set():
            self._wakes.wait(wait_s)
            self._wakes.clear()
            try:
                wait_s = self.step(self._clock())
            except IsthmusError as error:
                _log.warning("notices wait: %s", error)
                self._queue, wait_s = None, POLL_S
            except Exception:
                _log.exception("notices wait")
                self._queue, wait_s = None, POLL_S

    def _read_notices(self, waiting: DeliveryQueue, now_s: float) -> None:
        begun = defaultdict[Receiver, dict[int, list[int]]](lambda: defaultdict(list))
        dropped = list[int]()
        is_first = self._last_read == 0
        while page := self._store.notices(self._last_read, _PAGE_SIZE):
            self._last_read = page[-1].number
            for one in page:
                self._stored[one.number] = one
                if one.batch and is_first:
                    begun[_receiver(one)][one.batch].append(one.number)
                else:
                    dropped += waiting.add(_receiver(one), one.number, now_s)
        for receiver, batches in begun.items():
            for number in waiting.restore(receiver, batches.items(), now_s):
                dropped += waiting.add(receiver, number, now_s)
        if dropped:
            self._store.delete_notices(dropped)
            for channel in {self._stored[number].due.channel for number in dropped}:
                self._on_outcome(channel, "dropped")
            for number in dropped:
                del self._stored[number]
            self._audit.record("notices-dropped", None, detail=f"{len(dropped)} notices: too many wait")

    def _send(self, waiting: DeliveryQueue, message: NoticeBatch, notices: list[StoredNotice]) -> None:
        error: Exception | None = None
        try:
            self._deliver(message, notices)
        except Exception as problem:
            error = problem
        self._outcomes.put(_Outcome(message, waiting, error))
        self._wakes.set()

    def _deliver(self, message: NoticeBatch, notices: list[StoredNotice]) -> None:
        role, name, channel = message.receiver
        subscription, first = self._find(role, name), notices[0].due
        if subscription is None or channel not in subscription.channels:
            return
        body = NoticeMessage(
            id=f"isthmus-{self._store.store_id[:12]}-{message.number}", role=first.role, name=name,
            notices=tuple(one.due.notice for one in notices), dropped=message.num_dropped,
        )  # fmt: skip
        if channel == "email":
            self._settings.check_email(subscription.email)
            if self._settings.smtp is not None:
                send_email(self._settings.smtp, subscription.email, body, self._clock())
            return
        if not self._settings.webhooks:
            raise InputError("this server sends no webhooks")
        secret = webhook_secret(self._store, role, name, subscription.webhook)
        text = body.model_dump_json().encode()
        send_webhook(subscription.webhook, text, body.id, secret, self._clock(), self._settings.networks)

    def _end(self, outcome: _Outcome, now_s: float) -> None:
        """Delete the notices of a message that has ended, or have it repeated."""
        message, waiting, error = outcome
        if waiting is not self._queue:
            return  # it is repeated, under the same id
        role, name, channel = message.receiver
        if error is None or isinstance(error, InputError) or not isinstance(error, IsthmusError):
            waiting.delivered(message)
        else:
            after_s = error.retry_after_s if isinstance(error, DeliveryError) else 0.0
            if not waiting.failed(message, now_s, self._jitter(), after_s):
                _log.info("a message to %s %s by %s failed: %s", role, name, channel, error)
                self._on_outcome(channel, "failed")
                return
        self._store.delete_notices(message.notices)
        for number in message.notices:
            self._stored.pop(number, None)
        self._on_outcome(channel, "delivered" if error is None else "dropped")
        if error is not None:
            why = printable(str(error))[:300]
            detail = f"{len(message.notices)} notices by {channel}: {why}"
            self._audit.record("notices-dropped", None, f"{role} {name}", detail)
            _log.warning("%s %s: %s", role, name, detail)


def webhook_secret(store: Store, role: str, name: str, url: str) -> bytes:
    """Return the key that signs the webhooks of a subscription; it changes with the URL."""
    return hmac.new(store.secret(SECRET_NAME), f"{role} {name} {url}".encode(), hashlib.sha256).digest()


def printed_secret(secret: bytes) -> str:
    """Return a key as Standard Webhooks write it."""
    return f"whsec_{base64.b64encode(secret).decode()}"


def _receiver(one: StoredNotice) -> Receiver:
    return one.due.role, one.due.name, one.due.channel
