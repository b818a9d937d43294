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
from isthmus.wan.tenants.read_tenants import read_tenants
from isthmus.wan.tenants.tenant_service import TenantService

STATE_FILE = "tenants.json"
STATE_INTERVAL_S = 1.0
FOLLOW_S = 0.02
"""Between looks at the file of tenants."""
SHORT_BYTES = 2**15
"""Longest file that is read at once, in a few milliseconds; frames pass while a longer one is read."""

_log = logging.getLogger(__name__)


def run_tenants(
    path: Path,
    *,
    trunk: str | None,
    device: str | None,
    carried_in: CarriedIn,
    state_folder: Path | None,
    on_start: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the gateway of the file `path`; call it in the main thread. Return its state at the end.

    Raises `FileError` for what is wrong with the file, and `UnavailableError` for what this machine lacks.
    """
    require_rights()
    try:
        if state_folder is not None:
            state_folder.mkdir(parents=True, exist_ok=True)
        file = read_tenants(path)
        gc.freeze()  # frames are freed by their counts; a collection would only delay them
        service = TenantService(file, trunk, device, choose_datapath(carried_in))
        return asyncio.run(_serve(service, file, path, state_folder, on_start))
    except OSError as error:
        raise UnavailableError(
            f"cannot write the gateway's state in {state_folder}: {error.strerror}",
            hint="free space, or choose another folder",
        ) from error


async def _serve(
    service: TenantService,
    file: TenantsFile,
    path: Path,
    state_folder: Path | None,
    on_start: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await service.start()
    follower = loop.create_task(_follow(service, path))
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


async def _follow(service: TenantService, path: Path) -> None:
    """Take the file over whenever it changes; what cannot be read is logged once, and leaves in force what is set."""
    known = _version_of(path)
    while True:
        await asyncio.sleep(FOLLOW_S)
        if (found := _version_of(path)) == known:
            continue
        known = found
        try:
            is_short = found is not None and found[0] <= SHORT_BYTES
            file = read_tenants(path) if is_short else await asyncio.to_thread(read_tenants, path)
            await service.change(file)
        except IsthmusError as error:
            _log.warning("tenants stay as they are: %s", error)


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file, its size first; None while it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
