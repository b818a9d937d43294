"""`CourierListener`: accepts the couriers of workers over TLS 1.3 and answers their frames, a thread each.

A caller that has not presented a token is a stranger. Strangers have `PROOF_S` in all and are limited in number: a new
one closes the oldest. Only the TLS handshake and 32 bytes of a stranger are parsed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from isthmus.agent.courier.courier_frames import TOKEN_BYTES, Frame, FrameError, read_frame, send_frame

PROOF_S = 10.0
"""Time from a connection to its token, TLS handshake included; it does not move with each byte."""
SILENCE_S = 30.0
"""A worker looks several times a second: one that sends nothing for so long is cut off, and comes again."""
MAX_STRANGERS = 64
MAX_WORKERS = 4096

_WATCH_S = 0.5
_log = logging.getLogger("isthmus.agent")


class FolderSession(Protocol):
    """One worker's connection to its folder."""

    def handle(self, frame: Frame) -> Frame:
        """Return the answer to a frame."""

    def close(self) -> None:
        """Note that the connection has ended."""


OpenSession = Callable[[bytes, Callable[[], None]], FolderSession | None]
"""From a token, and what cuts the connection, to its session; None for a token that opens nothing."""


@dataclass(eq=False)
class _Caller:
    raw: socket.socket
    since_s: float
    proved: bool = False
    thread: threading.Thread | None = field(default=None)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.raw.shutdown(socket.SHUT_RDWR)


class CourierListener:
    """Listens at `host`:`port` (0: any free one) with the key and certificate of `pem`; `close` ends every thread."""

    def __init__(self, host: str, port: int, pem: str, open_session: OpenSession) -> None:
        self._open_session = open_session
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._tls.num_tickets = 0
        self._tls.load_cert_chain(pem)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._callers: set[_Caller] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=one, name=f"courier-{name}", daemon=True)
            for name, one in (("accept", self._accept), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Cut every connection and end every thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            callers = list(self._callers)
        for caller in callers:
            caller.cut()
        for thread in [*self._threads, *(caller.thread for caller in callers if caller.thread is not None)]:
            thread.join(timeout=PROOF_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(_WATCH_S / 10):  # no free file descriptor, or closed
                    return
                continue
            caller = _Caller(raw, time.monotonic())
            with self._lock:
                strangers = sorted((one for one in self._callers if not one.proved), key=lambda one: one.since_s)
                if len(self._callers) - len(strangers) >= MAX_WORKERS:
                    raw.close()
                    continue
                for one in strangers[: max(0, len(strangers) - MAX_STRANGERS + 1)]:
                    one.cut()
                self._callers.add(caller)
            caller.thread = threading.Thread(target=self._serve, args=(caller,), name="courier", daemon=True)
            try:
                caller.thread.start()
            except RuntimeError:  # no more threads
                self._drop(caller)

    def _watch(self) -> None:
        """Cut strangers whose time is up, however slowly they go on sending."""
        while not self._closed.wait(_WATCH_S):
            now_s = time.monotonic()
            with self._lock:
                late = [one for one in self._callers if not one.proved and now_s - one.since_s > PROOF_S]
            for caller in late:
                caller.cut()

    def _serve(self, caller: _Caller) -> None:
        session: FolderSession | None = None
        try:
            caller.raw.settimeout(PROOF_S)
            # The handshake comes after the socket was handed over: `cut` reaches it from the first byte on.
            with self._tls.wrap_socket(caller.raw, server_side=True, do_handshake_on_connect=False) as stream:
                caller.raw = stream
                stream.do_handshake()
                session = self._open_session(bytes(_receive(stream, TOKEN_BYTES)), caller.cut)
                if session is None:
                    return
                caller.proved = True
                stream.settimeout(SILENCE_S)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._closed.is_set():
                    answer = session.handle(read_frame(lambda num_bytes: _receive(stream, num_bytes)))
                    send_frame(stream.sendall, answer)
        except FrameError as error:
            _log.warning("courier: a worker's frame was refused: %s", str(error)[:200])
        except (OSError, ValueError):  # broken or silent connections; the folder is gone
            pass
        finally:
            if session is not None:
                session.close()
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        with self._lock:
            self._callers.discard(caller)
        caller.raw.close()


def _receive(stream: socket.socket, num_bytes: int) -> bytearray:
    """Return exactly `num_bytes`, which the caller has compared with its bounds."""
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        count = stream.recv_into(view[at:])
        if count == 0:
            raise ConnectionResetError("closed its connection")
        at += count
    return data
