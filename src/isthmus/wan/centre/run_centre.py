"""`run_centre`: serve a decision centre until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.core.errors import UnavailableError
from isthmus.wan.centre.centre_config import CentreConfig
from isthmus.wan.centre.centre_requests import CLIENT_REQUEST, MAX_LINE_BYTES, ClientRequest
from isthmus.wan.centre.domain_courier import DomainCourier
from isthmus.wan.centre.domain_requests import DomainMessage
from isthmus.wan.centre.line_client import CentreAddress
from isthmus.wan.centre.line_server import LineServer, serve_lines
from isthmus.wan.centre.logged_centre import LoggedCentre

SETTLE_S = 6.0
"""How long a client waits for the domains of other operators, before it learns that they have not answered yet."""


class CentreServer(LineServer[ClientRequest]):
    """Serves `centre`; `domains` says where controllers of other operators listen."""

    def __init__(
        self,
        config: CentreConfig,
        centre: LoggedCentre,
        clock: Callable[[], float] = time.time,
        domains: Mapping[str, CentreAddress] | None = None,
    ) -> None:
        super().__init__(config, CLIENT_REQUEST, MAX_LINE_BYTES, clock)
        self._centre = centre
        self._couriers = {name: DomainCourier(name, at, self._arrived) for name, at in (domains or {}).items()}
        self._changed = asyncio.Event()

    async def start(self) -> str:
        """Listen, and ask the domains what they hold; see `LineServer`."""
        address = await super().start()
        for courier in self._couriers.values():
            courier.start()
        return address

    async def close(self) -> None:
        """Stop listening, end all connections, and send no further order."""
        await super().close()
        await asyncio.gather(*(courier.close() for courier in self._couriers.values()))

    async def answer(self, request: ClientRequest) -> dict[str, Any]:
        """Return what became of a path, once the domains of other operators have answered."""
        found = self._centre.handle(request.message, self._clock())
        self._send_orders()
        deadline_s = asyncio.get_running_loop().time() + SETTLE_S
        while found.state in ("preparing", "committing") and self._couriers:
            try:
                await asyncio.wait_for(self._changed.wait(), deadline_s - asyncio.get_running_loop().time())
            except TimeoutError:
                break
            found = self._centre.outcome(request.message.name)
        return found.model_dump(mode="json")

    def advance(self, now_s: float) -> None:
        """Let time pass: repeat orders without an answer, end what is over."""
        self._centre.advance(now_s)
        self._send_orders()

    def _arrived(self, message: DomainMessage) -> None:
        self._centre.domain_answered(message, self._clock())
        self._send_orders()

    def _send_orders(self) -> None:
        for one in self._centre.take_orders():
            self._couriers[one.domain].send(one.order)
        if self._couriers:
            self._changed.set()
            self._changed = asyncio.Event()


def run_centre(
    config: CentreConfig,
    centre: LoggedCentre,
    on_start: Callable[[str], None],
    domains: Mapping[str, CentreAddress] | None = None,
) -> None:
    """Serve until a signal; call it in the main thread. `on_start` gets the address."""

    async def run() -> None:
        server = CentreServer(config, centre, domains=domains)
        await serve_lines(server, on_start, server.advance)

    if missing := centre.remote - set(domains or {}):
        raise UnavailableError(f"no address of the controller of domain {min(missing)}", hint="--domain NAME=HOST:PORT")
    try:
        asyncio.run(run())
    finally:
        centre.close()
