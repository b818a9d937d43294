"""`run_domain`: serve the controller of one domain until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from isthmus.wan.centre.centre_config import CentreConfig
from isthmus.wan.centre.domain_requests import DOMAIN_REQUEST, MAX_ORDER_BYTES, DomainRequest
from isthmus.wan.centre.line_server import LineServer, serve_lines
from isthmus.wan.centre.logged_domain import LoggedDomain


class DomainServer(LineServer[DomainRequest]):
    """Serves the controller of a domain to the decision centres that have its token."""

    def __init__(self, config: CentreConfig, domain: LoggedDomain, clock: Callable[[], float] = time.time) -> None:
        super().__init__(config, DOMAIN_REQUEST, MAX_ORDER_BYTES, clock)
        self._domain = domain

    async def answer(self, request: DomainRequest) -> dict[str, Any]:
        """Return the controller's answer."""
        return self._domain.handle(request.message, self._clock()).model_dump(mode="json")


def run_domain(
    config: CentreConfig, domain: LoggedDomain, on_start: Callable[[str], None], on_tick: Callable[[], None]
) -> None:
    """Serve until a signal; call it in the main thread. `on_start` gets the address; each second `on_tick` runs."""
    try:
        asyncio.run(serve_lines(DomainServer(config, domain), on_start, lambda _now_s: on_tick()))
    finally:
        domain.close()
