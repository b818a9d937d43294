"""`look`: observe workers through the adapter and their folders."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from isthmus.agent.adapters.adapter import Adapter
from isthmus.agent.service.run_folders import StateFolder, last_words, unsaved_s, written_bytes
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.site.machine_events import ObservedWorker
from isthmus.site.parts import SitePart

_log = logging.getLogger("isthmus.agent")


def look(
    parts: Iterable[SitePart], folders: StateFolder, adapter: Adapter, now_s: float
) -> Iterator[ObservedWorker]:
    """Yield an observation of each worker of `parts` that may be running; `now_s` counts from the epoch."""
    for part in parts:
        for rank, worker in part.workers.items():
            if worker.live:
                known = part.local or worker.address is not None
                yield _look_at(part, rank, folders, adapter, now_s, known=known)


def _look_at(
    part: SitePart, rank: int, folders: StateFolder, adapter: Adapter, now_s: float, *, known: bool
) -> ObservedWorker:
    folder = folders.of(part, rank)
    status = adapter.poll(folder)
    try:
        address = None if known else WorkerFolder(folder).read_checkin()
        protection = None if part.local else WorkerFolder(folder).read_protected()
    except IsthmusError as error:
        _log.error("%s", error)
        address = protection = None
    return ObservedWorker(
        job=part.job,
        attempt=part.attempt,
        rank=rank,
        state=status.state,
        exit_status=status.exit_status,
        address=address,
        num_bytes=written_bytes(folder),
        unsaved_s=unsaved_s(folder, now_s),
        protection=protection,
        last_words=last_words(folder) if status.state == "exited" else "",
    )
