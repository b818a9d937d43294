"""`LineServer`: a port that answers lines of JSON, over TLS and with a token where its configuration says so.

A connection sends lines of JSON and gets one for each. It costs at most `max_line_bytes` of memory and one of
`MAX_CONNECTIONS` places, for `IDLE_S` without a line; when all are taken the one that has waited longest ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.wan.centre.centre_config import CentreConfig
from isthmus.wan.centre.domain_requests import PortRequest
from isthmus.wan.dial import format_address

MAX_CONNECTIONS = 64
IDLE_S = 60.0
HANDSHAKE_S = 5.0
TICK_S = 1.0
_log = logging.getLogger("isthmus.wan.centre")
Request = TypeVar("Request", bound=PortRequest)


class LineServer(ABC, Generic[Request]):
    """Serves requests on the running event loop; `clock` returns seconds since the epoch."""

    def __init__(
        self, config: CentreConfig, requests: TypeAdapter[Request], max_line_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._config, self._requests, self._max_line_bytes, self._clock = config, requests, max_line_bytes, clock
        self._server: asyncio.Server | None = None
        self._waiting: dict[asyncio.Task[Any], None] = {}
        self.num_refused = 0
        """Lines without the token, or of no request."""

    @abstractmethod
    async def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request with the token; an `IsthmusError` is answered with its message."""

    async def start(self) -> str:
        """Listen; return the address. Raise `UnavailableError` if it cannot be bound."""
        host, port = self._config.listen
        tls = self._config.tls()
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S}
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=self._max_line_bytes, **options)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen at {format_address(host, port)}: {error.strerror}", hint="choose a free port"
            ) from error
        return format_address(*self._server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._waiting):
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        if len(self._waiting) >= MAX_CONNECTIONS:
            next(iter(self._waiting)).cancel()
        self._waiting[task] = None
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    line = await reader.readuntil(b"\n")
                answer, goes_on = await self._checked(line)
                writer.write(json.dumps(answer).encode() + b"\n")
                async with asyncio.timeout(IDLE_S):
                    await writer.drain()
                if not goes_on:
                    break
                self._waiting.pop(task, None)
                self._waiting[task] = None
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self.num_refused += 1
        except asyncio.CancelledError:
            return  # its place was needed, or the server ends: nothing more to do
        finally:
            self._waiting.pop(task, None)
            writer.close()

    async def _checked(self, line: bytes) -> tuple[dict[str, Any], bool]:
        """Return the answer to a line, and whether the connection goes on."""
        try:
            asked = self._requests.validate_json(line)
        except (ValidationError, RecursionError) as error:
            self.num_refused += 1
            text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "nested too deeply"
            return {"error": f"no request: {text}"[:500]}, False
        if not hmac.compare_digest(asked.token.encode(), self._config.token.encode()):
            self.num_refused += 1
            return {"error": "the token is not that of the clients of this port"}, False
        try:
            return await self.answer(asked), True
        except IsthmusError as error:
            _log.error("%s", error)
            return {"error": error.message, "hint": error.hint}, True


async def serve_lines(
    server: LineServer[Any], on_start: Callable[[str], None], on_tick: Callable[[float], None]
) -> None:
    """Serve until SIGTERM or SIGINT; call `on_start` with the address, and `on_tick` with the time each second."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    on_start(await server.start())
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
            on_tick(time.time())
    finally:
        await server.close()
