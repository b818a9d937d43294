"""`Acceptor`: accepts new and reopened connections while a run is on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from isthmus.comm.tcp.entrance import Admit, Entrance
from isthmus.comm.tcp.greeting import Claim
from isthmus.comm.tcp.handshake import Handshake
from isthmus.core.errors import RestartError

_POLL_S = 2.0


class Acceptor:
    """Accepts connections on `listener` until `close`, which closes `listener` too.

    `claim` says which connections it may take. Calls `on_restart` when a rank connects with a later incarnation, and
    `on_refused` with the address of a stranger.
    """

    def __init__(
        self,
        listener: socket.socket,
        handshake: Handshake,
        claim: Claim,
        admit: Admit,
        on_restart: Callable[[RestartError], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._listener, self._closed = listener, threading.Event()
        self._entrance = Entrance(listener, handshake, admit, claim=claim, on_restart=on_restart, on_refused=on_refused)
        self._thread = threading.Thread(target=self._accept, name="isthmus-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and shut down connections without a complete greeting."""
        self._closed.set()
        self._entrance.wake()
        self._thread.join()
        self._entrance.close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._entrance.poll(_POLL_S)
