"""`run_proxy`: a proxy until SIGTERM or SIGINT, with its routes and its state in files."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.core.errors import UnavailableError
from isthmus.wan.emulator import ROUTES_FILE, write_json_atomically
from isthmus.wan.proxy.proxy_config import ProxyConfig
from isthmus.wan.tunnel.tunnel import BUDGET_BYTES

if TYPE_CHECKING:
    from isthmus.wan.proxy.proxy_service import ProxyService

PROXY_FILE = "proxy.json"
"""State of the tunnels, written every `STATE_INTERVAL_S`."""

STATE_INTERVAL_S = 1.0

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (glibc, malloc.h)."""

_MOST_FROM_HEAP_BYTES = 2**25

_log = logging.getLogger(__name__)


def run_proxy(config: ProxyConfig, state_folder: Path, on_start: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a proxy; call it in the main thread. Return its state at the end.

    Writes `routes.json` to `state_folder` when the routes listen and removes it at the end; calls `on_start` with the
    addresses. Raises `UnavailableError` if an address cannot be bound or the folder cannot be written.
    """
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        gc.freeze()  # frames are freed by their counts; a collection would only delay them
        _keep_freed_memory()
        return asyncio.run(_serve(config, state_folder, on_start))
    except OSError as error:
        raise UnavailableError(
            f"cannot write the proxy's files in {state_folder}: {error.strerror}",
            hint="free space, or choose another folder",
        ) from error


def _keep_freed_memory() -> None:
    """Let the allocator of glibc use the memory of sent frames again, instead of fetching fresh pages for each one."""
    with contextlib.suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _MOST_FROM_HEAP_BYTES)
        allocator.mallopt(_M_TRIM_THRESHOLD, BUDGET_BYTES)


async def _serve(config: ProxyConfig, state_folder: Path, on_start: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    from isthmus.wan.proxy.proxy_service import ProxyService  # needs `cryptography`, which not every install has

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    service = ProxyService(config, loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.start()
    try:
        write_json_atomically(state_folder / ROUTES_FILE, service.routes())
        on_start({"site": config.site, "listen": service.listens_at, "routes": service.routes()[config.site]})
        await _report(service, state_folder / PROXY_FILE, stop)
        return service.statistics()
    finally:
        (state_folder / ROUTES_FILE).unlink(missing_ok=True)
        service.close(f"the proxy of {config.site} was stopped")
        await asyncio.sleep(0)  # closed sockets and cancelled tasks
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _report(service: ProxyService, file: Path, stop: asyncio.Event) -> None:
    last_legs, last_warning = "", None
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), STATE_INTERVAL_S)
        state = service.statistics()
        legs = ", ".join(f"{one['peer']} {one['direction']}: {one['legs']} legs" for one in state["tunnels"])
        if legs != last_legs:
            _log.info("tunnels: %s", legs or "none")
        last_legs = legs
        try:
            write_json_atomically(file, state)
        except OSError as error:  # keep carrying connections without a state file
            if error.strerror != last_warning:
                _log.warning("%s cannot be written: %s", file, error.strerror)
            last_warning = error.strerror
