"""The state machine of a site's parts: a transition table `(from, to): action`.

    pool    queued -> ready -> evicting -> prepared -> running -> succeeded | failed -> stopping -> released
    local   queued -> (evicting) -> running -> succeeded | failed -> stopping -> released, or queued again

Intermediate states may be skipped; `refused` and `released` can follow most states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import FailureCause, PartState
from isthmus.site.machine_events import StartWorker, StopWorker
from isthmus.site.parts import LEASED, SitePart, SitePartState
from isthmus.site.site_state import SiteState

HISTORY_LENGTH = 16


def move_part(site: SiteState, part: SitePart, to: SitePartState, now_s: float, detail: str = "") -> None:
    """Move `part` to state `to`; raise `IllegalTransitionError` with its history if the table forbids it."""
    before = part.state
    step = _TRANSITIONS.get((before, to))
    if step is None:
        history = " -> ".join((*part.history, before, to))
        raise IllegalTransitionError(f"part {part.job}/{part.attempt} at {site.cluster}: {history}")
    part.history = (*part.history, before)[-HISTORY_LENGTH:]
    if to in LEASED and before not in LEASED:
        part.claimed_s = now_s
    part.state, part.since_s = to, now_s
    if detail:
        part.detail = detail
    if to in _REPORTED:
        part.reported = _REPORTED[to]
    site.devices.record_transition(part, before, to)
    step(site, part)
    site.mark_changed(part)


def fail_part(site: SiteState, part: SitePart, fault: FailureCause, now_s: float, detail: str) -> None:
    """Move a part to `failed` with a reason."""
    part.fault = fault
    move_part(site, part, "failed", now_s, detail)


def release_part(site: SiteState, part: SitePart, now_s: float, detail: str = "") -> None:
    """Start releasing the processes and devices of `part`; idempotent."""
    if part.state in ("running", "succeeded", "failed"):
        move_part(site, part, "stopping", now_s, detail)
    elif part.state in ("queued", "ready", "evicting", "prepared", "refused"):
        move_part(site, part, "released", now_s, detail)


def stop_live_workers(site: SiteState, part: SitePart, *, force: bool) -> None:
    """Stop every live worker of `part`, or kill it with `force`."""
    for rank, worker in part.workers.items():
        if worker.live:
            site.instructions.append(StopWorker(part=part, rank=rank, force=force))


def _do_nothing(_site: SiteState, _part: SitePart) -> None:
    """Do nothing."""


def _start(site: SiteState, part: SitePart) -> None:
    part.has_run_lease = site.run_lease_s > 0 and not part.local
    for rank, worker in part.workers.items():
        worker.live, worker.started, worker.last_write_s = True, True, part.since_s
        site.instructions.append(StartWorker(part=part, rank=rank))


def _stop(site: SiteState, part: SitePart) -> None:
    if part.force_at_s is None and part.live:
        part.force_at_s = part.since_s + site.grace_s(part)
    stop_live_workers(site, part, force=False)


def _clear(_site: SiteState, part: SitePart) -> None:
    """Clear everything but the key and the outcome."""
    part.set_workers({})
    part.force_at_s, part.spec, part.plan = None, None, None
    part.victims, part.evict_at_s = (), None
    part.hold, part.commits, part.held, part.granted_at_s, part.path = "", False, (), None, ""


def _requeue(_site: SiteState, part: SitePart) -> None:
    """Reset a local job for its next run; it keeps its queue position."""
    if part.requeue:
        part.num_preemptions += 1
    part.requeue, part.force_at_s, part.exit_status = False, None, None
    for worker in part.workers.values():
        worker.devices, worker.live, worker.started, worker.exit_status = (), False, False, None


def _forget(site: SiteState, part: SitePart) -> None:
    del site.parts[part.key]


_REPORTED: dict[SitePartState, PartState] = {
    **{state: state for state in get_args(PartState)},
    "evicting": "ready",
}
"""The state reported to the server; a state that is missing here leaves the reported one unchanged."""

_TRANSITIONS: dict[tuple[SitePartState, SitePartState], Callable[[SiteState, SitePart], None]] = {
    ("new", "queued"): _do_nothing,
    ("new", "running"): _do_nothing,
    ("new", "ready"): _do_nothing,
    ("new", "evicting"): _do_nothing,
    ("new", "prepared"): _do_nothing,
    ("new", "refused"): _do_nothing,
    ("new", "failed"): _do_nothing,
    ("new", "released"): _clear,
    ("queued", "ready"): _do_nothing,
    ("queued", "evicting"): _do_nothing,
    ("queued", "prepared"): _do_nothing,
    ("queued", "refused"): _do_nothing,
    ("queued", "running"): _start,
    ("queued", "failed"): _do_nothing,
    ("queued", "released"): _clear,
    ("ready", "evicting"): _do_nothing,
    ("ready", "prepared"): _do_nothing,
    ("ready", "refused"): _do_nothing,
    ("ready", "released"): _clear,
    ("evicting", "prepared"): _do_nothing,
    ("evicting", "refused"): _clear,
    ("evicting", "running"): _start,
    ("evicting", "queued"): _requeue,
    ("evicting", "released"): _clear,
    ("prepared", "running"): _start,
    ("prepared", "released"): _clear,
    ("refused", "released"): _clear,
    ("running", "succeeded"): _do_nothing,
    ("running", "failed"): _stop,
    ("running", "stopping"): _stop,
    ("succeeded", "stopping"): _stop,
    ("failed", "stopping"): _stop,
    ("stopping", "queued"): _requeue,
    ("stopping", "released"): _clear,
    ("released", "forgotten"): _forget,
}
