"""Receivers of notices on this machine: an HTTP server for webhooks, and a mail server. Each keeps what it took."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebhookReceiver(ThreadingHTTPServer):
    """Answers each POST with the next of `statuses`, or 204."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.statuses: list[int] = []
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.arrived = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?of=ann"


class _Post(BaseHTTPRequestHandler):
    server: WebhookReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.server.taken.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.end_headers()
        self.server.arrived.release()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class MailReceiver(socketserver.ThreadingTCPServer):
    """Takes mail by SMTP without encryption (RFC 5321), and answers DATA with the next of `answers`, or 250."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Smtp)
        self.answers: list[str] = []
        self.taken: list[tuple[str, Message]] = []
        self.arrived = threading.Semaphore(0)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Smtp(socketserver.StreamRequestHandler):
    server: MailReceiver

    def handle(self) -> None:
        receiver = ""
        self.wfile.write(b"220 ready\r\n")
        while line := self.rfile.readline():
            word = line.strip().upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                text = b""
                while (part := self.rfile.readline()) != b".\r\n":
                    text += part
                answer = self.server.answers.pop(0) if self.server.answers else "250 taken"
                if answer.startswith("250"):
                    self.server.taken.append((receiver, message_from_bytes(text)))
                self.wfile.write(f"{answer}\r\n".encode())
                self.server.arrived.release()
                continue
            if word.startswith(b"RCPT TO:"):
                receiver = line.decode().partition("<")[2].partition(">")[0]
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")


@contextmanager
def webhook_receiver() -> Iterator[WebhookReceiver]:
    """Run a receiver of webhooks."""
    with WebhookReceiver() as receiver, _running(receiver):
        yield receiver


@contextmanager
def mail_receiver() -> Iterator[MailReceiver]:
    """Run a mail server."""
    with MailReceiver() as receiver, _running(receiver):
        yield receiver


@contextmanager
def _running(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
