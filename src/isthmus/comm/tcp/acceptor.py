"""`Door`: accepts reconnects of broken connections while a run is on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from isthmus.comm.tcp.reconnect import Connection
from isthmus.comm.tcp.rendezvous import GREETING_S, MAX_STRANGERS
from isthmus.comm.tcp.wire_format import Greeting, answer
from isthmus.core.errors import IsthmusError, RestartError

_POLL_S = 0.2

Attach = Callable[[int, int, Connection], bool]
"""(rank, number, connection) -> whether the peer took the connection."""


class Door:
    """Accepts connections on `listener` until `close`, which closes `listener` too.

    Calls `restarted` when a rank connects with a later incarnation.
    """

    def __init__(
        self,
        listener: socket.socket,
        greeting: Greeting,
        attach: Attach,
        tune: Callable[[int, socket.socket], None],
        restarted: Callable[[RestartError], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._listener, self._greeting, self._attach, self._tune = listener, greeting, attach, tune
        self._restarted, self._clock = restarted, clock
        self._closed = threading.Event()
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="isthmus-acceptor", daemon=True)
        listener.settimeout(_POLL_S)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and shut down connections without a complete greeting."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            callers = dict(self._callers)
        for thread, connection in callers.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if len(self._callers) >= MAX_STRANGERS:
                self._closed.wait(_POLL_S)
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError:
                continue
            thread = threading.Thread(
                target=self._hear, args=(connection,), name="isthmus-answer", daemon=True
            )
            with self._lock:
                self._callers[thread] = connection
            thread.start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(GREETING_S)
            rank, number, offset_s = answer(connection, self._greeting, self._clock)
            self._tune(rank, connection)
            kept = self._attach(rank, number, (connection, offset_s))
        except (IsthmusError, OSError) as error:
            kept = False
            if isinstance(error, RestartError):
                self._restarted(error)
        finally:
            with self._lock:
                del self._callers[threading.current_thread()]
        if not kept:
            connection.close()
