"""What is seen of workers, and what follows: success, failure with its cause, and what takes too long."""

from __future__ import annotations

from isthmus.agent.events import SeenWorker, StartWorker, StopWorker
from isthmus.agent.exits import fault_of, in_words, was_stopped
from isthmus.agent.parts import HeldPart
from isthmus.agent.protection import see_protection
from isthmus.agent.site import SiteState, fail, move
from isthmus.core.messages import explains_more

_UNKNOWN_STATUS = 1


def see(site: SiteState, seen: SeenWorker, now_s: float) -> None:
    """Take in one worker's state."""
    part = site.parts.get((seen.job, seen.attempt))
    worker = part.workers.get(seen.rank) if part else None
    if part is None or worker is None or not worker.live:
        return
    worker.address = seen.address or worker.address
    worker.unsaved_s, worker.protection = seen.unsaved_s, seen.protection or worker.protection
    see_protection(part)
    if seen.num_bytes != worker.num_bytes:
        worker.num_bytes, worker.wrote_s = seen.num_bytes, now_s
    if seen.state == "running":
        return
    if seen.state == "absent":
        _see_absent(site, part, seen.rank, now_s)
        return
    worker.live, worker.exit_status = False, seen.exit_status
    if part.local:
        part.exit_status = _UNKNOWN_STATUS if seen.exit_status is None else seen.exit_status
    if seen.exit_status != 0:
        _see_failure(site, part, seen, now_s)
    elif part.state == "running" and not part.live:
        move(site, part, "succeeded", now_s)


def peers_last(seen: SeenWorker) -> bool:
    """Sort those who only lost a peer behind those who may be the cause."""
    return fault_of(seen.exit_status) == "peer"


def watch_over(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Fail the part where a worker does not check in, or trains and writes nothing for far too long."""
    for rank, worker in part.workers.items():
        late = worker.address is None and now_s - part.since_s >= site.checkin_timeout_s
        stuck = part.rank_map is not None and now_s - worker.wrote_s >= site.silence_timeout_s
        if worker.live and (late or stuck):
            limit_s = site.checkin_timeout_s if late else site.silence_timeout_s
            what = "did not check in within" if late else "has written nothing for"
            fail(site, part, "own", now_s, f"rank {rank} {what} {limit_s:g} s")
            return


def _see_failure(site: SiteState, part: HeldPart, seen: SeenWorker, now_s: float) -> None:
    """Fail the part; of several ranks that failed, the one whose failure explains most is told of."""
    fault = fault_of(seen.exit_status)
    words = f": {seen.last_words}" if seen.last_words else ""
    detail = f"rank {seen.rank} {in_words(seen.exit_status)}{words}"
    if part.state == "running":
        fail(site, part, fault, now_s, detail)
    elif not was_stopped(seen.exit_status) and explains_more(fault, part.fault):
        part.fault, part.detail = fault, detail


def _see_absent(site: SiteState, part: HeldPart, rank: int, now_s: float) -> None:
    """Start what the agent's last life was to start; stop for ever what is not to run."""
    worker = part.workers[rank]
    if part.state == "running" and not worker.started:
        worker.started = True
        site.out.append(StartWorker(part=part, rank=rank))
        return
    if part.state == "running":
        fail(site, part, "own", now_s, f"rank {rank} could not be started: its folder takes no files")
    site.out.append(StopWorker(part=part, rank=rank, force=True))
