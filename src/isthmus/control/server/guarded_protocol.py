"""`GuardedProtocol`: uvicorn's HTTP/1.1 protocol with deadlines, and a cheap answer to floods of invalid tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from isthmus.control.server.connection_limits import ClientConnection, ConnectionLimits
from isthmus.control.server.head_refusal import refusal
from isthmus.control.service.access.token_gate import TokenGate


class GuardedProtocol(H11Protocol):
    """One connection of the server, which has sent `received` already. `on_closed` is called once it has ended.

    It is `connection` of the state of its requests: `prove` counts it as one of a caller.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        *,
        connection: ClientConnection,
        received: bytes,
        limits: ConnectionLimits,
        gate: TokenGate,
        clock: Callable[[], float],
        on_closed: Callable[[ClientConnection], None],
    ) -> None:
        super().__init__(config, server_state, {"connection": self})
        self._connection, self._limits, self._gate = connection, limits, gate
        self._clock, self._on_closed, self._received = clock, on_closed, received

    def prove(self, caller: str) -> bool:
        """Count the connection as one of `caller`; return whether it may have another one."""
        return self._limits.prove(self._connection, caller)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start with what was received before; nothing else is read until then."""
        super().connection_made(transport)
        if self._received:
            self.data_received(self._received)
            self._received = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._on_closed(self._connection)

    def data_received(self, data: bytes) -> None:
        """Pass data on unless it is a request to refuse at once; set the deadline of what is awaited now."""
        if self._is_refused(data):
            return
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._connection.on_body_awaited(self._clock(), len(data))
        elif state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._connection.on_head_awaited(self._clock())
        else:
            self._connection.on_request_complete()

    def pause_writing(self) -> None:
        """Start the time that a reader has to accept more of an answer."""
        super().pause_writing()
        self._connection.write_deadline_s = self._clock() + self._limits.caps.write_limit_s

    def resume_writing(self) -> None:
        """Stop that time."""
        super().resume_writing()
        self._connection.write_deadline_s = None

    def _is_refused(self, data: bytes) -> bool:
        """Answer 429 to a request of a flood, without parsing it."""
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            return False  # it is a part of a request
        answer = refusal(self._gate, self.client[0] if self.client else "", data)
        if answer is None:
            return False
        self.transport.write(answer)
        self.transport.close()
        return True


def make_protocol_factory(
    config: Config, server_state: ServerState, gate: TokenGate, limits: ConnectionLimits, clock: Callable[[], float]
) -> Callable[[ClientConnection, bytes, Callable[[ClientConnection], None]], GuardedProtocol]:
    """Return a function that makes the protocol of a connection from the bytes received so far."""

    def make(
        connection: ClientConnection, received: bytes, on_closed: Callable[[ClientConnection], None]
    ) -> GuardedProtocol:
        return GuardedProtocol(
            config, server_state, connection=connection, received=received, limits=limits, gate=gate, clock=clock,
            on_closed=on_closed,
        )  # fmt: skip

    return make
