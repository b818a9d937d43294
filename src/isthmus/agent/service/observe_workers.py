"""`observe_workers`: observe workers through the adapter and their folders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter
from isthmus.agent.service.agent_state_folder import AgentStateFolder, log_tail, output_bytes, unsaved_work_s
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.site import ObservedWorker, SitePart

_log = logging.getLogger("isthmus.agent")


def observe_workers(
    parts: Iterable[SitePart],
    folders: AgentStateFolder,
    adapter: SchedulerAdapter,
    now_s: float,
    is_starting: Callable[[Path], bool] = lambda _folder: False,
) -> Iterator[ObservedWorker]:
    """Yield an observation of each worker of `parts` that may be running; `now_s` counts from the epoch.

    Workers whose start is under way (`is_starting`) are left out.
    """
    for part in parts:
        for rank, worker in part.workers.items():
            if worker.live and not is_starting(folders.worker_folder(part, rank)):
                known = part.local or worker.address is not None
                yield _observe_worker(part, rank, folders, adapter, now_s, known=known)


def _observe_worker(
    part: SitePart,
    rank: int,
    folders: AgentStateFolder,
    adapter: SchedulerAdapter,
    now_s: float,
    *,
    known: bool,
) -> ObservedWorker:
    folder = folders.worker_folder(part, rank)
    status = adapter.poll(folder)
    try:
        address = None if known else WorkerFolder(folder).read_checkin()
        protection = None if part.local else WorkerFolder(folder).read_verified_checkpoint()
        wait = None if part.local else WorkerFolder(folder).read_wait()
    except IsthmusError as error:
        _log.error("%s", error)
        address = protection = wait = None
    return ObservedWorker(
        job=part.job,
        attempt=part.attempt,
        rank=rank,
        state=status.state,
        exit_status=status.exit_status,
        address=address,
        output_bytes=output_bytes(folder),
        unsaved_s=unsaved_work_s(folder, now_s),
        protection=protection,
        wait=wait,
        log_tail=log_tail(folder) if status.state == "exited" else "",
    )
