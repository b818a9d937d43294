"""Local jobs: queued, started in queue order, withdrawn, and requeued after a preemption."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.site.evictions import evict_pool_parts
from isthmus.site.machine_events import LocalJob, ReportLocalExit
from isthmus.site.part_lifecycle import move_part, release_part
from isthmus.site.parts import SitePart, SiteWorker
from isthmus.site.site_queue import queue_order
from isthmus.site.site_state import SiteState


def sync_local_jobs(site: SiteState, jobs: Sequence[LocalJob], unreadable: Sequence[str], now_s: float) -> None:
    """Queue new `jobs`, withdraw those that no longer exist, and report those that ended.

    Jobs in `unreadable` stay unchanged.
    """
    wanted = {*(job.name for job in jobs), *unreadable}
    for name in [
        part.job for part in site.parts.values() if part.local and not part.foreign and part.job not in wanted
    ]:
        withdraw_local_job(site, name, now_s)
    for job in jobs:
        part = site.parts.get((job.name, 0))
        if part is None:
            add_local_job(site, job, now_s)
        elif part.state == "released" and part.exit_status is not None:
            site.instructions.append(ReportLocalExit(part=part, exit_status=part.exit_status))


def add_local_job(site: SiteState, job: LocalJob, now_s: float) -> None:
    """Queue a local job unless it is already known."""
    if site.shutting_down or (job.name, 0) in site.parts:
        return
    part = SitePart(job=job.name, attempt=0, command=job.command)
    part.level, part.preemptible = job.level, job.preemptible
    part.set_workers({0: SiteWorker(node_group=job.node_group, chips=job.chips)})
    site.add(part)
    move_part(site, part, "queued", now_s)


def withdraw_local_job(site: SiteState, name: str, now_s: float) -> None:
    """Release a withdrawn local job; its record is removed once its processes have ended."""
    part = site.parts.get((name, 0))
    if part is not None:
        part.withdrawn, part.requeue = True, False
        release_part(site, part, now_s)
        site.update_indexes(part)


def start_local_jobs(site: SiteState, now_s: float) -> None:
    """Start local jobs in queue order; one that does not fit blocks those behind it in its node group.

    A part of the pool ahead of them reserves the devices that it needs, for at most `hold_back_s` of the
    owner's policy.
    """
    if site.shutting_down or not site.queued_local or not (site.may_start_local or site.policy.hold_back_s):
        return
    site.may_start_local = False
    reserved: dict[str, int] = {}
    blocked: set[str] = set()
    for part in queue_order(site):
        if len(blocked) == len(site.devices.inventory):
            return
        if not part.local:
            _reserve_devices(site, part, reserved, now_s)
            continue
        ((group, num),) = part.wanted.items()
        if group in blocked:
            continue
        if site.devices.num_free(part).get(group, 0) - reserved.get(group, 0) >= num:
            taken = site.devices.claim(part, (), {})
            if taken is not None:
                site.devices.assign(part, taken)
                move_part(site, part, "running", now_s)
        elif reserved.get(group, 0) or not evict_pool_parts(site, part, now_s):
            blocked.add(group)


def _reserve_devices(site: SiteState, part: SitePart, reserved_devices: dict[str, int], now_s: float) -> None:
    """Reserve the devices that a waiting part of the pool needs, within the owner's limit."""
    if now_s - part.since_s >= site.policy.hold_back_s:
        return
    used = site.devices.used_by_pool()
    for group, num in part.wanted.items():
        room = max(0, site.pool_limit(group) - used.get(group, 0))
        reserved_devices[group] = min(reserved_devices.get(group, 0) + num, room)
