"""URLs and addresses of users that aim at the server's own network, and receivers that do harm."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.control.service.notify.send_email import make_email
from isthmus.control.service.notify.send_webhook import DeliveryError, send_webhook
from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.views.access_views import AuditFilter
from isthmus.core.views.notice_views import NoticeMessage, PoolNotice, Subscription
from tests.control.receivers import webhook_receiver
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack


@pytest.fixture
def server() -> Iterator[Server]:
    """The application in this process."""
    server = Server()
    yield server
    server.shell.close()


def post(url: str, networks: tuple[str, ...] = (), **more: object) -> None:
    send_webhook(url, b"{}", "id-1", b"key", 1e9, networks, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
        "2002:7f00:1::", "fec0::1",
    ],
)  # fmt: skip
def test_no_webhook_reaches_an_address_that_is_not_public(address: str) -> None:
    """Whatever the name says: loopback, private and link-local networks, also inside IPv6 forms."""
    with pytest.raises(InputError, match="no public address"):
        post("https://innocent.example.org/", resolve=lambda *_: [address])


def test_numbers_that_are_addresses_are_resolved_before_they_are_judged() -> None:
    """Decimal, octal and short forms of loopback go through the resolver like names."""
    for host in ("2130706433", "0x7f.1", "0177.0.0.1", "127.1", "localhost"):
        with pytest.raises(IsthmusError):
            post(f"https://{host}/")


def test_a_name_that_changes_its_address_is_dialled_at_the_one_that_was_checked() -> None:
    """DNS rebinding: the name is resolved once; a second answer is never asked for."""
    with webhook_receiver() as inside:
        answers = iter([["127.0.0.1"], ["10.0.0.1"]])
        post(f"http://rebinding.example.org:{inside.server_port}/", ("127.0.0.0/8",), resolve=lambda *_: next(answers))
        assert inside.taken[0][0]["host"] == f"rebinding.example.org:{inside.server_port}"
        assert next(answers) == ["10.0.0.1"]


def test_a_redirect_into_the_private_network_is_not_followed() -> None:
    """The answer 302 is a failure; nothing is sent to its `Location`."""
    with webhook_receiver() as hook:
        hook.statuses = [302]
        with pytest.raises(DeliveryError, match="answered 302"):
            post(hook.url, ("127.0.0.0/8",))
        assert len(hook.taken) == 1


def test_http_is_for_networks_of_the_operator_alone() -> None:
    """An open connection to a public address would show what happens in the pool."""
    with pytest.raises(InputError, match="is not in a network that is reached by http"):
        post("http://example.org/", ("10.0.0.0/8",), resolve=lambda *_: ["93.184.216.34"])


@contextmanager
def hostile(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A receiver that does with a connection what `answer` does."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with closing(connection):
                connection.recv(65536)
                try:
                    answer(connection)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread.join(5)


def _drip(connection: socket.socket) -> None:
    for _ in range(200):
        connection.sendall(b"H")


def _flood(connection: socket.socket) -> None:
    for _ in range(1000):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 65536)


@pytest.mark.parametrize(
    "answer",
    [
        _drip, lambda one: one.sendall(b"\x00\xff" * 100), lambda one: one.sendall(b"HTTP/1.1 9999 no\r\n\r\n"),
        lambda one: one.sendall(b"SSH-2.0-x\r\n\r\n"), lambda one: None,
        lambda one: one.sendall(b"HTTP/1.1 503 busy\r\nRetry-After: 99999999999999\r\n\r\n"),
    ],
)  # fmt: skip
def test_a_receiver_that_answers_nonsense_costs_a_moment(answer: Callable[[socket.socket], None]) -> None:
    """Dripping, binary, closed, or a time far away: a failure within the deadline, and no more."""
    ticks = itertools.count()
    with hostile(answer) as url:
        with pytest.raises(DeliveryError) as caught:
            post(url, ("127.0.0.0/8",), timeout_s=5.0, monotonic=lambda: next(ticks) / 2)
        assert caught.value.retry_after_s == 0
    assert next(ticks) < 15


def test_an_answer_without_end_is_read_up_to_its_first_line() -> None:
    """A success is a success; the rest of it is not read."""
    with hostile(_flood) as url:
        post(url, ("127.0.0.0/8",))


@given(st.text(max_size=40))
def test_no_text_becomes_another_url(text: str) -> None:
    """What is accepted as a webhook is printable ASCII without a user, a line or a fragment."""
    for url in (text, f"https://{text}", f"https://example.org/{text}"):
        try:
            subscription = Subscription(webhook=url)
        except ValidationError:
            continue
        if url:
            assert subscription.webhook.isascii()
            assert not {"\r", "\n", " ", "\\", "#"} & set(subscription.webhook)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/", "file:///etc/passwd", "https://", "https://user:pw@example.org/", "https://a\r\nb/",
        "https://example.org:99999/", "gopher://x/", "//example.org/", "https://example.org/#x",
        "https://[::1", "x" * 501,
    ],
)  # fmt: skip
def test_a_url_of_another_kind_is_refused_at_once(server: Server, url: str) -> None:
    """With what is wrong, by the request that names it."""
    assert server.call("PUT", "/v1/subscription", {"webhook": url}).status_code == 422


def test_addresses_and_texts_put_no_header_into_mail() -> None:
    """Lines in texts of workers stay text; addresses with more than one address in them are refused."""
    lists = "a@b.example\nBcc: c@d.example", "a@b.example, c@d.example", "<a@b.example>"
    for address in (*lists, "a@b c", "a@", "@b", "a b@c"):
        with pytest.raises(ValidationError):
            Subscription(email=address)
    notice = PoolNotice(kind="failed", at_s=1.0, job="j\nBcc: x@y.example", text="\r\nBcc: x@y.example\r\n.\r\nQUIT")
    message = NoticeMessage(id="isthmus-1", role="user", name="ann", notices=(notice,))
    mail = make_email("pool@isthmus.example", "ann@example.org", message, 1.0)
    assert mail["Bcc"] is None
    assert "\nBcc" not in mail.as_string()


def test_the_audit_log_has_the_host_and_no_secret_of_a_url(server: Server) -> None:
    """Paths and queries of webhooks are secrets at many services."""
    url = "https://hooks.example.org/services/T0/SECRET?token=SECRET"
    server.call("PUT", "/v1/subscription", {"webhook": url, "topics": ["state"]})
    (line,) = [one for one in server.store.audit(AuditFilter()) if one.action == "subscribed"]
    assert line.detail == "webhook at hooks.example.org: state"
    assert "SECRET" not in line.model_dump_json()


def test_mail_goes_to_domains_of_the_operator_alone(server: Server) -> None:
    """Without a mail server there is none; a server is no way to send mail to anyone."""
    answer = server.call("PUT", "/v1/subscription", {"email": "victim@example.org"})
    assert answer.status_code == 422
    assert "sends no e-mail" in answer.json()["message"]
