"""`Acceptor`: accepts reconnects of broken connections while a run is on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from isthmus.comm.tcp.reconnect import GreetedSocket
from isthmus.comm.tcp.rendezvous import GREETING_TIMEOUT_S, MAX_PENDING_CONNECTIONS
from isthmus.comm.tcp.wire_format import Greeting, answer_greeting
from isthmus.core.errors import IsthmusError, RestartError
from isthmus.core.process.steady_clock import steady_time_s

_POLL_S = 0.2

Attach = Callable[[int, int, GreetedSocket], bool]
"""(rank, number, connection) -> whether the peer took the connection."""


class Acceptor:
    """Accepts connections on `listener` until `close`, which closes `listener` too.

    Calls `on_restart` when a rank connects with a later incarnation.
    """

    def __init__(
        self,
        listener: socket.socket,
        greeting: Greeting,
        attach: Attach,
        set_options: Callable[[int, socket.socket], None],
        on_restart: Callable[[RestartError], None],
        clock: Callable[[], float] = steady_time_s,
    ) -> None:
        self._listener, self._greeting, self._attach, self._set_options = (
            listener,
            greeting,
            attach,
            set_options,
        )
        self._on_restart, self._clock = on_restart, clock
        self._closed = threading.Event()
        self._pending: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="isthmus-acceptor", daemon=True)
        listener.settimeout(_POLL_S)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and shut down connections without a complete greeting."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            callers = dict(self._pending)
        for thread, connection in callers.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if len(self._pending) >= MAX_PENDING_CONNECTIONS:
                self._closed.wait(_POLL_S)
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError:
                continue
            thread = threading.Thread(target=self._answer, args=(connection,), name="isthmus-answer", daemon=True)
            with self._lock:
                self._pending[thread] = connection
            thread.start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(GREETING_TIMEOUT_S)
            rank, number, offset_s = answer_greeting(sock, self._greeting, self._clock)
            self._set_options(rank, sock)
            kept = self._attach(rank, number, (sock, offset_s))
        except (IsthmusError, OSError) as error:
            kept = False
            if isinstance(error, RestartError):
                self._on_restart(error)
        finally:
            with self._lock:
                del self._pending[threading.current_thread()]
        if not kept:
            sock.close()
