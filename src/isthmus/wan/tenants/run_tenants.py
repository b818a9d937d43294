"""`run_tenants`: a tenant gateway until SIGTERM or SIGINT, with its state in a file, following the file of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.wan.emulator import write_json_atomically
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.choose_datapath import CarriedIn, choose_datapath
from isthmus.wan.tenants.probe_tenancy import require_rights
from isthmus.wan.tenants.tenant_service import TenantService

STATE_FILE = "tenants.json"
STATE_INTERVAL_S = 1.0
FOLLOW_S = 0.02
"""Between looks at the file of tenants."""

_log = logging.getLogger(__name__)


def run_tenants(
    read: Callable[[], TenantsFile],
    changed: Callable[[], object],
    *,
    trunk: str | None,
    device: str | None,
    carried_in: CarriedIn,
    state_folder: Path | None,
    on_start: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the gateway of what `read` returns; call it in the main thread. Return its state at the end.

    `changed` returns something that changes with the file. Raises `UnavailableError` for what this machine lacks.
    """
    require_rights()
    try:
        if state_folder is not None:
            state_folder.mkdir(parents=True, exist_ok=True)
        file = read()
        gc.freeze()  # frames are freed by their counts; a collection would only delay them
        service = TenantService(file, trunk, device, choose_datapath(carried_in))
        return asyncio.run(_serve(service, file, read, changed, state_folder, on_start))
    except OSError as error:
        raise UnavailableError(
            f"cannot write the gateway's state in {state_folder}: {error.strerror}",
            hint="free space, or choose another folder",
        ) from error


async def _serve(
    service: TenantService,
    file: TenantsFile,
    read: Callable[[], TenantsFile],
    changed: Callable[[], object],
    state_folder: Path | None,
    on_start: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await service.start()
    follower = loop.create_task(_follow(service, read, changed))
    try:
        on_start({"site": file.site, "num_tenants": len(file.tenants), "carried_by": service.label})
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), STATE_INTERVAL_S)
            if state_folder is not None:
                with contextlib.suppress(OSError):  # keep carrying frames without a state file
                    write_json_atomically(state_folder / STATE_FILE, await service.statistics())
        return await service.statistics()
    finally:
        follower.cancel()
        await service.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _follow(service: TenantService, read: Callable[[], TenantsFile], changed: Callable[[], object]) -> None:
    """Take the file over whenever it changes; what cannot be read is logged once, and leaves in force what is set."""
    known = changed()
    while True:
        await asyncio.sleep(FOLLOW_S)
        if (found := changed()) == known:
            continue
        known = found
        try:
            await service.change(await asyncio.to_thread(read))
        except IsthmusError as error:
            _log.warning("tenants stay as they are: %s", error)
