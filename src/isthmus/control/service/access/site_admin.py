"""`SiteAdmin`: cordons, drains and removes sites for a caller; each act is in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.sites.site_belongings import site_belongings
from isthmus.control.queries.sites.sole_checkpoints import sole_checkpoints
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.auth import Caller
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import Event, SiteAccepted, SiteCordoned, SiteDraining, SiteLeft
from isthmus.core.errors import ConflictError
from isthmus.core.views.api_views import ClusterView
from isthmus.core.views.site_views import Belonging, DrainRequest, LeaveRequest, LeaveView

if TYPE_CHECKING:
    from isthmus.control.service.access.site_keys import SiteKeys


MAX_NAMED_JOBS = 5
"""Jobs that a refusal names."""


class SiteAdmin:
    """Acts on the membership of sites for a caller whose right was checked; `clock` counts from the epoch."""

    def __init__(self, actor: CoordinatorActor, keys: SiteKeys, audit: AuditLog, clock: Callable[[], float]) -> None:
        self._actor, self._keys, self._audit, self._clock = actor, keys, audit, clock

    def cordon(self, caller: Caller, cluster: str, *, cordoned: bool) -> ClusterView:
        """Close a site to new parts, or open it again; raises the errors of `admit_cordon`."""
        event = SiteCordoned(
            now_s=self._clock(), cluster=cluster, by=caller.name, role=_role(caller), cordoned=cordoned
        )
        return self._act(caller, cluster, event, "site-cordoned" if cordoned else "site-uncordoned")

    def drain(self, caller: Caller, cluster: str, request: DrainRequest) -> ClusterView:
        """Save and stop the jobs of a site, which takes no new ones; raise `NotFoundError` for an unknown one."""
        now_s = self._clock()
        event = SiteDraining(
            now_s=now_s, cluster=cluster, by=caller.name, role=_role(caller), deadline_s=now_s + request.limit_s
        )
        return self._act(caller, cluster, event, "site-draining", f"within {request.limit_s:g} s")

    def leave(self, caller: Caller, cluster: str, request: LeaveRequest) -> LeaveView:
        """Take the next step of a site's leaving: drain it, then its agent ends; return how far it is.

        A site whose agent is silent leaves at once when it has no parts. Raises `NotFoundError` for an unknown site,
        and `ConflictError` for one with the only checkpoints of jobs unless the request discards them.
        """
        now_s = self._clock()
        event = SiteDraining(
            now_s=now_s, cluster=cluster, by=caller.name, role=_role(caller),
            deadline_s=now_s + request.limit_s, leaves=True,
        )  # fmt: skip

        def begin(coordinator: Coordinator) -> Event:
            if not request.discards_checkpoints:
                _refuse_loss(coordinator, cluster)
            return event

        detail = "gives up checkpoints that no other site has" if request.discards_checkpoints else ""
        line = self._audit.line("site-leaving", caller, cluster, detail)
        found = self._actor.propose(begin, lambda coordinator: self._leave_view(coordinator, cluster), line)
        if not found.jobs and self._actor.query(lambda coordinator: _is_silent(coordinator, cluster)):
            self._remove(caller, cluster)
            return found.model_copy(update={"gone": True})
        return found

    def agent_left(self, caller: Caller, cluster: str) -> None:
        """Remove a drained site whose agent has ended; raise `ConflictError` unless it leaves and is empty.

        A site that is gone already is no error: the agent repeats a request whose answer was lost.
        """

        def obstacle(coordinator: Coordinator) -> str:
            record = coordinator.state.clusters.get(cluster)
            if record is None:
                return ""
            if record.drain is None or not record.drain.leaves:
                return "it is not leaving"
            return "it still has parts" if record.parts else ""

        why = self._actor.query(obstacle)
        if why:
            raise ConflictError(f"cluster '{cluster}' cannot leave the pool now: {why}", hint="isthmus site leave")
        self._remove(caller, cluster)

    def _remove(self, caller: Caller, cluster: str) -> None:
        event, keys = SiteLeft(now_s=self._clock(), cluster=cluster), self._keys.key_ids(cluster)
        line = self._audit.line("site-left", caller, cluster, f"keys ended: {', '.join(keys) or 'none'}")
        self._actor.propose(lambda _: event, lambda _: None, line)
        self._keys.end_keys_of(cluster)

    def _leave_view(self, coordinator: Coordinator, cluster: str) -> LeaveView:
        record = coordinator.state.clusters[cluster]
        removed, left = site_belongings(coordinator.state, record)
        removed = (*removed, *self._key_belongings(cluster))
        return LeaveView(
            site=cluster, gone=False, removed=removed, left=(*left, Belonging(kind="audit", name=cluster)),
            jobs=tuple(dict.fromkeys(part.job for part in record.parts.values())),
        )  # fmt: skip

    def _key_belongings(self, cluster: str) -> tuple[Belonging, ...]:
        return tuple(Belonging(kind="key", name=one) for one in self._keys.key_ids(cluster))

    def accept(self, caller: Caller, cluster: str) -> ClusterView:
        """End the probation of a site; raise `NotFoundError` for an unknown one."""
        event = SiteAccepted(now_s=self._clock(), cluster=cluster, by=caller.name)
        return self._act(caller, cluster, event, "site-accepted")

    def _act(self, caller: Caller, cluster: str, event: Event, action: str, detail: str = "") -> ClusterView:
        line = self._audit.line(action, caller, cluster, detail)
        pool = self._actor.propose(lambda _: event, lambda coordinator: coordinator.pool_view(), line)
        return next(one for one in pool.clusters if one.cluster.name == cluster)


def _refuse_loss(coordinator: Coordinator, cluster: str) -> None:
    """Raise `ConflictError` if a site that is not leaving yet has the only checkpoints of jobs."""
    record = coordinator.state.clusters.get(cluster)
    if record is None or (record.drain is not None and record.drain.leaves):
        return
    jobs = sole_checkpoints(coordinator.state, cluster)
    if jobs:
        more = f" and {len(jobs) - MAX_NAMED_JOBS} more" if len(jobs) > MAX_NAMED_JOBS else ""
        raise ConflictError(
            f"cluster '{cluster}' has the only checkpoints of {', '.join(jobs[:MAX_NAMED_JOBS])}{more}",
            hint="drain it and let them train elsewhere or end; --discard-checkpoints gives up what they have trained",
        )


def _is_silent(coordinator: Coordinator, cluster: str) -> bool:
    record = coordinator.state.clusters.get(cluster)  # none: its agent has reported meanwhile that it has ended
    return record is None or not record.connected


def _role(caller: Caller) -> Literal["admin", "owner"]:
    return "admin" if caller.role == "admin" else "owner"
