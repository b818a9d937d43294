"""Emulated links in a background thread of the caller's process, for tests and notebooks.

The thread shares the GIL with the caller; for accurate rates use `run_links` in a separate process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from isthmus.core.pool import Pool
from isthmus.wan.emulator import link_statistics
from isthmus.wan.precise_timing import precise_event_loop
from isthmus.wan.tcp_relay import TcpRelay


class BackgroundLinks:
    """Handle of links that run in a background thread. Thread-safe."""

    def __init__(self, relay: TcpRelay, loop: asyncio.AbstractEventLoop) -> None:
        self._relay, self._loop = relay, loop
        self.routes, self.other_routes = relay.routes(), relay.other_routes()

    def cut(self, a: str, b: str, *, reset: bool = False) -> None:
        """Cut the link both ways: refuse new connections; stall existing ones, or `reset` them."""
        self._call(lambda: self._relay.cut(a, b, reset=reset))

    def restore(self, a: str, b: str) -> None:
        """Restore a cut link; stalled connections continue."""
        self._call(lambda: self._relay.restore(a, b))

    def statistics(self) -> list[dict[str, Any]]:
        """Return the totals per direction, as in `links.json` but without rates."""
        zero = dict.fromkeys(self._relay.directions, 0)
        links: list[dict[str, Any]] = self._call(lambda: link_statistics(self._relay, zero, 1.0, 1.0))["links"]
        rates = ("goodput_gbps", "mean_goodput_gbps")
        return [{key: value for key, value in link.items() if key not in rates} for link in links]

    def _call(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


@contextmanager
def links_in_background(pool: Pool, seed: int = 0, *, runs_first: bool = False) -> Iterator[BackgroundLinks]:
    """Emulate the links of `pool` inside the block; reset open connections at its end."""
    loop, relay = precise_event_loop(), TcpRelay(pool, seed=seed, runs_first=runs_first)
    thread = threading.Thread(target=loop.run_forever, name="links", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(relay.start(), loop).result()
        yield BackgroundLinks(relay, loop)
    finally:
        asyncio.run_coroutine_threadsafe(relay.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
