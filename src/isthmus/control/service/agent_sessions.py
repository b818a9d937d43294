"""`AgentSessions`: applies the reports of site agents and answers them with orders."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from pydantic import ValidationError

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.accepted_output import MAX_NAME_CHARS, accept_output, num_foreign_lines
from isthmus.control.queries.quotas import Quotas, check_cluster_quota
from isthmus.control.queries.sites.invited_size import require_invited_size
from isthmus.control.service.access.agent_lines import check_lines, report_lines
from isthmus.control.service.access.link_keyring import LinkKeyring
from isthmus.control.service.access.output_quota import OutputQuota
from isthmus.control.service.agent_takeover import AgentTakeover
from isthmus.control.service.auth import Caller
from isthmus.control.service.change_feed import ChangeFeed
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.service.dry_run_checks import DryRunChecks
from isthmus.control.service.progress_tracker import ProgressTracker
from isthmus.control.state.events import AgentReported, Event, LogRestored, SiteChecked
from isthmus.control.store.leader_election import LeaderElection
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import ConflictError, InputError, IsthmusError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, StepMetrics
from isthmus.core.pool import Cluster, Pool
from isthmus.core.views.access_views import AuditRecord

FENCE_INTERVAL_S = 60.0
"""Shortest time between two rises of the epoch that the reports of one cluster cause."""
_STARTED = ("running", "succeeded", "failed", "released")
"""States of a part whose workers have their keys or need none."""
FAULT_PAUSE_S = 60.0
"""How long a cluster waits whose report ended in an exception: each costs a rebuild of the state from the log."""
MAX_NODE_GROUPS = 256
"""Largest number of node groups of a cluster."""


class AgentSessions:
    """The server's side of agent sync. `pool_file` is the operator's pool, `clock` returns seconds.

    Answers to the checks of `dry_runs` go there, others to the coordinator. Metrics and logs go to the `store` and are
    announced to `changes`, `progress` and `record_figures`; `leader_election` records which clusters have reported.
    `steady_clock` is never set; it measures leases.
    """

    def __init__(
        self,
        actor: CoordinatorActor,
        store: Store,
        pool_file: Pool | None,
        clock: Callable[[], float],
        changes: ChangeFeed,
        progress: ProgressTracker,
        leader_election: LeaderElection,
        dry_runs: DryRunChecks,
        steady_clock: Callable[[], float] = time.monotonic,
        quotas: Quotas | None = None,
        switch_secret: bytes | None = None,
        record_figures: Callable[[Iterable[StepMetrics]], None] = lambda _: None,
    ) -> None:
        self._steady_clock, self._quotas = steady_clock, quotas
        self._actor, self._store, self._pool_file, self._clock = actor, store, pool_file, clock
        self._changes, self._progress, self._leader_election = changes, progress, leader_election
        self._dry_runs, self._record_figures = dry_runs, record_figures
        self._fence_at_s: dict[str, float] = {}
        self._paused_until_s: dict[str, float] = {}
        self._output_quota = OutputQuota(store.output_size, quotas.output_bytes_per_job) if quotas else None
        self._keyring = LinkKeyring(store, switch_secret)
        self._takeover_lock = threading.Lock()
        self._takeover = AgentTakeover(actor.query(Coordinator.agent_incarnations))

    def on_remote_report(self, event: AgentReported) -> None:
        """Record the agent incarnation of a report that another server applied."""
        with self._takeover_lock:
            self._takeover.record_takeover(event.cluster.name, event.incarnation)

    def on_site_left(self, cluster: str) -> None:
        """Reject further reports of the agent of a site that has left."""
        with self._takeover_lock:
            self._takeover.end(cluster)

    def is_active(self, report: AgentReport) -> bool:
        """Return whether the report is one of the cluster's active agent, not the first one of another."""
        with self._takeover_lock:
            return self._takeover.is_active(report.cluster.name, report.incarnation)

    def owner_of(self, cluster: str) -> str | None:
        """Return the owner of `cluster` by the operator's file, else as its first agent named it."""
        if self._pool_file is not None:
            for known in self._pool_file.clusters:
                if known.name == cluster:
                    return known.owner
        return self._actor.query(lambda coordinator: _joined_owner(coordinator, cluster))

    def check_joining(self, cluster: Cluster) -> None:
        """Raise the errors of a first report for a cluster that joins: size, chips, owner, quota, a name of another."""
        check_cluster(cluster, self._pool_file)
        self._check_quota(cluster)
        registered = self.owner_of(cluster.name)
        if registered not in (None, cluster.owner):
            raise ConflictError(
                f"cluster '{cluster.name}' belongs to another owner", hint="choose another name for the cluster"
            )

    def sync(
        self,
        report: AgentReport,
        on_foreign_lines: Callable[[int], object] = lambda _: None,
        caller: Caller | None = None,
    ) -> AgentOrders:
        """Apply an agent's report and return its orders; `on_foreign_lines` counts output of other sites' ranks.

        What the report says of refusals, and a new agent, are in the audit log with `caller` (`report_lines`).

        Metrics and logs are stored first, so a job that has succeeded has all its output. Raises `InputError`
        for an unknown chip or owner, `AuthError` for an agent other than the enrolled one, `ConflictError` for an agent
        that was replaced, and `UnavailableError` for the first report of an agent that takes over.
        """
        name, now_s, steady_s = report.cluster.name, self._clock(), self._steady_clock()
        self._check_pause(name, steady_s)
        check_cluster(report.cluster, self._pool_file)
        self._check_quota(report.cluster)
        event = AgentReported.from_report(report, now_s)
        self._actor.query(lambda coordinator: coordinator.check_agent(event))
        self._actor.query(lambda coordinator: require_invited_size(coordinator.state, report.cluster))
        registers = not self.is_active(report)
        with self._takeover_lock:
            self._takeover.check(name, report.incarnation)
        if foreign := self._store_output(report, now_s):
            on_foreign_lines(foreign)

        def answer(coordinator: Coordinator) -> AgentOrders:
            coordinator.record_report(name, now_s, report, steady_s=steady_s)
            checks = (*coordinator.preflight_orders(name), *self._dry_runs.orders(name))
            return AgentOrders(
                fence=coordinator.epoch,
                parts=coordinator.orders(name),
                queue=coordinator.site_queue(name),
                preflights=checks,
                drop_copies=coordinator.orphaned_copies(name),
                run_lease_s=coordinator.state.config.run_lease_s,
                opens_listener=coordinator.opens_listener(name),
                peers_to_check=coordinator.peers_to_check(name),
                leaves=coordinator.may_leave(name),
            )

        def lines(coordinator: Coordinator, _event: Event) -> list[AuditRecord]:
            return list(report_lines(coordinator.state, caller, report, event, registers=registers))

        requests = [*self._fence_requests(report, now_s), *self._check_requests(report, now_s, caller)]
        *_, reply = self._actor.execute([*requests, ActorRequest(answer, lambda _: event, lines)])
        try:
            orders: AgentOrders = reply.value()
        except IsthmusError:
            raise
        except Exception:
            self._paused_until_s[name] = steady_s + FAULT_PAUSE_S
            raise
        if not self._leader_election.record_report(name):
            raise UnavailableError(
                "the other servers cannot learn of this report, whose answer would renew its workers' lease",
                hint="report again",
            )
        return self._with_keys(orders, report)

    def _check_pause(self, cluster: str, steady_s: float) -> None:
        """Raise `UnavailableError` for some time after a report of the cluster that could not be handled."""
        left_s = self._paused_until_s.get(cluster, -math.inf) - steady_s
        if left_s > 0:
            raise UnavailableError(
                f"a report of cluster '{cluster}' could not be handled: the next one counts in {left_s:.0f} s",
                hint="this is a bug: please report it with the server's log",
            )
        self._paused_until_s.pop(cluster, None)

    def _with_keys(self, orders: AgentOrders, report: AgentReport) -> AgentOrders:
        """Return `orders` with the keys of each part that is to run and that the site has not started yet."""
        started = {(part.job, part.attempt) for part in report.parts if part.state in _STARTED}
        starting = [one for one in orders.parts if one.desired == "running" and (one.job, one.attempt) not in started]
        if not starting:
            return orders
        keys = [self._keyring.run_keys(one, report.cluster.name) for one in starting]
        return orders.model_copy(update={"run_keys": tuple(one for one in keys if one is not None)})

    def _check_quota(self, cluster: Cluster) -> None:
        """Raise `QuotaError` for a new cluster of an owner with too many; those of the pool file are the operator's."""
        quotas, named = self._quotas, self._pool_file.clusters if self._pool_file else ()
        if quotas is not None and all(one.name != cluster.name for one in named):
            self._actor.query(lambda coordinator: check_cluster_quota(quotas, coordinator.state, cluster))

    def _fence_requests(self, report: AgentReport, now_s: float) -> list[ActorRequest]:
        """Return a request that raises the epoch if the agent has obeyed a later one, at most one per interval."""
        cluster = report.cluster.name
        if not report.fence or now_s - self._fence_at_s.get(cluster, -math.inf) < FENCE_INTERVAL_S:
            return []

        def propose(coordinator: Coordinator) -> Event | None:
            if report.fence <= coordinator.epoch:
                return None
            self._fence_at_s[cluster] = now_s
            return LogRestored(now_s=now_s, fence=report.fence, cluster=cluster)

        return [ActorRequest(lambda _: None, propose)]

    def _check_requests(self, report: AgentReport, now_s: float, caller: Caller | None) -> list[ActorRequest]:
        """Return a request for each of the site's answers to checks, except those of dry runs."""
        cluster = report.cluster.name
        answers = [found for found in report.preflights if not self._dry_runs.add_answer(cluster, found)]
        return [
            ActorRequest(
                lambda _: None,
                lambda _, found=found: SiteChecked(now_s=now_s, cluster=cluster, answer=found),  # type: ignore[misc]
                lambda _, _event, found=found: check_lines(caller, cluster, now_s, found),  # type: ignore[misc]
            )
            for found in answers
        ]

    def _store_output(self, report: AgentReport, now_s: float) -> int:
        """Store the metrics and logs of ranks that the site was ordered to run; return how many others there were."""
        if not (report.metrics or report.logs):
            return 0
        cluster = report.cluster.name
        metrics, logs, num_foreign = self._actor.query(
            lambda coordinator: (
                *accept_output(coordinator.state, cluster, report, now_s),
                num_foreign_lines(coordinator.state, cluster, report),
            )
        )
        self._progress.record_metrics(metrics)
        self._record_figures(metrics)
        if self._output_quota is not None:
            metrics, logs = self._output_quota.admit_metrics(metrics), self._output_quota.admit_logs(logs)
        self._store.append_metrics(metrics)
        self._store.append_logs(logs)
        for job_id in {line.job for line in metrics} | {chunk.job for chunk in logs}:
            self._changes.record_output(job_id)
        return num_foreign


def _joined_owner(coordinator: Coordinator, cluster: str) -> str | None:
    """Return the owner that the cluster's agent has named, None if the cluster has not joined."""
    record = coordinator.state.clusters.get(cluster)
    return record.cluster.owner if record else None


def check_cluster(cluster: Cluster, pool_file: Pool | None) -> None:
    """Raise `InputError` if an agent's cluster is too large, or names a chip or an owner that the pool lacks."""
    if len(cluster.node_groups) > MAX_NODE_GROUPS or len(cluster.region) > MAX_NAME_CHARS:
        raise InputError(
            f"cluster '{cluster.name}' has {len(cluster.node_groups)} node groups, a region of {len(cluster.region)} "
            f"characters; at most {MAX_NODE_GROUPS} and {MAX_NAME_CHARS} are allowed",
            hint="name the groups of equal nodes once in the cluster's file",
        )
    try:
        Pool(
            clusters=(cluster,),
            chips=pool_file.chips if pool_file else (),
            owners=pool_file.owners if pool_file else (),
        )
    except ValidationError as error:
        raise InputError(
            f"cluster '{cluster.name}' does not fit the pool: {error.errors()[0]['msg']}",
            hint="fix the cluster's file, or add the chip or owner to the server's pool file",
        ) from error
