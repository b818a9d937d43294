"""`run_links`: emulates all links of a pool and writes their routes and statistics to files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.pool import Pool
from isthmus.wan.control.wan_topology import Booking, TransferBooking
from isthmus.wan.precise_timing import precise_event_loop, request_prompt_wakeup
from isthmus.wan.tcp_relay import LinkRecord, TcpRelay

ROUTES_FILE = "routes.json"
"""File of routes, {cluster: {other cluster: "host:port"}}; exists while the links accept connections."""

OTHER_ROUTES_FILE = "others.json"
"""File of routes for traffic other than runs."""

STATISTICS_FILE = "links.json"
"""File of statistics per direction, rewritten every second."""

STATISTICS_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


def run_links(
    pool: Pool,
    state_folder: Path,
    seed: int = 0,
    *,
    runs_first: bool = False,
    record: LinkRecord | None = None,
    bookings: Sequence[Booking | TransferBooking] = (),
    at_s: float = 0.0,
) -> None:
    """Emulate the links of `pool` until SIGTERM or SIGINT; call it in the main thread.

    Writes `routes.json` and `others.json` to `state_folder` when the links listen and removes them at the end;
    writes `links.json` every second. `runs_first`, `record`, `bookings` and `at_s` are those of `TcpRelay`. Raises
    `InputError` if the pool has no links, `UnavailableError` if the folder is not writable or no port is free.
    """
    if not pool.links:
        raise InputError("the pool has no links to emulate", hint="add `links` to pool.yaml")
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        request_prompt_wakeup()
        with asyncio.Runner(loop_factory=precise_event_loop) as runner:
            relay = TcpRelay(pool, seed=seed, runs_first=runs_first, record=record, bookings=bookings, at_s=at_s)
            runner.run(_serve(relay, state_folder))
    except OSError as error:
        raise UnavailableError(
            f"cannot write the link files in {state_folder}: {error.strerror}",
            hint="free space, or choose another folder",
        ) from error


async def _serve(relay: TcpRelay, state_folder: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await relay.start()
    try:
        write_json_atomically(state_folder / OTHER_ROUTES_FILE, relay.other_routes())
        write_json_atomically(state_folder / ROUTES_FILE, relay.routes())
        _log.info("%d links listen; their routes are in %s", len(relay.links), state_folder / ROUTES_FILE)
        await _report(relay, state_folder / STATISTICS_FILE, stop)
    finally:
        for file in (ROUTES_FILE, OTHER_ROUTES_FILE):
            (state_folder / file).unlink(missing_ok=True)
        await relay.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _report(relay: TcpRelay, file: Path, stop: asyncio.Event) -> None:
    start_s, last_s, last_bytes = time.monotonic(), time.monotonic(), dict.fromkeys(relay.directions, 0)
    last_warning: str | None = None
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), STATISTICS_INTERVAL_S)
        now_s = time.monotonic()
        try:
            write_json_atomically(file, link_statistics(relay, last_bytes, now_s - last_s, now_s - start_s))
        except OSError as error:  # keep emulating without statistics
            if error.strerror != last_warning:
                _log.warning("%s cannot be written: %s", file, error.strerror)
            last_warning = error.strerror
        last_s = now_s
        last_bytes = {ends: direction.delivered_bytes for ends, direction in relay.directions.items()}


def link_statistics(
    relay: TcpRelay, last_bytes: dict[tuple[str, str], int], period_s: float, total_s: float
) -> dict[str, Any]:
    """Return per direction the payload bytes, and the goodput over the last `period_s` and over `total_s`.

    With `runs_first` these count runs only, and `other_bytes` counts the other traffic. `late_ms` is the
    largest delay of a delivery since the last call that the machine added to the link's.
    """
    links = []
    for ends, direction in relay.directions.items():
        link, num_bytes = relay.links[ends], direction.delivered_bytes
        links.append(
            link.model_dump(by_alias=True)
            | {
                "loss_is": "modelled" if link.loss else "none",
                "cut": direction.is_cut,
                "bytes": num_bytes,
                "other_bytes": relay.other_directions[ends].delivered_bytes if relay.runs_first else 0,
                "goodput_gbps": (num_bytes - last_bytes[ends]) * 8e-9 / max(period_s, 1e-9),
                "mean_goodput_gbps": num_bytes * 8e-9 / max(total_s, 1e-9),
                "late_ms": direction.max_late_s * 1e3,
            }
        )
        direction.max_late_s = 0.0
    return {"pid": os.getpid(), "running_s": total_s, "links": links}


def write_json_atomically(file: Path, content: Any) -> None:
    """Write `content` as JSON, atomically by rename: a reader sees the old or the new file."""
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)
