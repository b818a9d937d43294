"""Notices from the event to the receiver: real webhooks and mail, and servers that end in between."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.notify.notifier import Notifier
from isthmus.control.service.notify.notify_settings import NotifySettings, SmtpSettings, load_notify_settings
from isthmus.control.state.events import AgentLost, AgentReported, JobCancelled, NoticeDue, SubscriptionSet
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import MemoryStore, Store
from isthmus.core.errors import FileError
from isthmus.core.views.access_views import AuditFilter
from isthmus.core.views.notice_views import PoolNotice, Subscription
from tests.control.receivers import mail_receiver, webhook_receiver
from tests.control.serving import EAST, report
from tests.control.test_server_api import Server

LOCAL = NotifySettings(networks=("127.0.0.0/8",))


def due(job: str, channel: str = "webhook", name: str = "ann") -> NoticeDue:
    notice = PoolNotice(kind="started", at_s=5.0, job=job, text="all ranks run")
    return NoticeDue.model_validate({"role": "user", "name": name, "channel": channel, "notice": notice})


class Life:
    """A notifier over a store, driven by hand; `now_s` is its clock."""

    def __init__(self, store: Store, subscription: Subscription | None, settings: NotifySettings = LOCAL) -> None:
        self.store, self.now_s, self.outcomes = store, 1000.0, list[tuple[str, str]]()
        self._pause = threading.Event()
        self.audit, self.leads = AuditLog(store, lambda: self.now_s), True
        self.notifier = Notifier(
            store, lambda role, name: subscription if (role, name) == ("user", "ann") else None, settings, self.audit,
            lambda: self.now_s, lambda: self.leads, lambda *one: self.outcomes.append(one), lambda: 0.0,
        )  # fmt: skip

    def until(self, happened: Callable[[], bool]) -> None:
        """Let time pass until something has happened."""
        for _ in range(500):
            self.notifier.step(self.now_s)
            if happened():
                return
            self._pause.wait(0.02)
            self.now_s += 1.0
        raise AssertionError("it did not happen")

    def acts(self) -> list[str]:
        self.audit.flush()
        return [one.action for one in self.store.audit(AuditFilter())]


def test_a_webhook_is_signed_and_has_the_notices_in_order() -> None:
    """A receiver verifies the signature with the secret, as Standard Webhooks describe it."""
    store = MemoryStore()
    with webhook_receiver() as hook:
        life = Life(store, Subscription(webhook=hook.url))
        store.append([], notices=[due("one"), due("two"), due("other", name="bob")])
        life.until(lambda: not store.notices())
        ((head, body),) = hook.taken
    secret = hmac.new(store.secret("notices"), f"user ann {hook.url}".encode(), hashlib.sha256).digest()
    signed = f"{head['webhook-id']}.{head['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    assert head["webhook-signature"] == f"v1,{digest}"
    assert abs(int(head["webhook-timestamp"]) - life.now_s) < 60
    found = json.loads(body)
    assert (found["type"], found["id"], found["name"]) == ("isthmus.notices", head["webhook-id"], "ann")
    assert [(one["kind"], one["job"]) for one in found["notices"]] == [("started", "one"), ("started", "two")]
    assert sorted(life.outcomes) == [("webhook", "delivered"), ("webhook", "delivered")], "bob has none, and is done"
    life.notifier.close()


def test_a_message_is_repeated_under_its_id_until_it_is_taken() -> None:
    """Also by the next server, which knows it from the store: nothing is lost, and repetitions are recognised."""
    store = MemoryStore()
    with webhook_receiver() as hook:
        hook.statuses = [500, 302]
        first = Life(store, Subscription(webhook=hook.url))
        store.append([], notices=[due("one")])
        first.until(lambda: len(hook.taken) == 2 and len(first.outcomes) == 2)
        first.notifier.close()  # as a server that is killed: the notice is stored, with the number of its message
        store.append([], notices=[due("two")])
        second = Life(store, Subscription(webhook=hook.url))
        second.until(lambda: not store.notices())
        second.notifier.close()
    ids = [head["webhook-id"] for head, _ in hook.taken]
    jobs = [[one["job"] for one in json.loads(body)["notices"]] for _, body in hook.taken]
    assert first.outcomes == [("webhook", "failed")] * 2, "a redirect is not followed, and no success"
    assert jobs == [["one"], ["one"], ["one"], ["two"]]
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_mail_is_sent_once_and_says_what_happened() -> None:
    """A mail server that is busy is asked again with the same Message-ID."""
    store = MemoryStore()
    with mail_receiver() as mail:
        mail.answers = ["451 try later"]
        smtp = SmtpSettings(host="127.0.0.1", port=mail.port, security="none", sender="pool@isthmus.example")
        settings = NotifySettings(smtp=smtp, email_domains=("example.org",))
        life = Life(store, Subscription(email="ann@example.org"), settings)
        store.append([], notices=[due("one", "email"), due("two", "email")])
        life.until(lambda: not store.notices())
        life.notifier.close()
        ((receiver, message),) = mail.taken
    assert life.outcomes == [("email", "failed"), ("email", "delivered")]
    assert receiver == message["To"] == "ann@example.org"
    assert message["Subject"] == "Isthmus: one started and 1 more"
    assert message["Message-ID"].startswith(f"<isthmus-{store.store_id[:12]}-1@")
    assert "job two: all ranks run" in message.get_payload()


def test_what_can_never_be_delivered_is_dropped_and_recorded() -> None:
    """An address that the operator does not allow, and a channel that is no longer offered."""
    store = MemoryStore()
    life = Life(store, Subscription(webhook="https://127.0.0.1/", email="ann@example.org"), NotifySettings())
    store.append([], notices=[due("one"), due("one", "email")])
    life.until(lambda: not store.notices())
    assert sorted(life.outcomes) == [("email", "dropped"), ("webhook", "dropped")]
    assert life.acts() == ["notices-dropped", "notices-dropped"]
    life.notifier.close()


def test_a_server_that_does_not_lead_sends_nothing() -> None:
    """The leader of the store alone sends; who leads later begins with what is stored."""
    store = MemoryStore()
    with webhook_receiver() as hook:
        life = Life(store, Subscription(webhook=hook.url))
        life.leads = False
        store.append([], notices=[due("one")])
        for _ in range(20):
            life.notifier.step(life.now_s)
            life.now_s += 10
        assert (hook.taken, life.notifier.num_waiting) == ([], 0)
        life.leads = True
        life.until(lambda: not store.notices())
        life.notifier.close()
    assert len(hook.taken) == 1


def test_notices_are_stored_with_their_event_and_survive_the_process(tmp_path: Path) -> None:
    """What was appended is there after a reopening, with the message that it is in; what was not, is not."""
    store = SqliteStore(tmp_path / "isthmus.db")
    store.append([JobCancelled(now_s=1.0, job_id="a")], notices=[due("a"), due("b")])
    first, _ = store.notices()
    store.batch_notices(first.number, [first.number])
    store.close()
    store = SqliteStore(tmp_path / "isthmus.db")
    assert [(one.due, one.batch) for one in store.notices()] == [(due("a"), first.number), (due("b"), 0)]
    store.close()


def subscribed(role: str, name: str, **fields: object) -> SubscriptionSet:
    given = {"webhook": "https://hooks.example.org/"} | fields
    return SubscriptionSet.model_validate({"now_s": 1.0, "role": role, "name": name, "subscription": given})


def told(instructions: list[object]) -> list[tuple[str, str, str]]:
    return [(one.name, one.notice.kind, one.notice.site) for one in instructions if isinstance(one, NoticeDue)]


def test_owners_and_admins_are_told_of_sites() -> None:
    """A site that is away, once, and back; of an owner's own sites, by each channel; others learn nothing."""
    coordinator = Coordinator()
    coordinator.handle(AgentReported.from_report(report(EAST), 0.5))
    coordinator.handle(subscribed("owner", "owner-east", email="east@example.org"))
    coordinator.handle(subscribed("owner", "owner-west"))
    coordinator.handle(subscribed("admin", "root", topics=("sites",)))
    assert told(coordinator.handle(AgentLost(now_s=90.0, cluster="east"))) == [
        ("owner-east", "site-away", "east"), ("owner-east", "site-away", "east"), ("root", "site-away", "east"),
    ]  # fmt: skip
    assert told(coordinator.handle(AgentReported.from_report(report(EAST), 95.0)))[-1] == ("root", "site-back", "east")
    assert told(coordinator.handle(AgentReported.from_report(report(EAST, incarnation="i2"), 96.0))) == []
    coordinator.handle(subscribed("admin", "root", topics=("state",)))
    assert told(coordinator.handle(AgentLost(now_s=190.0, cluster="east")))[-1][0] == "owner-east"


