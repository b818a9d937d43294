"""`run_gateway`: a gateway until SIGTERM or SIGINT, with its state in a file."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.core.errors import UnavailableError
from isthmus.wan.emulator import write_json_atomically
from isthmus.wan.gateway.gateway_config import GatewayConfig
from isthmus.wan.precise_timing import request_short_slice, take_real_time_priority

GATEWAY_FILE = "gateway.json"
"""State of the links, written every `STATE_INTERVAL_S`."""

STATE_INTERVAL_S = 1.0
GC_THRESHOLD = 100_000
"""New objects between two collections: frames that wait are many, and none is part of a cycle."""

_log = logging.getLogger(__name__)


def run_gateway(
    config: GatewayConfig,
    state_folder: Path | None,
    on_start: Callable[[dict[str, Any]], None],
    *,
    real_time: bool = False,
) -> dict[str, Any]:
    """Run a gateway; call it in the main thread. Return its state at the end.

    Calls `on_start` with its addresses. `real_time` runs it before all processes of ordinary priority. Raises
    `UnavailableError` if that is not permitted, an address or a device cannot be had, or the folder cannot be written.
    """
    _set_priority(real_time=real_time)
    try:
        if state_folder is not None:
            state_folder.mkdir(parents=True, exist_ok=True)
        gc.freeze()  # frames are freed by their counts; a collection would only delay them
        gc.set_threshold(GC_THRESHOLD)
        return asyncio.run(_serve(config, state_folder, on_start))
    except OSError as error:
        raise UnavailableError(
            f"cannot write the gateway's state in {state_folder}: {error.strerror}",
            hint="free space, or choose another folder",
        ) from error


def _set_priority(*, real_time: bool) -> None:
    if not real_time:
        request_short_slice()
        return
    try:
        take_real_time_priority()
    except OSError as error:
        raise UnavailableError(
            f"cannot take real-time priority: {error.strerror}",
            hint="give the process CAP_SYS_NICE (`LimitRTPRIO=1` in systemd), or leave out --real-time",
        ) from error


async def _serve(
    config: GatewayConfig, state_folder: Path | None, on_start: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    from isthmus.wan.gateway.gateway_service import GatewayService  # needs `cryptography`, which not every install has

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    service = GatewayService(config, loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.start()
    try:
        on_start({"site": config.site, "listen": service.listens_at, "frames": service.frames_at})
        last_error: str | None = None
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), STATE_INTERVAL_S)
            if state_folder is None:
                continue
            try:
                write_json_atomically(state_folder / GATEWAY_FILE, service.statistics())
                last_error = None
            except OSError as error:  # keep carrying frames without a state file
                if error.strerror != last_error:
                    _log.warning("%s cannot be written: %s", state_folder / GATEWAY_FILE, error.strerror)
                last_error = error.strerror
        return service.statistics()
    finally:
        service.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