def test_users_are_told_of_their_own_jobs(server: Server) -> None:
    """By what the REST interface takes: ann's job ends, ann is told; bob is not, nor is what happened before."""
    early = server.submit("ann").id
    server.call("POST", f"/v1/jobs/{early}/cancel")
    for name in ("ann", "bob"):
        answer = server.call("PUT", "/v1/subscription", {"webhook": f"https://{name}.example.org/"}, token=name)
        assert answer.json()["secret"].startswith("whsec_")
    server.now_s += 1
    job_id = server.submit("ann").id
    server.call("POST", f"/v1/jobs/{job_id}/cancel")
    waiting = server.store.notices()
    assert [(one.due.name, one.due.notice.kind, one.due.notice.job) for one in waiting] == [
        ("ann", "cancelled", job_id)
    ]
    assert server.call("GET", "/v1/subscription").json()["secret"] == ""
    assert server.call("DELETE", "/v1/subscription").status_code == 204
    assert server.call("GET", "/v1/subscription").json()["subscription"] is None


def test_settings_are_read_with_the_line_of_what_is_wrong(tmp_path: Path) -> None:
    """The operator's file: networks, a mail server; a password never goes through an open connection."""
    file = tmp_path / "notify.yaml"
    file.write_text("networks: [10.0.0.0/8]\nsmtp: {host: mail.example, sender: pool@example.org}\n")
    settings = load_notify_settings(file)
    assert (settings.smtp and settings.smtp.used_port, settings.networks) == (587, ("10.0.0.0/8",))
    for wrong, message in (
        ("networks: [10.0.0.0/33]\n", "10.0.0.0/33"),
        ("smtp: {host: m, sender: nobody}\n", "sender"),
        ("smtp: {host: m, sender: a@b, security: none, user: u}\n", "open connection"),
        ("smpt: {}\n", "smtp"),
    ):
        file.write_text(wrong)
        with pytest.raises(FileError) as caught:
            load_notify_settings(file)
        assert message in f"{caught.value} {caught.value.hint}"
